"""Conformance suite of generation engines, run by `april check engine` and by April's own tests.

`suite.py` runs all checks; one module per subject has the checks themselves.
"""

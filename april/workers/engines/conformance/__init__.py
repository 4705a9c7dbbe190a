"""What every generation engine keeps to, whichever it is: run by `april check engine`, and by April's own tests.

`suite.py` has the list of all checks, one module for each subject has the checks themselves.
"""

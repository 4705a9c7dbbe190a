"""Planted faults: a small change of the source for each promise, and the test that must fail because of it.

python -m tests.mutants                  # every mutant against its test
python -m tests.mutants NAME ...         # some of them
python -m tests.mutants --blind          # the whole short form against each: hours

The faults are data: the `*.toml` files beside this one, read by `catalogue`; `runner` plants them in copies.
"""

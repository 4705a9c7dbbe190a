"""Alarms: each is a class in a file of its own in this folder, made an alarm by `@shipped(NAME)` of `alarm.py`; its
docstring is its row in the reference."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")

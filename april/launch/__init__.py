"""Starting the parts of a run, and looking after them. `target.py` says where they may be started."""

from april.registry import Registry

TARGETS = Registry(
    "run.target", "launch target", {"local": "april.launch.target:LocalTarget"}, base="april.launch.target:Target"
)

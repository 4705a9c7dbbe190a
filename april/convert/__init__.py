"""`april convert`: translate another framework's script to a configuration, and list what cannot be translated."""

from april.registry import Registry

FRAMEWORKS = Registry(
    "FRAMEWORK",
    "framework whose scripts are read",
    {
        "trl": "april.convert.trl:TRL",
        "verl": "april.convert.verl:Verl",
        "slime": "april.convert.slime:Slime",
        "openrlhf": "april.convert.openrlhf:OpenRLHF",
    },
    base="april.convert.framework:Framework",
)
"""Frameworks by the name on the command line."""

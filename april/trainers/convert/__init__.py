"""`april convert`: translate another framework's script to a configuration, and list what cannot be translated."""

from april.util.registry import Registry

FRAMEWORKS = Registry(
    "FRAMEWORK",
    "framework whose scripts are read",
    {
        "trl": "april.trainers.convert.trl:TRL",
        "verl": "april.trainers.convert.verl:Verl",
        "slime": "april.trainers.convert.slime:Slime",
        "openrlhf": "april.trainers.convert.openrlhf:OpenRLHF",
    },
    base="april.trainers.convert.framework:Framework",
)
"""Supported frameworks, by their name on the command line of `april convert`."""

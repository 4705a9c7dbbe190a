"""`april convert`: the configuration that says what another framework's script says, and what it cannot say."""

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
"""named on the command line, not in a configuration"""

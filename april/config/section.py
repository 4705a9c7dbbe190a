"""What every section of a configuration is, a frozen table that knows all of its keys, and what several share."""

from pydantic import BaseModel, ConfigDict

CONTEXT_TOKENS = 1 << 20
"""of a prompt, and of a response"""
NAME_OR_FILE = "a name, or a file where it has an ending"
"""marks a text that `april.config.paths` takes for a path in the second case"""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

"""The base class of the configuration's sections, and constants that several of them share."""

from pydantic import BaseModel, ConfigDict

AUTO = "auto"
"""Value of a key that April chooses when a run starts."""
CONTEXT_TOKENS = 1 << 20
"""Longest prompt, and longest response, that any key admits."""
NAME_OR_FILE = "a name, or a file where it has an ending"
"""Marker of a text field that holds a path if its value has a suffix, made absolute by `april.config.loading`, and
otherwise a name."""


class Section(BaseModel):
    """A table of the configuration: frozen, and without other keys than its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

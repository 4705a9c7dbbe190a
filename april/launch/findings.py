"""The results of the checks that are made before a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from april.config import ConfigError
from april.util.errors import NotTried

LABEL_WIDTH = 11
"""Width of a fact's label in the printed lines (characters)."""


@dataclass
class Findings:
    """Results of all checks."""

    facts: dict[str, str] = field(default_factory=dict)
    """Text of each fact about the run, by its label."""
    warnings: list[str] = field(default_factory=list)
    """Sentences about problems that a run may start with."""
    errors: list[str] = field(default_factory=list)
    """Sentences about problems that keep a run from starting, each perhaps followed by a traceback."""

    def run_check(self, check: Callable[..., Any], *arguments) -> Any:
        """Call a check; returns its result, or None after recording its ConfigError or NotTried."""
        try:
            return check(*arguments)
        except NotTried as error:
            self.warnings.append(str(error))
        except ConfigError as error:
            if str(error) not in self.errors:
                self.errors.append(str(error))

    def lines(self) -> list[str]:
        """One entry per fact: its label and text, with further lines of the text indented."""
        indent = "\n" + " " * LABEL_WIDTH
        return [f"{label:{LABEL_WIDTH}}{text}".replace("\n", indent) for label, text in self.facts.items() if text]

    def refuse(self) -> None:
        """Raise ConfigError with the first error, if there is one."""
        if self.errors:
            raise ConfigError(self.errors[0])

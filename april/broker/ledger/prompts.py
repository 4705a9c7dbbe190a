"""The interface of the source of prompts for new groups."""

from typing import Protocol


class Prompts(Protocol):
    """The training prompts in the order in which they are drawn."""

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        """(epoch, row position, int32 token ids) of the first usable prompt from the cursor on; None if exhausted."""

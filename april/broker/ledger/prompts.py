"""Where the prompts of new groups come from."""

from typing import Protocol


class Prompts(Protocol):
    """The training prompts in the order in which they are drawn."""

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        """(epoch, row position, int32 token ids) at the cursor or behind it; None when they are exhausted."""

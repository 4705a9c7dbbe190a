"""The position in the order of a run's prompts, and the prompts that a trainer has submitted."""

from typing import Any

import msgspec


class PromptCursor(msgspec.Struct):
    """Position in the order of prompts, and the prompts that the trainer has submitted."""

    next: tuple[int, int] = (0, 0)
    """(epoch, position in the order of that epoch) of the prompt to draw next."""
    submitted_count: int = 0
    """Prompts that the trainer has submitted so far."""
    submitted: dict[int, Any] = {}
    """Journal reference of each submitted prompt that is still needed, by the prompt's number."""
    images: dict[int, list[str]] = {}
    """Names of the images of each submitted prompt that has some, by the prompt's number."""

    def forget(self, row: int) -> None:
        """Forget submitted prompt number `row`, which will not be needed again; does nothing for a row of the
        dataset."""
        self.submitted.pop(row, None)
        self.images.pop(row, None)

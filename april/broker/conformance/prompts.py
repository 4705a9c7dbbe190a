"""Prompt sources without text, for tests of schedules."""

from april.broker.ledger.ledger import Ledger


class NumberedPrompts:
    """A dataset of `rows` empty prompts, drawn for `epochs` epochs."""

    def __init__(self, rows: int, epochs: int):
        self.rows, self.epochs = rows, epochs

    def draw(self, cursor):
        epoch, row = cursor
        if row >= self.rows:
            epoch, row = epoch + 1, 0
        return None if epoch >= self.epochs else (epoch, row, b"")


class SubmittedPromptsStub:
    """The prompts that were submitted to a ledger."""

    rows = 1 << 30
    """More than are ever submitted."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def draw(self, cursor):
        _, row = cursor
        return (0, row, b"") if row in self.ledger.submitted else None

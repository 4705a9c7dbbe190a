"""Prompts that are numbers."""

from april.broker.ledger.ledger import Ledger


class NumberedPrompts:
    """`rows` prompts, `epochs` times."""

    def __init__(self, rows: int, epochs: int):
        self.rows, self.epochs = rows, epochs

    def draw(self, cursor):
        epoch, row = cursor
        if row >= self.rows:
            epoch, row = epoch + 1, 0
        return None if epoch >= self.epochs else (epoch, row, b"")


class BroughtPrompts:
    """Those that the trainer has brought."""

    rows = 1 << 30
    """never all of them"""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def draw(self, cursor):
        _, row = cursor
        return (0, row, b"") if row in self.ledger.submitted else None

"""Prompts that are numbers."""


class NumberedPrompts:
    """`rows` prompts, `epochs` times."""

    def __init__(self, rows: int, epochs: int):
        self.rows, self.epochs = rows, epochs

    def draw(self, cursor):
        epoch, row = cursor
        if row >= self.rows:
            epoch, row = epoch + 1, 0
        return None if epoch >= self.epochs else (epoch, row, b"")

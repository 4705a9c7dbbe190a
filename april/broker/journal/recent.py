"""The newest records with large rows, in memory: such rows are read once and soon, and the page cache would have them
copied and checked again."""

from collections import deque

from april.broker.ledger.events import Event, Part

KEPT_BYTES = 64 << 20
"""most that stays"""
KEPT_FROM = 16 << 10
"""bytes of a large row"""

Appended = tuple[Event, list[Part], int]
"""and the bytes of the record"""


class RecentRecords:
    def __init__(self) -> None:
        self.records: dict[int, Appended] = {}
        """by position"""
        self._oldest_first: deque[int] = deque()
        self._bytes = 0
        self._unwritten_bytes = 0

    def keep(self, position: int, appended: Appended) -> None:
        """In place of the oldest ones."""
        self.records[position] = appended
        self._oldest_first.append(position)
        self._bytes += appended[2]
        self._unwritten_bytes += appended[2]
        while self._bytes > KEPT_BYTES:
            self._bytes -= self.records.pop(self._oldest_first.popleft())[2]

    def begin_sync(self) -> int:
        """All of them will be written; how many bytes no sync had begun to write."""
        unwritten_bytes, self._unwritten_bytes = self._unwritten_bytes, 0
        return unwritten_bytes

"""In-memory cache of the newest records with large rows.

Such rows are read once, soon after they are written; reading them from the page cache would copy and check them again.
"""

from collections import deque

from april.broker.ledger.events import Event, EventArray

CACHE_BYTES = 64 << 20
"""Most bytes of records kept."""
LARGE_ROW_BYTES = 16 << 10
"""Mean bytes per row from which a record counts as large."""

Appended = tuple[Event, list[EventArray], int]
"""(event, arrays, bytes of the record)."""


class RecentRecords:
    def __init__(self) -> None:
        self.records: dict[int, Appended] = {}
        """Cached records by position."""
        self._oldest_first: deque[int] = deque()
        self._bytes = 0
        self._unwritten_bytes = 0

    def keep(self, position: int, appended: Appended) -> None:
        """Cache a record, and drop the oldest ones beyond `CACHE_BYTES`."""
        self.records[position] = appended
        self._oldest_first.append(position)
        self._bytes += appended[2]
        self._unwritten_bytes += appended[2]
        while self._bytes > CACHE_BYTES:
            self._bytes -= self.records.pop(self._oldest_first.popleft())[2]

    def begin_sync(self) -> int:
        """Bytes of the cached records appended since the last call."""
        unwritten_bytes, self._unwritten_bytes = self._unwritten_bytes, 0
        return unwritten_bytes

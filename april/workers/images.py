"""The images of a worker's samples: fetched from the broker by name, and kept while they take at most HELD_BYTES or a
lease waits for them."""

from collections.abc import Sequence

from april import wire
from april.wire.sockets.broker import BrokerConnection

HELD_BYTES = 512 << 20
"""Most bytes of images that are kept for further samples of their prompts; more only while leases wait for them."""


class SampleImages:
    """Images by name, and the leases that wait for some.

    images = held.of(lease_id, names)           # None: they are on their way
    ready, failed = held.take(received)         # leases whose images have all come, or cannot come
    """

    def __init__(self, connection: BrokerConnection):
        self._connection = connection
        self._held: dict[str, bytes] = {}
        """Images by name, the one used last at the end."""
        self._bytes = 0
        self._waiting: dict[int, Sequence[str]] = {}
        self._asked = set[str]()
        """Names that the broker has been asked for and has not answered."""

    def of(self, lease_id: int, names: Sequence[str]) -> tuple[bytes, ...] | None:
        """The images with these names for the sample of a lease, in order. None if this worker does not hold them all:
        then they are fetched from the broker, and `take` returns the lease once they have come."""
        if all(name in self._held for name in names):
            self._waiting.pop(lease_id, None)
            for name in names:
                self._held[name] = self._held.pop(name)
            return tuple(self._held[name] for name in names)
        self._waiting[lease_id] = names
        self._ask()
        return None

    def take(self, received: wire.Received) -> tuple[list[int], list[int]]:
        """Take an answer of the broker with images. Returns (ids of leases whose images have all arrived, ids of leases
        with an image that the broker cannot read)."""
        lost = set[str]()
        self._asked.clear()
        for name, packed in zip(received.message.names, received.packed, strict=True):
            if not packed.data:
                lost.add(name)
            elif name not in self._held:
                self._held[name] = bytes(packed.data)
                self._bytes += len(packed.data)
        ready = [lease for lease, names in self._waiting.items() if all(name in self._held for name in names)]
        failed = [lease for lease, names in self._waiting.items() if lost.intersection(names)]
        self._make_room()
        for lease in (*ready, *failed):
            self._waiting.pop(lease, None)
        self._ask()
        return ready, failed

    def forget(self, lease_id: int) -> None:
        """Take note that a lease has ended: its images need not be fetched or kept for it."""
        self._waiting.pop(lease_id, None)

    def ask_again(self) -> None:
        """Request all missing images again, because a new session with the broker has begun and the old requests are
        lost."""
        self._asked.clear()
        self._ask()

    def _ask(self) -> None:
        """Ask for the images that some lease waits for, unless an answer is on its way."""
        wanted = dict.fromkeys(name for names in self._waiting.values() for name in names)
        missing = [name for name in wanted if name not in self._held][: wire.MAX_IMAGES_ASKED]
        if missing and not self._asked:
            self._asked = set(missing)
            self._connection.send(wire.FetchImages(missing))

    def _make_room(self) -> None:
        """Drop images that no lease waits for, those used longest ago first, until at most HELD_BYTES are kept."""
        wanted = {name for names in self._waiting.values() for name in names}
        for name in [name for name in self._held if name not in wanted]:
            if self._bytes <= HELD_BYTES:
                return
            self._bytes -= len(self._held.pop(name))

"""Discarded samples that the learner writes down beside those of a step: of each reason the first since the last batch.

They wait for the next delivery, belong to its step from then on, and stay until no learner can go back to it. Kept is
what is told of them, and where the journal has their tokens.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec

from april import wire
from april.broker.journal.files import Reference
from april.broker.ledger.places import places_in

MOST_OF_A_REASON, MOST_OF_A_STEP = 2, 16
"""groups, or stretches of an agent's session"""
MOST_BYTES = 16 << 20
"""of all steps. Beyond that none is added, so that a step that is trained again has those that it had"""


class Discard(msgspec.Struct, array_like=True, frozen=True):
    head: wire.GroupHead
    prompt: Reference
    chunks: list[bytes]
    """of each of its samples, as in `Sample.chunks`"""

    def positions(self) -> Iterator[int]:
        """Of the journal's records that it needs."""
        yield self.prompt[0]
        for chunks in self.chunks:
            yield from (place.record for place in places_in(chunks))


_decoder = msgspec.msgpack.Decoder(Discard)


class Discards:
    def __init__(self) -> None:
        self._of_steps: dict[int, list[bytes]] = {}
        self._waiting: list[bytes] = []
        """for a delivery"""
        self._reasons: Counter[str] = Counter()
        """of those that wait"""
        self._bytes = 0

    def has_room(self, reason: str) -> bool:
        return self._reasons[reason] < MOST_OF_A_REASON and len(self._waiting) < MOST_OF_A_STEP

    def add(self, discard: Discard) -> None:
        packed = msgspec.msgpack.encode(discard)
        if self._bytes + len(packed) <= MOST_BYTES:
            self._reasons[discard.head.discarded] += 1
            self._waiting.append(packed)
            self._bytes += len(packed)

    def deliver(self, step: int) -> None:
        if self._waiting:
            self._of_steps[step] = self._waiting
        self._waiting, self._reasons = [], Counter()

    def forget(self, oldest: int) -> None:
        """Those of the steps before."""
        for step in [step for step in self._of_steps if step < oldest]:
            self._bytes -= sum(map(len, self._of_steps.pop(step)))

    def of(self, step: int) -> list[Discard]:
        return list(map(_decoder.decode, self._of_steps.get(step, ())))

    @property
    def waiting(self) -> list[Discard]:
        return list(map(_decoder.decode, self._waiting))

    def positions(self) -> Iterator[int]:
        """Where the journal holds what may still be asked for."""
        for packed in (*self._waiting, *(one for step in self._of_steps.values() for one in step)):
            yield from _decoder.decode(packed).positions()

    def freeze(self) -> tuple[dict[int, list[bytes]], list[bytes]]:
        return self._of_steps, self._waiting

    def thaw(self, of_steps: dict[int, list[bytes]], waiting: list[bytes]) -> None:
        """What `freeze` has given."""
        self._of_steps, self._waiting = of_steps, waiting
        self._reasons = Counter(_decoder.decode(packed).head.discarded for packed in waiting)
        self._bytes = sum(len(one) for packed in (waiting, *of_steps.values()) for one in packed)

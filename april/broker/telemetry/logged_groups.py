"""Groups that are delivered with a batch for the sample logs, without being part of it: the first discarded ones of
each reason since the last batch, and some held-out ones of each evaluation.

Such a group waits for the next delivery, and belongs to that step from then on, until no learner can restart from
before the step. Only the group's description and the journal references of its tokens are kept.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import msgspec

from april import wire
from april.broker.journal.files import Reference
from april.broker.ledger.chunk_refs import chunk_refs_in

MOST_PER_REASON, MOST_PER_STEP = 2, 16
"""Most discards kept per reason and per step; a discard is a group, or the discarded part of an agent session."""
MOST_HELD_OUT = 8
"""Most held-out prompts of an evaluation set whose samples are kept of each evaluation."""
MOST_HELD_OUT_TOKENS = 1 << 20
"""Most response tokens of the held-out samples of an evaluation set that are kept, all of which come with one batch."""
MOST_BYTES = 16 << 20
"""Most bytes of the groups of all steps together. A group beyond the limit is not kept, rather than an older one
dropped, so that a replayed step has the same groups."""


class LoggedGroup(msgspec.Struct, array_like=True, frozen=True):
    """A discarded group, the discarded part of one, or a held-out group."""

    head: wire.GroupHead
    prompt: Reference
    """Journal reference of the group's prompt."""
    chunks: list[bytes]
    """Packed chunk references of each sample, as in `Sample.chunks`."""
    drawn: tuple[bool, int, int] = (False, 0, -1)
    """(whether the prompt is held out, number of its epoch or, if held out, of its evaluation set, row); row -1 if
    unknown."""

    def positions(self) -> Iterator[int]:
        """Positions of the journal records that hold the group's prompt and tokens."""
        yield self.prompt[0]
        for chunks in self.chunks:
            yield from (ref.record for ref in chunk_refs_in(chunks))


_decoder = msgspec.msgpack.Decoder(LoggedGroup)


class LoggedGroups:
    """The groups kept for the sample logs, by the step with whose batch they are delivered."""

    def __init__(self) -> None:
        self._by_step: dict[int, list[bytes]] = {}
        """Encoded groups, by the step they are delivered with."""
        self._waiting: list[bytes] = []
        """Encoded groups that wait for the next delivery."""
        self._reasons: Counter[str] = Counter()
        """Number of waiting groups by discard reason; "" for held-out ones."""
        self._bytes = 0
        """Bytes of all encoded groups, waiting and assigned to steps."""

    def has_room(self, reason: str) -> bool:
        """Whether another group discarded for this reason may be kept."""
        return self._reasons[reason] < MOST_PER_REASON and len(self._waiting) - self._reasons[""] < MOST_PER_STEP

    def add(self, group: LoggedGroup) -> None:
        packed = msgspec.msgpack.encode(group)
        if self._bytes + len(packed) <= MOST_BYTES:
            self._reasons[group.head.discarded] += 1
            self._waiting.append(packed)
            self._bytes += len(packed)

    def deliver(self, step: int) -> None:
        """Assign the waiting groups to step `step`, whose batch is being delivered."""
        if self._waiting:
            self._by_step[step] = self._waiting
        self._waiting, self._reasons = [], Counter()

    def forget(self, oldest: int) -> None:
        """Drop the groups of steps before `oldest`."""
        for step in [step for step in self._by_step if step < oldest]:
            self._bytes -= sum(map(len, self._by_step.pop(step)))

    def of_step(self, step: int) -> list[LoggedGroup]:
        return list(map(_decoder.decode, self._by_step.get(step, ())))

    @property
    def waiting(self) -> list[LoggedGroup]:
        return list(map(_decoder.decode, self._waiting))

    def positions(self) -> Iterator[int]:
        """Positions of the journal records that the kept groups need."""
        for packed in (*self._waiting, *chain.from_iterable(self._by_step.values())):
            yield from _decoder.decode(packed).positions()

    def images(self) -> Iterator[str]:
        """Names of the images that the kept groups have."""
        for packed in (*self._waiting, *chain.from_iterable(self._by_step.values())):
            head = _decoder.decode(packed).head
            yield from head.images
            yield from (name for sample in head.samples for name, _ in sample.shown_images)

    def freeze(self) -> tuple[dict[int, list[bytes]], list[bytes]]:
        """The kept groups, by step and waiting, for a snapshot of the ledger."""
        return self._by_step, self._waiting

    def thaw(self, by_step: dict[int, list[bytes]], waiting: list[bytes]) -> None:
        """Restore the kept groups from the state that `freeze` returned."""
        self._by_step, self._waiting = by_step, waiting
        self._reasons = Counter(_decoder.decode(packed).head.discarded for packed in waiting)
        self._bytes = sum(map(len, chain(waiting, *by_step.values())))

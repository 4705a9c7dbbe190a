"""Judges a run by its broker's promises and by the journal, which is read without any code of the package."""

import re
import struct
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import msgpack
import orjson

from tests.chaos.run_state import RunState

ROW = struct.Struct("<QdIIIIIIBBBBI")


class Row(NamedTuple):
    """A row of a table of new tokens: `finish` is not 0 where a response or a turn ends, `ends_lease` where its lease
    does."""

    lease_id: int
    time: float
    start: int
    count: int
    branch: int
    step: int
    size: int
    checksum: int
    kind: int
    finish: int
    failed: int
    ends_lease: int
    parent: int


class History:
    """The journal, fact by fact. What is wrong collects in `wrongs`, one sentence each."""

    def __init__(self, run_dir: Path, prompt_rows: int):
        self.run_dir = run_dir
        self.prompt_rows = prompt_rows
        self.state = RunState(run_dir)
        self.wrongs: list[str] = []
        self.drawn: list[tuple[int, int]] = []
        self.sizes: dict[int, int] = {}
        """samples of each training group"""
        self.samples: dict[int, tuple[int, int]] = {}
        """(group, index) by lease token"""
        self.lengths: Counter[tuple[int, int]] = Counter()
        self.ended: set[int] = set()
        self.scored: dict[int, set[int]] = defaultdict(set)
        """indices by group"""
        self.batches: dict[int, list[int]] = {}
        self.reports: set[tuple[str, int]] = set()
        self.consumed = self.frontier = self.oldest = 0
        for event, arrays in self._records():
            take = getattr(self, f"on_{event[0]}", None)
            if take:
                take(*event[1:], **({"arrays": arrays} if arrays else {}))

    def _records(self):
        position = 0
        for path in self.state.segments():
            self.expect(int(path.stem) == position, f"segment {path.name} does not begin at {position}")
            with path.open("rb") as file:
                for synced, checksum, event, *rest in msgpack.Unpacker(file, max_buffer_size=1 << 30):
                    self.expect(zlib.crc32(event, zlib.crc32(synced.to_bytes(8))) == checksum, "an event is damaged")
                    arrays = rest[1::2]
                    self.expect([zlib.crc32(array) for array in arrays] == rest[::2], "an array is damaged")
                    yield msgpack.unpackb(event), arrays
            position += path.stat().st_size

    def expect(self, holds: bool, wrong: str) -> None:
        if not holds:
            self.wrongs.append(wrong)

    # --- facts ----------------------------------------------------------------------------------------------

    def on_GroupOpened(self, group, evaluation, epoch, row, size, *_, arrays=()):
        if not evaluation:
            self.drawn.append((epoch, row))
            self.sizes[group] = size

    def on_Leased(self, lease_id, group, index, *_):
        self.expect(lease_id not in self.samples, f"lease {lease_id} is granted twice")
        self.samples[lease_id] = (group, index)

    def on_RowsAccepted(self, table, payload_bytes, images, arrays):
        [payloads], at = arrays, 0
        self.expect(len(payloads) == payload_bytes, "a table lacks payloads")
        for row in map(Row._make, ROW.iter_unpack(table)):
            payload = payloads[at : at + row.size]
            at += row.size + -row.size % 4
            self.expect(zlib.crc32(payload) == row.checksum, f"a row of lease {row.lease_id} is damaged")
            self.take(row, payload)

    def take(self, row: Row, payload: bytes) -> None:
        sample = self.samples.get(row.lease_id)
        follows = self.lengths[sample] == row.start
        self.expect(follows, f"a chunk at {row.start} of {sample} does not follow what came before")
        self.expect(row.kind == 0 and len(payload) == 8 * row.count, f"a chunk of {sample} lacks tokens")
        self.lengths[sample] = row.start + row.count
        if row.ends_lease:
            self.ended.add(row.lease_id)

    def on_SampleScored(self, lease_id, *_):
        group, index = self.samples[lease_id]
        self.expect(index not in self.scored[group], f"sample {group}.{index} is scored twice")
        self.scored[group].add(index)
        self.ended.add(lease_id)

    def on_LeaseEnded(self, lease_id, *_):
        self.ended.add(lease_id)

    def on_GroupDiscarded(self, group, reason, *_):
        was_held_out = reason == "not_evaluated" and group not in self.sizes
        self.expect(was_held_out, f"group {group} is discarded: {reason}")

    def on_BatchDelivered(self, step, groups, *_):
        self.expect(step == len(self.batches), f"batch {step} is made when {len(self.batches)} is due")
        self.batches[step] = groups

    def on_BatchConsumed(self, step, *_):
        self.expect(step == self.consumed and step in self.batches, f"batch {step} is trained, due is {self.consumed}")
        self.consumed = step + 1
        self.frontier = max(self.frontier, self.consumed)
        self.reports.add(("consumed", step))

    def on_CheckpointDurable(self, step, oldest=0, *_):
        self.oldest = oldest
        self.reports.add(("durable", step))

    def on_LearnerStarted(self, branch, step, *_):
        self.expect(self.oldest <= step <= self.consumed, f"a learner starts at {step} of {self.consumed}")
        self.consumed = step

    # --- verdict --------------------------------------------------------------------------------------------

    def judge(self) -> list[str]:
        """Everything that is wrong with a run that has come to its end."""
        self.judge_promises()
        self.judge_training()
        self.judge_ledger()
        return self.wrongs

    def judge_promises(self) -> None:
        """What was acknowledged is there, and a batch that was handed over again was the same."""
        checksums = {}
        for kind, subject, *value in self.state.promises():
            if kind == "chunk":
                held = self.held(subject)
                self.expect(held >= value[0], f"acknowledged tokens are missing: {held} of {value[0]}, lease {subject}")
            elif kind == "done":
                self.expect(subject in self.ended, f"the acknowledged end of lease {subject} is missing")
            elif kind == "batch":
                self.expect(subject in self.batches, f"batch {subject} was handed over and is missing")
                first, checksum = value
                same = checksums.setdefault((subject, first), checksum) == checksum
                self.expect(same, f"batch {subject} is another one when it is handed over again")
            else:
                self.expect((kind, subject) in self.reports, f"the acknowledged report {kind} {subject} is missing")

    def held(self, lease_id: int) -> int:
        """Tokens of both sides that the journal has of a lease's sample."""
        return self.lengths[self.samples.get(lease_id)]

    def judge_training(self) -> None:
        """No prompt is skipped or drawn twice, no group trained twice, and a replayed step is the same step."""
        rows = self.prompt_rows
        in_order = [(i // rows, i % rows) for i in range(len(self.drawn))]
        self.expect(self.drawn == in_order, "prompts are skipped, or drawn twice")
        trained = Counter(group for groups in self.batches.values() for group in groups)
        self.expect(max(trained.values(), default=0) <= 1, "a group is in two batches")
        for step, groups in self.batches.items():
            whole = all(len(self.scored[group]) == self.sizes[group] for group in groups)
            self.expect(whole, f"batch {step} holds groups that are not complete")
        losses = defaultdict(set)
        log = (self.run_dir / "logs" / "learner.log").read_text(errors="replace")
        for step, loss in re.findall(r"step (\d+) trained in \S+ s, loss (\S+)", log):
            losses[step].add(loss)
        for step, seen in losses.items():
            self.expect(len(seen) == 1, f"batch {step} was trained with different losses: {sorted(seen)}")

    def judge_ledger(self) -> None:
        """The books that the run has closed are the journal's."""
        tokens, discarded = self.books()
        delivered = {group: step for step, groups in self.batches.items() for group in groups}
        expected = Counter(generated=discarded.total(), trained=0, delivered=0, ready=0, open=0, evaluation=0)
        for group, count in tokens.items():
            if group not in self.sizes:
                expected["evaluation"] += count
                continue
            expected["generated"] += count
            if group in delivered:
                expected["trained" if delivered[group] < self.consumed else "delivered"] += count
            else:
                expected["ready" if len(self.scored[group]) == self.sizes[group] else "open"] += count
        summary = orjson.loads((self.run_dir / "summary.json").read_bytes())
        said = {name: summary["tokens"][name] for name in expected}
        self.expect(said == dict(expected), f"the ledger says {said}, the journal {dict(expected)}")
        self.expect(summary["ledger_closed"], "the ledger does not close")
        self.expect(not summary["replays"]["different"], "a replayed step has another loss than its first logging")
        said = Counter(summary["tokens"]["discarded"])
        self.expect(
            said == discarded, f"the ledger says that {dict(said)} are discarded, the journal {dict(discarded)}"
        )
        self.expect(summary["steps"] == self.consumed == len(self.batches), "batches are left over")

    def books(self) -> tuple[Counter, Counter]:
        """Sampled tokens that are kept, by group, and those that are discarded, by reason."""
        kept = Counter()
        for (group, _), length in self.lengths.items():
            kept[group] += length
        return kept, Counter()

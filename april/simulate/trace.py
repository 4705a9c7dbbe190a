"""Length traces: JSON lines with the lengths of one group each, recorded from a run's journal, read by the
simulator."""

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from april.broker.journal import records
from april.broker.journal.files import SUFFIX
from april.broker.journal.snapshot import SnapshotStore, header_of, thaw
from april.broker.ledger.events import AnyEvent, Event, GroupOpened, RowsAccepted, RunStarted
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.config import ConfigError


class TracedGroup(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The lengths of one group: a line of a trace."""

    prompt_tokens: int
    response_tokens: list[int]
    """Response length of each completed sample."""
    max_response_tokens: int = 0
    """Response budget of the run; 0: unknown."""


def read_trace(path: Path) -> list[TracedGroup]:
    """All groups of a trace file. Raises ConfigError for a file that is missing, empty or damaged."""
    if not path.is_file():
        raise ConfigError(f"trace {path} does not exist; record one with `april trace RUN --out {path}`")
    decoder, groups = msgspec.json.Decoder(TracedGroup), []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read ({error.strerror}); mend it, or give another") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            group = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} line {number} is not a group of a trace ({error}); mend or remove it") from None
        if group.prompt_tokens < 0 or not group.response_tokens or min(group.response_tokens) < 1:
            raise ConfigError(f"{path} line {number} has no or empty responses; remove that line")
        groups.append(group)
    if not groups:
        raise ConfigError(f"trace {path} has no group; record one with `april trace` of a run that has trained")
    return groups


def budget_of(groups: list[TracedGroup]) -> int:
    """Response budget of the traced run (tokens); the longest response if that is longer or the budget is unknown."""
    return max(max(group.max_response_tokens, *group.response_tokens) for group in groups)


def write_trace(path: Path, groups: list[TracedGroup]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(group) + b"\n" for group in groups))


# --- recording --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    groups: list[TracedGroup]
    """Groups with all samples completed, in the order of their creation."""
    cut_short: int
    """Number of groups older than the oldest unfinished one that have no complete lengths, since they were discarded or
    lost a sample; mostly groups with long responses."""

    @property
    def censored(self) -> str:
        """Sentence that says how many groups were cut short (`cut_short`), so that long responses may be missing; "" if
        none."""
        if not self.cut_short:
            return ""
        created = len(self.groups) + self.cut_short
        return f"{self.cut_short} of {created} groups were discarded unfinished, so that long responses are missing"


def record_trace(run_dir: Path) -> Recording:
    """Record the lengths of the groups that are older than the run's oldest unfinished group, so that no long response
    is missing.

    Later groups are left out even if they are complete, because among them the complete ones are those with short
    responses. The journal of a long run holds only groups created since its oldest snapshot. Raises ConfigError if
    there is no such group.
    """
    journal = Path(run_dir) / "journal"
    if not journal.is_dir():
        raise ConfigError(f"run folder {run_dir} has no journal; give the folder of a run, such as runs/NAME")
    ledger, position = restore(journal)
    opened: dict[int, GroupOpened] = {}
    lengths: dict[int, dict[int, int]] = {}
    for event in read_events(journal, position):
        match event:
            case RunStarted():
                ledger = Ledger(rules_of(event))
            case GroupOpened(evaluation=False):
                opened[event.group], lengths[event.group] = event, {}
            case RowsAccepted():
                for row in event.rows:
                    sample = ledger.leases[row.lease_id].sample
                    if row.finish:
                        lengths.get(sample.group.id, {})[sample.index] = row.end
        ledger.apply(event)
    complete = {group for group in opened if len(lengths[group]) == opened[group].size}
    generating = (group.id for group in ledger.open_groups() if group.id in opened and group.id not in complete)
    oldest = min(generating, default=math.inf)
    settled = [group for group in opened if group < oldest]
    budget = ledger.rules.max_response_tokens
    groups = [
        TracedGroup(opened[group].prompt_tokens, [lengths[group][index] for index in sorted(lengths[group])], budget)
        for group in settled
        if group in complete
    ]
    if not groups:
        raise ConfigError(
            f"the journal of {run_dir} holds no complete group that is older than all unfinished ones; "
            "let the run go on until it has trained more"
        )
    return Recording(groups, len(settled) - len(groups))


def restore(journal: Path) -> tuple[Ledger, int]:
    """(ledger, position in the journal) as of the oldest snapshot: from there on no journal file is missing. Without a
    snapshot an empty ledger and 0."""
    position, image = [(0, None), *SnapshotStore(journal).newest_first()][-1]
    header = header_of(image) if image else None
    if image is None or header is None:
        return Ledger(Rules(1, 1, 0)), position
    ledger = Ledger(rules_of(header))
    thaw(image, ledger)
    return ledger, position


def recorded_header(journal: Path) -> RunStarted | None:
    """The journal's header event, which has the run's settings, from the run's newest snapshot or else the journal's
    first record; None if there is neither."""
    for _, image in SnapshotStore(journal).newest_first():
        return header_of(image)
    first = next(read_events(journal, 0), None)
    return first if isinstance(first, RunStarted) else None


def rules_of(header: RunStarted) -> Rules:
    return Rules(
        header.batch_groups, header.group_size, header.max_staleness, header.max_attempts, header.min_group_size,
        header.max_response_tokens,
    )  # fmt: skip


def read_events(journal: Path, position: int) -> Iterator[Event]:
    """Yield every event from the journal file at `position` on. Reading ends at an incomplete record, which a live
    broker may still be writing."""
    decoder, offset = msgspec.msgpack.Decoder(AnyEvent), -1
    while offset and (path := journal / f"{position:020d}{SUFFIX}").exists():
        offset = 0
        if size := path.stat().st_size:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                while record := records.decode(view, offset):
                    offset += record.length
                    event = decoder.decode(bytes(record.event))
                    record = None
                    yield event
        position += offset

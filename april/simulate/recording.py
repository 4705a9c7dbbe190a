"""A run's response lengths, read from its journal without touching it: `april trace`."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from april.broker import records
from april.broker.events import AnyEvent, ChunkAccepted, Event, GroupOpened, Leased, ObservationAccepted
from april.config import ConfigError
from april.simulate.trace import TracedGroup


def record_trace(run_dir: Path) -> list[TracedGroup]:
    """The groups of which the journal holds everything and all samples ended; a group that is not complete is left
    out whole, since its short responses ended first. Of a long run these are the newest: older segments are removed."""
    journal = Path(run_dir) / "journal"
    if not journal.is_dir():
        raise ConfigError(f"run folder {run_dir} has no journal; give the folder of a run, such as runs/NAME")
    opened: dict[int, tuple[int, int]] = {}
    sample_of: dict[int, tuple[int, int]] = {}
    lengths: dict[int, dict[int, int]] = {}
    for event in read_events(journal):
        match event:
            case GroupOpened(evaluation=False):
                opened[event.group] = event.prompt_tokens, event.size
            case Leased(scoring=False) if event.group in opened:
                sample_of[event.token] = event.group, event.index
            case ChunkAccepted() | ObservationAccepted() if event.finish_reason and event.token in sample_of:
                group, index = sample_of[event.token]
                lengths.setdefault(group, {})[index] = event.start + event.count
    complete = [group for group in sorted(lengths) if len(lengths[group]) == opened[group][1]]
    if not complete:
        raise ConfigError(f"the journal of {run_dir} holds no complete group; let the run go on until it has trained")
    return [TracedGroup(opened[group][0], [lengths[group][i] for i in sorted(lengths[group])]) for group in complete]


def read_events(journal: Path) -> Iterator[Event]:
    """Every event on disk, the oldest first; of a segment up to what is not whole, which a live broker may write."""
    decoder = msgspec.msgpack.Decoder(AnyEvent)
    for path in sorted(journal.glob("*.msgpack")):
        if not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            offset = 0
            while record := records.decode(data, offset):
                offset += record.length
                event = decoder.decode(bytes(record.event))
                record = None
                yield event

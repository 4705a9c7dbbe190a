"""A run as a trace for Perfetto (https://ui.perfetto.dev): lanes of workers, steps, and the lives of kept samples."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from april.config import ConfigError
from april.report.lanes import make_lanes
from april.report.run_folder import Run
from april.report.samples import files, read_step

LIFE = (
    "step", "group", "index", "reward", "finish_reason", "stays", "chunks", "opened_at", "delivered_at", "discarded_at",
    "discarded", "branch",
)  # fmt: skip
"""columns of kept samples that are read"""
RESOLUTION = 1e5
"""spans of a worker that lie closer than this part of the run are one"""
SEQUENCE = 1
"""all packets are of one writer"""


def export(run: Run, path: Path) -> int:
    """Write the trace; returns how many tracks it has. Raises ConfigError."""
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
    except ImportError:
        raise ConfigError("a trace needs the package perfetto; `pip install 'april-rl[trace]'`") from None
    if not run.steps:
        raise ConfigError(f"{run.path} has no trained step yet; there is nothing to trace")
    writer = Writer(Trace())
    workers = writer.track("workers")
    times = [at for lane in run.lanes for at in (lane["start"], lane["end"])]
    for lane in make_lanes(run.lanes, min(times, default=0.0), max(times, default=0.0), RESOLUTION):
        track = writer.track(lane.worker, workers)
        for kind, spans in lane.spans.items():
            for start, end in spans:
                writer.slice(track if kind == "generate" else writer.track(kind, track), kind, start, end)
        for kind, instants in lane.instants.items():
            for at in instants:
                writer.instant(track, kind, at)
    learner = writer.track("learner")
    for record in run.steps:
        figures = record.get("learner") or {}
        trained_s = figures.get("train_s") or 0.0
        end = record["time"]
        writer.slice(learner, f"step {record['step']}", end - trained_s, end, loss=figures.get("loss"))
    samples = writer.track("samples")
    for step in sorted(files(run.path)):
        of_step = writer.track(f"step {step}", samples)
        for sample in read_step(run.path, step, LIFE):
            draw_life(writer, of_step, sample)
    path.write_bytes(writer.trace.SerializeToString())
    return writer.tracks


def draw_life(writer: "Writer", parent: int, sample: dict[str, Any]) -> None:
    """Where a sample has been, one stretch behind the other; an agent's program on a track below."""
    reward = "without reward" if sample["reward"] is None else f"reward {sample['reward']:.3g}"
    number = f"{sample['group']}.{sample['index']}" + (f"/{sample['branch']}" if sample["branch"] else "")
    name = "  ".join(filter(None, (number, reward, sample["discarded"])))
    track = writer.track(name, parent)
    for chunk in sample["chunks"] or []:
        if chunk["at"]:
            writer.instant(track, f"{chunk['end']} tokens", chunk["at"])
    for kind in ("opened", "delivered", "discarded"):
        if at := sample[f"{kind}_at"]:
            writer.instant(track, kind, at)
    stays = sorted(sample["stays"] or [], key=lambda stay: stay["began"])
    acting = writer.track("agent", track) if any(stay["what"] == "act" for stay in stays) else track
    for stay in stays:
        told = {"how": stay["how"], "from_tokens": stay["start"], "to_tokens": stay["end"]}
        where = acting if stay["what"] == "act" else track
        writer.slice(where, f"{stay['what']} on {stay['where']}", stay["began"], stay["ended"], **told)


class Writer:
    """Packets of a trace; times in Unix seconds."""

    def __init__(self, trace: Any):
        self.trace = trace
        self._ids: Iterator[int] = itertools.count(1)
        self._places: dict[tuple[str, int], int] = {}

    @property
    def tracks(self) -> int:
        return len(self._places)

    def track(self, name: str, parent: int = 0) -> int:
        """The one of that name below `parent`."""
        if (name, parent) not in self._places:
            number = self._places[name, parent] = next(self._ids)
            descriptor = self.trace.packet.add().track_descriptor
            descriptor.uuid, descriptor.name = number, name
            if parent:
                descriptor.parent_uuid = parent
        return self._places[name, parent]

    def slice(self, track: int, name: str, start: float, end: float, **told: Any) -> None:
        event = self._event(track, start, "TYPE_SLICE_BEGIN")
        event.name = name
        for key, value in told.items():
            if value is not None:
                note = event.debug_annotations.add()
                note.name, note.string_value = key, str(value)
        self._event(track, end, "TYPE_SLICE_END")

    def instant(self, track: int, name: str, at: float) -> None:
        self._event(track, at, "TYPE_INSTANT").name = name

    def _event(self, track: int, at: float, kind: str) -> Any:
        packet = self.trace.packet.add()
        packet.timestamp, packet.trusted_packet_sequence_id = int(at * 1e9), SEQUENCE
        packet.track_event.track_uuid = track
        packet.track_event.type = packet.track_event.Type.Value(kind)
        return packet.track_event

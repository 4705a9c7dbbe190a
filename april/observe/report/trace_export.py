"""Export a run: workers, steps and kept samples as a Perfetto trace (https://ui.perfetto.dev), or one trace per sample
to a collector of OpenTelemetry."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from april.config import ConfigError
from april.observe.report.run_folder import RunFolder
from april.observe.report.samples import read_step, sample_files
from april.observe.report.timeline import worker_tracks
from april.util.errors import refuse

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SAMPLE_COLUMNS = (
    "step", "group", "index", "reward", "finish_reason", "spans", "chunks", "opened_at", "delivered_at", "discarded_at",
    "discarded", "fork",
)  # fmt: skip
"""Parquet columns of stored samples that a trace needs."""
RESOLUTION = 1e5
"""Trace resolution: spans of a worker closer together than the run's length divided by this number are merged."""
SEQUENCE = 1
"""Value of `trusted_packet_sequence_id` in all packets of a trace: Perfetto takes packets with one id for one
writer's."""


def export_perfetto(run: RunFolder, path: Path) -> int:
    """Write the trace to `path`; returns its number of tracks. Raises ConfigError."""
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
    except ImportError:
        raise ConfigError("a trace needs the package perfetto; `pip install 'april-rl[trace]'`") from None
    if not run.steps:
        raise ConfigError(f"{run.path} has no trained step yet; there is nothing to trace")
    writer = TraceWriter(Trace())
    workers = writer.track("workers")
    times = [time for event in run.worker_events for time in (event["start"], event["end"])]
    for worker_track in worker_tracks(run.worker_events, min(times, default=0.0), max(times, default=0.0), RESOLUTION):
        track = writer.track(worker_track.worker, workers)
        for kind, spans in worker_track.spans.items():
            for start, end in spans:
                writer.slice(track if kind == "generate" else writer.track(kind, track), kind, start, end)
        for kind, instants in worker_track.instants.items():
            for time in instants:
                writer.instant(track, kind, time)
    learner = writer.track("learner")
    for record in run.steps:
        figures = record.get("learner") or {}
        trained_s = figures.get("train_s") or 0.0
        end = record["time"]
        writer.slice(learner, f"step {record['step']}", end - trained_s, end, loss=figures.get("loss"))
    samples = writer.track("samples")
    for step in sorted(sample_files(run.path)):
        step_track = writer.track(f"step {step}", samples)
        for sample in read_step(run.path, step, SAMPLE_COLUMNS):
            write_sample(writer, step_track, sample)
    path.write_bytes(writer.trace.SerializeToString())
    return writer.tracks


def write_sample(writer: "TraceWriter", parent: int, sample: dict[str, Any]) -> None:
    """Write a sample's track: the spans in which processes held it; those of its agent's program on a track below.
    `parent`: id of the track that is above the sample's."""
    reward = "without reward" if sample["reward"] is None else f"reward {sample['reward']:.3g}"
    number = f"{sample['group']}.{sample['index']}" + (f"/{sample['fork']}" if sample["fork"] else "")
    name = "  ".join(filter(None, (number, reward, sample["discarded"])))
    track = writer.track(name, parent)
    for chunk in sample["chunks"] or []:
        if chunk["at"]:
            writer.instant(track, f"{chunk['end']} tokens", chunk["at"])
    for kind in ("opened", "delivered", "discarded"):
        if time := sample[f"{kind}_at"]:
            writer.instant(track, kind, time)
    spans = sorted(sample["spans"] or [], key=lambda span: span["began"])
    agent_track = writer.track("agent", track) if any(span["what"] == "act" for span in spans) else track
    for span in spans:
        annotations = {"how": span["how"], "from_tokens": span["start"], "to_tokens": span["end"]}
        span_track = agent_track if span["what"] == "act" else track
        writer.slice(span_track, f"{span['what']} on {span['where']}", span["began"], span["ended"], **annotations)


class TraceWriter:
    """Builds the packets of a trace; times are Unix seconds."""

    def __init__(self, trace: Any):
        self.trace = trace
        self._ids: Iterator[int] = itertools.count(1)
        self._track_ids: dict[tuple[str, int], int] = {}

    @property
    def tracks(self) -> int:
        return len(self._track_ids)

    def track(self, name: str, parent: int = 0) -> int:
        """The id of the track `name` below `parent`, created on first use."""
        if (name, parent) not in self._track_ids:
            number = self._track_ids[name, parent] = next(self._ids)
            descriptor = self.trace.packet.add().track_descriptor
            descriptor.uuid, descriptor.name = number, name
            if parent:
                descriptor.parent_uuid = parent
        return self._track_ids[name, parent]

    def slice(self, track: int, name: str, start: float, end: float, **annotations: Any) -> None:
        event = self._event(track, start, "TYPE_SLICE_BEGIN")
        event.name = name
        for key, value in annotations.items():
            if value is not None:
                note = event.debug_annotations.add()
                note.name, note.string_value = key, str(value)
        self._event(track, end, "TYPE_SLICE_END")

    def instant(self, track: int, name: str, time: float) -> None:
        self._event(track, time, "TYPE_INSTANT").name = name

    def _event(self, track: int, time: float, kind: str) -> Any:
        packet = self.trace.packet.add()
        packet.timestamp, packet.trusted_packet_sequence_id = int(time * 1e9), SEQUENCE
        packet.track_event.track_uuid = track
        packet.track_event.type = packet.track_event.Type.Value(kind)
        return packet.track_event


# --- OpenTelemetry ----------------------------------------------------------------------------------------------------

EXAMPLE_ADDRESS = "http://localhost:4318/v1/traces"
ATTRIBUTES = ("step", "group", "index", "reward", "finish_reason", "discarded")
"""Columns of a stored sample that become attributes of the sample's span in OpenTelemetry."""


class SampleIds:
    """OpenTelemetry's `IdGenerator`, seeded by the sample: sending a sample again does not duplicate its trace."""

    def __init__(self) -> None:
        self.chance = random.Random()

    def generate_span_id(self) -> int:
        return self.chance.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self.chance.getrandbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return False


def send_opentelemetry(run: RunFolder, address: str) -> int:
    """Send all kept samples to the collector at `address`, step by step; returns their number. Raises ConfigError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError as error:
        raise ConfigError(f"sending needs the package {error.name}; `pip install 'april-rl[otel]'`") from None
    steps = sorted(sample_files(run.path))
    if not address.startswith(("http://", "https://")):
        refuse("--out", address, "is no http:// address", f"give one like {EXAMPLE_ADDRESS}")
    if not steps:
        raise ConfigError(f"{run.path} has kept no samples; they are kept with samples.every above 0")
    exporter, spans, ids, sent = OTLPSpanExporter(endpoint=address), InMemorySpanExporter(), SampleIds(), 0
    resource = Resource({"service.name": "april-rl", "april.run": run.path.resolve().name})
    provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer(__name__)
    for step in steps:
        for index, sample in enumerate(read_step(run.path, step, SAMPLE_COLUMNS)):
            ids.chance.seed(f"{run.path.resolve().name} {step} {index}")
            sent += record_trace(tracer, sample)
        if exporter.export(spans.get_finished_spans()) is not SpanExportResult.SUCCESS:
            refuse("--out", address, "takes no traces", f"give a collector's, like {EXAMPLE_ADDRESS}")
        spans.clear()
    exporter.shutdown()
    return sent


def record_trace(tracer: "Tracer", sample: dict[str, Any]) -> bool:
    """Record a span from the sample's opening to its delivery, with a child for each time span that a process held it.
    Returns False, and records nothing, if the sample's row has no times."""
    from opentelemetry.trace import INVALID_SPAN, set_span_in_context

    held = sample["spans"] or []
    begins = [sample["opened_at"], *(span["began"] for span in held)]
    ends = [sample["delivered_at"], sample["discarded_at"], *(span["ended"] for span in held)]
    begin, end = min(filter(None, begins), default=0.0), max(filter(None, ends), default=0.0)
    if not begin or not end:
        return False
    attributes = {f"april.{name}": sample[name] for name in ATTRIBUTES if sample[name] is not None}
    root = tracer.start_span(
        "sample", set_span_in_context(INVALID_SPAN), start_time=nanoseconds(begin), attributes=attributes
    )
    context = set_span_in_context(root)
    for each in held:
        attributes = {f"april.{name}": each[name] for name in ("where", "how", "start", "end")}
        span = tracer.start_span(each["what"], context, start_time=nanoseconds(each["began"]), attributes=attributes)
        span.end(nanoseconds(each["ended"]))
    for chunk in sample["chunks"] or []:
        if chunk["at"]:
            root.add_event("chunk", {"april.end": chunk["end"]}, nanoseconds(chunk["at"]))
    root.end(nanoseconds(end))
    return True


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

"""Send the histories of kept samples to a collector as OpenTelemetry traces, one trace per sample.

Traces are made on demand from the files of a run: encoding one takes 0.1 ms of CPU, too much for the broker's loop.
"""

import random
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import INVALID_SPAN, Tracer, set_span_in_context

from april.config import ConfigError
from april.errors import refuse
from april.report.perfetto import SAMPLE_COLUMNS
from april.report.run_folder import RunFolder
from april.report.samples import read_step, sample_files

EXAMPLE = "http://localhost:4318/v1/traces"
ATTRIBUTES = ("step", "group", "index", "reward", "finish_reason", "discarded")
"""Columns of a sample that become attributes of its span."""


class SampleIds(IdGenerator):
    """Ids that are seeded by the sample, so that sending a sample again does not duplicate its trace."""

    def __init__(self) -> None:
        self.chance = random.Random()

    def generate_span_id(self) -> int:
        return self.chance.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self.chance.getrandbits(128) or 1


def send(run: RunFolder, address: str) -> int:
    """Send all kept samples to the collector at `address`, step by step; returns their number. Raises ConfigError."""
    steps = sorted(sample_files(run.path))
    if not address.startswith(("http://", "https://")):
        refuse("--out", address, "is no http:// address", f"give one like {EXAMPLE}")
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
            refuse("--out", address, "takes no traces", f"give a collector's, like {EXAMPLE}")
        spans.clear()
    exporter.shutdown()
    return sent


def record_trace(tracer: Tracer, sample: dict[str, Any]) -> bool:
    """Record a span from the sample's opening to its delivery, with a child for each time span that a process held it.
    Returns False where no times are known."""
    stays = sample["stays"] or []
    begins = [sample["opened_at"], *(stay["began"] for stay in stays)]
    ends = [sample["delivered_at"], sample["discarded_at"], *(stay["ended"] for stay in stays)]
    begin, end = min(filter(None, begins), default=0.0), max(filter(None, ends), default=0.0)
    if not begin or not end:
        return False
    attributes = {f"april.{name}": sample[name] for name in ATTRIBUTES if sample[name] is not None}
    root = tracer.start_span(
        "sample", set_span_in_context(INVALID_SPAN), start_time=nanoseconds(begin), attributes=attributes
    )
    context = set_span_in_context(root)
    for stay in stays:
        attributes = {f"april.{name}": stay[name] for name in ("where", "how", "start", "end")}
        span = tracer.start_span(stay["what"], context, start_time=nanoseconds(stay["began"]), attributes=attributes)
        span.end(nanoseconds(stay["ended"]))
    for chunk in sample["chunks"] or []:
        if chunk["at"]:
            root.add_event("chunk", {"april.end": chunk["end"]}, nanoseconds(chunk["at"]))
    root.end(nanoseconds(end))
    return True


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

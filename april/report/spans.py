"""The lives of kept samples as OpenTelemetry traces, one a sample, sent to a collector.

That is done when it is asked for, from the files of a run: making and encoding them takes 0.1 ms of a processor for a
sample, which the broker's loop has not to spare.
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
from april.report.perfetto import LIFE
from april.report.run_folder import Run
from april.report.samples import files, read_step

EXAMPLE = "http://localhost:4318/v1/traces"
TOLD = ("step", "group", "index", "reward", "finish_reason", "discarded")


class Ids(IdGenerator):
    """Drawn by the sample, so that what is sent twice is there once."""

    def __init__(self) -> None:
        self.chance = random.Random()

    def generate_span_id(self) -> int:
        return self.chance.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self.chance.getrandbits(128) or 1


def send(run: Run, address: str) -> int:
    """To a collector's `address`, step by step; returns how many samples that were. Raises ConfigError."""
    kept = sorted(files(run.path))
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"option '--out' = {address!r} is no http:// address; give one like {EXAMPLE}")
    if not kept:
        raise ConfigError(f"{run.path} has kept no samples; they are kept with samples.every above 0")
    exporter, spans, ids, sent = OTLPSpanExporter(endpoint=address), InMemorySpanExporter(), Ids(), 0
    resource = Resource({"service.name": "april-rl", "april.run": run.path.resolve().name})
    provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer(__name__)
    for step in kept:
        for place, sample in enumerate(read_step(run.path, step, LIFE)):
            ids.chance.seed(f"{run.path.resolve().name} {step} {place}")
            sent += record(tracer, sample)
        if exporter.export(spans.get_finished_spans()) is not SpanExportResult.SUCCESS:
            raise ConfigError(f"option '--out' = {address!r} takes no traces; give a collector's, like {EXAMPLE}")
        spans.clear()
    exporter.shutdown()
    return sent


def record(tracer: Tracer, sample: dict[str, Any]) -> bool:
    """A span from its opening to its delivery, and one below it for each of its stays; False where no time is known."""
    stays = sample["stays"] or []
    begins = [sample["opened_at"], *(stay["began"] for stay in stays)]
    ends = [sample["delivered_at"], sample["discarded_at"], *(stay["ended"] for stay in stays)]
    begin, end = min(filter(None, begins), default=0.0), max(filter(None, ends), default=0.0)
    if not begin or not end:
        return False
    told = {f"april.{name}": sample[name] for name in TOLD if sample[name] is not None}
    whole = tracer.start_span(
        "sample", set_span_in_context(INVALID_SPAN), start_time=nanoseconds(begin), attributes=told
    )
    inside = set_span_in_context(whole)
    for stay in stays:
        told = {f"april.{name}": stay[name] for name in ("where", "how", "start", "end")}
        span = tracer.start_span(stay["what"], inside, start_time=nanoseconds(stay["began"]), attributes=told)
        span.end(nanoseconds(stay["ended"]))
    for chunk in sample["chunks"] or []:
        if chunk["at"]:
            whole.add_event("chunk", {"april.end": chunk["end"]}, nanoseconds(chunk["at"]))
    whole.end(nanoseconds(end))
    return True


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

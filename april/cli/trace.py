"""`april trace`: what a run did, for the simulator, Perfetto or a collector of OpenTelemetry."""

from pathlib import Path

from april.cli.command import RUN, check_writable, command, option


@command(
    option(
        "what",
        nargs="?",
        choices=("lengths", "export", "send"),
        default="lengths",
        help="lengths: response lengths, for the simulator; export: timelines of parts, steps and samples, for "
        "Perfetto; send: a trace of each sample, to a collector of OpenTelemetry [default: lengths].",
    ),
    RUN,
    option(
        "--out",
        required=True,
        help="Destination: a JSONL file for lengths, a trace file for export, or for send the collector's URL, such as "
        "http://HOST:4318/v1/traces.",
    ),
)
def trace(what: str, run: Path, out: str) -> int:
    """Write a run's response lengths (lengths) or timelines (export) to the file --out, or send a trace of each sample
    to the URL --out (send)."""
    if what == "export":
        from april.observe.report.run_folder import read_run
        from april.observe.report.trace_export import export_perfetto

        tracks = export_perfetto(read_run(run), Path(out))
        print(f"{out} has {tracks} tracks; open it at https://ui.perfetto.dev")
    elif what == "send":
        from april.observe.report.run_folder import read_run
        from april.observe.report.trace_export import send_opentelemetry

        print(f"{send_opentelemetry(read_run(run), out)} traces were sent to {out}")
    else:
        write_lengths(run, Path(out))
    return 0


def write_lengths(run: Path, out: Path) -> None:
    from april.simulate.trace import record_trace, write_trace

    check_writable(out)
    recording = record_trace(run)
    lengths = [length for group in recording.groups for length in group.response_tokens]
    write_trace(out, recording.groups)
    print(f"{out}: {len(recording.groups)} groups, {len(lengths)} responses, {sum(lengths):,} tokens")
    if recording.censored:
        print(recording.censored)

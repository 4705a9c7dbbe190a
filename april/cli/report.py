"""`april report`: the report of a run."""

from pathlib import Path

from april.cli.command import RUN, command


@command(RUN)
def report(run: Path) -> int:
    """Write the report of a run, one HTML file in its folder."""
    from april.observe.dashboard.report import write_report

    print(write_report(run))
    return 0

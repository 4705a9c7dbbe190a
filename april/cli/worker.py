"""`april worker`: a generation worker, which takes work from a broker."""

from pathlib import Path

from april.cli.command import CONFIG, CONNECT, NAME, command, joining


@command(CONFIG, CONNECT, NAME, lists_keys=True)
def worker(config: list[Path], connect: str, name: str, overrides: list[str]) -> int:
    """Run one generation worker, without restarts."""
    from april.workers.process import run_worker

    run_worker(*joining(config, connect, overrides), name)

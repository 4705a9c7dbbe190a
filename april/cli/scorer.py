"""`april scorer`: a scorer, which takes work from a broker."""

from pathlib import Path

from april.cli.command import CONFIG, CONNECT, NAME, command, joining


@command(CONFIG, CONNECT, NAME, lists_keys=True)
def scorer(config: list[Path], connect: str, name: str, overrides: list[str]) -> int:
    """Run one scorer, without restarts; for reward.where = 'scorer'."""
    from april.workers.process import run_scorer

    run_scorer(*joining(config, connect, overrides), name)

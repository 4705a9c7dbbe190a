"""`april agents`: an agents process, which takes work from a broker."""

from pathlib import Path

from april.cli.command import CONFIG, CONNECT, NAME, command, joining


@command(CONFIG, CONNECT, NAME, lists_keys=True)
def agents(config: list[Path], connect: str, name: str, overrides: list[str]) -> int:
    """Run one agents process, without restarts; for a configuration that sets keys of [agent]."""
    from april.agents.process import run_agents

    run_agents(*joining(config, connect, overrides), name)

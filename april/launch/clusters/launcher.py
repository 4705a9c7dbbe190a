"""What every place to launch on can do: write what it would submit, submit it, and look after what it has submitted."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from april.config import ConfigError
from april.files.replace import replace_file
from april.launch.clusters.layout import Layout

FOLDER, SUBMITTED = "launch", "submitted.json"
"""in the run's folder: what was written, and what was submitted of it"""
LONGEST_S = 120.0
"""of one command of a cluster's"""


class Launcher:
    """Of one run. `files` says what would be submitted; the others do it, and answer in lines for a terminal."""

    on_network = True
    """whether parts reach each other from other machines, so that keys are needed"""
    sees_files = True
    """whether the paths of the configuration are those of this machine, too"""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.folder = layout.config_file.parent / FOLDER
        self.logs_folder = layout.config_file.parent / "logs"

    def files(self) -> dict[str, str]:
        """Text by file name."""
        raise NotImplementedError

    def submit(self) -> str:
        """What was written to `folder` goes to the cluster; remembered by `remember`."""
        raise NotImplementedError

    def status(self) -> str:
        raise NotImplementedError

    def stop(self) -> str:
        """Ask for an end in order: what is acknowledged is kept, the learner writes a checkpoint."""
        raise NotImplementedError

    def scale(self, workers: int | None) -> str:
        """As many workers as this from now on; more join, fewer hand back what they have. None: as many as before."""
        raise NotImplementedError

    def logs(self, part: str) -> str:
        """The last lines of a part's, or of all."""
        logs = sorted(self.logs_folder.glob(f"{part or '*'}.log"))
        if not logs:
            raise ConfigError(f"run {self.layout.name} has no log of {part or 'any part'} yet; `status` says what runs")
        return "\n".join(f"==> {path}\n{last_lines(path)}" for path in logs)

    def write(self) -> list[Path]:
        """The files, in `folder`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in self.files().items():
            paths.append(self.folder / name)
            paths[-1].parent.mkdir(exist_ok=True)
            replace_file(paths[-1], text.encode())
        return paths

    def remember(self, **facts: object) -> None:
        replace_file(self.folder / SUBMITTED, orjson.dumps(self.remembered() | facts))

    def remembered(self) -> dict:
        path = self.folder / SUBMITTED
        return orjson.loads(path.read_bytes()) if path.is_file() else {}


def last_lines(path: Path, number: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-number:])


def ask(command: Sequence[str], text: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command of the cluster's says. Raises ConfigError with its own words where it fails."""
    try:
        told = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LONGEST_S, env=environment)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed here; run this where the cluster's commands are") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not answer within {LONGEST_S:g} s; is the cluster up?") from None
    if told.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {(told.stderr or told.stdout).strip()}")
    return told.stdout.strip()

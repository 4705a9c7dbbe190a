"""Interface of the launchers: write the files to be submitted, submit them, and operate the submitted run."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from april.config import ConfigError
from april.files.replace import replace_file
from april.launch.clusters.layout import ClusterLayout

FOLDER, SUBMITTED = "launch", "submitted.json"
"""Folder in the run folder for the submitted files, and the file in it that records what was submitted."""
COMMAND_TIMEOUT_S = 120.0
"""Timeout of one command of the cluster."""


class Launcher:
    """Launches one run. `files` returns what would be submitted; the other methods act, and return lines for a
    terminal."""

    on_network = True
    """Whether parts run on several machines, so that keys are required."""
    sees_files = True
    """Whether the cluster sees this machine's files under the same paths."""

    def __init__(self, layout: ClusterLayout):
        self.layout = layout
        self.folder = layout.config_file.parent / FOLDER
        self.logs_folder = layout.config_file.parent / "logs"

    def files(self) -> dict[str, str]:
        """Content of each file to be submitted, by file name."""
        raise NotImplementedError

    def submit(self) -> str:
        """Submit the files in `folder`, and record the ids of what was submitted with `remember`."""
        raise NotImplementedError

    def status(self) -> str:
        raise NotImplementedError

    def stop(self) -> str:
        """Stop the run in order: acknowledged samples are kept, the learner writes a checkpoint."""
        raise NotImplementedError

    def scale(self, workers: int | None) -> str:
        """Change the number of workers; removed ones return their samples. None: restore the number last asked for."""
        raise NotImplementedError

    def logs(self, part: str) -> str:
        """Last lines of the log of one part, or of all parts if `part` is empty. Raises ConfigError if there is
        none."""
        logs = sorted(self.logs_folder.glob(f"{part or '*'}.log"))
        if not logs:
            raise ConfigError(f"run {self.layout.name} has no log of {part or 'any part'} yet; `status` says what runs")
        return "\n".join(f"==> {path}\n{last_lines(path)}" for path in logs)

    def write(self) -> list[Path]:
        """Write all files into `folder`; returns their paths."""
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in self.files().items():
            paths.append(self.folder / name)
            paths[-1].parent.mkdir(exist_ok=True)
            replace_file(paths[-1], text.encode())
        return paths

    def remember(self, **facts: object) -> None:
        """Add facts to the record of what was submitted."""
        replace_file(self.folder / SUBMITTED, orjson.dumps(self.remembered() | facts))

    def remembered(self) -> dict:
        path = self.folder / SUBMITTED
        return orjson.loads(path.read_bytes()) if path.is_file() else {}


def last_lines(path: Path, count: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def ask(command: Sequence[str], text: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Output of a command of the cluster. Raises ConfigError with the command's own message if it fails."""
    try:
        result = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=environment
        )
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed here; run this where the cluster's commands are") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not answer within {COMMAND_TIMEOUT_S:g} s; is the cluster up?") from None
    if result.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout.strip()

"""Common to all launchers: resources and commands of a run's parts, and the interface to submit and operate a run."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from april.config import Config, ConfigError
from april.util.errors import refuse
from april.util.files import replace_file
from april.util.registry import FOLDERS_VARIABLE
from april.workers.engines.entry import devices_wanted

# --- layout -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterLayout:
    """Resources and commands of the parts of one run."""

    config: Config
    config_file: Path
    """Path of the resolved configuration in the run folder, the same on every machine."""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def ranks_a_node(self) -> int:
        return self.config.learner.ranks // self.config.launch.learner_nodes

    @property
    def learner_accelerators(self) -> int:
        """Accelerators on each of the learner's machines."""
        return devices_wanted(self.config)[0] // self.config.launch.learner_nodes

    @property
    def worker_accelerators(self) -> int:
        return devices_wanted(self.config)[1]

    @property
    def counts(self) -> dict[str, int]:
        """Number of processes of each role that connects to the broker, without the learner; roles without any are left
        out."""
        config = self.config
        counts = {"worker": config.worker.count, "scorer": config.scorers, "agents": config.agents}
        return {role: count for role, count in counts.items() if count}

    def broker(self, bind: str) -> str:
        """Command of the broker, listening at `bind`."""
        return shell_command("april", "part", "broker", self.config_file, f"--broker.bind={bind}")

    def learner(self, broker: str, node: str) -> str:
        """Command of the learner on one machine. `broker` and `node` are inserted unquoted, so that a shell may expand
        them."""
        nodes = self.config.launch.learner_nodes
        node_options = f" --nodes {nodes} --node {node}" if nodes > 1 else ""
        return shell_command("april", "part", "learner", self.config_file) + f" --connect {broker}{node_options}"

    def holder(self, role: str, broker: str, name: str) -> str:
        """Command of a worker, scorer or agents process. `broker` (an address or the run folder) and `name` are
        inserted unquoted, so that a shell may expand them."""
        return shell_command("april", "part", role, self.config_file) + f" --connect {broker} --name {name}"

    def own_modules(self) -> list[Path]:
        """Files of user modules that the configuration names, found in `run.parts` or in the import folders that this
        process has inherited."""
        names = re.findall(r"([\w.]+):[A-Za-z_]\w*", self.config.to_toml())
        inherited = [Path(folder) for folder in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
        folders = [*self.config.run.parts, *inherited]
        files = [folder / f"{name}.py" for name in dict.fromkeys(names) for folder in folders]
        first = {file.name: file for file in reversed(files) if file.is_file()}
        return sorted(first.values())

    def preparations(self) -> list[str]:
        """Shell lines before a part's command: PATH of this April, `launch.setup`, and environment variables."""
        launch = self.config.launch
        variables = {FOLDERS_VARIABLE: os.environ.get(FOLDERS_VARIABLE, "")} | launch.environment
        here = shlex.quote(str(Path(sys.executable).parent))
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if value]
        return [f"export PATH={here}:$PATH", *launch.setup, *exports]


def shell_command(*parts: str | Path) -> str:
    return shlex.join(map(str, parts))


def check_launch(config: Config, needs_keys: bool) -> None:
    """Raises ConfigError for a configuration that cannot be launched. `needs_keys`: the parts run on several machines,
    and this machine cannot write the run's folder, so that the user has to make the keys before."""
    launch, ranks = config.launch, config.learner.ranks
    if config.devices.share:
        refuse(
            "devices.share",
            True,
            "is for `april run`, and each part of a launched run is given accelerators of its own",
            "leave it out, or use `april run` on the machine",
        )
    if ranks % launch.learner_nodes:
        refuse(
            "launch.learner_nodes",
            launch.learner_nodes,
            f"does not divide learner.ranks = {ranks}",
            "every machine gets as many ranks: change one of them",
        )
    if needs_keys and not isinstance(config.security.keys, Path):
        refuse(
            "security.keys",
            config.security.keys,
            "names no keys, and on several machines the broker listens on the network",
            "make keys with `april keygen KEYS` and set security.keys = 'KEYS'",
        )


# --- launchers --------------------------------------------------------------------------------------------------------

FOLDER, SUBMITTED = "launch", "submitted.json"
"""Folder in the run folder for the submitted files, and the file in it that records what was submitted."""
COMMAND_TIMEOUT_S = 120.0
"""Time limit of one command of the cluster, such as `kubectl`, seconds."""


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

    @property
    def _run_dir(self) -> str:
        """The run folder, quoted for a shell."""
        return shlex.quote(str(self.folder.parent))

    def files(self) -> dict[str, str]:
        """Content of each file to be submitted, by file name."""
        raise NotImplementedError

    def submit(self) -> str:
        """Submit the files in `folder`, and record the ids of what was submitted with `remember`; returns lines for a
        terminal."""
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
        """Last lines of the log of one part, or of all parts if `part` is empty. Raises ConfigError if there is no
        log."""
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
        """Add facts, such as job ids, to the record of what was submitted: a JSON file in `folder`."""
        replace_file(self.folder / SUBMITTED, orjson.dumps(self.remembered() | facts))

    def remembered(self) -> dict:
        path = self.folder / SUBMITTED
        return orjson.loads(path.read_bytes()) if path.is_file() else {}

    def submitted(self, key: str) -> Any:
        """The fact `key` in the record of what was submitted (`remember`). Raises ConfigError if the record has no such
        fact."""
        if key not in self.remembered():
            raise ConfigError(
                f"run {self.layout.name} has not been submitted from this folder; `april launch` does that"
            )
        return self.remembered()[key]


def last_lines(path: Path, count: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def ask(command: Sequence[str], text: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command of the cluster and return its output. `text`: its standard input; `environment`: its environment,
    None for this process's. Raises ConfigError with the command's own message if it fails."""
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

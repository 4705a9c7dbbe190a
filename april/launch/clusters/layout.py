"""Resources and commands of a run's parts, the same for every launcher."""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from april.config import Config
from april.errors import refuse
from april.registry import FOLDERS_VARIABLE
from april.workers.engines.devices import devices_wanted


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
        return words("april", "part", "broker", self.config_file, f"--broker.bind={bind}")

    def learner(self, broker: str, node: str) -> str:
        """Command of the learner on one machine. `broker` and `node` are inserted unquoted, so that a shell may expand
        them."""
        nodes = self.config.launch.learner_nodes
        node_options = f" --nodes {nodes} --node {node}" if nodes > 1 else ""
        return words("april", "part", "learner", self.config_file) + f" --connect {broker}{node_options}"

    def holder(self, role: str, broker: str, name: str) -> str:
        """Command of a worker, scorer or agents process. `broker` and `name` are inserted unquoted."""
        return words("april", "part", role, self.config_file) + f" --connect {broker} --name {name}"

    def own_modules(self) -> list[Path]:
        """Files of user modules that the configuration names, found in `run.parts` or inherited folders."""
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


def words(*parts: str | Path) -> str:
    return shlex.join(map(str, parts))


def check(config: Config, on_network: bool) -> None:
    """Raises ConfigError for a configuration that cannot be launched. `on_network`: the parts run on several
    machines."""
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
    if on_network and config.security.keys is None:
        refuse(
            "security.keys",
            None,
            "is not set, and on several machines the broker listens on the network",
            "make keys with `april keygen KEYS` and set security.keys = 'KEYS'",
        )

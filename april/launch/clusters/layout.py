"""What a run needs of a cluster, and the command of each of its parts, the same wherever it is launched."""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from april.config import Config, ConfigError
from april.registry import FOLDERS
from april.workers.engines.devices import wanted


@dataclass(frozen=True)
class Layout:
    config: Config
    config_file: Path
    """the resolved configuration in the run's folder, under the path by which every part finds it"""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def ranks_a_node(self) -> int:
        return self.config.learner.ranks // self.config.launch.learner_nodes

    @property
    def learner_accelerators(self) -> int:
        """Of each of its machines."""
        return wanted(self.config)[0] // self.config.launch.learner_nodes

    @property
    def worker_accelerators(self) -> int:
        return wanted(self.config)[1]

    @property
    def counts(self) -> dict[str, int]:
        """Processes of each role that join the broker, the learner left out, by role."""
        config = self.config
        counts = {"worker": config.worker.count, "scorer": config.scorers, "agents": config.agents}
        return {role: count for role, count in counts.items() if count}

    def broker(self, bind: str) -> str:
        return words("april", "part", "broker", self.config_file, f"--broker.bind={bind}")

    def learner(self, broker: str, node: str) -> str:
        """On one of its machines. `broker` and `node` are put in as they are, for a shell to expand."""
        nodes = self.config.launch.learner_nodes
        apart = f" --nodes {nodes} --node {node}" if nodes > 1 else ""
        return words("april", "part", "learner", self.config_file) + f" --connect {broker}{apart}"

    def holder(self, role: str, broker: str, name: str) -> str:
        """A worker, a scorer or an agents process."""
        return words("april", "part", role, self.config_file) + f" --connect {broker} --name {name}"

    def own_modules(self) -> list[Path]:
        """Files with parts of somebody's own that the configuration names and that lie where it looks for them."""
        names = re.findall(r"([\w.]+):[A-Za-z_]\w*", self.config.to_toml())
        inherited = [Path(folder) for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]
        folders = [*self.config.run.parts, *inherited]
        files = [folder / f"{name}.py" for name in dict.fromkeys(names) for folder in folders]
        first = {file.name: file for file in reversed(files) if file.is_file()}
        return sorted(first.values())

    def preparations(self) -> list[str]:
        """Lines of shell before a part: this April, the user's own setup, and where parts of somebody's own are."""
        launch = self.config.launch
        variables = {FOLDERS: os.environ.get(FOLDERS, "")} | launch.environment
        here = shlex.quote(str(Path(sys.executable).parent))
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if value]
        return [f"export PATH={here}:$PATH", *launch.setup, *exports]


def words(*parts: str | Path) -> str:
    return shlex.join(map(str, parts))


def check(config: Config, on_network: bool) -> None:
    """Refuse what no cluster could do; `on_network`: its parts are on several machines. Raises ConfigError."""
    launch, ranks = config.launch, config.learner.ranks
    if config.devices.share:
        raise ConfigError(
            "key 'devices.share' = true is for `april run`, and each part of a launched run is given accelerators of "
            "its own; leave it out, or use `april run` on the machine"
        )
    if ranks % launch.learner_nodes:
        raise ConfigError(
            f"key 'launch.learner_nodes' = {launch.learner_nodes} does not divide learner.ranks = {ranks}; every "
            "machine gets as many ranks: change one of them"
        )
    if on_network and config.security.keys is None:
        raise ConfigError(
            "key 'security.keys' is not set, and on several machines the broker listens on the network; make keys "
            "with `april keygen KEYS` and set security.keys = 'KEYS'"
        )

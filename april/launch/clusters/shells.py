"""Machines with a shell: this one, or several over ssh. Each part is one process group, ended by its own number."""

import shlex
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress

from april.config import ConfigError
from april.launch.clusters.launcher import Launcher, ask
from april.words import counted

BROKER, LEARNER, WORKER = "broker", "learner", "worker"
RUNS, ENDED, SILENT = "runs", "has ended", "is not known: the machine does not answer"


class Shells(Launcher):
    """The run's folder lies where all machines see it under one path. `april part` restarts what dies on each."""

    hosts: list[str]
    """the first has the broker; the learner's come before those of workers"""

    def shell(self, host: str) -> list[str]:
        """A command that reads a script from its standard input, on that machine."""
        raise NotImplementedError

    def bind(self) -> str:
        raise NotImplementedError

    @property
    def first_address(self) -> str:
        """Of the first machine, for the others."""
        raise NotImplementedError

    def places(self) -> Iterator[tuple[str, str, str]]:
        """(part, machine, command) of all that is started first."""
        layout, launch = self.layout, self.layout.config.launch
        yield BROKER, self.hosts[0], layout.broker(self.bind())
        for node in range(launch.learner_nodes):
            part = f"{LEARNER}-{node}" if launch.learner_nodes > 1 else LEARNER
            yield part, self.hosts[node], layout.learner(self._run_dir, str(node))
        for role, count in layout.counts.items():
            for index in range(count):
                yield self._holder(role, index)

    def _holder(self, role: str, index: int, but: Collection[str] = ()) -> tuple[str, str, str]:
        """`but`: machines that get none."""
        others = self.hosts[self.layout.config.launch.learner_nodes :] or self.hosts
        answering = [host for host in others if host not in but]
        if not answering:
            raise ConfigError(f"no machine for a {role} answers: {', '.join(others)}")
        name = f"{role}-{index}"
        return name, answering[index % len(answering)], self.layout.holder(role, self._run_dir, name)

    @property
    def _run_dir(self) -> str:
        return shlex.quote(str(self.folder.parent))

    def files(self) -> dict[str, str]:
        return {f"{part}.sh": self._script(part, host, command) for part, host, command in self.places()}

    def _script(self, part: str, host: str, command: str) -> str:
        """Starts the part, tells its process number, and leaves it alone."""
        lines = [f"# {part} of April's run {self.layout.name}, on {host}", "set -eu", *self.layout.preparations()]
        lines += [
            f"mkdir -p {shlex.quote(str(self.logs_folder))}",
            f"setsid nohup {command} >>{shlex.quote(str(self.logs_folder / f'{part}.log'))} 2>&1 </dev/null &",
            "echo $!",
        ]
        return "\n".join(lines) + "\n"

    def submit(self) -> str:
        for part, host, command in self.places():
            self._start(part, host, command)
        return "\n".join(f"{part:12} {host}, process {number}" for part, (host, number) in self._started.items())

    def _start(self, part: str, host: str, command: str) -> None:
        number = ask(self.shell(host), self._script(part, host, command))
        self.remember(parts=self._started | {part: [host, int(number)]})

    @property
    def _started(self) -> dict[str, tuple[str, int]]:
        return self.remembered().get("parts", {})

    def status(self) -> str:
        return "\n".join(
            f"{part:12} {host}, process {number} {self._state(part)}" for part, (host, number) in self._started.items()
        )

    def _state(self, part: str) -> str:
        host, number = self._started[part]
        try:
            return ask(self.shell(host), f"kill -0 {number} 2>/dev/null && echo {RUNS} || echo '{ENDED}'")
        except ConfigError:
            return SILENT

    def _end(self, part: str) -> None:
        host, number = self._started[part]
        ask(self.shell(host), f"kill -TERM {number} 2>/dev/null || true")

    def stop(self) -> str:
        """The broker ends the run in order; workers that have not reached it yet would wait for it."""
        if BROKER not in self._started:
            raise ConfigError(
                f"run {self.layout.name} has not been launched from this folder; `april launch` does that"
            )
        self._end(BROKER)
        for part in self._started:
            if part != BROKER and not part.startswith(LEARNER):
                with suppress(ConfigError):  # its machine does not answer: without a broker its parts end by themselves
                    self._end(part)
        return "the run is stopping: the learner writes a checkpoint, then all parts end"

    def scale(self, workers: int | None) -> str:
        workers = self.layout.config.worker.count if workers is None else workers
        states = {part: self._state(part) for part in self._started if part.startswith(f"{WORKER}-")}
        running = [part for part, state in states.items() if state == RUNS]
        silent = {self._started[part][0] for part, state in states.items() if state == SILENT}
        for part in running[workers:]:
            self._end(part)
        next_index = max((int(part.removeprefix(f"{WORKER}-")) for part in states), default=-1) + 1
        for index in range(max(0, workers - len(running))):
            self._start(*self._holder(WORKER, next_index + index, but=silent))
        return counted(workers, "worker")


class Local(Shells):
    """This machine alone."""

    on_network = False
    hosts = ["localhost"]  # noqa: RUF012
    first_address = "127.0.0.1"

    def shell(self, host: str) -> list[str]:
        return ["bash", "-s"]

    def bind(self) -> str:
        return self.layout.config.broker.bind


class SSH(Shells):
    """`launch.hosts`, to which ssh lets this user in without asking."""

    @property
    def hosts(self) -> list[str]:  # type: ignore[override]
        hosts, nodes = self.layout.config.launch.hosts, self.layout.config.launch.learner_nodes
        if len(hosts) < nodes:
            raise ConfigError(
                f"key 'launch.hosts' names {len(hosts)} machines, and launch.learner_nodes = {nodes}; name as many"
            )
        return hosts

    def shell(self, host: str) -> list[str]:
        return [*self.layout.config.launch.ssh, host, "bash", "-s"]

    def bind(self) -> str:
        return f"tcp://{self.first_address}:{self.layout.config.launch.port}"

    @property
    def first_address(self) -> str:
        host = self.hosts[0].rpartition("@")[2]
        try:
            return socket.gethostbyname(host)
        except OSError:
            raise ConfigError(
                f"key 'launch.hosts' begins with {host!r}, which has no address here; name it as the others reach it"
            ) from None

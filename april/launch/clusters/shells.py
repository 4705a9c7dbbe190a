"""Machines with a shell: this one, or several over ssh. Each part is one process group, ended by its own number."""

import shlex
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from april.config import ConfigError
from april.launch.clusters.launcher import Launcher, ask
from april.words import counted

BROKER, LEARNER, WORKER = "broker", "learner", "worker"
RUNS, ENDED, SILENT = "runs", "has ended", "is not known: the machine does not answer"


@dataclass(frozen=True)
class Place:
    """Of a part that is started, or has been."""

    host: str
    accelerators: range
    """of that machine's, from 0; of no other part that runs there"""
    number: int = 0
    """of its process"""


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

    def places(self) -> dict[str, Place]:
        """Of all that is started first, by part."""
        layout, launch = self.layout, self.layout.config.launch
        places = {BROKER: Place(self.hosts[0], range(0))}
        for node in range(launch.learner_nodes):
            part = f"{LEARNER}-{node}" if launch.learner_nodes > 1 else LEARNER
            places[part] = Place(self.hosts[node], range(layout.learner_accelerators))
        for role, count in layout.counts.items():
            for index in range(count):
                places[f"{role}-{index}"] = self._place(role, index, places.values())
        return places

    def _place(self, role: str, index: int, others: Collection[Place], but: Collection[str] = ()) -> Place:
        """Of one more, beside others; `but`: machines that get none."""
        hosts = self.hosts[self.layout.config.launch.learner_nodes :] or self.hosts
        answering = [host for host in hosts if host not in but]
        if not answering:
            raise ConfigError(f"no machine for a {role} answers: {', '.join(hosts)}")
        host, wanted = answering[index % len(answering)], self.layout.worker_accelerators if role == WORKER else 0
        return Place(host, first_free([other.accelerators for other in others if other.host == host], wanted))

    def _command(self, part: str, place: Place) -> str:
        role, _, index = part.partition("-")
        if role == BROKER:
            return self.layout.broker(self.bind())
        if role == LEARNER:
            command = self.layout.learner(self._run_dir, index)
        else:
            command = self.layout.holder(role, self._run_dir, part)
        seen = place.accelerators
        return command + (f" --accelerators {seen.start}:{seen.stop}" if seen else "")

    @property
    def _run_dir(self) -> str:
        return shlex.quote(str(self.folder.parent))

    def files(self) -> dict[str, str]:
        return {f"{part}.sh": self._script(part, place) for part, place in self.places().items()}

    def _script(self, part: str, place: Place) -> str:
        """Starts the part, tells its process number, and leaves it alone."""
        lines = [f"# {part} of April's run {self.layout.name}, on {place.host}", "set -eu"]
        lines += self.layout.preparations()
        log = shlex.quote(str(self.logs_folder / f"{part}.log"))
        lines += [
            f"mkdir -p {shlex.quote(str(self.logs_folder))}",
            f"setsid nohup {self._command(part, place)} >>{log} 2>&1 </dev/null &",
            "echo $!",
        ]
        return "\n".join(lines) + "\n"

    def submit(self) -> str:
        for part, place in self.places().items():
            self._start(part, place)
        return "\n".join(f"{part:12} {place.host}, process {place.number}" for part, place in self._started.items())

    def _start(self, part: str, place: Place) -> None:
        number, seen = int(ask(self.shell(place.host), self._script(part, place))), place.accelerators
        parts = self.remembered().get("parts", {})
        self.remember(parts=parts | {part: [place.host, number, seen.start, seen.stop]})

    @property
    def _started(self) -> dict[str, Place]:
        parts = self.remembered().get("parts", {})
        return {part: Place(host, range(*seen or [0]), number) for part, (host, number, *seen) in parts.items()}

    def status(self) -> str:
        return "\n".join(
            f"{part:12} {place.host}, process {place.number} {self._state(place)}"
            for part, place in self._started.items()
        )

    def _state(self, place: Place) -> str:
        try:
            return ask(self.shell(place.host), f"kill -0 {place.number} 2>/dev/null && echo {RUNS} || echo '{ENDED}'")
        except ConfigError:
            return SILENT

    def _end(self, place: Place) -> None:
        ask(self.shell(place.host), f"kill -TERM {place.number} 2>/dev/null || true")

    def stop(self) -> str:
        """The broker ends the run in order; workers that have not reached it yet would wait for it."""
        started = self._started
        if BROKER not in started:
            raise ConfigError(
                f"run {self.layout.name} has not been launched from this folder; `april launch` does that"
            )
        self._end(started[BROKER])
        for part, place in started.items():
            if part != BROKER and not part.startswith(LEARNER):
                with suppress(ConfigError):  # its machine does not answer: without a broker its parts end by themselves
                    self._end(place)
        return "the run is stopping: the learner writes a checkpoint, then all parts end"

    def scale(self, workers: int | None) -> str:
        workers = self.layout.config.worker.count if workers is None else workers
        started = self._started
        states = {part: self._state(place) for part, place in started.items() if part.startswith(f"{WORKER}-")}
        running = [part for part, state in states.items() if state == RUNS]
        silent = {started[part].host for part, state in states.items() if state == SILENT}
        for part in running[workers:]:
            self._end(started[part])
        there = [place for part, place in started.items() if states.get(part) != ENDED]
        next_index = max((int(part.removeprefix(f"{WORKER}-")) for part in states), default=-1) + 1
        for index in range(next_index, next_index + max(0, workers - len(running))):
            there.append(self._place(WORKER, index, there, but=silent))
            self._start(f"{WORKER}-{index}", there[-1])
        return counted(workers, "worker")


def first_free(taken: Iterable[range], count: int) -> range:
    """The first so many numbers in a row, from 0, that are in none of `taken`."""
    begin = 0
    for other in sorted(filter(None, taken), key=attrgetter("start")):
        if begin + count <= other.start:
            break
        begin = max(begin, other.stop)
    return range(begin, begin + count) if count else range(0)


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

"""Launchers through a shell: on this machine, or on several over ssh. Each part is a process group, stopped by its
id."""

import shlex
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from april.config import ConfigError
from april.launch.clusters.launcher import Launcher, ask
from april.util.errors import refuse
from april.util.text import counted

BROKER, LEARNER, WORKER = "broker", "learner", "worker"
RUNS, ENDED, SILENT = "runs", "has ended", "unknown: the machine does not answer"


@dataclass(frozen=True)
class Placement:
    """Host, accelerators and process of a part that is started through a shell."""

    host: str
    accelerators: range
    """Indices of the part's accelerators on the host, which no other part on the host uses."""
    process_id: int = 0
    """Process id of the part; 0 before it is started."""


class Shells(Launcher):
    """Starts parts through a shell. All machines see the run folder under one path; `april part` restarts dead
    parts."""

    hosts: list[str]
    """Machines: the first one runs the broker, the first launch.learner_nodes the learner, the others workers."""

    def shell(self, host: str) -> list[str]:
        """Command that runs a script from its standard input on a machine."""
        raise NotImplementedError

    def bind(self) -> str:
        raise NotImplementedError

    @property
    def first_address(self) -> str:
        """Address of the first machine, as the other machines reach it."""
        raise NotImplementedError

    def placements(self) -> dict[str, Placement]:
        """Placements of all parts at the start of the run, by part."""
        layout, launch = self.layout, self.layout.config.launch
        placements = {BROKER: Placement(self.hosts[0], range(0))}
        for node in range(launch.learner_nodes):
            part = f"{LEARNER}-{node}" if launch.learner_nodes > 1 else LEARNER
            placements[part] = Placement(self.hosts[node], range(layout.learner_accelerators))
        for role, count in layout.counts.items():
            for index in range(count):
                placements[f"{role}-{index}"] = self._next_placement(role, index, placements.values())
        return placements

    def _next_placement(
        self, role: str, index: int, others: Collection[Placement], excluded: Collection[str] = ()
    ) -> Placement:
        """Placement of the part number `index` of a `role`, given those of the `others`; no machine in `excluded` is
        used. Raises ConfigError."""
        hosts = self.hosts[self.layout.config.launch.learner_nodes :] or self.hosts
        answering = [host for host in hosts if host not in excluded]
        if not answering:
            raise ConfigError(f"no machine for a {role} answers: {', '.join(hosts)}")
        host, wanted = answering[index % len(answering)], self.layout.worker_accelerators if role == WORKER else 0
        return Placement(host, first_free([other.accelerators for other in others if other.host == host], wanted))

    def _command(self, part: str, placement: Placement) -> str:
        role, _, index = part.partition("-")
        if role == BROKER:
            return self.layout.broker(self.bind())
        if role == LEARNER:
            command = self.layout.learner(self._run_dir, index)
        else:
            command = self.layout.holder(role, self._run_dir, part)
        seen = placement.accelerators
        return command + (f" --accelerators {seen.start}:{seen.stop}" if seen else "")

    def files(self) -> dict[str, str]:
        return {f"{part}.sh": self._script(part, placement) for part, placement in self.placements().items()}

    def _script(self, part: str, placement: Placement) -> str:
        """Script that starts a part in the background and prints its process id."""
        lines = [f"# {part} of April's run {self.layout.name}, on {placement.host}", "set -eu"]
        lines += self.layout.preparations()
        log = shlex.quote(str(self.logs_folder / f"{part}.log"))
        lines += [
            f"mkdir -p {shlex.quote(str(self.logs_folder))}",
            f"setsid nohup {self._command(part, placement)} >>{log} 2>&1 </dev/null &",
            "echo $!",
        ]
        return "\n".join(lines) + "\n"

    def submit(self) -> str:
        for part, placement in self.placements().items():
            self._start(part, placement)
        return "\n".join(
            f"{part:12} {placement.host}, process {placement.process_id}" for part, placement in self._started.items()
        )

    def _start(self, part: str, placement: Placement) -> None:
        process_id, seen = int(ask(self.shell(placement.host), self._script(part, placement))), placement.accelerators
        parts = self.remembered().get("parts", {})
        self.remember(parts=parts | {part: [placement.host, process_id, seen.start, seen.stop]})

    @property
    def _started(self) -> dict[str, Placement]:
        parts = self.remembered().get("parts", {})
        return {
            part: Placement(host, range(*seen or [0]), process_id) for part, (host, process_id, *seen) in parts.items()
        }

    def status(self) -> str:
        return "\n".join(
            f"{part:12} {placement.host}, process {placement.process_id} {self._state(placement)}"
            for part, placement in self._started.items()
        )

    def _state(self, placement: Placement) -> str:
        try:
            return ask(
                self.shell(placement.host),
                f"kill -0 {placement.process_id} 2>/dev/null && echo {RUNS} || echo '{ENDED}'",
            )
        except ConfigError:
            return SILENT

    def _terminate(self, placement: Placement) -> None:
        ask(self.shell(placement.host), f"kill -TERM {placement.process_id} 2>/dev/null || true")

    def stop(self) -> str:
        """Stop the broker, which ends the run, and the workers, which may still be waiting for the broker."""
        started = self._started
        if BROKER not in started:
            raise ConfigError(
                f"run {self.layout.name} has not been launched from this folder; `april launch` does that"
            )
        self._terminate(started[BROKER])
        for part, placement in started.items():
            if part != BROKER and not part.startswith(LEARNER):
                with suppress(
                    ConfigError
                ):  # a machine that does not answer: its parts end by themselves without a broker
                    self._terminate(placement)
        return "the run is stopping: the learner writes a checkpoint, then all parts end"

    def scale(self, workers: int | None) -> str:
        workers = self.layout.config.worker.count if workers is None else workers
        started = self._started
        states = {part: self._state(placement) for part, placement in started.items() if part.startswith(f"{WORKER}-")}
        running = [part for part, state in states.items() if state == RUNS]
        silent = {started[part].host for part, state in states.items() if state == SILENT}
        for part in running[workers:]:
            self._terminate(started[part])
        current = [placement for part, placement in started.items() if states.get(part) != ENDED]
        next_index = max((int(part.removeprefix(f"{WORKER}-")) for part in states), default=-1) + 1
        for index in range(next_index, next_index + max(0, workers - len(running))):
            current.append(self._next_placement(WORKER, index, current, excluded=silent))
            self._start(f"{WORKER}-{index}", current[-1])
        return counted(workers, "worker")


def first_free(taken: Iterable[range], count: int) -> range:
    """The lowest range of `count` consecutive numbers from 0 that overlaps none of `taken`."""
    begin = 0
    for other in sorted(filter(None, taken), key=attrgetter("start")):
        if begin + count <= other.start:
            break
        begin = max(begin, other.stop)
    return range(begin, begin + count) if count else range(0)


class Local(Shells):
    """Launches all parts on this machine."""

    on_network = False
    hosts = ["localhost"]  # noqa: RUF012
    first_address = "127.0.0.1"

    def shell(self, host: str) -> list[str]:
        return ["bash", "-s"]

    def bind(self) -> str:
        return self.layout.config.broker.bind


class SSH(Shells):
    """Launches parts on `launch.hosts`, which ssh must reach without a password."""

    @property
    def hosts(self) -> list[str]:  # type: ignore[override]
        hosts, nodes = self.layout.config.launch.hosts, self.layout.config.launch.learner_nodes
        if len(hosts) < nodes:
            refuse(
                "launch.hosts", None, f"names {len(hosts)} machines, and launch.learner_nodes = {nodes}", "name as many"
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
            refuse(
                "launch.hosts",
                None,
                f"begins with {host!r}, which has no address here",
                "name it as the others reach it",
            )

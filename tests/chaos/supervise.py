"""`april run` as the chaos tests start it: the real supervisor over watched and unruly parts.

    python -m tests.chaos.supervise CONFIG [--section.key value ...]

A killed broker finds its journal as a power loss would have left it. Worker 0 and the learner talk to the broker
through a proxy, whose connections go dead at SIGUSR1.
"""

import signal
import sys
from pathlib import Path

from april.config import load
from april.launch import supervisor
from april.util import lifetime
from tests.chaos.proxy import Proxy
from tests.chaos.run_state import RunState

lifetime.LONGEST_RESTART_DELAY_S = 0.0


class Console:
    """A view for a log file."""

    def update(self, status: dict) -> None: ...

    def step(self, metrics: dict) -> None:
        self.note(f"step {metrics['step']}")

    def note(self, text: str) -> None:
        print(text, flush=True)


class FragileJournal(supervisor.Part):
    """The broker, between whose starts the power was off."""

    state: RunState

    def start(self) -> None:
        if lost := self.state.lose_power():
            print(f"{lost} bytes that no sync had reached are gone", flush=True)
        super().start()


class ChaosSupervisor(supervisor.Supervisor):
    proxy: Proxy | None = None

    def _part(self, name, arguments, limits, threads=1):
        part = super()._part(name, arguments, limits, threads)
        if name == "broker":
            part.__class__ = FragileJournal
            part.state = RunState(self.run_dir)
            part.command[1:] = ["-m", "tests.chaos.broker", *arguments[1:]]
        else:
            part.command[1:] = ["-m", "tests.chaos.peer", *arguments]
        return part

    def _learner_part(self, config_path: Path, address: str):
        part = super()._learner_part(config_path, self._through_proxy(address))
        at = part.command.index("april.learner")
        part.command[at : at + 1] = ["tests.chaos.peer", "learner"]
        return part

    def _worker_part(self, index: int, config_path: Path, address: str):
        return super()._worker_part(index, config_path, address if index else self._through_proxy(address))

    def _through_proxy(self, folder: str) -> str:
        if self.proxy is None:
            address = self._wait_for_broker()
            assert address, f"stopped before the broker of {folder} was there"
            host, port = address.removeprefix("tcp://").split(":")
            self.proxy = Proxy(host, int(port))
            signal.signal(signal.SIGUSR1, lambda number, frame: self.proxy.freeze())
        return f"tcp://127.0.0.1:{self.proxy.port}"


def main(path: str, overrides: list[str]) -> int:
    config = load(path, ["--broker.bind", "tcp://127.0.0.1:*", "--security.keys", "off", *overrides])
    try:
        state = ChaosSupervisor(config, Console()).run()
    except supervisor.RunFailed as error:
        print(f"failed: {error}", flush=True)
        return 1
    return {"finished": 0, "stopped": 130}[state]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

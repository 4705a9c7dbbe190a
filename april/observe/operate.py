"""Requests of an operator to a live broker: `april status`, `april drain`, `april dead-letters`."""

import tomllib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from april import wire
from april.broker import recovery
from april.broker.handlers.monitors import DEAD_LETTERS_FILE
from april.broker.journal.files import journal_folder
from april.config import ConfigError, check_address, load
from april.config.section import AUTO, OFF
from april.wire.security.keys import RUN_KEYS, load_keys
from april.wire.sockets.base import ADDRESS_FILE
from april.wire.sockets.broker import BrokerConnection, BrokerRefused, BrokerUnreachable

PATIENCE_S = 5.0
"""Seconds after which a request that the broker has not answered fails."""


@dataclass(frozen=True)
class RunAddress:
    """Address of a run, as an operator gives it: its folder, its broker's address, or both."""

    run_dir: Path | None
    connect: str | None
    keys: Path | None
    """Folder with a monitor's keys; None: security.keys of the run's configuration."""

    def status(self) -> dict[str, Any]:
        return content(self.ask(wire.StatusRequest()))

    def dead_letters(self) -> tuple[dict[str, Any], bool]:
        """(dead letters: the samples that failed for good; whether the broker answered). Without an answer they are
        those that the broker last wrote to the run folder."""
        try:
            return content(self.ask(wire.DeadLettersRequest())), True
        except BrokerUnreachable:
            if self.connect or not self.run_dir:
                raise
        path = self.run_dir / DEAD_LETTERS_FILE
        return (orjson.loads(path.read_bytes()) if path.is_file() else {"total": 0, "letters": []}), False

    def requeue(self, groups: list[int]) -> tuple[list[int], bool]:
        """Draw the prompts of discarded groups again. Returns (ids of the groups whose prompts are queued again,
        whether the broker answered); without a broker they are queued in the run's journal. `groups`: their ids; []
        means all that can be queued."""
        try:
            return self.ask(wire.Requeue(groups)).message.groups, True
        except BrokerUnreachable:
            if self.connect or not self.run_dir or not journal_folder(self.run_dir).is_dir():
                raise
        return recovery.requeue(load(self.run_dir / "config.toml"), groups), False

    def ask(self, message: wire.Message) -> wire.Received:
        """Send a request to the broker and return the answer. Raises BrokerUnreachable, also if another run's broker
        answers, and BrokerRefused with the broker's reason."""
        address, keys = self._address(), load_keys(self._keys(), "monitor")
        connection = BrokerConnection(address, "monitor", "operator", uuid.uuid4().hex, PATIENCE_S, keys)
        try:
            self._check_run(connection.hello(lease_ids=[]).run, address)
            answer = connection.request(message, PATIENCE_S)
            connection.goodbye()
        finally:
            connection.close()
        if isinstance(answer.message, wire.Refused):
            raise BrokerRefused(f"the broker at {address} refuses: {answer.message.reason}")
        return answer

    def _address(self) -> str:
        """The broker's address: the one that the operator gave, or else the one that the broker wrote into the run
        folder."""
        if self.connect:
            return check_address(self.connect)
        if self.run_dir is None:
            raise ConfigError("neither a run nor --connect is given; name a run folder, or a broker as tcp://HOST:PORT")
        if not self.run_dir.is_dir():
            raise ConfigError(f"run folder {self.run_dir} does not exist; give the folder of a run, such as runs/NAME")
        path = self.run_dir / ADDRESS_FILE
        if not path.is_file():
            raise BrokerUnreachable(f"run folder {self.run_dir} has no {ADDRESS_FILE} file: no broker runs there")
        return path.read_text()

    def _check_run(self, run: str, address: str) -> None:
        """Check that the broker that has answered at `address`, for the run `run`, is this run's own: another run's may
        have taken the port of a killed one. Raises BrokerUnreachable."""
        own = self._config().get("run", {}).get("name", run)
        if run != own:
            raise BrokerUnreachable(
                f"the broker at {address} is that of run {run!r}, not of {self.run_dir}; give that run's folder, or "
                f"start the broker of {own!r} first"
            )

    def _keys(self) -> Path | None:
        keys = self.keys or self._config().get("security", {}).get("keys", AUTO)
        if keys != AUTO:
            return Path(keys) if keys != OFF else None
        made = self.run_dir / RUN_KEYS if self.run_dir else None
        return made if made and made.exists() else None

    def _config(self) -> dict[str, Any]:
        """Content of the run folder's config.toml; empty if only an address is given."""
        path = self.run_dir / "config.toml" if self.run_dir else None
        return tomllib.loads(path.read_text()) if path and path.is_file() else {}


def content(answer: wire.Received) -> dict[str, Any]:
    """The JSON document in an answer's first array."""
    return orjson.loads(answer.arrays[0].tobytes())

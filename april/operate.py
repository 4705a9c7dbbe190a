"""What an operator asks of a live broker: `april status`, `april drain`, `april dead-letters`."""

import tomllib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from april import wire
from april.broker.monitor_desk import DEAD_LETTERS_FILE
from april.client import BrokerConnection, BrokerRefused, BrokerUnreachable
from april.config import ConfigError, check_address
from april.security.keys import Keys, load_keys

PATIENCE_S = 5.0
"""longest wait for a broker's answer"""
ADDRESS_FILE = "address"
"""in the run folder"""


@dataclass(frozen=True)
class Broker:
    """Where one is, and with which keys a monitor comes in."""

    address: str
    keys: Keys | None = None


def find_broker(run_dir: Path | None, connect: str | None, keys: Path | None = None) -> Broker:
    """By what an operator has given; `keys` are by default those that the run folder's configuration names."""
    address = address_of(run_dir, connect)
    return Broker(address, load_keys(keys or configured_keys(run_dir), "monitor"))


def configured_keys(run_dir: Path | None) -> Path | None:
    path = run_dir / "config.toml" if run_dir else None
    if path is None or not path.is_file():
        return None
    keys = tomllib.loads(path.read_text()).get("security", {}).get("keys")
    return Path(keys) if keys else None


def address_of(run_dir: Path | None, connect: str | None) -> str:
    """The address that was given, or the one that the broker of the run folder left there."""
    if connect:
        return check_address(connect)
    if run_dir is None:
        raise ConfigError("neither a run nor --connect is given; name a run folder, or a broker as tcp://HOST:PORT")
    if not run_dir.is_dir():
        raise ConfigError(f"run folder {run_dir} does not exist; give the folder of a run, such as runs/NAME")
    path = run_dir / ADDRESS_FILE
    if not path.is_file():
        raise BrokerUnreachable(f"run folder {run_dir} has no {ADDRESS_FILE} file: no broker runs there")
    return path.read_text()


def ask(broker: Broker, message: wire.Message) -> wire.Received:
    """The broker's answer. Raises BrokerUnreachable, and BrokerRefused with the broker's reason."""
    connection = BrokerConnection(broker.address, "monitor", "operator", uuid.uuid4().hex, PATIENCE_S, broker.keys)
    try:
        connection.hello(leases=[])
        answer = connection.request(message, PATIENCE_S)
        connection.send(wire.Goodbye())
    finally:
        connection.close()
    if isinstance(answer.message, wire.Refused):
        raise BrokerRefused(f"the broker at {broker.address} refuses: {answer.message.reason}")
    return answer


def live_status(broker: Broker) -> dict[str, Any]:
    return content(ask(broker, wire.StatusRequest()))


def dead_letters(run_dir: Path | None, connect: str | None, keys: Path | None = None) -> tuple[dict[str, Any], bool]:
    """(what the broker knows, True), or what it had left in the run folder when it wrote its last summary, False."""
    try:
        return content(ask(find_broker(run_dir, connect, keys), wire.DeadLettersRequest())), True
    except BrokerUnreachable:
        path = run_dir / DEAD_LETTERS_FILE if run_dir else None
        if connect or not path:
            raise
        return (orjson.loads(path.read_bytes()) if path.is_file() else {"total": 0, "letters": []}), False


def content(answer: wire.Received) -> dict[str, Any]:
    """The JSON that an answer carries."""
    return orjson.loads(answer.arrays[0].tobytes())

"""What an operator asks of a live broker: `april status`, `april drain`, `april dead-letters`."""

import uuid
from pathlib import Path
from typing import Any

import orjson

from april import wire
from april.broker.monitor_desk import DEAD_LETTERS_FILE
from april.client import BrokerConnection, BrokerRefused, BrokerUnreachable
from april.config import ConfigError, check_address

PATIENCE_S = 5.0
"""longest wait for a broker's answer"""
ADDRESS_FILE = "address"
"""in the run folder"""


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


def ask(address: str, message: wire.Message) -> wire.Received:
    """The broker's answer. Raises BrokerUnreachable, and BrokerRefused with the broker's reason."""
    connection = BrokerConnection(address, "monitor", "operator", uuid.uuid4().hex, PATIENCE_S)
    try:
        connection.hello(leases=[])
        answer = connection.request(message, PATIENCE_S)
        connection.send(wire.Goodbye())
    finally:
        connection.close()
    if isinstance(answer.message, wire.Refused):
        raise BrokerRefused(f"the broker at {address} refuses: {answer.message.reason}")
    return answer


def live_status(address: str) -> dict[str, Any]:
    return content(ask(address, wire.StatusRequest()))


def dead_letters(run_dir: Path | None, connect: str | None) -> tuple[dict[str, Any], bool]:
    """(what the broker knows, True), or what it had left in the run folder when it wrote its last summary, False."""
    try:
        return content(ask(address_of(run_dir, connect), wire.DeadLettersRequest())), True
    except BrokerUnreachable:
        path = run_dir / DEAD_LETTERS_FILE if run_dir else None
        if connect or not path:
            raise
        return (orjson.loads(path.read_bytes()) if path.is_file() else {"total": 0, "letters": []}), False


def content(answer: wire.Received) -> dict[str, Any]:
    """The JSON that an answer carries."""
    return orjson.loads(answer.arrays[0].tobytes())

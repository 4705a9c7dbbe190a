"""Rendezvous of a learner on several machines: the first machine announces its address to the broker, the others ask
the broker for it."""

import threading
import time
import uuid

from april import wire
from april.config import Config
from april.connections.address import address_at
from april.connections.broker import BrokerConnection, BrokerUnreachable
from april.connections.route import own_address
from april.security.keys import load_keys

PORT_OFFSET = 1
"""Port of torchrun's agents, relative to `launch.port`."""
ANNOUNCE_S = 2.0
"""Interval at which the first machine repeats its address, for a broker that was restarted, seconds."""
ASK_S = 0.2
"""Interval at which the other machines ask, seconds."""


def rendezvous_address(config: Config, connect: str, node: int) -> str:
    """Rendezvous address HOST:PORT for machine `node` of the learner, on machine 0's interface towards the broker at
    `connect`. Machine 0 keeps announcing it, in a thread.

    Raises BrokerUnreachable, AccessDenied, ConfigError, and TimeoutError if machine 0 is not there within
    `learner.load_s`.
    """
    broker = address_at(connect, config.broker.patience_s)
    keys = load_keys(config.security.keys, "learner")
    connection = BrokerConnection(broker, "node", f"node-{node}", uuid.uuid4().hex, config.broker.patience_s, keys)
    connection.hello(lease_ids=[])
    if node:
        try:
            return ask_address(connection, config.learner.load_s)
        finally:
            connection.goodbye()
            connection.close()
    host, _, port = broker.removeprefix("tcp://").rpartition(":")
    address = f"{own_address(host, int(port))}:{config.launch.port + PORT_OFFSET}"
    connection.request(wire.Rendezvous(address))
    threading.Thread(target=keep_announcing, args=(connection, address), daemon=True).start()
    return address


def ask_address(connection: BrokerConnection, patience_s: float) -> str:
    """Poll the broker for machine 0's address. Raises TimeoutError after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while not (address := connection.request(wire.Rendezvous()).message.address):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"machine 0 of the learner has not come in {patience_s:g} s; start it, or see its log")
        time.sleep(ASK_S)
    return address


def keep_announcing(connection: BrokerConnection, address: str) -> None:
    """Announce the address every `ANNOUNCE_S` seconds until the broker is unreachable."""
    try:
        while True:
            time.sleep(ANNOUNCE_S)
            connection.request(wire.Rendezvous(address))
    except BrokerUnreachable:
        connection.close()

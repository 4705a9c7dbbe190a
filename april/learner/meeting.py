"""Where the ranks of a learner over several machines meet: its first machine tells the broker, the others ask there."""

import threading
import time
import uuid

from april import wire
from april.config import Config
from april.connections.address import address_at
from april.connections.broker import BrokerConnection, BrokerUnreachable
from april.connections.route import own_address
from april.security.keys import load_keys

PORT = 1
"""of torchrun's agents: the broker's by default, `launch.port`, and so many more"""
SAY_S = 2.0
"""how often the first machine says it: a broker that was restarted has heard it again by then"""
ASK_S = 0.2


def place_of(config: Config, connect: str, node: int) -> str:
    """HOST:PORT, on the way that leads to the broker at `connect`. Machine 0 goes on saying it, in a thread. Raises
    BrokerUnreachable, AccessDenied, ConfigError, TimeoutError where machine 0 has not come within `learner.load_s`."""
    broker = address_at(connect, config.broker.patience_s)
    keys = load_keys(config.security.keys, "learner")
    connection = BrokerConnection(broker, "node", f"node-{node}", uuid.uuid4().hex, config.broker.patience_s, keys)
    connection.hello(leases=[])
    if node:
        try:
            return asked(connection, config.learner.load_s)
        finally:
            connection.goodbye()
            connection.close()
    host, _, port = broker.removeprefix("tcp://").rpartition(":")
    place = f"{own_address(host, int(port))}:{config.launch.port + PORT}"
    connection.request(wire.Meet(place))
    threading.Thread(target=keep_saying, args=(connection, place), daemon=True).start()
    return place


def asked(connection: BrokerConnection, patience_s: float) -> str:
    deadline = time.monotonic() + patience_s
    while not (place := connection.request(wire.Meet()).message.place):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"machine 0 of the learner has not come in {patience_s:g} s; start it, or see its log")
        time.sleep(ASK_S)
    return place


def keep_saying(connection: BrokerConnection, place: str) -> None:
    """Until the broker is away for longer than anybody waits for it."""
    try:
        while True:
            time.sleep(SAY_S)
            connection.request(wire.Meet(place))
    except BrokerUnreachable:
        connection.close()

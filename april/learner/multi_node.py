"""torchrun on several machines: `python -m april.learner.multi_node NODE --nnodes N ... -m april.learner ...`.

Like torchrun, but without --rdzv-endpoint the machines find each other through the broker. The kernel kills this
process when its parent dies. Exit status: REFUSED if the ranks refused to train.
"""

import os
import sys
import threading
import time
import uuid

from april import wire
from april.config import Config, ConfigError
from april.util.lifetime import REFUSED, SUPERVISED, die_with_parent, exit_at_once
from april.util.pulse import MAIN
from april.wire.security.keys import load_keys
from april.wire.sockets.base import address_at, own_address
from april.wire.sockets.broker import AccessDenied, BrokerConnection, BrokerUnreachable

PROGRAM = "april.learner"
PORT_OFFSET = 1
"""Offset of the torchrun agents' rendezvous port from `launch.port`."""
ANNOUNCE_S = 2.0
"""Interval at which the first machine repeats its address, for a broker that was restarted, seconds."""
ASK_S = 0.2
"""Interval at which the other machines poll the broker for the first machine's address, seconds."""


def with_rendezvous(node: int, arguments: list[str]) -> list[str]:
    """The arguments for torchrun, with the option --rdzv-endpoint added if absent."""
    if any(word.startswith("--rdzv-endpoint=") for word in arguments):
        return arguments
    from april.learner.__main__ import read_arguments

    config, connect = read_arguments(arguments[arguments.index(PROGRAM) + 1 :])
    return [f"--rdzv-endpoint={rendezvous_address(config, connect, node)}", *arguments]


def main(node: int, arguments: list[str]) -> int:
    try:
        arguments = with_rendezvous(node, arguments)
    except (ConfigError, BrokerUnreachable, TimeoutError) as error:
        print(f"april.learner: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError | AccessDenied) else 1
    MAIN.at("watching its ranks", takes_long=True)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as error:
        statuses = {failure.exitcode for failure in error.failures.values()}
        return REFUSED if REFUSED in statuses else 1
    return 0


def rendezvous_address(config: Config, connect: str, node: int) -> str:
    """Rendezvous address HOST:PORT for machine `node` of the learner, on machine 0's interface towards the broker at
    `connect`. Machine 0 keeps announcing it, in a thread.

    Raises BrokerUnreachable, AccessDenied, ConfigError, and TimeoutError if machine 0 has not announced its address
    within `learner.load_s`.
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


if __name__ == "__main__":
    die_with_parent()
    os.environ[SUPERVISED] = str(os.getpid())
    exit_at_once(main(int(sys.argv[1]), sys.argv[2:]))

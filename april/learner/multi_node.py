"""The ranks of one machine of a learner over several:
`python -m april.learner.multi_node --node K --nnodes N --nproc-per-node R -m april.learner ...`.

The broker says where the machines rendezvous and when all restart their ranks: whenever the process of a machine has
started. Machine 0 serves the store in which the ranks find each other; the store keeps bytes, and nobody unpickles
them. This process exits when a rank of its own has failed. The kernel kills it when its parent dies. Exit status:
REFUSED if the ranks refused to train.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from april import wire
from april.config import Config, ConfigError
from april.util.errors import refuse
from april.util.lifetime import REFUSED, SUPERVISED, die_with_parent, exit_at_once, reap
from april.util.pulse import MAIN
from april.util.registry import python_command
from april.wire.security.keys import load_keys
from april.wire.sockets.base import address_at, is_socket_file, own_address, route_to
from april.wire.sockets.broker import AccessDenied, BrokerConnection, BrokerUnreachable

PORT_OFFSET = 1
"""Offset of the port of machine 0's store from `launch.port`."""
ASK_S = 0.5
"""Interval at which a machine asks the broker for the latest start, seconds."""
POLL_S = 0.1
STORE_TIMEOUT_S = 10.0
END_S = 20.0
"""Longest time to wait for a launcher to kill its ranks and end, before it is killed itself (seconds)."""
LEAVE_S = 60.0
"""Longest time that machine 0 keeps its store, once its ranks have ended with status 0, for the ranks of other machines
(seconds)."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m april.learner.multi_node", allow_abbrev=False)
    parser.add_argument("--node", type=int, required=True, help="this machine's index, from 0")
    parser.add_argument("--nnodes", dest="nodes", type=int, required=True, help="machines")
    parser.add_argument("--nproc-per-node", dest="ranks", type=int, default=1, help="ranks a machine [default 1]")
    parser.add_argument("--meeting", default="", help="HOST:PORT of machine 0's store [default: as the broker says]")
    parser.add_argument("-m", dest="module", required=True, help="april.learner")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    from april.learner.__main__ import read_arguments

    options = parse(arguments)
    try:
        config, connect = read_arguments(options.program)
        broker = BrokerTalk(config, connect, options.node)
        store = serve_store(store_address(config, broker.connection.address), broker, options)
        broker.start()
        while (status := run_ranks(broker, options, config.learner.load_s)) is None:
            print("april.learner: the ranks of all machines begin anew", file=sys.stderr)
        del store
    except (ConfigError, BrokerUnreachable, TimeoutError, OSError) as error:
        print(f"april.learner: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError | AccessDenied) else 1
    return status


class BrokerTalk(threading.Thread):
    """Thread that tells the broker, every `ASK_S` seconds, where this machine's store is and in which start of the
    learner its ranks are, and keeps the broker's last answer."""

    def __init__(self, config: Config, connect: str, node: int):
        """`connect`: the broker's address or run folder. `node`: number of this machine. Raises BrokerUnreachable,
        AccessDenied and ConfigError."""
        super().__init__(name="broker-talk", daemon=True)
        patience_s, keys = config.broker.patience_s, load_keys(config.keys, "learner")
        address = address_at(connect, patience_s)
        self.connection = BrokerConnection(address, "node", f"node-{node}", uuid.uuid4().hex, patience_s, keys)
        self.connection.hello(lease_ids=[])
        self.address = ""
        """HOST:PORT of this machine's store; "" on every machine but 0."""
        self.joined = 0
        """Number of the latest start of the learner, as the broker counts starts, that this machine has joined; 0
        before the first."""
        self.told = wire.Rendezvous()
        """The broker's last answer: the address of machine 0's store, and the number of the learner's newest start."""
        self.error: Exception | None = None
        """Error that ended the communication with the broker; None while it goes on."""

    def run(self) -> None:
        try:
            while True:
                self.told = self.connection.request(wire.Rendezvous(self.address, self.joined)).message
                time.sleep(ASK_S)
        except Exception as error:
            self.error = error

    @property
    def is_newer(self) -> bool:
        """Whether the broker has announced a newer start of the learner than the one this machine has joined: its ranks
        then restart."""
        return self.told.start > self.joined


def store_address(config: Config, broker: str) -> str:
    """HOST:PORT for a store on this machine, on its interface towards the broker."""
    if is_socket_file(broker):
        refuse(
            "broker.bind",
            config.broker.bind,
            "is for one machine, and the learner has several",
            "give the broker's as tcp://INTERFACE:PORT",
        )
    return f"{own_address(*route_to(broker))}:{config.launch.port + PORT_OFFSET}"


def serve_store(address: str, broker: BrokerTalk, options: argparse.Namespace) -> Any:
    """On machine 0, serve the store of all machines and announce it to the broker; on other machines do nothing. The
    store listens at `address`, HOST:PORT, and ends with the object returned. If the option `--meeting` says how others
    reach this machine, that is announced, and the store listens on its port; its host is not listened on, since it may
    be the name of a service. Raises OSError."""
    if options.node:
        return None
    from april.weights import channel

    broker.address = options.meeting or address
    port = int(broker.address.rpartition(":")[2])
    return channel.serve_store_at(socket.create_server((address.rpartition(":")[0], port)))


# --- one start of all ranks -------------------------------------------------------------------------------------------


def run_ranks(broker: BrokerTalk, options: argparse.Namespace, patience_s: float) -> int | None:
    """Join the latest start of the learner (the joint launch of all machines' ranks), and run this machine's ranks in
    it. Returns their exit status, or None if a newer start was announced meanwhile, so that all machines restart.
    Raises the error that ended communication with the broker, and TimeoutError if a machine has not joined in
    `patience_s` seconds."""
    address, store = join_start(broker, options, patience_s)
    start = broker.joined
    MAIN.at("watching its ranks", takes_long=True)
    launch = ["april.learner.launch", f"--nproc-per-node={options.ranks}", f"--nnodes={options.nodes}"]
    launch += [f"--node={options.node}", f"--store={address}", f"--start={start}"]
    launch += ["-m", options.module, *options.program]
    ranks = subprocess.Popen(python_command("-m", *launch))
    try:
        while ranks.poll() is None:
            if broker.is_newer:
                return None
            if broker.error and not isinstance(broker.error, BrokerUnreachable):
                raise broker.error  # a broker that has ended is no fault: ranks may still write their weights
            time.sleep(POLL_S)
    finally:
        end(ranks)
    if ranks.returncode == 0:
        leave_together(broker, store, options, start)
    return ranks.returncode


def end(ranks: subprocess.Popen) -> None:
    """End a launcher process, which ends its ranks; it is killed if it has not ended after `END_S` seconds."""
    ranks.terminate()
    try:
        ranks.wait(END_S)
    except subprocess.TimeoutExpired:
        ranks.kill()
        reap(ranks)


def join_start(broker: BrokerTalk, options: argparse.Namespace, patience_s: float) -> tuple[str, Any]:
    """Wait until every machine has joined the latest start of the learner (the joint launch of all machines' ranks).
    Returns the address of the machines' store, HOST:PORT, and a client of it. Raises TimeoutError after `patience_s`
    seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        wait_for(lambda: broker.is_newer and broker.told.address, broker, deadline, [0])
        told = broker.told
        if not (address := options.meeting or told.address):
            continue
        try:
            store = connect(address)
        except RuntimeError as error:  # machine 0 has gone, and the next one makes a new start; or it is out of reach
            if time.monotonic() >= deadline:
                raise TimeoutError(f"machine 0 of the learner cannot be reached at {address}: {error}") from None
            time.sleep(POLL_S)
            continue
        broker.joined = told.start
        with contextlib.suppress(RuntimeError):  # machine 0 has gone
            store.set(key(broker.joined, "joined", options.node), "")
            if everybody(store, broker, options, "joined", deadline):
                return address, store
        wait_for(lambda: broker.is_newer, broker, deadline, [0])


def everybody(store: Any, broker: BrokerTalk, options: argparse.Namespace, event: str, deadline: float) -> bool:
    """Wait until every machine has reported `event`, such as "ended", by a key in the store, for the start that this
    machine has joined. Returns True then, and False once the broker has announced a newer start. `deadline`: monotonic
    seconds."""
    nodes, start = range(options.nodes), broker.joined

    def lacking() -> list[int]:
        return [node for node in nodes if not store.check([key(start, event, node)])]

    wait_for(lambda: broker.is_newer or not lacking(), broker, deadline, lacking)
    return not broker.is_newer


def leave_together(broker: BrokerTalk, store: Any, options: argparse.Namespace, start: int) -> None:
    """Report in the store that this machine's ranks have ended start number `start` with status 0. Machine 0, which
    serves the store, then waits for the reports of the others, for at most `LEAVE_S` seconds."""
    with contextlib.suppress(RuntimeError, TimeoutError):
        store.set(key(start, "ended", options.node), "")
        if options.node == 0:
            everybody(store, broker, options, "ended", time.monotonic() + LEAVE_S)


def wait_for(
    is_so: Callable[[], Any], broker: BrokerTalk, deadline: float, lacking: list[int] | Callable[[], list[int]]
) -> None:
    """Wait until `is_so()` is true. Raises the error that ended communication with the broker, and TimeoutError at the
    `deadline` (monotonic seconds). Its message names the machines that are missing: `lacking` has their numbers, or is
    a function that returns them."""
    began = time.monotonic()
    while not is_so():
        if broker.error:
            raise broker.error
        if time.monotonic() >= deadline:
            nodes = ", ".join(map(str, lacking if isinstance(lacking, list) else lacking()))
            waited_s = time.monotonic() - began
            raise TimeoutError(
                f"machine {nodes} of the learner has not come in {waited_s:.0f} s; start it, or see its log"
            )
        time.sleep(POLL_S)


def key(start: int, event: str, node: int) -> str:
    return f"april/{start}/{event}/{node}"


def connect(address: str) -> Any:
    from april.weights import channel

    host, _, port = address.rpartition(":")
    return channel.connect_to_store(host, int(port), STORE_TIMEOUT_S)


if __name__ == "__main__":
    die_with_parent()
    os.environ[SUPERVISED] = str(os.getpid())
    signal.signal(signal.SIGTERM, lambda number, frame: exit_at_once(128 + number))
    exit_at_once(main(sys.argv[1:]))

"""torchrun on several machines: `python -m april.learner.across NODE --nnodes N ... -m april.learner ...`.

Like torchrun, but without --rdzv-endpoint the machines find each other through the broker. The kernel kills it when its
parent dies, and it exits with REFUSED if its ranks refused to work.
"""

import os
import sys

from april.config import ConfigError
from april.connections.broker import AccessDenied, BrokerUnreachable
from april.processes.lifetime import REFUSED, SUPERVISED, die_with_parent, end
from april.processes.pulse import MAIN

PROGRAM = "april.learner"


def with_rendezvous(node: int, arguments: list[str]) -> list[str]:
    """torchrun's arguments, with the --rdzv-endpoint of its agents."""
    if any(word.startswith("--rdzv-endpoint=") for word in arguments):
        return arguments
    from april.learner.__main__ import read_arguments
    from april.learner.meeting import rendezvous_address

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


if __name__ == "__main__":
    die_with_parent()
    os.environ[SUPERVISED] = str(os.getpid())
    end(main(int(sys.argv[1]), sys.argv[2:]))

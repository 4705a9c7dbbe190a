"""A worker, a scorer, an agents process, or a rank of the learner, as the chaos tests start it: its clock jumps, its
messages come late or twice.

python -m tests.chaos.peer worker|scorer|agents CONFIG --connect ADDRESS --name NAME
python -m tests.chaos.peer learner CONFIG --connect ADDRESS
"""

import random
import sys
import time

from tests.chaos import failing_calls

TWICE, LATE = 0.1, 0.05
LATE_S = 0.1


def jumping_clock() -> None:
    """Wall-clock time leaps at every look, by so much that two clocks differ by what a broker takes at most."""
    from april.wire.limits import MAX_CLOCK_SKEW_S

    real = time.time
    time.time = lambda: real() + random.uniform(-0.49, 0.49) * MAX_CLOCK_SKEW_S


def unruly_messages() -> None:
    from april.wire.sockets.broker import BrokerConnection

    send = BrokerConnection._send

    def send_unruly(self, socket, frames) -> None:
        if random.random() < LATE:
            time.sleep(random.uniform(0, LATE_S))
        send(self, socket, frames)
        if random.random() < TWICE:
            send(self, socket, frames)

    BrokerConnection._send = send_unruly


def main(role: str, arguments: list[str]) -> int:
    jumping_clock()
    unruly_messages()
    failing_calls.install(role)
    if role != "learner":
        from april.cli import main

        return main([role, *arguments])
    from april.learner.__main__ import main

    return main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

"""A verifier process, `python -m april.workers.rewards.process LIMIT_S`: items on stdin, scores on stdout."""

import math
import numbers
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from april.workers.rewards.messages import LENGTH_BYTES, READY, Item, Score, frame
from april.workers.rewards.verifiers import find_verifier

ERROR_CHARACTERS = 500


def main(limit_s: float) -> None:
    """The pool ends an item after its time limit; `limit_s` is longer and ends one whose pool has died."""
    items, scores = private_pipes()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    decoder = msgspec.msgpack.Decoder(Item)
    send(scores, READY)
    while length := items.read(LENGTH_BYTES):
        item = decoder.decode(items.read(int.from_bytes(length, "little")))
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        score = verify(item)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(scores, frame(score))


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pool's two pipes, out of reach of a verifier that prints or reads."""
    items, scores = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return items, scores


def send(scores: BinaryIO, data: bytes) -> None:
    scores.write(data)
    scores.flush()


def verify(item: Item) -> Score:
    try:
        reward = find_verifier(item.verifier)(item.response, item.label, item.finish_reason)
        if not isinstance(reward, numbers.Real):
            raise TypeError(f"returned {reward!r}, which is not a number")
        if not math.isfinite(reward):
            raise ValueError(f"returned {reward!r}, which is not finite")
        return Score(item.key, float(reward))
    except Exception as error:
        text = f"verifier {item.verifier!r}: {type(error).__name__}: {error}"
        return Score(item.key, None, text[:ERROR_CHARACTERS])


if __name__ == "__main__":
    main(float(sys.argv[1]))

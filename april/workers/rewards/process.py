"""A verifier process, `python -m april.workers.rewards.process LIMIT_S RULES`: items on stdin, scores on stdout."""

import contextlib
import importlib
import math
import numbers
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Sequence

import msgspec

from april.processes.frames import LENGTH_BYTES, READY, frame, private_pipes, send
from april.processes.memory import limit_memory
from april.wire.limits import DETAILS, REWARD, is_reward
from april.workers.rewards import VERIFIERS
from april.workers.rewards.messages import GroupItem, GroupScore, Item, RewardRules, Score
from april.workers.rewards.shaping import shape
from april.workers.rewards.verifiers import find_verifier, in_batches

ERROR_CHARACTERS = 500
BATCH_ITEMS = 32


def main(limit_s: float, rules: RewardRules) -> None:
    """The pool ends an item after its time limit; `limit_s` is longer and ends one whose pool has died."""
    items, scores = private_pipes()
    limit_memory(rules.memory_mb)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    inbox = Inbox(items)
    for name in rules.verifiers:
        load(name)
    send(scores, READY)
    while batch := inbox.take():
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        answers = answers_to(batch, rules)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(scores, b"".join(map(frame, answers)))


def answers_to(batch: list[Item | GroupItem], rules: RewardRules) -> Sequence[Score | GroupScore]:
    if isinstance(batch[0], GroupItem):
        return [verify_group(batch[0], rules)]
    return verify([item for item in batch if isinstance(item, Item)], rules)


def load(name: str) -> None:
    """Import a verifier and what it will import; whatever is wrong with it is said of the items that name it."""
    with contextlib.suppress(Exception):
        find_verifier(name)
        if needed := getattr(VERIFIERS.find(name), "needs", ""):
            importlib.import_module(needed)


class Inbox:
    """Items as they come: one at a time, or those at hand, where their verifier takes many."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._unread = bytearray()
        self._items: deque[Item | GroupItem] = deque()
        self._decoder = msgspec.msgpack.Decoder(Item | GroupItem)

    def take(self) -> list[Item | GroupItem]:
        """The next items to verify together; none when the pool has closed the pipe."""
        while not self._items:
            if not self._read():
                return []
        batch = [self._items.popleft()]
        while in_batches(batch[0].verifier) and len(batch) < BATCH_ITEMS and self._has(batch[0].verifier):
            batch.append(self._items.popleft())
        return batch

    def _has(self, verifier: str) -> bool:
        """Whether an item for it is next, without waiting."""
        while not self._items and select.select([self._descriptor], [], [], 0)[0]:
            if not self._read():
                return False
        return bool(self._items) and self._items[0].verifier == verifier

    def _read(self) -> bool:
        data = os.read(self._descriptor, 1 << 20)
        self._unread += data
        while len(self._unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "little")
            if len(self._unread) < end:
                break
            self._items.append(self._decoder.decode(bytes(self._unread[LENGTH_BYTES:end])))
            del self._unread[:end]
        return bool(data)


def verify(items: list[Item], rules: RewardRules) -> list[Score]:
    name = items[0].verifier
    try:
        scores = find_verifier(name)(items, rules)
        return [checked(score, item, rules) for score, item in zip(scores, items, strict=True)]
    except Exception as error:
        text = f"verifier {name!r}: {type(error).__name__}: {error}"
        return [Score(item.key, None, text[:ERROR_CHARACTERS]) for item in items]


def verify_group(group: GroupItem, rules: RewardRules) -> Score | GroupScore:
    """A group has all of its rewards or none."""
    scores = verify(group.items, rules)
    error = next((score.error for score in scores if score.error), None)
    return Score(group.key, None, error) if error else GroupScore(group.key, scores)


def checked(score: Score, item: Item, rules: RewardRules) -> Score:
    """The shaped score; an error where the reward, or one of its details, is no number to count with."""
    error = score.error or next(filter(None, map(objection, (score.reward, *score.details.values()))), "")
    if error or score.reward is None:
        return Score(item.key, None, f"verifier {item.verifier!r}: {error}"[:ERROR_CHARACTERS])
    reward, details = shape(float(score.reward), score.details, item, rules)
    return Score(item.key, reward, None, {str(key)[:40]: float(details[key]) for key in list(details)[:DETAILS]})


def objection(value: object) -> str:
    if not isinstance(value, numbers.Real):
        return f"returned {value!r}, which is not a number"
    if not math.isfinite(value):
        return f"returned {value!r}, which is not finite"
    return "" if is_reward(float(value)) else f"returned {value!r}, which is larger than {REWARD:g}; scale it"


if __name__ == "__main__":
    main(float(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=RewardRules))

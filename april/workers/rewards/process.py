"""A verifier process, `python -m april.workers.rewards.process LIMIT_S RULES`: items on stdin, scores on stdout."""

import contextlib
import importlib
import math
import numbers
import os
import select
import signal
import sys
import traceback
from collections import deque
from collections.abc import Sequence

import msgspec

from april.processes.blame import raised
from april.processes.frames import LENGTH_BYTES, READY, frame, private_pipes, send
from april.processes.memory import limit_memory
from april.processes.pool import ORPHAN_MARGIN_S, RETIRED, START_LIMIT_S
from april.wire.limits import DETAILS, REWARD, is_reward
from april.workers.rewards import VERIFIERS
from april.workers.rewards.messages import OVER_LIMIT, GroupItem, GroupScore, Item, RewardRules, Score, Undecided
from april.workers.rewards.shaping import shape
from april.workers.rewards.verifiers import find_verifier, in_batches, right_response

ERROR_CHARACTERS = 500
BATCH_ITEMS = 32
TRIED_ON = "1"
"""a label"""
SAID: set[tuple[str, type[Exception]]] = set()
"""verifiers and errors of which this process has printed one in full"""


def main(limit_s: float, rules: RewardRules) -> None:
    """The pool ends an item after its time limit; `limit_s` is longer and ends one whose pool has died."""
    items, scores = private_pipes()
    limit_memory(rules.memory_mb)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    inbox = Inbox(items)
    signal.setitimer(signal.ITIMER_REAL, START_LIMIT_S + ORPHAN_MARGIN_S)
    for name in rules.verifiers:
        load(name, rules)
    signal.setitimer(signal.ITIMER_REAL, 0)
    send(scores, READY)
    while batch := inbox.take():
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        answers, spent = answers_to(batch, rules)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(scores, b"".join(map(frame, answers)))
        if spent:
            sys.exit(RETIRED)


def answers_to(batch: list[Item | GroupItem], rules: RewardRules) -> tuple[Sequence[Score | GroupScore], bool]:
    """The answers, and whether memory ran out: what holds it may never give it back, so the process has to end."""
    first = batch[0]
    items = first.items if isinstance(first, GroupItem) else [item for item in batch if isinstance(item, Item)]
    try:
        scores, spent = verify(items, rules, first.over_time), False
    except MemoryError:
        scores, spent = [undecided(item, rules, f"needs more than {rules.memory_mb} MiB") for item in items], True
    return [of_group(first, scores)] if isinstance(first, GroupItem) else scores, spent


def load(name: str, rules: RewardRules) -> None:
    """Import a verifier and what it will import, and try one that imports much, since its first response may take many
    times as long as the next; whatever is wrong with it is said of the items that name it."""
    with contextlib.suppress(Exception):
        verifier = find_verifier(name)
        if needed := getattr(VERIFIERS.find(name), "needs", ""):
            importlib.import_module(needed)
            if example := right_response(name):
                verifier([Item(0, name, example(TRIED_ON), TRIED_ON, "stop")], rules)


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
        together = in_batches(batch[0].verifier) and not batch[0].over_time
        while together and len(batch) < BATCH_ITEMS and self._has(batch[0].verifier):
            batch.append(self._items.popleft())
        return batch

    def _has(self, verifier: str) -> bool:
        """Whether an item to score with others is next, without waiting."""
        while not self._items and select.select([self._descriptor], [], [], 0)[0]:
            if not self._read():
                return False
        return bool(self._items) and self._items[0].verifier == verifier and not self._items[0].over_time

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


def verify(items: list[Item], rules: RewardRules, over_time: int = 0) -> list[Score]:
    """Scores of items for one verifier; of those that were `over_time`, what such a response is worth.

    Raises MemoryError.
    """
    name = items[0].verifier
    try:
        if over_time:
            return [undecided(item, rules, f"no answer within {rules.timeout_s:g} s", over_time) for item in items]
        scores = find_verifier(name)(items, rules)
        return [checked(score, item, rules) for score, item in zip(scores, items, strict=True)]
    except MemoryError:
        raise
    except Undecided as error:
        return [undecided(item, rules, str(error)) for item in items]
    except Exception as error:
        if rules.traced:
            return [Score(item.key, None, raised(error)) for item in items]
        say_in_full(name, error)
        text = f"verifier {name!r}: {type(error).__name__}: {error}"
        return [Score(item.key, None, text[:ERROR_CHARACTERS]) for item in items]


def say_in_full(name: str, error: Exception) -> None:
    """Print the traceback of the first error of each kind; the others are counted by whoever asks."""
    if (kind := (name, type(error))) not in SAID:
        SAID.add(kind)
        print(f"verifier {name!r} has failed; further errors of this kind are only counted:", file=sys.stderr)
        traceback.print_exception(error)


def undecided(item: Item, rules: RewardRules, why: str, over_time: int = 0) -> Score:
    """What a response is worth that its verifier cannot decide within its limits: its verifier's `wrong`, or 0.

    An error where the run has it so (`reward.over_limit`), or where `wrong` is None: there the limit says nothing of
    the response. One that was over time twice may have been so in the search for the format, and is taken to lack it.
    """
    wrong = getattr(VERIFIERS.find(item.verifier), "wrong", 0.0)
    if rules.over_limit == "failed" or wrong is None:
        return Score(item.key, None, f"verifier {item.verifier!r}: {why}"[:ERROR_CHARACTERS])
    searched = item if over_time < 2 else msgspec.structs.replace(item, response="")
    return checked(Score(item.key, wrong, None, {OVER_LIMIT: 1.0}), searched, rules)


def of_group(group: GroupItem, scores: list[Score]) -> Score | GroupScore:
    """A group has all of its rewards or none."""
    error = next((score.error for score in scores if score.error), None)
    return Score(group.key, None, error) if error else GroupScore(group.key, scores)


def checked(score: Score, item: Item, rules: RewardRules) -> Score:
    """The shaped score; an error where the reward, or one of its details, is no number to count with."""
    error = score.error or next(filter(None, map(objection, (score.reward, *score.details.values()))), "")
    if error or score.reward is None:
        return Score(item.key, None, f"verifier {item.verifier!r}: {error}"[:ERROR_CHARACTERS])
    counted = {OVER_LIMIT: 0.0} if rules.over_limit == "wrong" else {}
    reward, details = shape(float(score.reward), {**counted, **score.details}, item, rules)
    return Score(item.key, reward, None, {str(key)[:40]: float(details[key]) for key in list(details)[:DETAILS]})


def objection(value: object) -> str:
    if not isinstance(value, numbers.Real):
        return f"returned {value!r}, which is not a number"
    if not math.isfinite(value):
        return f"returned {value!r}, which is not finite"
    return "" if is_reward(float(value)) else f"returned {value!r}, which is larger than {REWARD:g}; scale it"


if __name__ == "__main__":
    main(float(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=RewardRules))

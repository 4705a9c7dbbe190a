"""A verifier process, `python -m april.workers.rewards.process LIMIT_S`: rules and items come over
the channel that is its stdin, and scores go back over it."""

import contextlib
import importlib
import math
import numbers
import os
import re
import select
import signal
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from april.util.logs import user_traceback
from april.util.pool import (
    LENGTH_BYTES,
    ORPHAN_MARGIN_S,
    READY,
    RETIRED,
    START_LIMIT_S,
    frame,
    private_channel,
    read_rules,
    write_frame,
)
from april.util.resources import limit_memory
from april.util.text import cut_in_middle
from april.wire.limits import (
    MAX_REWARD,
    MAX_REWARD_DETAILS,
    MAX_TOKEN_SCORES,
    OWN_REWARD,
    PENALTIES,
    is_reward,
    too_many_details,
)
from april.workers.rewards import VERIFIERS
from april.workers.rewards.messages import OVER_LIMIT, GroupItem, GroupScore, Item, RewardRules, Score, Undecided
from april.workers.rewards.parts import asked_verifiers, combined, joined, parts_of, scored_in_batches
from april.workers.rewards.verifiers import find_verifier, right_response

# --- reward shaping ---------------------------------------------------------------------------------------------------


def shape(reward: float, details: dict[str, float], item: Item, rules: RewardRules) -> tuple[float, dict[str, float]]:
    """The reward with the configured parts and penalties, and its details. If a penalty is configured, the details
    include `base`, the reward without penalties."""
    penalties = dict[str, float]()
    if rules.overlong_buffer_tokens:
        penalties["overlong"] = overlong(item, rules)
    if rules.format_pattern:
        matches = re.search(rules.format_pattern, item.response, re.DOTALL) is not None
        penalties["format"] = 0.0 if matches else -rules.format_penalty
    if parts := parts_of(item.verifier, rules):
        return combined(reward, details, penalties, parts)
    if not penalties:
        return reward, details
    return reward + sum(penalties.values()), {**details, "base": reward, **penalties}


def overlong(item: Item, rules: RewardRules) -> float:
    """Penalty for a response that is almost as long as its maximum (soft overlong punishment, arXiv 2503.14476,
    equation 13). It is 0 up to `overlong_buffer_tokens` before the maximum, and falls linearly from there to
    -`overlong_penalty` at the maximum."""
    beyond = item.tokens - ((item.budget or rules.max_response_tokens) - rules.overlong_buffer_tokens)
    return -rules.overlong_penalty * min(1.0, max(0.0, beyond / rules.overlong_buffer_tokens))


# --- the process ------------------------------------------------------------------------------------------------------

ERROR_CHARACTERS = 500
NAME_CHARACTERS = 128
"""Maximum number of characters in the name of a token score, as in the wire protocol."""
BATCH_ITEMS = 32
WARM_UP_LABEL = "1"
"""Label of the made-up item on which slow verifiers are warmed up."""
PRINTED_ERRORS: set[tuple[str, type[Exception]]] = set()
"""(verifier, error class) pairs whose traceback this process has printed."""


def main(limit_s: float) -> None:
    """Serve items until the channel closes.

    The pool enforces the time limit of an item; `limit_s` is longer, and only matters if the pool has died.
    """
    items, scores = private_channel()
    rules = read_rules(items, RewardRules)
    limit_memory(rules.memory_mb)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    inbox = ItemReader(items, rules)
    signal.setitimer(signal.ITIMER_REAL, START_LIMIT_S + ORPHAN_MARGIN_S)
    for name in rules.verifiers:
        preload(name, rules)
    signal.setitimer(signal.ITIMER_REAL, 0)
    write_frame(scores, READY)
    while batch := inbox.take():
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        answers, out_of_memory = answers_to(batch, rules)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(scores, b"".join(map(frame, answers)))
        if out_of_memory:
            sys.exit(RETIRED)


def answers_to(batch: list[Item | GroupItem], rules: RewardRules) -> tuple[Sequence[Score | GroupScore], bool]:
    """(scores of a batch of items, whether memory ran out). If it did, the process has to end, since it may never
    release the memory."""
    first = batch[0]
    items = first.items if isinstance(first, GroupItem) else [item for item in batch if isinstance(item, Item)]
    try:
        scores, out_of_memory = verify(items, rules, first.timeouts), False
    except MemoryError:
        scores, out_of_memory = (
            [undecided(item, rules, f"needs more than {rules.memory_mb} MiB") for item in items],
            True,
        )
    return [group_answer(first, scores)] if isinstance(first, GroupItem) else scores, out_of_memory


def preload(name: str, rules: RewardRules) -> None:
    """Import a verifier, and warm it up on an example if it needs a large package, since its first call is slow.

    Errors of the import are ignored; they are reported with the items that name the verifier.
    """
    with contextlib.suppress(Exception):
        verifier = find_verifier(name)
        if needed := getattr(VERIFIERS.find(name), "needs", ""):
            importlib.import_module(needed)
            if example := right_response(name):
                verifier([Item(0, name, example(WARM_UP_LABEL), WARM_UP_LABEL, "stop")], rules)


class ItemReader:
    """Reads items from the pool's channel: one at a time, or in batches for verifiers that take batches."""

    def __init__(self, descriptor: int, rules: RewardRules):
        self._descriptor, self._rules = descriptor, rules
        self._arrived = select.poll()
        self._arrived.register(descriptor, select.POLLIN)
        self._unread = bytearray()
        self._items: deque[Item | GroupItem] = deque()
        self._decoder = msgspec.msgpack.Decoder(Item | GroupItem)

    def take(self) -> list[Item | GroupItem]:
        """The next items to verify in one call; an empty list when the pool has closed the channel."""
        while not self._items:
            if not self._read():
                return []
        batch = [self._items.popleft()]
        batched = scored_in_batches(batch[0].verifier, self._rules) and not batch[0].timeouts
        while batched and len(batch) < BATCH_ITEMS and self._has(batch[0].verifier):
            batch.append(self._items.popleft())
        return batch

    def _has(self, verifier: str) -> bool:
        """Whether the next item has arrived already and can be scored in one call with items of this verifier; does not
        wait."""
        while not self._items and self._arrived.poll(0):
            if not self._read():
                return False
        return bool(self._items) and self._items[0].verifier == verifier and not self._items[0].timeouts

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


def verify(items: list[Item], rules: RewardRules, timeouts: int = 0) -> list[Score]:
    """Score items that have the same verifier, by this verifier and by those of the reward's parts. `timeouts`: how
    often these items have exceeded the time limit before; if at all, no verifier is called, and each item gets the
    score of an undecided response.

    Raises MemoryError.
    """
    own = name = items[0].verifier
    try:
        if timeouts:
            return [undecided(item, rules, f"no answer within {rules.timeout_s:g} s", timeouts) for item in items]
        columns = {}
        for part, name in asked_verifiers(own, rules).items():
            columns[part] = find_verifier(name)(items, rules)
        return [validated(score, item, rules) for score, item in zip(joined(columns, items), items, strict=True)]
    except MemoryError:
        raise
    except Undecided as error:
        return [undecided(item, rules, str(error)) for item in items]
    except Exception as error:
        if rules.traced:
            return [Score(item.key, None, user_traceback(error)) for item in items]
        print_traceback_once(name, error)
        text = f"verifier {name!r}: {type(error).__name__}: {error}"
        return [Score(item.key, None, text[:ERROR_CHARACTERS]) for item in items]


def print_traceback_once(name: str, error: Exception) -> None:
    """Print the traceback of the first error of each class in each verifier; further ones are only counted."""
    if (kind := (name, type(error))) not in PRINTED_ERRORS:
        PRINTED_ERRORS.add(kind)
        print(f"verifier {name!r} has failed; further errors of this kind are only counted:", file=sys.stderr)
        traceback.print_exception(error)


def undecided(item: Item, rules: RewardRules, why: str, timeouts: int = 0) -> Score:
    """Score of a response that its verifier cannot decide within its limits. Its reward is the attribute `wrong` of the
    verifier, or 0 without one, and so is that of each verifier of the reward's parts. `why`: the limit that was
    reached, for the text of the feedback or error.

    It is an error instead if `reward.over_limit` is "failed", or if `wrong` is None, as for a remote reward model,
    where the limit says nothing about the response. From two `timeouts` on the search for `format_pattern` may be the
    cause: it is skipped, and the format counts as missing.
    """
    asked = {"": item.verifier} | asked_verifiers(item.verifier, rules)
    wrong = {part: getattr(VERIFIERS.find(name), "wrong", 0.0) for part, name in asked.items()}
    if rules.over_limit == "failed" or None in wrong.values():
        return Score(item.key, None, f"verifier {item.verifier!r}: {why}"[:ERROR_CHARACTERS])
    searched = item if timeouts < 2 else msgspec.structs.replace(item, response="")
    parts = dict.fromkeys(parts_of(item.verifier, rules).keys() - {OWN_REWARD, *PENALTIES}, 0.0)
    reward = wrong.pop("")
    return validated(Score(item.key, reward, None, {OVER_LIMIT: 1.0} | parts | wrong, feedback=why), searched, rules)


def group_answer(group: GroupItem, scores: list[Score]) -> Score | GroupScore:
    """The answer to a group's item: a `GroupScore` with the scores of all responses, or a `Score` with the first
    error."""
    error = next((score.error for score in scores if score.error), None)
    return Score(group.key, None, error) if error else GroupScore(group.key, scores)


def validated(score: Score, item: Item, rules: RewardRules) -> Score:
    """The score with the configured parts and penalties applied to its reward. It is an error if, before or after that,
    `score_objection` refuses the reward or a detail (not a finite number, or too large)."""
    error = score.error or score_objection(score.reward, score.details) or token_score_objection(score, item, rules)
    if not error and score.reward is not None:
        counted = {OVER_LIMIT: 0.0} if rules.over_limit == "wrong" else {}
        reward, details = shape(float(score.reward), {**counted, **score.details}, item, rules)
        shown = {str(key)[:40]: float(value) for key, value in details.items()}
        if not (error := score_objection(reward, shown)):
            feedback = cut_in_middle(score.feedback, rules.feedback) if rules.feedback else ""
            return Score(item.key, reward, None, shown, score.token_scores, feedback)
        error = f"with its parts and penalties {error}"
    return Score(item.key, None, f"verifier {item.verifier!r}: {error}"[:ERROR_CHARACTERS])


def score_objection(reward: object, details: Mapping[str, object]) -> str:
    """Reason why the broker would refuse a reward with these details; empty if it accepts them."""
    error = next(filter(None, map(objection, (reward, *details.values()))), "")
    if not error and too_many_details(map(str, details)):
        return f"returned {len(details)} details, more than {MAX_REWARD_DETAILS}; return the important ones"
    return error


def token_score_objection(score: Score, item: Item, rules: RewardRules) -> str:
    """Fault in the token scores of a response; empty if there is none."""
    if score.token_scores and rules.has_sessions:
        return "returned token scores, which sessions of agents do not have"
    if len(score.token_scores) > MAX_TOKEN_SCORES:
        return f"returned {len(score.token_scores)} token scores, more than {MAX_TOKEN_SCORES}"
    for name, data in score.token_scores.items():
        if len(name) > NAME_CHARACTERS or not name.isprintable():
            return f"returned a token score named {name[:80]!r}; use up to {NAME_CHARACTERS} printable characters"
        values = np.frombuffer(data, "<f4")
        if len(values) not in (item.tokens, item.turns or item.tokens):
            turns = f" or {item.turns} turns" if item.turns else ""
            return f"returned {len(values)} token scores {name!r} for {item.tokens} tokens{turns}"
        if not np.isfinite(values).all():
            return f"returned a token score {name!r} that is not finite"
    return ""


def objection(value: object) -> str:
    if not isinstance(value, numbers.Real):
        return f"returned {value!r}, which is not a number"
    if not math.isfinite(value):
        return f"returned {value!r}, which is not finite"
    return "" if is_reward(float(value)) else f"returned {value!r}, which is larger than {MAX_REWARD:g}; scale it"


if __name__ == "__main__":
    main(float(sys.argv[1]))

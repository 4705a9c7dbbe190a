"""Verifiers at work in processes of their own, so that none can hang, crash or block the worker that asks.

    pool = RewardPool(processes=2, rules=RewardRules(timeout_s=10.0))
    pool.submit(key, "final_answer", response, label, "stop")
    ...
    for score in pool.poll():              # never waits
        score.key, score.reward, score.error, score.details

What `submit_group` takes is scored by one call and comes back as a `GroupScore`, or as a `Score` with an error.

A response that keeps its verifier longer than the time limit goes to another process, which says what such a response
is worth (`reward.over_limit`). The second time it is not searched for the format, either; the third time is an error.
"""

import logging
from pathlib import Path

import msgspec

from april.processes.pool import Failure, PoolProcess, ProcessPool
from april.workers.rewards.messages import OVER_LIMIT, GroupItem, GroupScore, Item, RewardRules, Score
from april.workers.rewards.process import BATCH_ITEMS
from april.workers.rewards.verifiers import in_batches

log = logging.getLogger(__name__)

MOST_OVER_TIME = 2


class RewardPool(ProcessPool[Item | GroupItem, Score | GroupScore]):
    def __init__(self, processes: int, rules: RewardRules, prints: Path | None = None):
        """`prints`: takes what verifiers print."""
        self.rules = rules
        self.prints = prints
        self.undecided = 0
        """responses that counted as wrong because no verifier could decide them within its limits"""
        super().__init__(processes)

    def submit(
        self,
        key: int,
        verifier: str,
        response: str,
        label: str,
        finish_reason: str,
        prompt: str = "",
        tokens: int = 0,
        state: bytes = b"",
    ) -> None:
        """`tokens`: of the response; `state`: of its environment at the end."""
        self.queue.append(Item(key, verifier, response, label, finish_reason, prompt, tokens, state))
        self.dispatch()

    def submit_group(self, key: int, verifier: str, items: list[Item]) -> None:
        self.queue.append(GroupItem(key, verifier, items))
        self.dispatch()

    def start_process(self) -> PoolProcess:
        module, answer = "april.workers.rewards.process", Score | GroupScore
        return PoolProcess(module, self.rules, self.rules.timeout_s, answer, self.prints)

    def charge(self, item: Item | GroupItem, failure: str) -> Score:
        return Score(item.key, None, f"verifier {item.verifier!r}: {failure}")

    def again(self, item: Item | GroupItem, failure: Failure) -> Item | GroupItem | None:
        wrong = failure.of_time and self.rules.over_limit == "wrong" and item.over_time < MOST_OVER_TIME
        return msgspec.structs.replace(item, over_time=item.over_time + 1) if wrong else None

    def poll(self) -> list[Score | GroupScore]:
        answers = super().poll()
        for answer in answers:
            self.count_undecided(answer.scores if isinstance(answer, GroupScore) else [answer])
        return answers

    def count_undecided(self, scores: list[Score]) -> None:
        """Said at the first, second, fourth ... of them."""
        for score in scores:
            if score.details.get(OVER_LIMIT):
                self.undecided += 1
                if self.undecided.bit_count() == 1:
                    log.warning("%d responses were beyond their verifier's limits and count as wrong", self.undecided)

    def room(self, item: Item | GroupItem) -> int:
        return BATCH_ITEMS if in_batches(item.verifier) else super().room(item)

"""Pool of verifier processes, so that no verifier can hang, crash or block the worker.

    pool = RewardPool(processes=2, rules=RewardRules(timeout_s=10.0))
    pool.submit(key, "final_answer", response, label, "stop")
    ...
    for score in pool.poll():              # never waits
        score.key, score.reward, score.error, score.details

`submit_group` scores several responses in one call; its result is a `GroupScore`, or a `Score` with an error.

A response that exceeds the time limit goes to another process, which scores it by `reward.over_limit` without calling
the verifier. If the response exceeds the limit again, the format check is skipped too; a third time is an error.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from april.util.pool import Failure, PoolProcess, ProcessPool
from april.workers.rewards.messages import OVER_LIMIT, GroupItem, GroupScore, Item, RewardRules, Score
from april.workers.rewards.parts import scored_in_batches
from april.workers.rewards.process import BATCH_ITEMS

log = logging.getLogger(__name__)

MAX_TIMEOUTS = 2


class RewardPool(ProcessPool[Item | GroupItem, Score | GroupScore]):
    def __init__(self, processes: int, rules: RewardRules, output_file: Path | None = None):
        """`processes`: number of verifier processes. `output_file`: file for what verifiers print; None for the
        worker's own output."""
        self.rules = rules
        self.output_file = output_file
        self.undecided = 0
        """Number of responses counted as wrong because their verifier could not decide them within its limits."""
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
        """Queue a response for scoring; its `Score` has this `key`. `verifier`: name of the verifier. `tokens`: length
        of the response. `state`: final state of its environment (MessagePack)."""
        self.put(Item(key, verifier, response, label, finish_reason, prompt, tokens, state))

    def submit_group(self, key: int, verifier: str, items: list[Item]) -> None:
        self.put(GroupItem(key, verifier, items))

    def start_process(self) -> PoolProcess:
        module, answer = "april.workers.rewards.process", Score | GroupScore
        return PoolProcess(module, self.rules, self.rules.timeout_s, answer, self.output_file)

    def charge(self, item: Item | GroupItem, failure: str) -> Score:
        return Score(item.key, None, f"verifier {item.verifier!r}: {failure}")

    def retry(self, item: Item | GroupItem, failure: Failure) -> Item | GroupItem | None:
        wrong = failure.timed_out and self.rules.over_limit == "wrong" and item.timeouts < MAX_TIMEOUTS
        return msgspec.structs.replace(item, timeouts=item.timeouts + 1) if wrong else None

    def poll(self) -> list[Score | GroupScore]:
        answers = super().poll()
        for answer in answers:
            self.count_undecided(answer.scores if isinstance(answer, GroupScore) else [answer])
        return answers

    def count_undecided(self, scores: list[Score]) -> None:
        """Count those of `scores` whose verifier could not decide a response within its limits, so that it counts as
        wrong; logs a warning at the 1st, 2nd, 4th, 8th ... of them."""
        for score in scores:
            if score.details.get(OVER_LIMIT):
                self.undecided += 1
                if self.undecided.bit_count() == 1:
                    log.warning("%d responses were beyond their verifier's limits and count as wrong", self.undecided)

    def joins(self, item: Item | GroupItem, batch: Sequence[Item | GroupItem]) -> bool:
        same = item.verifier == batch[0].verifier and not (item.timeouts or batch[0].timeouts)
        return same and len(batch) < BATCH_ITEMS and scored_in_batches(item.verifier, self.rules)

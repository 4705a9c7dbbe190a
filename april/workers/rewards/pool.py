"""Verifiers at work in processes of their own, so that none can hang, crash or block the worker that asks.

    pool = RewardPool(processes=2, rules=RewardRules(timeout_s=10.0))
    pool.submit(key, "final_answer", response, label, "stop")
    ...
    for score in pool.poll():              # never waits
        score.key, score.reward, score.error, score.details

What `submit_group` takes is scored by one call and comes back as a `GroupScore`, or as a `Score` with an error.
"""

from april.processes.pool import PoolProcess, ProcessPool
from april.workers.rewards.messages import GroupItem, GroupScore, Item, RewardRules, Score
from april.workers.rewards.process import BATCH_ITEMS
from april.workers.rewards.verifiers import in_batches


class RewardPool(ProcessPool[Item | GroupItem, Score | GroupScore]):
    def __init__(self, processes: int, rules: RewardRules):
        self.rules = rules
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
        return PoolProcess("april.workers.rewards.process", self.rules, self.rules.timeout_s, Score | GroupScore)

    def charge(self, item: Item | GroupItem, failure: str) -> Score:
        return Score(item.key, None, f"verifier {item.verifier!r}: {failure}")

    def room(self, item: Item | GroupItem) -> int:
        return BATCH_ITEMS if in_batches(item.verifier) else super().room(item)

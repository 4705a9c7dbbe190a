"""Environments at work in processes of their own: a call that hangs or crashes costs its own sample, nothing else."""

from april.environments.messages import Answer, Call, EnvironmentRules
from april.processes.pool import PoolProcess, ProcessPool


class EnvironmentPool(ProcessPool[Call, Answer]):
    """Every call that is submitted comes back exactly once, with an answer or with an error."""

    def __init__(self, processes: int, rules: EnvironmentRules):
        self.rules = rules
        super().__init__(processes)

    def submit(self, call: Call) -> None:
        self.queue.append(call)
        self.dispatch()

    def start_process(self) -> PoolProcess:
        return PoolProcess("april.environments.process", self.rules, self.rules.timeout_s, Answer)

    def charge(self, item: Call, failure: str) -> Answer:
        return Answer(item.key, error=failure)

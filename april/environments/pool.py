"""Pool of environment processes: a call that hangs or crashes affects only its own sample."""

from april.environments.messages import EnvironmentAnswer, EnvironmentCall, EnvironmentRules
from april.processes.pool import PoolProcess, ProcessPool


class EnvironmentPool(ProcessPool[EnvironmentCall, EnvironmentAnswer]):
    """Every submitted call gets exactly one answer, which has an observation or an error."""

    def __init__(self, processes: int, rules: EnvironmentRules):
        self.rules = rules
        super().__init__(processes)

    def submit(self, call: EnvironmentCall) -> None:
        self.queue.append(call)
        self.dispatch()

    def start_process(self) -> PoolProcess:
        return PoolProcess("april.environments.process", self.rules, self.rules.timeout_s, EnvironmentAnswer)

    def charge(self, item: EnvironmentCall, failure: str) -> EnvironmentAnswer:
        return EnvironmentAnswer(item.key, error=failure)

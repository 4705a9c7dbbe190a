"""Rewards of a Task class of the `verifiers` library (0.3 and 0.4): methods that read the conversation.

    reward.name = "verifiers:my_environment:MyTask"     # the weighted sum of its methods under @reward

PrimeIntellect-ai/verifiers 0.4.0: `Task.score` of verifiers/v1/task.py, `Trace.reward` of verifiers/v1/trace.py.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from april.workers.rewards.columns import columns_in


def verifier_of_task(kind: Any) -> Callable[..., tuple[float, dict[str, float]]]:
    """A verifier that scores with a Task class.

    Raises LookupError for a class that is not a Task, or whose rewards need the runtime that a task ran in.
    """
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    if not issubclass(kind, vf.Task):
        raise LookupError(f"{kind.__name__} is a class, and no Task of verifiers")
    data_type = kind.data_type()
    own = {name: field for name, field in data_type.model_fields.items() if name not in vf.TaskData.model_fields}
    needed = [name for name, field in own.items() if field.is_required()] or list(own)[:1]
    rewards = [method for _, method in inspect.getmembers(kind, inspect.isfunction) if hasattr(method, "reward")]
    if needs_runtime := next((method for method in rewards if "runtime" in inspect.signature(method).parameters), None):
        raise LookupError(
            f"its reward {needs_runtime.__name__!r} wants the runtime of a task, and a verifier of April's has none"
        )
    if not rewards:
        raise LookupError(f"{kind.__name__} has no method under @reward")

    def verifier(response: str, label: str, finish_reason: str, prompt: str) -> tuple[float, dict[str, float]]:
        task = kind(data_type(prompt=prompt, **columns_in(label, needed, any_name=False)))
        messages = [
            vf.MessageNode(message=vf.UserMessage(content=prompt)),
            vf.MessageNode(parent=0, message=vf.AssistantMessage(content=response), sampled=True),
        ]
        trace = vf.Trace(
            task=vf.TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            state=state_cls(kind)(),
            nodes=messages,
            is_completed=True,
            ok=True,
            stop_condition=finish_reason,
        )
        asyncio.run(task.score(trace))
        if missing := next((name for name, reward in trace.rewards.items() if reward is None), None):
            raise ValueError(f"verifiers has left its reward {missing!r} out")
        numbers: dict[str, Any] = {name: reward.score for name, reward in trace.rewards.items()} | trace.metrics
        return float(trace.reward), {name: float(value) for name, value in numbers.items() if value is not None}

    return verifier

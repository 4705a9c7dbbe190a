"""Adapters for reward functions written for another framework, called the way that framework calls them.

    reward.name = "trl:my_rewards:func"          # TRL: func(prompts, completions, **columns) -> list[float]
    reward.name = "trl_text:my_rewards:func"     # the same, with prompts and completions as texts
    reward.name = "verl:my_rewards:compute_score"       # verl: (data_source, solution_str, ground_truth, extra_info)
    reward.name = "verifiers:my_rewards:func"    # verifiers: prompt, completion, answer, state, info, task
    reward.name = "verifiers:my_environment:MyTask"     # a Task class: the sum of its @reward methods

Columns of the dataset row are in the label: `data.label_key = "data_source,reward_model.ground_truth"` makes it
a JSON object of several columns. Call conventions as in huggingface/trl at f2cd57710 (GRPOTrainer._calculate_rewards),
verl-project/verl at 1dda039b9 (verl/experimental/reward_loop), PrimeIntellect-ai/verifiers at da3050651 (Rubric).
"""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from april.wire.limits import FEEDBACK

Function = Callable[..., Any]
RowPrompt = str | list[dict[str, Any]]
"""A prompt as its row has it: a text or chat messages."""
TRAINER_PARAMETERS = ("completion_ids", "completions_ids", "prompt_ids", "trainer_state", "environments")
"""Parameters of TRL's reward functions for which April has no values."""


class Interface(NamedTuple):
    """Turns another framework's function into a verifier of one response (`single`) or of a group (`group`)."""

    single: Callable[[Function], Function]
    group: Callable[[Function], Function] | None = None
    names: tuple[str, ...] = ()
    """Names of parameters that only functions of this framework have. A function with one of them and no prefix is
    refused, with the framework's name."""


def adapted(function: Function, prefix: str, as_group: bool) -> Function:
    """A verifier that calls a framework's function; `prefix`: as in `INTERFACES`. `as_group`: it scores a whole group
    in one call, else one response.

    Raises LookupError for a function that cannot be called this way.
    """
    interface = INTERFACES[prefix]
    if not as_group:
        return interface.single(function)
    if interface.group is None:
        raise LookupError(f"a function of {prefix[:-1]} sees one response at a time; leave out group:")
    return interface.group(function)


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_group_verifier(function: Function, messages: bool = True) -> Function:
    parameters, any_name = parameters_of(function)
    columns = {name: needed for name, needed in parameters.items() if name not in ("prompts", "completions")}
    if wanted := next((name for name in TRAINER_PARAMETERS if columns.get(name)), None):
        raise LookupError(f"its parameter {wanted!r} is what TRL's trainer has, and a verifier of April's has not")

    def verifier(
        responses: Sequence[str], label: str, finish_reasons: Sequence[str], prompt: str, row_prompt: RowPrompt
    ) -> list[float]:
        asked = messages_of(row_prompt) if messages else row_prompt if isinstance(row_prompt, str) else prompt
        said = [[chat_message("assistant", response)] if messages else response for response in responses]
        arguments: dict[str, Any] = {"prompts": [asked] * len(responses), "completions": said}
        columns_of_row = columns_in(label, [name for name, needed in columns.items() if needed], any_name)
        arguments |= {name: [value] * len(responses) for name, value in columns_of_row.items()}
        rewards = resolved(
            function(**(arguments if any_name else {name: arguments[name] for name in parameters if name in arguments}))
        )
        if None in rewards:
            raise ValueError("returned None, by which TRL leaves a response out; April has no reward for it then")
        return [float(reward) for reward in rewards]

    return verifier


def trl_verifier(function: Function, messages: bool = True) -> Function:
    group_verifier = trl_group_verifier(function, messages)

    def verifier(response: str, label: str, finish_reason: str, prompt: str, row_prompt: RowPrompt) -> float:
        return group_verifier([response], label, [finish_reason], prompt, row_prompt)[0]

    return verifier


# --- verl -------------------------------------------------------------------------------------------------------------


def verl_verifier(function: Function) -> Function:
    parameters, any_name = parameters_of(function)

    def verifier(response: str, label: str, finish_reason: str) -> tuple[float, dict[str, Any]]:
        columns_of_row = {"data_source": "", "extra_info": {}} | columns_in(label, ["ground_truth"], any_name=True)
        arguments = columns_of_row | {"solution_str": response}
        reward = resolved(
            function(**(arguments if any_name else {name: arguments[name] for name in parameters if name in arguments}))
        )
        if not isinstance(reward, dict):
            return float(reward), {}
        numbers = {name: float(value) for name, value in reward.items() if isinstance(value, int | float)}
        return numbers.pop("score"), {FEEDBACK: reward.get(FEEDBACK)} | numbers

    return verifier


# --- verifiers --------------------------------------------------------------------------------------------------------


def verifiers_verifier(function: Function) -> Function:
    if inspect.isclass(function):
        return verifier_of_task(function)
    parameters, any_name = parameters_of(function)
    known = ("prompt", "completion", "answer", "state", "info", "task")
    if wanted := next((name for name, needed in parameters.items() if needed and name not in known), None):
        raise LookupError(f"its parameter {wanted!r} is none of {', '.join(known)}; give it a default")

    def verifier(response: str, label: str, finish_reason: str, row_prompt: RowPrompt) -> float:
        columns_of_row = columns_in(label, ["answer"], any_name=False)
        arguments = {
            "prompt": messages_of(row_prompt),
            "completion": [chat_message("assistant", response)],
            "answer": columns_of_row.get("answer", ""),
            "info": columns_of_row.get("info", {}),
            "task": columns_of_row.get("task", "default"),
        }
        arguments["state"] = dict(arguments)
        return float(resolved(function(**(arguments if any_name else {name: arguments[name] for name in parameters}))))

    return verifier


def verifier_of_task(kind: Any) -> Callable[..., tuple[float, dict[str, float]]]:
    """A verifier that scores with the rewards of `kind`, a Task class of the package `verifiers`, version 0.3 or 0.4.

    Raises LookupError for a class that is not a Task, or whose rewards need the runtime that a task ran in.
    """
    import asyncio

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

    def verifier(
        response: str, label: str, finish_reason: str, row_prompt: RowPrompt
    ) -> tuple[float, dict[str, float]]:
        task = kind(data_type(prompt=row_prompt, **columns_in(label, needed, any_name=False)))
        asked = [vf.UserMessage(content=row_prompt)] if isinstance(row_prompt, str) else task.data.prompt
        messages = [
            vf.MessageNode(parent=number - 1 if number else None, message=message)
            for number, message in enumerate(asked)
        ]
        reply = vf.AssistantMessage(content=response)
        messages.append(vf.MessageNode(parent=len(messages) - 1, message=reply, sampled=True))
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


# --- shared helpers ---------------------------------------------------------------------------------------------------

LABEL_COLUMN_NAMES = ("label", "answer", "solution", "ground_truth", "target")
"""Keywords under which a function with `**columns` gets the label, if the label is no JSON object of columns."""


def columns_in(label: str, needed: Sequence[str], any_name: bool) -> dict[str, Any]:
    """The columns in a label: those of a JSON object, or else the text as the one column that a function needs.

    `needed`: required parameters. `any_name`: the function takes any keyword. Raises ValueError if several columns are
    needed and the label is not an object.
    """
    if label.startswith("{"):
        try:
            columns = json.loads(label)
        except ValueError:
            columns = None
        if isinstance(columns, dict):
            return columns
    if len(needed) > 1:
        raise ValueError(f"needs the columns {', '.join(needed)}; name them in data.label_key = {','.join(needed)!r}")
    return dict.fromkeys(needed or (LABEL_COLUMN_NAMES if any_name else ()), label)


def parameters_of(function: Function) -> tuple[dict[str, bool], bool]:
    """(for each named parameter of a function whether it is required, whether the function takes any other keyword by
    `**`)."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p.default is p.empty for p in named}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def chat_message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def messages_of(prompt: RowPrompt) -> list[dict[str, Any]]:
    """The prompt as chat messages; a plain text becomes one user message."""
    return [chat_message("user", prompt)] if isinstance(prompt, str) else prompt


def resolved(result: Any) -> Any:
    """The result of a function; if it is a coroutine, what that returns."""
    if not inspect.isawaitable(result):
        return result
    import asyncio  # slow, and seldom needed

    async def wait() -> Any:
        return await result

    return asyncio.run(wait())


def text_only(adapter: Callable[..., Function]) -> Callable[[Function], Function]:
    return lambda function: adapter(function, messages=False)


INTERFACES = {
    "trl:": Interface(trl_verifier, trl_group_verifier, ("prompts", "completions")),
    "trl_text:": Interface(text_only(trl_verifier), text_only(trl_group_verifier)),
    "verl:": Interface(verl_verifier, names=("data_source", "solution_str", "ground_truth", "extra_info")),
    "verifiers:": Interface(verifiers_verifier, names=("completion", "info", "task")),
}
"""Interface by the prefix of a verifier's name."""

"""Adapters for reward functions written for another framework, called the way that framework calls them.

    reward.name = "trl:my_rewards:func"          # TRL: func(prompts, completions, **columns) -> list[float]
    reward.name = "trl_text:my_rewards:func"     # the same, with prompts and completions as texts
    reward.name = "verl:my_rewards:compute_score"       # verl: (data_source, solution_str, ground_truth, extra_info)
    reward.name = "verifiers:my_rewards:func"    # verifiers: of prompt, completion, answer, state, info, task
    reward.name = "verifiers:my_environment:MyTask"     # its task: the sum of its methods under @reward

Columns of the dataset row reach them in the label: `data.label_key = "data_source,reward_model.ground_truth"` makes it
a JSON object of several columns. Call conventions as in huggingface/trl at f2cd57710 (GRPOTrainer._calculate_rewards),
verl-project/verl at 1dda039b9 (verl/experimental/reward_loop), PrimeIntellect-ai/verifiers at da3050651 (Rubric).
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from april.workers.rewards.columns import columns_in
from april.workers.rewards.tasks import verifier_of_task

Function = Callable[..., Any]
TRAINER_PARAMETERS = ("completion_ids", "completions_ids", "prompt_ids", "trainer_state", "environments")
"""Arguments that TRL passes to functions, and April does not have."""


class Interface(NamedTuple):
    """Turns another framework's function into a verifier of a response (`single`), and of a group."""

    single: Callable[[Function], Function]
    group: Callable[[Function], Function] | None = None


def adapted(function: Function, prefix: str, as_group: bool) -> Function:
    """A verifier that calls a framework's function; `prefix`: as in `INTERFACES`.

    Raises LookupError for a function that cannot be called this way.
    """
    interface = INTERFACES[prefix]
    if not as_group:
        return interface.single(function)
    if interface.group is None:
        raise LookupError(f"a function of {prefix[:-1]} sees one response at a time; leave out group:")
    return interface.group(function)


# --- TRL ----------------------------------------------------------------------------------------------------------


def trl_group_verifier(function: Function, messages: bool = True) -> Function:
    parameters, any_name = parameters_of(function)
    columns = {name: needed for name, needed in parameters.items() if name not in ("prompts", "completions")}
    if wanted := next((name for name in TRAINER_PARAMETERS if columns.get(name)), None):
        raise LookupError(f"its parameter {wanted!r} is what TRL's trainer has, and a verifier of April's has not")

    def verifier(responses: Sequence[str], label: str, finish_reasons: Sequence[str], prompt: str) -> list[float]:
        user_messages, assistant_messages = (
            [chat_message("user", prompt)],
            [[chat_message("assistant", response)] for response in responses],
        )
        arguments = {
            "prompts": [user_messages if messages else prompt] * len(responses),
            "completions": assistant_messages if messages else list(responses),
        }
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

    def verifier(response: str, label: str, finish_reason: str, prompt: str) -> float:
        return group_verifier([response], label, [finish_reason], prompt)[0]

    return verifier


# --- verl ---------------------------------------------------------------------------------------------------------


def verl_verifier(function: Function) -> Function:
    parameters, any_name = parameters_of(function)

    def verifier(response: str, label: str, finish_reason: str) -> tuple[float, dict[str, float]]:
        columns_of_row = {"data_source": "", "extra_info": {}} | columns_in(label, ["ground_truth"], any_name=True)
        arguments = columns_of_row | {"solution_str": response}
        reward = resolved(
            function(**(arguments if any_name else {name: arguments[name] for name in parameters if name in arguments}))
        )
        if not isinstance(reward, dict):
            return float(reward), {}
        numbers = {name: float(value) for name, value in reward.items() if isinstance(value, int | float)}
        return numbers.pop("score"), numbers

    return verifier


# --- verifiers ----------------------------------------------------------------------------------------------------


def verifiers_verifier(function: Function) -> Function:
    if inspect.isclass(function):
        return verifier_of_task(function)
    parameters, any_name = parameters_of(function)
    known = ("prompt", "completion", "answer", "state", "info", "task")
    if wanted := next((name for name, needed in parameters.items() if needed and name not in known), None):
        raise LookupError(f"its parameter {wanted!r} is none of {', '.join(known)}; give it a default")

    def verifier(response: str, label: str, finish_reason: str, prompt: str) -> float:
        columns_of_row = columns_in(label, ["answer"], any_name=False)
        arguments = {
            "prompt": [chat_message("user", prompt)],
            "completion": [chat_message("assistant", response)],
            "answer": columns_of_row.get("answer", ""),
            "info": columns_of_row.get("info", {}),
            "task": columns_of_row.get("task", "default"),
        }
        arguments["state"] = dict(arguments)
        return float(resolved(function(**(arguments if any_name else {name: arguments[name] for name in parameters}))))

    return verifier


# --- shared helpers ----------------------------------------------------------------------------------------------


def parameters_of(function: Function) -> tuple[dict[str, bool], bool]:
    """(whether each named parameter is required; whether the function takes any other keyword)."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p.default is p.empty for p in named}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def chat_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def resolved(result: Any) -> Any:
    """The result of a function, awaited if it is a coroutine's."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def text_only(adapter: Callable[..., Function]) -> Callable[[Function], Function]:
    return lambda function: adapter(function, messages=False)


INTERFACES = {
    "trl:": Interface(trl_verifier, trl_group_verifier),
    "trl_text:": Interface(text_only(trl_verifier), text_only(trl_group_verifier)),
    "verl:": Interface(verl_verifier),
    "verifiers:": Interface(verifiers_verifier),
}
"""Interface by the prefix of a verifier's name."""

"""Reward functions that were written for another framework, called as theirs calls them.

    reward.name = "trl:my_rewards:func"          # TRL: func(prompts, completions, **columns) -> list[float]
    reward.name = "trl_text:my_rewards:func"     # the same, where prompts and completions are texts
    reward.name = "verl:my_rewards:compute_score"       # verl: (data_source, solution_str, ground_truth, extra_info)
    reward.name = "verifiers:my_rewards:func"    # verifiers: of prompt, completion, answer, state, info, task
    reward.name = "verifiers:my_environment:MyTask"     # its task: what its methods under @reward are worth together

What they want of a row is in its label: `data.label_key = "data_source,reward_model.ground_truth"` makes a JSON
object of several columns. Their forms as in huggingface/trl at f2cd57710 (GRPOTrainer._calculate_rewards),
verl-project/verl at 1dda039b9 (verl/experimental/reward_loop), PrimeIntellect-ai/verifiers at da3050651 (Rubric).
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from april.workers.rewards.columns import columns_in
from april.workers.rewards.tasks import verifier_of_task

Function = Callable[..., Any]
TRAINERS_OWN = ("completion_ids", "completions_ids", "prompt_ids", "trainer_state", "environments")
"""what TRL hands to functions, and April does not have"""


class Interface(NamedTuple):
    """How a function of theirs becomes a verifier of April's, of a response and of a group."""

    of_one: Callable[[Function], Function]
    of_group: Callable[[Function], Function] | None = None


def adapted(function: Function, prefix: str, of_group: bool) -> Function:
    """Raises LookupError for what cannot be called so."""
    interface = INTERFACES[prefix]
    if not of_group:
        return interface.of_one(function)
    if interface.of_group is None:
        raise LookupError(f"a function of {prefix[:-1]} sees one response at a time; leave out group:")
    return interface.of_group(function)


# --- TRL ----------------------------------------------------------------------------------------------------------


def trl_of_group(function: Function, messages: bool = True) -> Function:
    parameters, any_name = parameters_of(function)
    columns = {name: needed for name, needed in parameters.items() if name not in ("prompts", "completions")}
    if wanted := next((name for name in TRAINERS_OWN if columns.get(name)), None):
        raise LookupError(f"its parameter {wanted!r} is what TRL's trainer has, and a verifier of April's has not")

    def verifier(responses: Sequence[str], label: str, finish_reasons: Sequence[str], prompt: str) -> list[float]:
        asked, said = [said_by("user", prompt)], [[said_by("assistant", response)] for response in responses]
        given = {
            "prompts": [asked if messages else prompt] * len(responses),
            "completions": said if messages else list(responses),
        }
        of_row = columns_in(label, [name for name, needed in columns.items() if needed], any_name)
        given |= {name: [value] * len(responses) for name, value in of_row.items()}
        worths = done(function(**(given if any_name else {name: given[name] for name in parameters if name in given})))
        if None in worths:
            raise ValueError("returned None, by which TRL leaves a response out; April has no reward for it then")
        return [float(worth) for worth in worths]

    return verifier


def trl_of_one(function: Function, messages: bool = True) -> Function:
    of_group = trl_of_group(function, messages)

    def verifier(response: str, label: str, finish_reason: str, prompt: str) -> float:
        return of_group([response], label, [finish_reason], prompt)[0]

    return verifier


# --- verl ---------------------------------------------------------------------------------------------------------


def verl_of_one(function: Function) -> Function:
    parameters, any_name = parameters_of(function)

    def verifier(response: str, label: str, finish_reason: str) -> tuple[float, dict[str, float]]:
        of_row = {"data_source": "", "extra_info": {}} | columns_in(label, ["ground_truth"], any_name=True)
        given = of_row | {"solution_str": response}
        worth = done(function(**(given if any_name else {name: given[name] for name in parameters if name in given})))
        if not isinstance(worth, dict):
            return float(worth), {}
        numbers = {name: float(value) for name, value in worth.items() if isinstance(value, int | float)}
        return numbers.pop("score"), numbers

    return verifier


# --- verifiers ----------------------------------------------------------------------------------------------------


def verifiers_of_one(function: Function) -> Function:
    if inspect.isclass(function):
        return verifier_of_task(function)
    parameters, any_name = parameters_of(function)
    known = ("prompt", "completion", "answer", "state", "info", "task")
    if wanted := next((name for name, needed in parameters.items() if needed and name not in known), None):
        raise LookupError(f"its parameter {wanted!r} is none of {', '.join(known)}; give it a default")

    def verifier(response: str, label: str, finish_reason: str, prompt: str) -> float:
        of_row = columns_in(label, ["answer"], any_name=False)
        given = {
            "prompt": [said_by("user", prompt)],
            "completion": [said_by("assistant", response)],
            "answer": of_row.get("answer", ""),
            "info": of_row.get("info", {}),
            "task": of_row.get("task", "default"),
        }
        given["state"] = dict(given)
        return float(done(function(**(given if any_name else {name: given[name] for name in parameters}))))

    return verifier


# --- what they share ----------------------------------------------------------------------------------------------


def parameters_of(function: Function) -> tuple[dict[str, bool], bool]:
    """(whether a parameter has no default, by its name; whether it takes any other)."""
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return {one.name: one.default is one.empty for one in named}, any(one.kind is one.VAR_KEYWORD for one in parameters)


def said_by(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def done(result: Any) -> Any:
    """What a function returns, also if it is a coroutine."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def texts(of: Callable[..., Function]) -> Callable[[Function], Function]:
    return lambda function: of(function, messages=False)


INTERFACES = {
    "trl:": Interface(trl_of_one, trl_of_group),
    "trl_text:": Interface(texts(trl_of_one), texts(trl_of_group)),
    "verl:": Interface(verl_of_one),
    "verifiers:": Interface(verifiers_of_one),
}
"""by what stands before the place of a function"""

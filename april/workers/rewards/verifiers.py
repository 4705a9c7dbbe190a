"""Finds verifiers by name, and calls them. A verifier computes the reward of a response.

A verifier is a function with any of the parameters `response`, `label`, `finish_reason`, `prompt`, `tokens`, `state`
(the final state of its environment) and `turns`. It returns a number, or a number and a dictionary of numbers as
details, among which `feedback` may be a text, and may add a dictionary of token scores: a number for each token of the
response, or for each turn. A custom one is named `package.module:function`. It may raise; an exception never counts as
a reward of zero.

A name with the prefix `group:` is a custom function of `responses`, `label`, `finish_reasons`, `prompt`, `tokens` (a
list) and `states`. It gets all responses of a group, and returns one result for each. `group:remote` sends a reward
model all of them in one request. `interfaces.py` has the prefixes of other frameworks' functions.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from numbers import Real
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from april.util.errors import refuse, refuse_for
from april.util.text import GROUP_REWARD
from april.wire.limits import FEEDBACK
from april.workers.rewards import VERIFIERS
from april.workers.rewards.interfaces import INTERFACES, adapted
from april.workers.rewards.messages import BatchVerifier, Item, RewardRules, Score, feedback_in, takes_items

Details = dict[str, float] | dict[str, float | str | None]
VerifierResult = float | tuple[float, Details] | tuple[float, Details, dict[str, Sequence[float]]]
Verifier = Callable[..., VerifierResult]

PARAMETERS = ("response", "label", "finish_reason", "prompt", "tokens", "state", "turns")
"""Parameters that a verifier may have. A verifier with other names gets the first three by position."""
GROUP_PARAMETERS = ("responses", "label", "finish_reasons", "prompt", "tokens", "states")
"""Parameters that a group verifier may have."""
ROW_PROMPT = "row_prompt"
"""Further parameter of adapters for other frameworks' functions: the prompt as its dataset row has it."""
POSITIONAL = 3


@cache
def find_verifier(name: str) -> BatchVerifier:
    """The named verifier as a function that scores items.

    Raises ConfigError for an unknown name, LookupError for a group name whose verifier takes one response at a time.
    """
    verifier = VERIFIERS.find(name)
    is_group, bare = name.startswith(GROUP_REWARD), VERIFIERS.without_prefix(name)
    if prefix := interface_of(name):
        verifier = adapted(verifier, prefix, is_group)
    elif is_group and bare in VERIFIERS.shipped and not getattr(verifier, "in_batches", False):
        raise LookupError(f"{bare} sees one response at a time; name your own as group:package.module:function")
    known = getattr(verifier, "right_or_wrong", False)
    if getattr(verifier, "takes_items", False):
        return with_correct(verifier) if known else verifier
    parameters = GROUP_PARAMETERS if is_group else PARAMETERS
    call = bound_call(verifier, (*parameters, ROW_PROMPT) if prefix else parameters)

    def score(items: list[Item], rules: RewardRules) -> list[Score]:
        return [score_of_result(item, call(arguments_of(item))) for item in items]

    def score_group(items: list[Item], rules: RewardRules) -> list[Score]:
        return score_responses_together(call, items)

    return score_group if is_group else with_correct(score) if known else score


def with_correct(verifier: BatchVerifier) -> BatchVerifier:
    """The verifier, with the detail `correct` added to its scores: 1 for a right response, 0 for a wrong one."""

    def score(items: list[Item], rules: RewardRules) -> list[Score]:
        scores = verifier(items, rules)
        known = {score.key: {"correct": score.reward} for score in scores if score.reward is not None}
        return [replace(score, details={**known.get(score.key, {}), **score.details}) for score in scores]

    return score


def interface_of(name: str) -> str:
    """The prefix of another framework's interface in a verifier's name; empty for April's own."""
    return next((prefix for prefix in INTERFACES if name.removeprefix(GROUP_REWARD).startswith(prefix)), "")


def bound_call(verifier: Verifier, known: Sequence[str]) -> Callable[[dict[str, Any]], Any]:
    """A function that calls the verifier with those of the `known` arguments that it has parameters for.

    Raises LookupError if the verifier requires others.
    """
    by_position, by_name = positional_and_named(verifier, known)

    def call(arguments: dict[str, Any]) -> Any:
        return verifier(*(arguments[name] for name in by_position), **{name: arguments[name] for name in by_name})

    return call


def positional_and_named(verifier: Verifier, known: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    if inspect.isclass(verifier):
        raise LookupError(f"{verifier.__name__} is a class; name a function, or with 'verifiers:' a Task")
    try:
        parameters = inspect.signature(verifier).parameters.values()
    except (TypeError, ValueError):
        return known[:POSITIONAL], []
    refuse_names_of_others([p.name for p in parameters if p.default is p.empty], known)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        position_only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        return known[: len(position_only)], list(known[len(position_only) :])
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in parameters if p.name in known and p.kind is not p.POSITIONAL_ONLY]
    first = positional[:POSITIONAL]
    only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if only and all(name in known for name in only) and set(needed_names(parameters)) <= {*only, *named}:
        return only, named
    foreign = len(first) == POSITIONAL and all(p.default is p.empty and p.name not in known for p in first)
    if foreign:
        refuse_other_orders([p.name for p in first], known)
    if foreign and (more := [p.name for p in positional[POSITIONAL:] if p.default is p.empty and p.name not in known]):
        raise LookupError(f"its parameter {more[0]!r} is none of {', '.join(known)}; rename it, or give it a default")
    if foreign or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return known[:POSITIONAL], [name for name in named if name not in known[:POSITIONAL]]
    needed = [name for name in needed_names(parameters) if name not in named]
    if needed:
        raise LookupError(f"its parameter {needed[0]!r} is none of {', '.join(known)}; rename it, or give it a default")
    return [], named


def needed_names(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.default is p.empty]


def refuse_other_orders(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse, by LookupError, a function whose parameters would be bound by position to other values than their names
    say: its first name is that of several responses (such as `responses`) or of a prompt. `names`: its parameters.
    `known`: the names of the values, in the order in which it would get them."""
    if "response" in known and names[0] in ("responses", "outputs", "completions"):
        raise LookupError(f"its parameter {names[0]!r} is of several responses; begin the name with 'group:'")
    if names[0] in ("question", "questions", "query", "instruction", "problem", "input", "inputs"):
        raise LookupError(
            f"its parameter {names[0]!r} would get the {known[0]}; name its parameters among {', '.join(known)}"
        )


def refuse_names_of_others(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise LookupError if one of a function's parameter `names` is particular to another framework's functions
    (`Interface.names`). `known`: April's parameters, for the error."""
    for prefix, interface in INTERFACES.items():
        if theirs := [name for name in names if name in interface.names]:
            raise LookupError(
                f"its parameter {theirs[0]!r} is of {prefix[:-1]}'s interface: begin the name with {prefix!r}, or name "
                f"its parameters among {', '.join(known)}"
            )


def arguments_of(item: Item) -> dict[str, Any]:
    named = {name: getattr(item, name) for name in PARAMETERS}
    return named | {"state": state_of(item), ROW_PROMPT: row_prompt_of(item)}


def state_of(item: Item) -> Any:
    """Final state of the response's environment, decoded; None without an environment."""
    return msgspec.msgpack.decode(item.state) if item.state else None


def row_prompt_of(item: Item) -> str | list[dict[str, Any]]:
    """The prompt as the row has it, a text or chat messages; if the row's is not known, the prompt's text."""
    return msgspec.json.decode(item.row_prompt) if item.row_prompt else item.prompt


def score_responses_together(
    call: Callable[[dict[str, Any]], Sequence[VerifierResult]], items: list[Item]
) -> list[Score]:
    """Scores of all responses of a group, by one call of its verifier. `call`: function of the verifier's arguments by
    name. Raises ValueError unless it returns one result for each response."""
    results = call(
        {
            "responses": [item.response for item in items],
            "label": items[0].label,
            "finish_reasons": [item.finish_reason for item in items],
            "prompt": items[0].prompt,
            "tokens": [item.tokens for item in items],
            "states": [state_of(item) for item in items],
            ROW_PROMPT: row_prompt_of(items[0]),
        }
    )
    if len(results) != len(items):
        raise ValueError(f"returned {len(results)} rewards for {len(items)} responses")
    return [score_of_result(item, result) for item, result in zip(items, results, strict=True)]


def score_of_result(item: Item, result) -> Score:
    has_more = isinstance(result, tuple) and len(result) in (2, 3)
    reward, given, *columns = result if has_more else (result, {})
    details = {name: value for name, value in given.items() if name != FEEDBACK or isinstance(value, Real)}
    scores = {str(name): np.asarray(values, "<f4").tobytes() for each in columns for name, values in each.items()}
    return Score(item.key, reward, None, details, scores, feedback_in(given))


def right_response(name: str) -> Callable[[str], str] | None:
    """Function (label -> response that the verifier scores as correct), from the verifier's attribute `example`; None
    without one."""
    return getattr(VERIFIERS.find(name), "example", None)


def reads_state(name: str) -> bool:
    """Whether the verifier's result depends on the environment's state."""
    verifier = VERIFIERS.find(name)
    if interface_of(name):
        return False
    try:
        parameters = {"state", "states"} & inspect.signature(verifier).parameters.keys()
        return getattr(verifier, "reads_state", False) or bool(parameters)
    except (TypeError, ValueError):
        return False


@cache
def in_batches(name: str) -> bool:
    """Whether the verifier scores many items in one call; False for custom verifiers, since this function does not
    import them."""
    return name in VERIFIERS.shipped and getattr(VERIFIERS.find(name), "in_batches", False)


def check_verifier(name: str, key: str = "", url: str = "") -> None:
    """Raise ConfigError unless the verifier `name` can be found and has the packages and the address (`url`) that it
    needs. `key`: configuration key with its name, for the error."""
    key, verifier = key or VERIFIERS.key, VERIFIERS.find(name, key)
    try:
        find_verifier(name)
    except LookupError as error:
        refuse_for(key, name, "cannot be used", error)
    needed = getattr(verifier, "needs", "")
    if needed and importlib.util.find_spec(needed) is None:
        refuse(
            key, name, f"needs {needed.replace('_', '-')}, which is not installed", "`pip install 'april-rl[rewards]'`"
        )
    if getattr(verifier, "asks_a_server", False) and not url:
        refuse(key, name, "has no server", "set reward.url to its address")


# --- the verifier `environment` ---------------------------------------------------------------------------------------


@takes_items
def environment(items: list[Item], rules: RewardRules) -> list[Score]:
    """Verifier for runs with an environment: the reward is the value `reward` in the state that the environment
    returned last; other numbers in that state are details.

    The reward is 0 if the environment was never called, because the policy never ended a turn. Raises LookupError if
    the environment was called and its final state has no reward.
    """
    return [score_of_state(item) for item in items]


vars(environment)["reads_state"] = True


def score_of_state(item: Item) -> Score:
    if not item.state:
        return Score(item.key, 0.0)
    state = msgspec.msgpack.decode(item.state)
    if not isinstance(state, dict) or "reward" not in state:
        raise LookupError(
            "the environment's last state has no 'reward'; return one as Observation(text, {'reward': ...})"
        )
    details = {key: value for key, value in state.items() if key != "reward" and isinstance(value, int | float)}
    return Score(item.key, state["reward"], None, details, feedback=feedback_in(state))

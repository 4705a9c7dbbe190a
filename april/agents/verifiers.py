"""Environments of the package `verifiers` as agents, by name: `agent.program = "verifiers"`.

One says what the policy reads between its turns, and by its rubric what a conversation was worth. It speaks with the
policy as any agent does. `load_environment` is the package's API of versions 0.1 to 0.3.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import orjson

from april.agents.host import Session
from april.config import ConfigError

COLUMNS = ("example_id", "answer", "info", "task")
"""of an environment's row, beside its prompt"""
SPLITS = {"train": "get_dataset", "heldout": "get_eval_dataset"}
"""files, and where their rows come from"""
raised: ContextVar[list[Exception]] = ContextVar("raised")
"""by the functions of a rubric that look at this session"""


class Verifiers:
    """A program whose keys are `agent.options`: the environment's name, and what it is loaded with."""

    def __init__(self, name: str, arguments: dict[str, Any] | None = None):
        """Raises ConfigError."""
        self.environment = load(name, arguments or {})
        if self.environment.requires_group_rollouts:
            raise ConfigError(
                f"key 'agent.options' = {{'name': {name!r}}} has a rubric that sees a whole group, and "
                "an agent's session is one conversation; use an environment that scores each by itself"
            )
        watch(self.environment.rubric)
        from openai import DefaultAsyncHttpxClient

        self.http = DefaultAsyncHttpxClient(timeout=None)
        """one for all sessions: making one takes longer than a turn"""

    async def __call__(self, session: Session) -> float:
        """The rubric's reward. Raises what the environment or its rubric raises: neither is a reward of 0."""
        import verifiers as vf
        from openai import AsyncOpenAI

        speaks = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=self.http, timeout=None)
        client = vf.OpenAIChatCompletionsClient(speaks)
        state = await self.environment.rollout(row_of(session.task), client, "policy", {})
        # An answer without any text is the policy's own doing: the conversation ends there, and is worth what it is.
        if state["error"] and not isinstance(state["error"], vf.EmptyModelResponseError):
            raise state["error"]
        failures: list[Exception] = []
        raised.set(failures)
        await self.environment.rubric.score_rollout(state)
        await self.environment.rubric.cleanup(state)
        if failures:
            raise failures[0]
        return state["reward"]


def load(name: str, arguments: dict[str, Any]) -> Any:
    """The `vf.Environment` of that name. Raises ConfigError."""
    try:
        import verifiers as vf

        return vf.load_environment(name, **arguments)
    except (ImportError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"key 'agent.options' = {{'name': {name!r}}} loads no environment of verifiers: {error}; "
            "`pip install 'april-rl[verifiers]'`, install the environment's own package beside it, or put its module "
            "beside the configuration"
        ) from error


def row_of(task: dict[str, Any]) -> dict[str, Any]:
    """A task as a row of an environment: what `write_rows` has put into the label, or the label as its answer."""
    try:
        row = orjson.loads(task["label"])
    except orjson.JSONDecodeError:
        row = None
    if not isinstance(row, dict) or "example_id" not in row:
        row = {"example_id": task["group"], "answer": task["label"]}
    return {"prompt": task["messages"], "info": {}} | row


def watch(rubric: Any) -> None:
    """The package takes what raises for a 0; what its functions raise is kept beside that."""
    rubric.funcs = [watched(function) for function in rubric.funcs]
    for inner in getattr(rubric, "rubrics", ()):
        watch(inner)


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*arguments: Any, **named: Any) -> Any:
        try:
            worth = function(*arguments, **named)
            return await worth if inspect.isawaitable(worth) else worth
        except Exception as error:
            raised.get().append(error)
            raise

    return call


# --- rows -----------------------------------------------------------------------------------------------------


def write_rows(name: str, arguments: dict[str, Any], folder: Path, most: int) -> Iterator[Path]:
    """Write the rows of an environment for `data.path` and `data.eval_path`, at most so many of each. Raises
    ConfigError."""
    environment = load(name, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    for split, getter in SPLITS.items():
        path = folder / f"{split}.jsonl"
        with path.open("wb") as file:
            for row in getattr(environment, getter)(most):
                label = {key: row[key] for key in COLUMNS if row.get(key) not in (None, "", {})}
                line = {"prompt": [said(message) for message in row["prompt"]], "label": orjson.dumps(label).decode()}
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        yield path


def said(message: dict[str, Any]) -> dict[str, Any]:
    """Without what a table of several kinds of messages leaves empty."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}

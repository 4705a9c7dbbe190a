"""Environments of the package `verifiers` as agents: `agent.program = "verifiers"`.

The environment writes the user messages between the policy's turns, and its rubric scores the conversation.
`load_environment` is the package's API of versions 0.1 to 0.3.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import orjson

from april.agents.host import HostedSession
from april.util.errors import refuse

COLUMNS = ("example_id", "answer", "info", "task")
"""Columns of an environment's dataset row that `write_rows` writes as the row's label, a JSON object. The prompt is
written as the row's prompt."""
SPLITS = {"train": "get_dataset", "heldout": "get_eval_dataset"}
"""Name of each file that `write_rows` writes -> the environment's method that returns the file's rows."""
rubric_errors: ContextVar[list[Exception]] = ContextVar("rubric_errors")
"""Exceptions of the rubric's functions in the current session."""


class Verifiers:
    """Agent program that runs an environment of `verifiers`; `agent.options` holds the environment's name and its
    arguments."""

    def __init__(self, name: str, arguments: dict[str, Any] | None = None):
        """Load the environment `name` with the keyword `arguments`. Raises ConfigError if it cannot be loaded, or
        scores a group as a whole."""
        self.environment = load(name, arguments or {})
        if self.environment.requires_group_rollouts:
            refuse(
                "agent.options",
                {"name": name},
                "has a rubric that sees a whole group, and an agent's session is one conversation",
                "use an environment that scores each by itself",
            )
        record_errors(self.environment.rubric)
        from openai import DefaultAsyncHttpxClient

        self.http = DefaultAsyncHttpxClient(timeout=None)

    async def __call__(self, session: HostedSession) -> float:
        """The rubric's reward. Exceptions of the environment or its rubric are raised: a crash is not a reward of 0."""
        import verifiers as vf

        client = vf.OpenAIChatCompletionsClient(session.openai_client(self.http))
        state = await self.environment.rollout(row_of(session.task), client, "policy", {})
        # An answer without text is the policy's fault: the conversation ends there and is scored as it stands.
        if state["error"] and not isinstance(state["error"], vf.EmptyModelResponseError):
            raise state["error"]
        failures: list[Exception] = []
        rubric_errors.set(failures)
        await self.environment.rubric.score_rollout(state)
        await self.environment.rubric.cleanup(state)
        if failures:
            raise failures[0]
        return state["reward"]


def load(name: str, arguments: dict[str, Any]) -> Any:
    """The `vf.Environment` that `load_environment` of the package `verifiers` makes of the name and keyword arguments.
    Raises ConfigError."""
    try:
        import verifiers as vf

        return vf.load_environment(name, **arguments)
    except (ImportError, ValueError, RuntimeError, AttributeError) as error:
        refuse(
            "agent.options",
            {"name": name},
            f"loads no environment of verifiers: {error}",
            "`pip install 'april-rl[verifiers]'`, install the environment's own package beside it, or put "
            "its module beside the configuration",
            cause=error,
        )


def row_of(task: dict[str, Any]) -> dict[str, Any]:
    """The environment's dataset row for a task: the JSON object that `write_rows` put into the task's label. A label
    that is no such object becomes the row's answer."""
    try:
        row = orjson.loads(task["label"])
    except orjson.JSONDecodeError:
        row = None
    if not isinstance(row, dict) or "example_id" not in row:
        row = {"example_id": task["group"], "answer": task["label"]}
    return {"prompt": task["messages"], "info": {}} | row


def record_errors(rubric: Any) -> None:
    """Wrap the rubric's functions to record their exceptions, which the package itself turns into a reward of 0."""
    rubric.funcs = [recording_errors(function) for function in rubric.funcs]
    for inner in getattr(rubric, "rubrics", ()):
        record_errors(inner)


def recording_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            value = function(*arguments, **keywords)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            rubric_errors.get().append(error)
            raise

    return call


# --- rows -----------------------------------------------------------------------------------------------------


def write_rows(name: str, arguments: dict[str, Any], folder: Path, max_rows: int) -> Iterator[Path]:
    """Write an environment's rows as JSONL for `data.path` and `data.eval_path`, at most `max_rows` to each file (-1:
    all); yields the paths of the files. Raises ConfigError."""
    environment = load(name, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    for split, getter in SPLITS.items():
        path = folder / f"{split}.jsonl"
        with path.open("wb") as file:
            for row in getattr(environment, getter)(max_rows):
                label = {key: row[key] for key in COLUMNS if row.get(key) not in (None, "", {})}
                prompt = [without_empty_fields(message) for message in row["prompt"]]
                line = {"prompt": prompt, "label": orjson.dumps(label).decode()}
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        yield path


def without_empty_fields(message: dict[str, Any]) -> dict[str, Any]:
    """A copy of the message without the fields that are None, except `content`. A table with several kinds of messages
    has None for each field that a message lacks."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}

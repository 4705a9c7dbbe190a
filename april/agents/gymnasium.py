"""Environments of the package `gymnasium` as agents, by name: `agent.program = "gymnasium"`.

Those whose actions can be said: a text, or one of a few with a name each. What the policy reads is what the environment
shows as text. Siblings of a group begin alike, so that a program that is run again meets what it met before.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from april.agents.host import Session
from april.config import ConfigError

MARKED, COLOURS = re.compile(r"\x1b\[[\d;]*m(.+?)\x1b\[0m"), re.compile(r"\x1b\[[\d;]*m")
"""what an environment marks by a colour, and colours alone"""
TOO_LONG = "context_length_exceeded"


class Gymnasium:
    """A program whose keys are `agent.options`."""

    def __init__(
        self, name: str, arguments: dict[str, Any] | None = None, actions: Sequence[str] = (), turns: int = 32,
        reminder: str = "Say one of: {actions}",
    ):  # fmt: skip
        """`actions`: words for those of the environment, in their order, numbers if there are none; `reminder`: what
        an answer without any of them is answered. Raises ConfigError."""
        self.name, self.arguments, self.turns, self.reminder = name, arguments or {}, turns, reminder
        environment = self._make()
        self.actions = actions_of(environment.action_space, name, list(actions))
        environment.close()
        self.pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, self.actions or ())).casefold()})(?!\w)")
        from openai import DefaultAsyncHttpxClient

        self.http = DefaultAsyncHttpxClient(timeout=None)
        """one for all sessions: making one takes longer than a turn"""

    async def __call__(self, session: Session) -> float:
        """The sum of what the environment gives. Raises what it raises: that is no reward of 0."""
        environment = self._make()
        try:
            return await self._play(session, environment)
        finally:
            environment.close()

    async def _play(self, session: Session, environment: Any) -> float:
        from openai import AsyncOpenAI, BadRequestError

        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=self.http, timeout=None)
        observation, _ = await in_thread(partial(environment.reset, seed=seed_of(session.task)))
        messages, worth = begun(session.task["messages"], text_of(environment, observation)), 0.0
        for _ in range(self.turns):
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
            except BadRequestError as error:
                if error.code == TOO_LONG:
                    break  # the policy's own doing: the conversation ends there, and is worth what it is
                raise
            said = reply.choices[0].message.content or ""
            action, shown = self._understood(said), self.reminder.format(actions=", ".join(self.actions or ()))
            if action is not None:
                observation, reward, ended, cut, _ = await in_thread(partial(environment.step, action))
                worth += float(reward)
                if ended or cut:
                    break
                shown = text_of(environment, observation)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]
        return worth

    def _make(self) -> Any:
        try:
            import gymnasium

            return gymnasium.make(self.name, **self.arguments)
        except Exception as error:  # of the package or of the environment, of whatever kind
            raise unusable(self.name, f"makes no environment: {error}") from error

    def _understood(self, said: str) -> Any:
        """The action that an answer names last; None if it names none."""
        if self.actions is None:
            return said
        found = self.pattern.findall(said.casefold())
        return [word.casefold() for word in self.actions].index(found[-1]) if found else None


async def in_thread(call: Callable[[], Any]) -> Any:
    """No thread can be ended alone. A cancellation waits for it, and where it hangs its process is ended instead."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def actions_of(space: Any, name: str, words: list[str]) -> list[str] | None:
    """What each action is called; None where it is said as it is. Raises ConfigError."""
    from gymnasium.spaces import Discrete, Text

    if isinstance(space, Text) and not words:
        return None
    if not isinstance(space, Discrete) or space.start:
        raise unusable(name, f"has actions that no word names, {space}")
    if words and len(words) != space.n:
        raise unusable(name, f"has {space.n} actions, and 'actions' = {words!r} names {len(words)}")
    return words or [str(number) for number in range(space.n)]


def unusable(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"key 'agent.options' = {{'name': {name!r}}} {why}; `pip install 'april-rl[gymnasium]'`, and see "
        "docs/agents.md for those that can be used"
    )


def seed_of(task: dict[str, Any]) -> int:
    """The row's label if that is a number, otherwise the group's."""
    return int(task["label"]) if task["label"].isdecimal() else abs(task["group"])


def begun(messages: list[dict[str, Any]], shown: str) -> list[dict[str, Any]]:
    """What the row tells the policy, and behind it what the environment shows first."""
    *before, last = messages
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*before, last | {"content": f"{last['content']}\n{shown}"}]
    return [*messages, {"role": "user", "content": shown}]


def text_of(environment: Any, observation: Any) -> str:
    """What is drawn as text, with marks in place of colours, or else the observation."""
    if environment.render_mode == "ansi":
        return COLOURS.sub("", MARKED.sub(r"[\1]", environment.render())).strip()
    return str(observation)

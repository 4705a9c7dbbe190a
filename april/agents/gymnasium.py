"""Environments of the package `gymnasium` as agents: `agent.program = "gymnasium"`.

Supported action spaces are Text, and Discrete with a word for each action; observations are rendered as text. All
samples of a group start from the same seed, so that a replayed program sees the same observations.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from april.agents.host import HostedSession
from april.util.errors import refuse

HIGHLIGHT, COLOUR = re.compile(r"\x1b\[[\d;]*m(.+?)\x1b\[0m"), re.compile(r"\x1b\[[\d;]*m")
"""Regular expressions: text that an environment has highlighted by an ANSI colour code, and any such code."""
CONTEXT_EXCEEDED = "context_length_exceeded"


class Gymnasium:
    """Agent program that plays an environment of `gymnasium`; its constructor arguments are the keys of
    `agent.options`."""

    def __init__(
        self, name: str, arguments: dict[str, Any] | None = None, actions: Sequence[str] = (), turns: int = 32,
        reminder: str = "Say one of: {actions}",
    ):  # fmt: skip
        """`name`, `arguments`: those of `gymnasium.make`. `actions`: a word for each action of the environment, in its
        order; by default their numbers. `turns`: most answers of the policy in an episode. `reminder`: the user message
        after an answer that names no action. Raises ConfigError."""
        self.name, self.arguments, self.turns, self.reminder = name, arguments or {}, turns, reminder
        environment = self._make()
        self.actions = actions_of(environment.action_space, name, list(actions))
        environment.close()
        self.pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, self.actions or ())).casefold()})(?!\w)")
        from openai import DefaultAsyncHttpxClient

        self.http = DefaultAsyncHttpxClient(timeout=None)

    async def __call__(self, session: HostedSession) -> float:
        """Play one episode; returns the sum of the rewards. The environment's exceptions are raised: a crash is not a
        reward of 0."""
        environment = self._make()
        try:
            return await self._play(session, environment)
        finally:
            environment.close()

    async def _play(self, session: HostedSession, environment: Any) -> float:
        from openai import BadRequestError

        client = session.openai_client(self.http)
        observation, _ = await in_thread(partial(environment.reset, seed=seed_of(session.task)))
        messages, total_reward = first_messages(session.task["messages"], text_of(environment, observation)), 0.0
        for _ in range(self.turns):
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
            except BadRequestError as error:
                if error.code == CONTEXT_EXCEEDED:
                    break  # the policy filled its context: the episode ends here with the reward so far
                raise
            answer = reply.choices[0].message.content or ""
            action = self._parse_action(answer)
            observation_text = self.reminder.format(actions=", ".join(self.actions or ()))
            if action is not None:
                observation, reward, terminated, truncated, _ = await in_thread(partial(environment.step, action))
                total_reward += float(reward)
                if terminated or truncated:
                    break
                observation_text = text_of(environment, observation)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation_text}]
        return total_reward

    def _make(self) -> Any:
        try:
            import gymnasium

            return gymnasium.make(self.name, **self.arguments)
        except Exception as error:  # whatever the package or the environment raises
            refuse_environment(self.name, f"makes no environment: {error}", error)

    def _parse_action(self, answer: str) -> Any:
        """Action that the policy's answer mentions last; None if it mentions none."""
        if self.actions is None:
            return answer
        found = self.pattern.findall(answer.casefold())
        return [word.casefold() for word in self.actions].index(found[-1]) if found else None


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run a call in a thread. A cancellation waits for the call, since a thread cannot be killed; if the call
    hangs, the runner kills the process."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def actions_of(space: Any, name: str, words: list[str]) -> list[str] | None:
    """The word of each action: `words`, or their numbers if it is empty; None where the answer itself is the action (a
    Text space). `space`: the action space of the environment `name`. Raises ConfigError."""
    from gymnasium.spaces import Discrete, Text

    if isinstance(space, Text) and not words:
        return None
    if not isinstance(space, Discrete) or space.start:
        refuse_environment(name, f"has actions that no word names, {space}")
    if words and len(words) != space.n:
        refuse_environment(name, f"has {space.n} actions, and 'actions' = {words!r} names {len(words)}")
    return words or [str(number) for number in range(space.n)]


def refuse_environment(name: str, why: str, cause: Exception | None = None) -> NoReturn:
    fix = "`pip install 'april-rl[gymnasium]'`, and see docs/agents.md for those that can be used"
    refuse("agent.options", {"name": name}, why, fix, cause)


def seed_of(task: dict[str, Any]) -> int:
    """Seed of the environment: the row's label if that is a number, otherwise the group number."""
    return int(task["label"]) if task["label"].isdecimal() else abs(task["group"])


def first_messages(messages: list[dict[str, Any]], observation_text: str) -> list[dict[str, Any]]:
    """The row's messages, with the first observation appended to the last user message."""
    *before, last = messages
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*before, last | {"content": f"{last['content']}\n{observation_text}"}]
    return [*messages, {"role": "user", "content": observation_text}]


def text_of(environment: Any, observation: Any) -> str:
    """The observation as text: the ANSI rendering with highlights as [brackets], otherwise `str(observation)`."""
    if environment.render_mode == "ansi":
        return COLOUR.sub("", HIGHLIGHT.sub(r"[\1]", environment.render())).strip()
    return str(observation)

"""Agent programs for tests. Each answer that a program reads is appended as a line to a file of its sample, so that
repeated executions can be compared."""

import asyncio
import base64
import contextlib
import io
import os
import random
import subprocess
import threading
import uuid
from functools import partial
from pathlib import Path

import orjson
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

HTTP = DefaultAsyncHttpxClient()
TURNS = 3


async def in_three_turns(session):
    """Agent of three turns with a pause after each; the reward is computed from the answers."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=HTTP, timeout=170)
    execution, messages, read = uuid.uuid4().hex, list(session.task["messages"]), []
    for turn in range(TURNS):
        stream = turn == 1
        reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=4, stream=stream)
        said = await joined(reply) if stream else reply.choices[0].message.content
        read.append(said)
        write(session.task, {"execution": execution, "turn": turn, "said": said})
        await asyncio.sleep(0.1)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "+1="}]
    return float(sum(map(len, read)) % 2)


async def with_pictures(session):
    """Agent that shows a picture of its sample's own colour in its second turn and another one in its third, and goes
    back to its first turn to show only that other one."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=HTTP, timeout=170)
    execution, read = uuid.uuid4().hex, []
    first, second = ({"type": "image_url", "image_url": {"url": own_picture(session.task, n)}} for n in (0, 1))

    async def ask(messages):
        reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
        read.append(reply.choices[0].message.content)
        write(session.task, {"execution": execution, "turn": len(read), "said": read[-1]})
        await asyncio.sleep(0.1)
        return [*messages, {"role": "assistant", "content": read[-1]}]

    begun = await ask([user("R?")])
    shown = await ask([*begun, user([first, {"type": "text", "text": "#"}])])
    await ask([*shown, user([second])])
    await ask([*begun, user([second])])
    return float(sum(map(len, read)) % 2)


def own_picture(task, number):
    """The data: URL of a picture whose colour says which of a sample's pictures it is."""
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (16, 16), (task["group"] % 256, task["index"], number)).save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


async def with_branches(session):
    """Agent that forks its session: a plan, two parallel helpers, two parallel continuations of the plan, and a
    compacted history."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=HTTP, timeout=170)
    execution, read, task = uuid.uuid4().hex, [], list(session.task["messages"])

    async def ask(*conversations):
        replies = await asyncio.gather(
            *(client.chat.completions.create(model="any", messages=one, max_tokens=4) for one in conversations)
        )
        for reply in replies:
            read.append(reply.choices[0].message.content)
            write(session.task, {"execution": execution, "turn": len(read), "said": read[-1]})
        await asyncio.sleep(0.1)
        return read[-len(conversations) :]

    [plan] = await ask(task)
    helped = await ask([user("1+")], [user("2+")])
    planned = [*task, {"role": "assistant", "content": plan}]
    found = await ask([*planned, user("+")], [*planned, user("*")])
    await ask([*task, user("".join([*helped, *found]))])
    return float(sum(map(len, read)) % 2)


async def erratic(session):
    """Agent that sometimes raises, makes a different request when it is run again, and abandons its last request."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=HTTP, timeout=170)
    ask = partial(client.chat.completions.create, model="any", max_tokens=4)
    messages = list(session.task["messages"])
    said = (await ask(messages=messages)).choices[0].message.content
    if random.random() < 0.05:
        raise RuntimeError("as it does now and then")
    messages += [{"role": "assistant", "content": said}, user(random.choice("123") + "+")]
    await ask(messages=messages)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ask(messages=[user("9*")]), 0.05)
    return float(len(said) % 2)


async def any_of_them(session):
    """Agent that behaves as one of the three others, each in a third of the groups."""
    return await (in_three_turns, with_branches, erratic)[session.task["group"] % 3](session)


def user(text):
    return {"role": "user", "content": text}


async def joined(reply):
    return "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])


def write(task, line):
    file = Path(os.environ["READ_BY_AGENTS"], f"{task['group']}-{task['index']}")
    with file.open("ab") as lines:
        lines.write(orjson.dumps(line) + b"\n")


def as_left(responses, label, states):
    """Reward of a whole group, computed from the states that its agents have left."""
    return [float(state["said"] % 2) for state in states]


def as_told(session):
    """Agent as a plain (not async) function, which does what its task says: hang, exit, raise or return a reward."""
    if "hangs" in session.task:
        tool = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(session.task["hangs"]).write_text(f"{tool.pid}\n")
        threading.Event().wait()
    session.state = session.task.get("leaves")
    if "exits" in session.task:
        os._exit(session.task["exits"])
    if "raises" in session.task:
        raise ValueError(session.task["raises"])
    return session.task["returns"]


class Made:
    """Agent that is a class, instantiated once per process with the keyword arguments of agent.options."""

    def __init__(self, times):
        self.times = times + 0

    async def __call__(self, session):
        return self.times * session.task["returns"]


AGENT = ["--agent.sessions", "16", "--sampling.max_response_tokens", "48",
         "--agent.chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}"]  # fmt: skip

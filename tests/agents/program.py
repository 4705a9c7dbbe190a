"""Agents for the tests. Each answer that one reads is a line of a file of its sample, so that runs can be compared."""

import asyncio
import os
import uuid
from pathlib import Path

import orjson
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

HTTP = DefaultAsyncHttpxClient()
TURNS = 3


async def in_three_turns(session):
    """Works a little between its turns; the reward is made of what it has read."""
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


async def joined(reply):
    return "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])


def write(task, line):
    file = Path(os.environ["READ_BY_AGENTS"], f"{task['group']}-{task['index']}")
    with file.open("ab") as lines:
        lines.write(orjson.dumps(line) + b"\n")


def as_told(session):
    """A plain function."""
    if "exits" in session.task:
        os._exit(session.task["exits"])
    if "raises" in session.task:
        raise ValueError(session.task["raises"])
    return session.task["returns"]

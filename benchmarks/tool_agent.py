"""An agent whose tool takes its time: a turn of the policy, two seconds of nothing, the next turn."""

import asyncio

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TURNS, TURN_TOKENS, TOOL_S = 4, 32, 2.0
HTTP = DefaultAsyncHttpxClient()


async def run(session):
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=HTTP, timeout=600)
    messages, said = list(session.task["messages"]), ""
    for _ in range(TURNS):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=TURN_TOKENS)
        said = reply.choices[0].message.content
        await asyncio.sleep(TOOL_S)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "+1="}]
    return float(len(said) % 2)

"""An agent as anybody writes one: it lets the policy use a calculator, through the OpenAI SDK and nothing of April.

`configs/agent.toml` trains the quickstart's policy with it.
"""

import re

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

STEP = re.compile(r"(\d\d)\*(\d)\+(\d)(\d)$")
MOST_CALLS = 4
HTTP = DefaultAsyncHttpxClient()
"""one for all sessions: making one takes a client longer than a turn takes the policy"""


async def run(session):
    """Ask, calculate what the answer asks for, and ask on; the verifier says what it was worth."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=HTTP)
    messages = list(session.task["messages"])
    for _ in range(MOST_CALLS):
        reply = await client.chat.completions.create(model="policy", messages=messages, stop="=", max_tokens=16)
        said = reply.choices[0].message.content
        step = STEP.search(said)
        if not step:
            return
        times, digit, units, tens = map(int, step.groups())
        value = (times * digit + 10 * tens + units) % 100
        messages += [
            {"role": "assistant", "content": said},
            {"role": "tool", "content": f"#{value % 10}{value // 10}"},
        ]

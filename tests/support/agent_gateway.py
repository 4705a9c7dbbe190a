"""Helpers for tests of the agents' gateway: a session, requests, and a chat template with tool calls."""

import ssl

import openai

from april import wire
from april.config import AgentSection

SESSION = 7 * wire.MAX_FORKS
PLAIN_HTTP = AgentSection()
TRUST = ssl.create_default_context()
"""Of clients; each would read all certificates of the system anew."""
CALLS = {
    "start_anchor": ":",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "CALL",
            "close": "END",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "times", "arguments": {"of": "{content}"}}},
        },
    },
}
"""Response template of a tokeniser: the text CALL5*3END is parsed as a call of a tool."""
MARKED = "{% for message in messages %}{{ message.content }}{% endfor %}:"


def ask(client, *messages, **more):
    roles = ("user", "assistant")
    said = [{"role": roles[place % 2], "content": text} for place, text in enumerate(messages)]
    return client.chat.completions.create(model="run", messages=said, **more)


def over_tls(client, url, certificate):
    trust = ssl.create_default_context(cafile=certificate)
    return client.with_options(base_url=url, http_client=openai.DefaultHttpxClient(verify=trust))

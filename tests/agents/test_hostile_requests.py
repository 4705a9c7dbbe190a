"""Requests that no client sends by mistake: each is refused with its own status, and none is a fault of the server."""

import http.client
import json
from contextlib import closing
from urllib.parse import urlsplit

import pytest

DEEP = "[" * 300 + "]" * 300
DIGITS = "9" * 5000
TOOL = '{{"messages": [{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {}}}}}]}}]}}'
MESSAGES = '"messages": [{"role": "user", "content": "1"}]'
TOOLS_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or () %}"
    "{{ call.function.arguments | tojson(indent=1) }}{% endfor %}{% endfor %}{{ tools | tojson }}{{ messages[0].at.x }}"
)
BODIES = {
    "chat/completions": [
        TOOL.format(json.dumps(DEEP)),
        TOOL.format(json.dumps("[" * 3000 + "]" * 3000)),
        TOOL.format(json.dumps(DIGITS)),
        TOOL.format(json.dumps("1" * 300)),
        TOOL.format(DEEP),
        TOOL.format(DIGITS),
        TOOL.format('"\\ud800"'),
        f"{{{MESSAGES}, \"tools\": 5}}",
        f"{{{MESSAGES}, \"tools\": {DEEP}}}",
        f"{{{MESSAGES}, \"stop\": 5}}",
        f"{{{MESSAGES}, \"stop\": [{DEEP}]}}",
        f"{{{MESSAGES}, \"max_tokens\": {DIGITS}}}",
        f"{{{MESSAGES}, \"max_tokens\": -1}}",
        f"{{{MESSAGES}, \"temperature\": {DEEP}}}",
        '{"messages": [{"role": "user", "content": [{"type": {}, "text": 1}]}]}',
        '{"messages": {"role": 1}}',
        DEEP,
        "",
        "\x00",
    ],
    "messages": [
        f"{{{MESSAGES}, \"tools\": 5}}",
        f"{{{MESSAGES}, \"tools\": [[]]}}",
        f"{{{MESSAGES}, \"tools\": [{{\"name\": 1, \"input_schema\": {DEEP}}}]}}",
        f"{{{MESSAGES}, \"system\": {DEEP}}}",
        f"{{{MESSAGES}, \"stop_sequences\": 5}}",
        f'{{"messages": [{{"role": "a", "content": [{{"type": "tool_use", "name": "f", "input": {DEEP}}}]}}]}}',
    ],
    "responses": [
        '{"input": "1", "tools": 5}',
        '{"input": "1", "previous_response_id": [{}]}',
        f'{{"input": "1", "previous_response_id": {DEEP}}}',
        f'{{"input": [{{"type": "function_call", "name": "f", "arguments": "{DIGITS}"}}, {{"role": "user"}}]}}',
        '{"input": [5]}',
    ],
    "session/state": [f'{{"state": {DEEP}}}', f'{{"state": {"[" * 900 + "]" * 900}}}', f'{{"state": {DIGITS}}}', "[]"],
    "session/reward": [
        f'{{"reward": {DIGITS}}}', f'{{"reward": {DEEP}}}', '{"reward": -1e10}', f'{{"reward": 1, "details": {DEEP}}}',
        f'{{"reward": 1, "details": {{"a": {DIGITS}}}}}', '{"reward": 1, "details": {"a": 1e400}}',
    ],
    "sessions": ['{"wait_s": -1}', f'{{"wait_s": {DIGITS}}}', f'{{"wait_s": {DEEP}}}', DEEP],
}  # fmt: skip


def post(url, path, body, key="", **headers):
    """Send a request; returns (status, body)."""
    address = urlsplit(str(url))
    with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=60)) as connection:
        connection.request("POST", f"/v1/{path}", body, {"Authorization": f"Bearer {key}", "x-api-key": key} | headers)
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.parametrize("path", BODIES)
def test_a_malformed_body_is_a_400_in_the_form_of_the_api(meet, path):
    client, policy, _, _ = meet(attached=True, template=TOOLS_TEMPLATE)
    for body in BODIES[path]:
        status, answer = post(client.base_url, path, body.encode(), client.api_key)
        assert status == 400, (body[:100], status, answer)
        assert "error" in json.loads(answer) and len(answer) < 2000, body[:100]
    assert policy.requests == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_encoded_as_its_headers_say_is_a_400(meet, encoding):
    client, _, _, _ = meet()
    headers = {"Content-Encoding": encoding}
    assert post(client.base_url, "chat/completions", b"no such encoding", client.api_key, **headers)[0] == 400

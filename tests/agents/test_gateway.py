"""What agents meet: the SDKs of OpenAI and Anthropic as they are, against a policy that says what the test says."""

import http.client
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import anthropic
import msgspec
import openai
import pytest

from april import wire
from april.agents.gateway import task_of
from april.agents.host import StartProgram
from tests.support.agent_gateway import CALLS, MARKED, SESSION, TRUST, ask
from tests.support.run_processes import wait_until


def test_a_conversation_keeps_sampled_tokens_and_renders_only_new_messages(meet):
    client, policy, session, _ = meet("5*3=", "#51")
    reply = ask(client, "12*3=", stop="=", max_tokens=9)
    assert reply.choices[0].message.content == "5*3", "what ended the turn is not part of the text"
    assert (reply.choices[0].finish_reason, reply.usage.prompt_tokens, reply.usage.completion_tokens) == ("stop", 5, 4)
    reply = ask(client, "12*3=", "5*3", "#51")
    assert reply.choices[0].message.content == "#51" and reply.choices[0].finish_reason == "length"
    assert [(start, text) for start, text, _ in policy.requests] == [(0, "12*3="), (9, "#51")]
    first = policy.requests[0][2]
    assert first.max_tokens == 9 and [session.renderer.tokenizer.decode([one]) for one in first.stop_token_ids] == ["="]


def test_with_template_history_the_policy_reads_the_rendered_history(meet):
    """What it repeats token by token goes on; what it has otherwise, here without the end of a message, branches."""
    client, policy, _, _ = meet("5*3=", "#51$", "7", by_tokens=True)
    ask(client, "12*3=", max_tokens=4)
    ask(client, "12*3=", "5*3=", "1+")
    ask(client, "12*3=", "5*3=", "1+", "#51", "2+")
    assert [(start, text) for start, text, _ in policy.requests] == [(0, "12*3="), (9, "1+"), (9, "1+#512+")]
    assert policy.forks == [(0, 0), (0, 0), (1, 0)]


def test_a_long_history_that_is_new_or_rewritten_becomes_tokens_beside_the_loop(meet, monkeypatch):
    """The loop serves all sessions; tokens of a long text take seconds."""
    monkeypatch.setattr("april.agents.conversation_tree.LONG_CHARACTERS", 1)
    client, policy, session, _ = meet("11$", "2$", "3")
    render, threads = session.renderer.render_prompt, []
    monkeypatch.setattr(
        session.renderer, "render_prompt", lambda *call: (threads.append(threading.current_thread()), render(*call))[1]
    )
    ask(client, "12*3=")
    ask(client, "12*3=", "11", "+")
    ask(client, "12*3=", "12", "+")
    assert len(threads) == 2 and all(thread.name.startswith("asyncio_") for thread in threads)
    assert [(start, text) for start, text, _ in policy.requests] == [(0, "12*3="), (8, "+"), (0, "12*3=12+")]


def test_a_stream_is_the_same_answer_in_pieces(meet):
    client, _, _, _ = meet("12345678", pieces=4)
    chunks = list(ask(client, "12*3=", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "12345678"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 8 and len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    "more, says",
    [
        ({"temperature": 0.3}, "'temperature' = 0.3"),
        ({"n": 2}, "'n' = 2"),
        ({"logit_bias": {"5": 1}}, "'logit_bias'"),
        ({"response_format": {"type": "json_object"}}, "'response_format'"),
        ({"tool_choice": "required", "tools": []}, "'tool_choice' = 'required'"),
        ({"presence_penalty": 0.5}, "'presence_penalty'"),
        ({"stop": "12"}, "'stop' = '12' is not one token"),
        ({"max_tokens": 0}, "'max_tokens' = 0"),
        ({"extra_body": {"messages": []}}, "at least one message"),
    ],
)
def test_what_would_change_the_distribution_is_refused_in_the_api_s_own_form(meet, more, says):
    client, policy, _, _ = meet()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "12*3=", **more)
    assert says in caught.value.body["message"] and caught.value.body["code"]
    assert policy.requests == []


def test_overrides_may_be_ignored_and_are_counted(meet):
    client, _, _, gateway = meet("1", ignore_overrides=True)
    assert ask(client, "12*3=", temperature=0.3, n=3, stop="12").choices[0].message.content == "1"
    assert gateway.dialects[0].ignored == {"temperature": 1, "n": 1, "stop": 1}


def test_a_held_out_prompt_has_its_own_temperature_whatever_is_requested(meet):
    client, _, session, _ = meet("1")
    session.lease = msgspec.structs.replace(session.lease, evaluation=True, temperature=0.0)
    assert ask(client, "12*3=", temperature=1.0).choices[0].message.content == "1"


def test_a_full_context_is_a_400(meet):
    client, _, _, _ = meet("11", max_tokens=20)
    ask(client, "12*3=")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "12*3=", "11", "1" * 20)
    assert caught.value.body["code"] == "context_length_exceeded"


def test_a_repeated_call_gets_the_same_answer_without_a_new_turn(meet):
    client, policy, _, _ = meet("11")
    named = {"idempotency-key": "one"}
    first = ask(client, "12*3=", extra_headers=named)
    assert ask(client, "12*3=", extra_headers=named).id == first.id and len(policy.requests) == 1
    assert ask(client, "12*3=", extra_headers={"x-stainless-retry-count": "1"}).id == first.id


# --- branches ---------------------------------------------------------------------------------------------------------


def test_a_rewritten_history_is_a_fork_and_its_unchanged_prefix_keeps_its_tokens(meet):
    client, policy, _, _ = meet("11$", "2$", "3", "4", "5")
    ask(client, "12*3=")
    ask(client, "12*3=", "11", "+")
    ask(client, "12*3=", "11", "*", "2", "=")
    ask(client, "12*3=", "12", "+")
    ask(client, "12*3=", "11", "+", "2", "=")
    told = [(start, text) for start, text, _ in policy.requests]
    assert told == [(0, "12*3="), (8, "+"), (8, "*2="), (0, "12*3=12+"), (11, "=")]
    assert policy.forks == [(0, 0), (0, 0), (1, 0), (2, 0), (0, 0)], "the last goes on where it was"


def test_a_caller_that_hung_up_and_repeats_its_call_gets_the_same_turn(meet):
    client, policy, session, _ = meet(None)
    with closing(http.client.HTTPConnection(client.base_url.host, client.base_url.port)) as impatient:
        body = {"model": "run", "messages": [{"role": "user", "content": "12*3="}]}
        key = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
        impatient.request("POST", f"{client.base_url.path}chat/completions", json.dumps(body), key)
        wait_until(lambda: policy.requests and session.turns[0].pending_calls)
    wait_until(lambda: not session.turns[0].pending_calls)
    client.loop.call_soon_threadsafe(policy.answer, SESSION, 5, "11")
    assert ask(client, "12*3=").choices[0].message.content == "11" and len(policy.requests) == 1


def test_the_number_of_forks_of_a_session_is_bounded(meet, monkeypatch):
    monkeypatch.setattr(wire, "MAX_FORKS", 2)
    client, _, _, gateway = meet("1", "2")
    ask(client, "+")
    ask(client, "*")
    with pytest.raises(openai.BadRequestError, match="2 forks"):
        ask(client, "#")
    assert gateway.refusals == {"too_many_forks": 1}


def test_the_number_of_pending_calls_of_a_session_is_bounded(meet, monkeypatch):
    monkeypatch.setattr("april.agents.conversation_tree.MAX_PENDING_CALLS", 1)
    client, policy, session, gateway = meet(None, "2")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, client, "+")
        wait_until(lambda: session.turns)
        with pytest.raises(openai.RateLimitError, match="ask fewer at once"):
            ask(client, "*")
        client.loop.call_soon_threadsafe(policy.answer, SESSION, 1, "1")
        assert first.result().choices[0].message.content == "1"
    assert ask(client, "*").choices[0].message.content == "2" and gateway.refusals == {"too_many_calls": 1}


# --- other executions -------------------------------------------------------------------------------------------------


def test_a_new_execution_is_answered_from_the_journal_and_the_former_key_is_refused(meet):
    client, policy, session, gateway = meet("11", "2")
    ask(client, "12*3=")
    again = client.with_options(api_key=gateway.admit(session))
    assert session.replaying
    assert ask(again, "12*3=").choices[0].message.content == "11" and len(policy.requests) == 1
    assert not session.replaying
    assert ask(again, "12*3=", "11", "+").choices[0].message.content == "2"
    with pytest.raises(openai.ConflictError):
        ask(client, "12*3=", "11", "+")


def test_a_key_is_valid_only_for_its_session_and_until_its_end(meet):
    client, _, session, gateway = meet(None)
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="another"), "12*3=")
    gateway.dismiss(session)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, "12*3=")
    assert caught.value.status_code == 410


# --- tools, and the other API -----------------------------------------------------------------------------------------

TIMES = {"name": "times", "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}}


def test_a_tool_call_is_parsed_and_its_result_continues_the_conversation(meet):
    client, policy, _, _ = meet("okCALL5*3END", "51", template=MARKED, response_template=CALLS)
    question = {"role": "user", "content": "12*3="}
    tools = [{"type": "function", "function": TIMES}]
    reply = client.chat.completions.create(model="run", messages=[question], tools=tools, max_tokens=13)
    said, reason = reply.choices[0].message, reply.choices[0].finish_reason
    assert (said.content, reason) == ("ok", "length")
    (call,) = said.tool_calls
    assert (call.function.name, call.function.arguments) == ("times", '{"of":"5*3"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "#51"}
    spaced = said.model_dump()
    spaced["tool_calls"][0]["function"]["arguments"] = '{ "of" : "5*3" }'
    reply = client.chat.completions.create(model="run", messages=[question, spaced, result], tools=tools)
    assert reply.choices[0].message.content == "51" and policy.requests[1][:2] == (18, "#51:")


def test_a_tool_call_that_cannot_be_parsed_is_returned_as_text(meet):
    broken = CALLS | {"fields": CALLS["fields"] | {"tool_calls": {"open": "CALL", "close": "END", "content": "json"}}}
    client, _, _, _ = meet("CALLxEND", template=MARKED, response_template=broken)
    assert ask(client, "12*3=").choices[0].message.content == "CALLxEND"


@pytest.mark.parametrize("arguments", ["[" * 3000, "[" * 400 + "]" * 400, "9" * 5000], ids=["open", "deep", "long"])
def test_an_answer_with_arguments_that_no_api_could_repeat_is_returned_as_text(meet, arguments, monkeypatch):
    client, _, session, _ = meet("5*3", template=MARKED, response_template=CALLS)
    call = {"function": {"name": "times", "arguments": arguments}}
    found = {"content": "", "tool_calls": [call]}
    monkeypatch.setattr(session.renderer.tokenizer.inner, "parse_response", lambda *_, **__: found)
    assert ask(client, "12*3=").choices[0].message.content == "5*3"


@pytest.fixture
def clients(meet):
    """clients(*lines) -> (client of Anthropic's SDK, policy)"""

    def begin(*lines, **more):
        client, policy, _, _ = meet(*lines, **more)
        root = str(client.base_url).removesuffix("/v1/")
        http = anthropic.DefaultHttpxClient(verify=TRUST)
        return anthropic.Anthropic(base_url=root, api_key=client.api_key, max_retries=0, http_client=http), policy

    return begin


def test_anthropic_s_sdk_speaks_with_the_policy(clients):
    client, policy = clients("5*3=", "1")
    question = {"role": "user", "content": [{"type": "text", "text": "12*3="}]}
    said = client.messages.create(model="run", max_tokens=9, system="S", messages=[question], stop_sequences=["="])
    assert (said.content[0].text, said.stop_reason, said.stop_sequence) == ("5*3", "stop_sequence", "=")
    assert (said.usage.input_tokens, said.usage.output_tokens) == (6, 4) and policy.requests[0][1] == "S12*3="
    messages = [question, {"role": "assistant", "content": said.content}, {"role": "user", "content": "#51"}]
    assert client.messages.create(model="run", max_tokens=9, system="S", messages=messages).stop_reason == "max_tokens"
    assert policy.requests[1][:2] == (10, "#51")


def test_anthropic_s_streams_and_tools(clients):
    client, policy = clients("okCALL5*3END", "12345678", template=MARKED, response_template=CALLS, pieces=3)
    question = {"role": "user", "content": "12*3="}
    tools = [{"name": "times", "input_schema": TIMES["parameters"]}]
    with client.messages.stream(model="run", max_tokens=12, messages=[question], tools=tools) as stream:
        said = stream.get_final_message()
    text, call = said.content
    assert (text.text, call.name, call.input) == ("ok", "times", {"of": "5*3"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "#51"}
    messages = [question, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(model="run", max_tokens=12, messages=messages, tools=tools) as stream:
        assert "".join(stream.text_stream) == "12345678"
    assert policy.requests[1][:2] == (18, "#51:")


def test_anthropic_s_errors_have_its_own_form(clients):
    client, _ = clients()
    with pytest.raises(anthropic.BadRequestError, match="unsupported_parameter"):
        client.messages.create(
            model="run", max_tokens=9, messages=[{"role": "user", "content": "1"}], extra_body={"temperature": 0.2}
        )
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="other").messages.create(model="run", max_tokens=9, messages=[])


# --- a harness of its own ---------------------------------------------------------------------------------------------


def call(method, url, body=None, key=""):
    """(status, JSON of the answer or None)"""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_harness_takes_a_session_and_posts_its_reward_and_state(meet, loop):
    client, _, session, gateway = meet("11", attached=True)
    url = str(client.base_url).removesuffix("/")
    assert call("POST", f"{url}/sessions", {}) == (204, None), "nothing is offered yet"
    order = StartProgram(SESSION, url, gateway.admit(session), task_of(session), False, url)
    loop.call_soon_threadsafe(meet.runner.start_program, order)
    status, told = call("POST", f"{url}/sessions", {"wait_s": 20})
    assert status == 201 and told["task"]["messages"] == [{"role": "user", "content": "12*3="}]
    key = told["api_key"]
    assert ask(client.with_options(api_key=key), "12*3=").choices[0].message.content == "11"
    assert call("POST", f"{url}/session/reward", {"reward": "much"}, key)[0] == 400
    detailed = {"reward": 0.5, "details": {"correct": 1.0}}
    assert call("POST", f"{url}/session/reward", detailed | {"details": {"correct": "yes"}}, key)[0] == 400
    assert call("POST", f"{url}/session/reward", detailed, key) == (200, detailed)
    assert call("POST", f"{url}/session/reward", {"reward": 0.5}, key) == (200, {"reward": 0.5})
    assert call("POST", f"{url}/session/state", {"state": "s" * 5000}, key)[0] == 400
    assert call("POST", f"{url}/session/state", {"state": {"tests": 3}}, key)[0] == 200
    assert msgspec.msgpack.decode(session.state) == {"tests": 3}
    assert call("DELETE", f"{url}/session")[0] == 401
    assert call("DELETE", f"{url}/session", key=key)[0] == 204
    assert meet.outcomes == [("began", SESSION), ("ended", SESSION, None, "")] and session.reward == 0.5


# --- Responses --------------------------------------------------------------------------------------------------------


def test_responses_continue_from_the_named_response_or_from_the_whole_history(meet):
    client, policy, _, _ = meet("11", "2", "33")
    first = client.responses.create(model="run", instructions="S", input="12*3=", max_output_tokens=2)
    assert (first.output_text, first.status) == ("11", "incomplete") and first.usage.output_tokens == 2
    second = client.responses.create(model="run", input="+", previous_response_id=first.id)
    assert second.output_text == "2"
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "12*3="}, *first.output]
    said += [{"role": "user", "content": "+"}, *second.output]
    star = {"role": "user", "content": [{"type": "input_text", "text": "*"}]}
    third = client.responses.create(model="run", input=[*said, star])
    assert third.output_text == "33"
    assert [text for _, text, _ in policy.requests] == ["S12*3=", "+", "*"]


def test_responses_stream_and_call_tools(meet):
    client, policy, _, _ = meet("okCALL5*3END$", "7", template=MARKED, response_template=CALLS, pieces=2)
    tools = [{"type": "function"} | TIMES]
    question = {"role": "user", "content": "12*3="}
    with client.responses.stream(model="run", input=[question], tools=tools) as stream:
        said = stream.get_final_response()
    text, call = said.output
    assert (text.content[0].text, call.name, call.arguments) == ("ok", "times", '{"of":"5*3"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "#51"}
    reply = client.responses.create(model="run", input=[question, *said.output, result], tools=tools)
    assert reply.output_text == "7" and policy.requests[1][:2] == (19, "#51:")


def test_an_unknown_previous_response_is_a_400(meet):
    client, _, _, _ = meet()
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="run", input="1", previous_response_id="resp_0-0-0")
    with pytest.raises(openai.BadRequestError, match="vendor"):
        client.responses.create(model="run", input="1", tools=[{"type": "web_search"}])

"""Images in agents' requests: of all three APIs, prepared once and kept by the broker before a turn names them."""

import asyncio
import base64
import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from april import config as configuration
from april import wire
from april.agents import images as request_images
from april.agents.images import RequestImages
from april.agents.link import BrokerLink
from april.data.images import PROMPT_IMAGES, name_of
from april.data.tokenizer import Tokenizer
from tests.support.agent_gateway import TRUST, ask
from tests.support.picture_rows import TEMPLATE, picture, write_picture_tokenizer

RED, BLUE = picture("red"), picture("blue", (24, 16), "JPEG")
"""Pictures of four and of six tokens."""
MARKS = 2
"""Number of tokens around the placeholders of an image."""


def data_url(file, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def chat_part(file):
    return {"type": "image_url", "image_url": {"url": data_url(file)}}


def text(said):
    return {"type": "text", "text": said}


def by_chat(client, *turns):
    """The answer to a conversation: of the user's turns each is a list of texts and files, of the others a text."""
    return ask(client, *[turn if isinstance(turn, str) else list(map(chat_form, turn)) for turn in turns])


def chat_form(part):
    return text(part) if isinstance(part, str) else chat_part(part)


def by_responses(client, *turns):
    roles = ("user", "assistant")
    items = [{"role": roles[place % 2], "content": turn if isinstance(turn, str) else list(map(response_form, turn))}
             for place, turn in enumerate(turns)]  # fmt: skip
    return client.responses.create(model="run", input=items)


def response_form(part):
    image = {"type": "input_image", "detail": "auto"}
    return {"type": "input_text", "text": part} if isinstance(part, str) else image | {"image_url": data_url(part)}


def by_messages(client, *turns):
    roles = ("user", "assistant")
    said = [{"role": roles[place % 2], "content": turn if isinstance(turn, str) else list(map(anthropic_form, turn))}
            for place, turn in enumerate(turns)]  # fmt: skip
    url = str(client.base_url).removesuffix("/v1/")
    http = anthropic.DefaultHttpxClient(verify=TRUST)
    with anthropic.Anthropic(base_url=url, api_key=client.api_key, max_retries=0, http_client=http) as other:
        return other.messages.create(model="run", max_tokens=9, messages=said)


def anthropic_form(part):
    if isinstance(part, str):
        return text(part)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(part).decode()}
    return {"type": "image", "source": source}


class Broker:
    """Keeps the images that it is brought, unless it says why not."""

    def __init__(self):
        self.kept, self.fault = {}, ""
        self.brought = []

    async def keep(self, name, png):
        await asyncio.sleep(0.01)
        self.brought.append(name)
        self.kept[name] = png
        return self.fault


@pytest.fixture
def vision(tmp_path):
    return write_picture_tokenizer(tmp_path / "vision")


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def see(meet, broker, vision):
    """As `meet`, with a policy that takes images and a broker that keeps them."""

    def make(*lines, **options):
        options = {"max_tokens": 64, "template": TEMPLATE} | options
        images = RequestImages(Tokenizer(vision).image_rule)
        images.keep = broker.keep
        return meet(*lines, folder=vision, images=images, **options)

    return make


def placeholders(session, turn):
    pad = session.renderer.tokenizer.image_rule.token_id
    return int((turn.observation == pad).sum())


@pytest.mark.parametrize("say", [by_chat, by_responses, by_messages])
def test_every_api_brings_images_and_their_placeholders_count_as_context(say, see, broker):
    client, _, session, _ = see("5", "7")
    say(client, ["1+", RED, "="])
    say(client, ["1+", RED, "="], "5", [BLUE, "2="])
    first, second = session.turns
    assert (placeholders(session, first), placeholders(session, second)) == (4, 6)
    assert (first.start, second.start) == (3 + MARKS + 4, first.end + 2 + MARKS + 6)
    assert [turn.request.images for turn in (first, second)] == [[name] for name in broker.brought]
    assert [Image.open(io.BytesIO(broker.kept[name])).size for name in broker.brought] == [(16, 16), (24, 16)]
    assert all(name_of(png) == name for name, png in broker.kept.items())


def test_a_message_names_an_image_by_its_content_so_that_equal_requests_are_one(see, broker):
    client, policy, session, gateway = see("5", "7")
    by_chat(client, ["1+", RED])
    assert session.turns[0].messages[0]["content"] == [
        {"type": "text", "text": "1+"}, {"type": "image", "image": hashlib.sha256(RED).hexdigest()},
    ]  # fmt: skip
    client.api_key = gateway.admit(session)
    again = by_responses(client, ["1+", RED])
    assert again.output_text == "5" and len(policy.requests) == 1, "whatever API asks, and however it is spelt"
    by_chat(client, ["1+", BLUE])
    assert len(policy.requests) == 2 and policy.forks[1] == (1, 0)


def test_results_of_tools_bring_images(see):
    client, _, session, _ = see("5", "7", "8")
    url = str(client.base_url).removesuffix("/v1/")
    http = anthropic.DefaultHttpxClient(verify=TRUST)
    with anthropic.Anthropic(base_url=url, api_key=client.api_key, max_retries=0, http_client=http) as other:
        result = {"type": "tool_result", "tool_use_id": "t", "content": [anthropic_form("seen"), anthropic_form(RED)]}
        other.messages.create(model="run", max_tokens=9, messages=[{"role": "user", "content": [result]}])
    output = {"type": "function_call_output", "call_id": "t", "output": [response_form("seen"), response_form(RED)]}
    client.responses.create(model="run", input=[output])
    assert [turn.messages[-1]["role"] for turn in session.turns] == ["tool", "tool"]
    assert [placeholders(session, turn) for turn in session.turns] == [4, 4]


def test_a_response_goes_on_from_an_earlier_one_with_its_images(see):
    """The second request does not have them; as the history goes another way, they are rendered again."""
    client, _, session, _ = see("5", "7", "8")
    first = by_responses(client, ["1+", RED])
    for said in ("2", "3"):
        client.responses.create(model="run", input=said, previous_response_id=first.id)
    assert [turn.fork for turn in session.turns] == [0, 0, 1]
    assert [len(turn.request.images) for turn in session.turns] == [1, 0, 0]


def test_a_rewritten_history_shows_all_its_images_again(see, broker):
    client, policy, session, _ = see("5", "7")
    by_chat(client, ["1+", RED])
    by_chat(client, ["2+", RED], "5", [BLUE])
    assert policy.forks == [(0, 0), (1, 0)]
    assert session.turns[1].request.images == broker.brought and placeholders(session, session.turns[1]) == 10


def test_with_template_history_other_images_are_another_conversation(see):
    """Pictures of one size have the same tokens."""
    client, policy, session, _ = see("5", "6", "7", by_tokens=True)
    by_chat(client, ["1+", RED])
    by_chat(client, ["1+", RED], "5", ["2"])
    by_chat(client, ["1+", picture("green")], "5", ["2"])
    assert policy.forks == [(0, 0), (0, 0), (1, 0)]
    assert [len(turn.request.images) for turn in session.turns] == [1, 0, 1]


def test_an_image_is_prepared_and_brought_once_by_all_who_show_it(see, broker, monkeypatch):
    prepared = []
    prepare = request_images.prepare
    monkeypatch.setattr(request_images, "prepare", lambda *call: (prepared.append(call), prepare(*call))[1])
    client, _, _, _ = see(*"56789")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: by_chat(client, [f"{number}+", RED]), range(4)))
    by_chat(client, ["4+", RED])
    assert len(prepared) == len(broker.brought) == 1


def test_an_image_that_no_turn_has_named_is_brought_again_after_a_while(see, broker, monkeypatch):
    monkeypatch.setattr(request_images, "KNOWN_S", 0.0)
    client, _, session, _ = see("5", "6", "7")
    by_chat(client, ["1+", RED])
    by_chat(client, ["1+", RED], "5", ["2"])
    assert len(broker.brought) == 1, "its turn names it, and the broker keeps it with that"
    session.turns[0].request.images.clear()
    by_chat(client, ["2+", RED])
    assert len(broker.brought) == 2


@pytest.mark.parametrize(
    ("part", "code", "says"),
    [
        (b"no picture", "invalid_image", "cannot be decoded"),
        ("https://example.org/a.png", "invalid_image", "April fetches nothing"),
        ("data:image/png,abc", "invalid_image", "is like data:image/png;base64"),
        ("data:image/png;base64,a*b=", "invalid_image", "is not base64"),
        ("", "invalid_image", "April fetches nothing"),
        (None, "invalid_image", "has no file in it"),
    ],
)
def test_a_bad_image_is_a_400_with_a_sentence(see, broker, part, code, says):
    client, policy, _, _ = see()
    given = {"url": data_url(part)} if isinstance(part, bytes) else {"url": part}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [text("1+"), {"type": "image_url", "image_url": given}])
    assert caught.value.body["code"] == code and says in caught.value.body["message"]
    assert not policy.requests and not broker.brought


def test_too_many_images_a_placeholder_in_a_text_and_a_template_without_images_are_400s(see, meet, vision):
    client, policy, _, _ = see()
    with pytest.raises(openai.BadRequestError) as caught:
        by_chat(client, [RED] * (PROMPT_IMAGES + 1))
    assert caught.value.body["code"] == "too_many_images"
    for said, template in (([RED, "<|image_pad|>"], TEMPLATE), ([RED], "{% for m in messages %}#{% endfor %}")):
        client, policy, _, _ = see(template=template)
        with pytest.raises(openai.BadRequestError, match="placeholders of images"):
            by_chat(client, said)
    client, policy, _, _ = see(max_tokens=8)
    with pytest.raises(openai.BadRequestError) as caught:
        by_chat(client, [RED, "1+"])
    assert caught.value.body["code"] == "context_length_exceeded" and not policy.requests


def test_a_run_without_images_says_why(meet, config_file, vision):
    client, _, _, _ = meet()
    with pytest.raises(openai.BadRequestError, match=r"policy .*no images"):
        by_chat(client, [RED])
    config = configuration.load(config_file, ["--worker.engine", "torch"])
    refused = RequestImages.of(config, Tokenizer(vision))
    assert refused.rule is None and "'worker.engine' = 'torch' takes no images" in refused.why_none
    config = configuration.load(config_file, ["--worker.engine", "transformers"])
    assert RequestImages.of(config, Tokenizer(vision)).rule.merge == 2


def test_an_image_that_the_broker_does_not_keep_is_asked_for_again(see, broker):
    client, policy, _, _ = see("5")
    broker.fault = "its disk is full"
    with pytest.raises(openai.InternalServerError) as caught:
        by_chat(client, [RED])
    assert caught.value.status_code == 503 and "its disk is full" in caught.value.body["message"]
    broker.fault = ""
    by_chat(client, [RED])
    assert len(policy.requests) == 1 and len(broker.brought) == 2


def test_placeholders_that_were_sampled_are_no_images(see):
    client, _, session, _ = see("<|image_pad|>5", "7")
    answer = by_chat(client, ["1+"]).choices[0].message.content
    by_chat(client, ["1+"], answer, [RED])
    assert session.turns[1].request.images and placeholders(session, session.turns[1]) == 4
    assert np.array(session.turns[0].ids).tolist().count(session.renderer.tokenizer.image_rule.token_id) == 1


# --- the way to the broker --------------------------------------------------------------------------------------------


class Connection:
    def __init__(self):
        self.sent = []

    def send(self, message, arrays=()):
        self.sent.append((message, [array.tobytes() for array in arrays]))

    def hello(self, lease_ids):
        return wire.Welcome(1, "run", 1, -1, 0, [], 15.0, "")


def test_the_link_brings_an_image_in_parts_until_the_broker_has_answered(monkeypatch):
    """In a new session it is brought again as a whole; who waits for it gets one answer, also at the link's end."""
    monkeypatch.setattr("april.wire.sessions.IMAGE_PART_BYTES", 4)

    async def play():
        link = BrokerLink(SimpleNamespace(wake_by=lambda file: None), 4, "", None)
        link.connection = connection = Connection()

        def parts():
            kept = [(one.start, *data) for one, data in connection.sent if isinstance(one, wire.KeepImage)]
            connection.sent.clear()
            return kept

        waiting = [asyncio.create_task(link.keep_image("1" * 64, b"an image")) for _ in range(2)]
        other = asyncio.create_task(link.keep_image("2" * 64, b"other"))
        await asyncio.sleep(0)
        while link._commands:
            link._commands.popleft()()
        first, second = [(0, b"an i"), (4, b"mage")], [(0, b"othe"), (4, b"r")]
        assert parts() == first + second
        link._say_hello()
        assert parts() == first + second
        link._handle(SimpleNamespace(message=wire.ImageKept("1" * 64)))
        assert await asyncio.gather(*waiting) == ["", ""]
        link._say_hello()
        assert parts() == second
        link._answer_images("the run is over")
        assert await other == "the run is over"

    asyncio.run(play())

"""Which tokens of a conversation are trained: the assistant's, exactly, whatever the template; and what is refused."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.config import ConfigError, DataSection
from april.config.learner import SftSection
from april.data.conversations import ConversationEncoder, load_conversations
from april.data.rows import BadRow, DatasetRow
from april.data.tokenizer import Tokenizer
from tests.support.chat_tokenizer import CHATML, COUNTING, MARKED, THINKING, save_chat_tokenizer

USER, TOOL = {"role": "user", "content": "hello?"}, {"role": "tool", "content": "{}"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 3}}}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture
def encoder(tmp_path):
    def make(template=CHATML, special=(), ends=(), **section):
        tokenizer = Tokenizer(save_chat_tokenizer(tmp_path / "policy", template, special))
        tokenizer.eos_token_ids |= set(tokenizer.inner.convert_tokens_to_ids(list(ends)))
        return ConversationEncoder(tokenizer, DataSection(path="unused.jsonl"), SftSection(**section))

    return make


def trained(encoder, messages, tools=()):
    """The texts of the stretches that are trained."""
    found = encoder.encode(DatasetRow(messages, "", tools=tools))
    pieces, last = [], -2
    for at in found.is_trained.nonzero()[0].tolist():
        pieces = [*pieces, []] if at != last + 1 else pieces
        pieces[-1].append(found.tokens[at])
        last = at
    return [encoder.tokenizer.decode(piece, keep_special=True) for piece in pieces]


def test_each_turn_of_the_assistant_is_trained_up_to_the_token_that_ends_it(encoder):
    messages = [USER, assistant("one"), USER, assistant("hello")]
    assert trained(encoder(), messages) == ["one<|im_end|>", "hello<|im_end|>"]


def test_tool_calls_are_trained_and_tools_and_their_answers_are_not(encoder):
    messages = [USER, assistant("", tool_calls=[CALL]), TOOL, assistant("3")]
    tools = ({"type": "function", "function": {"name": "look"}},)
    call, answer = trained(encoder(), messages, tools)
    assert call.startswith("<|tool|>") and '"look"' in call and call.endswith("<|im_end|>")
    assert answer == "3<|im_end|>"


def test_a_template_that_prints_earlier_turns_otherwise_is_found_out_exactly(encoder):
    messages = [USER, assistant("<think>a</think>one"), USER, assistant("two"), USER, assistant("three")]
    found = trained(encoder(THINKING), messages)
    assert found == ["one<|im_end|>", "two<|im_end|>", "<think>\n\n</think>\n\nthree<|im_end|>"]


TEXTS = st.text(st.sampled_from("helo x\n<é"), min_size=1, max_size=6).filter(str.strip)


@pytest.fixture(scope="module")
def plain_and_marked(tmp_path_factory):
    folders = [save_chat_tokenizer(tmp_path_factory.mktemp("policy"), template) for template in (CHATML, MARKED)]
    data = DataSection(path="unused.jsonl")
    return [ConversationEncoder(Tokenizer(folder), data, SftSection()) for folder in folders]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_what_is_found_is_what_the_marks_of_a_template_say(texts, plain_and_marked):
    messages = [message for asked, said in texts for message in ({"role": "user", "content": asked}, assistant(said))]
    plain, marked = (encoder.encode(DatasetRow(messages, "")) for encoder in plain_and_marked)
    decode = plain_and_marked[0].tokenizer.decode
    assert decode(plain.tokens, keep_special=True) == decode(marked.tokens, keep_special=True)
    if any(said.startswith("\n") for _, said in texts):  # joined with the line break of the prompt, by the marks' text
        return
    assert plain.tokens.tolist() == marked.tokens.tolist()
    assert plain.is_trained.tolist() == marked.is_trained.tolist()


def test_an_answer_is_tokenised_apart_from_its_prompt_where_a_token_would_join_them(encoder):
    made = encoder()
    messages = [USER, assistant("\nhello"), USER, assistant("\n\none")]
    assert trained(made, messages) == ["\nhello<|im_end|>", "\n\none<|im_end|>"]
    asked = made.tokenizer.encode_prompt([USER])
    assert made.encode(DatasetRow(messages, "")).tokens[: len(asked)].tolist() == asked.tolist()


def test_the_token_of_the_next_role_is_trained_where_it_is_what_ends_a_turn(encoder):
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    made = encoder(template, special=["<|user|>", "<|assistant|>"], ends=["<|user|>"])
    assert trained(made, [USER, assistant("one"), USER, assistant("two")]) == ["one<|user|>", "two"]


def test_all_tokens_but_the_first_are_trained_if_asked_for(encoder):
    found = encoder(train_on="all").encode(DatasetRow([USER, assistant("one")], ""))
    assert not found.is_trained[0] and found.is_trained[1:].all()


def test_a_text_and_its_answer_are_tokenised_apart_and_end_with_the_end_token(encoder):
    found = encoder().encode(DatasetRow("hell", "o"))
    decode = encoder().tokenizer.decode
    assert [decode([each], keep_special=True) for each in found.tokens] == ["hell", "o", "<|im_end|>"]
    assert found.is_trained.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (CHATML, [USER, TOOL], "has no message of the assistant's"),
        (COUNTING, [USER, assistant("one"), USER, assistant("two")], "not certain which tokens are its"),
        (CHATML, [USER, assistant("one<|im_end|>two")], "not certain which tokens are its"),
        (CHATML.replace("{{ message.content }}", ""), [USER, assistant("one")], "does not print 'hello\\?'"),
        ("{{ raise_exception('no') }}", [USER, assistant("one")], "the chat template refuses"),
    ],
    ids=["none", "counting", "end within", "not printed", "refused"],
)
def test_a_row_of_which_it_is_not_certain_what_to_train_is_refused(encoder, template, messages, why):
    with pytest.raises(BadRow, match=why):
        encoder(template).encode(DatasetRow(messages, ""))


# --- rows -------------------------------------------------------------------------------------------------------------


def rows(folder, records, **data):
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    section = DataSection(path=path, shuffle=False, **data)
    found = load_conversations(section.train_sources, section, SftSection())
    return [found[number] for number in range(len(found))]


SAID = [USER, assistant("one")]
SCHEMA = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("record", "data", "row"),
    [
        ({"messages": SAID}, {}, DatasetRow(SAID, "")),
        ({"chat": SAID}, {"prompt_key": "chat"}, DatasetRow(SAID, "")),
        ({"messages": SAID, "tools": [SCHEMA]}, {}, DatasetRow(SAID, "", tools=(SCHEMA,))),
        ({"messages": SAID, "tools": orjson.dumps([SCHEMA]).decode()}, {}, DatasetRow(SAID, "", tools=(SCHEMA,))),
        ({"prompt": [USER], "completion": "one"}, {}, DatasetRow(SAID, "")),
        ({"prompt": "a", "label": "b"}, {}, DatasetRow("a", "b")),
        ({"prompt": "hello?", "label": "one"}, {"prompt_as": "chat"}, DatasetRow(SAID, "")),
    ],
)
def test_rows_are_conversations_or_prompts_with_answers(tmp_path, record, data, row):
    assert rows(tmp_path, [record], **data) == [row]


def test_a_published_dataset_gives_whole_solutions(tmp_path):
    (row,) = rows(tmp_path, [{"question": "1+1?", "answer": "It is 2.\n#### 2"}], mapping="gsm8k")
    assert row.prompt[-1] == {"role": "assistant", "content": "It is 2.\n#### 2"}
    assert row.prompt[0]["content"].startswith("1+1?")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": [USER]}, "key 'completion' or 'response' or 'label' is missing"),
        ({"messages": [USER], "label": 3}, "key 'label' = 3 is no answer to train on"),
        ({"messages": SAID, "tools": "{"}, "key 'tools' = '{' is not JSON"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, assistant("a")]}, "key 'messages' has images"),
    ],
)
def test_a_bad_row_is_refused_by_its_line(tmp_path, record, why):
    with pytest.raises(ConfigError, match=f"rows.jsonl, line 1: .*{why}"):
        rows(tmp_path, [record])

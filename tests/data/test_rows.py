"""The fields that a record needs to be a row, and the mappings of published datasets."""

from dataclasses import replace
from decimal import Decimal

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from april.config.data import MAPPINGS, DataSection, Mapping
from april.data.rows import BadRow, DatasetRow, hinted_prompt, make_row
from tests.support.dataset_records import RECORDS

PLAIN = MAPPINGS["plain"]
MESSAGES = [{"role": "user", "content": "1+1="}]


def test_a_row_has_text_or_messages_a_label_and_perhaps_a_verifier():
    assert make_row({"prompt": "1+1=", "label": "2"}, PLAIN) == DatasetRow("1+1=", "2", None)
    with_more = {"prompt": MESSAGES, "label": "2", "reward": "exact", "more": 1}
    assert make_row(with_more, PLAIN) == DatasetRow(MESSAGES, "2", "exact")


WRITTEN = [(7, "7"), (-2.5, "-2.5"), (" 7", " 7"), ("", ""), (2**64, "18446744073709551616"), (Decimal("1.50"), "1.50")]


@pytest.mark.parametrize(("written", "label"), WRITTEN)
def test_labels_are_text_and_numbers_become_text(written, label):
    assert make_row({"prompt": "p", "label": written}, PLAIN).label == label


def test_a_key_goes_through_lists():
    conversation = [{"from": "system", "value": "s"}, {"from": "human", "value": "p"}]
    record = {"conversations": conversation, "answers": ["4", "5"]}
    assert make_row(record, Mapping("own", ("conversations.1.value",), ("answers.0",))) == DatasetRow("p", "4")
    assert {"conversations", "label", "reward"} <= Mapping("own", ("conversations.1.value",)).columns
    for key in ("conversations.2.value", "conversations.value", "conversations.-1.value"):
        with pytest.raises(BadRow, match=f"key '{key}' is missing"):
            make_row(record, Mapping("own", (key,), ("answers.0",)))


def test_a_field_may_have_dots_and_commas_in_its_own_name():
    record = {"q.text": "p", "meta": {"a.b": "nested"}, "x,y": "5", "x": 1}
    assert make_row(record, Mapping("own", ("q.text",), ("x,y",))) == DatasetRow("p", "5")
    assert make_row(record, Mapping("own", ("meta.a.b",), ("x",))) == DatasetRow("nested", "1")
    assert {"q.text", "x,y"} <= Mapping("own", ("q.text",), ("x,y",)).columns


def test_several_columns_become_one_json_label():
    record = {"prompt": "p", "source": "gsm8k", "model": {"truth": "5"}, "info": {"index": 1, "weight": Decimal("0.5")}}
    label = make_row(record, Mapping("own", label=("source, model.truth,info",))).label
    assert orjson.loads(label) == {"source": "gsm8k", "truth": "5", "info": {"index": 1, "weight": 0.5}}
    assert {"prompt", "source", "model", "reward"} <= Mapping("own", label=("source, model.truth",)).columns
    with pytest.raises(BadRow, match="key 'source,more' is missing"):
        make_row(record, Mapping("own", label=("source,more",)))


def test_columns_whose_names_end_alike_keep_their_whole_names():
    record = {"prompt": "p", "q": {"text": "1"}, "a": {"text": "2"}, "b": {"id": "3"}}
    row = make_row(record, Mapping("own", label=("q.text, a.text,b.id",)))
    assert orjson.loads(row.label) == {"q.text": "1", "a.text": "2", "id": "3"}


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ([1, 2], ["[1, 2]", "not a JSON object"]),
        ({"label": "l"}, ["'prompt'", "missing", "'label'", "data.prompt_key"]),
        ({"prompt": "p", "answer": "l"}, ["'label'", "missing", "'answer'", "data.label_key"]),
        ({"prompt": 5, "label": "l"}, ["'prompt' = 5"]),
        ({"prompt": "", "label": "l"}, ["'prompt' = ''"]),
        ({"prompt": [], "label": "l"}, ["'prompt' = []"]),
        ({"prompt": " \n", "label": "l"}, ["'prompt' = ' \\n'", "is no prompt"]),
        ({"prompt": ["text"], "label": "l"}, ["'prompt' has 'text'", "no message"]),
        ({"prompt": [{"role": "user", "content": " "}], "label": "l"}, ["'prompt'", "is no prompt"]),
        ({"prompt": [{"role": "human", "content": "x"}], "label": "l"}, ["role 'human'", "use one of system"]),
        ({"prompt": [{"role": "user", "content": None}], "label": "l"}, ["content is None", "give text"]),
        ({"prompt": [{"role": "user", "content": {"text": "x"}}], "label": "l"}, ["content is {'text': 'x'}"]),
        ({"prompt": [{"role": "user", "content": ["x"]}], "label": "l"}, ["content is ['x']", "typed parts"]),
        ({"prompt": "p", "label": float("nan")}, ["'label' = nan"]),
        ({"prompt": "p", "label": "l", "reward": "timeit:timeit"}, ["'timeit:timeit'", "reward.allowed", "exact"]),
        ({"prompt": "p", "label": "l", "reward": "group:os:system"}, ["'group:os:system'", "reward.allowed"]),
        ({"prompt": [{"content": "no role"}], "label": "l"}, ["'prompt'", "no role"]),
        ({"prompt": "p", "label": None}, ["'label' = None"]),
        ({"prompt": "p", "label": True}, ["'label' = True"]),
        ({"prompt": "p", "label": ["l"]}, ["'label' = ['l']"]),
        ({"prompt": "p", "label": "l", "reward": 3}, ["'reward' = 3"]),
        ({"prompt": "p", "label": "l" * 200_001}, ["'label'", "200001 characters", "200000"]),
    ],
)
def test_an_invalid_record_is_refused_in_one_sentence_with_key_and_value(record, names):
    with pytest.raises(BadRow) as refusal:
        make_row(record, PLAIN)
    assert "\n" not in str(refusal.value)
    for name in names:
        assert name in str(refusal.value)


def test_a_long_value_is_shortened_in_the_refusal():
    with pytest.raises(BadRow) as refusal:
        make_row({"prompt": "p", "label": [1] * 10_000}, PLAIN)
    assert len(str(refusal.value)) < 500


AIME_LOWER_CASE = {"id": 1, "problem": "What is 2+3?", "solution": "Add.", "answer": "5", "url": "u", "year": "2024"}


@pytest.mark.parametrize("name", RECORDS)
def test_published_datasets_are_mapped_to_a_chat_prompt_a_label_and_a_verifier(name):
    row = make_row(RECORDS[name], MAPPINGS[name])
    [message] = row.prompt
    assert message["role"] == "user" and "What is 2+3?" in message["content"]
    assert row.label == "5"
    assert row.reward == {"dapo_math": "dapo", "deepscaler": "deepscaler", "gsm8k": "gsm8k"}.get(name, "math")
    assert ("\\boxed{}" in message["content"]) == (name not in ("dapo_math", "gsm8k"))
    assert ("####" in message["content"]) == (name == "gsm8k")


@pytest.mark.parametrize(
    ("solution", "label"),
    [
        ("48/2 = <<48/2=24>>24 in May, 48+24 = <<48+24=72>>72.\n#### 72", "72"),
        ("It is $<<540*2=1080>>1,080.\n#### 1,080", "1080"),
        ("#### 109,200,000", "109200000"),
        ("3-5 = <<3-5=-2>>-2\n#### -2", "-2"),
        ("#### 0.5\n", "0.5"),
        ("#### 1 was a guess\n#### $18", "18"),
    ],
)
def test_the_label_of_gsm8k_is_the_number_at_the_end_of_the_solution(solution, label):
    assert make_row({"question": "q", "answer": solution}, MAPPINGS["gsm8k"]).label == label


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"question": "q", "answer": "It is 42."}, ["'answer' ends in 'It is 42.'", "'#### 42'", "data.label_key"]),
        ({"question": "q", "answer": "x" * 999 + "\n#### many"}, ["'answer' ends in 'x", "#### many'"]),
        ({"question": "q", "answer": ""}, ["'answer' ends in ''"]),
        ({"question": "q", "answer": None}, ["'answer' = None"]),
        ({"question": "", "answer": "#### 1"}, ["'question' = ''"]),
        ({"question": "q"}, ["'answer' is missing", "'question'"]),
        ({"answer": "#### 1"}, ["'question' is missing", "'answer'"]),
    ],
)
def test_a_bad_row_of_gsm8k_is_refused_in_one_sentence(record, names):
    with pytest.raises(BadRow) as refusal:
        make_row(record, MAPPINGS["gsm8k"])
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300
    for name in names:
        assert name in str(refusal.value)


def test_aime_is_read_with_either_spelling_of_its_columns():
    assert make_row(AIME_LOWER_CASE, MAPPINGS["aime"]) == make_row(RECORDS["aime"], MAPPINGS["aime"])


def test_the_source_decides_on_the_verifier_then_the_row_then_the_mapping():
    record = RECORDS["deepmath"]
    assert make_row(record, MAPPINGS["deepmath"], reward="deepscaler").reward == "deepscaler"
    assert make_row(record | {"reward": "exact"}, MAPPINGS["deepmath"]).reward == "exact"
    assert make_row(record | {"reward": "exact"}, MAPPINGS["deepmath"], reward="dapo").reward == "dapo"


def test_a_row_may_name_only_a_shipped_or_allowed_verifier():
    def named(name, **rules):
        return make_row({"prompt": "p", "label": "l", "reward": name}, PLAIN, **rules).reward

    assert named("math") == "math" and named("group:remote") == "group:remote"
    assert named("mine:f", allowed=["mine:f"]) == "mine:f"
    assert named("mine:f", reward="exact") == "exact"
    for name, allowed in (("mine:g", ["mine:f"]), ("math", ["exact"]), ("timeit:timeit", [])):
        with pytest.raises(BadRow, match=r"reward\.allowed"):
            named(name, allowed=allowed)


def test_content_may_be_parts_and_a_tool_call_needs_none():
    calling = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    image = {"role": "user", "content": [{"type": "image", "url": "u"}]}
    assert make_row({"prompt": [parts, calling], "label": "l"}, PLAIN).prompt == [parts, calling]
    assert make_row({"prompt": [parts, calling], "label": "l"}, PLAIN, prompt_as="text").prompt == "ab\n\n"
    assert make_row({"prompt": [image], "label": "l"}, PLAIN).prompt == [image]


def test_a_text_can_become_a_message_and_messages_a_text():
    assert make_row({"prompt": "p", "label": "l"}, PLAIN, prompt_as="chat").prompt == [{"role": "user", "content": "p"}]
    two = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert make_row({"prompt": two, "label": "l"}, PLAIN, prompt_as="text").prompt == "s\n\nu"
    assert make_row(RECORDS["aime"], MAPPINGS["aime"], prompt_as="text").prompt.startswith("What is 2+3?\n")
    assert make_row({"prompt": two, "label": "l"}, PLAIN, prompt_as="chat").prompt == two


def test_every_mapping_can_be_configured():
    """One entry of `MAPPINGS` is all that a mapping needs."""
    assert all(DataSection(mapping=name, eval_mapping=name).mapping == name for name in MAPPINGS)
    with pytest.raises(ValidationError, match="'gsm8k'"):
        DataSection(mapping="unknown")


@given(*[st.text(st.sampled_from("ab{} ")) | st.sampled_from(["{prompt}", "{label}", "{feedback}"])] * 4)
def test_no_text_in_a_hint_is_taken_for_a_place_of_another(prompt, label, hint, feedback):
    row = DatasetRow(prompt, label, hint=hint)
    texts = {"prompt": prompt, "label": label, "hint": hint, "feedback": feedback}
    places = ("feedback", "prompt", "hint", "label", "feedback")
    template = "|".join(f"{{{name}}}" for name in places)
    assert hinted_prompt(row, template, feedback) == "|".join(texts[name] for name in places)


def test_a_hint_goes_around_the_last_message_of_the_user():
    said = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    row = DatasetRow(said, "{hint} 7", hint="{label}")
    found = hinted_prompt(row, "{prompt}\n{label} {hint}")
    assert found[3] == {"role": "user", "content": "user\n{hint} 7 {label}"}
    assert [*found[:3], found[4]] == [*said[:3], said[4]]
    assert hinted_prompt(DatasetRow("1+6=", "7"), "is it {label}? {prompt}") == "is it 7? 1+6="
    with pytest.raises(BadRow, match=r"no message .*algorithm\.hint"):
        hinted_prompt(DatasetRow(said[:1], "7"), "{prompt}")
    with pytest.raises(BadRow, match="key 'h' = 3"):
        make_row({"prompt": "p", "label": "7", "h": 3}, replace(PLAIN, hint="h"))

"""Prompts to ids and back, by the tokeniser of a policy folder."""

import subprocess
import sys

import numpy as np
import orjson
import pytest

from april.config import ConfigError
from april.data.rows import BadRow
from april.data.tokenizer import Tokenizer, recommended_sampling
from april.learner.policy.arithmetic import build_tokenizer


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    build_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_text_prompt_gets_no_special_tokens(folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode_prompt([{"role": "user", "content": "05*3+60="}])
    assert ids.dtype == np.int32
    assert ids.tolist() == [2, 7, 16, 5, 15, 8, 2, 12]
    assert tokenizer.encode_prompt("05*3+60=").tolist() == ids.tolist()


def test_decoding_drops_special_tokens_and_keeps_spaces(folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode_prompt("04*3+90=#12,:?Az")
    assert tokenizer.decode(np.append(ids, [1, 0])) == "04*3+90=#12,:?Az"
    assert tokenizer.decode([]) == ""


def test_a_response_keeps_its_special_tokens_but_not_the_end_token(folder):
    tokenizer = with_special(folder, "</think>", "<answer>")
    ids = tokenizer.encode_prompt("3*4</think><answer>12")
    assert len(ids) == 7
    for end in ([], [1], [1, 1], [1, 0, 0]):
        assert tokenizer.response_text([*ids, *end]) == "3*4</think><answer>12"
        assert tokenizer.response_text([*ids, *end], keep_special=False) == "3*412"
    assert tokenizer.response_text([*ids, 1, ids[0], 1]) == "3*4</think><answer>12<eos>3", "a turn's end is no end"
    assert tokenizer.response_text([1]) == tokenizer.response_text([]) == ""


def test_a_stop_token_is_an_end_token_if_the_template_writes_it_or_there_is_no_other(folder):
    tokenizer = with_special(folder, "<end>", "</answer>")
    end, closing = tokenizer.encode_prompt("<end></answer>").tolist()
    stops = [end, closing]
    assert tokenizer.response_text([2, end], stops=stops) == "0<end>"
    tokenizer.inner.chat_template = "{{ messages[0].content }}<end>"
    assert tokenizer.response_text([2, end], stops=stops) == "0"
    assert tokenizer.response_text([2, closing], stops=stops) == "0</answer>"
    tokenizer.eos_token_ids = frozenset()
    assert tokenizer.response_text([2, closing], stops=stops) == "0"


def with_special(folder, *texts):
    """The tokeniser of the folder with further special tokens."""
    inner = build_tokenizer()
    inner.add_special_tokens({"additional_special_tokens": list(texts)})
    inner.save_pretrained(folder)
    return Tokenizer(folder)


@pytest.mark.parametrize(
    ("written", "config", "ids"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 9}, {1, 5}),
        ({"eos_token_id": [1, 7, 9]}, {}, {1, 7, 9}),
        ({"eos_token_id": None}, {}, {1}),
        (None, {}, {1}),
        (None, {"eos_token_id": [5, 7]}, {1, 5, 7}),
        ({}, {"text_config": {"eos_token_id": 5}}, {1, 5}),
    ],
)
def test_stop_tokens_are_the_tokenisers_and_those_of_transformers_generation(folder, written, config, ids):
    if written is not None:
        (folder / "generation_config.json").write_bytes(orjson.dumps(written))
    (folder / "config.json").write_bytes(orjson.dumps({"model_type": "qwen3"} | config))
    assert Tokenizer(folder).eos_token_ids == ids


def test_messages_need_a_chat_template(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(folder).encode_prompt([{"role": "user", "content": "1"}])


def test_the_chat_template_gets_options_and_its_refusal_is_a_bad_row(folder):
    template = (
        "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}"
        "{{ messages[0].content }}{% if more %}={% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    message, tokenizer = {"role": "user", "content": "7"}, Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_prompt([message])) == "7"
    assert tokenizer.decode(tokenizer.encode_prompt([message], {"more": True})) == "7="
    with pytest.raises(BadRow, match="one only"):
        tokenizer.encode_prompt([message, message])


ONLY_STRINGS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Qwen3's: it prints a content only where that is text."""


@pytest.fixture
def printed(folder):
    """printed(messages, **options): what the template prints of them, of a tokeniser that has every character."""
    (folder / "chat_template.jinja").write_text(ONLY_STRINGS)
    tokenizer = Tokenizer(folder)

    def render(messages, template=None, **options):
        tokenizer.inner.chat_template = template or ONLY_STRINGS
        return tokenizer._render(messages, options, options.pop("continues", True))

    return render


def test_messages_are_rendered_in_their_canonical_form(printed):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}]
    assert printed([{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]) == (
        "<system>s</><user>1+2</><assistant>"
    )
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '[add{"a": 1}]' in printed([*asked, {"role": "observation", "content": "3"}])


def test_a_final_answer_is_continued_unless_it_is_to_be_closed(printed):
    messages = [{"role": "user", "content": "0+3"}, {"role": "assistant", "content": "The answer is"}]
    assert printed(messages) == "<user>0+3</><assistant>The answer is"
    assert printed(messages, continues=False) == "<user>0+3</><assistant>The answer is</><assistant>"


@pytest.mark.parametrize(
    ("messages", "template", "named"),
    [
        ([("user", "1"), ("ipython", "2")], "{{ messages[0].content }}", "message 1"),
        ([("user", "1")], "{{ messages[0].role }}", "message 0"),
        ([("user", [{"type": "image"}])], None, "images"),
        ([("user", "first"), ("user", "then")], "{% for m in messages|reverse %}{{ m.content }}{% endfor %}", "'then'"),
        ([("system", "Be brief."), ("user", "Be brief. 2+2?")], "{{ messages[1].content }}", "message 0"),
        ([("user", "3"), ("system", "3"), ("user", "33")], "3|33", "message 1"),
        ([("user", "user")], "<user>{{ messages[0].text }}", "message 0"),
        ([("user", "1"), ("tool", "if")], "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
         "{% endfor %}", "'if' of message 1"),
    ],
)  # fmt: skip
def test_a_row_whose_text_the_template_does_not_print_is_refused_by_name(printed, messages, template, named):
    with pytest.raises(BadRow, match=named):
        printed([{"role": role, "content": content} for role, content in messages], template)


@pytest.mark.parametrize("printing", ["'(' + c.function.arguments + ')'", "c.function.arguments"])
def test_arguments_are_given_as_text_to_a_template_that_takes_no_other(printed, printing):
    call = {"function": {"name": "run", "arguments": {"lines": ["a"], "times": 3}}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = ONLY_STRINGS.replace("c.function.arguments | tojson", printing)
    assert '{"lines": ["a"], "times": 3}' in printed(messages, template)


def test_arguments_of_calls_are_looked_for_however_they_are_escaped(printed):
    call = {"function": {"name": "run", "arguments": {"lines": ['say "77 times" <b>', "x"], "times": 3}}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    twice = ONLY_STRINGS.replace("arguments | tojson", "arguments | tojson | tojson")
    assert "77 times" in printed(messages) and "77 times" in printed(messages, twice)
    with pytest.raises(BadRow, match="print the argument"):
        printed(messages, ONLY_STRINGS.replace("{{ c.function.arguments | tojson }}", ""))
    echoed = [*messages, {"role": "tool", "content": 'say "77 times" <b>'}]
    assert "77 times" in printed(echoed)
    with pytest.raises(BadRow, match="does not print"):
        printed(echoed, ONLY_STRINGS.replace("{{ c.function.arguments | tojson }}", ""))


def test_a_template_may_drop_thoughts_move_the_system_s_text_and_escape(printed):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\n b"},
        {"role": "assistant", "content": "<think>hm</think>so"},
        {"role": "tool", "content": 'say "x"'},
        {"role": "user", "content": "go"},
    ]
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
        "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% elif m.role != 'system' %}{{ m.content | trim }}"
        "{% endif %}|{% endfor %}{{ messages[0].content }}"
    )
    assert "be brief" in printed(messages, template)


def test_a_template_s_own_system_prompt_and_a_row_s_are_encoded_as_by_transformers(folder):
    """As Qwen2.5's: it has a system prompt for messages that begin with none."""
    template = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}12+{% endif %}="
        "{% for m in messages if m.role != 'system' %}{{ m.content }}#{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(folder)
    for system, text in (([], "12+=7#"), ([{"role": "system", "content": "3*"}], "3*=7#")):
        messages = [*system, {"role": "user", "content": "7"}]
        ids = tokenizer.encode_prompt(messages).tolist()
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer.inner.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_tokeniser_may_lack_a_padding_token_and_a_model_have_more_embeddings_than_it_has_tokens(folder):
    settings = orjson.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(settings | {"pad_token": None}))
    padded = len(build_tokenizer()) + 64
    (folder / "config.json").write_bytes(orjson.dumps({"model_type": "qwen3", "vocab_size": padded}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.inner.pad_token_id is None
    ids = tokenizer.encode_row("1+2").tolist()
    assert tokenizer.response_text([*ids, 1]) == tokenizer.decode([*ids, padded - 1]) == "1+2"


def test_the_recommended_sampling_is_that_with_which_transformers_would_generate(folder):
    written = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 1}
    for config, expected in ((written, {"temperature": 0.6, "top_k": 20}), (written | {"do_sample": False}, {})):
        (folder / "generation_config.json").write_bytes(orjson.dumps(config))
        assert recommended_sampling(folder) == expected


@pytest.mark.parametrize(("bos", "ids"), [(None, [0]), (True, [0]), (False, [])])
def test_a_text_gets_a_beginning_token_as_transformers_gives_it_or_as_the_key_says(folder, bos, ids):
    tokenizer = Tokenizer(folder)
    plain = tokenizer.encode_prompt("1+2").tolist()
    tokenizer.inner.bos_token = tokenizer.inner.convert_ids_to_tokens(0)
    tokenizer.inner.encode = lambda text: [0, *tokenizer._encode(text)]
    assert tokenizer.encode_prompt("1+2", bos=bos).tolist() == ids + plain


def test_a_token_without_an_embedding_is_refused_by_name(folder):
    tokenizer = Tokenizer(folder)
    (folder / "config.json").write_bytes(orjson.dumps({"vocab_size": len(tokenizer.inner)}))
    assert len(tokenizer.encode_row("1+2"))
    resized = Tokenizer(folder)
    resized.inner.add_tokens(["<answer>"])
    with pytest.raises(BadRow, match="'<answer>'"):
        resized.encode_row("1+2<answer>")


def test_a_folder_without_a_tokeniser_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'model\.path'"):
        Tokenizer(tmp_path)


@pytest.mark.full
def test_the_tokeniser_works_without_torch(folder):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from april.data.tokenizer import Tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        f"t = Tokenizer({str(folder)!r})\n"
        "print(t.decode(t.encode_prompt([{'role': 'user', 'content': '05*3'}])))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "05*3"

"""Prompts to ids and back, by the tokeniser of a policy folder."""

import subprocess
import sys

import numpy as np
import orjson
import pytest

from april.config import ConfigError
from april.data.rows import BadRow
from april.data.tokenizer import Tokenizer
from april.learner.policy.warm_start import build_tokenizer


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


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        ({"eos_token_id": 5}, {1, 5}),
        ({"eos_token_id": [1, 7, 9]}, {1, 7, 9}),
        ({"eos_token_id": None}, {1}),
        (None, {1}),
    ],
)
def test_stop_tokens_are_the_tokenisers_and_the_generation_configs(folder, written, ids):
    if written is not None:
        (folder / "generation_config.json").write_bytes(orjson.dumps(written))
    assert Tokenizer(folder).eos_token_ids == ids


def test_messages_need_a_chat_template(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(folder).encode_prompt([{"role": "user", "content": "1"}])


def test_the_chat_template_gets_options_and_its_refusal_is_a_bad_row(folder):
    template = "{% if silent %}={% elif messages|length > 1 %}{{ raise_exception('one only') }}{% else %}1{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    message, tokenizer = {"role": "user", "content": "7"}, Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_prompt([message])) == "1"
    assert tokenizer.decode(tokenizer.encode_prompt([message], {"silent": True})) == "="
    with pytest.raises(BadRow, match="one only"):
        tokenizer.encode_prompt([message, message])


def test_a_folder_without_a_tokeniser_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'model\.path'"):
        Tokenizer(tmp_path)


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

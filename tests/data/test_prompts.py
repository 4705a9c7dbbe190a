"""Rows of a dataset, what the loader refuses, and the order of an epoch."""

import numpy as np
import pytest

from april.config import ConfigError
from april.data.prompts import Row, epoch_order, fingerprint, load_rows

MESSAGES = [{"role": "user", "content": "1+1="}]


@pytest.fixture
def dataset(tmp_path):
    def write(*lines: str):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_a_row_has_text_or_messages_a_label_and_perhaps_a_verifier(dataset):
    path = dataset(
        '{"prompt": "1+1=", "label": "2"}',
        '{"prompt": [{"role": "user", "content": "1+1="}], "label": "2", "reward": "exact", "more": 1}',
    )
    assert load_rows(path, "prompt", "label") == [Row("1+1=", "2", None), Row(MESSAGES, "2", "exact")]


@pytest.mark.parametrize(("written", "label"), [("7", "7"), ("-2.5", "-2.5"), ('" 7"', " 7"), ('""', "")])
def test_labels_are_text_and_numbers_become_text(dataset, written, label):
    assert load_rows(dataset(f'{{"prompt": "p", "label": {written}}}'))[0].label == label


def test_keys_can_be_named(dataset):
    path = dataset('{"question": "p", "answer": 4}')
    assert load_rows(path, "question", "answer") == [Row("p", "4")]


def test_blank_lines_are_no_rows(dataset):
    assert len(load_rows(dataset("", '{"prompt": "p", "label": "l"}', "  ", ""))) == 1


@pytest.mark.parametrize(
    ("bad_line", "names"),
    [
        ("{'prompt': 1}", ["is not JSON"]),
        ('{"prompt": "p", "label": "l"', ["is not JSON"]),
        ("[1, 2]", ["[1, 2]", "not a JSON object"]),
        ('{"label": "l"}', ["'prompt'", "missing", "'label'", "data.prompt_key"]),
        ('{"prompt": "p", "answer": "l"}', ["'label'", "missing", "'answer'", "data.label_key"]),
        ('{"prompt": 5, "label": "l"}', ["'prompt' = 5"]),
        ('{"prompt": "", "label": "l"}', ["'prompt' = ''"]),
        ('{"prompt": [], "label": "l"}', ["'prompt' = []"]),
        ('{"prompt": ["text"], "label": "l"}', ["'prompt' = ['text']"]),
        ('{"prompt": [{"content": "no role"}], "label": "l"}', ["'prompt'", "no role"]),
        ('{"prompt": "p", "label": null}', ["'label' = None"]),
        ('{"prompt": "p", "label": true}', ["'label' = True"]),
        ('{"prompt": "p", "label": ["l"]}', ["'label' = ['l']"]),
        ('{"prompt": "p", "label": "l", "reward": 3}', ["'reward' = 3"]),
    ],
)
def test_a_bad_line_is_refused_in_one_sentence_that_names_file_line_key_and_value(dataset, bad_line, names):
    path = dataset('{"prompt": "p", "label": "l"}', bad_line)
    with pytest.raises(ConfigError) as refusal:
        load_rows(path, "prompt", "label")
    text = str(refusal.value)
    assert "\n" not in text
    for name in [str(path), "line 2", *names]:
        assert name in text


def test_a_long_value_is_shortened_in_the_refusal(dataset):
    with pytest.raises(ConfigError) as refusal:
        load_rows(dataset('{"prompt": "p", "label": [' + "1, " * 10_000 + "1]}"))
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("lines", [[""], ["", "  "]])
def test_an_empty_dataset_is_refused(dataset, lines):
    with pytest.raises(ConfigError, match="has no rows"):
        load_rows(dataset(*lines))


def test_a_dataset_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.jsonl cannot be read"):
        load_rows(tmp_path / "missing.jsonl")


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe", "label": "l"}\n')
    with pytest.raises(ConfigError, match=r"line 1: .*not JSON"):
        load_rows(path)


def test_the_fingerprint_is_the_sha256_of_the_content(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"abc")
    assert fingerprint(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_an_epoch_hands_out_every_row_once():
    for shuffle in (True, False):
        assert sorted(epoch_order(1000, 3, 2, shuffle)) == list(range(1000))
        assert epoch_order(1000, 3, 2, shuffle).dtype == np.int64


def test_an_unshuffled_epoch_follows_the_file():
    assert epoch_order(5, 3, 2, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_depends_on_seed_and_epoch_alone_and_never_changes():
    assert epoch_order(8, 0, 0, True).tolist() == epoch_order(8, 0, 0, True).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    orders = [epoch_order(100, seed, epoch, True).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(map(tuple, orders))) == 4

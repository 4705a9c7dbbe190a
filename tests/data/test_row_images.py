"""Rows bring their images in every way in which datasets are published, and the tokens of each are counted."""

import base64
import hashlib
import io

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from april.config import ConfigError, DataSection
from april.data.dataset import load_dataset
from april.data.rows import BadRow
from april.data.tokenizer import Tokenizer
from tests.support.picture_rows import picture, write_picture_tokenizer

RED, BLUE = picture("red"), picture("blue", (24, 16))


def name(source):
    return hashlib.sha256(source).hexdigest()


def load(path, **keys):
    data = DataSection(path=path, shuffle=False, **keys)
    return load_dataset(data.train_sources, data)


def rows_of(folder, *records, **keys):
    """The dataset of these records as JSON lines, beside two files of pictures."""
    for file, content in (("red.png", RED), ("blue.png", BLUE)):
        (folder / file).write_bytes(content)
    path = folder / "train.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"label": "0"} | record) + b"\n" for record in records))
    return load(path, **keys)


def question(*content):
    return [{"role": "user", "content": list(content)}]


def text(words):
    return {"type": "text", "text": words}


def image(source):
    return {"type": "image", "image": name(source)}


def test_a_parquet_file_of_the_datasets_library_has_the_images_that_were_put_in(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = {"images": datasets.List(datasets.Image()), "problem": datasets.Value("string")}
    records = {"images": [[Image.new("RGB", (16, 16), "red"), Image.new("RGB", (24, 16), "blue")], []]}
    records |= {"problem": ["<image>Is it like <image>?", "2*3="], "answer": ["no", "6"]}
    made = datasets.Dataset.from_dict(records, datasets.Features(features | {"answer": datasets.Value("string")}))
    made.to_parquet(str(tmp_path / "train.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "train.parquet", tmp_path / "saved"):
        dataset = load(path, prompt_key="problem", label_key="answer")
        first, second = dataset[0], dataset[1]
        pixels = [Image.open(io.BytesIO(dataset.image_source(each))).getpixel((0, 0)) for each in first.images]
        assert pixels == [(255, 0, 0), (0, 0, 255)]
        assert [part["type"] for part in first.prompt[0]["content"]] == ["image", "text", "image", "text"]
        assert second.images == () and second.prompt == "2*3="


def test_a_parquet_file_of_a_script_has_bytes_messages_and_unused_fields_of_parts(tmp_path):
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    record = {"prompt": [{"role": "user", "content": content}], "label": "a square"}
    record |= {"image": {"bytes": RED, "path": None}, "extra_info": {"index": 3}}
    parquet.write_table(pa.Table.from_pylist([record]), tmp_path / "train.parquet")
    dataset = load(tmp_path / "train.parquet")
    assert dataset[0].prompt == question(image(RED), content[1])
    assert dataset.image_source(dataset[0].images[0]) == RED


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "<image>What?", "images": ["red.png"]}, question(image(RED), text("What?"))),
        ({"prompt": "What?", "image": "red.png"}, question(image(RED), text("What?"))),
        ({"prompt": "A <image> B <image>", "images": [{"path": "red.png"}, "blue.png"]},
         question(text("A "), image(RED), text(" B "), image(BLUE))),
        ({"prompt": question({"type": "image"}, text("What?")), "images": ["blue.png"]},
         question(image(BLUE), text("What?"))),
        ({"prompt": question(text("What?"), {"type": "image", "image": "blue.png"})},
         question(text("What?"), image(BLUE))),
        ({"prompt": question({"type": "image_url", "image_url": {
            "url": "data:image/png;base64," + base64.b64encode(RED).decode()}})}, question(image(RED))),
        ({"prompt": "an <image> in words"}, "an <image> in words"),
    ],
)  # fmt: skip
def test_each_way_to_give_an_image_leads_to_the_same_parts(tmp_path, record, prompt):
    assert rows_of(tmp_path, record)[0].prompt == prompt


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "<image> <image>", "images": ["red.png"]}, "2 <image> markers or image parts for 1 images"),
        ({"prompt": "<image>", "images": ["red.png", "blue.png"]}, "1 <image> markers or image parts for 2 images"),
        ({"prompt": question({"type": "image"})}, "1 <image> markers or image parts for 0 images"),
        ({"prompt": "?", "images": ["no.png"]}, "cannot be read .No such file"),
        ({"prompt": "?", "images": ["https://x.org/a.png"]}, "April fetches nothing"),
        ({"prompt": "?", "images": ["data:image/png,abc"]}, "is like data:image/png;base64"),
        ({"prompt": "?", "images": [7]}, "an image is given as 7"),
        ({"prompt": "?", "images": ["red.png"] * 65}, "65 images, more than 64"),
    ],
)
def test_a_row_whose_images_cannot_be_found_is_refused_with_a_sentence(tmp_path, record, why):
    with pytest.raises(ConfigError, match=why):
        rows_of(tmp_path, record)


def test_text_alone_would_lose_the_images_and_an_empty_key_leaves_them_out(tmp_path):
    record = {"prompt": "What?", "images": ["red.png"]}
    with pytest.raises(ConfigError, match=r"data.prompt_as = 'text'"):
        rows_of(tmp_path, record, prompt_as="text")
    assert rows_of(tmp_path, record, images_key="")[0].prompt == "What?"


def test_the_fingerprint_depends_on_the_content_of_images_and_not_on_their_place(tmp_path):
    record = {"prompt": "What?", "images": ["red.png"]}
    prints = [rows_of(tmp_path, record).fingerprint, rows_of(tmp_path, record | {"images": ["blue.png"]}).fingerprint]
    (tmp_path / "same.png").write_bytes(RED)
    assert rows_of(tmp_path, record | {"images": ["same.png"]}).fingerprint == prints[0] != prints[1]


def test_a_file_that_changes_under_the_run_is_refused(tmp_path):
    dataset = rows_of(tmp_path, {"prompt": "What?", "images": ["red.png"]})
    (tmp_path / "red.png").write_bytes(BLUE)
    with pytest.raises(BadRow, match=r"red\.png' has changed"):
        dataset.image_source(dataset[0].images[0])


def test_a_placeholder_is_repeated_for_each_token_of_its_image(tmp_path):
    tokenizer = Tokenizer(write_picture_tokenizer(tmp_path))
    prompt = question(text("1+"), image(RED), text("2="), image(BLUE))
    plain, pad = tokenizer.encode_prompt(prompt), tokenizer.image_rule.token_id
    ids = tokenizer.encode_row(prompt, [4, 6])
    assert (plain == pad).sum() == 2 and ids.dtype == np.int32
    at = np.flatnonzero(plain == pad)
    assert ids.tolist() == [*plain[: at[0]], *[pad] * 4, *plain[at[0] + 1 : at[1]], *[pad] * 6, *plain[at[1] + 1 :]]


def test_a_text_with_a_placeholder_and_a_template_without_one_are_refused(tmp_path):
    tokenizer = Tokenizer(write_picture_tokenizer(tmp_path))
    with pytest.raises(BadRow, match=r"0 images.* 1 placeholders"):
        tokenizer.encode_row("<|image_pad|>")
    tokenizer.inner.chat_template = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    with pytest.raises(BadRow, match=r"1 images.* 0 placeholders"):
        tokenizer.encode_row(question(image(RED), text("1+")), [4])
    tokenizer.inner.chat_template = "<|image_pad|>"
    with pytest.raises(BadRow, match="does not print '1\\+'"):
        tokenizer.encode_row(question(image(RED), text("1+")), [4])


def test_images_are_in_the_order_of_the_parts_that_show_them_though_column_and_parts_have_some(tmp_path):
    asked = question(text("like "), {"type": "image", "image": "red.png"}, text("?"))
    row = rows_of(tmp_path, {"prompt": asked, "images": ["blue.png"]})[0]
    assert [part["image"] for part in row.prompt[0]["content"] if part["type"] == "image"] == [name(BLUE), name(RED)]
    assert [each.source for each in row.images] == [name(BLUE), name(RED)]

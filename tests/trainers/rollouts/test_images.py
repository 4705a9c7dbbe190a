"""Prompts with images that a trainer submits: given in every way, they are what rows of files with them would be."""

import base64
import io
from dataclasses import replace

import numpy as np
import orjson
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

import april
from april import config as configuration
from april.config import ConfigError
from april.data.images import name_of, prepare
from april.data.pixels import png_of
from april.data.rows import BadRow
from april.data.tokenizer import Tokenizer
from april.learner.policy.counting import RECIPE, build_model, save_policy
from april.trainers.rollouts import Prompt
from april.trainers.rollouts.prompts import split_into_messages
from april.trainers.rollouts.run import Rollouts
from tests.support.kill_broker import kill_broker
from tests.support.picture_rows import picture, write_picture_tokenizer
from tests.support.recording_broker import RecordingBroker
from tests.support.run_processes import assert_closed

SUBMITTED = ["--data.source", "submitted", "--worker.engine", "transformers"]


@pytest.fixture
def folder(tmp_path):
    return write_picture_tokenizer(tmp_path / "vision", {"max_position_embeddings": 512})


@pytest.fixture
def submit(config_file, folder):
    """submit(*prompts, **keys) -> the encoded prompts, with the files of their images, in a run with these keys."""

    def submit_to_run(*prompts, **keys):
        words = [word for key, value in keys.items() for word in (f"--{key.replace('__', '.')}", value)]
        config = configuration.load(config_file, [*SUBMITTED, "--model.path", str(folder), *words])
        broker = RecordingBroker(2)
        run = Rollouts(config, 0, broker, broker)
        encoded = run._encoder.encode([each if isinstance(each, Prompt) else Prompt(each) for each in prompts])
        assert run.submit(prompts) == len(prompts)
        assert broker.images == {name: png for prompt in encoded for name, png in prompt.images.items()}
        return encoded

    return submit_to_run


def chat(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "1+1="}]}]


def data_url(file):
    return "data:image/png;base64," + base64.b64encode(file).decode()


def test_an_image_may_be_given_in_every_way(submit, folder, tmp_path, monkeypatch):
    red = picture("red")
    (tmp_path / "red.png").write_bytes(red)
    monkeypatch.chdir(tmp_path)
    given = ["red.png", str(tmp_path / "red.png"), red, data_url(red), Image.open(io.BytesIO(red)), {"bytes": red}]
    parts = [{"type": "image", "image": image} for image in given]
    parts += [
        {"type": "image_url", "image_url": {"url": data_url(red)}},
        {"type": "image_url", "image_url": data_url(red)},
    ]
    columns = [
        Prompt("1+1=", images=[red]),
        Prompt("<image>1+1=", images=[red]),
        Prompt(chat({"type": "image"}), images=[red]),
    ]
    encoded = submit(*map(chat, parts), *columns)
    expected = prepare(red, Tokenizer(folder).image_rule)
    first, *others = encoded
    assert first.images == {expected.name: expected.png}
    assert (first.ids == Tokenizer(folder).image_rule.token_id).sum() == expected.tokens == 4
    for other in others:
        assert other.images == first.images and other.submission == first.submission
        assert np.array_equal(other.ids, first.ids)


def test_token_ids_have_a_placeholder_for_each_token_of_their_images(submit, folder):
    pad, red, blue = Tokenizer(folder).image_rule.token_id, picture("red"), picture("blue", (24, 16))
    ids = [5, *[pad] * 4, 6, *[pad] * 6, 7]
    [encoded] = submit(Prompt(ids, images=[red, blue]))
    assert encoded.ids.tolist() == ids and encoded.submission.prompt_tokens == 13
    assert encoded.submission.images == [name_of(png) for png in encoded.images.values()]
    with pytest.raises(ValueError, match=r"10 tokens.* 9 of"):
        submit(Prompt(ids[:-2], images=[red, blue]))


def test_pictures_of_pillow_are_those_of_their_files(submit):
    upright, turned = io.BytesIO(), io.BytesIO()
    values = Image.fromarray(np.arange(16 * 24 * 3, dtype=np.uint8).reshape(16, 24, 3))
    values.save(upright, "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    values.save(turned, "PNG", exif=exif)
    transparent = values.convert("RGBA")
    transparent.putalpha(100)
    clear = io.BytesIO()
    transparent.save(clear, "PNG")
    for file in (upright, turned, clear):
        of_file, of_pillow = submit(Prompt("1=", images=[file.getvalue()]), Prompt("1=", images=[Image.open(file)]))
        assert of_file.images == of_pillow.images
    assert submit(Prompt("1=", images=[values.convert("CMYK")]))[0].images


@pytest.mark.parametrize(
    "prompt, why",
    [
        (Prompt("1=", images=[b"no picture"]), "cannot be decoded"),
        (Prompt("1=", images=["nowhere.png"]), "cannot be read .* those of submitted prompts at the trainer's"),
        (Prompt("1=", images=["https://a.b/c.png"]), "April fetches nothing"),
        (Prompt("1=", images=[7]), "an image is given as 7"),
        (Prompt("<image><image>1=", images=[picture()]), "2 <image> markers or image parts for 1 images"),
        (Prompt(chat({"type": "image"})), "1 <image> markers or image parts for 0 images"),
        (Prompt(chat({"type": "image", "image": picture("red", (1600, 4))})), "too narrow"),
        (Prompt([{"role": "user"}]), "is no message like"),
        (Prompt("1=", images=[picture()] * 65), "has 65 images, more than 64"),
    ],
)
def test_what_is_no_image_is_refused_with_a_sentence(submit, prompt, why):
    with pytest.raises(BadRow, match=why):
        submit(prompt)


def test_a_run_that_takes_no_images_says_so(submit, folder):
    shown = Prompt("1=", images=[picture()])
    with pytest.raises(ConfigError, match=r"'worker\.engine' = 'torch' .*images"):
        submit(shown, worker__engine="torch")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"'model\.path' = .*images"):
        submit(shown)
    assert submit(Prompt("1="))


def test_messages_to_the_broker_hold_a_bounded_number_of_images(submit, monkeypatch):
    colours = ["red", "green", "blue", "black"]
    encoded = submit(*(Prompt("1=", images=[picture(colour), picture("white")]) for colour in colours))
    monkeypatch.setattr("april.trainers.rollouts.prompts.MAX_MESSAGE_IMAGES", 4)
    assert [len(part) for part in split_into_messages(encoded)] == [2, 2]


@pytest.mark.full
def test_samples_are_those_of_the_same_prompts_from_files_though_the_broker_is_killed(config_file, tmp_path):
    """Four prompts with images of noise, two samples each, under the same weights and the same seeds."""
    policy = tmp_path / "policy"
    save_policy(build_model(replace(RECIPE, hidden_size=64, layers=1), seed=0), policy)
    rng, rows = np.random.default_rng(0), []
    for number in range(4):
        file = tmp_path / f"{number}.png"
        file.write_bytes(png_of(rng.integers(256, size=(32, 24, 3), dtype=np.uint8)))
        rows.append({"prompt": f"<image>{'RGB'[number % 3]}?", "label": "1", "images": [str(file)]})
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    model = AutoModelForImageTextToText.from_pretrained(policy)
    keys = {
        "model.path": str(policy), "worker.engine": "transformers", "schedule.max_steps": 1, "evaluation.prompts": 1,
        "schedule.over_sampling_batch_size": 4, "data.shuffle": "false", "data.path": str(tmp_path / "rows.jsonl"),
    }  # fmt: skip
    with april.connect(config_file, overrides=keys | {"run.name": "files"}) as run:
        run.publish(model)
        expected = run.take()
    keys["data.source"] = "submitted"
    with april.connect(config_file, overrides=keys) as run:
        prompts = [Prompt(row["prompt"], row["label"], images=row["images"]) for row in rows]
        run.submit(prompts[:2])
        kill_broker(run)
        run.submit(prompts[2:])
        kill_broker(run)
        run.publish(model)
        found = run.take()
        run.consumed(found)
        run.publish(model)
        assert run.take() is None
    ours, theirs = content(found), content(expected)
    assert ours.keys() == theirs.keys() and len(ours) == 8
    for sample, (tokens, images, logprobs) in ours.items():
        assert (tokens, images) == theirs[sample][:2] and len(images) == 1
        assert np.allclose(logprobs, theirs[sample][2], atol=1e-5)
    assert assert_closed(run.config.run_dir)["state"] == "finished"


def content(batch):
    """Tokens, images and log-probabilities of a batch's samples by (group, index)."""
    samples = [sample for group in batch.groups for sample in group]
    assert batch.images == [sample.images for sample in samples]
    return {
        (sample.group, sample.index): (sample.tokens.tolist(), sample.images, sample.logprobs) for sample in samples
    }

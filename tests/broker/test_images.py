"""The images of prompts: on disk before the journal names them, given by name, removed when nothing names them."""

import io
import os

import orjson
import pytest
from PIL import Image

from april import config as configuration
from april import wire
from april.broker.images import ImageStore
from april.broker.journal.journal import Journal
from april.broker.ledger.events import GroupOpened
from april.config import ConfigError
from april.data.images import name_of
from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker, joined
from tests.support.picture_rows import picture, write_picture_tokenizer

COLORS = ("red", "green", "blue", "black", "white", "gray", "orange", "purple")


@pytest.fixture
def config(config_file, tmp_path):
    """The small run on a dataset with a picture in each row."""
    rows = []
    for number, color in enumerate(COLORS):
        (tmp_path / f"{number}.png").write_bytes(picture(color))
        rows.append({"prompt": f"{number}+0=", "label": "0", "images": [f"{number}.png"]})
    (tmp_path / "pictures.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    policy = write_picture_tokenizer(tmp_path / "vision", {"max_position_embeddings": 512})
    words = ["--model.path", policy, "--data.path", tmp_path / "pictures.jsonl", "--evaluation.prompts", "1"]
    words += ["--data.eval_path", tmp_path / "pictures.jsonl"]
    return configuration.load(config_file, [*map(str, words)])


@pytest.fixture
def talk(config):
    return Conversation(config)


def files(config):
    return {path.stem for path in (config.run_dir / "images").glob("*")}


def needed(talk):
    return set(talk.service.history.live_images())


def fetched(peer, names):
    peer.say(wire.FetchImages(names))
    [received] = peer.take(wire.Images)
    return dict(zip(received.message.names, (bytes(array.data) for array in received.packed), strict=True))


def test_a_grant_names_its_image_and_counts_its_tokens_and_the_file_is_fetched_by_name(talk, config):
    joined(FakeLearner(talk))
    worker = joined(FakeWorker(talk))
    grant = worker.grants()[0]
    [name] = grant.images
    pad = talk.service.prompts.tokenizer.image_rule.token_id
    assert (grant.arrays[0] == pad).sum() == 4
    png = fetched(worker, [name])[name]
    assert name_of(png) == name and Image.open(io.BytesIO(png)).size == (16, 16)
    assert b"\x89PNG" not in b"".join(path.read_bytes() for path in (config.run_dir / "journal").glob("*"))


def test_a_batch_names_the_images_of_its_groups(talk):
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk))
    learner.say(wire.Fetch(0))
    while not (batches := learner.take(wire.Batch)):
        for grant in worker.grants():
            worker.complete(grant)
    heads = [head for batch in batches for head in batch.message.groups]
    assert len(heads) == 4 and all(len(head.images) == 1 for head in heads)
    names = [name for head in heads for name in head.images]
    assert {name_of(png) for png in fetched(learner, names).values()} == set(names)


def test_no_record_names_an_image_before_its_file_is_on_disk(talk, config, monkeypatch):
    order, fsync, append = [], os.fsync, Journal.append
    monkeypatch.setattr(os, "fsync", lambda file: (order.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file))[1])

    def recorded(journal, event, arrays=()):
        if isinstance(event, GroupOpened):
            order.append(event)
        return append(journal, event, arrays)

    monkeypatch.setattr(Journal, "append", recorded)
    talk.ledger.write = talk.journal.append
    joined(FakeLearner(talk))
    joined(FakeWorker(talk))
    folder = str(config.run_dir / "images")
    opened = [event for event in order if isinstance(event, GroupOpened)]
    for event in opened:
        before = order[: order.index(event)]
        for name in event.images:
            at = before.index(f"{folder}/{name}.tmp")
            assert folder in before[at:], "the file is synced, and then its folder"
    assert len(opened) >= 4 and all(event.images for event in opened)


def test_a_file_that_no_record_names_is_removed_at_a_start_and_those_of_live_groups_stay(talk, config):
    joined(FakeLearner(talk))
    joined(FakeWorker(talk))
    live = needed(talk)
    stray = name_of(b"a broker died between the file and its record")
    ImageStore(config.run_dir).keep(stray, b"a broker died between the file and its record")
    (config.run_dir / "images" / f"{'0' * 64}.tmp").write_bytes(b"half")
    talk.restart_broker()
    talk.tick(1.0)
    talk.tick(1.0)
    assert files(config) == live == needed(talk) and live
    worker = joined(FakeWorker(talk, "w1"))
    assert all(fetched(worker, [name])[name] for name in live)


def test_files_of_groups_that_are_trained_for_good_go_with_the_journal(talk, config):
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk))
    learner.say(wire.Fetch(0))
    while not learner.take(wire.Batch):
        for grant in worker.grants():
            worker.complete(grant)
    trained = {name for group in talk.ledger.deliveries[0] for name in group.images}
    learner.say(wire.Consumed(0, {}))
    talk.journal.file_records = 1
    talk.take_snapshot()
    talk.tick(1.0)
    assert trained <= files(config), "a learner may go back to the batch"
    learner.say(wire.Durable(1, 1))
    for _ in range(3):
        talk.take_snapshot()
        talk.tick(1.0)
    assert files(config) == needed(talk)
    assert not trained <= files(config)


def test_an_image_that_is_damaged_on_disk_costs_its_group_and_nothing_else(talk, config):
    joined(FakeLearner(talk))
    worker = joined(FakeWorker(talk))
    grant = worker.grants()[0]
    path = config.run_dir / "images" / f"{grant.images[0]}.png"
    path.write_bytes(path.read_bytes()[:-1])
    assert fetched(worker, grant.images) == {grant.images[0]: b""}
    assert grant.group not in talk.ledger.groups and talk.ledger.account.discarded.keys() >= {"unreadable"}
    assert talk.service.run.read_only == ""


def test_names_that_are_none_and_too_many_are_refused(talk):
    worker = joined(FakeWorker(talk))
    for names in (["../config"], ["0" * 64] * 65):
        worker.say(wire.FetchImages(names))
        assert worker.take(wire.Refused) and not worker.take(wire.Images)


def test_a_picture_that_changes_under_the_run_is_not_drawn_again(talk, config, tmp_path):
    book = talk.service.prompts
    _, position, _ = book.draw((1, 0))
    number = book.row_number(1, position)
    (tmp_path / f"{number}.png").write_bytes(picture("yellow"))
    book._prepared.cache_clear()
    [(_, png)] = book.images(False, 1, position)
    with pytest.raises(OSError, match="has changed since the dataset was read"):
        png()
    assert book.draw((1, position))[1] != position


def test_a_policy_without_an_image_processor_refuses_rows_with_images(config):
    (config.model.path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"'model.path' = .* takes no images, and rows have some"):
        Conversation(config)


def test_a_request_for_an_image_that_nobody_needs_is_answered_with_nothing(talk):
    joined(FakeLearner(talk))
    worker = joined(FakeWorker(talk))
    grants = worker.grants()
    for name in ("0" * 64, "0" * 64):
        assert fetched(worker, [name]) == {name: b""}
    assert grants and not talk.ledger.account.discarded and talk.service.run.read_only == ""


def test_a_picture_whose_file_is_gone_is_the_system_s_fault_at_every_try(talk, tmp_path):
    """A held-out prompt is opened again and again, and its tokens are known."""
    prompts = talk.service.prompts
    for path in tmp_path.glob("*.png"):
        path.unlink()
    prompts._image_names.clear()
    prompts._prepared.cache_clear()
    for _ in range(2):
        with pytest.raises(OSError, match="image"):
            prompts.images(True, 0, 0)

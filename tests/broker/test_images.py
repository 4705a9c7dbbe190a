"""The images of prompts: on disk before the journal names them, given by name, removed when nothing names them."""

import errno
import io
import os
from types import SimpleNamespace

import orjson
import pytest
from PIL import Image

from april import config as configuration
from april import wire
from april.broker import image_preparation, prompts
from april.broker.images import ImageStore
from april.broker.journal.journal import Journal
from april.broker.ledger.events import GroupOpened
from april.config import ConfigError
from april.data.images import name_of, prepare
from april.data.rows import BadRow, RowImage
from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker, joined
from tests.support.picture_rows import fetched, image_files, picture, write_picture_tokenizer

COLORS = ("red", "green", "blue", "black", "white", "gray", "orange", "purple")


@pytest.fixture
def config(config_file, tmp_path):
    """The small run on a dataset with a picture in each row."""
    rows = []
    for number, color in enumerate(COLORS):
        (tmp_path / f"{number}.png").write_bytes(picture(color))
        rows.append({"prompt": f"{number}+0=", "label": "0", "images": [f"{number}.png"]})
    (tmp_path / "pictures.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    (tmp_path / "heldout.png").write_bytes(picture("pink"))
    held_out = {"prompt": "9+0=", "label": "9", "images": ["heldout.png"]}
    (tmp_path / "heldout.jsonl").write_bytes(orjson.dumps(held_out))
    policy = write_picture_tokenizer(tmp_path / "vision", {"max_position_embeddings": 512})
    words = ["--model.path", policy, "--data.path", tmp_path / "pictures.jsonl", "--evaluation.prompts", "1"]
    words += ["--data.eval_path", tmp_path / "heldout.jsonl"]
    return configuration.load(config_file, [*map(str, words)])


@pytest.fixture
def talk(config, monkeypatch):
    """A broker that prepares the images of two prompts ahead, fewer than the dataset has."""
    monkeypatch.setattr(image_preparation, "PROMPTS_AHEAD", 2)
    monkeypatch.setattr(prompts, "PROMPTS_AHEAD", 2)
    return Conversation(config)


def needed(talk):
    """Names of images that the broker may be asked for."""
    return {*talk.service.history.live_images(), *talk.service.prompts.upcoming_images()}


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


def test_no_record_names_an_image_before_its_file_is_on_disk(config, monkeypatch):
    order, fsync, append = [], os.fsync, Journal.append
    monkeypatch.setattr(os, "fsync", lambda file: (order.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file))[1])

    def recorded(journal, event, arrays=()):
        if isinstance(event, GroupOpened):
            order.append(event)
        return append(journal, event, arrays)

    monkeypatch.setattr(Journal, "append", recorded)
    talk = Conversation(config)
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
    live = set(talk.service.history.live_images())
    stray = name_of(b"a broker died between the file and its record")
    ImageStore(config.run_dir).keep(stray, b"a broker died between the file and its record")
    (config.run_dir / "images" / f"{'0' * 64}.tmp").write_bytes(b"half")
    talk.restart_broker()
    talk.tick(1.0)
    talk.tick(1.0)
    assert image_files(config) == needed(talk) >= live and live
    worker = joined(FakeWorker(talk, "w1"))
    assert all(fetched(worker, [name])[name] for name in live)


def test_an_image_that_is_damaged_on_disk_costs_its_group_and_nothing_else(talk, config):
    joined(FakeLearner(talk))
    worker = joined(FakeWorker(talk))
    grant = next(grant for grant in worker.grants() if not grant.evaluation)
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
    [name] = book.keep_images(False, 1, position)
    (tmp_path / f"{number}.png").write_bytes(picture("yellow"))
    assert book.keep_images(False, 1, position) == [name], "its file is there"
    forget_files(talk)
    with pytest.raises(OSError, match=r"\.png' has changed"):
        book.keep_images(False, 1, position)
    assert book.draw((1, position))[1] != position


def test_images_are_on_disk_before_their_prompts_are_drawn(talk, config):
    """So the loop waits neither for a decoder nor for a disk when it opens the group."""
    book = talk.service.prompts
    forget_files(talk)
    book.draw((2, 0))
    wait_for_threads(talk)
    images = [book.row(2, position).images[0] for position in range(2)]
    names = {prepare(book.rows.image_source(image), book.tokenizer.image_rule).name for image in images}
    assert len(names) == 2 and names <= image_files(config) and names <= set(book.upcoming_images())


def test_the_image_of_a_held_out_prompt_stays_for_the_next_evaluation(talk, config):
    [name] = talk.service.prompts.keep_images(True, 0, 0)
    payloads = talk.service.payloads
    payloads.images.reclaim_is_due = True
    for _ in range(2):
        payloads.reclaim_images(lambda: (), talk.now)  # as once the evaluation is recorded
        talk.journal.sync()
    assert image_files(config) == set(talk.service.prompts.upcoming_images()) >= {name}


def test_a_picture_that_cannot_be_prepared_is_told_once_by_the_thread_that_found_it_and_tried_again(talk, monkeypatch):
    calls, preparation = [], talk.service.prompts.preparation
    bad = RowImage("bad", "nowhere.png")

    def no_picture(source, rule):
        calls.append(source)
        raise BadRow("no picture")

    monkeypatch.setattr(image_preparation, "prepare", no_picture)
    rows = SimpleNamespace(image_source=lambda image: bytes(1 << 10))
    preparation.begin(rows, [bad])
    for tries in (1, 2):
        with pytest.raises(BadRow, match="no picture") as told:
            preparation.wait_for(rows, bad)
        assert len(calls) == tries and told.value.__context__ is None, "an error holds no picture"


def test_a_disk_that_was_full_is_tried_again(talk, config, monkeypatch):
    book = talk.service.prompts
    forget_files(talk)
    keep = ImageStore.keep
    monkeypatch.setattr(ImageStore, "keep", refused_for_want_of_room)
    with pytest.raises(OSError, match="No space left"):
        book.keep_images(False, 1, 0)
    monkeypatch.setattr(ImageStore, "keep", keep)
    assert set(book.keep_images(False, 1, 0)) <= image_files(config)


def refused_for_want_of_room(store, name, png):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_for_threads(talk):
    for begun in talk.service.prompts.preparation._prepared.values():
        begun.exception()


def forget_files(talk):
    """Have the images of the run gone from disk, as they are once the journal was reclaimed."""
    store = talk.service.payloads.images
    wait_for_threads(talk)
    for name in image_files(talk.config):
        store._path(name).unlink()
        store._kept.discard(name)


def test_a_policy_without_an_image_processor_refuses_rows_with_images(config):
    (config.model.path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"'model\.path' = .*images"):
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
    for path in tmp_path.glob("*.png"):
        path.unlink()
    forget_files(talk)
    for _ in range(2):
        with pytest.raises(OSError, match="image"):
            talk.service.prompts.keep_images(True, 0, 0)


def test_a_peer_that_does_not_read_gets_no_more_images(talk):
    joined(FakeLearner(talk))
    worker = joined(FakeWorker(talk))
    [name] = worker.grants()[0].images
    talk.service.peers.by_id[worker.session].sent_bytes += 2 * talk.service.context.credit_bytes
    worker.say(wire.FetchImages([name]))
    assert worker.take(wire.Refused) and not worker.take(wire.Images)

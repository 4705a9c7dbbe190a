"""The images of prompts that a trainer submits: on disk before the journal names them, kept until no batch needs them,
and refused with a sentence where they do not fit."""

import numpy as np
import pytest

from april import config as configuration
from april import wire
from april.broker.ledger.events import PromptSubmitted
from april.data.images import name_of, prepare
from april.wire.sessions import image_parts
from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker, joined
from tests.support.picture_rows import fetched, image_files, picture, write_picture_tokenizer

TEXT = 5
"""A token id that is no placeholder."""


@pytest.fixture
def config(config_file, tmp_path):
    folder = write_picture_tokenizer(tmp_path / "vision", {"max_position_embeddings": 512})
    words = ["--data.source", "submitted", "--evaluation.prompts", "1", "--schedule.rollout_batch_size", "2"]
    words += ["--schedule.over_sampling_batch_size", "2", "--model.path", str(folder)]
    return configuration.load(config_file, words)


@pytest.fixture
def talk(config):
    return Conversation(config)


@pytest.fixture
def rule(talk):
    return talk.service.prompts.tokenizer.image_rule


@pytest.fixture
def red(rule):
    return prepare(picture("red"), rule)


@pytest.fixture
def blue(rule):
    return prepare(picture("blue", (16, 24)), rule)


def bring(learner, image):
    for part, arrays in image_parts(image.name, image.png):
        learner.say(part, arrays)
    [answer] = learner.take(wire.ImageKept)
    return answer.message.fault


def submit(learner, rule, first, shown, placeholders=None):
    """Submit a prompt for each list of images in `shown`; returns the reason of a refusal, or "". `placeholders`:
    number of placeholders in each prompt, by default those that its images take."""
    prompts, ids = [], []
    for images in shown:
        tokens = sum(image.tokens for image in images) if placeholders is None else placeholders
        own = [TEXT, *[rule.token_id] * tokens]
        prompts.append(wire.Submission(len(own), "1", images=[image.name for image in images]))
        ids += own
    learner.say(wire.Submit(first, prompts), [np.array(ids, np.int32)])
    refused = learner.take(wire.Refused)
    return refused[-1].message.reason if refused else ""


def complete_batch(learner, worker, step):
    """Complete all samples that come before the batch of a step; returns the batch and the grants."""
    grants, batch = [], None
    while batch is None:
        for grant in worker.grants():
            grants.append(grant)
            worker.complete(grant)
        batch = learner.fetch(step)
    return batch[0], [grant for grant in grants if not grant.evaluation]


def test_grants_and_batches_have_the_images_of_submitted_prompts_and_count_their_tokens(talk, config, rule, red, blue):
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk))
    assert bring(learner, red) == bring(learner, blue) == ""
    assert submit(learner, rule, 0, [[red, blue], [blue]]) == ""
    batch, grants = complete_batch(learner, worker, 0)
    shown = {0: [red.name, blue.name], 1: [blue.name]}
    assert {head.prompt_number: head.images for head in batch.groups} == shown
    assert {head.prompt_number: head.prompt_tokens for head in batch.groups} == {0: 1 + 4 + 6, 1: 1 + 6}
    assert {tuple(grant.images) for grant in grants} == {tuple(images) for images in shown.values()}
    files = {image.name: image.png for image in (red, blue)}
    assert fetched(worker, list(files)) == fetched(learner, list(files)) == files
    assert b"\x89PNG" not in b"".join(path.read_bytes() for path in (config.run_dir / "journal").glob("*"))


def test_no_record_names_an_image_before_its_file_is_on_disk(talk, config, rule, red, monkeypatch):
    write, seen = talk.ledger.write, []

    def recorded(event, arrays=()):
        if isinstance(event, PromptSubmitted):
            seen.append((event.images, image_files(config)))
        return write(event, arrays)

    monkeypatch.setattr(talk.ledger, "write", recorded)
    learner = joined(FakeLearner(talk))
    assert "names image" in submit(learner, rule, 0, [[red]]) and not seen
    bring(learner, red)
    submit(learner, rule, 0, [[red]])
    assert seen == [([red.name], {red.name})]


def test_images_of_prompts_that_wait_outlive_restarts_snapshots_and_time(talk, config, rule, red, blue):
    learner = joined(FakeLearner(talk))
    bring(learner, red)
    submit(learner, rule, 0, [[red], [], []])
    bring(learner, blue)
    talk.restart_broker()
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk))
    assert submit(learner, rule, 3, [[blue]]) == "", "what was brought before the restart is still there"
    talk.journal.file_records = 1
    for _ in range(5):
        talk.take_snapshot()
        talk.tick(700.0)
    assert image_files(config) == {red.name, blue.name}
    talk.restart_broker()
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk))
    batch, _ = complete_batch(learner, worker, 0)
    assert {head.prompt_number: head.images for head in batch.groups} == {0: [red.name], 1: []}


def test_files_go_once_no_batch_needs_their_prompt(talk, config, rule, red, blue):
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk))
    bring(learner, red)
    bring(learner, blue)
    submit(learner, rule, 0, [[red], [], [blue], []])
    complete_batch(learner, worker, 0)
    learner.consume(0)
    talk.journal.file_records = 1
    for _ in range(4):
        talk.take_snapshot()
        talk.tick(700.0)
    assert image_files(config) == {red.name, blue.name}, "a trainer may go back to the batch"
    learner = FakeLearner(talk)
    learner.join(step=1)
    learner.durable(1)
    for _ in range(4):
        talk.take_snapshot()
        talk.tick(700.0)
    assert image_files(config) == {blue.name}
    assert talk.ledger.prompts.images == {2: [blue.name]}
    learner = FakeLearner(talk)
    learner.join(step=1)
    assert "does not have" in submit(learner, rule, 4, [[red]]), "its tokens alone are of no use"


def test_what_does_not_fit_is_refused_with_a_sentence_and_as_a_whole(talk, config, rule, red, blue):
    learner = joined(FakeLearner(talk))
    assert bring(learner, red) == ""
    assert "images take 4 tokens, and it has 3 of their placeholders" in submit(learner, rule, 0, [[red]], 3)
    assert "has 65 images, more than 64" in submit(learner, rule, 0, [[], [red] * 65])
    learner.say(wire.Submit(0, [wire.Submission(1, "", images=["../config"])]), [np.array([TEXT], np.int32)])
    assert "'../config', which the broker does not have" in learner.take(wire.Refused)[-1].message.reason
    assert bring(learner, blue) == ""
    (config.run_dir / "images" / f"{blue.name}.png").write_bytes(b"half")
    assert "damaged or missing; restore it from a copy, or bring it again" in submit(learner, rule, 0, [[red], [blue]])
    assert bring(learner, blue) == "" and submit(learner, rule, 0, [[blue]]) == ""
    assert talk.ledger.prompts.submitted_count == 1


def test_a_run_that_draws_from_files_keeps_no_images_of_a_trainer(converse):
    learner = joined(FakeLearner(converse("--evaluation.prompts", "1")))
    [(part, arrays)] = image_parts(name_of(picture()), picture())
    learner.say(part, arrays)
    assert "draws its prompts from files" in learner.take(wire.Refused)[-1].message.reason

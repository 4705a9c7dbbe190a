"""Images that agents have sent: on disk before a turn names them, and with its tokens wherever these go."""

import io

import msgspec
import numpy as np
import pytest
from PIL import Image

from april import config as configuration
from april import wire
from april.broker.images import PIN_S
from april.data.images import name_of, prepare
from april.learner.source import decode_groups
from april.wire.rows import observation_row
from tests.support.broker_conversation import AGENTS, Conversation, FakeAgents, FakeLearner, FakeWorker, joined
from tests.support.picture_rows import fetched, image_files, picture, write_picture_tokenizer


@pytest.fixture
def config(config_file, tmp_path):
    folder = write_picture_tokenizer(tmp_path / "vision", {"max_position_embeddings": 512})
    return configuration.load(config_file, [*AGENTS, "--model.path", str(folder), "--samples.groups", "4"])


@pytest.fixture
def talk(config):
    return Conversation(config)


@pytest.fixture
def learner(talk):
    return joined(FakeLearner(talk))


@pytest.fixture
def worker(talk, learner):
    return joined(FakeWorker(talk))


@pytest.fixture
def agents(talk, worker):
    return joined(FakeAgents(talk), capacity=100)


@pytest.fixture
def told(agents):
    return next(told for told in agents.listen() if not told.evaluation)


@pytest.fixture
def red(talk):
    return prepared(talk, "red")


@pytest.fixture
def blue(talk):
    return prepared(talk, "blue")


def prepared(talk, color, size=(16, 16)):
    return prepare(picture(color, size), talk.service.prompts.tokenizer.image_rule)


def bring(agents, png, name="", part_bytes=1 << 20):
    """Bring an image in parts; returns the broker's answer."""
    for start in range(0, len(png), part_bytes):
        part = np.frombuffer(png[start : start + part_bytes], "u1")
        agents.say(wire.KeepImage(name or name_of(png), start, len(png)), [part])
    [answer] = agents.take(wire.ImageKept)
    return answer.message


def show(agents, lease_id, start, names, parent=0, count=3):
    """Report an observation that names images."""
    request = msgspec.msgpack.encode(wire.TurnRequest(b"k", 8, [5], names))
    payload = np.arange(count, dtype="<i4").tobytes() + request
    agents.report([(observation_row(lease_id, start, count, "", payload, parent=parent), payload)])


def answer(worker, count=4):
    """Generate the whole turn that a worker is granted; returns the grant."""
    [grant] = [grant for grant in worker.grants() if not grant.scoring]
    worker.chunk(grant, len(grant.arrays[1]), count, "stop")
    return grant


def test_a_turn_is_granted_with_the_images_of_its_session_so_far(talk, worker, agents, told, red, blue):
    for image in (red, blue):
        assert bring(agents, image.png, part_bytes=50) == wire.ImageKept(image.name)
    show(agents, told.lease_id, 0, [red.name])
    first = answer(worker)
    show(agents, told.lease_id, 7, [blue.name, red.name])
    second = answer(worker)
    assert first.shown_images == [(red.name, 0)], "first of the task, which has none, and then of the sample"
    assert second.shown_images == [(red.name, 0), (blue.name, 7), (red.name, 7)]
    assert fetched(worker, [blue.name, red.name]) == {image.name: image.png for image in (red, blue)}


def test_a_request_that_names_an_image_that_the_broker_lacks_is_refused(talk, agents, told, red):
    show(agents, told.lease_id, 0, [red.name])
    [(lease_id, reason)] = agents.answers("rejects")
    assert lease_id == told.lease_id and "names an image that the broker does not have" in reason
    assert bring(agents, red.png).fault == ""
    show(agents, told.lease_id, 0, [red.name])
    assert agents.answers("acks") == [(told.lease_id, 3)]


def test_too_many_images_in_a_request_are_no_turn_request(talk, agents, told, red):
    bring(agents, red.png)
    show(agents, told.lease_id, 0, [red.name] * 65)
    assert "no turn request" in agents.answers("rejects")[0][1]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda png: (png, "0" * 64), "not the sha256"),
        (lambda png: (png[:-20], ""), "cannot be read"),
        (lambda png: (png[:60] + b"#" + png[61:], ""), "cannot be read"),
        (lambda png: (picture("red", (17, 16)), ""), "is not prepared"),
        (lambda png: (picture("red", (16, 16), "JPEG"), ""), "cannot be read"),
    ],
)
def test_what_is_no_prepared_image_is_not_kept(damage, says, talk, config, agents, red):
    png, name = damage(red.png)
    assert says in bring(agents, png, name).fault
    assert image_files(config) == set()


def test_parts_that_do_not_follow_each_other_or_are_too_large_are_refused(talk, agents, red):
    half = np.frombuffer(red.png[:40], "u1")
    for first, then in (
        (wire.KeepImage(red.name, 0, 80), wire.KeepImage(red.name, 41, 80)),
        (wire.KeepImage(red.name, 0, 80), wire.KeepImage("0" * 64, 40, 80)),
        (wire.KeepImage(red.name, 0, 80), wire.KeepImage(red.name, 40, 79)),
        (wire.KeepImage(red.name, 40, 80), wire.KeepImage(red.name, 0, 1 << 40)),
        (wire.KeepImage("../config", 0, 80), wire.KeepImage(red.name, 0, 30)),
    ):
        agents.say(first, [half])
        agents.say(then, [half])
        assert agents.take(wire.Refused) and not agents.take(wire.ImageKept)
    assert bring(agents, red.png).fault == ""


def test_a_fork_has_the_images_of_the_tokens_that_it_shares(talk, worker, agents, told, red, blue):
    bring(agents, red.png), bring(agents, blue.png)
    show(agents, told.lease_id, 0, [red.name])
    answer(worker)
    show(agents, told.lease_id, 7, [blue.name])
    answer(worker)
    show(agents, told.lease_id + 1, 7, [], parent=0)
    show(agents, told.lease_id + 2, 0, [blue.name], parent=0)
    grants = {grant.seed: grant.shown_images for grant in worker.grants()}
    assert sorted(grants.values()) == sorted([[(red.name, 0)], [(blue.name, 0)]])


def test_the_learner_gets_each_fork_with_its_images(talk, learner, worker, agents, told, red, blue):
    bring(agents, red.png), bring(agents, blue.png)
    sessions = [one for one in agents.listen() if not one.evaluation][:8]
    for one in sessions:
        show(agents, one.lease_id, 0, [red.name])
        answer(worker)
        show(agents, one.lease_id, 7, [blue.name])
        answer(worker)
        show(agents, one.lease_id + 1, 7, [])
        answer(worker)
        agents.score(one, 1.0)
    learner.say(wire.Fetch(0, True))
    [batch] = learner.take(wire.Batch)
    files = {image.name: image.png for image in (red, blue)}
    groups = decode_groups(batch.message.groups, [np.array(array) for array in batch.arrays], (), files)
    samples = [sample for _, group in groups for sample in group]
    shown = {(sample.fork, sample.images, sample.image_starts) for sample in samples}
    assert shown == {(0, (red.png, blue.png), (0, 7)), (1, (red.png,), (0,))}
    assert fetched(learner, [red.name]) == {red.name: red.png}


def test_a_session_that_moves_and_a_broker_that_restarts_keep_images_and_offsets(talk, worker, agents, told, red):
    bring(agents, red.png)
    show(agents, told.lease_id, 0, [red.name])
    answer(worker)
    talk.journal.file_records = 1
    talk.take_snapshot()
    before = talk.ledger.groups[told.group].samples[told.index].images
    talk.restart_broker()
    worker, other = joined(FakeWorker(talk, "w1")), joined(FakeAgents(talk, "a1"), capacity=100)
    talk.tick(talk.config.broker.readopt_s + 100)
    worker, other = joined(FakeWorker(talk, "w1")), joined(FakeAgents(talk, "a1"), capacity=100)
    assert talk.ledger.groups[told.group].samples[told.index].images == before == ((red.name, 0),)
    again = next(one for one in other.listen() if (one.group, one.index) == (told.group, told.index))
    states = [payload[4 * row.tokens :] for row, payload in other.heard[again.lease_id] if row.kind]
    assert [msgspec.msgpack.decode(state, type=wire.TurnRequest).images for state in states] == [[red.name]]
    show(other, again.lease_id, 7, [])
    assert answer(worker).shown_images == [(red.name, 0)]


def test_an_image_waits_for_its_turn_and_goes_when_none_comes(talk, config, agents, told, red, blue):
    bring(agents, red.png), bring(agents, blue.png)
    show(agents, told.lease_id, 0, [red.name])
    talk.service.payloads.images.reclaim_is_due = True
    for _ in range(3):
        talk.tick(1.0)
    assert image_files(config) == {red.name, blue.name}
    talk.restart_broker()
    for _ in range(2):
        talk.tick(PIN_S - 10)
    assert image_files(config) == {red.name, blue.name}
    for _ in range(3):
        talk.tick(PIN_S)
    assert image_files(config) == {red.name}


def test_what_an_agent_was_shown_and_was_discarded_keeps_its_images_for_the_sample_logs(
    talk, config, learner, worker, agents, told, red
):
    bring(agents, red.png)
    show(agents, told.lease_id, 0, [red.name])
    answer(worker)
    agents.report(closings=[wire.GiveBack(told.lease_id, 0, "agent_failed", "it raised")])
    assert talk.ledger.groups[told.group].samples[told.index].images == ()
    [logged] = talk.service.history.logged_groups.waiting
    assert logged.head.samples[0].shown_images == [(red.name, 0)]
    assert red.name in set(talk.service.history.live_images())
    assert Image.open(io.BytesIO(red.png)).size == (16, 16)

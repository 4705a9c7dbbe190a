"""A journal that has lost acknowledged events is refused if other files prove the loss, until the user accepts it."""

import re

import pytest

from april import config as configuration
from april import wire
from april.broker import recovery
from april.broker.journal.files import JournalError
from april.cli import main
from april.config import ConfigError
from april.config.stored import stored_checkpoints
from april.launch.preflight import check_resume, is_stored, make_run_folder
from april.util.versions import RUN_FOLDER
from tests.support.broker_conversation import FakeLearner, FakeWorker, journal_file, make_batch, metrics_lines, train


@pytest.fixture
def trained(talk, worker, learner):
    """A run that has trained three steps, with the journal's size after each in `sizes`; its broker has ended."""
    RUN_FOLDER.claim(talk.config.run_dir, new=True)
    talk.sizes = []
    for step in range(3):
        train(talk, worker, learner, step)
        (checkpoint := talk.config.run_dir / "checkpoints" / f"step_{step + 1:06d}").mkdir(parents=True)
        (checkpoint / "progress.json").write_bytes(b"{}")
        talk.sizes.append(journal_file(talk).stat().st_size)
    talk.journal.close()
    talk.service.note.close()
    return talk


def cut(talk, to):
    path = journal_file(talk)
    path.write_bytes(path.read_bytes()[:to])


def folder(talk):
    return {path: path.read_bytes() for path in talk.config.run_dir.rglob("*") if path.is_file()}


def lines(talk):
    return [line["step"] for line in metrics_lines(talk)]


def refused(talk, *proofs):
    """Check that the broker and `april run --resume` refuse the journal, name these proofs, and leave the run folder
    unchanged."""
    before = folder(talk)
    for start, error in ((talk.start, JournalError), (lambda: check_resume(talk.config), ConfigError)):
        with pytest.raises(error) as caught:
            start()
        talk.journal.close()
        assert all(proof in str(caught.value) for proof in (*proofs, "--accept-loss")), caught.value
    assert folder(talk) == before


def go_on(talk, from_step):
    """Restart the broker, and train the steps from `from_step` to the third."""
    talk.peers = {}
    talk.start()
    worker, learner = FakeWorker(talk), FakeLearner(talk)
    learner.join(step=from_step)
    worker.join(step=from_step)
    for step in range(from_step, 3):
        train(talk, worker, learner, step)
    assert lines(talk) == [1, 2, 3] and talk.ledger.account.closed


def test_lost_acknowledged_bytes_are_refused_until_the_loss_is_accepted(trained):
    """The journal is truncated at the end of a record, so that the file itself looks complete."""
    size = journal_file(trained).stat().st_size
    cut(trained, trained.sizes[1])
    gone = size - trained.sizes[1]
    refused(
        trained,
        f"{gone} bytes further",
        "metrics.jsonl has step 3, and the journal has 2",
        "there is a checkpoint of step 3, and it has 2 batches",
    )
    printed = check_resume(trained.config, accept_loss=True)
    assert any(f"given up: it ends at {trained.sizes[1]}" in line for line in printed)
    assert lines(trained) == [1, 2] and (trained.config.run_dir / "checkpoints/step_000003.beyond").is_dir()
    assert check_resume(trained.config) == printed[:0] + [line for line in printed if not line.startswith("given up")]
    go_on(trained, from_step=2)


def test_a_stored_checkpoint_proves_a_loss_too_and_is_renamed_when_it_is_accepted(trained, tmp_path):
    config = with_store(trained.config, f"file://{tmp_path}/store")
    stored = stored_checkpoints(config)
    assert stored.steps() == set() and not is_stored(config)
    for step in (1, 4):
        stored.complete(step, {"progress.json": f"{step}"})
    sentence = "there is a checkpoint of step 4, and it has 3 batches"
    with pytest.raises(ConfigError, match=sentence):
        check_resume(config)
    assert f"given up: {sentence}" in check_resume(config, accept_loss=True)
    assert stored.steps() == {1} and any(name.endswith("SHA256SUMS.beyond") for name in stored.objects.names())
    assert not [line for line in check_resume(config) if "given up" in line]
    assert make_run_folder(elsewhere(config, tmp_path)).run.name == f"{config.run.name}-2", "another run has the name"
    with pytest.raises(ConfigError, match="checkpoint_store': none-such://bucket/small"):
        check_resume(with_store(config, "none-such://bucket"))


def with_store(config, url):
    learner = config.learner.model_copy(update={"checkpoint_store": url})
    return config.model_copy(update={"learner": learner})


def elsewhere(config, folder):
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": folder / "elsewhere"})})


@pytest.mark.parametrize("proof", ["synced", "metrics.jsonl", "checkpoints"])
def test_each_other_file_alone_proves_a_loss(trained, proof):
    names = {"synced": "journal/synced", "metrics.jsonl": "metrics.jsonl", "checkpoints": "checkpoints"}
    for other in set(names) - {proof}:
        path = trained.config.run_dir / names[other]
        path.rename(path.with_suffix(".away"))
    cut(trained, trained.sizes[0])
    refused(trained, {"synced": "bytes further", "metrics.jsonl": "has step 3"}.get(proof, "checkpoint of step 3"))


def test_a_damaged_last_sync_is_not_mistaken_for_an_unfinished_one(trained):
    path = journal_file(trained)
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x10
    path.write_bytes(data)
    refused(trained, "damaged at position")
    printed = check_resume(trained.config, accept_loss=True)
    (kept,) = trained.journal.folder.glob("*.cut")
    assert re.search(rf"given up: {kept.stat().st_size} bytes behind \d+ cannot be read", "\n".join(printed))
    check_resume(trained.config)


def test_bytes_of_an_unfinished_sync_are_cut_off(trained):
    with journal_file(trained).open("ab") as file:
        file.write(b"\x93\xcf torn")
    check_resume(trained.config)
    trained.peers = {}
    trained.start()
    assert trained.ledger.steps.frontier == 3 and lines(trained) == [1, 2, 3]


@pytest.mark.parametrize("note", [b"", b"\x00\x01", b"\xff" * 12, b"\x00" * 12])
def test_a_torn_note_proves_nothing(trained, note):
    (trained.journal.folder / "synced").write_bytes(note)
    check_resume(trained.config)


def test_a_line_of_metrics_is_written_after_the_sync_of_its_step(talk, worker, learner):
    """A line in metrics.jsonl therefore proves that the journal on disk has the step."""
    make_batch(worker)
    learner.fetch(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talk, "deliver", lambda: None)
        learner.say(wire.Consumed(0, {"loss": 0.5}, ""))
        assert talk.ledger.steps.frontier == 1 and not lines(talk)
    talk.deliver()
    assert lines(talk) == [1]


def test_a_resume_on_a_full_disk_is_a_clear_error(trained, config_file, capsys):
    """The kernel reports a full disk for the first file that the resume writes."""
    before = folder(trained)
    (trained.config.run_dir / "config.tmp").symlink_to("/dev/full")
    assert main(["run", str(config_file), "--resume", "--schedule.max_steps", "9", "--evaluation.prompts", "1"]) == 1
    *_, printed = capsys.readouterr().err.splitlines()
    assert printed.endswith("small/config.toml cannot be written (No space left on device); make room there")
    after = folder(trained)
    assert {path: after[path] for path in before} == before


def test_a_loss_can_only_be_accepted_when_resuming(config_file, capsys):
    assert main(["run", str(config_file), "--accept-loss"]) == 2
    assert "give --resume with it" in capsys.readouterr().err
    assert recovery.checkpoints_of(configuration.load(config_file).run_dir) == {}

import shutil
import socket
from subprocess import Popen

import pytest

from april.broker.journal.files import journal_folder
from april.simulate.trace import recorded_header
from tests.support.run_processes import APRIL, assert_closed, wait_until


@pytest.fixture
def by_name(config_file, hub, policy_folder, data_folder, tmp_path, monkeypatch):
    """The small configuration, with a model and a dataset of the hub in place of folders."""
    commits = {"model": hub.push("model", "lab/tiny", policy_folder)}
    commits["data"] = hub.push("dataset", "lab/sums", data_folder)
    text = config_file.read_text().replace(str(policy_folder), "lab/tiny")
    text = text.replace(f"{data_folder}/train.jsonl", "lab/sums").replace(f"{data_folder}/heldout.jsonl", "lab/sums")
    config_file.write_text(text)
    for name, value in {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    return commits


def moved(policy_folder, tmp_path):
    """A folder with a later commit of the policy."""
    shutil.copytree(policy_folder, tmp_path / "moved")
    (tmp_path / "moved" / "README.md").write_text("newer")
    return tmp_path / "moved"


@pytest.mark.full
def test_a_run_by_names_goes_on_without_the_hub_and_takes_no_other_commit(
    by_name, start, config_file, run_dir, hub, policy_folder, tmp_path, monkeypatch
):
    def run(*options):
        return start("output", [*APRIL, "run", str(config_file), *options], start=Popen)  # the variables are read anew

    described = run("--dry-run")
    assert described.wait() == 0 and f"lab/tiny at {by_name['model']}, of which" in described.output, described.output
    job = run()
    assert job.wait() == 0, job.output
    assert_closed(run_dir)
    fingerprints = recorded_header(journal_folder(run_dir)).fingerprints
    revisions = {key: commit for key, commit in fingerprints.items() if key.endswith("revision")}
    assert revisions == {
        "model.revision": by_name["model"], "data.revision": by_name["data"], "data.eval_revision": by_name["data"]
    }  # fmt: skip

    newer = hub.push("model", "lab/tiny", moved(policy_folder, tmp_path))
    job = run("--resume", "--schedule.max_steps", "4", "--model.revision", newer)
    assert job.wait() == 2 and f"'model.revision' was '{by_name['model']}' and is '{newer}'" in job.output, job.output

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        job = run("--resume", "--schedule.max_steps", "4")
        assert job.wait() == 0, job.output
    assert f'commit = "{by_name["model"]}"' in (run_dir / "config.toml").read_text()
    assert_closed(run_dir)


@pytest.mark.full
def test_each_machine_fetches_what_its_parts_read_at_the_commit_that_the_run_began_with(
    by_name, start, config_file, run_dir, hub, policy_folder, tmp_path, monkeypatch
):
    def part(role, *options):
        monkeypatch.setenv("HF_HOME", str(tmp_path / role))
        return start(role, [*APRIL, "part", role, str(config_file), *options], start=Popen)

    def fetched(role):
        kept = (tmp_path / role / "hub/models--lab--tiny/snapshots").glob("*/*.safetensors")
        return {path.parent.name for path in kept}

    broker = part("broker")
    wait_until((run_dir / "address").exists, broker)
    hub.push("model", "lab/tiny", moved(policy_folder, tmp_path))
    learner, worker = (part(role, "--connect", str(run_dir)) for role in ("learner", "worker"))
    assert broker.wait() == learner.wait() == worker.wait() == 0, broker.output + learner.output + worker.output
    assert_closed(run_dir)
    assert fetched("broker") == set() and fetched("learner") == fetched("worker") == {by_name["model"]}

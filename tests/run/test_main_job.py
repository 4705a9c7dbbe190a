"""One command trains: broker, two workers, a learner of two ranks, their run folder, and a clean end."""

import os
import shutil
from contextlib import closing
from pathlib import Path
from subprocess import Popen

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from transformers import AutoModelForCausalLM

from april import config as configuration
from april import runs
from april.broker.journal.journal import Journal
from april.broker.ledger.ledger import Ledger, Rules
from april.cli import main
from april.observe.report.facts import token_totals
from april.observe.report.run_folder import read_records, read_run
from tests.support.exported_checkpoints import assert_exported
from tests.support.journal_checks import forward_logprobs, versions_with_true_logprobs
from tests.support.journal_events import events
from tests.support.run_processes import APRIL, Job, assert_closed, both_workers_are_there, wait_until
from tests.support.small_run import write_config
from tests.support.step_gate import Gate

pytestmark = pytest.mark.xdist_group("main_job")
NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/a-run.ipynb"
SETTINGS = ["--seed", "1", "--sampling.max_response_tokens", "64", "--learner.lr", "1e-2"]
OF_THE_MACHINE = {"slow_part", "starved_engines", "saturated_engines", "disk_filling"}
"""alarms that a clean run raises, too, where others keep its processors busy or fill its disk"""


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    """Settings of the run under test: its first step does not end before both workers are connected."""
    folder = tmp_path_factory.mktemp("main_job")
    with pytest.MonkeyPatch.context() as environment:
        yield Gate(folder / "gate", folder / "runs" / "small", environment)


@pytest.fixture(scope="module")
def settings(gate):
    return [*SETTINGS, *gate.hold(0)]


@pytest.fixture(scope="module")
def finished(gate, settings, policy_folder, data_folder):
    """A run of three steps that came to its end by itself, each of its processes started as a user's are."""
    config = write_config(gate.file.parent, policy_folder, data_folder)
    job = Job([*APRIL, "run", str(config), *settings], gate.file.with_name("output"), start=Popen)
    try:
        wait_until(lambda: both_workers_are_there(job), job)
        gate.open()
        status = job.wait()
        assert status == 0, job.output
        wait_until(lambda: job.descendants() == [])
    finally:
        job.end()
    return gate.run_dir, job.output


def test_the_run_folder_has_all_documented_files(finished):
    run_dir, output = finished
    summary = assert_closed(run_dir)
    assert (summary["state"], summary["steps"]) == ("finished", 3)
    assert [entry["step"] for entry in summary["evaluation"]] == [0, 3]
    assert summary["tokens"]["emitted_unacked"] == summary["tokens"]["refused"] == 0
    assert summary["tokens"]["evaluation"] > 0 and summary["wall_s"] > 0 and summary["buffer_peak"]["tokens"] > 0
    steps = read_records(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["groups"] == 4 and step["samples"] == 8 for step in steps)
    assert sum(step["tokens"] for step in steps) == summary["tokens"]["trained"]
    assert {lane["worker"] for step in steps for lane in step["timeline"]} == {"worker-0", "worker-1"}
    fresh = [gap for step in steps for gap in step["engine_gaps"].values() if gap["age"] == 0]
    assert fresh and max(gap["mean"] for gap in fresh) < 1e-4, "the engines sample from what the learner trains"
    raised = {alarm["name"] for step in steps for alarm in step["alarms"]}
    assert not raised - OF_THE_MACHINE, "a clean run is silent"
    assert {"generate", "weights"} <= {lane["kind"] for step in steps for lane in step["timeline"]}
    assert configuration.load(run_dir / "config.toml").seed == 1
    assert "report.html" in output and (run_dir / "report.html").stat().st_size > 10_000


def test_the_trace_has_the_run_s_timelines_and_each_sample_s_history(finished, tmp_path, capsys):
    run_dir, _ = finished
    assert main(["trace", "export", str(run_dir), "--out", str(tmp_path / "trace")]) == 0
    assert "tracks; open it at" in capsys.readouterr().out
    packets = Trace.FromString((tmp_path / "trace").read_bytes()).packet
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in packets
        if packet.HasField("track_descriptor")
    }
    events = [(packet.timestamp / 1e9, packet.track_event) for packet in packets if packet.HasField("track_event")]
    assert {"workers", "learner", "samples", "worker-0", "step 3"} <= {track.name for track in tracks.values()}
    assert [event.name for _, event in events if tracks[event.track_uuid].name == "learner" and event.name] == [
        "step 1", "step 2", "step 3",
    ]  # fmt: skip
    rows = runs.load(run_dir).samples()
    for row in rows[rows["held_out"] == ""].to_dict("records"):
        said = [
            (at, event.name)
            for at, event in events
            if tracks[event.track_uuid].name.startswith(f"{row['group']}.{row['index']} ")
        ]
        chunks = [name for _, name in said if name.endswith(" tokens")]
        assert chunks == [f"{chunk['end']} tokens" for chunk in row["chunks"]] != []
        said = said[len(chunks) :]
        names = [name for _, name in said]
        assert names[:2] == ["opened", "delivered"] and row["opened_at"] == pytest.approx(said[0][0])
        assert [span["where"] for span in row["spans"]] == [name.split()[-1] for name in names[2:] if name]
        assert row["opened_at"] <= row["generated_at"] <= row["scored_at"] <= row["delivered_at"]
        ends = [span["end"] for span in row["spans"] if span["what"] == "generate"]
        assert ends[-1] == len(row["response_ids"])


@pytest.mark.full
def test_the_notebook_reads_the_run(finished):
    run_dir, _ = finished
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert notebook.cells[1].source == 'RUN = "runs/quickstart"'
    notebook.cells[1].source = f"RUN = {str(run_dir)!r}"
    NotebookClient(notebook, timeout=120).execute()
    printed = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert printed[0].text == "finished 3 steps\n"
    assert any("image/png" in output.get("data", {}) for output in printed), "its curves are drawn"
    assert "True" in printed[-1].data["text/plain"], "the ledger is shown, and closes"
    ledger, written = runs.load(run_dir).ledger, token_totals(read_run(run_dir))
    assert ledger["step"].tolist() == [1, 2, 3] and ledger["closes"].all()
    assert dict(ledger.iloc[-1][["generated", "trained", "open"]]) == {
        "generated": written.generated, "trained": written.trained, "open": written.open,
    }  # fmt: skip


def test_the_ledger_agrees_with_the_engines_token_counts(finished):
    run_dir, _ = finished
    said = 0
    for log in run_dir.glob("logs/worker-*.log"):
        said += int(log.read_text().split(" tokens generated")[0].rsplit(" ", 1)[1])
    tokens = assert_closed(run_dir)["tokens"]
    assert said == tokens["generated"] + tokens["evaluation"] + tokens["emitted_unacked"] + tokens["refused"]


def test_the_journal_alone_rebuilds_the_ledger(finished):
    run_dir, _ = finished
    ledger = Ledger(Rules(batch_groups=4, group_size=2, max_staleness=5))
    for event in events(run_dir):
        ledger.apply(event)
    account = assert_closed(run_dir)["tokens"]
    assert ledger.account.summary() == {key: account[key] for key in ledger.account.summary()}


def test_every_token_s_logprob_comes_from_its_recorded_version(finished, policy_folder):
    """A worker's reported version is really the weights it samples from."""
    run_dir, _ = finished
    models = {0: AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)}
    assert versions_with_true_logprobs(run_dir, policy_folder, models) == {0, 1, 2, 3}
    apart = forward_logprobs(models[0], np.arange(2, 20), 10) - forward_logprobs(models[3], np.arange(2, 20), 10)
    assert np.abs(apart).max() > 1e-2, "the versions must differ for this to mean anything"


def test_the_exported_policy_is_the_last_checkpoint_and_loads_in_transformers(finished, policy_folder):
    assert_exported(finished[0], "policy", 3, policy_folder)


def test_status_prints_the_table(finished, capfd):
    assert main(["status", str(finished[0])]) == 0
    printed = capfd.readouterr().out
    assert "closed" in printed and "3 of 3" in printed


def test_resuming_a_finished_run_says_so_at_once(finished, capsys):
    assert main(["run", str(finished[0] / "config.toml"), "--resume"]) == 0
    assert "finished at 3 steps" in capsys.readouterr().out


def test_resuming_with_a_truncated_journal_is_refused_with_a_sentence(
    finished, settings, policy_folder, data_folder, tmp_path, capsys
):
    """It ends with a whole record, and looks whole; nothing of the folder is another afterwards."""
    run_dir = tmp_path / "runs" / "small"
    shutil.copytree(finished[0], run_dir)
    with closing(Journal(run_dir / "journal")) as journal:
        ends = [sum(reference) for _, reference in journal.replay()]
    os.truncate(run_dir / "journal" / f"{0:020d}.msgpack", ends[-2])
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    config = write_config(tmp_path, policy_folder, data_folder)
    assert main(["run", str(config), *settings, "--resume", "--schedule.max_steps", "4"]) == 2
    sentence = capsys.readouterr().err
    assert f"was on disk up to {ends[-1]}, {ends[-1] - ends[-2]} bytes further" in sentence
    assert "--accept-loss" in sentence and sentence.count("\n") == 1
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_resume_continues_from_journal_and_checkpoints(
    finished, settings, start, policy_folder, data_folder, tmp_path
):
    """The finished run is copied, then trained for one more step from its journal and checkpoints."""
    run_dir, _ = finished
    shutil.copytree(run_dir, tmp_path / "runs" / "small")
    config = write_config(tmp_path, policy_folder, data_folder)
    command = [*APRIL, "run", str(config), *settings, "--resume", "--schedule.max_steps", "4"]
    job = start("output", command)
    assert job.wait() == 0, job.output
    assert "schedule.max_steps: 3 -> 4" in job.output
    again = assert_closed(tmp_path / "runs" / "small")
    assert again["steps"] == 4
    assert [entry["step"] for entry in again["evaluation"]] == [0, 3, 4]
    first, second = (read_records(folder / "metrics.jsonl") for folder in (run_dir, tmp_path / "runs" / "small"))
    assert second[:3] == first and [step["step"] for step in second] == [1, 2, 3, 4]

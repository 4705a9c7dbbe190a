"""Each metrics sink gives its tool the content of metrics.jsonl, evaluations included, as one run even if the broker
has restarted."""

import os
import posixpath
import re
import signal
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import orjson
import pytest

from april.broker.telemetry.sinks import SINKS, BackgroundSink
from april.observe.report.run_folder import read_records
from tests.support.broker_conversation import FakeLearner, FakeWorker, joined, make_batch

ROOT = Path(__file__).parents[2]
WANTED = "reward", "learner/loss", "tokens_ledger/generated", "evaluation/reward", "evaluation/pass_at_k/1/value"


def records(path):
    """Records of a file of Weights & Biases or SwanLab, in LevelDB's log format: a file header of 7 bytes, then blocks
    of 32 KiB, in which each piece of a record has a header of 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if not kind:
            at = (at // 32768 + 1) * 32768
            continue
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""
        if 32768 - at % 32768 < 7:
            at = (at // 32768 + 1) * 32768


def read_wandb(run_dir):
    """(run ids, value by (step, metric)) from the files that `wandb sync` uploads."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, runs = {}, set()
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, records(path)):
            runs |= {record.run.run_id} if record.WhichOneof("record_type") == "run" else set()
            row = {item.key or "/".join(item.nested_key): orjson.loads(item.value_json) for item in record.history.item}
            found |= {(row["step"], name): value for name, value in row.items()} if row else {}
    return runs, found


def read_swanlab(run_dir):
    """(run names, value by (step, metric)) from the files that `swanlab sync` uploads: one file for each start of the
    broker, all of the same run name."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found, runs = {}, set()
    for path in sorted((run_dir / "swanlab").rglob("*.swanlab")):
        for record in map(Record.FromString, records(path)):
            runs |= {record.start.name} if record.HasField("start") else set()
            if record.HasField("scalar"):
                found[record.scalar.step, record.scalar.key] = record.scalar.value.number
    return runs, found


def read_mlflow(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("april-rl").experiment_id])
    histories = [client.get_metric_history(runs[0].info.run_id, name) for name in WANTED]
    return {run.info.run_id for run in runs}, {(m.step, m.key): m.value for history in histories for m in history}


def read_trackio(run_dir):
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs("april-rl")
    return set(runs), {
        (row["step"], name): value for row in SQLiteStorage.get_logs("april-rl", runs[0]) for name, value in row.items()
    }


def read_tensorboard(run_dir):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = (run_dir / "tensorboard").iterdir()
    values = (
        (event.step, value)
        for file in files
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    )
    return {"the folder"}, {(step, value.tag): value.tensor.float_val[0] for step, value in values}


@pytest.fixture
def mlflow_server(tmp_path, monkeypatch):
    """A real MLflow server that stores its data in SQLite."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", "0", "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **streams, env=environment, start_new_session=True) as server:
        try:
            found = (re.search(r"running on (http://[\d.:]+)", line) for line in server.stdout)
            monkeypatch.setenv("MLFLOW_TRACKING_URI", next(match for match in found if match)[1])
            yield
        finally:
            os.killpg(server.pid, signal.SIGTERM)


@pytest.fixture
def trackio_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")


TOOLS = {
    "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio,
    "swanlab": read_swanlab,
}  # fmt: skip
NEEDS = {"mlflow": "flask"}
"""Further Python package that a test of a tool needs; flask shows that MLflow's server is installed, not only the
client."""
PLACES = {"mlflow": "mlflow_server", "trackio": "trackio_folder"}
HERE = [tool for tool in TOOLS if find_spec(SINKS.find(tool).package) and find_spec(NEEDS.get(tool, tool))]


@pytest.mark.full
@pytest.mark.parametrize("tool", HERE)
def test_steps_and_evaluations_reach_the_tool_as_one_run(converse, request, tool):
    if tool in PLACES:
        request.getfixturevalue(PLACES[tool])
    options = ["--evaluation.prompts", "1", "--schedule.max_steps", "2", "--operations.sinks", f'["{tool}"]']
    talk = converse(*options)
    for step in range(2):
        worker, learner = joined(FakeWorker(talk), step), joined(FakeLearner(talk), step)
        make_batch(worker)
        learner.fetch(step)
        learner.consume(step, loss=0.5 + step, version_share_0=1.0)
        if step == 0:
            learner.durable(1)
        talk.service.close(talk.now)
        assert talk.service.recorder.sinks.failed == []
        talk.restart_broker()
    talk.service.close(talk.now)
    lines = read_records(talk.config.run_dir / "metrics.jsonl")
    runs, found = TOOLS[tool](talk.config.run_dir)
    assert len(runs) == 1 and [found[0, name] for name in WANTED[3:]] == [1.0, 1.0]
    assert not any("version_share" in name for _, name in found), "it would add a name at each step"
    for line in lines:
        said = line["reward"], line["learner"]["loss"], line["tokens_ledger"]["generated"]
        assert [found[line["step"], name] for name in WANTED[:3]] == pytest.approx(said), "TensorBoard has float32"


@pytest.mark.sinks
def test_steps_and_evaluations_reach_tools_with_an_environment_of_their_own():
    command = [ROOT / ".venv-sinks/bin/python", "-m", "pytest", "-v", "-p", "no:cacheprovider", __file__]
    chosen = ["-m", "not sinks", "-k", "as_one_run and not wandb"]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"mlflow", "trackio", "swanlab"} <= set(re.findall(r"\[(\w+)\] PASSED", done.stdout))


class Particular(BackgroundSink):
    """Refuses the names that MLflow refuses, all figures of the entry with them."""

    def open(self):
        self.written = []

    def write(self, step, time, figures):
        for name in figures:
            if not re.fullmatch(r"[\w./ :-]+", name) or posixpath.normpath(name) != name:
                raise ValueError(f"Invalid value {name!r}")
        self.written.append((step, figures))


def test_a_name_that_a_service_refuses_is_changed_and_the_sink_stays(tmp_path, caplog):
    sink = Particular(tmp_path)
    for step, figures in enumerate(
        ({"a b": 1.0}, {"acc@1": 2.0, "acc_1": 3.0, "a b": 4.0}, {"x//y": 5.0, "../z": 6.0})
    ):
        sink.step({"step": step, "time": 0.0, "reward_details": figures})
    sink.close()
    assert sink.written == [
        (0, {"reward_details/a b": 1.0}),
        (1, {"reward_details/acc_1": 3.0, "reward_details/acc_1_": 2.0, "reward_details/a_b": 4.0}),
        (2, {"reward_details/x/y": 5.0, "reward_details/z": 6.0}),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "Particular refuses names such as 'reward_details/acc@1', and gets plain ones: "
        "Invalid value 'reward_details/acc@1'"
    ]


def test_a_service_that_refuses_plain_names_too_is_given_up(tmp_path):
    sink = Particular(tmp_path)
    sink.write = lambda *_: 1 / 0
    sink.step({"step": 0, "time": 0.0, "reward@1": 1.0})
    with pytest.raises(ZeroDivisionError):
        sink.close()


def test_an_unreachable_service_is_dropped_and_the_run_continues(converse, monkeypatch):
    from april.broker.telemetry.sinks import WeightsAndBiases

    def refuse(self):
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(WeightsAndBiases, "open", refuse)
    options = ["--evaluation.prompts", "1", "--operations.sinks", '["wandb", "tensorboard"]']
    talk = converse(*options)
    talk.service.recorder.sinks._sinks["wandb"]._thread.join()
    worker, learner = joined(FakeWorker(talk)), joined(FakeLearner(talk))
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    assert talk.service.recorder.sinks.failed == ["wandb"] and talk.ledger.steps.consumed == 1

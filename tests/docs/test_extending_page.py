"""docs/extending.md: each example is a complete file of less than 40 lines, and works as the page says."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from april import config as configuration
from april.broker.filters import CompleteGroup, GroupFilters
from april.broker.schedules.schedule import LEDGER_ATTRIBUTES
from april.cli import main
from april.config import Config
from april.config.broker import WeightsSection
from april.config.data import OWN_MAPPING
from april.data.rows import make_row, mapped
from april.launch.supervisor import Supervisor
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.diagnostics import StepTotals
from april.learner.objective import Objective
from april.util.registry import REGISTRIES, registry_of
from april.util.versions import RUN_FOLDER
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.wire.message import Version
from april.workers.environments.process import EnvironmentCall, answer_call
from april.workers.rewards.messages import Item, RewardRules
from april.workers.rewards.process import verify
from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker, make_batch

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.DOTALL))
SCENARIO = """
steps = 4
warmup_steps = 2
limit_responses = 200
schedule = { rollout_batch_size = 4, n_samples_per_prompt = 2 }
lengths = { longest_tokens = 64, median_tokens = 20 }
engines = { count = 2, slots = 8 }
cost = { decode_base_s = 0.01, decode_running_s = 1e-4, decode_kv_s = 0, prefill_s = 1e-5 }
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Work in a folder that has the page's files."""
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in EXAMPLES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_less_than_40_lines(name):
    assert len(EXAMPLES[name].splitlines()) < 40


@pytest.mark.parametrize("key", REGISTRIES)
def test_the_page_has_a_line_for_each_kind_of_part(key):
    assert f"| `{key}` |" in PAGE


def test_the_engine_passes_its_check(capsys):
    assert main(["check", "engine", "my_engine:Engine"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "kept        a stream has no gap and ends once" in said
    assert "left out    greedy takes the likeliest token: it says that it has no true distribution" in said


def test_check_engine_reports_failed_checks_with_their_lines(files, capsys):
    code = EXAMPLES["my_engine.py"].replace("+ 1)", "+ 1 + (self.generated_tokens == 20))")
    (files / "bad_engine.py").write_text(code.replace(", False\n", ", False\n    returns_supports = True\n"))
    assert main(["check", "engine", "bad_engine:Engine"]) == 1
    said = capsys.readouterr().out
    assert "FELL SHORT  cancel hands over what is left: after 7 tokens\n    streams.py:" in said
    assert "FELL SHORT  supports come with their tokens or are refused" in said


@pytest.mark.full
def test_the_schedule_passes_its_check_and_is_what_is_simulated_and_tuned(files, capsys):
    name = "my_schedule:Schedule"
    assert main(["check", "schedule", name]) == 0, capsys.readouterr().out
    (files / "scenario.toml").write_text(SCENARIO)
    assert main(["simulate", "scenario.toml", "--schedule.kind", name]) == 0
    _, *lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[0] for line in lines] == [name]
    assert main(["tune", "scenario.toml", "--schedule.kind", name]) == 0
    assert "schedule.over_sampling_batch_size = " in capsys.readouterr().out


@pytest.mark.full
def test_check_schedule_reports_a_schedule_that_never_ends(files, capsys):
    more = "    def starved(self, ledger):\n        return False\n"
    (files / "stuck.py").write_text(f"{EXAMPLES['my_schedule.py']}\n{more}")
    assert main(["check", "schedule", "stuck:Schedule"]) == 1
    said = capsys.readouterr().out
    assert "FELL SHORT  prompts may run out before a batch is full" in said
    assert "rounds end one after the other, and nothing happens in them" in said


def test_loss_correction_step_scale_and_advantage_make_an_objective():
    parts = {"loss": "my_loss:loss", "corrections": ["my_correction:correction"], "advantage": "my_advantage:advantage"}
    algorithm = parts | {"behaviour_coef": 0.0, "normalisation": "constant", "constant_tokens": 1}
    algorithm |= {"step_scale": "my_step_scale:step_scale"}
    tree = {"model": {"path": "none"}, "data": {}, "algorithm": algorithm}
    objective = Objective(Config.model_validate(tree))
    assert [objective.step_scale({"off_policy_share": share}) for share in (0.4, 0.6)] == [1.0, 0.5]

    def sample(reward, step):
        logprobs = np.log([0.5, 0.5]).astype(np.float32)
        return TrainSample(np.array([1, 2, 3], np.int32), 1, logprobs, reward, ((0, 2, Version(0, step)),))

    batch = TrainingBatch(3, [[sample(0.0, 3), sample(1.0, 2), sample(2.0, 2)]])
    prepared = objective.prepare(batch)
    assert prepared.advantages.tolist() == [-1.0, 1.0], "less the median, and the one at it has no gradient"
    tokens = objective.tokens(prepared, [0, 1], torch.device("cpu"))
    logprobs = tokens.behaviour_logprobs.clone().requires_grad_()
    loss = objective.loss(logprobs, torch.zeros(4), tokens, StepTotals(torch.device("cpu")))
    loss.backward()
    weights = prepared.weights[0]
    assert logprobs.grad.tolist() == pytest.approx([weights, weights, -weights / 2, -weights / 2])


def test_a_loss_and_an_engine_have_keys_of_their_own(files, config_file, capsys):
    parts = [
        "--algorithm.loss",
        "my_tempered_loss:loss",
        "--algorithm.tau",
        "0.5",
        "--engine",
        "my_sized_engine:Engine",
    ]
    config = configuration.load(config_file, [*parts, "--engine.stride", "3"])
    assert Objective(config).section.tau == 0.5 and config.engine.stride == 3
    assert main(["check", "engine", "my_sized_engine:Engine", "--engine.stride", "3"]) == 0, capsys.readouterr().out


def test_the_mapping_makes_a_row_and_the_command_prints(files, capsys):
    record = {"conversations": [{"value": "1+1="}], "answers": ["3", "2"]}
    row = make_row(mapped(record, "my_mapping:mapping"), OWN_MAPPING)
    assert (row.prompt, row.label) == ([{"role": "user", "content": "1+1="}], "2")
    (files / "run").mkdir()
    RUN_FOLDER.claim(files / "run", new=True)
    assert main(["my_command:lengths", "run"]) == 2 and "is not a run folder" in capsys.readouterr().err
    (files / "run/config.toml").write_text("")
    (files / "run/metrics.jsonl").write_text('{"step": 4, "learner": {"tokens": 30.0, "samples": 2.0}}\n')
    assert main(["my_command:lengths", "run", "--last", "1"]) == 0 and capsys.readouterr().out == "4 15.0\n"


@pytest.mark.parametrize("key", sorted(REGISTRIES.keys() - {"reward.name", "operations.alarms"}))
def test_the_page_names_every_part_that_ships_but_the_many_that_have_a_page_of_their_own(key):
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{key}`" in line)
    assert [name for name in registry_of(key).shipped if f"`{name}`" not in row] == []


def test_the_page_names_what_a_schedule_may_use_of_the_ledger():
    used = PAGE.partition("| `ledger.…` |")[2].partition("`deliver` refuses")[0]
    named = {name.split(".")[0] for name in re.findall(r"`(\w+)[.(`]", used)}
    assert named >= LEDGER_ATTRIBUTES and "| `next_batch(ledger)` |" in PAGE


def test_the_reward_scores_a_response():
    [score] = verify([Item(0, "my_reward:reward", "it is 12", "12", "stop", "", 3)], RewardRules())
    assert (score.reward, score.details, score.error) == (1.0, {"over_limit": 0.0, "words": 3.0}, None)


def test_the_environment_answers_until_it_is_done():
    state, done = b"", []
    for number in range(3):
        answer = answer_call("my_environment:environment", EnvironmentCall(0, "hm", number, True, state, "", ""))
        state, done = answer.state, [*done, answer.done]
    assert (answer.text, done) == ("That was turn 3.\n", [False, False, True])


def test_the_filter_discards_easy_groups(config_file):
    config = configuration.load(config_file, ["--schedule.group_filter", "my_filter:keep_hard_ones"])
    (function,) = GroupFilters(config.schedule).filters
    assert function(CompleteGroup([], [], [], [], [1.0] * 4)) == "too_easy"
    assert function(CompleteGroup([], [], [], [], [1.0, 0.0])) is None


def test_the_sink_has_every_step_and_evaluation_and_one_that_raises_is_left_out(files, config_file, caplog):
    (files / "bad_sink.py").write_text(
        "from april.broker.telemetry.sinks import Sink\n\n\nclass Bad(Sink):\n"
        "    def step(self, record):\n        raise OSError('the service is away')\n"
    )
    options = ["--operations.sinks", '["bad_sink:Bad", "my_sink:Rewards"]', "--evaluation.prompts", "1"]
    talk = Conversation(configuration.load(config_file, options))
    worker, learner = FakeWorker(talk), FakeLearner(talk)
    worker.join()
    learner.join()
    make_batch(worker)
    for step in range(2):
        learner.fetch(step)
        if step == 0:
            learner.consume(step)
    step, reward = (talk.config.run_dir / "rewards.csv").read_text().split(",")
    assert step == "1" and 0 <= float(reward) <= 1
    assert (talk.config.run_dir / "evaluations.csv").read_text() == "0,1.0\n"
    assert "bad_sink:Bad has failed" in caplog.text
    assert talk.metrics()["april_sinks_failed_total"] == {("bad_sink:Bad",): 1}


def test_the_transport_carries_weights_from_the_learner_to_a_worker():
    section = WeightsSection(transport="my_transport:Folder", bucket_mb=1)
    publisher = WeightPublisher(section, "run", "cpu")
    receiver = WeightReceiver(section, "uid", "worker", "cpu")
    tensors = {"a": torch.arange(700_000, dtype=torch.float32), "b": torch.ones(3)}
    loaded, over = [], threading.Event()

    def work():
        while not loaded and not over.wait(0.01):
            if staged := receiver.take():
                loaded.append(staged)
                receiver.loaded(staged.version)

    worker = threading.Thread(target=work)
    try:
        worker.start()
        receiver.connect(publisher.address)
        while not any(channel.state == "ready" for channel in list(publisher._channels.values())):
            over.wait(0.01)
        figures = publisher.publish(Version(0, 1), tensors)
    finally:
        over.set()
        worker.join()
        receiver.close()
        publisher.close()
    assert figures["publish_workers"] == 1 and loaded[0].version == Version(0, 1)
    assert all(torch.equal(loaded[0].tensors[name], tensor) for name, tensor in tensors.items())


def test_the_launch_target_starts_watches_and_ends_a_program(config_file, tmp_path):
    config = configuration.load(config_file, ["--run.target", "my_target:Nice"])
    run = Supervisor(config, None)
    run.logs.mkdir(parents=True)
    part = run._holder_part("scorer", 0, Path("config"), "address")
    part.command = [sys.executable, "-c", "import os, time; print(os.nice(0), flush=True); time.sleep(600)"]
    part.start()
    while not part.log.read_text().endswith("\n"):
        part.wait(0.05)
    assert part.status is None
    part.kill()
    assert part.status == -9 and int(part.log.read_text()) == min(19, os.nice(0) + 10)


def test_the_launcher_has_a_script_for_each_part(config_file, capsys):
    assert main(["launch", str(config_file), "--on", "my_cluster:Tmux", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[2] for line in shown.splitlines() if line.startswith("# ---")] == [
        "broker.sh", "learner.sh", "worker-0.sh", "worker-1.sh",
    ]  # fmt: skip
    assert shown.count("exec april part ") == 4


@pytest.mark.full
def test_the_commands_of_the_page_are_there():
    for kind in ("engine", "schedule"):
        done = subprocess.run(
            [sys.executable, "-m", "april.cli", "check", kind, "no_such:Part"], capture_output=True, text=True
        )
        assert done.returncode == 2 and "no_such" in done.stderr


PARTS = {
    "worker.engine": "my_engine:Engine",
    "schedule.kind": "my_schedule:Schedule",
    "learner.backend": "my_backend:Backend",
    "learner.optimizer": "my_optimizer:Adamax",
    "algorithm.loss": "my_loss:loss",
    "algorithm.corrections": '["my_correction:correction"]',
    "algorithm.advantage": "my_advantage:advantage",
    "algorithm.length_penalty": "my_length_penalty:length_penalty",
    "algorithm.step_scale": "my_step_scale:step_scale",
    "data.reward": "my_reward:reward",
    "environment.name": "my_environment:environment",
    "schedule.sampler": "my_sampler:sampler",
    "schedule.group_filter": "my_filter:keep_hard_ones",
    "operations.sinks": '["my_sink:Rewards"]',
    "operations.alarms": '["nothing_trained", "my_alarm:LowReward"]',
    "weights.transport": "my_transport:Folder",
    "run.target": "my_target:Nice",
    "launch.on": "my_cluster:Tmux",
}


@pytest.mark.full
def test_a_run_works_with_all_parts_of_the_page(start_run, run_dir):
    elsewhere = {"reward.name", "agent.program", "algorithm.distillation", "algorithm.divergence"}
    assert PARTS.keys() - {"data.reward"} == REGISTRIES.keys() - elsewhere, "agents and teachers have their own pages"
    words = [word for key, name in PARTS.items() for word in (f"--{key}", name)]
    words += ["--environment.max_turn_tokens", "4", "--learner.ranks", "1", "--worker.count", "1"]
    job = start_run(*words)
    assert job.wait() == 0, job.output
    assert [line.split(",")[0] for line in (run_dir / "rewards.csv").read_text().splitlines()] == ["1", "2", "3"]
    assert (run_dir / "evaluations.csv").exists()

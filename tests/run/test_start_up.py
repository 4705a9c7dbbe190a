"""The seconds before the first step speak, with or without a terminal."""

import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace as Has

import pytest

from april import config as configuration
from april.broker.telemetry.evaluation import describe_evaluation
from april.broker.telemetry.recorder import failed_share
from april.config import ConfigError
from april.launch import preflight
from april.launch.check import check_enough_rows
from april.launch.start_up import StartUp
from april.util.files import replace_file
from april.wire.sockets.base import ADDRESS_FILE, address_at


def status(step=0, version="loading", phase="waiting for weights", learner=None):
    worker = {"name": "worker-0", "version": version}
    return {
        "step": step, "phase": phase, "learner_silent_s": learner, "workers": [worker], "scorers": [], "agents": [],
    }  # fmt: skip


def test_each_milestone_before_the_first_step_is_noted_once():
    said = []
    start_up = StartUp(said.append)
    start_up.parts_started(["broker", "learner", "worker-0"], Path("runs/mine/logs"))
    for seen in (
        status(4),
        status(4, learner=0.1),
        status(4, "0.4", "generating", 0.2),
        status(5, "0.5", "generating"),
    ):
        start_up.observe(seen)
        start_up.observe(seen)
    assert [line.partition("s  ")[2] for line in said] == [
        "starting broker, learner, worker-0; each has a log in runs/mine/logs, what rewards print is in rewards.log "
        "there",
        "worker-0 is connected, with its engine loaded",
        "the learner is connected",
        "worker-0 has the weights 0.4",
        "generating: the first step is under way",
    ]
    assert start_up.is_over


def test_a_part_started_with_its_broker_finds_it_in_the_run_folder(tmp_path):
    late = threading.Timer(0.2, replace_file, [tmp_path / ADDRESS_FILE, b"tcp://127.0.0.1:5"])
    late.start()
    assert address_at(str(tmp_path), 30.0) == "tcp://127.0.0.1:5"
    assert address_at("tcp://10.0.0.5:5555", 0.0) == "tcp://10.0.0.5:5555"
    with pytest.raises(TimeoutError, match="no broker has written"):
        address_at(str(tmp_path / "nowhere"), 0.0)
    with pytest.raises(ConfigError, match="or its run folder"):
        configuration.check_address(str(tmp_path))


def test_a_process_that_only_tokenises_imports_no_torch(policy_folder):
    code = (
        "import sys; from april.data.tokenizer import Tokenizer, import_without_torch; import_without_torch(); "
        f"ids = Tokenizer({str(policy_folder)!r}).encode_prompt('1+2'); assert len(ids) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_too_many_failed_prompts_make_a_finished_run_a_failure(tmp_path, config_file):
    ledger = Has(account=Has(counts={"dead_sample": 2, "trained": 6}), evaluated={})
    assert failed_share(ledger) == {"training": 0.25, "evaluation": 0.0}
    result = {"step": 4, "accuracy": 0.5, "prompts": 9, "failed": 1}
    ledger.evaluated = {0: result | {"failed": 9}, 4: result}
    assert failed_share(ledger) == {"training": 0.25, "evaluation": 0.1}
    assert describe_evaluation(result).endswith(
        "accuracy 0.500 on 9 prompts, 1 left out, whose responses could not be scored"
    )
    config = configuration.load(config_file, ["--run.dir", str(tmp_path / "runs")])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "summary.json").write_text('{"failed_share": {"training": 0.25, "evaluation": 0.1}}')
    assert preflight.too_many_failed(config).startswith(
        "25.0% of the training prompts have failed for good, more than key"
    )
    lenient = configuration.load(
        config_file, ["--run.dir", str(tmp_path / "runs"), "--reward.max_failed_share", "0.25"]
    )
    assert not preflight.too_many_failed(lenient)


def test_a_finished_run_that_has_trained_nothing_says_what_came_of_its_prompts(tmp_path, config_file):
    config = configuration.load(config_file, ["--run.dir", str(tmp_path / "runs"), "--schedule.last_batch", "drop"])
    config.run_dir.mkdir(parents=True)
    summary = config.run_dir / "summary.json"
    summary.write_text('{"steps": 0, "data": {"rows": 9, "too_long": 7}, "discarded_groups": {"dead_sample": 1}}')
    why = preflight.trained_nothing(config)
    assert "rows: 9, too long: 7, groups discarded (dead_sample): 1" in why and "schedule.last_batch" in why
    summary.write_text('{"steps": 1}')
    assert not preflight.trained_nothing(config)


def test_a_dataset_that_never_fills_a_batch_is_refused_at_the_dry_run(config_file):
    few = ["--data.epochs", "1", "--schedule.last_batch", "drop"]
    for rows, refused in ((3, True), (4, False)):
        config = configuration.load(config_file, few)
        with pytest.raises(ConfigError, match=r"'schedule\.rollout_batch_size' = 4") if refused else nullcontext():
            check_enough_rows(config, rows)

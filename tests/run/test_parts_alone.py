"""Broker, workers and learner started one by one, as on several machines: workers join, die and are replaced."""

import socket
import sys

import pytest

from april import config as configuration
from april.cli import main
from april.launch.preflight import lock_run_folder, make_run_folder
from tests.support.listening_addresses import listeners
from tests.support.refusals import refusal
from tests.support.run_processes import APRIL, assert_closed, steps_recorded, wait_until


def test_workers_join_a_run_and_a_killed_one_loses_only_its_last_chunk(start, start_broker, config_file, run_dir):
    longer = ["--sampling.max_response_tokens", "400", "--schedule.max_steps", "100000"]
    longer += ["--broker.session_timeout_s", "2"]
    broker = start_broker(*longer)
    connect = ["--connect", broker.address, *longer]
    launch = [sys.executable, "-m", "april.learner.launch", "--nproc-per-node", "1"]
    learner = start("learner", [*launch, "-m", "april.learner", str(config_file), *connect])
    first = start("first", [*APRIL, "worker", str(config_file), "--name", "first", *connect])
    wait_until(lambda: steps_recorded(run_dir) >= 1, broker)
    second = start("second", [*APRIL, "worker", str(config_file), "--name", "second", *connect])
    wait_until(lambda: '"second"' in (run_dir / "metrics.jsonl").read_text(), broker)
    living = [pid for job in (broker, learner, first, second) for pid, _ in job.descendants("april")]
    assert set().union(*map(listeners, living)) == {"127.0.0.1"}, "without keys nothing is open to other machines"
    first.kill("april.cli worker")
    wait_until(lambda: "worker first is lost" in broker.output, broker)
    steps = steps_recorded(run_dir)
    wait_until(lambda: steps_recorded(run_dir) > steps + 2, broker)
    broker.process.terminate()
    assert learner.wait() == broker.wait() == second.wait() == 0, broker.output + learner.output + second.output
    assert assert_closed(run_dir)["state"] == "stopped"


@pytest.mark.parametrize(
    "command",
    [["run"], ["broker"], ["worker"], ["scorer"], ["status"], ["report"], ["drain"], ["dead-letters"], ["make-policy"]],
)
def test_every_command_prints_its_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "default" in printed or command[0] == "report"


def test_a_broken_dataset_is_refused_before_any_process_starts(config_file, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\nnot json\n')
    (tmp_path / "empty.jsonl").write_text("")
    for name, named in (("bad", "line 2"), ("empty", "no rows")):
        assert named in refusal(capsys, "run", config_file, "--data.path", tmp_path / f"{name}.jsonl")
    assert not (tmp_path / "runs").exists()


def test_a_policy_folder_without_weights_or_tokeniser_is_refused_before_any_process_starts(
    config_file, policy_folder, tmp_path, capsys
):
    for missing in ("model.safetensors", "tokenizer.json"):
        broken = tmp_path / missing
        broken.mkdir()
        for path in policy_folder.iterdir():
            if path.name != missing:
                (broken / path.name).write_bytes(path.read_bytes())
        assert str(broken) in refusal(capsys, "run", config_file, "--model.path", broken)
    assert not (tmp_path / "runs").exists()


def test_prompts_that_are_all_too_long_are_refused(config_file, capsys):
    assert "between 1 and 3 tokens" in refusal(capsys, "run", config_file, "--data.max_prompt_tokens", "3")


def test_a_run_folder_that_cannot_be_made_is_refused(config_file, tmp_path, capsys):
    assert "run.dir" in refusal(capsys, "run", config_file, "--run.dir", config_file)


def test_a_run_that_does_not_exist_cannot_be_resumed(config_file, capsys):
    assert "names no run" in refusal(capsys, "run", config_file, "--resume")


def test_a_running_run_cannot_be_resumed(config_file, capsys):
    config = make_run_folder(configuration.load(config_file))
    before = {path: path.stat().st_mtime_ns for path in config.run_dir.rglob("*")}
    with lock_run_folder(config):
        assert "another `april run` has under way" in refusal(capsys, "run", config_file, "--resume")
    assert {path: path.stat().st_mtime_ns for path in config.run_dir.rglob("*")} == before
    assert "another" not in refusal(capsys, "run", config_file, "--resume"), "it has ended by now"


@pytest.mark.parametrize("address", ["garbage", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "http://127.0.0.1:5"])
def test_an_address_that_is_none_is_refused(config_file, capsys, address):
    assert address in refusal(capsys, "worker", config_file, "--connect", address)


def test_a_scorer_without_rewards_to_compute_is_refused(config_file, capsys):
    error = refusal(capsys, "scorer", config_file, "--connect", "tcp://127.0.0.1:5")
    assert "key 'reward.where' = 'worker'" in error and "'scorer'" in error


def test_a_port_in_use_is_refused_with_a_sentence(config_file, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert f"key 'broker.bind' = '{address}'" in refusal(capsys, "broker", config_file, "--broker.bind", address)

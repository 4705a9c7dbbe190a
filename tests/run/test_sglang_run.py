"""Whole runs on real SGLang servers: weights broadcast to them, options passed through, a server killed in between."""

import re

import numpy as np
import pytest

from april.broker.ledger.events import GroupOpened, Leased, RowsAccepted
from april.data.support import Support
from april.data.tokenizer import Tokenizer
from april.observe.report.run_folder import read_records
from april.observe.report.samples import read_step, sample_files
from april.wire.rows import CHUNK
from tests.support.agent_programs import AGENT, TURNS
from tests.support.journal_checks import assert_every_answer_fits_its_turn
from tests.support.journal_events import events_and_arrays, with_payloads
from tests.support.run_processes import assert_closed, steps_recorded, wait_until
from tests.support.stored_executions import executions

pytestmark = [pytest.mark.timeout(1200), pytest.mark.sglang]
PATIENCE_S = 600.0
"""a server takes 20 s to start on idle cores, minutes on busy ones"""
SGLANG = ["--worker.engine", "sglang", "--worker.count", "1", "--learner.ranks", "1", "--schedule.max_steps", "4"]


@pytest.fixture
def run(start_run):
    return lambda *overrides: start_run(*SGLANG, *overrides)


def test_killed_servers_are_started_again_and_the_run_comes_to_its_end(run, run_dir, gate):
    """The learner's broadcast goes to the two servers themselves, also to new ones; the worker keeps its process."""

    def worker_log():
        return (run_dir / "logs/worker-0.log").read_text()

    job = run("--engine.weights", "broadcast", "--engine.servers", "2", "--sampling.max_response_tokens", "120",
              "--schedule.max_steps", "6", *gate.hold(2))  # fmt: skip
    wait_until(lambda: steps_recorded(run_dir) >= 2, job, PATIENCE_S)
    job.kill("sglang.launch_server", count=2)
    gate.open()
    assert job.wait(PATIENCE_S) == 0, job.output
    found = assert_closed(run_dir)
    assert found["steps"] == 6 and found["state"] == "finished" and not job.restarts
    assert worker_log().count(" ERROR the SGLang server") >= 2
    assert "the SGLang server serves again" in worker_log()
    compared = len(re.findall(r"tensors are those that were sent", worker_log()))
    assert compared >= 3, "on each server, and on every new one"
    assert found["tokens"]["refused"] == 0 and not found["tokens"]["discarded"]
    wait_until(lambda: job.descendants() == [])


def test_turns_cut_distributions_and_the_server_s_own_options_in_one_run(run, run_dir, policy_folder):
    """An environment answers the turns that the server generates, and each token is drawn from a part of the
    distribution, on which learner and server agree; the server is set up as the configuration says."""
    in_turns = ["--environment.name", "tests.support.environments:count", "--environment.turn_ends", '[","]',
                "--environment.max_turn_tokens", "6", "--sampling.max_response_tokens", "60"]  # fmt: skip
    cut = ["--sampling.top_k", "8", "--sampling.top_p", "0.95", "--sampling.temperature", "1.2"]
    all_trained = ["--algorithm.entropy_coef", "0.01"]
    engine = ["--engine.weights", "tensor", "--engine.pause", "retract", "--engine.stream_tokens", "1"]
    options = {"schedule_policy": "fcfs", "disable_radix_cache": "true", "disable_overlap_schedule": "true",
               "chunked_prefill_size": "64", "max_total_tokens": "320"}  # fmt: skip
    flags = [word for name, value in options.items() for word in (f"--engine.server.{name}", value)]
    job = run(*in_turns, *cut, *all_trained, *engine, *flags)
    assert job.wait(PATIENCE_S) == 0, job.output
    found = assert_closed(run_dir)
    assert found["steps"] == 4 and found["state"] == "finished" and not found["tokens"]["discarded"]
    server_log = (run_dir / "logs/worker-0-sglang.log").read_text()
    for setting in (
        "'disable_radix_cache': True", "'disable_overlap_schedule': True", "'chunked_prefill_size': 64",
        "'max_total_tokens': 320",
    ):  # fmt: skip
        assert setting in server_log
    _, observed = assert_every_answer_fits_its_turn(run_dir, Tokenizer(policy_folder))
    assert observed > 20
    assert 1 < mean_support(run_dir) < 8
    learner = [step["learner"] for step in read_records(run_dir / "metrics.jsonl")]
    apart = [step["k3_age_0"] for step in learner if "k3_age_0" in step]
    assert apart and max(apart) < 1e-7


def mean_support(run_dir):
    """Ids to a training token, each of which is among its own."""
    evaluated, holders, counts = set(), {}, []
    for event, arrays in events_and_arrays(run_dir):
        if isinstance(event, GroupOpened) and event.evaluation:
            evaluated.add(event.group)
        elif isinstance(event, Leased):
            holders[event.lease_id] = event.group
        elif isinstance(event, RowsAccepted):
            for row, own in with_payloads(event, arrays):
                if row.kind != CHUNK:
                    continue
                words, count = np.frombuffer(own, "<i4"), row.tokens
                if holders[row.lease_id] in evaluated:
                    assert len(words) == 2 * count
                else:
                    assert Support(words[2 * count : 3 * count], words[3 * count :]).holds(words[:count])
                    counts += words[2 * count : 3 * count].tolist()
    return sum(counts) / len(counts)


def test_agents_speak_with_it_through_openai_s_sdk_whole_and_streamed(run, run_dir, tmp_path, monkeypatch):
    """What each has read is what is trained of its session, token by token, on the weights that were published."""
    read = tmp_path / "read"
    read.mkdir()
    monkeypatch.setenv("READ_BY_AGENTS", str(read))
    job = run("--engine.weights", "broadcast", "--sampling.max_response_tokens", "48", *AGENT,
              "--agent.program", "tests.support.agent_programs:in_three_turns")  # fmt: skip
    assert job.wait(PATIENCE_S) == 0, job.output
    found = assert_closed(run_dir)
    assert (found["steps"], found["state"]) == (4, "finished")
    assert not {"agent_failed", "superseded"} & found["tokens"]["discarded"].keys()
    heard, steps = dict(executions(read)), sample_files(run_dir)
    trained = [sample for step in steps for sample in read_step(run_dir, step) if not sample["held_out"]]
    for sample in trained:
        [said] = heard[f"{sample['group']}-{sample['index']}"]
        assert len(said) == TURNS and sample["response"].endswith("+1=".join(said))
    assert len(trained) == 32
    learner = [step["learner"] for step in read_records(run_dir / "metrics.jsonl")]
    assert max(step["k3_age_0"] for step in learner if "k3_age_0" in step) < 1e-7


def test_a_server_that_cannot_start_ends_the_run_with_its_own_words(run):
    job = run("--engine.server.no_such_option", "1")
    assert job.wait(PATIENCE_S) == 1
    assert "worker-0 ended with status 2: it refuses to work" in job.output
    assert "unrecognized arguments: --no-such-option 1" in job.output


TURNS_ON_ONE = ["--devices.share", "true", "--devices.turns", "true", "--engine.server.log_level_http", "info"]


def counted(log, *words):
    text = log.read_text() if log.exists() else ""
    return [text.count(word) for word in words]


def test_learner_and_server_take_turns_and_the_server_lets_go_for_each_batch(run, run_dir):
    """Before the first weights the learner may have had the first turn or the second one, and it has the last.

    The entropy term trains every token: a batch whose groups have no advantage would leave the moments unmade."""
    job = run(*TURNS_ON_ONE, "--algorithm.entropy_coef", "0.01")
    assert job.wait(PATIENCE_S) == 0, job.output
    found = assert_closed(run_dir)
    assert found["steps"] == 4 and found["state"] == "finished" and not job.restarts
    server, worker = run_dir / "logs/worker-0-sglang.log", run_dir / "logs/worker-0.log"
    released, resumed = counted(server, "POST /release_memory_occupation", "POST /resume_memory_occupation")
    assert counted(worker, "has released the accelerator", "has the accelerator again") == [released, resumed]
    assert 4 <= resumed <= released <= 6 and released - resumed <= 1
    learner = [step["learner"] for step in read_records(run_dir / "metrics.jsonl")]
    assert all({"turn_wait_s", "turn_move_s"} <= step.keys() for step in learner)
    log = (run_dir / "logs/learner.log").read_text()
    parked = list(map(int, re.findall(r"(\d+) bytes of state are on the host", log)))
    assert len(parked) == 5 and parked[1] == parked[-1] > 2.9 * parked[0], "weights first, then their moments as well"


def test_whoever_is_killed_in_the_learner_s_turn_the_run_comes_to_its_end(run, run_dir):
    worker = run_dir / "logs/worker-0.log"
    job = run(*TURNS_ON_ONE, "--schedule.max_steps", "6", "--learner.pace_token_s", "0.05")
    for part in ("april.learner", "--name worker-0"):
        steps = steps_recorded(run_dir)
        wait_until(lambda: steps_recorded(run_dir) > steps, job, PATIENCE_S)  # noqa: B023
        gave = counted(worker, "has released the accelerator")
        wait_until(lambda: counted(worker, "has released the accelerator") > gave, job, PATIENCE_S)  # noqa: B023
        job.kill(part)
    assert job.wait(PATIENCE_S) == 0, job.output
    found = assert_closed(run_dir)
    assert found["steps"] == 6 and found["state"] == "finished"

"""Agents in a real run: whatever is killed under them, they read the same answers, and nothing said is lost."""

import contextlib
import json
import re
import signal
import ssl
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from april.agents.listening import ATTACH_KEY
from april.observe.report.samples import read_step
from tests.support.agent_programs import AGENT
from tests.support.certificates import make_attach_key, make_certificate
from tests.support.run_processes import APRIL, assert_closed, steps_recorded, wait_until
from tests.support.stored_executions import agree, executions

ENDLESS = ["--schedule.max_steps", "100000"]


def stop(job, run_dir):
    """Two steps later; the summary."""
    behind = steps_recorded(run_dir) + 1
    wait_until(lambda: steps_recorded(run_dir) > behind, job)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output
    assert not re.search("agents-0 ended with status [1-9]", job.output)
    wait_until(lambda: job.descendants() == [])
    summary = assert_closed(run_dir)
    assert summary["state"] == "stopped"
    return summary


@pytest.mark.full
@pytest.mark.parametrize("program, forks", [("in_three_turns", {0}), ("with_branches", {0, 1, 2, 3, 4})])
def test_whatever_is_killed_agents_read_the_same_again_and_nothing_is_lost(
    program, forks, start_run, run_dir, tmp_path, monkeypatch
):
    read = tmp_path / "read"
    read.mkdir()
    monkeypatch.setenv("READ_BY_AGENTS", str(read))
    job = start_run(
        *AGENT, *ENDLESS, "--agent.program", f"tests.support.agent_programs:{program}", "--worker.count", "1",
        "--learner.ranks", "1",
    )  # fmt: skip
    for part in ("april.agents.host", "--name worker-0", "--name agents-0", "april.cli broker"):
        before = sum(file.stat().st_size for file in read.iterdir())
        wait_until(lambda before=before: sum(file.stat().st_size for file in read.iterdir()) > before + 600, job)
        job.kill(part)
    summary = stop(job, run_dir)
    assert summary["starts"]["broker"] == 2
    assert not {"agent_failed", "superseded"} & summary["tokens"]["discarded"].keys()
    assert {sample["fork"] for sample in read_step(run_dir)} == forks
    again = 0
    for sample, runs in executions(read):
        again += len(runs) - 1
        assert agree(runs), f"{sample} was answered otherwise when it asked the same again"
    assert again > 3, "several sessions were under way when a part was killed"


@pytest.mark.full
def test_where_nothing_is_replayed_a_lost_session_is_a_counted_discard(start_run, run_dir, tmp_path, monkeypatch):
    read = tmp_path / "read"
    read.mkdir()
    monkeypatch.setenv("READ_BY_AGENTS", str(read))
    job = start_run(
        *AGENT, *ENDLESS, "--agent.program", "tests.support.agent_programs:in_three_turns", "--agent.replay", "discard",
        "--worker.count", "1", "--learner.ranks", "1",
    )  # fmt: skip
    for part in ("april.agents.host", "--name agents-0"):
        before = sum(file.stat().st_size for file in read.iterdir())
        wait_until(lambda before=before: sum(file.stat().st_size for file in read.iterdir()) > before + 600, job)
        job.kill(part)
    summary = stop(job, run_dir)
    assert summary["tokens"]["discarded"]["not_replayed"] and summary["discarded_groups"]["not_replayed"]
    assert not {"agent_failed", "superseded"} & summary["tokens"]["discarded"].keys()
    assert all(len(runs) == 1 for _, runs in executions(read)), "what has read an answer is not run again"


@pytest.mark.full
def test_an_environment_of_verifiers_is_trained_on_by_name(start, finish_run, run_dir, tmp_path):
    name, rows = "tests.support.verifiers_environments", tmp_path / "rows"
    assert start("rows", [*APRIL, "verifiers", name, "--out", str(rows)]).wait() == 0
    _, summary = finish_run(
        *AGENT, "--agent.program", "verifiers", "--agent.options",
        f'{{name = "{name}", arguments = {{turns = 3}}}}', "--agent.max_turn_tokens", "8",
        "--data.path", str(rows / "train.jsonl"), "--data.eval_path", str(rows / "heldout.jsonl"),
        "--schedule.over_sampling_batch_size", "4", "--learner.ranks", "1",
    )  # fmt: skip
    assert (summary["steps"], summary["state"]) == (3, "finished")
    assert "agent_failed" not in summary["tokens"]["discarded"]
    for sample in read_step(run_dir):
        number = int(sample["prompt"][1])
        first, *others = answers = sample["response"].split(f"+{number}=")
        assert others or not first, "the environment answers, but not what has no text"
        last = next(filter(None, reversed(answers)), "")
        assert sample["reward"] == last.endswith(str(number % 2)), "the rubric's, of the last that has a text"


def bases(run_dir, place):
    """Where the API of each agents process of that place has been, the newest last."""
    log = run_dir / f"logs/agents-{place}.log"
    return re.findall(r"the API is at (https?://\S+/v1);", log.read_text()) if log.exists() else []


@pytest.mark.full
def test_a_harness_elsewhere_comes_over_tls_with_its_key_and_is_trained_on(start_run, run_dir, tmp_path):
    certificate, key = make_certificate(tmp_path)
    job = start_run(
        *AGENT, "--agent.attach", "true", "--agent.attach_keyfile", str(make_attach_key(tmp_path)),
        "--agent.ssl_certfile", str(certificate), "--agent.ssl_keyfile", str(key), "--agent.listen", "127.0.0.1:0",
        "--reward.name", "group:tests.support.agent_programs:as_left", "--worker.count", "1", "--learner.ranks", "1",
    )  # fmt: skip
    trust = ssl.create_default_context(cafile=certificate)
    wait_until(lambda: bases(run_dir, 0), job)
    [base] = set(bases(run_dir, 0))

    def call(method, path, key, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{base}{path}", data, {"Authorization": f"Bearer {key}"}, method=method)
        with urllib.request.urlopen(request, timeout=90, context=trust) as response:
            return json.loads(response.read() or "null")

    def harness():
        """Runs agents until the run has come to its end, perhaps between two calls."""
        while job.process.poll() is None:
            with contextlib.suppress(OSError, openai.APIError):
                if told := call("POST", "/sessions", 32 * "k", {"wait_s": 1}):
                    assert told["base_url"] == base
                    client = openai.OpenAI(base_url=base, api_key=told["api_key"], http_client=http, timeout=170)
                    reply = client.chat.completions.create(model="any", messages=told["task"]["messages"], max_tokens=4)
                    said = {"said": len(reply.choices[0].message.content)}
                    call("POST", "/session/state", told["api_key"], {"state": said})
                    call("POST", "/session/reward", told["api_key"], {"reward": 5.0})
                    call("DELETE", "/session", told["api_key"])

    http = openai.DefaultHttpxClient(verify=trust)
    with ThreadPoolExecutor(1) as pool:
        one_at_a_time = pool.submit(harness)
        assert job.wait() == 0, job.output
        one_at_a_time.result()
    assert not re.search("agents-0 ended with status [1-9]", job.output)
    summary = assert_closed(run_dir)
    assert (summary["steps"], summary["state"]) == (3, "finished")
    assert "agent_failed" not in summary["tokens"]["discarded"]
    rewards = [sample["reward"] for sample in read_step(run_dir)]
    assert set(rewards) <= {0.0, 1.0}, "of the states that they left, as the group's reward has it"


@pytest.mark.full
def test_a_harness_speaks_with_any_of_two_processes(start_run, run_dir):
    """It comes to one for a session and says all that is to say to the other, also when the first is killed."""
    job = start_run(
        *AGENT, "--agent.attach", "true", "--agent.count", "2", "--worker.count", "1", "--learner.ranks", "1",
    )  # fmt: skip

    def call(method, place, path, key="", body=None):
        key = key or (run_dir / ATTACH_KEY).read_text().strip()
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{bases(run_dir, place)[-1]}{path}", data, {"Authorization": f"Bearer {key}"}, method=method
        )
        with urllib.request.urlopen(request, timeout=90) as response:
            return json.loads(response.read() or "null")

    def ask(place, told, stream=False):
        base = bases(run_dir, place)[-1]
        with openai.OpenAI(base_url=base, api_key=told["api_key"], max_retries=0, timeout=170) as client:
            reply = client.chat.completions.create(
                model="any", messages=told["task"]["messages"], max_tokens=4, stream=stream
            )
            if not stream:
                return reply.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)

    def is_told_so(told):
        try:
            ask(0, told)
        except openai.ConflictError:
            return True
        except openai.APIError:
            return False
        raise AssertionError("its holder is gone")

    def harness(place):
        """Until the run has come to its end, perhaps between two calls."""
        while job.process.poll() is None:
            with contextlib.suppress(OSError, openai.APIError):
                if told := call("POST", place, "/sessions", body={"wait_s": 1}):
                    said = ask(1 - place, told, stream=bool(told["task"]["index"] % 2))
                    call("POST", 1 - place, "/session/reward", told["api_key"], {"reward": float(len(said) % 2)})
                    call("DELETE", 1 - place, "/session", told["api_key"])
                    passed_on.append(place)

    passed_on: list[int] = []
    wait_until(lambda: bases(run_dir, 0) and bases(run_dir, 1), job)
    offered: list[dict] = []
    wait_until(lambda: offered.append(call("POST", 1, "/sessions", body={"wait_s": 10})) or offered[-1], job)
    told = offered[-1]
    assert all(isinstance(ask(place, told), str) for place in (0, 1)), "which may be empty"
    job.kill("--name agents-1")
    wait_until(lambda: is_told_so(told), job)
    wait_until(lambda: len(bases(run_dir, 1)) > 1, job)
    with ThreadPoolExecutor(2) as pool:
        harnesses = [pool.submit(harness, place) for place in (0, 1)]
        assert job.wait() == 0, job.output
        assert [one.result() for one in harnesses] and set(passed_on) == {0, 1}
    summary = assert_closed(run_dir)
    assert (summary["steps"], summary["state"]) == (3, "finished")
    assert told["api_key"].rpartition(".")[2] not in "".join(log.read_text() for log in run_dir.glob("logs/*.log"))

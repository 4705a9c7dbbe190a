"""Failures of user code are logged in full once, then counted; its output goes to a file."""

import logging

import pytest

from april.util.logs import Failures
from april.workers.rewards import sandbox
from april.workers.rewards.messages import RewardRules
from april.workers.rewards.pool import RewardPool
from tests.support.reward_scores import collect

OWN = """
def grade(response, label):
    print("graded", response)
    return {"a": 1.0}[label]
"""


def test_a_thousand_equal_failures_log_a_few_lines_and_one_traceback(caplog):
    failures = Failures(logging.getLogger("april.x"))
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            failures.note("scoring_failed", f"verifier 'my:grade': KeyError: '{number}'", f"sample {number} came back")
        failures.note("scoring_failed", "verifier 'my:grade': TypeError: no", "sample 7 came back")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "sample 0 came back, scoring_failed: verifier 'my:grade': KeyError: '0'"
    assert said[-1] == "sample 7 came back, scoring_failed: verifier 'my:grade': TypeError: no"
    assert said[-2].startswith("scoring_failed: 512 of this kind so far") and len(said) == 11
    assert failures.by_cause == {"scoring_failed": 1001} and "TypeError" in failures.last["scoring_failed"]


def test_what_an_interpreter_prints_at_its_start_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('good morning ' * 1000)\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    prints = tmp_path / "rewards.log"
    pool = RewardPool(1, RewardRules(), prints)
    pool.submit(0, "exact", "a", "a", "stop")
    scores = collect(pool, 1)
    pool.close()
    assert scores[0].reward == 1.0 and "good morning" in prints.read_text()


def test_what_an_interpreter_prints_at_its_start_is_no_output_of_a_program(tmp_path, monkeypatch):
    layers = sandbox.isolation_layers()
    noisy = tmp_path / "runner.py"
    noisy.write_text(
        f"print('good morning')\nimport runpy; runpy.run_path({str(sandbox.RUNNER)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(sandbox, "RUNNER", noisy)
    assert sandbox.run("print(1)", b"", sandbox.SandboxLimits()).output == b"1\n"
    assert sandbox.isolation_layers() == layers


@pytest.fixture
def own_verifier(tmp_path, monkeypatch):
    (tmp_path / "printing_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "printing_rewards:grade"


def test_a_verifier_s_output_goes_to_its_file_with_one_traceback_per_kind(own_verifier, tmp_path):
    prints = tmp_path / "rewards.log"
    pool = RewardPool(1, RewardRules(), prints)
    for key, label in enumerate("abc"):
        pool.submit(key, own_verifier, f"response {key}", label, "stop")
    scores = collect(pool, 3)
    pool.close()
    assert [scores[key].reward for key in range(3)] == [1.0, None, None]
    printed = prints.read_text()
    assert [f"graded response {key}" in printed for key in range(3)] == [True] * 3
    assert printed.count("Traceback") == 1 and "KeyError: 'b'" in printed
    assert "further errors of this kind are only counted" in printed

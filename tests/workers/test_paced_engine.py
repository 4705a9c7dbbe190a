"""The paced engine's steps last as its cost model says; the test controls the clock."""

import pytest

from april.config import ConfigError, load
from april.config.checks import check_engine
from april.config.costs import Pacing, pacing_of
from april.observe.report.facts import facts
from april.observe.report.run_folder import read_run
from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import V0, V1, drive, prompt
from april.workers.engines.embedded import paced
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.embedded.paced import PacedEngine

PACING = Pacing.model_validate(
    {"cost": {"decode_base_s": 1.0, "decode_running_s": 0.25, "decode_kv_s": 0.001, "prefill_s": 0.01}, "update_s": 7.0}
)
FACTOR = 2.0


class Clock:
    """A clock that advances only by sleeps and by what a test adds."""

    def __init__(self, monkeypatch):
        self.at = 100.0
        monkeypatch.setattr(paced.clock, "now", lambda: self.at)
        monkeypatch.setattr(paced.time, "sleep", self.pass_by)

    def pass_by(self, seconds: float):
        self.at += seconds


@pytest.fixture
def owned(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def engine(owned, tiny_model, tmp_path):
    engine = PacedEngine(tiny_model().folder, PACING, FACTOR, tmp_path / "paced/w0.json", slots=4)
    engine.load_weights(V0, tiny_model().weights())
    yield engine
    engine.close()


def test_steps_last_as_the_cost_model_says_and_tokens_are_the_torch_engine_s(engine, owned, tiny_model):
    requests = [Request(i, prompt(5, seed=i), 10 * (i + 1), seed=i) for i in range(2)]
    began = owned.at
    streams = drive(engine, requests)
    prefill = PACING.cost.context_s(2, 10)
    both = sum(PACING.cost.steps_s(1, 2, 2 * (5 + k)) for k in range(10))
    one = sum(PACING.cost.steps_s(1, 1, 15 + k) for k in range(10))
    assert owned.at - began == pytest.approx(FACTOR * (prefill + both + one))
    assert engine.pace.steps == 20 and engine.pace.late_steps == 0
    plain = TorchEngine(tiny_model().folder, slots=4)
    plain.load_weights(V0, tiny_model().weights())
    assert {i: s.tokens for i, s in drive(plain, requests).items()} == {i: s.tokens for i, s in streams.items()}


def test_the_worker_s_time_between_two_steps_counts_into_the_next_step(engine, owned):
    began = owned.at
    engine.submit(Request(0, prompt(5), 3))
    while engine.live:
        engine.step()
        owned.pass_by(0.5)
    least = PACING.cost.context_s(1, 5) + sum(PACING.cost.steps_s(1, 1, 5 + k) for k in range(3))
    assert owned.at - began == pytest.approx(FACTOR * least + 0.5) and engine.pace.late_steps == 0


def test_late_steps_are_counted_and_reported(engine, owned, monkeypatch, caplog):
    launch = TorchEngine._launch
    monkeypatch.setattr(TorchEngine, "_launch", lambda *args: owned.pass_by(5.0) or launch(*args))
    drive(engine, [Request(0, prompt(5), 4)])
    assert engine.pace.late_steps == 4 and engine.pace.late_s > 0
    engine.close()
    assert "4 of 4 paced steps" in caplog.text and "engine.pace_factor" in caplog.text


def test_a_weight_update_takes_its_time_and_recomputes_contexts(engine, owned, tiny_model):
    drive(engine, [Request(0, prompt(5), 8)], steps=4)
    began = owned.at
    engine.load_weights(V1, tiny_model(seed=1).weights())
    assert owned.at - began == pytest.approx(FACTOR * PACING.update_s)
    began = owned.at
    engine.step()
    expected = PACING.cost.context_s(1, 9) + PACING.cost.steps_s(1, 1, 9)
    assert owned.at - began == pytest.approx(FACTOR * expected)


def test_known_hardware_and_a_calibration_file_are_accepted_as_pace(tmp_path):
    assert pacing_of("h100").cost.decode_base_s == 5e-3 and pacing_of("mi300x").update_s == 0.5
    file = tmp_path / "cost.toml"
    cost = "decode_base_s = 1\ndecode_running_s = 0\ndecode_kv_s = 0\nprefill_s = 0"
    file.write_text(f"[cost]\n{cost}\n[weights]\npause_s = 3\n")
    assert pacing_of(str(file)).update_s == 3


REFUSED = {
    "a misspelt one": (["--worker.engine", "paced", "--engine.pace", "h1000"], "'engine.pace' = 'h1000'"),
    "none": (["--worker.engine", "paced"], "'engine.pace' is missing"),
    "a file that is not there": (["--worker.engine", "paced", "--engine.pace", "no.toml"], "no.toml does not exist"),
    "of an engine that cannot": (["--engine.pace", "h100"], "'engine.pace' = 'h100'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_pace_is_refused(config_file, case):
    words, why = REFUSED[case]
    with pytest.raises(ConfigError, match=why):
        check_engine(load(config_file, words))


@pytest.mark.full
def test_a_paced_run_is_marked_wherever_its_speed_is_shown(finish_run, run_dir):
    words = ["--worker.engine", "paced", "--engine.pace", "h100", "--learner.pace_token_s", "1e-5"]
    finish_run(*words, "--schedule.max_steps", "2")
    run = read_run(run_dir)
    assert run.summary["pace"] == "h100 x 1" and all(one["steps"] for one in run.pace)
    assert dict(facts(run))["paced, not measured"].startswith("as h100 x 1, ")

"""Alarms of a run: each is raised by its condition only, with a sentence, and again after a restart of the broker."""

from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from april import wire
from april.broker.alarms.alarm import ALARMS, Alarm, Alarms, check_alarms
from april.broker.alarms.engine_gap import EngineGapAlarm
from april.broker.telemetry.sinks import step_metrics
from april.config import ConfigError
from april.learner.diagnostics import is_repetitive
from april.observe.dashboard.steps import Steps
from april.observe.report.facts import alarms as reported
from april.observe.report.live import step_line
from april.observe.report.operations import render_live
from april.observe.report.run_folder import RunFolder
from tests.support.broker_conversation import metrics_lines as lines
from tests.support.broker_conversation import train

EMPTY = {"tokens": 40.0, "groups": 4.0, "trained_tokens": 0.0, "gradient_groups": 0.0}
HALF = EMPTY | {"trained_tokens": 20.0, "gradient_groups": 1.0}


@pytest.fixture
def talk(converse, monkeypatch):
    """A conversation whose disk always has 50 GiB of free space, whatever this machine has."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=50 << 30))
    return converse("--evaluation.prompts", "1", "--schedule.max_steps", "8")


def train_with(talk, worker, learner, *steps):
    """Train a step with each of these metrics of the learner, half of whose tokens have a gradient; returns the names
    of the alarms that each step raises."""
    for step, figures in enumerate(steps):
        train(talk, worker, learner, step, **HALF | figures)
    return [[alarm["name"] for alarm in line["alarms"]] for line in lines(talk)]


def test_three_steps_in_a_row_without_a_gradient_raise_an_alarm_that_says_what_to_do(talk, worker, learner):
    names = train_with(talk, worker, learner, EMPTY, EMPTY, HALF, EMPTY, EMPTY, EMPTY)
    assert names == [[], [], [], [], [], ["nothing_trained"]]
    [alarm] = lines(talk)[-1]["alarms"]
    assert alarm["sentence"].startswith("nothing was trained in the last 3 steps") and alarm["page"].endswith("badly")
    told = f"{alarm['sentence']} ({alarm['page']})"
    assert step_metrics(lines(talk)[-1])["alarms/nothing_trained"] == 1, "to every sink"
    assert told in reported(RunFolder(talk.config.run_dir, "", {}, lines(talk), {})), "in table and report"
    console = Console(width=1000, file=StringIO())
    console.print(render_live(talk.status()))
    assert told in console.file.getvalue(), "in `april status`"
    shown = Steps(talk.config.run_dir)
    shown.follow(60.0)
    assert shown.alarms == {6: [alarm]}, "in the dashboard"
    assert lines(talk)[2]["gradient"] == {"tokens": 0.5, "groups": 0.25}
    assert "gradient 50%" in step_line(lines(talk)[2], {})


def gap(worker, mean, tokens=200.0, age=0.0):
    figures = {"tokens": tokens, "mean": mean, "largest": 10 * mean, "age": age}
    return {f"engine_gap_{figure}_{worker}": value for figure, value in figures.items()}


def test_what_rounding_does_bounds_the_engine_gap_from_the_first_batch_on(talk, worker, learner):
    """Of two workers one is wrong from the start, and one a little, which adds up."""
    measured = {"canary_rounding": 0.02}
    steps = [gap("w0", 0.06), *[gap("w0", 0.012) | gap("my_w", 0.028)] * 4, gap("w0", 0.028) | gap("my_w", 0.01)]
    names = train_with(talk, worker, learner, *(measured | step for step in steps))
    assert names == [["engine_gap"], [], [], [], ["engine_gap"], []]
    assert "what my_w sampled" in lines(talk)[4]["alarms"][0]["sentence"]


def test_an_engine_that_rounds_more_than_the_learner_has_measured_raises_the_alarm_once(talk, worker, learner):
    steps = [{"canary_rounding": 0.02} | gap("w0", 0.1) for _ in range(6)]
    assert train_with(talk, worker, learner, *steps) == [["engine_gap"], *[[]] * 5]


def test_an_engine_gap_raises_an_alarm_that_names_the_worker(talk, worker, learner):
    steps = [
        gap("w0", 0.02) | gap("my_w", 0.01),
        gap("w0", 0.075) | gap("my_w", 0.01),
        gap("w0", 9.0, age=1.0) | gap("my_w", 9.0, tokens=99.0),
        gap("w0", 0.01) | gap("my_w", 0.09),
    ]
    assert train_with(talk, worker, learner, *steps) == [[], [], [], ["engine_gap"]]
    [alarm] = lines(talk)[-1]["alarms"]
    assert (
        "what my_w sampled" in alarm["sentence"]
        and "0.09 apart in the mean, 0.9 at most; up to 0.08" in alarm["sentence"]
    )
    assert lines(talk)[2]["engine_gaps"]["w0"] == {"step": 1, "age": 1, "tokens": 200, "mean": 9.0, "largest": 90.0}
    assert not [name for line in lines(talk) for name in line["learner"] if name.startswith("engine_gap")]
    assert talk.status()["workers"][0]["gap"]["mean"] == 0.01
    series = talk.metrics()
    assert series["april_alarms"] == {(name,): name == "engine_gap" for name in ALARMS.shipped}
    assert series["april_engine_gap_nats"]["my_w", "mean"] == 0.09 and series["april_engine_gap_age_steps"]["w0",] == 0


@pytest.mark.parametrize(("first", "second", "alarmed"), [(1e-6, 9e-5, []), (1e-6, 2e-4, [2]), (0.7, 0.7, [1, 2])])
def test_rounding_of_the_finest_type_is_no_alarm_and_more_than_that_of_the_coarsest_always_is(first, second, alarmed):
    alarm = EngineGapAlarm()
    said = [alarm.look({"engine_gaps": {"w": gap_of(mean)}}) for mean in (first, second)]
    assert [step for step, sentence in enumerate(said, start=1) if sentence] == alarmed


def gap_of(mean):
    return {"step": 0, "age": 0, "tokens": 100, "mean": mean, "largest": mean}


def test_what_takes_ten_times_as_long_as_usual_raises_an_alarm(talk, worker, learner):
    names = train_with(talk, worker, learner, *({"train_s": seconds} for seconds in (60.0, 2.0, 2.5, 26.0, 1.0)))
    assert names == [[], [], [], ["slow_part"], []]

    def status_when_it_has_been_there(seconds):
        learner.say(wire.Heartbeat(loop_position="a micro-batch", loop_elapsed_s=seconds, loop_usual_s=3.0))
        talk.tick(1.0)
        return talk.status()

    assert status_when_it_has_been_there(28.0)["alarms"] == []
    told = status_when_it_has_been_there(70.0)
    assert told["learner_loop"] == {"at": "a micro-batch", "for_s": 71.0, "usual_s": 3.0}
    [alarm] = told["alarms"]
    assert alarm["sentence"].startswith(f"{learner.name} has been at 'a micro-batch' for 71 s where 3 s are usual")
    assert status_when_it_has_been_there(0.0)["alarms"] == []


USUAL = {
    "reward": 0.5,
    "time": 0.0,
    "learner": {
        "k3": 0.004,
        "ess": 0.96,
        "weight_ess": 0.7,
        "entropy": 0.1,
        "looping_share": 0.0,
        "wait_s": 27.0,
        "train_s": 3.0,
    },
    "lengths": {"drift": {"distance": 0.09, "band": 0.1, "alarm": False}},
    "staleness": {"bound": 4, "tokens_by_age": {"0": 9000, "3": 90, "4": 300}},
    "slots": {"busy": 0.7, "slots": 64.0, "waiting": 300.0, "looks": 40},
    "gradient": {"tokens": 0.5},
    "engine_gaps": {"w0": {"age": 0, "tokens": 500, "mean": 0.01, "largest": 0.1}},
    "disk_free_bytes": 50 << 30,
}
CAUSES = {
    "nothing_trained": {"gradient": {"tokens": 0.0}},
    "slow_part": {"learner": {"train_s": 60.0}},
    "wrong_weights": {"learner": {"publish_wrong": 1.0}},
    "engine_gap": {"engine_gaps": {"w0": {"age": 0, "tokens": 500, "mean": 0.1, "largest": 0.5}}},
    "policy_gap": {"learner": {"k3": 0.2}},
    "effective_samples": {"learner": {"ess": 0.4, "weight_ess": 1.0}},
    "length_bias": {"lengths": {"drift": {"distance": 0.2, "band": 0.1, "alarm": True}}},
    "looping": {"learner": {"looping_share": 0.4}},
    "entropy_collapse": {"learner": {"entropy": 0.005}},
    "staleness_bound": {"staleness": {"bound": 4, "tokens_by_age": {"0": 100, "4": 100}}},
    "starved_engines": {"slots": {"busy": 0.1, "slots": 64.0, "waiting": 0.0}},
    "saturated_engines": {"slots": {"busy": 1.0, "slots": 8.0, "waiting": 300.0}},
    "disk_filling": {"disk_free_bytes": 1 << 30},
}


def sentences(names, records):
    """What alarms say to each record, those of a row only at its end."""
    alarms = Alarms(names)
    return ["".join(alarm["sentence"] for alarm in alarms.look(record)) for record in records]


@pytest.mark.parametrize("name", ALARMS.shipped)
def test_a_cause_that_lasts_raises_its_alarm_and_what_is_usual_does_not(name):
    alarm = ALARMS.find(name)
    cause = {key: USUAL[key] | value if isinstance(value, dict) else value for key, value in CAUSES[name].items()}
    said = sentences([name], [USUAL] * 4 + [USUAL | cause] * 3 + [USUAL, USUAL | cause])
    assert not any(said[:4]) and said[6] and not said[7], "said while it lasts, no longer"
    assert bool(said[8]) == (alarm.steps_in_a_row == 1), "what may be chance is counted anew"
    assert "\n" not in said[6] and {":", ";"} & set(said[6])
    assert alarm.page.startswith("docs/") and alarm.__doc__.startswith("Raised when "), "for the reference"
    assert alarm().look({"reward": 0.5, "time": 0.0}) == "", "of a trainer that reports no figures"


@pytest.mark.parametrize("name", ["starved_engines", "saturated_engines"])
def test_steps_too_short_for_a_mean_say_nothing_of_the_engines(name):
    seen_twice = {"slots": USUAL["slots"] | CAUSES[name]["slots"] | {"looks": 2}}
    assert not any(sentences([name], [USUAL | seen_twice] * 5))


def test_corrections_that_leave_little_of_a_batch_raise_the_alarm_as_ratios_do():
    said = sentences(["effective_samples"], [USUAL | {"learner": {"ess": 0.97, "weight_ess": 0.2}}] * 3)
    assert said[:2] == ["", ""] and "count as 20% of what is trained (weight_ess, 25% and more are usual)" in said[2]


def test_no_entropy_alarm_while_the_reward_rises():
    records = [USUAL] * 3 + [USUAL | {"reward": 0.9, "learner": {"entropy": 0.001}}] * 5
    assert not any(sentences(["entropy_collapse"], records))


def test_a_disk_that_fills_within_the_hour_raises_the_alarm_before_it_is_full():
    records = [{"time": 30.0 * step, "disk_free_bytes": (40 - step) << 30} for step in range(4)]
    said = sentences(["disk_filling"], records)
    assert [bool(sentence) for sentence in said] == [False, False, True, True] and "is full in 19 minutes" in said[2]


def test_a_loop_is_the_same_end_again_and_again_and_no_repeated_word():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, 600).astype(np.int32)
    for period in (1, 7, 100):
        ended = np.concatenate([text, np.tile(text[:period], 400 // period + 1)])
        assert is_repetitive(ended), period
        assert not is_repetitive(np.append(ended, text[300:400])), "it has got out again"
    assert (
        not is_repetitive(text)
        and not is_repetitive(np.full(20, 3, np.int32))
        and not is_repetitive(np.append(text, text[:40]))
    )


def test_slots_staleness_and_disk_space_are_in_the_record_of_a_step(talk, worker, learner, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    talk.tick(1.0)
    train(talk, worker, learner, 0)
    [line] = lines(talk)
    assert [alarm["name"] for alarm in line["alarms"]] == ["disk_filling"]
    assert line["staleness"]["bound"] == talk.config.schedule.max_staleness
    assert 0 < line["slots"]["slots"] <= 10 - talk.config.worker.prefetch and line["slots"]["busy"] > 0


class Breaks(Alarm):
    def look(self, record):
        raise KeyError("rewards")


class Misspelt(Alarm):
    def loook(self, record):
        return "never asked"


def test_an_alarm_that_looks_at_nothing_is_refused_and_shipped_ones_left_out_are_named():
    with pytest.raises(ConfigError, match="method look nor watch"):
        check_alarms(["tests.broker.test_alarms:Misspelt"])
    assert check_alarms(list(ALARMS.shipped)) == ""
    assert check_alarms([name for name in ALARMS.shipped if name != "looping"]).startswith("without looping; name")


def test_an_alarm_that_raises_is_named_in_the_status_from_then_on(monkeypatch, converse):
    monkeypatch.setitem(ALARMS.shipped, "breaks", f"{__name__}:Breaks")
    talk = converse("--operations.alarms", '["breaks", "nothing_trained"]', "--evaluation.prompts", "1")
    alarms = talk.service.recorder.alarms
    assert alarms.look({"step": 0, "reward": 1.0}) == [] and alarms.names == ["nothing_trained"]
    alarms.watch([])
    [said] = talk.status()["alarms"]
    assert said["name"] == "breaks" and said["page"] == "docs/extending.md#an-alarm"
    assert said["sentence"].startswith("the alarm breaks has failed (KeyError: 'rewards'), and is left out")

"""What is drawn of many spans and many lengths is still true."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.observe.dashboard import run_page
from april.observe.dashboard.run_page import held_out_curves, length_density, timeline_window
from april.observe.dashboard.steps import Steps
from april.observe.report.facts import accuracy, facts
from april.observe.report.run_folder import RunFolder, read_run
from april.observe.report.timeline import (
    PAUSE_S,
    activity_shares,
    add_idle_spans,
    busy_share,
    intersect,
    merge_spans,
    subtract,
    thin_out,
    timeline_of,
    whole_timeline,
    worker_tracks,
)
from tests.support.synthetic_run import write_run

TIMES = st.floats(0, 100, allow_nan=False)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(sorted).map(tuple), max_size=30)


@given(SPANS, st.floats(0, 20))
def test_merged_spans_cover_the_spans_and_are_apart(spans, gap_s):
    merged = merge_spans(spans, gap_s)
    assert all(any(a <= start and end <= b for a, b in merged) for start, end in spans)
    assert all(later[0] - earlier[1] >= gap_s for earlier, later in pairwise(merged))


@given(SPANS, st.integers(1, 50))
def test_busy_shares_add_up_to_the_time_in_spans(spans, intervals):
    disjoint = merge_spans(spans, 0)
    edges_s = np.linspace(0, 100, intervals + 1)
    shares = busy_share(disjoint, edges_s)
    assert (shares >= -1e-9).all() and (shares <= 1 + 1e-9).all()
    assert shares.sum() * 100 / intervals == pytest.approx(sum(end - start for start, end in disjoint), abs=1e-6)


def test_thinned_instants_keep_the_first_and_the_distance():
    assert thin_out([3.0, 0.0, 0.4, 1.0, 1.2], 1.0) == [0.0, 1.0, 3.0]


def test_a_worker_outside_the_window_keeps_its_row_in_natural_order():
    entries = [{"worker": f"worker-{k}", "kind": "generate", "start": k, "end": k + 1} for k in (10, 2, 1)]
    tracks = worker_tracks(entries, 9.5, 20.0, 100)
    assert [track.worker for track in tracks] == ["worker-1", "worker-2", "worker-10"]
    assert [track.spans for track in tracks] == [{}, {}, {"generate": [(10, 11)]}]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_length_density_integrates_to_one(lengths):
    histogram: dict[int, int] = {}
    for length in lengths:
        index = math.floor(4 * math.log2(length) + 1e-9)
        histogram[index] = histogram.get(index, 0) + 1
    edges, density = length_density(histogram)
    assert (density * np.diff(np.log2(edges))).sum() == pytest.approx(1.0)
    assert edges[0] == 1 and edges[-1] > max(lengths)


def test_equally_likely_lengths_are_drawn_without_steps_from_rounding():
    """Of lengths with probability 1/k, every doubling holds the same share, whatever whole numbers a bin has."""
    weights = {k: math.log2((k + 1) / k) for k in range(1, 1024)}
    histogram: dict[int, float] = {}
    for length, weight in weights.items():
        index = math.floor(4 * math.log2(length) + 1e-9)
        histogram[index] = histogram.get(index, 0) + weight
    _, density = length_density(histogram)
    assert density == pytest.approx(np.full(len(density), 0.1))


def test_what_steps_keep_in_memory_is_enough_for_the_facts_of_a_run(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=4)
    lines = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    for line in lines:
        if "groups" in line:
            gap = {"age": 0, "mean": 0.01 * (4 - line["step"]), "largest": 0.1 * line["step"]}
            line["engine_gaps"] = {"worker-0": gap, "worker-1": gap | {"age": 1}}
            line["alarms"] = [{"name": "looping", "sentence": f"in step {line['step']}", "page": "docs/watching.md"}]
            line["staleness"]["tokens_by_age"] |= {"7": 5, "9": None, "11": 6}
            line["learner"] |= {f"reward_source_{line['step'] % 2}": line["step"] / 8}
    (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    run, steps = read_run(run_dir), Steps(run_dir)
    steps.follow()
    assert facts(RunFolder(run.path, run.config_text, run.config, steps.records(), run.summary)) == facts(run)
    assert dict(facts(run))["reward of source 1, first → last 3"] == "0.125 → 0.250"
    assert (
        "learner and engine apart" in dict(facts(run))
        and steps.columns["staleness.tokens_by_age.6"].tolist() == [11] * 4
    )
    assert sum(steps.histogram("lengths.created_histogram").values()) == 4 * 256
    assert not any("histogram" in name for name in steps.figure_names)


def test_figures_of_many_sources_take_no_room_from_those_of_the_run(tmp_path, caplog):
    of_sources = {f"entropy_source_{number}": 0.5 for number in range(300)}
    record = {"step": 1, "learner": of_sources | {"train_s": 2.0}}
    (tmp_path / "metrics.jsonl").write_bytes(orjson.dumps(record) + b"\n")
    steps = Steps(tmp_path)
    steps.follow()
    assert steps.columns["learner.train_s"].tolist() == [2.0] and len(steps.columns) == 2 + 256
    assert [found.getMessage().count("learner.entropy_source_256") for found in caplog.records] == [1]


def test_a_window_s_first_workers_are_drawn_and_all_are_counted(tmp_path):
    steps = Steps(write_run(tmp_path / "demo", steps=20, workers=5))
    steps.follow()
    shown = timeline_window(steps, max_workers=2)
    assert [lane["worker"] for lane in shown["lanes"]] == ["worker-0", "worker-1"] and shown["workers"] == 5
    assert [step for _, step in shown["steps"]][-1] == 20
    assert all(lane["spans"]["generate"] and lane["spans"]["wait-learner"] for lane in shown["lanes"])
    learner = shown["learner"]["spans"]
    assert learner["train"] and learner["wait-others"], "who waits for whom is said of the learner too"


def test_of_many_steps_a_lane_has_the_shares_of_the_whole_window_without_holes(tmp_path, monkeypatch):
    steps = Steps(write_run(tmp_path / "demo", steps=40, workers=2))
    steps.follow()
    window_s = [steps.table(["time"])["time"][row] for row in (22, 39)]  # after the run was resumed
    spans = timeline_window(steps, *window_s)
    monkeypatch.setattr(run_page, "MAX_LINES", 10)
    shown = timeline_window(steps, *window_s)
    assert [shown["begin"], shown["end"]] == [spans["begin"], spans["end"]] == window_s
    for lane, whole in zip([shown["learner"], *shown["lanes"]], [spans["learner"], *spans["lanes"]], strict=True):
        by_column = sum(lane["shares"].values())
        assert (by_column > 0.9).all() and (by_column < 1 + 1e-6).all()
        longest = max(whole["spans"], key=lambda kind: length(whole["spans"][kind]))
        share = length(whole["spans"][longest]) / (window_s[1] - window_s[0])
        assert lane["shares"][longest].mean() == pytest.approx(share, abs=0.1)


@given(SPANS, SPANS)
def test_what_two_rows_of_spans_share_and_what_is_left_make_up_the_first(spans, others):
    spans, others = merge_spans(spans, 0), merge_spans(others, 0)
    shared, left = intersect(spans, others), subtract(spans, others)
    assert length(shared) + length(left) == pytest.approx(length(spans))
    assert not length(intersect(left, others)) and length(intersect(shared, others)) == pytest.approx(length(shared))


def length(spans) -> float:
    return sum(end - start for start, end in spans)


def span(worker: str, kind: str, start: float, end: float) -> dict:
    return {"worker": worker, "kind": kind, "start": start, "end": end}


def test_an_idle_worker_waits_for_others_then_for_the_learner_then_for_weights():
    entries = [
        span("a", "generate", 0, 4), span("b", "generate", 0, 6), span("a", "weights", 9, 10),
        span("a", "joined", 0, 0),
        span("b", "weights", 9, 9.5), span("b", "joined", 0, 0), span("a", "generate", 11, 12),
        span("b", "lost", 9.5, 9.5),
    ]  # fmt: skip
    a, b = tracks = worker_tracks(entries, 0, 12, math.inf)
    add_idle_spans(tracks, [(6.5, 8)], 0, 12)
    assert a.spans["wait-others"] == [(4, 6)] and b.spans["wait-others"] == [], "one that is lost waits for nothing"
    assert a.spans["wait-learner"] == b.spans["wait-learner"] == [(6.5, 8)]
    assert a.spans["wait-weights"] == [(8, 9)]
    assert a.spans["wait-else"] == [(6, 6.5), (10, 11)]


def write_resume(folder: Path, **line) -> Path:
    folder.joinpath("resumes.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    return folder


def test_hours_between_two_starts_are_not_on_the_axis_and_the_change_is_said(tmp_path):
    write_resume(tmp_path, time=7000.0, step=1, changed=["evaluation.prompts: 8 -> 4"])
    records = [
        {"step": 1, "time": 5.0, "timeline": [span("a", "generate", 0, 4)]},
        {"step": 2, "time": 7208.0, "timeline": [span("a", "generate", 7201, 7207)]},
    ]
    run = RunFolder(tmp_path, "", {}, records, {})
    timeline = timeline_of(run)
    assert timeline.pauses == [(5.0, 7196.0)]
    assert timeline.steps == [(1, 5.0), (2, pytest.approx(12.0 + PAUSE_S))]
    said = activity_shares(timeline.tracks())
    assert "wait" not in said.replace("waits", "") and "generating" in said
    assert whole_timeline(run)["pauses"] == timeline.pauses
    assert dict(facts(run))["resumed"] == "after step 1 with evaluation.prompts: 8 -> 4"


def test_accuracies_on_other_prompts_are_neither_joined_nor_compared(tmp_path):
    points = [{"step": step, "accuracy": step / 10, "prompts": 8 if step < 3 else 4} for step in range(5)]
    run = RunFolder(tmp_path, "", {}, [{"step": step, "reward": 0.5} for step in (1, 2)], {"evaluation": points})
    assert [[point["step"] for point in points] for points in run.evaluation_sets] == [[0, 1, 2], [3, 4]]
    assert accuracy(run) == "0.300 → 0.400 (steps 3 → 4, 4 prompts)"
    assert [(curve["label"], curve["steps"]) for curve in held_out_curves(run)] == [
        ("held-out", [0, 1, 2]),
        ("held-out, set 2", [3, 4]),
    ]
    resumed = RunFolder(
        write_resume(tmp_path, time=0.0, step=1, changed=["data.eval_path: a -> b"]), "", {}, [], run.summary
    )
    assert [len(points) for points in resumed.evaluation_sets] == [2, 1, 2]

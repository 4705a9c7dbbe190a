"""What is drawn of many spans and many lengths is still true."""

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.observe.report.drawing import new_figure, to_svg
from april.observe.report.facts import accuracy, facts
from april.observe.report.learner_pictures import corrections_picture, learner_picture, version_dots
from april.observe.report.pictures import length_density, reward_picture
from april.observe.report.run_folder import RunFolder
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
    worker_tracks,
)

TIMES = st.floats(0, 100, allow_nan=False)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(sorted).map(tuple), max_size=30)


def run_with(histogram: dict) -> RunFolder:
    return RunFolder(Path("demo"), "", {}, [{"step": 1, "lengths": {"trained_histogram": histogram}}], {})


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


def test_coordinates_are_shortened_and_what_is_read_is_not():
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure, (axes,) = new_figure(2.0)
        axes.plot([0.9, 0.91], [0, 1])
        axes.set_xticks([0.900, 0.905, 0.910], ["0.900", "0.905", "0.910"])
        svg = to_svg(figure, "ticks")
    assert all(f">{label}</text>" in svg for label in ("0.900", "0.905", "0.910"))
    assert not re.search(r"<[^>]*\d\.\d{3}[^>]*>", svg)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_length_density_integrates_to_one(lengths):
    histogram: dict[str, int] = {}
    for length in lengths:
        index = str(math.floor(4 * math.log2(length) + 1e-9))
        histogram[index] = histogram.get(index, 0) + 1
    edges, density = length_density(run_with(histogram), "trained_histogram")
    assert (density * np.diff(np.log2(edges))).sum() == pytest.approx(1.0)
    assert edges[0] == 1 and edges[-1] > max(lengths)


def test_equally_likely_lengths_are_drawn_without_steps_from_rounding():
    """Of lengths with probability 1/k, every doubling holds the same share, whatever whole numbers a bin has."""
    weights = {k: math.log2((k + 1) / k) for k in range(1, 1024)}
    histogram: dict[str, float] = {}
    for length, weight in weights.items():
        index = str(math.floor(4 * math.log2(length) + 1e-9))
        histogram[index] = histogram.get(index, 0) + weight
    _, density = length_density(run_with(histogram), "trained_histogram")
    assert density == pytest.approx(np.full(len(density), 0.1))


def test_a_dot_for_every_version_that_has_sampled_a_part_of_a_batch():
    shares = {"version_share_3": 0.75, "version_share_1": 0.25, "version_share_older": 0.0, "ess": 0.9}
    records = [{"step": 3, "learner": shares}, {"step": 4, "learner": {"loss": 0.1}}, {"step": 5}]
    run = RunFolder(Path("demo"), "", {}, records, {})
    assert version_dots(run).tolist() == [[3, 3, 0.75], [3, 1, 0.25]]
    picture = corrections_picture(run)
    assert "effective: ratios" in picture and "effective: weights" not in picture
    assert corrections_picture(RunFolder(Path("demo"), "", {}, records[1:], {})) is None


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
        {"step": 1, "time": 5.0, "lanes": [span("a", "generate", 0, 4)]},
        {"step": 2, "time": 7208.0, "lanes": [span("a", "generate", 7201, 7207)]},
    ]
    run = RunFolder(tmp_path, "", {}, records, {})
    timeline = timeline_of(run)
    assert timeline.pauses == [(5.0, 7196.0)]
    assert timeline.steps == [(1, 5.0), (2, pytest.approx(12.0 + PAUSE_S))]
    assert "wait" not in activity_shares(run).replace("waits", "") and "generating" in activity_shares(run)
    assert dict(facts(run))["resumed"] == "after step 1 with evaluation.prompts: 8 -> 4"


def test_accuracies_on_other_prompts_are_neither_joined_nor_compared(tmp_path):
    points = [{"step": step, "accuracy": step / 10, "prompts": 8 if step < 3 else 4} for step in range(5)]
    run = RunFolder(tmp_path, "", {}, [{"step": step, "reward": 0.5} for step in (1, 2)], {"evaluation": points})
    assert [[point["step"] for point in points] for points in run.evaluation_sets] == [[0, 1, 2], [3, 4]]
    assert accuracy(run) == "0.300 → 0.400 (steps 3 → 4, 4 prompts)"
    assert "held-out accuracy, set 2" in reward_picture(run)
    resumed = RunFolder(
        write_resume(tmp_path, time=0.0, step=1, changed=["data.eval_path: a -> b"]), "", {}, [], run.summary
    )
    assert [len(points) for points in resumed.evaluation_sets] == [2, 1, 2]


def test_a_curve_has_one_name_however_many_steps_it_has(tmp_path):
    for steps in (30, 90, 900):
        learner = [{"loss": 0.1, "ess": 1.0, f"version_share_{step}": 1.0} for step in range(steps)]
        run = RunFolder(tmp_path, "", {}, [{"step": k + 1, "learner": one} for k, one in enumerate(learner)], {})
        assert corrections_picture(run).count("effective: ratios") == 1
        assert "loss" in learner_picture(run)

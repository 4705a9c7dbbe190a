"""What is drawn of many spans and many lengths is still true."""

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.report.corrections import corrections_picture, version_dots
from april.report.drawing import new_figure, to_svg
from april.report.lanes import busy_share, make_lanes, merge_spans, thin
from april.report.pictures import length_density
from april.report.run_folder import Run

TIMES = st.floats(0, 100, allow_nan=False)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(sorted).map(tuple), max_size=30)


def run_with(histogram: dict) -> Run:
    return Run(Path("demo"), "", {}, [{"step": 1, "lengths": {"trained_histogram": histogram}}], {})


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
    assert thin([3.0, 0.0, 0.4, 1.0, 1.2], 1.0) == [0.0, 1.0, 3.0]


def test_a_worker_outside_the_window_keeps_its_row_in_natural_order():
    entries = [{"worker": f"worker-{k}", "kind": "generate", "start": k, "end": k + 1} for k in (10, 2, 1)]
    lanes = make_lanes(entries, 9.5, 20.0, 100)
    assert [lane.worker for lane in lanes] == ["worker-1", "worker-2", "worker-10"]
    assert [lane.spans for lane in lanes] == [{}, {}, {"generate": [(10, 11)]}]


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
    run = Run(Path("demo"), "", {}, records, {})
    assert version_dots(run).tolist() == [[3, 3, 0.75], [3, 1, 0.25]]
    picture = corrections_picture(run)
    assert "effective: ratios" in picture and "effective: weights" not in picture
    assert corrections_picture(Run(Path("demo"), "", {}, records[1:], {})) is None

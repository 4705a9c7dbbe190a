"""Samplers of prompts: a draw is a function of the seed and of the journal, and no prompt is forgotten."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.broker.journal.snapshot import freeze, thaw
from april.broker.ledger.events import GroupOpened
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.row_tallies import RowTallies
from april.broker.ledger.rules import Rules
from april.broker.samplers.draws import SampledOrder, SamplerFailed, check_sampler
from april.broker.samplers.samplers import difficulty, spread
from april.config import ConfigError, ScheduleSection
from april.data.dataset import epoch_order
from april.wire.message import Version

ROWS, FLOOR = 12, 0.1
UNUSABLE = 5
RULES = Rules(batch_groups=2, group_size=2, max_staleness=10**6)


class SmallPrompts:
    """Prompts without text, of which one cannot be used."""

    def __init__(self, sampler, floor=FLOOR, rows=ROWS):
        self.order = lambda epoch: epoch_order(rows, 3, epoch, shuffle=True)
        section = ScheduleSection(sampler=sampler, sampler_floor=floor)
        self.draws = SampledOrder(section, rows, self.order, lambda row: row != UNUSABLE)

    def draw(self, cursor):
        return *cursor, b""

    def bind(self, ledger):
        ledger.prompt_order = self.draws
        return ledger


def urgent_position(rows, order, floor):
    """By definition: among the rows of an epoch, one that was never drawn, or else the largest weight times age; of
    several, the first in the epoch's order."""

    def urgency(row):
        weight = max(4 * rows.accuracy[row] * (1 - rows.accuracy[row]), floor) if rows.known[row] else 1.0
        return float("inf") if rows.last[row] < 0 else weight * (rows.draws - rows.last[row])

    usable = [position for position, row in enumerate(order) if row != UNUSABLE]
    return max(usable, key=lambda position: (urgency(order[position]), -position))


class Run:
    """A ledger whose groups are opened by a sampler, and may be completed or discarded in any order."""

    def __init__(self, sampler):
        self.sampler, self.log = sampler, []
        self.start(Ledger(RULES))

    def start(self, ledger):
        self.prompts = SmallPrompts(self.sampler)
        self.ledger = self.prompts.bind(ledger)
        ledger.write = lambda event, arrays: self.log.append(event)

    def restart(self, by_snapshot):
        again = Ledger(RULES)
        if by_snapshot:
            thaw(freeze(self.ledger), again)
        else:
            for event in self.log:
                again.apply(event)
        self.start(again)

    def open(self):
        epoch, row, _ = self.ledger.next_prompt(self.prompts)
        return self.ledger.open_group(epoch, row, 0)

    def complete(self, group, rewards):
        for sample, reward in zip(group.samples, rewards, strict=True):
            lease = self.ledger.lease(sample, "w", 0, 1e9)
            self.ledger.add_chunk(lease.id, 0, 1, Version(0, 0), "stop", b"\0" * 8)
            self.ledger.score(lease.id, reward)

    def rows(self):
        return [event.number for event in self.log if isinstance(event, GroupOpened)]


STEPS = st.lists(
    st.one_of(
        st.just(("open",)),
        st.tuples(st.just("complete"), st.integers(0, 99), st.tuples(st.sampled_from((0.0, 1.0)), st.floats(0, 1))),
        st.tuples(st.just("discard"), st.integers(0, 99)),
    ),
    min_size=20,
    max_size=60,
)


def play(run, steps, restarts):
    """Do the steps, with restarts before those of these numbers, from a snapshot or from the journal."""
    for number, (what, *rest) in enumerate(steps):
        if number in restarts:
            run.restart(restarts[number])
        waiting = run.ledger.open_groups()
        if what == "open" or not waiting:
            run.open()
        elif what == "complete":
            run.complete(waiting[rest[0] % len(waiting)], rest[1])
        else:
            run.ledger.discard(waiting[rest[0] % len(waiting)], "aborted")
    return run.rows()


@pytest.mark.full
@pytest.mark.parametrize("sampler", ["difficulty", "spread"])
@given(steps=STEPS, restarts=st.dictionaries(st.integers(0, 59), st.booleans(), min_size=1, max_size=4))
def test_with_restarts_from_journal_or_snapshot_the_same_prompts_are_drawn(sampler, steps, restarts):
    assert play(Run(sampler), steps, restarts) == play(Run(sampler), steps, {})


def test_first_each_prompt_is_drawn_once_in_the_seeded_order_and_one_that_cannot_be_used_never():
    run = Run("difficulty")
    for _ in range(ROWS - 1):
        run.open()
    assert run.rows() == [row for row in run.prompts.order(0).tolist() if row != UNUSABLE]
    for _ in range(3 * ROWS):
        run.open()
    assert UNUSABLE not in run.rows()
    assert run.ledger.prompts.next[0] == 3, "an epoch has as many draws as the dataset has rows"


@pytest.mark.parametrize("sampler", ["difficulty", "spread"])
def test_hopeless_prompts_are_drawn_seldom_and_none_is_forgotten(sampler):
    """Half of the prompts are never solved, the others half of the time."""
    run, last = Run(sampler), {}
    for count in range(400):
        group = run.open()
        run.complete(group, (0.0, float(group.number % 2)))
        assert count - last.get(group.number, count) <= ROWS / FLOOR
        last[group.number] = count
    late = run.rows()[100:]
    hopeless = sum(row % 2 == 0 for row in late) / len(late)
    assert set(late) == set(range(ROWS)) - {UNUSABLE}
    assert FLOOR / 2 < hopeless < 2 * FLOOR


@settings(max_examples=30)
@given(data=st.data())
def test_the_prompt_of_the_largest_weight_times_age_is_drawn_also_where_an_epoch_has_rows_twice_or_not_at_all(data):
    order = data.draw(st.lists(st.integers(0, ROWS - 1), min_size=4).filter(lambda rows: {*rows} != {UNUSABLE}))
    rows, section = RowTallies(), ScheduleSection(sampler="difficulty", sampler_floor=FLOOR)
    draws = SampledOrder(section, ROWS, lambda epoch: np.array(order), lambda row: row != UNUSABLE)
    for _ in range(2 * ROWS):
        _, position = draws.choose(rows, (0, 0))
        assert position == urgent_position(rows.first(ROWS), order, FLOOR)
        rows.draw(order[position])
        if accuracies := data.draw(st.lists(st.sampled_from((0.0, 1.0)), max_size=2)):
            rows.complete(order[position], accuracies, accuracies)


def test_a_prompt_that_cannot_be_used_any_more_is_left_for_another_of_the_same_epoch():
    usable = {0, 1, 2}
    section = ScheduleSection(sampler="difficulty", sampler_floor=FLOOR)
    draws, rows = SampledOrder(section, 3, lambda epoch: np.array([2, 0, 1]), usable.__contains__), RowTallies()
    assert draws.choose(rows, (0, 0)) == (0, 0)
    usable.remove(2)
    assert draws.choose(rows, (0, 0)) == (0, 1)


def tallies(accuracies, spreads):
    rows = RowTallies()
    for row in range(len(accuracies)):
        rows.draw(row)
    rows.accuracy[: len(accuracies)], rows.spread[: len(spreads)] = accuracies, spreads
    return rows.first(len(accuracies))


def test_the_weights_are_the_variance_of_success_and_the_share_of_the_largest_spread():
    rows = tallies([0.0, 0.25, 0.5, 1.0], [0.0, 1.0, 4.0, 2.0])
    assert difficulty(rows).tolist() == [0.0, 0.75, 1.0, 0.0]
    assert spread(rows).tolist() == [0.0, 0.25, 1.0, 0.5]
    assert spread(tallies([0.0], [0.0])).tolist() == [1.0]


def test_a_result_counts_as_much_as_all_before_it():
    rows = RowTallies()
    for accuracies in ([1.0, 1.0], [0.0, 1.0], [0.0, 0.0]):
        rows.complete(3, accuracies, accuracies)
    assert (rows.known[3], rows.results) == (3, 3)
    assert rows.accuracy[3] == ((1.0 + 0.5) / 2 + 0.0) / 2 and rows.spread[3] == 0.125


def test_a_sampler_of_one_s_own_that_cannot_work_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "samplers_of_mine.py").write_text(
        "import numpy as np\n"
        "def good(rows, *, least: float = 0.5): return np.maximum(rows.accuracy, least)\n"
        "def few(rows): return np.ones(1)\n"
        "def negative(rows): return -np.ones(len(rows.last))\n"
        "def fails(rows): return 1 / 0\n"
        "def writes(rows): rows.accuracy[:] = 1.0; return rows.accuracy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_sampler(ScheduleSection(sampler="samplers_of_mine:good"), submitted=False)
    bad = {"few": "did not return 3 weights", "negative": "from 0 to 1", "fails": "ZeroDivision", "writes": "read-only"}
    for name, why in bad.items():
        with pytest.raises(SamplerFailed, match=why):
            check_sampler(ScheduleSection(sampler=f"samplers_of_mine:{name}"), submitted=False)
    with pytest.raises(ConfigError, match=r"'schedule.sampler' = 'spread'"):
        check_sampler(ScheduleSection(sampler="spread"), submitted=True)

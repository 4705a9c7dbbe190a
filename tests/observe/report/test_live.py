"""The live view: plain lines where nobody can redraw, a panel on a terminal."""

import io

from rich.console import Console

from april.observe.report.live import LiveView, sparkline, step_line

STATUS = {
    "run": "demo", "state": "running", "step": 3, "max_steps": 24, "round": 4, "groups_complete": 12,
    "groups_needed": 32, "partials_waiting": 88, "leased": 120, "phase": "generating", "elapsed_s": 65.0, "eta_s": 41.2,
    "reward": 0.6, "rollout_tokens_per_s": 16_780.0, "staleness": {"mean": 0.4, "max": 1}, "tokens": {},
    "workers": [{"name": "worker-0", "version": "0.3", "slots": 64, "leased": 60, "tokens_per_s": 8390.0}],
}  # fmt: skip
METRICS = {
    "step": 3, "reward": 0.612, "rollout_tokens_per_s": 16_780.0, "staleness": {"mean": 0.4, "max": 1},
    "round": {"partials_waiting": 90},
}  # fmt: skip


def test_a_pipe_gets_one_line_a_step_and_the_notes():
    out = io.StringIO()
    with LiveView(Console(file=out, width=20)) as view:
        view.note("worker-1 [lost]")
        view.update(STATUS)
        view.step(METRICS)
    assert out.getvalue().splitlines() == [
        "worker-1 [lost]",
        "step 3/24  reward 0.612  16.8k tok/s  staleness 0.4/1  partials 90  ETA 41s",
    ]


def test_steps_that_a_resumed_run_trains_again_are_announced_once():
    out = io.StringIO()
    with LiveView(Console(file=out)) as view:
        for phase in ("generating", "generating, training again, up to step 8", "training again, up to step 8"):
            view.update(STATUS | {"phase": phase})
    assert "trained again up to step 8" in out.getvalue() and out.getvalue().count("\n") == 1


def test_a_step_before_any_status_leaves_out_what_is_unknown():
    assert step_line({"step": 1}, {}) == "step 1"
    assert step_line({"step": 1, "reward": None, "staleness": None, "round": None}, {"eta_s": None}) == "step 1"


def test_a_step_says_how_many_of_its_responses_count_where_some_are_stale():
    of = [step_line(METRICS | {"learner": {"sequence_ess": share}}, {}) for share in (0.77, 1.0)]
    assert of[0] == step_line(METRICS, {}) + "  effective 77%" and of[1] == step_line(METRICS, {})


def test_failures_are_a_count_in_the_step_line_and_in_the_panel():
    last = "verifier 'my:grade': TypeError: unsupported operand"
    status = STATUS | {"failures": {"scoring_failed": {"count": 212, "last": last}}}
    assert "  scoring: 212 failed, TypeError  " in step_line(METRICS, status)
    out = io.StringIO()
    view = LiveView(Console(file=out, width=100))
    view.update(status)
    view.console.print(view.panel())
    assert "scoring: 212 failed, TypeError" in out.getvalue()


def test_a_terminal_gets_the_panel():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with LiveView(console) as view:
        view.update(STATUS)
        view.step(METRICS)
        view.note("worker-1 [lost]")
    text = out.getvalue()
    shown = ("3/24", "generating", "12 of 32", "88 waiting", "ETA 41s", "worker-0", "60/64 slots", "worker-1 [lost]")
    assert all(each in text for each in shown)


def test_an_empty_or_null_status_still_draws():
    for status in ({}, dict.fromkeys(STATUS)):
        view = LiveView(Console(file=io.StringIO(), width=80))
        view.update(status)
        view.console.print(view.panel())


def test_sparkline_spans_its_values():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▄▄"
    assert sparkline([]) == ""

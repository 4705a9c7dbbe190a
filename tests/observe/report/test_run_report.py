"""A run folder is read leniently where unfinished, strictly where wrong; table and report state it truly."""

import io
import re
from types import SimpleNamespace

import orjson
import pytest
from rich.console import Console

from april.cli import main
from april.cli.command import wide_console
from april.config import ConfigError
from april.launch.preflight import mark_ended
from april.observe.dashboard.report import write_report
from april.observe.report.facts import facts, token_totals
from april.observe.report.operations import render_status
from april.observe.report.run_folder import read_run, records_from
from april.simulate.sweep import Sweep, sweep_picture, write_picture
from tests.support.synthetic_run import write_run


def rendered(run_dir) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_status(read_run(run_dir)))
    return console.export_text()


def rewrite_summary(run_dir, **changes) -> None:
    path = run_dir / "summary.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes))


def answers(run_dir):
    """The dashboard's answers that the run's report carries, by path."""
    (carried,) = re.findall(
        r'<script type="application/json" id="answers">(.*?)</script>', write_report(run_dir).read_text()
    )
    return orjson.loads(carried)


HOSTILE_NAME = r"[/] [red]x $\frac$ \frac{ :smile: $"


def test_names_are_printed_and_drawn_as_text(tmp_path, capsys):
    """Names that look like markup of the terminal or like formulas, which are none."""
    run_dir = write_run(tmp_path / "demo", steps=3)
    rewrite_summary(run_dir, run=HOSTILE_NAME, failures={HOSTILE_NAME: 3})
    assert main(["status", str(run_dir)]) == 0
    assert HOSTILE_NAME in capsys.readouterr().out
    wide_console().print(HOSTILE_NAME)
    assert HOSTILE_NAME in capsys.readouterr().out
    sweep = Sweep(HOSTILE_NAME, HOSTILE_NAME, [])
    assert write_picture(tmp_path / "sweep.png", lambda: sweep_picture(sweep)) == str(tmp_path / "sweep.png")


def test_missing_folder_is_one_sentence_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="nothing-here does not exist"):
        read_run(tmp_path / "nothing-here")


def test_a_folder_without_config_is_not_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"not a run folder.*config\.toml"):
        read_run(tmp_path)


def test_a_torn_last_line_is_left_out(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=5)
    metrics = run_dir / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-200])
    assert [step["step"] for step in read_run(run_dir).steps] == [1, 2, 3, 4]


def test_a_line_that_is_being_written_is_left_for_later():
    """It may grow between two reads of its reader."""

    class Written(io.BytesIO):
        def __iter__(self):
            yield from (b'{"step": 1}\n', b'{"step": 2, "rew', b'ard": 0.5}\n')

    path = SimpleNamespace(exists=lambda: True, open=lambda mode: Written())
    assert [line for line, _, _ in records_from(path)] == [{"step": 1}]


def test_a_damaged_line_in_the_middle_is_refused_with_its_number(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=3)
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    (run_dir / "metrics.jsonl").write_bytes(b"\n".join([lines[0], lines[1][:50], lines[2], b""]))
    with pytest.raises(ConfigError, match=r"metrics.jsonl line 2 "):
        read_run(run_dir)


def test_a_replayed_step_counts_once_and_keeps_both_lanes(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=3)
    once = read_run(run_dir)
    with (run_dir / "metrics.jsonl").open("ab") as metrics:
        metrics.write(orjson.dumps(once.steps[-1]) + b"\n")
    again = read_run(run_dir)
    assert len(again.steps) == 3
    assert len(again.worker_events) == len(once.worker_events) + len(once.steps[-1]["timeline"])


def test_table_states_the_closed_ledger_in_numbers(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=30)
    ledger = token_totals(read_run(run_dir))
    text = rendered(run_dir)
    assert ledger.closed and f"{ledger.generated:,} generated = {ledger.trained:,} trained" in text
    assert "discarded (aborted)" in text
    assert "30 of 30" in text and "steps 20 → 30, 64 prompts" in text and "learner 1" in text


@pytest.mark.parametrize("changes", [{"ledger_closed": False}, {"tokens": {"generated": 10, "trained": 9}}])
def test_an_open_ledger_is_never_called_closed(tmp_path, changes):
    run_dir = write_run(tmp_path / "demo", steps=3)
    rewrite_summary(run_dir, **changes)
    assert "NOT CLOSED" in rendered(run_dir)
    assert answers(run_dir)["api/runs/demo"]["ledger"]["closed"] is False


def test_a_run_that_has_only_its_config_still_shows(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=0)
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "summary.json").unlink()
    assert "0 of 30" in rendered(run_dir)
    shown = answers(run_dir)
    assert shown["api/runs/demo/steps"]["step"] == [] and shown["api/runs/demo/lanes"] == {}


def test_null_pieces_are_left_out_everywhere(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=4)
    records = [{key: None for key in step} | {"step": step["step"]} for step in read_run(run_dir).steps]
    (run_dir / "metrics.jsonl").write_bytes(b"\n".join(map(orjson.dumps, records)) + b"\n")
    rewrite_summary(run_dir, **dict.fromkeys(["tokens", "reward", "staleness", "lengths", "evaluation", "wall_s"]))
    assert "4 of 4" in rendered(run_dir)
    write_report(run_dir)


@pytest.mark.parametrize("steps", [0, 1, 30, 200])
def test_report_is_one_file_that_loads_nothing(tmp_path, steps):
    page = write_report(write_run(tmp_path / "demo", steps=steps)).read_text()
    assert not re.search(r"@import|url\(|<(script|link|img)[^>]*(src|href)=(?!\"data:)", page)
    assert not re.search(r'^(import|export) |href="(?!#|data:)', page, re.MULTILINE)
    assert re.search(
        r'<meta http-equiv="content-security-policy" content="default-src \'none\'; script-src \'sha256-', page
    )
    assert "unsafe" not in page


def test_a_report_carries_the_figures_of_its_run(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=30)
    run, shown = read_run(run_dir), answers(run_dir)
    assert shown["api/runs"][0] | {"views": ["run"]} == shown["api/runs"][0]
    about, table = shown["api/runs/demo"], shown["api/runs/demo/steps"]
    assert [tuple(row) for row in about["facts"]] == facts(run) and about["config"] == run.config_text
    assert table["reward"] == pytest.approx([step["reward"] for step in run.steps])
    assert table["staleness.tokens_by_age.1"] == [step["staleness"]["tokens_by_age"]["1"] for step in run.steps]
    assert [lane["worker"] for lane in shown["api/runs/demo/lanes"]["lanes"]] == ["worker-0", "worker-1", "worker-2"]


@pytest.mark.full
def test_a_long_run_s_report_has_means_over_equal_numbers_of_steps_and_is_hardly_larger(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=1)
    (line,) = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()][-1:]
    sizes = []
    for steps in (1000, 3500):
        lines = [line | {"step": step, "time": line["time"] + 9 * step, "reward": step} for step in range(1, steps + 1)]
        (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in lines))
        shown = answers(run_dir)
        sizes.append((run_dir / "report.html").stat().st_size)
    table = shown["api/runs/demo/steps"]
    assert table["steps_a_row"] == 4 and (table["step"][:2], table["step"][-1]) == ([4, 8], 3500)
    assert table["reward"][:2] == [2.5, 6.5] and len(table["reward"]) == 875
    lane = shown["api/runs/demo/lanes"]["lanes"][0]
    shares = [sum(parts) for parts in zip(*lane["shares"].values(), strict=True)]
    assert lane["spans"] == {} and max(shares) <= 1.003
    assert max(sizes) < 1_000_000 and sizes[1] < 1.1 * sizes[0]


def test_texts_of_the_run_end_no_element_of_the_report(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=3)
    lines = (run_dir / "metrics.jsonl").read_bytes().replace(b"worker-1", b"</script><b>worker</b>")
    (run_dir / "metrics.jsonl").write_bytes(lines)
    before = write_report(run_dir).read_text().count("<")
    rewrite_summary(run_dir, run="</script><i>run</i>")
    page = write_report(run_dir).read_text()
    assert page.count("<") == before and "<title>&lt;/script&gt;&lt;i&gt;run" in page
    (lanes,) = [answer for path, answer in answers(run_dir).items() if path.endswith("/lanes")]
    assert "</script><b>worker</b>" in {lane["worker"] for lane in lanes["lanes"]}


def test_the_table_says_why_a_run_has_failed(tmp_path):
    run_dir = write_run(tmp_path / "demo")
    rewrite_summary(run_dir, state="running")
    mark_ended(run_dir, "failed", "worker-0 refuses to work; its last lines:\n  worker-0 | no such device")
    run = read_run(run_dir)
    assert run.state == "failed" and "no such device" in dict(facts(run))["failed because"]

"""The dashboard's JSON matches the run folder, in which it writes nothing."""

import math
import os
import random
import time
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from april.observe.dashboard import query
from april.observe.dashboard import steps as steps_of
from april.observe.dashboard.app import RunApi
from april.observe.dashboard.folder import WatchedRun
from april.observe.dashboard.index import SampleIndex
from april.observe.dashboard.query import Query, first_rows, matching_rows, page
from april.observe.operate import RunAddress
from april.observe.report.run_folder import read_run
from tests.support.dashboard_runs import (
    GROUPS,
    HOSTILE,
    SIZE,
    add_step,
    make_run,
    rows_of,
    steps_read,
    stored,
    tokenizer,
    write_rows,
)

ALL = 12 * GROUPS * SIZE


@pytest.fixture
def samples(ask):
    """samples(**query) -> the answer, once all files are read"""

    def get(**query):
        deadline = time.monotonic() + 60
        while (answer := ask("runs/demo/samples", **query))["read"] < 12:
            assert time.monotonic() < deadline
        return answer

    return get


def test_steps_match_metrics_jsonl(ask, runs_folder):
    steps = read_run(runs_folder / "demo").steps
    table = ask("runs/demo/steps", columns="reward,learner.loss,staleness.mean,nowhere")
    assert table["step"] == [step["step"] for step in steps]
    assert table["reward"] == pytest.approx([step["reward"] for step in steps])
    assert table["staleness.mean"] == pytest.approx([step["staleness"]["mean"] for step in steps])
    assert table["nowhere"] is None
    assert ask("runs/demo/steps", columns="reward", after=10)["step"] == [11, 12]
    about = ask("runs/demo")
    assert about["ledger"]["generated"] == steps[-1]["tokens_ledger"]["generated"]
    assert "learner.version_share_3" not in about["columns"] and about["state"] == "finished"


def test_a_run_before_its_first_step_has_a_table_without_rows(looked_at, tmp_path):
    run = make_run(tmp_path, steps=1)
    path, client = run / "metrics.jsonl", looked_at(run)
    line = path.read_bytes()
    path.unlink()
    seen = [client.get("/api/runs/demo/steps").json()["step"]]
    path.write_bytes(line)
    assert [*seen, client.get("/api/runs/demo/steps").json()["step"]] == [[], [1]]


def test_a_replayed_step_replaces_the_first_and_a_partial_line_waits(looked_at, tmp_path):
    run = make_run(tmp_path, steps=2)
    client = looked_at(run)
    path = run / "metrics.jsonl"
    last = orjson.loads(path.read_bytes().splitlines()[-1])
    with path.open("ab") as file:
        file.write(orjson.dumps(last | {"reward": 0.25}) + b"\n" + b'{"step": 3, "rew')
    table = steps_read(client).get("/api/runs/demo/steps", params={"columns": "reward"}).json()
    assert (table["step"], table["reward"][-1]) == ([1, 2], 0.25)
    with path.open("ab") as file:
        file.write(b'ard": 0.5}\n')
    deadline = time.monotonic() + 60
    while (table := client.get("/api/runs/demo/steps", params={"columns": "reward"}).json())["step"][-1] < 3:
        assert time.monotonic() < deadline
    assert table["reward"][-1] == 0.5


def test_filters_and_sorting_match_the_files(samples, runs_folder):
    everything = samples()
    assert everything["total"] == ALL and len(everything["rows"]) == everything["page"]
    assert [row["step"] for row in everything["rows"][: GROUPS * SIZE]] == [12] * GROUPS * SIZE
    bad = samples(reward__max=0.5, sort="tokens")
    assert bad["total"] == 12 * GROUPS and {row["index"] for row in bad["rows"]} == {3}
    stale = samples(staleness__min=1, step__min=2, step__max=5, sort="-tokens")
    expected = [
        (step, row["group"], row["index"], sum(s["end"] - s["start"] for s in row["segments"]))
        for step in range(2, 6)
        for row in stored(runs_folder / "demo", step)
        if min(s["step"] for s in row["segments"]) < step - 1
    ]
    found = [(row["step"], row["group"], row["index"], row["tokens"]) for row in stale["rows"]]
    assert stale["total"] == len(expected) and set(found) == set(expected)
    assert [row["tokens"] for row in stale["rows"]] == sorted((row[3] for row in expected), reverse=True)
    assert samples(**{"is.finish_reason": "length"})["total"] == len(HOSTILE)
    assert samples(**{"is.worker": "worker-2"})["total"] == 12 * GROUPS
    assert samples(life_s__min=6.5)["total"] == 12 * GROUPS and everything["further"] == ["life_s"]
    prompt = everything["rows"][0]["prompt"]
    assert samples(prompt=prompt)["total"] == 12 * SIZE
    rest = samples(offset=ALL - 1)
    assert [row["step"] for row in rest["rows"]] == [1]


def test_a_text_is_found_newest_step_first(client, samples):
    samples()
    lines = client.get("/api/runs/demo/search", params={"text": "ABOUT step 1"}).text.splitlines()
    found = [orjson.loads(line) for line in lines]
    assert [one["row"]["step"] for one in found if "row" in one][:1] == [12] and found[-1]["done"]
    assert {one["row"]["step"] for one in found if "row" in one} == {1, 10, 11, 12}
    nothing = client.get("/api/runs/demo/search", params={"text": ".*no regular expression"}).text
    assert orjson.loads(nothing) == {"done": True, "before": None}


def test_ties_are_ordered_by_the_next_sort_key(monkeypatch):
    monkeypatch.setattr(query, "BLOCK", 700)
    chance = np.random.default_rng(0)
    keys = [(chance.integers(0, 3, 5000), True), (chance.integers(0, 40, 5000), False), (np.arange(5000), False)]
    rows = np.flatnonzero(chance.random(5000) < 0.8)
    whole = rows[np.lexsort([-column[rows] if falling else column[rows] for column, falling in reversed(keys)])]
    assert first_rows(rows, keys, 70).tolist() == whole[:70].tolist()
    assert first_rows(rows[:5], keys, 70).tolist() == first_rows(rows[:5], keys, 5).tolist()


def test_files_that_are_replaced_thinned_out_or_damaged(tmp_path):
    run = make_run(tmp_path, steps=3)
    index = SampleIndex(run)

    def read():
        index.scan()
        while index.advance():
            pass
        rows = matching_rows(index, Query())
        return sorted({row["step"] for row in page(index, rows, Query())}), len(rows)

    assert read() == ([1, 2, 3], 3 * GROUPS * SIZE)
    (run / "samples/step_000002.parquet").unlink()
    whole = (run / "samples/step_000003.parquet").read_bytes()
    (run / "samples/step_000003.parquet").write_bytes(whole[: len(whole) // 2])
    assert read() == ([1], GROUPS * SIZE)
    assert list(index.unreadable) == [3]
    (run / "samples/step_000003.parquet").write_bytes(whole)
    assert read() == ([1, 3], 2 * GROUPS * SIZE)
    assert not index.unreadable


def test_steps_that_could_not_be_read_are_followed_once_they_can(tmp_path):
    folder = make_run(tmp_path, steps=3)
    run, metrics = WatchedRun("demo", folder, RunAddress(folder, None, None)), folder / "metrics.jsonl"
    with metrics.open("ab") as file:
        file.write(b'{"step": 4, broken\n{"step": 5}\n')
    run.read_new(math.inf)
    assert "is not a JSON object with a step" in run.progress()["problem"] and run.progress()["steps"] == 3
    metrics.write_bytes(metrics.read_bytes().replace(b", broken", b"}"))
    run.read_new(math.inf)
    assert not run.progress()["problem"] and run.progress()["steps"] == 5


def test_a_sample_has_every_token_and_its_turns(ask, runs_folder):
    sample = ask("runs/demo/samples/5/50/1")
    (row,) = [row for row in stored(runs_folder / "demo", 5) if (row["group"], row["index"]) == (50, 1)]
    assert "".join(sample["pieces"]) == row["response"] == sample["response"]
    assert len(sample["pieces"]) == len(row["response_ids"])
    assert sample["behaviour_logprobs"] == pytest.approx(row["behaviour_logprobs"])
    assert [turn["who"] for turn in sample["turns"]] == ["policy", "other", "policy"]
    assert sample["turns"][1]["end"] - sample["turns"][1]["start"] == 3
    group = ask("runs/demo/groups/5/50")
    assert [(one["index"], one["reward"]) for one in group] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 0.0)]
    assert "response_ids" not in group[0]


def test_invalid_utf8_is_shown_as_replacement_characters(ask):
    last = ask(f"runs/demo/groups/1/{10 + GROUPS - 1}")[-1]
    assert last["response"] == "broken \ufffd\ufffd UTF-8 \ufffd"
    assert ask("runs/demo/excerpts", of="1.0,77.0")[1] is None


def test_samples_of_a_new_step_appear_while_the_dashboard_runs(looked_at, tmp_path):
    run = make_run(tmp_path, steps=2)
    client = looked_at(run)
    step = add_step(run)
    deadline = time.monotonic() + 60
    while client.get("/api/runs/demo/samples", params={"step.min": step}).json()["total"] < GROUPS * SIZE:
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("runs/nobody/steps", 404, "run 'nobody' is not here; there are demo, other"),
        ("runs/demo/samples?reward.min=much", 400, "filter 'reward.min' = 'much' is no number"),
        ("runs/demo/samples?sort=beauty", 400, "column 'beauty' is none of the samples'"),
        ("runs/demo/samples?prompt=xyz", 400, "filter 'prompt' = 'xyz' is none of a prompt"),
        ("runs/demo/samples/99/1/0", 400, "samples of step 99 are not kept"),
        ("runs/demo/groups/3/999", 400, "group 999 is not among those that are kept of step 3"),
        ("runs/%2e%2e/steps", 404, "is not here"),
    ],
)
def test_a_request_for_something_missing_gets_a_sentence(client, path, status, sentence):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == status and sentence in answer.json()["error"]


def test_a_dashboard_writes_nothing(samples, ask, runs_folder):
    before = {path: os.stat(path).st_mtime_ns for path in runs_folder.rglob("*")}
    samples()
    ask("runs/demo/samples/5/50/1")
    assert {path: os.stat(path).st_mtime_ns for path in runs_folder.rglob("*")} == before


def test_the_timeline_of_a_window_covers_its_steps(ask, runs_folder):
    records = read_run(runs_folder / "demo").steps
    begin, end = records[2]["time"], records[4]["time"]
    shown = ask("runs/demo/timeline", **{"from": begin, "to": end})
    wanted = {
        lane["worker"]
        for record in records[3:5]
        for lane in record["timeline"]
        if lane["kind"] == "generate" and lane["end"] > begin
    }
    assert {lane["worker"] for lane in shown["lanes"]} >= wanted
    spans = [span for lane in shown["lanes"] for span in lane["spans"].get("generate", [])]
    assert spans and all(begin - 1e-3 <= start <= stop <= end + 1e-3 for start, stop in spans)
    assert [step for _, step in shown["steps"]] == [3, 4, 5]
    trained = [stop - start for start, stop in shown["learner"]["spans"]["train"]]
    assert trained[1:] == pytest.approx([records[3]["learner"]["train_s"]] * 2, abs=1e-4)
    assert ask("runs/demo/timeline")["end"] == records[-1]["time"]


def test_prompts_of_two_runs_are_paired_where_they_differ_most(looked_at, tmp_path):
    for seed, name in enumerate(("one", "two")):
        run = make_run(tmp_path, name, steps=2, seed=seed)
    letters = tokenizer()
    rows = [row | {"reward": 0.0} if row["group"] == 24 else row for row in rows_of(2, letters, random.Random(0))]
    write_rows(run, 2, rows)
    client = looked_at(tmp_path / "runs")
    deadline = time.monotonic() + 60
    while (found := client.get("/api/compare", params={"a": "one", "b": "two"}).json())["reading"]:
        assert time.monotonic() < deadline
    first, *others = found["prompts"]
    assert found["total"] == GROUPS and first["text"] == "How much is 4 + 4? "
    assert first["samples"] == [SIZE, SIZE] and first["reward"] == pytest.approx([0.75, 0.0])
    assert all(one["steps"] == [2, 2] for one in found["prompts"])
    assert all(one["reward"][0] == one["reward"][1] for one in others)


def test_an_answer_counts_only_files_read_before_its_query(tmp_path, monkeypatch):
    """Otherwise the page would not ask again."""
    runs = {name: SimpleNamespace(index=SampleIndex(make_run(tmp_path, name, steps=2))) for name in ("one", "two")}
    api = RunApi(SimpleNamespace(find=lambda name, samples: runs[name]))
    one, two = (run.index for run in runs.values())
    for index in (one, two):
        index.scan()
        index.advance()

    def meanwhile(index, real):
        return lambda *given: (index.advance(), real(*given))[1]

    monkeypatch.setattr(query, "page", meanwhile(one, page))
    monkeypatch.setattr(steps_of, "excerpts", meanwhile(two, steps_of.excerpts))
    asked = SimpleNamespace(path_params={"run": "one"}, query_params={"a": "one", "b": "two"})
    found = [api.samples(asked) for _ in range(2)]
    assert [(answer["read"], answer["total"]) for answer in found] == [(1, GROUPS * SIZE), (2, 2 * GROUPS * SIZE)]
    found = [api.compare(asked) for _ in range(2)]
    assert [answer["reading"] for answer in found] == [True, False]
    assert [answer["prompts"][0]["steps"] for answer in found] == [[2, 2], [2, 2]]


def test_two_runs_are_compared_at_the_steps_nearest_to_each_other_the_newest_of_equals():
    def draws(*entries):
        prompts, steps = (np.array(column) for column in zip(*sorted(entries), strict=True))
        return steps_of.Draws(prompts.astype(np.uint64), steps, *np.zeros((3, len(steps))))

    a = draws((5, 1), (5, 4), (5, 9), (7, 3), (8, 2), (9, 1), (9, 6))
    b = draws((5, 3), (5, 20), (6, 1), (8, 90), (8, 1), (9, 1), (9, 6))
    at_a, at_b = steps_of.nearest_steps(a, b)
    assert [(int(a.prompts[i]), a.steps[i], b.steps[j]) for i, j in zip(at_a, at_b, strict=True)] == [
        (5, 4, 3), (8, 2, 1), (9, 6, 6)
    ]  # fmt: skip
    for one, other in ((draws((5, 1)), draws((6, 1))), (a, draws((4, 1), (99, 1)))):
        assert [len(at) for at in steps_of.nearest_steps(one, other)] == [0, 0]


def test_the_end_of_a_log_is_read_and_nothing_beside_the_logs(looked_at, tmp_path, monkeypatch):
    run = make_run(tmp_path, steps=1)
    (run / "logs").mkdir()
    (run / "logs/worker-0.log").write_bytes(b"first line\nsecond \xff\nthird\n")
    (run / "logs/outside.log").symlink_to(run)
    client = looked_at(run)
    assert client.get("/api/runs/demo/logs").json() == {"files": ["worker-0.log"]}
    monkeypatch.setattr("april.observe.dashboard.run_page.LOG_BYTES", 20)
    log = client.get("/api/runs/demo/logs", params={"file": "worker-0.log"}).json()
    assert (log["text"], log["left_out"]) == ("second \ufffd\nthird\n", 11)
    for name in ("../config.toml", "outside.log", "/etc/passwd"):
        answer = client.get("/api/runs/demo/logs", params={"file": name})
        assert answer.status_code == 404 and "there are worker-0.log" in answer.json()["error"]


def test_the_list_of_runs_has_the_last_and_the_best_comparable_evaluation(looked_at, tmp_path):
    run = make_run(tmp_path, steps=3)
    points = [{"step": step, "accuracy": score, "prompts": 8} for step, score in ((0, 0.25), (1, 0.75), (2, 0.5))]
    found = orjson.loads((run / "summary.json").read_bytes()) | {"evaluation": points}
    (run / "summary.json").write_bytes(orjson.dumps(found))
    (said,) = looked_at(tmp_path / "runs").get("/api/runs").json()
    assert (said["held_out"]["value"], said["held_out"]["step"], said["best_held_out"]) == (0.5, 2, 0.75)
    (run / "resumes.jsonl").unlink(missing_ok=True)
    (run / "summary.json").write_bytes(orjson.dumps(found | {"evaluation": []}))
    (said,) = looked_at(tmp_path / "runs").get("/api/runs").json()
    assert said["held_out"] is said["best_held_out"] is None


def test_a_run_without_a_broker_says_so(ask):
    assert "no broker runs there" in ask("runs/demo/now")["away"]

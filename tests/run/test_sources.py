"""Runs of several sources: conversations beside samples, and a response budget of each."""

import orjson
import pytest

from april.config import ConfigError, load
from april.learner.batch import TrainingBatch, decode, encode
from april.learner.conversations import BatchConversations
from april.observe.report.facts import conversations
from april.observe.report.run_folder import read_records, read_run
from tests.support.run_processes import assert_closed, steps_recorded, wait_until

ROWS = 5
"""Conversations, of which each batch has three."""


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else orjson.dumps(value).decode()


@pytest.fixture
def sources(data_folder, tmp_path):
    """Overrides with the training prompts as one source, and conversations as another."""
    path = tmp_path / "said.jsonl"
    rows = [{"prompt": f"{row:02d}*3+60=", "completion": f"#{row % 2}"} for row in range(ROWS)]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    prompts = {"path": f"{data_folder}/train.jsonl"}

    def made(*order, **keys):
        said = {"path": str(path), "kind": "sft", "sft_rows": 3, "sft_weight": 0.5} | keys
        tables = [{"prompts": prompts, "said": said}[name] for name in order or ("prompts", "said")]
        return ["--data.path", "none", "--data.sources", toml(tables)]

    made.path = path
    return made


def add_rows(path, *rows):
    path.write_bytes(path.read_bytes() + b"".join(orjson.dumps(row) + b"\n" for row in rows))


def test_conversations_that_cannot_be_trained_are_counted_with_their_batch(config_file, sources):
    """A row that is too long, and one with a call of a tool, which the policy's template does not print."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "#2", "tool_calls": [call]}]
    add_rows(sources.path, {"prompt": "1+1=", "completion": "#" + "," * 50}, {"messages": said})
    found = BatchConversations(load(config_file, [*sources(sft_rows=ROWS + 2), "--sft.max_tokens", "24"]))
    for step in (0, 1, 0):
        batch = decode(encode(found.beside(TrainingBatch(step, []))))
        assert len(batch.conversations) == ROWS and batch.left_out == {"too_long": 1, "bad_rows": 1}


@pytest.mark.full
def test_a_killed_learner_trains_the_same_conversations_again_and_each_batch_counts_once(
    start_run, run_dir, sources, gate
):
    add_rows(sources.path, {"prompt": "1+1=", "completion": "#" + "," * 50})
    keys = [*sources(), "--sft.max_tokens", "24"]
    job = start_run(*keys, "--schedule.max_steps", "5", "--learner.checkpoint_every", "3", *gate.hold(2))
    wait_until(lambda: steps_recorded(run_dir) >= 2, job)
    job.kill("april.learner.launch")
    gate.open()
    assert job.wait() == 0, job.output
    found = assert_closed(run_dir)
    records = list(read_records(run_dir / "metrics.jsonl"))
    learner = [record["learner"] for record in records if "learner" in record]
    too_long = [each.get("sft_too_long", 0) for each in learner]
    assert [each["sft_rows"] + long for each, long in zip(learner, too_long, strict=True)] == [3] * 5
    tokens = sum(each["sft_tokens"] for each in learner)
    rows = {"rows": 15 - sum(too_long), "too_long": sum(too_long), "bad_rows": 0}
    assert found["conversations"] == rows | {"tokens": tokens} and sum(too_long) > 1
    assert f", {sum(too_long):.0f} left out as too long" in conversations(read_run(run_dir))
    assert found["replays"]["different"] == 0 and found["replays"]["same"] > 0
    assert learner[-1]["sft_loss"] < learner[0]["sft_loss"]
    sources.path.write_bytes(sources.path.read_bytes().replace(b"#1", b"#0"))
    job = start_run(*keys, "--resume", "--schedule.max_steps", "6")
    assert job.wait() != 0 and "data.sources.1.path" in job.output and "restore it" in job.output


def test_what_does_not_fit_is_refused_by_its_key(config_file, sources, tmp_path):
    load(config_file, sources())
    for overrides, key in (
        (sources("said", "prompts"), "data.sources.0.kind"),
        (sources("said"), "data.sources"),
        (sources(reward="math"), "data.sources.1.reward"),
        (sources(algorithm={"kl_coef": 0.1}), "data.sources.1.algorithm"),
        (sources(path=str(tmp_path / "missing.jsonl")), "data.sources.1.path"),
        ([*sources(), "--data.source", "submitted"], "data.source"),
    ):
        with pytest.raises(ConfigError, match=f"key '{key}' = "):
            load(config_file, overrides)


@pytest.mark.full
def test_responses_end_at_the_budget_of_their_source_and_are_penalised_before_it(
    start_run, run_dir, sources, data_folder
):
    parquet = pytest.importorskip("pyarrow.parquet")
    budgets = [24, 6]
    tables = [{"path": f"{data_folder}/train.jsonl", "max_response_tokens": budget} for budget in budgets]
    overrides = ["--data.path", "none", "--reward.overlong_buffer_tokens", "4", "--learner.ranks", "1"]
    overrides += ["--schedule.dynamic_sampling", "true"]
    job = start_run("--data.sources", toml(tables), *overrides)
    assert job.wait() == 0, job.output
    assert_closed(run_dir)
    rows = [row for file in (run_dir / "samples").glob("*.parquet") for row in parquet.read_table(file).to_pylist()]
    longest = {source: 0 for source in (0, 1)}
    for row in rows:
        if row["held_out"]:
            continue
        budget, tokens = budgets[row["source"]], len(row["response_ids"])
        longest[row["source"]] = max(longest[row["source"]], tokens)
        assert tokens <= budget and (row["finish_reason"] != "length" or tokens == budget)
        details = {detail["name"]: detail["value"] for detail in row["reward_details"]}
        assert details["overlong"] == pytest.approx(-max(0, tokens - (budget - 4)) / 4)
    assert longest[1] == 6 < longest[0]
    assert {row["source"] for row in rows if row["discarded"]} == {0, 1}, "what was discarded has its source, too"
    tables[1]["max_response_tokens"] = 5
    job = start_run("--data.sources", toml(tables), *overrides, "--resume", "--schedule.max_steps", "4")
    assert job.wait() != 0 and "data.sources.1.max_response_tokens" in job.output
    tables[1]["max_response_tokens"] = 25
    job = start_run("--data.sources", toml(tables), *overrides)
    assert job.wait() != 0 and "is above sampling.max_response_tokens = 24" in job.output

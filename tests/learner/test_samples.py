"""Samples stored for reading: contents of a file, its readers, and thinning."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import astuple

from april import cli, runs, wire
from april.cli.command import wide_console
from april.config import ConfigError
from april.config.data import DataSection
from april.data.groups import chosen_groups
from april.data.images import name_of
from april.learner import loop, samples
from april.learner.batch import TrainingBatch
from april.learner.trainer import Trainer
from april.observe.report.samples import read_step, render_samples
from april.util.versions import RUN_FOLDER
from april.wire.message import Version
from tests.support.learner.small_learner import Diary, batch_in_turns, make_config, make_sample

COLUMNS = samples.schema().names


class Letters:
    """A tokeniser for the policy's few ids."""

    def __init__(self, path):
        pass

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


SPANS = (
    wire.SampleSpan("generate", "w0", 12.0, 13.0, 0, 2, "abort"),
    wire.SampleSpan("score", "w1", 15.0, 16.5, 6, 6, "scored"),
)


CHUNKS = ((1, 12.25), (2, 12.75))


class Value(Diary):
    """A source whose batches have a broker's sample metadata, and one discarded group each."""

    def fetch(self, step):
        if batch := super().fetch(step):
            told = {"details": {"correct": 1.0}, "spans": SPANS, "opened_at": 11.0, "delivered_at": 20.0, "label": "7"}
            groups = [[replace(sample, chunks=CHUNKS, **told) for sample in group] for group in batch.groups]
            return TrainingBatch(step, groups, untrained=[discarded(groups[0][:2]), held_out(step, groups[0][:1])])


def held_out(step, group):
    """A held-out group, generated under weights `step`."""
    heads = [wire.SampleHead(0, sample.response_tokens, 0.25, "stop", []) for sample in group]
    head = wire.GroupHead(2000, group[0].prompt_tokens, heads, 11.0, 19.0, held_out="heldout", label="42")
    spans = [((0, sample.response_tokens, Version(0, step)),) for sample in group]
    samples = [replace(one, segments=own, group=2000, label="42") for one, own in zip(group, spans, strict=True)]
    return head, samples


def discarded(group):
    """A discarded group: a sample that failed before it was scored, and its sibling."""
    heads = [
        wire.SampleHead(index, sample.response_tokens, reward, "", [], attempts=attempts, error=error)
        for index, (sample, reward, attempts, error) in enumerate(
            zip(group, (float("nan"), 0.5), (5, 0), ("engine fell over", ""), strict=True)
        )
    ]
    head = wire.GroupHead(1000, group[0].prompt_tokens, heads, 11.0, 19.0, discarded="dead_sample")
    samples = [replace(sample, reward=told.reward, group=1000) for sample, told in zip(group, heads, strict=True)]
    return head, samples


@pytest.fixture
def lived(one_rank, policy_folder, tmp_path, monkeypatch):
    """A learner's run of three steps, in a readable run folder; returns the batches of the source."""
    monkeypatch.setattr(samples, "Tokenizer", Letters)
    config = make_config(policy_folder, tmp_path / "run", checkpoint_every=2)
    diary = Value(policy_folder, 3)
    loop.run(config, Trainer(config, torch.device("cpu")), diary, diary)
    (config.run_dir / "config.toml").write_text(config.to_toml())
    RUN_FOLDER.claim(config.run_dir, new=True)
    return SimpleNamespace(config=config, diary=diary)


def test_trained_samples_are_stored_with_the_learner_s_scores(lived):
    run = runs.load(lived.config.run_dir)
    assert run.sample_steps == [0, 1, 2, 3]
    assert len(run.samples(3)) == len(lived.diary.fetch(2).samples) + 2 and len(run.samples()) > len(run.samples(3))
    batch, rows = lived.diary.fetch(2), [row for row in read_step(run.path, 3) if not row["discarded"]]
    assert len(rows) == len(batch.samples) and list(rows[0]) == COLUMNS
    for row, sample in zip(rows, batch.samples, strict=True):
        assert row["step"] == 3 and row["reward"] == sample.reward and (row["label"], row["held_out"]) == ("7", "")
        assert row["prompt_ids"] + row["response_ids"] == sample.tokens.tolist()
        assert row["behaviour_logprobs"] == pytest.approx(sample.logprobs.tolist())
        assert row["trained"] == (row["advantage"] != 0)
        if row["trained"]:
            assert len(row["learner_logprobs"]) == sample.response_tokens
            assert np.abs(row["learner_logprobs"] - sample.logprobs).max() < 1.5  # noise of 0.3, and two steps
        assert row["response"] == Letters(None).decode(row["response_ids"])
        assert row["reward_details"] == [{"name": "correct", "value": 1.0}]
        assert (row["opened_at"], row["generated_at"], row["scored_at"], row["delivered_at"]) == (11, 13, 16.5, 20)
        assert [tuple(span.values()) for span in row["spans"]] == list(map(astuple, SPANS))
        assert [tuple(chunk.values()) for chunk in row["chunks"]] == list(CHUNKS)
    assert any(row["trained"] for row in rows)


def test_held_out_samples_are_in_the_file_of_the_weights_that_they_evaluate_also_when_written_again(lived, capsys):
    writer = samples.SampleWriter(lived.config)
    writer.keep_untrained(2, [held_out(2, lived.diary.fetch(2).groups[0][:1])])
    writer.finish()
    for step in (0, 1, 2):
        rows = read_step(lived.config.run_dir, step)
        (row,) = [row for row in rows if row["held_out"]]
        assert (row["step"], row["held_out"], row["label"], row["reward"]) == (step, "heldout", "42", 0.25)
        assert (row["trained"], row["advantage"], row["discarded"]) == (False, None, "")
        assert len(rows) == (1 if step == 0 else len(lived.diary.fetch(step - 1).samples) + 3)
    assert cli.main(["samples", str(lived.config.run_dir), "--step", "0"]) == 0
    said = capsys.readouterr().out
    assert "reward 0.250  held out  " in said and "reference answer: 42" in said


def test_the_page_says_what_each_column_is():
    page = (Path(__file__).parents[2] / "docs/start/report.md").read_text()
    table = page.partition("| column | meaning |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|([^|]+)\|", table, re.M)))) == sorted(
        samples.schema(token_scores=True, sources=True, feedback=True).names
    )


def test_discarded_samples_are_stored_with_their_reason_and_without_an_invented_reward(lived, capsys):
    dead, sibling = [row for row in read_step(lived.config.run_dir, 3) if row["discarded"]]
    assert (dead["discarded"], dead["attempts"], dead["error"]) == ("dead_sample", 5, "engine fell over")
    assert dead["reward"] is None and (sibling["reward"], sibling["error"]) == (0.5, "")
    for row in (dead, sibling):
        assert (row["group"], row["trained"], row["advantage"], row["learner_logprobs"]) == (1000, False, None, None)
        assert "source" not in row, "all are of one source"
        assert (row["delivered_at"], row["discarded_at"]) == (None, 19.0)
    assert cli.main(["samples", str(lived.config.run_dir), "--step", "3", "--group", "1000"]) == 0
    assert "reward –  advantage – (no gradient)" in capsys.readouterr().out


def test_what_a_verifier_said_of_a_sample_is_printed_with_it_and_steers_no_terminal(
    policy_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(samples, "Tokenizer", Letters)
    writer = samples.SampleWriter(make_config(policy_folder, tmp_path))
    sample = make_sample(np.random.default_rng(0), 2, 3, 1.0)
    writer.keep(TrainingBatch(0, [[replace(sample, feedback="line 3: \x1b[2J"), sample]]), np.zeros(2), None)
    writer.finish()
    wide_console().print(render_samples(read_step(writer.folder.parent)))
    said = capsys.readouterr().out
    assert r"feedback: line 3: \x1b[2J" in said and said.count("feedback: ") == 1


TWO_SOURCES = DataSection(sources=[{"path": "a.jsonl"}, {"path": "b.jsonl"}])


def test_images_are_kept_beside_the_samples_until_no_step_names_them(policy_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "Tokenizer", Letters)
    writer, sample = (
        samples.SampleWriter(make_config(policy_folder, tmp_path).model_copy(update={"data": TWO_SOURCES})),
        make_sample(np.random.default_rng(0), 2, 3, 1.0),
    )
    for step in range(4):
        own, common = b"only of step %d" % step * 1000, b"of all steps"
        group = [replace(sample, images=(common, own), source=1), replace(sample, images=(common,))]
        batch = TrainingBatch(step, [group])
        writer.keep(batch, np.zeros(2), None)
        writer.finish()
        rows = read_step(writer.folder.parent, step + 1)
        assert [row["source"] for row in rows] == [1, 0]
        assert [row["images"] for row in rows] == [[name_of(common), name_of(own)], [name_of(common)]]
    kept = {path.stem: path.read_bytes() for path in (writer.folder / "images").iterdir()}
    assert all(name_of(content) == name for name, content in kept.items()) and len(kept) == 5
    samples.thin_out(writer.folder, sum(path.stat().st_size for path in writer.folder.rglob("*.*")) - 1)
    assert len(list(writer.folder.glob("step_*"))) == 3
    left = {path.stem for path in (writer.folder / "images").iterdir()}
    assert left < kept.keys() and name_of(b"of all steps") in left and len(left) == 4


def test_turns_are_split_between_the_policy_and_others(policy_folder):
    for sample in batch_in_turns(policy_folder).samples:
        said = samples.turns(sample)
        assert [turn["end"] for turn in said[:-1]] == [turn["start"] for turn in said[1:]], "one behind the other"
        assert (said[0]["start"], said[-1]["end"]) == (0, sample.response_tokens)
        assert all(one["who"] != other["who"] for one, other in pairwise(said))
        places = [place for turn in said if turn["who"] == "policy" for place in range(turn["start"], turn["end"])]
        assert places == sample.sampled_positions.tolist()


@pytest.mark.full
def test_other_tools_read_the_files(lived, tmp_path):
    import datasets
    import duckdb

    files = str(lived.config.run_dir / "samples" / "*.parquet")
    rows = len(runs.load(lived.config.run_dir).samples())
    dataset = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(dataset) == rows and dataset[0]["spans"][0]["where"] == "w0" and dataset.column_names == COLUMNS
    query = f"select count(*), avg(scored_at - opened_at), any_value(spans[1].how) from '{files}'"
    assert duckdb.sql(query).fetchall() == [(rows, 5.5, "abort")]


def test_the_command_shows_the_worst_and_refuses_what_is_not_kept(lived, capsys):
    folder = str(lived.config.run_dir)
    assert cli.main(["samples", folder, "--step", "2", "--worst", "1"]) == 0
    lowest = min(sample.reward for sample in lived.diary.fetch(1).samples)
    assert f"reward {lowest:.3f}" in capsys.readouterr().out
    for options in (["--step", "9"], ["--group", "10000"], ["--best", "0"]):
        assert cli.main(["samples", folder, *options]) != 0
        assert capsys.readouterr().err.startswith(f"april samples: option '{options[0]}' = {options[1]} ")
    with pytest.raises(ConfigError, match="step 9 "):
        runs.load(folder).samples(9)


def test_best_and_worst_are_kept_among_few_groups():
    kept = chosen_groups([[0.5], [0.1], [0.4], [0.9], [0.3]], 3, "seed")
    assert len(kept) == 3 and {1, 3} <= set(kept)


def test_thinning_keeps_the_first_the_newest_and_even_distances(tmp_path):
    for step in range(1, 10):
        (tmp_path / f"step_{step:06d}.parquet").write_bytes(b"x" * 100)
    samples.thin_out(tmp_path, 500)
    assert [int(path.stem[-6:]) for path in sorted(tmp_path.iterdir())] == [1, 3, 5, 7, 9]

"""Supervised training by the learner: its loss is transformers', and a resumed run is an unbroken one."""

import math
import random
import shutil

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from april import config as configuration
from april.cli.sft import sft
from april.config import ConfigError
from april.launch.check import Findings
from april.launch.sft.held_out import HeldOutLoss
from april.launch.sft.record import SftRecord
from april.launch.sft.source import STOP_FILE, ConversationBook, ConversationSource
from april.launch.sft.start import describe_line, inspect_book
from april.learner import loop
from april.learner.policy.arithmetic import build_model
from april.learner.trainer import Trainer
from april.util.versions import RUN_FOLDER
from tests.support.chat_tokenizer import VOCABULARY, save_chat_tokenizer

CHANCE = random.Random(0)


def conversation():
    turns = [(f"{CHANCE.random()}", "hello" * CHANCE.randint(1, 4)) for _ in range(CHANCE.randint(1, 3))]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def write_rows(path, count):
    path.write_bytes(b"".join(orjson.dumps({"messages": conversation()}) + b"\n" for _ in range(count)))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a policy, 20 rows and 6 held-out rows."""
    folder = tmp_path_factory.mktemp("inputs")
    model = build_model(64, layers=1, seed=0)
    model.resize_token_embeddings(VOCABULARY)
    model.save_pretrained(folder / "policy")
    save_chat_tokenizer(folder / "policy")
    write_rows(folder / "train.jsonl", 20)
    write_rows(folder / "heldout.jsonl", 6)
    return folder


@pytest.fixture
def configured(inputs, tmp_path):
    """Returns a function: overrides -> configuration of a run."""

    def make(*overrides, name="run"):
        path = tmp_path / "run.toml"
        path.write_text(f"""
run = {{ dir = "{tmp_path}/runs" }}
model = {{ path = "{inputs}/policy" }}
data = {{ path = "{inputs}/train.jsonl", eval_path = "{inputs}/heldout.jsonl", epochs = 2 }}
learner = {{ lr = 1e-3, device = "cpu", ranks = 1, checkpoint_every = 2, microbatch_tokens = 512 }}
evaluation = {{ every = 3 }}
sft = {{ batch_size = 6 }}
""")
        return configuration.load([path], ["--run.name", name, *overrides], supervised=True)

    return make


class Killed(Exception):
    pass


class MortalSource(ConversationSource):
    """A source that dies where batch `dies_at` is due."""

    dies_at = None

    def fetch(self, step):
        if step == self.dies_at:
            raise Killed
        return super().fetch(step)


def train(config, dies_at=None):
    """A run in this process, which may die after `dies_at` batches; returns its trainer."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    source, trainer = MortalSource(config, ConversationBook(config)), Trainer(config, torch.device("cpu"))
    source.dies_at = dies_at
    sets = {"heldout": source.book.held_out_batch().groups[0]}
    publication = HeldOutLoss(trainer, sets, source.book.steps, source.evaluated)
    loop.run(config, trainer, source, None, publication=publication)
    source.close()
    return trainer


def reference_loss(folder, samples):
    """Mean loss of the trained tokens by transformers, each row a sequence of its own."""
    model, total, tokens = AutoModelForCausalLM.from_pretrained(folder), 0.0, 0
    for sample in samples:
        labels = np.full(len(sample.tokens), -100)
        at = sample.prompt_tokens + sample.sampled_positions
        labels[at] = sample.tokens[at]
        ids, labels = torch.from_numpy(sample.tokens).long()[None], torch.from_numpy(labels)[None]
        total += model(ids, labels=labels).loss * sample.sampled_tokens
        tokens += sample.sampled_tokens
    return total / tokens, model


def test_loss_and_gradient_of_a_packed_batch_are_those_of_transformers(one_rank, configured, inputs):
    config = configured("--learner.grad_clip", "1e9")
    batch = ConversationBook(config).batch(0)
    metrics = Trainer(config, torch.device("cpu")).step(batch)
    loss, model = reference_loss(inputs / "policy", batch.samples)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["tokens"] == sum(sample.sampled_tokens for sample in batch.samples)


def test_rows_are_of_their_source_and_fields_of_hints_are_not_read(configured, inputs):
    sources = ", ".join(f'{{path = "{inputs}/{name}.jsonl", hint_key = "solution"}}' for name in ("train", "heldout"))
    config = configured("--data.path", "none", "--data.sources", f"[{sources}]", "--data.hint_key", "solution")
    book = ConversationBook(config)
    found = [
        (sample.source, book.rows.source_of(sample.group)) for step in range(4) for sample in book.batch(step).samples
    ]
    assert {source for source, _ in found} == {0, 1} and all(source == of_row for source, of_row in found)


def test_one_file_serves_both_commands_and_of_its_sources_those_of_conversations_are_trained(configured, inputs):
    prompts = f'{{path = "{inputs}/train.jsonl", max_response_tokens = 500, reward = "math"}}'
    said = f'{{path = "{inputs}/heldout.jsonl", kind = "sft", sft_rows = 2, sft_weight = 0.5}}'
    config = configured("--data.path", "none", "--data.sources", f"[{prompts}, {said}]")
    assert len(ConversationBook(config).rows) == 6 and ConversationBook(config).batch(0).samples[0].source == 0
    config = configured("--data.path", "none", "--data.sources", f"[{prompts}]")
    assert len(ConversationBook(config).rows) == 20


def test_the_held_out_loss_is_that_of_transformers(one_rank, configured, inputs):
    config = configured()
    samples = ConversationBook(config).held_out_batch().groups[0]
    found = HeldOutLoss(Trainer(config, torch.device("cpu")), {}, 0, None).loss_of(samples)
    assert found["loss"] == pytest.approx(reference_loss(inputs / "policy", samples)[0].item(), rel=1e-6)
    assert found["prompts"] == 6


def lines(config):
    """The lines of metrics.jsonl without times."""
    found = [orjson.loads(line) for line in (config.run_dir / "metrics.jsonl").read_bytes().splitlines()]
    timed = ("time", "tokens_per_s")
    kept = [{key: value for key, value in line.items() if key not in timed} for line in found]
    for line in kept:
        figures = line.get("learner", {})
        line["learner"] = {key: figures[key] for key in ("loss", "grad_norm", "lr", "trained_tokens") if figures}
    return kept


def test_a_resumed_run_is_the_unbroken_one_bit_by_bit(one_rank, configured):
    whole, broken = configured(name="whole"), configured(name="broken")
    expected = train(whole)
    assert expected.step_count == 7  # 40 rows in batches of 6, the last of 4
    with pytest.raises(Killed):
        train(broken, dies_at=5)
    assert [line["step"] for line in lines(broken)][-1] == 5
    found = train(broken)
    assert lines(broken) == lines(whole)
    for (name, ours), (_, theirs) in zip(found.policy.trained, expected.policy.trained, strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor()), name
    summary = orjson.loads((broken.run_dir / "summary.json").read_bytes())
    assert (summary["state"], summary["steps"], summary["data"]["rows"]) == ("finished", 7, 20)
    assert [point["step"] for point in summary["evaluation"]] == [0, 3, 6, 7]


def test_a_run_that_is_asked_to_stop_ends_with_a_checkpoint_after_its_batch(one_rank, configured):
    config = configured()
    config.run_dir.mkdir(parents=True)
    (config.run_dir / STOP_FILE).touch()
    assert train(config).step_count == 0
    assert orjson.loads((config.run_dir / "summary.json").read_bytes())["state"] == "stopped"


def test_each_epoch_has_every_row_once_in_another_order(configured):
    book = ConversationBook(configured("--sft.batch_size", "20"))
    first, second = ([sample.group for sample in book.batch(step).samples] for step in (0, 1))
    assert sorted(first) == sorted(second) == list(range(20)) and first != second


def test_rows_that_are_too_long_are_left_out_of_their_batches_and_counted(configured):
    book = ConversationBook(configured("--sft.max_tokens", "90", "--sft.batch_size", "20"))
    kept = book.batch(0).samples
    assert 0 < len(kept) < 20 and book.counts()["too_long"] == 20 - len(kept)


def test_held_out_rows_that_are_too_long_are_counted_and_warned_of(configured):
    config, found = configured("--sft.max_tokens", "90"), Findings()
    book = ConversationBook(config)
    inspect_book(config, book, found, math.inf)
    left_out = 6 - len(book.held_out_batch().groups[0])
    assert 0 < left_out < 6 and book.counts()["held_out_too_long"] == left_out
    (warning,) = (line for line in found.warnings if "held-out" in line)
    assert warning.startswith(f"{left_out} of 6 held-out rows of")


def test_a_run_does_not_go_on_with_other_rows_or_in_another_order(one_rank, configured):
    train(configured("--schedule.max_steps", "2"))
    for key in ("seed", "sft.batch_size"):
        with pytest.raises(ConfigError, match=f"key '{key}' = 3"):
            train(configured(f"--{key}", "3"))


def change_the_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def change_the_template(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{# #}")


OTHERS = {
    "data.add_bos": "true",
    "data.template_options": "{x = 1}",
    "algorithm.normalisation": "sequence_mean",
    "model.path (weights)": change_the_weights,
    "model.path (chat template)": change_the_template,
}


def test_a_resume_with_other_tokens_or_another_loss_is_refused_before_the_folder_changes(
    one_rank, configured, inputs, tmp_path
):
    train(begun := configured("--schedule.max_steps", "2"))
    (begun.run_dir / "config.toml").write_text(begun.to_toml())
    RUN_FOLDER.claim(begun.run_dir, new=True)
    before = {path: path.read_bytes() for path in begun.run_dir.rglob("*") if path.is_file()}
    for key, value in OTHERS.items():
        if callable(value):
            value(folder := shutil.copytree(inputs / "policy", tmp_path / key))
        other = ["--model.path", str(folder)] if callable(value) else [f"--{key}", value]
        with pytest.raises(ConfigError) as refused:
            sft([tmp_path / "run.toml"], False, True, ["--schedule.max_steps", "3", *other])
        assert f"key '{key}'" in str(refused.value) and "began with" in str(refused.value), key
        assert {path: path.read_bytes() for path in before} == before
    assert train(configured("--schedule.max_steps", "3")).step_count == 3


def test_more_epochs_are_refused_behind_a_last_batch_that_was_not_full(one_rank, configured):
    train(configured("--data.epochs", "1", "--schedule.max_steps", "3"))  # 18 of 20 rows
    assert train(configured("--data.epochs", "1")).step_count == 4
    assert train(configured("--data.epochs", "1")).step_count == 4
    with pytest.raises(ConfigError, match=r"'data\.epochs' = 2 .*\b20\b"):
        train(configured("--data.epochs", "2"))


def begun_record(config, checkpoint_step):
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return SftRecord(config, checkpoint_step, 7, dict)


def recorded(config):
    """The lines of metrics.jsonl as people see them, and summary.json."""
    found = [orjson.loads(line) for line in (config.run_dir / "metrics.jsonl").read_bytes().splitlines()]
    return list(map(describe_line, found)), orjson.loads((config.run_dir / "summary.json").read_bytes())


def test_a_loss_that_is_not_finite_is_shown_and_resumed_and_counts_nowhere(configured):
    config = configured("--evaluation.best", "heldout")
    record, metrics = begun_record(config, 0), {"samples": 6, "tokens": 10, "train_s": 0.0, "wait_s": 0.0}
    record.evaluated(0, {"heldout": {"loss": float("nan"), "prompts": 6}})
    record.step(1, metrics | {"loss": 3.0})
    record.step(2, metrics | {"loss": float("nan")}, "nonfinite")
    record.step(3, metrics | {"loss": 1.0})
    assert record.best("heldout") == -1
    record.evaluated(3, {"heldout": {"loss": 2.0, "prompts": 6}})
    resumed = begun_record(config, 3)
    for each in (record, resumed):
        assert each.best("heldout") == 3 and each.tokens == 20
    shown, summary = recorded(config)
    assert shown == [
        "held-out loss at step 0: heldout not finite on 6 rows",
        "step 1: loss 3.0000, 10 tokens",
        "step 2: loss not finite, 0 tokens",
        "step 3: loss 1.0000, 10 tokens",
        "held-out loss at step 3: heldout 2.0000 on 6 rows",
    ]
    assert summary["loss"] == {"first": 3.0, "last3": 2.0} and summary["steps"] == 3


@pytest.mark.full
def test_a_batch_whose_rows_are_all_left_out_has_no_loss(one_rank, configured):
    config = configured("--sft.max_tokens", "90", "--sft.batch_size", "1")
    lengths = [len(ConversationBook(config).batch(step).samples) for step in range(20)]
    assert 0 < sum(lengths) < 20
    train(config)
    shown, summary = recorded(config)
    steps = [line for line in lines(config) if line["learner"]]
    assert [line["learner"]["loss"] is not None for line in steps[:20]] == list(map(bool, lengths))
    without_rows = [line for line in shown if "no row to train, 0 tokens" in line]
    assert len(without_rows) == sum(not line["samples"] for line in steps) >= lengths.count(0)
    assert summary["loss"]["first"] == next(line["learner"]["loss"] for line in steps if line["samples"]) > 0

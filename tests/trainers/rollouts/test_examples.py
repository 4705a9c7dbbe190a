"""The examples as they are: they learn, and go on where they were killed."""

import ast
import itertools
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from april.config import ConfigError, load
from april.observe.report.run_folder import read_run
from april.observe.report.samples import read_step
from tests.support.run_processes import assert_closed, steps_recorded, summary, wait_until

EXAMPLES = Path(__file__).parents[3] / "examples"
GRPO = EXAMPLES / "grpo.py"


@pytest.fixture
def train(start, tmp_path, config_file):
    """train(*overrides, example=GRPO, into="--checkpoint") -> Job of the example on the small configuration"""
    numbers = itertools.count()

    def begin(*overrides, example=GRPO, into="--checkpoint"):
        options = [into, str(tmp_path / "saved"), "--save-every", "2", *overrides]
        return start(f"log-{next(numbers)}", [sys.executable, str(example), str(config_file), *options])

    return begin


def test_it_is_short_and_imports_the_public_interface_torch_and_transformers_alone():
    text = GRPO.read_text()
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported - sys.stdlib_module_names == {"april", "torch", "transformers"}
    assert "from april" not in text and "april." in text and text.count("\n") < 150


def test_a_batch_in_which_all_rewards_are_equal_moves_no_weight():
    learner = object.__new__(runpy.run_path(str(GRPO))["Learner"])
    learner.model = torch.nn.Linear(2, 2)
    learner.optimizer = torch.optim.AdamW(learner.model.parameters(), weight_decay=0.1)
    learner.config = SimpleNamespace(learner=SimpleNamespace(lr=1.0, warmup_steps=0, grad_clip=1.0))
    before = [parameter.clone() for parameter in learner.model.parameters()]
    ones = torch.ones(4, 3, dtype=torch.bool)
    batch = SimpleNamespace(
        response_mask=ones, attention_mask=ones, advantages=torch.zeros(4), rewards=torch.ones(4), checkpoint=1
    )
    metrics = learner.step(batch)
    assert metrics["loss"] == 0.0 == metrics["grad_norm"] and metrics["tokens"] == 12
    assert all(map(torch.equal, before, learner.model.parameters()))


@pytest.mark.full
def test_it_trains_all_steps_and_the_run_ends_with_it(train, tmp_path):
    job = train("--schedule.max_steps", "2")
    assert job.wait() == 0, job.output
    assert assert_closed(tmp_path / "runs/small")["state"] == "finished"
    assert summary(tmp_path / "runs/small")["steps"] == 2
    wait_until(lambda: not job.descendants())


@pytest.mark.full
def test_killed_it_trains_again_what_was_not_durable_and_nothing_else(train, tmp_path):
    run_dir = tmp_path / "runs/small"
    job = train("--schedule.max_steps", "100000")
    wait_until(lambda: steps_recorded(run_dir) >= 3, job)
    job.kill("grpo.py")
    wait_until(lambda: not job.descendants())
    done = steps_recorded(run_dir)
    again = train("--schedule.max_steps", str(done + 4))
    assert again.wait() == 0, again.output
    lines = [line for line in again.output.splitlines() if line.startswith("step")]
    first = int(lines[0].removeprefix("step ").partition(":")[0])
    assert first % 2 == 1 and 3 <= first <= done + 1, "behind the newest checkpoint"
    found = assert_closed(run_dir)
    assert found["state"] == "finished" and found["steps"] == done + 4 == steps_recorded(run_dir)
    assert found["replays"]["different"] == 0
    assert found["replays"]["same"] >= done + 1 - first


@pytest.mark.full
def test_trl_trains_on_behaviour_log_probabilities_and_goes_on_from_its_own_checkpoint(train, run_dir, tmp_path, gate):
    words = ["--schedule.max_steps", "7", *gate.hold_rewards(4)]
    trl = partial(train, *words, example=EXAMPLES / "trl_grpo.py", into="--output")
    job = trl()
    wait_until((tmp_path / "saved/checkpoint-2/trainer_state.json").exists, job)
    wait_until(lambda: steps_recorded(run_dir) >= 4, job)
    job.kill("trl_grpo.py")
    wait_until(lambda: not job.descendants())
    gate.open()
    part = tmp_path / "saved/checkpoint-6"
    part.mkdir(exist_ok=True)
    (part / "trainer_state.json").write_text('{"global_step": 6, "log_')  # killed while it saved
    again = trl()
    assert again.wait() == 0, again.output
    found = assert_closed(run_dir)
    assert found["state"] == "finished" and found["steps"] == 7 == steps_recorded(run_dir)
    assert (tmp_path / "saved/checkpoint-7").is_dir() and not (tmp_path / "saved/checkpoint-1").exists()

    def figures(output, name):
        return [float(value) for value in re.findall(rf"'{name}': '([^']+)'", output)]

    first_apart = figures(job.output, "sampling/sampling_logp_difference/max")[0]
    assert first_apart < 1e-4, "under the weights that sampled them TRL says the same of all tokens"
    before, after = figures(job.output, "loss"), figures(again.output, "loss")
    gone_on_from = 7 - len(after)
    assert gone_on_from in (2, 4)
    assert before[gone_on_from:] == after[: len(before) - gone_on_from], "the same batches and weights"
    ratios = figures(again.output, "sampling/importance_sampling_ratio/max")
    assert max(ratios) > 1.0, "tokens of older weights are corrected"


SMALL = {
    "rollout_batch_size = 32": "rollout_batch_size = 4", "sampling_batch_size = 48": "sampling_batch_size = 6",
    "n_samples_per_prompt = 8": "n_samples_per_prompt = 2", "num_generations=8": "num_generations=2",
    "device_train_batch_size=32": "device_train_batch_size=8", "accumulation_steps=8": "accumulation_steps=1",
    "max_steps = 32": "max_steps = 2", "max_steps=32": "max_steps=2", "save_steps=8": "save_steps=1",
    "response_tokens = 512": "response_tokens = 24", "completion_length=512": "completion_length=24",
}  # fmt: skip
"""the sizes of TRL's page, and those of a test"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_trl_s_page_says_runs_in_a_folder_that_has_nothing_else(start, tmp_path, policy_folder, data_folder):
    page = (EXAMPLES.parent / "docs/trl.md").read_text()
    for number in SMALL:
        assert page.count(number) == 1, number
        page = page.replace(number, SMALL[number])
    for name, language in (("my-run.toml", "toml"), ("train.py", "python")):
        (tmp_path / name).write_text(re.search(rf"```{language}\n(.*?)```", page, re.S)[1])
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/policy").symlink_to(policy_folder)
    (tmp_path / "cache/data").symlink_to(data_folder)
    job = start("log", [sys.executable, "train.py"], start=partial(subprocess.Popen, cwd=tmp_path))
    assert job.wait(500) == 0, job.output
    assert assert_closed(tmp_path / "runs/trl")["state"] == "finished"
    lines = read_run(tmp_path / "runs/trl").steps
    assert all({"loss", "grad_norm", "lr", "entropy", "wait_s", "train_s"} <= line["learner"].keys() for line in lines)
    assert len(lines) == 2 and all(0 <= line["gradient"]["tokens"] <= 1 for line in lines)
    rows = [row for step in (0, 1, 2) for row in read_step(tmp_path / "runs/trl", step)]
    assert {row["step"] for row in rows if row["held_out"]} == {0, 2} and all(row["label"] for row in rows)
    assert sum(not row["held_out"] for row in rows) >= 2 * 4 * 2
    assert (tmp_path / "trl-checkpoints/checkpoint-2").is_dir() and (tmp_path / "runs/trl/report.html").is_file()


@pytest.mark.parametrize("batch_size", [None, 2])
def test_log_probabilities_by_length_are_those_that_trl_computes_of_all_rows_at_once(policy_folder, batch_size):
    adapter = pytest.importorskip("april.trainers.adapters.trl")
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    computed = []

    def score(model, ids, mask, logits_to_keep, batch_size=None, compute_entropy=False):
        computed.append(ids.numel())
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)[:, -logits_to_keep:]
        entropy = -(logits.exp() * logits).sum(-1) if compute_entropy else None
        return logits.gather(-1, ids[:, -logits_to_keep:, None])[..., 0], entropy, None

    lengths, longest = torch.tensor([9, 1, 3, 1, 2]), 12
    prompt = torch.tensor([[0, 1, 1]]).expand(5, 3)
    mask = torch.cat([prompt, (torch.arange(longest) < lengths[:, None]).long()], dim=1)
    ids = torch.randint(3, 9, mask.shape, generator=torch.manual_seed(0)) * mask
    sampled, given = mask[:, 3:].bool(), (model, ids, mask, longest)
    assert adapter.score_by_length(score, *given, batch_size=batch_size, num_images=None)[1] is None
    computed.clear()
    by_length = adapter.score_by_length(score, *given, batch_size=batch_size, compute_entropy=True)
    cost = sum(computed)
    for found, expected in zip(by_length[:2], score(*given, compute_entropy=True), strict=False):
        assert torch.allclose(found[sampled], expected[sampled], atol=1e-5)
        of_found, of_expected = (
            torch.autograd.grad(each[sampled].sum(), model.parameters(), retain_graph=True)
            for each in (found, expected)
        )
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(of_found, of_expected, strict=True))
    assert cost < ids.numel()


@pytest.mark.parametrize(
    "loss_type, others, is_sorted", [("dapo", None, True), ("bnpo", None, False), ("dapo", [1] * 6, False)]
)
def test_rows_of_like_length_share_a_micro_batch_of_trl_where_a_step_is_their_sum(loss_type, others, is_sorted):
    adapter = pytest.importorskip("april.trainers.adapters.trl")
    lengths = torch.tensor([5, 1, 2, 6, 3, 4])
    rows = {
        "completion_mask": (torch.arange(6) < lengths[:, None]).long(),
        "advantages": lengths.float(),
        "old": None,
        "others": others,
    }
    rows["num_items_in_batch"] = torch.tensor(21.0)
    own = adapter.split_tensor_dict(rows, 3)
    trainer = SimpleNamespace(
        _buffered_inputs=None, _step=0, loss_type=loss_type, _entropy_bonus_enabled=False, top_entropy_quantile=1.0,
        aux_loss_enabled=False,
    )  # fmt: skip

    def prepare(_):
        if not trainer._step:
            trainer._buffered_inputs = own
        return trainer._buffered_inputs[trainer._step]

    found = []
    for trainer._step in range(3):
        inputs = adapter.group_by_length(trainer, prepare, None)
        assert inputs["num_items_in_batch"] == 21 and inputs["old"] is None
        assert inputs["completion_mask"].sum(1).tolist() == inputs["advantages"].tolist()
        found += inputs["advantages"].tolist()
    assert found == (sorted(lengths.tolist()) if is_sorted else lengths.tolist())


def test_arguments_of_trl_that_do_not_fit_the_run_are_refused(config_file, tmp_path):
    adapter = pytest.importorskip("april.trainers.adapters.trl")
    fitting = {
        "num_generations": 2, "generation_batch_size": 8, "steps_per_generation": 1, "gradient_accumulation_steps": 1,
        "num_iterations": 1, "max_steps": 3, "temperature": 1.0,
    }  # fmt: skip
    config = load(config_file)
    adapter.check(config, SimpleNamespace(**fitting))
    for name in ("num_generations", "generation_batch_size", "max_steps", "temperature", "num_iterations"):
        with pytest.raises(ConfigError, match=f"TRL's 'GRPOConfig.{name}' = 17 "):
            adapter.check(config, SimpleNamespace(**fitting | {name: 17}))

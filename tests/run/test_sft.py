"""`april sft` with real processes: ranks that are killed, a run that is killed, the dry run, and what is exported."""

import random

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from april.data.arithmetic import CLEAN, demonstration, draw_task
from april.learner.policy.arithmetic import build_model, save_policy
from tests.support.run_processes import APRIL, Job, steps_recorded, summary, wait_until


def write_rows(path, count, seed):
    chance = random.Random(seed)
    tasks = [draw_task(chance, "train") for _ in range(count)]
    rows = [{"prompt": task.prompt, "completion": demonstration(task, CLEAN, chance)} for task in tasks]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(build_model(64, layers=2, seed=0), folder / "policy")
    write_rows(folder / "train.jsonl", 200, 0)
    write_rows(folder / "heldout.jsonl", 20, 1)
    return folder


@pytest.fixture
def sft(inputs, tmp_path):
    """Returns a function: name of a run, further words -> the running `april sft`."""
    path = tmp_path / "my-run.toml"
    path.write_text(f"""
run = {{ dir = "{tmp_path}/runs" }}
model = {{ path = "{inputs}/policy" }}
data = {{ path = "{inputs}/train.jsonl", eval_path = "{inputs}/heldout.jsonl", epochs = 2 }}
learner = {{ lr = 3e-3, device = "cpu", ranks = 2, checkpoint_every = 5, microbatch_tokens = 2048 }}
evaluation = {{ every = 10 }}
sft = {{ batch_size = 10 }}
""")

    def start(name, *words):
        return Job([*APRIL, "sft", str(path), "--run.name", name, *words], tmp_path / f"{name}.log")

    start.folder = tmp_path / "runs"
    return start


def losses(run_dir):
    found = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    of_steps = [(line["step"], line["learner"]["loss"]) for line in found if "learner" in line]
    return of_steps, [(line["step"], line["evaluation"]["loss"]) for line in found if "evaluation" in line]


@pytest.mark.full
def test_killed_ranks_and_a_killed_run_go_on_to_the_end_of_an_unbroken_run(sft):
    whole = sft("whole")
    assert whole.wait() == 0, whole.output
    broken = sft("broken")
    wait_until(lambda: steps_recorded(sft.folder / "broken") >= 7, broken)
    broken.kill("-u -m april.launch.sft")
    wait_until(lambda: steps_recorded(sft.folder / "broken") >= 17, broken)
    broken.end()
    assert summary(sft.folder / "broken")["state"] == "running"
    resumed = sft("broken", "--resume")
    assert resumed.wait() == 0, resumed.output
    assert losses(sft.folder / "broken") == losses(sft.folder / "whole")
    steps, held_out = losses(sft.folder / "whole")
    assert [step for step, _ in steps] == list(range(1, 41))
    assert [step for step, _ in held_out] == [0, 10, 20, 30, 40] and held_out[-1][1] < 0.7 * held_out[0][1]
    folders = [sft.folder / name / "checkpoints/policy" for name in ("whole", "broken")]
    policies = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    for (name, ours), (_, theirs) in zip(*(policy.named_parameters() for policy in policies), strict=True):
        assert torch.equal(ours, theirs), name
    assert AutoTokenizer.from_pretrained(sft.folder / "whole/checkpoints/policy")
    assert (sft.folder / "whole/report.html").is_file()


@pytest.mark.full
def test_a_dry_run_says_what_would_be_trained_and_names_the_first_bad_row(sft, inputs, tmp_path):
    good = sft("dry", "--dry-run")
    assert good.wait() == 0, good.output
    assert "200 rows and 20 held out" in good.output and "40 of 10 rows" in good.output
    assert "nothing is missing" in good.output and not (sft.folder / "dry").exists()
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes((inputs / "train.jsonl").read_bytes() + b'{"messages": [{"role": "user", "content": "1+1"}]}\n')
    refused = sft("dry", "--dry-run", "--data.path", str(bad))
    assert refused.wait() == 2
    assert "line 201: key 'completion' or 'response' or 'label' is missing" in refused.output

"""A small run: a tiny policy, prompts for it and a configuration."""

import random

import orjson
import torch

from april.learner.policy.arithmetic import EOS, VOCABULARY, build_model, save_policy

GUESSING_STEPS = 60
FILLER, ANSWERS = ",", "01"
PROMPTS = 64
"""Number of rows in the training file."""


def make_policy(folder, hidden_size=64):
    """Train a tiny Qwen3 that writes some filler and then guesses: half of its answers are right, and lengths are
    long-tailed. Returns its folder."""
    model = build_model(hidden_size, layers=1, seed=0)
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(GUESSING_STEPS):
        rows = [guess(chance) for _ in range(16)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        loss = model(ids, labels=ids.masked_fill(ids == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_policy(model, folder)
    return folder


def guess(chance):
    """Token ids of a prompt and a response of geometrically distributed length with a random answer."""
    length = min(100, int(chance.expovariate(1 / 20)))
    text = "05*3+60=" + FILLER * length + "#" + chance.choice(ANSWERS)
    return [VOCABULARY[character] for character in text] + [VOCABULARY[EOS]]


def make_prompts(folder):
    """Write `train.jsonl` with PROMPTS rows and `heldout.jsonl` with 16, each labelled 0 or 1; returns the folder."""
    for name, count in (("train", PROMPTS), ("heldout", 16)):
        rows = [{"prompt": f"{row:02d}*3+60=", "label": str(row % 2)} for row in range(count)]
        (folder / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return folder


def write_config(folder, policy_folder, data_folder):
    """Write the configuration of a small run: batches of 4 groups of 2, rounds of 6 groups, 3 steps, responses of at
    most 24 tokens."""
    text = f"""
run = {{ name = "small", dir = "{folder}/runs" }}
model = {{ path = "{policy_folder}" }}
data = {{ path = "{data_folder}/train.jsonl", eval_path = "{data_folder}/heldout.jsonl" }}
schedule = {{ rollout_batch_size = 4, over_sampling_batch_size = 6, n_samples_per_prompt = 2, max_steps = 3 }}
sampling = {{ max_response_tokens = 24 }}
evaluation = {{ prompts = 8 }}
worker = {{ slots = 8, prefetch = 2, chunk_tokens = 8 }}
learner = {{ lr = 1e-3, checkpoint_every = 1, keep_checkpoints = 10 }}
"""
    path = folder / "run.toml"
    path.write_text(text)
    return path


SHARED = ["--devices.share", "true", "--worker.engine", "sglang", "--worker.count", "1", "--learner.ranks", "1"]

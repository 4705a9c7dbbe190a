"""What most tests need: a policy folder that nobody trained, and prompts for it."""

import pytest

from april.data.make_data import make_data
from april.policy.model import build_model, save_policy


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """A tiny Qwen3 with random weights, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("policy")
    save_policy(build_model(hidden_size=64, layers=1, seed=0), folder)
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """`train.jsonl` with 64 prompts and `heldout.jsonl` with 16."""
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, train_prompts=64, heldout_prompts=16)
    return folder


@pytest.fixture
def config_file(tmp_path, policy_folder, data_folder):
    """A small run: 4 groups of 2, a round of 6, 3 steps, responses of at most 24 tokens."""
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
[run]
name = "small"
dir = "{tmp_path}/runs"
[model]
path = "{policy_folder}"
[data]
path = "{data_folder}/train.jsonl"
eval_path = "{data_folder}/heldout.jsonl"
[schedule]
rollout_batch_size = 4
over_sampling_batch_size = 6
n_samples_per_prompt = 2
max_steps = 3
[sampling]
max_response_tokens = 24
[evaluation]
prompts = 8
[worker]
slots = 8
prefetch = 2
[learner]
lr = 1e-3
checkpoint_every = 1
keep_checkpoints = 10
"""
    )
    return path

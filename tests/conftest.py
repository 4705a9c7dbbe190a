"""Fixtures of most tests: a tiny policy, prompts for it and a run's configuration; and the suite's collection rules."""

import os
import random
import re

import orjson
import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("april.workers.engines.conformance", "april.broker.conformance")
pytest_plugins = ["tests.run.fixtures", "tests.stores"]

from april.learner.policy.warm_start import EOS, VOCABULARY, build_model, save_policy  # noqa: E402

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
torch.set_num_threads(1)

SERVERS = {
    "sglang": ".venv-sglang/bin/python",
    "vllm": ".venv-vllm/bin/python",
    "verl": ".venv-verl/bin/python",
    "megatron": ".venv-megatron/bin/python",
    "browser": "/usr/bin/chromium",
    "slurm": "/usr/sbin/slurmctld",
    "ray": ".venv-ray/installed",
    "helm": ".venv-helm/helm",
    "kubectl": ".venv-helm/kubectl",
    "prometheus": ".venv-prometheus/usr/bin/prometheus",
    "sinks": ".venv-sinks/installed",
    "store": ".venv-store/installed",
}
"""Marks of tests that need another environment or program, and its path."""

GUESSING_STEPS = 60
FILLER, ANSWERS = ",", "01"


PROMPTS = 64
"""Rows of the training file."""
BEFORE = pytest.StashKey[set]()
"""Files in the checkout when the tests began."""
FOLDERS = pytest.StashKey[dict]()
"""Collected folders by path."""


def full(value, **options):
    """A parameter that the short form of the suite leaves out."""
    return pytest.param(value, marks=pytest.mark.full, **options)


CACHES = re.compile(r"__pycache__|\..*|.*\.egg-info")
"""Names of cache folders, which may be left behind."""


def checkout(config):
    """Paths of all files and folders in the checkout, without caches."""
    found = set()
    for folder, folders, names in os.walk(config.rootpath):
        folders[:] = [name for name in folders if not CACHES.fullmatch(name)]
        found |= {os.path.join(folder, name) for name in (*folders, *names)}
    return found


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = checkout(session.config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail if the suite has left files behind in the checkout."""
    leftover = checkout(session.config) - session.config.stash.get(BEFORE, set())
    if BEFORE in session.config.stash and leftover:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\nleft behind in the checkout: {', '.join(sorted(leftover))}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(path, parent):
    """Collect each folder once. Otherwise pytest 9.1 may make a second node of a folder, without the fixtures of its
    conftest.py (pytest-dev/pytest#14635)."""
    return parent.session.stash.setdefault(FOLDERS, {}).setdefault(path, (yield))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests that need a server or program are part of the full suite and run in one process per server; they are
    deselected if it is not installed. A test gets one group only, since xdist makes a third one of two."""
    missing = [mark for mark, program in SERVERS.items() if not (config.rootpath / program).exists()]
    deselected = [item for item in items if any(item.get_closest_marker(mark) for mark in missing)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
    for item in items:
        needed = [mark for mark in SERVERS if item.get_closest_marker(mark)]
        if needed:
            item.add_marker(pytest.mark.full)
            item.add_marker(pytest.mark.xdist_group(needed[0]))


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def make_policy(folder, hidden_size=64):
    """A tiny Qwen3 that writes some filler and then guesses: half its answers are right, lengths are long-tailed."""
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
    """Token ids of a prompt and a response with geometric length."""
    length = min(100, int(chance.expovariate(1 / 20)))
    text = "05*3+60=" + FILLER * length + "#" + chance.choice(ANSWERS)
    return [VOCABULARY[character] for character in text] + [VOCABULARY[EOS]]


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    return make_prompts(tmp_path_factory.mktemp("data"))


def make_prompts(folder):
    """`train.jsonl` with PROMPTS rows and `heldout.jsonl` with 16, each labelled 0 or 1."""
    for name, count in (("train", PROMPTS), ("heldout", 16)):
        rows = [{"prompt": f"{row:02d}*3+60=", "label": str(row % 2)} for row in range(count)]
        (folder / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return folder


@pytest.fixture
def config_file(tmp_path, policy_folder, data_folder):
    return write_config(tmp_path, policy_folder, data_folder)


def write_config(folder, policy_folder, data_folder):
    """A small run: 4 groups of 2, a round of 6, 3 steps, responses of at most 24 tokens."""
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


@pytest.fixture
def server_python(tmp_path):
    """A fake interpreter that reports the version of an installed server."""
    (tmp_path / "python").write_text("#!/bin/sh\necho 0.5.23\n")
    (tmp_path / "python").chmod(0o755)
    return str(tmp_path / "python")

"""What another process of the machine sends to the ranks of a learner is never unpickled."""

import ast
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from april.learner import checkpoint, launch
from april.learner.loading import ModelError
from april.learner.trainer import Trainer
from tests.support.learner import exposed_ranks
from tests.support.learner.comparison import equal
from tests.support.learner.exposed_ranks import PLANTED, Plant
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, uneven_batch
from tests.support.listening_addresses import listening
from tests.support.warm_imports import Popen

PROGRAM = exposed_ranks.__name__
LIMIT_S = 120


def start_ranks(kind: str, folder: Path) -> Popen:
    launch = [sys.executable, "-m", "april.learner.launch", "--nproc-per-node=2"]
    return Popen([*launch, "-m", PROGRAM, kind, str(folder)], env=os.environ | {"OMP_NUM_THREADS": "1"})


def family(pid: int) -> list[int]:
    """A process and those it has started."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(each for child in children for each in family(int(child)))]
    return []


def ports(pid: int) -> set[int]:
    """Ports at which a process or one that it has started listens."""
    found = set()
    for each in family(pid):
        with suppress(OSError):
            found |= {port for _, port in listening(each)}
    return found


@pytest.mark.full
def test_another_process_that_poses_as_a_late_rank_plants_nothing(tmp_path):
    ranks = start_ranks("late", tmp_path)
    ends = time.monotonic() + LIMIT_S
    while not ((found := ports(ranks.pid)) and (tmp_path / "store").exists()):
        assert ranks.poll() is None and time.monotonic() < ends
        time.sleep(0.05)
    for port in found:
        attack = [sys.executable, "-m", PROGRAM, "impostor", str(tmp_path), str(port)]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(attack, timeout=30, stderr=subprocess.DEVNULL)
    met = Path((tmp_path / "store").read_text()).parent
    assert stat.S_IMODE(met.stat().st_mode) == 0o700
    (tmp_path / "go").touch()
    status = ranks.wait(LIMIT_S)
    assert not (tmp_path / PLANTED).exists()
    assert status == 0, "the ranks go on without the impostor"
    assert not met.exists()


def test_folders_of_killed_launchers_are_removed_and_those_of_living_ones_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os, time; from april.learner.launch import make_folder as make; folder = make();"
    program += "os.fork() and print(folder, flush=True);"
    made = []
    for _ in range(2):
        holder = subprocess.Popen(
            [sys.executable, "-c", f"{program} time.sleep(1000)"],
            stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}, start_new_session=True, text=True,
        )  # fmt: skip
        made.append((holder, Path(holder.stdout.readline().strip())))
    (living, kept), (killed, left) = made
    try:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        living.kill()
        living.wait()
        while (lock := launch.lock(left)) is None:  # until its fork has ended, too
            time.sleep(0.01)
        os.close(lock)
        for folder in (kept, left):
            os.utime(folder, (0, 0))
        new = Path(launch.make_folder())
        assert set(tmp_path.iterdir()) == {kept, new}, "a fork of the first launcher lives"
    finally:
        os.killpg(living.pid, signal.SIGKILL)


def test_what_a_rank_receives_is_not_unpickled(tmp_path):
    ranks = start_ranks("pickles", tmp_path)
    assert ranks.wait(LIMIT_S) == 1
    assert not (tmp_path / PLANTED).exists()


@pytest.mark.full
def test_ranks_train_write_and_restore_checkpoints_without_unpickling_anything(policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run")
    batches = [uneven_batch(step, policy_folder) for step in range(2)]
    jobs = [
        job(config, batches, save_after=[1], disks=[0, 1]),
        job(config, batches[1:], restore=True, disks=[1, 2], without=["disk_0"]),
    ]
    whole, resumed = run_ranks(2, jobs, tmp_path / "ranks", (PROGRAM, "guarded"))
    assert resumed["restored"] == 1 and equal(whole["weights"], resumed["weights"])


@pytest.fixture
def trainer(one_rank, policy_folder, tmp_path):
    trainer = Trainer(make_config(policy_folder, tmp_path / "run"), torch.device("cpu"))
    trainer.step(uneven_batch(0, policy_folder))
    trainer.save()
    return trainer


def test_checkpoints_are_torch_s_and_torch_s_are_read(trainer, tmp_path):
    weights, state = trainer.weights(), checkpoint.sharded_state(trainer.parts)
    written = checkpoint.folder(trainer.directory, 1)
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    own, of_torch = (checkpoint.read_metadata(folder) for folder in (written, tmp_path / "torch"))
    own.storage_meta = of_torch.storage_meta = None
    assert own == of_torch
    for folder in (written, tmp_path / "torch"):
        for read in (checkpoint.read_tensors, lambda source, into: dcp.load(into, checkpoint_id=source)):
            with torch.no_grad():
                [tensor.zero_() for tensor in state.values()]
            read(folder, state)
            assert equal(trainer.weights(), weights)


@pytest.mark.parametrize("kind", ["a program", "an object that is no tensor", "no metadata"])
def test_a_checkpoint_s_metadata_runs_nothing(trainer, tmp_path, kind):
    path = checkpoint.folder(trainer.directory, 1) / checkpoint.METADATA_FILE
    metadata = checkpoint.read_metadata(path.parent)
    metadata.state_dict_metadata["more"] = dcp.metadata.BytesStorageMetadata()
    content = {"a program": Plant(tmp_path), "an object that is no tensor": metadata, "no metadata": [1]}[kind]
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(ModelError, match=re.escape(str(path))):
        checkpoint.read_metadata(path.parent)
    assert not (tmp_path / PLANTED).exists()


UNPICKLES = re.compile(
    r"(.*\.)?(\w+_object(_list)?|c?[pP]ickle|cloudpickle|dill|marshal|shelve|joblib|\w*Unpickler|\w*Pickler|recv_pyobj)"
    r"|(torch|dcp|np|numpy)\.(load|save|async_save)|torch\.distributed\.run\b.*|ray"
)
"""Names of what unpickles, or whose other side does."""
PERMITTED = {
    "april/launch/clusters/ray_job.py": {"ray"},
    "april/learner/backends/megatron/dist_checkpoints.py": {"checkpoint.MetadataUnpickler", "dcp.save", "pickle"},
    "april/learner/checkpoint.py": {"pickle", "pickle.Unpickler"},
    "april/trainers/adapters/openrlhf.py": {"ray"},
    "april/trainers/adapters/verl.py": {"ray"},
    "april/workers/rewards/code.py": {"marshal"},
    "april/workers/engines/sglang/weights.py": {"multiprocessing.reduction.ForkingPickler"},
}
"""Those that April uses, by file. docs/security.md says of each who reaches it, and why."""


def names(tree: ast.AST):
    """Dotted names that a module imports or uses as an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (each.name for each in node.names)
            case ast.ImportFrom():
                yield from (f"{node.module}.{each.name}" for each in node.names)
            case ast.Attribute():
                yield dotted(node)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute; what it is an attribute of is "" where that is no name."""
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_whatever_unpickles_is_named_on_the_page():
    root, unpickles = Path(__file__).parents[2], cache(UNPICKLES.fullmatch)
    found = {
        str(path.relative_to(root)): used
        for path in sorted((root / "april").rglob("*.py"))
        if (used := {*filter(unpickles, {*names(ast.parse(path.read_text()))})})
    }
    assert found == PERMITTED
    page = (root / "docs/security.md").read_text()
    assert [path for path in PERMITTED if f"`{path}`" not in page] == []

"""Runs jobs of the learner's tests on several ranks, under April's launcher."""

import os
import sys
from pathlib import Path

import orjson
import torch

from tests.support.warm_imports import Popen

PROGRAM = ("tests.support.learner.rank_jobs",)


def run_ranks(
    ranks: int, jobs: list[dict], folder: Path, program: tuple[str, ...] = PROGRAM, python: str = sys.executable,
    limit_s: int = 280,
) -> list[dict]:  # fmt: skip
    """Run the jobs one after the other, in ranks of one machine; returns rank 0's result of each. `program`: module and
    first arguments of what reads them; `limit_s`: time limit in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_bytes(orjson.dumps(jobs))
    command = [python, "-m", "april.learner.launch", f"--nproc-per-node={ranks}"]
    output = folder / "output"
    with output.open("wb") as file:
        process = Popen([*command, "-m", *program, str(folder)], stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.wait(limit_s) == 0, output.read_text()[-4000:]
    return torch.load(folder / "results.pt")

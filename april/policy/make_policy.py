"""Creation of the quickstart policy, once per recipe and seed: build, warm start, save as a Hugging Face folder."""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import orjson
import torch
import transformers

from april.config import ConfigError
from april.policy.model import build_model, save_policy
from april.policy.warm_start import Recipe, warm_start

RECORD = "warm_start.json"
"""File of a finished policy folder: recipe, seed, seconds."""


def make_policy(
    out_dir: str | Path, seed: int = 0, recipe: Recipe | None = None, log: Callable[[str], None] = print
) -> Path:
    """Return the folder of the policy; creates it if it does not exist, in about a minute on one core.

    The seed determines initial weights and demonstrations. `out_dir` appears only once it is complete. Raises
    ConfigError if `out_dir` holds something else.
    """
    out_dir, recipe = Path(out_dir), recipe or Recipe()
    made_from = {"recipe": asdict(recipe), "seed": seed}
    if holds(out_dir, made_from):
        return out_dir
    refuse_foreign(out_dir)
    started = time.monotonic()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        with one_thread():
            model = build_model(recipe.hidden_size, recipe.layers, seed)
            warm_start(model, recipe, seed, log)
        transformers.utils.logging.disable_progress_bar()
        save_policy(model, draft)
        record = {**made_from, "parameters": model.num_parameters(), "seconds": round(time.monotonic() - started, 1)}
        (draft / RECORD).write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2))
        draft.chmod(0o755)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        draft.rename(out_dir)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    log(f"policy: {record['parameters']} parameters in {out_dir}, {record['seconds']:.0f} s")
    return out_dir


def holds(out_dir: Path, made_from: dict) -> bool:
    """Whether `out_dir` holds a finished policy made from this recipe and seed."""
    record = out_dir / RECORD
    if not record.is_file():
        return False
    found = orjson.loads(record.read_bytes())
    return {key: found.get(key) for key in made_from} == made_from


def refuse_foreign(out_dir: Path) -> None:
    """Raises ConfigError unless `out_dir` is missing, empty, or a folder that `make_policy` made."""
    if out_dir.exists() and not (out_dir / RECORD).is_file() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} holds something else than a quickstart policy; give an empty or a new folder")


@contextmanager
def one_thread():
    """Within this context torch uses one CPU thread, for reproducible sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

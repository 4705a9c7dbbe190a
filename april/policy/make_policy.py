"""Makes the quickstart policy, once per recipe and seed: builds it, warm-starts it, saves a Hugging Face folder."""

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
    """Return the folder of the policy, made if it is not there yet; about a minute on one core.

    The seed sets the initial weights and the demonstrations. Nothing appears at `out_dir` before it is whole.
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
    record = out_dir / RECORD
    if not record.is_file():
        return False
    found = orjson.loads(record.read_bytes())
    return {key: found.get(key) for key in made_from} == made_from


def refuse_foreign(out_dir: Path) -> None:
    """Only a folder that was made here may be replaced."""
    if out_dir.exists() and not (out_dir / RECORD).is_file() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} holds something else than a quickstart policy; give an empty or a new folder")


@contextmanager
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

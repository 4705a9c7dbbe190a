"""`april convert-weights`: a checkpoint of any back end and number of ranks as a Hugging Face folder, and Hugging Face
folders to and from checkpoints in a back end's own form. Weights alone: what an optimizer keeps stays where it is.
"""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp

from april import config as configuration
from april.config import Config, ConfigError
from april.files.objects import StoreError
from april.formats.stored import StoredCheckpoints, refused, stored_checkpoints
from april.learner import checkpoint, lora
from april.learner.backends import BACKENDS
from april.learner.backends.entry import BackendEntry
from april.learner.loading import ModelError, fill
from april.learner.model import as_in_files, outline

HUGGING_FACE = "huggingface"
KEY = "--to"


def convert(source: Path, to: str, step: int | None, model: Path | None, out_dir: Path) -> str:
    """Write `out_dir`, a new folder; what is in it. The source is a run folder, a Hugging Face folder, or a checkpoint
    in a back end's own form, `model` the Hugging Face folder that the latter is of. Raises ConfigError.
    """
    if out_dir.exists():
        raise ConfigError(f"option '--out' = {str(out_dir)!r} is there already; give a folder that is not")
    target = None if to == HUGGING_FACE else BACKENDS.find(to, KEY)
    if target and not target.own_files:
        raise ConfigError(f"option '{KEY}' = {to!r} has no checkpoints of its own; give one of {', '.join(owners())}")
    is_run, is_model = ((source / name).is_file() for name in ("config.toml", "config.json"))
    owner = None if is_run or is_model else owner_of(source)
    if (is_model and target is None) or (owner and target):
        others = ", ".join(owners()) if is_model else HUGGING_FACE
        raise ConfigError(f"{source} cannot become {to!r}; give {KEY} {others}")
    if step is not None and (owner or is_model):
        raise ConfigError(f"option '--step' = {step} is of a run, which {source} is not; leave it out")
    if owner and model is None:
        raise ConfigError(
            f"option '--model' is wanted for {source}; give the Hugging Face folder that has its configuration and "
            "tokenizer"
        )
    if model and not owner:
        raise ConfigError(f"option '--model' = {str(model)!r} is of a back end's own checkpoint; leave it out")
    try:
        if owner and model:
            lm, weights = owner.read_own(source, model)
            checkpoint.write_model(lm, as_in_files(lm, weights), model, out_dir)
        elif target and is_model:
            to_own(target, source, out_dir)
        elif target:
            return f"step {run_to_own(target, source, step, out_dir)}"
        else:
            return f"step {to_model(source, step, out_dir)}"
    except ModelError as error:
        raise ConfigError(str(error)) from error
    return str(source)


def owners() -> dict[str, type[BackendEntry]]:
    """Shipped back ends that have checkpoints in a form of their own, by name."""
    entries = {name: BACKENDS.find(name) for name in BACKENDS.shipped}
    return {name: entry for name, entry in entries.items() if entry.own_files}


def owner_of(source: Path) -> type[BackendEntry] | None:
    """Whose form a checkpoint has; None where it is nobody's own."""
    found = (entry for entry in owners().values() if any((source / name).is_file() for name in entry.own_files))
    return next(found, None)


def run_to_own(target: type[BackendEntry], run_dir: Path, step: int | None, out_dir: Path) -> int:
    """By way of a Hugging Face folder beside it, which goes again."""
    target.installed()
    between = out_dir.with_name(f"{out_dir.name}.model.partial")
    shutil.rmtree(between, ignore_errors=True)
    try:
        found = to_model(run_dir, step, between)
        to_own(target, between, out_dir)
    finally:
        shutil.rmtree(between, ignore_errors=True)
    return found


def to_own(target: type[BackendEntry], folder: Path, out_dir: Path) -> None:
    partial = out_dir.with_name(f"{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        target.write_own(folder, partial)
        checkpoint.replace_folder(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def to_model(run_dir: Path, step: int | None, out_dir: Path) -> int:
    """Write `out_dir`: the weights of checkpoint `step`, of the newest where none is given, in the type
    of the model that the run began with; the step. In one process, on the CPU. Raises ConfigError or ModelError.
    """
    config = configuration.load([run_dir / "config.toml"], [], inputs=["model"])
    try:
        with checkpoint_of(run_dir / "checkpoints", stored_checkpoints(config), step, out_dir) as (found, source):
            write(source, config, out_dir)
    except StoreError as error:
        raise refused(error) from None
    return found


def write(source: Path, config: Config, out_dir: Path) -> None:
    """The model of a whole checkpoint. Raises ModelError."""
    folder = config.model.path
    policy = outline(folder, config.sampling.temperature)
    if config.lora.is_set:
        lora.attach(policy.lm, config.lora, config.seed)
    fill(policy.lm, folder)
    state = {f"model.{name}": parameter.detach() for name, parameter in policy.trained}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        dcp.load(state, checkpoint_id=source, no_dist=True)
    dtype = checkpoint.type_of_files(folder)
    weights = {name: value.detach().to(dtype) for name, value in lora.merged_weights(policy.lm)}
    checkpoint.write_model(policy.lm, as_in_files(policy.lm, weights), folder, out_dir)


@contextmanager
def checkpoint_of(
    directory: Path, stored: StoredCheckpoints | None, step: int | None, out_dir: Path
) -> Iterator[tuple[int, Path]]:
    """Its step and folder, whole; beside `out_dir` meanwhile, where the store has it and `directory` does not. Raises
    ConfigError."""
    in_store = stored.steps() if stored else set()
    there = sorted({*checkpoint.steps(directory), *in_store})
    if not there or (step is not None and step not in there):
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        known = f"there are those of steps {', '.join(map(str, there))}" if there else "there is none"
        raise ConfigError(f"{directory} does not have {wanted}; {known}")
    step = there[-1] if step is None else step
    source = checkpoint.folder(directory, step)
    damaged = checkpoint.damaged_files(source) if source.is_dir() else [checkpoint.CHECKSUMS_FILE]
    if not damaged:
        yield step, source
    elif stored and step in in_store:
        meanwhile = out_dir.with_name(f"{out_dir.name}.checkpoint.partial")
        try:
            fetch(stored, step, meanwhile)
            yield step, meanwhile
        finally:
            shutil.rmtree(meanwhile, ignore_errors=True)
    elif any((source / name).exists() for name in damaged):
        raise ConfigError(f"checkpoint {source} is damaged ({', '.join(damaged)}); take another with --step")
    else:
        raise ConfigError(
            f"checkpoint {source} lacks {', '.join(damaged)}; a learner over several machines has them on others: copy "
            "them from there, or take another with --step"
        )


def fetch(stored: StoredCheckpoints, step: int, folder: Path) -> None:
    """All of a checkpoint. Raises ConfigError."""
    for sums in stored.writings(step):
        checkpoint.begin_folder(folder, sums)
        if all(stored.fetch(step, sums, name, folder / name) for name in sums):
            return
    raise ConfigError(f"checkpoint {step} of {stored.url} is damaged; take another with --step")

"""`april convert-weights`: a checkpoint of any back end and number of ranks as a Hugging Face folder."""

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
from april.learner.loading import ModelError, fill
from april.learner.model import as_in_files, outline


def to_model(run_dir: Path, step: int | None, out_dir: Path) -> int:
    """Write `out_dir`, a new folder: the weights of checkpoint `step`, of the newest where none is given, in the type
    of the model that the run began with; the step. In one process, on the CPU. Raises ConfigError.
    """
    if out_dir.exists():
        raise ConfigError(f"option '--out' = {str(out_dir)!r} is there already; give a folder that is not")
    config = configuration.load([run_dir / "config.toml"], [], inputs=["model"])
    try:
        with checkpoint_of(run_dir / "checkpoints", stored_checkpoints(config), step, out_dir) as (found, source):
            write(source, config, out_dir)
    except StoreError as error:
        raise refused(error) from None
    return found


def write(source: Path, config: Config, out_dir: Path) -> None:
    """The model of a whole checkpoint."""
    folder = config.model.path
    try:
        policy = outline(folder, config.sampling.temperature)
        if config.lora.is_set:
            lora.attach(policy.lm, config.lora, config.seed)
        fill(policy.lm, folder)
    except ModelError as error:
        raise ConfigError(str(error)) from error
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

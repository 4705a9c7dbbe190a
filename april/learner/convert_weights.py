"""`april convert-weights`: a checkpoint of any back end and number of ranks as a Hugging Face folder."""

import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp

from april import config as configuration
from april.config import ConfigError
from april.learner import checkpoint, lora
from april.learner.loading import ModelError, fill
from april.learner.model import as_in_files, outline


def to_model(run_dir: Path, step: int | None, out_dir: Path) -> int:
    """Write `out_dir`, a new folder: the weights of checkpoint `step`, of the newest where none is given, in the type
    of the model that the run began with; the step. In one process, on the CPU. Raises ConfigError.
    """
    if out_dir.exists():
        raise ConfigError(f"option '--out' = {str(out_dir)!r} is there already; give a folder that is not")
    source = checkpoint_of(run_dir, step)
    config = configuration.load([run_dir / "config.toml"], [], inputs=["model"])
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
    return checkpoint.steps(source.parent)[-1] if step is None else step


def checkpoint_of(run_dir: Path, step: int | None) -> Path:
    """Its folder, whole. Raises ConfigError."""
    directory = run_dir / "checkpoints"
    there = checkpoint.steps(directory)
    if not there or (step is not None and step not in there):
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        known = f"there are those of steps {', '.join(map(str, there))}" if there else "there is none"
        raise ConfigError(f"{directory} does not have {wanted}; {known}")
    source = checkpoint.folder(directory, there[-1] if step is None else step)
    damaged = checkpoint.damaged_files(source)
    if damaged and not any((source / name).exists() for name in damaged):
        raise ConfigError(
            f"checkpoint {source} lacks {', '.join(damaged)}; a learner over several machines has them on others: copy "
            "them from there, or take another with --step"
        )
    if damaged:
        raise ConfigError(f"checkpoint {source} is damaged ({', '.join(damaged)}); take another with --step")
    return source

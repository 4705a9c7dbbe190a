"""`april convert-weights`: from a checkpoint of any back end and number of ranks to a Hugging Face folder, and between
Hugging Face folders and a back end's native checkpoints. Only weights are converted, no optimizer state.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from april import config as configuration
from april.config import Config, ConfigError
from april.config.stored import StoredCheckpoints, store_refused, stored_checkpoints
from april.learner import checkpoint, exports, lora
from april.learner.backends import BACKENDS
from april.learner.backends.entry import BackendEntry
from april.learner.loading import ModelError, load_weights
from april.learner.model import empty_policy, hugging_face_state
from april.util.errors import refuse
from april.util.objects import StoreError

HUGGING_FACE = "huggingface"
KEY = "--to"


def convert(source: Path, to: str, step: int | None, model: Path | None, out_dir: Path) -> str:
    """Write `out_dir`, a new folder; returns a description of what was converted.

    `source` is a run folder, a Hugging Face folder, or a native checkpoint of a back end, for which `model` is the
    Hugging Face folder with its configuration. `to`: name of the back end to convert to, or that of the Hugging Face
    format. `step`: of a run's checkpoint; None: the newest. Raises ConfigError.
    """
    if out_dir.exists():
        refuse("--out", out_dir, "is there already", "give a folder that is not")
    target = None if to == HUGGING_FACE else BACKENDS.find(to, KEY)
    if target and not target.native_files:
        refuse(KEY, to, "has no checkpoints of its own", f"give one of {', '.join(native_backends())}")
    is_run, is_model = ((source / name).is_file() for name in ("config.toml", "config.json"))
    native_entry = None if is_run or is_model else backend_of_checkpoint(source)
    if (is_model and target is None) or (native_entry and target):
        others = ", ".join(native_backends()) if is_model else HUGGING_FACE
        raise ConfigError(f"{source} cannot become {to!r}; give {KEY} {others}")
    if step is not None and (native_entry or is_model):
        refuse("--step", step, f"is of a run, which {source} is not", "leave it out")
    if native_entry and model is None:
        refuse(
            "--model",
            None,
            f"is wanted for {source}",
            "give the Hugging Face folder that has its configuration and tokenizer",
        )
    if model and not native_entry:
        refuse("--model", model, "is of a back end's own checkpoint", "leave it out")
    try:
        if native_entry and model:
            lm, weights = native_entry.read_native(source, model)
            exports.write_model(lm, hugging_face_state(lm, weights), model, out_dir)
        elif target and is_model:
            to_native(target, source, out_dir)
        elif target:
            return f"step {run_to_native(target, source, step, out_dir)}"
        else:
            return f"step {to_model(source, step, out_dir)}"
    except ModelError as error:
        raise ConfigError(str(error)) from error
    return str(source)


def native_backends() -> dict[str, type[BackendEntry]]:
    """Shipped back ends with a native checkpoint format, by name."""
    entries = {name: BACKENDS.find(name) for name in BACKENDS.shipped}
    return {name: entry for name, entry in entries.items() if entry.native_files}


def backend_of_checkpoint(source: Path) -> type[BackendEntry] | None:
    """The back end whose native format the checkpoint `source` has; None if `source` is in no back end's native
    format."""
    found = (
        entry for entry in native_backends().values() if any((source / name).is_file() for name in entry.native_files)
    )
    return next(found, None)


def run_to_native(target: type[BackendEntry], run_dir: Path, step: int | None, out_dir: Path) -> int:
    """Convert a run's checkpoint `step` (None: the newest) to the native format of the back end `target`, through a
    temporary Hugging Face folder; returns the step."""
    target.installed_version()
    model_folder = out_dir.with_name(f"{out_dir.name}.model.partial")
    shutil.rmtree(model_folder, ignore_errors=True)
    try:
        found = to_model(run_dir, step, model_folder)
        to_native(target, model_folder, out_dir)
    finally:
        shutil.rmtree(model_folder, ignore_errors=True)
    return found


def to_native(target: type[BackendEntry], folder: Path, out_dir: Path) -> None:
    partial = out_dir.with_name(f"{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        target.write_native(folder, partial)
        checkpoint.replace_folder(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def to_model(run_dir: Path, step: int | None, out_dir: Path) -> int:
    """Write the weights of a run's checkpoint `step` (None: the newest) as a Hugging Face folder `out_dir`, in the
    dtype of the run's starting model; returns the step. In one process, on the CPU. Raises ConfigError or ModelError.
    """
    config = configuration.load([run_dir / "config.toml"], [], inputs=["model"])
    try:
        with checkpoint_of(run_dir / "checkpoints", stored_checkpoints(config), step, out_dir) as (found, source):
            write(source, config, out_dir)
    except StoreError as error:
        raise store_refused(error) from None
    return found


def write(source: Path, config: Config, out_dir: Path) -> None:
    """Write the model of a complete checkpoint folder as a Hugging Face folder. Raises ModelError."""
    folder = config.model.path
    policy = empty_policy(folder, config.sampling.temperature)
    if config.lora.is_set:
        lora.attach(policy.lm, config.lora, config.seed)
    load_weights(policy.lm, folder)
    state = {f"model.{name}": parameter.detach() for name, parameter in policy.trained}
    checkpoint.read_tensors(source, state)
    dtype = checkpoint.dtype_of_folder(folder)
    weights = {name: value.detach().to(dtype) for name, value in lora.merged_weights(policy.lm)}
    exports.write_model(policy.lm, hugging_face_state(policy.lm, weights), folder, out_dir)


@contextmanager
def checkpoint_of(
    directory: Path, stored: StoredCheckpoints | None, step: int | None, out_dir: Path
) -> Iterator[tuple[int, Path]]:
    """(policy step, folder) of the complete checkpoint `step`; None: the newest. `directory`: folder with all
    checkpoints; `stored`: those in the object store, None without a store. A checkpoint that only the store has is
    downloaded into a temporary folder beside `out_dir`. Raises ConfigError."""
    in_store = stored.steps() if stored else set()
    known_steps = sorted({*checkpoint.steps(directory), *in_store})
    if not known_steps or (step is not None and step not in known_steps):
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        known = f"there are those of steps {', '.join(map(str, known_steps))}" if known_steps else "there is none"
        raise ConfigError(f"{directory} does not have {wanted}; {known}")
    step = known_steps[-1] if step is None else step
    source = checkpoint.folder(directory, step)
    damaged = checkpoint.damaged_files(source) if source.is_dir() else [checkpoint.CHECKSUMS_FILE]
    if not damaged:
        yield step, source
    elif stored and step in in_store:
        temporary = out_dir.with_name(f"{out_dir.name}.checkpoint.partial")
        try:
            fetch(stored, step, temporary)
            yield step, temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    elif any((source / name).exists() for name in damaged):
        raise ConfigError(f"checkpoint {source} is damaged ({', '.join(damaged)}); take another with --step")
    else:
        raise ConfigError(
            f"checkpoint {source} lacks {', '.join(damaged)}; a learner over several machines has them on others: copy "
            "them from there, or take another with --step"
        )


def fetch(stored: StoredCheckpoints, step: int, folder: Path) -> None:
    """Download a whole checkpoint from the object store. Raises ConfigError if the checkpoint is damaged."""
    for sums in stored.checkpoint_sums(step):
        checkpoint.begin_folder(folder, sums)
        if all(stored.fetch(step, sums, name, folder / name) for name in sums):
            return
    raise ConfigError(f"checkpoint {step} of {stored.url} is damaged; take another with --step")

"""Loads a configuration: TOML files and overrides become a validated `Config`, or a ConfigError."""

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from april.config.checks import INPUTS, check
from april.config.hub import Fetch, from_cache, hub_inputs, is_hub_name, take_recorded_commits
from april.config.section import HUB_NAME, NAME_OR_FILE, NONE, UNSET, Section, tables, with_own_keys
from april.config.sections import Config, RunSection
from april.util.errors import ConfigError, refuse
from april.util.registry import REGISTRIES, add_import_folders
from april.util.text import masked

# --- overrides, and the list of all keys ------------------------------------------------------------------------------


OVERRIDES = """every key of the configuration can be given as --section.key value. `--help SECTION` lists one section.
Values are written as in TOML: --data.sources '[{path = "a.jsonl"}, {path = "b.jsonl"}]'. A text needs no quotation
marks. none unsets a key that may be unset.
"""

FLAGS = {
    "rollout-batch-size": "schedule.rollout_batch_size",
    "over-sampling-batch-size": "schedule.over_sampling_batch_size",
    "n-samples-per-prompt": "schedule.n_samples_per_prompt",
    "partial-rollout": "schedule.partial_rollout",
    "engine": "worker.engine",
}
"""Short command-line flag, without the leading --, -> configuration key that it sets."""


def parse_overrides(arguments: list[str]) -> list[tuple[str, Any]]:
    """Parse command-line overrides into [(key, value)]: `--a.b value`, `--a.b=value`, and for booleans bare `--a.b` or
    `--no-a.b`."""
    pairs, rest = [], list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise ConfigError(f"argument {flag!r} is not an option; write overrides as --section.key value")
        name, has_value, text = flag[2:].partition("=")
        if not has_value and rest and not rest[0].startswith("--"):
            text, has_value = rest.pop(0), "="
        negated = name.startswith("no-") and not has_value
        name = name.removeprefix("no-") if negated else name
        key = FLAGS.get(name, name.replace("-", "_"))
        if (
            not has_value
            and (field := known_keys().get(key))
            and bool not in (field.annotation, *get_args(field.annotation))
        ):
            refuse(key, None, "has no value", f"write --{name} VALUE")
        pairs.append((key, parse_value(text, known_keys().get(key)) if has_value else not negated))
    return pairs


def parse_value(text: str, field: Any = None) -> Any:
    """Parse `text` as a TOML value. It is returned as a string if it is no TOML value, or if the key's pydantic
    `field` takes the string and not the value: a run's name may be a number."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if field is None or takes(field, value) or not takes(field, text) else text


def takes(field: Any, value: Any) -> bool:
    try:
        TypeAdapter(field.annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            refuse(key, None, f"goes through {section!r}, which is not a section", "see `april run --help`")
    assign(tree, name, value)


def assign(table: dict[str, Any], name: str, value: Any) -> None:
    """Set the key `name` of a table; if it is a path or a revision of a hub input and changes, the input's `commit` is
    removed."""
    if table.get(name) != value and (of_hub := re.fullmatch(r"(eval_)?(path|revision)", name)):
        table.pop(f"{of_hub[1] or ''}commit", None)
    table[name] = value


def known_keys(model: type[Section] = Config) -> dict[str, Any]:
    """Every `section.key` of a configuration with its pydantic field, in order of declaration."""
    keys = {}
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            keys.update({f"{name}.{key}": inner for key, inner in section.model_fields.items()})
        else:
            keys[name] = field
    return keys


def shown_default(value: Any) -> str:
    return "unset" if value in UNSET else str(value).lower() if isinstance(value, bool) else str(value)


def describe_keys(model: type[Section] = Config, section: str = "") -> str:
    """The list of keys in `--help`, under their sections or of one `section` alone: each with its help text, allowed
    values and default."""
    lines, heading = [], ""
    for key, field in known_keys(model).items():
        of_section = key.rpartition(".")[0]
        if section and of_section != section:
            continue
        if of_section != heading:
            lines.append(f"\n[{of_section}]")
        heading = of_section
        value = field.get_default(call_default_factory=True)
        default = "required" if field.is_required() else f"default {shown_default(value)}"
        choices = "|".join(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ""
        choices = "true|false" if field.annotation is bool else choices
        lines.append(f"  --{key:38} {field.description} [{choices}{', ' if choices else ''}{default}]")
    if not section:
        lines.append("\nthe published method's flags, and the engine's, by names of their own:")
        lines += [f"  --{flag:38} = --{key}" for flag, key in FLAGS.items()]
    return "\n".join(lines)


# --- refused keys, and hints for unknown ones -------------------------------------------------------------------------


SYNONYMS = {
    "lr": "learner.lr",
    "learning_rate": "learner.lr",
    "critic_lr": "critic.lr",
    "critic_warmup": "critic.warmup_batches",
    "cliprange_value": "critic.value_clip",
    "lambd": "critic.lam",
    "grad_clip": "learner.grad_clip",
    "kl_coef": "algorithm.kl_coef",
    "actor_lr": "learner.lr",
    "max_grad_norm": "learner.grad_clip",
    "clip_grad": "learner.grad_clip",
    "warmup": "learner.warmup_steps",
    "lr_warmup_steps": "learner.warmup_steps",
    "save_steps": "learner.checkpoint_every",
    "save_freq": "learner.checkpoint_every",
    "save_interval": "learner.checkpoint_every",
    "save_total_limit": "learner.keep_checkpoints",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "lora_rank": "lora.rank",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets",
    "modules_to_save": "lora.embedding",
    "lora_modules_to_save": "lora.embedding",
    "max_tokens_per_gpu": "learner.microbatch_tokens",
    "ppo_max_token_len_per_gpu": "learner.microbatch_tokens",
    "train_batch_size": "schedule.rollout_batch_size",
    "batch_size": "schedule.rollout_batch_size",
    "num_generations": "schedule.n_samples_per_prompt",
    "rollout_n": "schedule.n_samples_per_prompt",
    "group_size": "schedule.n_samples_per_prompt",
    "num_rollout": "schedule.max_steps",
    "total_training_steps": "schedule.max_steps",
    "num_train_epochs": "data.epochs",
    "ppo_epochs": "learner.epochs",
    "num_iterations": "learner.epochs",
    "num_steps_per_rollout": "learner.minibatches",
    "num_minibatches": "learner.minibatches",
    "ppo_mini_batch_size": "learner.minibatches",
    "total_epochs": "data.epochs",
    "num_epoch": "data.epochs",
    "max_completion_length": "sampling.max_response_tokens",
    "max_response_length": "sampling.max_response_tokens",
    "rollout_max_response_len": "sampling.max_response_tokens",
    "max_new_tokens": "sampling.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "rollout_max_prompt_len": "data.max_prompt_tokens",
    "rollout_temperature": "sampling.temperature",
    "model_name_or_path": "model.path",
    "hf_checkpoint": "model.path",
    "model": "model.path",
    "train_files": "data.path",
    "prompt_data": "data.path",
    "dataset_name": "data.path",
    "val_files": "data.eval_path",
    "eval_prompt_data": "data.eval_path",
    "test_freq": "evaluation.every",
    "eval_steps": "evaluation.every",
    "eval_interval": "evaluation.every",
    "input_key": "data.prompt_key",
    "answer_key": "data.label_key",
    "reward_funcs": "data.reward",
    "reward_function": "data.reward",
    "custom_reward_function": "data.reward",
    "rm_type": "data.reward",
    "custom_rm_path": "data.reward",
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "epsilon": "algorithm.clip_low",
    "eps_clip": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eps_clip_high": "algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "loss_type": "algorithm.loss",
    "output_dir": "run.dir",
    "default_local_dir": "run.dir",
    "save": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "report_to": "operations.sinks",
    "logger": "operations.sinks",
    "use_tensorboard": "operations.sinks",
    "num_workers": "worker.count",
    "rollout_num_gpus": "worker.count",
    "vllm_mode": "worker.engine",
    "rollout_engine": "worker.engine",
}
"""April's configuration key by the last component of the equivalent key in TRL, verl or slime."""


def likely_key(key: str, known: Collection[str]) -> str | None:
    """The known key that an unknown one most likely means, tried in this order: a typing error, the only key with the
    same last part, another trainer's name for a key, the most similar one. None if nothing is similar."""
    if typing_error := difflib.get_close_matches(key, known, n=1, cutoff=0.92):
        return typing_error[0]
    last = key.rpartition(".")[2]
    same_last_part = [other for other in known if other.rpartition(".")[2] == last]
    if len(same_last_part) == 1:
        return same_last_part[0]
    if (likely := SYNONYMS.get(last)) in known:
        return likely
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.5)), None)


EXAMPLES = {"list_type": "'[VALUE, VALUE]'", "tuple_type": "'[VALUE, VALUE]'", "dict_type": "'{name = VALUE}'"}
"""Example of a valid override, by type of the pydantic error for an invalid one."""


def error_sentence(error: ErrorDetails, model: type[Section] = Config, listing: str = "`april run --help`") -> str:
    """A pydantic error of `model` as one sentence: key, value, expectation. `listing`: where the keys are listed."""
    key = ".".join(str(part) for part in error["loc"])
    value = masked(error["input"], key)
    if error["type"] == "extra_forbidden":
        likely = likely_key(key, known_keys(model))
        fix = f"did you mean {likely!r}?" if likely else f"{listing} lists the keys"
        return f"unknown key {key!r} = {value!r}; {fix}"
    if error["type"] == "missing":
        key = {"model": "model.path", "data": "data.path"}.get(key, key)
        return f"key {key!r} is missing; set it in the file or with --{key} VALUE"
    if error["type"] == "model_type":
        return f"key {key!r} = {value!r} is refused: it is a section; write its keys under [{key}]"
    expected = re.sub(r"^\w+ should ", "should ", error["msg"])
    written = EXAMPLES.get(error["type"], "VALUE")
    return f"key {key!r} = {value!r} is refused: it {expected}; mend it in the file or with --{key} {written}"


# --- loading ----------------------------------------------------------------------------------------------------------


def load(
    path: str | Path | Sequence[Path],
    overrides: Sequence[str] = (),
    inputs: Collection[str] = INPUTS,
    own_parts: Collection[str] = tuple(REGISTRIES),
    fetch: Fetch | None = None,
    resumed: bool = True,
    supervised: bool = False,
) -> Config:
    """Read TOML files, later ones over earlier ones, apply `--section.key value` overrides, validate, and check that
    parts fit together. `inputs`: which of "model" and "data" must exist. Paths become absolute. Raises ConfigError.

    `own_parts`: keys that name parts; the user's own are imported, and the keys that they declare are checked. `fetch`:
    resolves the names of a hub, as a launcher of parts does; without it only the hub's cache is asked. `resumed`: take
    the commits of hub inputs from the folder of the run called `run.name`, if there is one. `supervised`: return
    `Config.supervised()`, for `april sft`.
    """
    tree = read_tree(path, overrides)
    config = validate(tree, own_parts)
    if named := hub_inputs(tree, Config):
        if resumed:
            take_recorded_commits(named, config.run_dir / "config.toml", Config)
        (fetch or from_cache(inputs))(named)
        config = validate(tree, own_parts)
    config = config.supervised() if supervised else config
    check(config, inputs)
    return config


def read_tree(path: str | Path | Sequence[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of TOML files and overrides, not validated yet; paths absolute. Raises ConfigError."""
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(file) for file in path]
    tree: dict[str, Any] = {"run": {"dir": str(RunSection.model_fields["dir"].default)}}
    folders: list[str] = []
    for file in paths:
        merge(tree, keys := read_file(file))
        run = keys.get("run")
        folders += [] if isinstance(run, dict) and "parts" in run else [str(file.parent.resolve())]
    given = parse_overrides(list(overrides))
    for key, value in given:
        set_key(tree, key, value)
    make_paths_absolute(tree, Path.cwd(), set(texts_in([value for _, value in given])))
    add_part_folders(tree, folders)
    if len(paths) > 1 and isinstance(tree.setdefault("run", {}), dict):
        tree["run"].setdefault("name", "-".join(file.stem for file in paths[1:]))
    return tree


def model_of(tree: dict[str, Any], own_parts: Collection[str] = tuple(REGISTRIES)) -> type[Config]:
    """Import the user's own parts that the configuration `tree` names; returns `Config` with the keys that they
    declare. `own_parts`: the keys whose value may name such a part. Raises ConfigError."""
    run = tree.get("run")
    folders = run.get("parts", []) if isinstance(run, dict) else []
    add_import_folders(*(Path(folder) for folder in folders if isinstance(folder, str)))
    return with_own_keys(Config, tree, own_parts.__contains__)


def add_part_folders(tree: dict[str, Any], folders: list[str]) -> None:
    """Add `folders`, those of the configuration files, to `run.parts`, in which Python modules of the user's own parts
    are looked for."""
    run = tree["run"]
    if isinstance(run, dict) and isinstance(parts := run.get("parts", []), list):
        run["parts"] = list(dict.fromkeys([*map(str, parts), *folders]))


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, with paths relative to its folder made absolute. Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read ({error}); give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}; mend that line") from None
    make_paths_absolute(tree, path.parent)
    return tree


def shipped(name: str) -> Path:
    """Path of one of April's own configuration files: in an installed wheel, or in the checkout's `configs`."""
    package = Path(__file__).parents[1]
    built_in = package / "configs" / name
    return built_in if built_in.exists() else package.parent / "configs" / name


def merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    """Merge `other` into `tree` key by key; values of `other` win."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            assign(tree, key, value)


def validate(tree: dict[str, Any], own_parts: Collection[str] = tuple(REGISTRIES)) -> Config:
    model = model_of(tree, own_parts)
    try:
        return model.model_validate(tree).importing(own_parts)
    except ValidationError as error:
        raise ConfigError(error_sentence(error.errors()[0], model)) from None


# --- paths ------------------------------------------------------------------------------------------------------------


def make_paths_absolute(tree: Any, folder: Path, given: Collection[str] | None = None) -> None:
    """Make the paths in a configuration's `tree` absolute in place; they are relative to `folder`. A name of a hub's
    repository is left as it is, unless `folder` has such a file or folder. `given`: the texts for which `folder` is
    searched; other texts in the form of a hub name count as one. None: all texts."""
    for _, table, model in tables(tree, Config):
        for name, field in model.model_fields.items():
            value, kinds = table.get(name), (field.annotation, *get_args(field.annotation))
            if isinstance(value, list) and Path in kinds:
                table[name] = [absolute_path(item, folder) if isinstance(item, str) else item for item in value]
            elif value == NONE and model.unset_value(name) is not NONE:
                continue
            elif isinstance(value, str) and not any(value in get_args(k) for k in kinds if get_origin(k) is Literal):
                of_hub = HUB_NAME in field.metadata and is_hub_name(value)
                of_hub = of_hub and not ((given is None or value in given) and is_there(folder / value))
                is_file = NAME_OR_FILE in field.metadata and Path(value).suffix
                if is_file or (not of_hub and (Path in kinds or HUB_NAME in field.metadata)):
                    table[name] = absolute_path(value, folder)


def is_there(path: Path) -> bool:
    """Whether a file or folder exists at `path`; False for a path that the file system refuses, such as one that is too
    long."""
    try:
        return path.exists()
    except OSError:
        return False


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value of TOML or JSON, at any depth."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_in(inner)


def absolute_path(path: str, folder: Path) -> str:
    """The absolute path. Links are kept: a Python interpreter finds its packages by the path it is called by."""
    return os.path.normpath(folder.resolve() / os.path.expanduser(path)) if path else path

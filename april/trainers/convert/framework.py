"""The interface of a framework: how its scripts are read, and how its options map to April's keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from april.trainers.convert.translation import Options, Rule, Translation
from april.util.errors import ConfigError

UNLIMITED_STEPS = 10**9
"""Value of `schedule.max_steps` for a run that ends when its prompts are used up."""
ANY_PROMPT_TOKENS = 1 << 20
"""Value of `data.max_prompt_tokens` where a framework bounds a prompt only by the model's context."""
ALL_PROMPTS = 10**6
"""Value of `evaluation.prompts` where a framework evaluates on all prompts of a file."""

SINKS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
"""Values of `operations.sinks` (metric loggers) that have the same names in other frameworks."""

SHARDING = "of how its trainer is spread over devices; April's is FSDP over learner.ranks"
MEMORY = "of memory; April packs into learner.microbatch_tokens, and shards all state"
OWN_FILES = "April's checkpoints and its exported policy are in the run's folder, run.dir and run.name"
LOGS = "of its logs; April writes metrics.jsonl, and to operations.sinks"
ADAM = "April's optimizer is AdamW"
CONSTANT_LR = "April keeps the learning rate constant after its warm-up"
IN_LOSS = "April's KL stands in the loss, and in the reward with a critic alone"
OWN_REWARD = "write it as one of April's rewards, or name it where docs/rewards.md says how, and set data.reward"


class Framework:
    """One framework. `read` reads a script's options, `table` translates single options, and `translate_joint` those
    that only mean something together."""

    source: ClassVar[str]
    """Repository and commit on which the table is based."""
    table: ClassVar[Mapping[str, Rule]]
    """Translation rule of each option, by option name; a trailing `*` matches all options with that prefix."""
    defaults: ClassVar[Mapping[str, Any]]
    """The framework's defaults of options that are always translated, because April's defaults differ or may change."""

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        """Read the options of the script at `path`. `environment`: variables that it can use. Raises ConfigError."""
        raise NotImplementedError

    def defaults_of(self, options: Options) -> Mapping[str, Any]:
        """The defaults for the kind of configuration that the script creates."""
        return self.defaults

    def translate_joint(self, translation: Translation) -> None:
        """Translate options that only mean something together."""
        raise NotImplementedError

    def translate(self, path: Path, environment: Mapping[str, str]) -> Translation:
        """Translate the script at `path`. Raises ConfigError."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} cannot be read ({error}); give a script") from None
        options = self.read(path, text, environment)
        translation = Translation(options, self.table, self.defaults_of(options))
        translation.apply_rules()
        self.translate_joint(translation)
        return translation


def set_minibatches(
    translation: Translation, name: str, responses: int | None, groups: int | None, n: int | None
) -> None:
    """Set the number of optimizer steps per batch from the option `name`, given `responses` per optimizer step and a
    batch of `groups` groups of `n` responses each."""
    if not responses or not groups or not n or responses == groups * n:
        return
    if groups * n % responses or responses % n:
        translation.mark_unsupported(
            name, f"April's optimizer steps have as many whole groups each, of the {groups} groups of {n}"
        )
    else:
        translation.set_key("learner.minibatches", groups * n // responses, name)


def has_several_steps(translation: Translation) -> bool:
    """Whether a batch has more than one optimizer step; valid once `learner.minibatches` and `learner.epochs` are
    set."""
    return any(translation.keys.get(f"learner.{key}", (1, ""))[0] > 1 for key in ("minibatches", "epochs"))


def set_clip(translation: Translation, low: str, high: str) -> None:
    """Translate the clip range of the ratio; the upper width defaults to the lower."""
    width = translation.value(low)
    translation.set_key("algorithm.clip_low", width, low)
    translation.set_key(
        "algorithm.clip_high", width if translation.value(high) is None else translation.value(high), high
    )


def set_adapter(translation: Translation, rank: str, alpha: str, targets: str, used: bool = True) -> None:
    """Translate LoRA options; without `targets` all linear layers are adapted."""
    size = translation.number(rank) if used else 0
    if not size:
        return
    translation.set_key("lora.rank", size, rank)
    translation.set_key("lora.alpha", translation.number(alpha), alpha)
    layers = translation.value(targets)
    target_names = layers if isinstance(layers, list) else [] if layers in (None, "all-linear") else [layers]
    translation.set_key("lora.targets", target_names or None, targets)


def set_devices(translation: Translation, trainers: int | None, generators: int | None, names: tuple[str, ...]) -> None:
    """Set the numbers of training devices and inference engines. None: the script shares devices between both, which is
    not translated."""
    if trainers is None or generators is None:
        translation.undecided["learner.ranks, worker.count"] = (
            f"{', '.join(names)} let training and generation take turns on the same devices; April gives each its own: "
            "set both keys"
        )
        return
    translation.set_key("learner.ranks", trainers, *names)
    translation.set_key("worker.count", generators, *names)


def set_reference_kl(translation: Translation, used: bool, coefficient: str, estimator: str) -> None:
    """Translate the KL term against the starting policy, of the given coefficient and estimator options."""
    weight = translation.number(coefficient) if used else 0
    translation.set_key("algorithm.kl_coef", float(weight or 0), coefficient)
    if weight:
        kind = str(translation.value(estimator)).removesuffix("+")
        kind = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind, kind)
        if kind in ("k1", "k2", "k3"):
            translation.set_key("algorithm.kl_estimator", kind, estimator)
        else:
            translation.mark_unsupported(estimator, "April's estimators are k1, k2 and k3")

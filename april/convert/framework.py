"""What April knows of another framework: how its scripts are read, and what its options are called here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from april.convert.options import Options
from april.convert.translation import Rule, Translation
from april.errors import ConfigError

EPOCHS_END_IT = 10**9
"""schedule.max_steps of a run that its data end"""
ANY_PROMPT_TOKENS = 1 << 20
"""data.max_prompt_tokens where only the model's context bounds a prompt"""
ALL_PROMPTS = 10**6
"""evaluation.prompts where a framework evaluates on all of a file"""

SINKS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
"""of operations.sinks, that other frameworks call so, too"""

SHARDING = "of how its trainer is spread over devices; April's is FSDP over learner.ranks"
MEMORY = "of memory; April packs into learner.microbatch_tokens, and shards all state"
OWN_FILES = "April's checkpoints and its exported policy are in the run's folder, run.dir and run.name"
LOGS = "of its logs; April writes metrics.jsonl, and to operations.sinks"
ADAM = "April's optimizer is AdamW"
CONSTANT_LR = "April keeps the learning rate constant after its warm-up"
IN_LOSS = "April's KL stands in the loss, and in the reward with a critic alone"
OWN_REWARD = "write it as one of April's rewards, or name it where docs/rewards.md says how, and set data.reward"


class Framework:
    """One of them. Its options are read by `read`, translated by `table`, and where several mean something together,
    by `joint`."""

    source: ClassVar[str]
    """repository and commit that the table was written from"""
    table: ClassVar[Mapping[str, Rule]]
    defaults: ClassVar[Mapping[str, Any]]
    """of options that have to be said, since April's own defaults are others, or may become others"""

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        """Of the script at `path`. `environment`: variables that it may find set. Raises ConfigError."""
        raise NotImplementedError

    def defaults_of(self, options: Options) -> Mapping[str, Any]:
        """Of the configuration that a script makes, where there are several."""
        return self.defaults

    def joint(self, said: Translation) -> None:
        """Say what options mean together."""
        raise NotImplementedError

    def translate(self, path: Path, environment: Mapping[str, str]) -> Translation:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} cannot be read ({error}); give a script") from None
        options = self.read(path, text, environment)
        said = Translation(options, self.table, self.defaults_of(options))
        said.rules()
        self.joint(said)
        return said


def optimizer_steps(said: Translation, name: str, responses: int | None, groups: int | None, n: int | None) -> None:
    """`name` has so many responses in an optimizer step, of a batch of `groups` of `n` each."""
    if not responses or not groups or not n or responses == groups * n:
        return
    if groups * n % responses or responses % n:
        said.differ(name, f"April's optimizer steps have as many whole groups each, of the {groups} groups of {n}")
    else:
        said.say("learner.minibatches", groups * n // responses, name)


def several_steps(said: Translation) -> bool:
    """Whether a batch is more than one optimizer step, once that has been said."""
    return any(said.keys.get(f"learner.{key}", (1, ""))[0] > 1 for key in ("minibatches", "epochs"))


def clip(said: Translation, low: str, high: str) -> None:
    """Bounds of the ratio, the upper one as wide as the lower where it is not given."""
    width = said.value(low)
    said.say("algorithm.clip_low", width, low)
    said.say("algorithm.clip_high", width if said.value(high) is None else said.value(high), high)


def adapter(said: Translation, rank: str, alpha: str, targets: str, used: bool = True) -> None:
    """An adapter that is trained in place of the model; `targets` may stand for all linear layers."""
    size = said.number(rank) if used else 0
    if not size:
        return
    said.say("lora.rank", size, rank)
    said.say("lora.alpha", said.number(alpha), alpha)
    layers = said.value(targets)
    named = layers if isinstance(layers, list) else [] if layers in (None, "all-linear") else [layers]
    said.say("lora.targets", named or None, targets)


def placed(said: Translation, trainers: int | None, generators: int | None, names: tuple[str, ...]) -> None:
    """How many devices train, and how many engines generate; None where both share them, which April does not."""
    if trainers is None or generators is None:
        said.open["learner.ranks, worker.count"] = (
            f"{', '.join(names)} let training and generation take turns on the same devices; April gives each its own: "
            "set both keys"
        )
        return
    said.say("learner.ranks", trainers, *names)
    said.say("worker.count", generators, *names)


def reference(said: Translation, used: bool, coefficient: str, estimator: str) -> None:
    """The KL to the starting policy."""
    weight = said.number(coefficient) if used else 0
    said.say("algorithm.kl_coef", float(weight or 0), coefficient)
    if weight:
        kind = str(said.value(estimator)).removesuffix("+")
        kind = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind, kind)
        if kind in ("k1", "k2", "k3"):
            said.say("algorithm.kl_estimator", kind, estimator)
        else:
            said.differ(estimator, "April's estimators are k1, k2 and k3")

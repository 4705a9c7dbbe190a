"""The interface of a framework: how its scripts are read, and how its options map to April's keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from april.trainers.convert.translation import Options, Rule, Translation, by_name, without_extremes
from april.util.errors import ConfigError

MAX_SCRIPT_CHARACTERS = 1 << 18
"""Maximum number of characters of a script; a longer one is refused."""
ANY_PROMPT_TOKENS = 1 << 20
"""Value of `data.max_prompt_tokens` for a framework that bounds a prompt only by the model's context length."""
ALL_PROMPTS = 10**6
"""Value of `evaluation.prompts` for a framework that evaluates on all prompts of a file."""

SINKS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
"""Values of `operations.sinks` (metric loggers) that have the same names in other frameworks."""

SHARDING = "of how its trainer is spread over devices; April's is FSDP over learner.ranks"
MEMORY = "of memory; April packs into learner.microbatch_tokens, and shards all state"
OWN_FILES = "April's checkpoints and its exported policy are in the run's folder, run.dir and run.name"
LOGS = "of its logs; April writes metrics.jsonl, and to operations.sinks"
ADAM = "April's optimizer is AdamW"
LR_SCHEDULES = by_name(
    constant="constant",
    constant_with_warmup="constant",
    linear="linear",
    cosine="cosine",
    cosine_with_min_lr="cosine",
    WSD="wsd",
    warmup_stable_decay="wsd",
)
"""Converts another framework's name of a learning-rate schedule to April's."""
IN_LOSS = "April's KL stands in the loss, and in the reward with a critic alone"
WARMUP = "April's warm-up is a number of steps, learner.warmup_steps"
DROPOUT = "April trains without dropout"
TEXT = "April takes text alone"
OWN_REWARD = "write it as one of April's rewards, or name it where docs/rewards.md says how, and set data.reward"


class Framework:
    """One framework. `read` reads a script's options, `table` translates single options, and `translate_joint` those
    that only mean something together."""

    source: ClassVar[str]
    """Repository and commit on which the table is based."""
    table: ClassVar[Mapping[str, Rule]]
    """Translation rule of each option, by option name; a trailing `*` matches all options with that prefix."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values, by option name, that are translated if a script does not give the option. For options that have
    no entry of their own in `table`, but match one with a `*`."""

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        """Read the options of the script at `path`, whose content is `text`. `environment`: variables that the script
        can use. Raises ConfigError."""
        raise NotImplementedError

    def defaults_of(self, options: Options) -> Mapping[str, Any]:
        """The default values, by option name, that are translated if a script does not give the option. They may depend
        on the kind of configuration that the script creates (`options.kind`)."""
        known = {name: rule.default for name, rule in self.table.items() if rule.default is not None}
        return {**known, **self.defaults}

    def translate_joint(self, translation: Translation) -> None:
        """Translate the options that determine a key of April only together with each other (those with the rule
        `Joint`)."""
        raise NotImplementedError

    def translate(self, path: Path, environment: Mapping[str, str]) -> Translation:
        """Translate the script at `path`. `environment`: variables that it can use. Raises ConfigError."""
        try:
            with path.open() as file:
                text = file.read(MAX_SCRIPT_CHARACTERS + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} cannot be read ({error}); give a script") from None
        if len(text) > MAX_SCRIPT_CHARACTERS:
            why = f"has more than {MAX_SCRIPT_CHARACTERS} characters; give a script without data in it"
            raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} {why}")
        try:
            options = without_extremes(self.read(path, text, environment))
        except (RecursionError, MemoryError):
            raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} is nested too deeply; flatten it") from None
        translation = Translation(options, self.table, self.defaults_of(options))
        translation.apply_rules()
        self.translate_joint(translation)
        return translation

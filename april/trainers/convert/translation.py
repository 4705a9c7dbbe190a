"""Read another framework's options, translate them to April's keys by rules, and record what cannot be translated."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from april.trainers.convert.expansion import Word
from april.trainers.convert.shell import UNKNOWN_ELEMENTS, Invocation, Script
from april.util.errors import ConfigError
from april.util.logs import shortened

UNLIMITED_STEPS = 10**9
"""Value of `schedule.max_steps` for a run that ends when its prompts are used up."""

# --- options ----------------------------------------------------------------------------------------------------------

HYDRA = re.compile(r"(\+{0,2})([\w./@-]+)=(.*)", re.DOTALL)
NUMBER = re.compile(r"[-+]?(\d{1,400}(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
MAX_ALIASES, MAX_DEPTH = 16, 100
"""Limits of a YAML file: number of aliases, each of which may double what it is in, and depth of nesting."""
COLLECTION_STARTS = (
    yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken, yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken,
)  # fmt: skip
COLLECTION_ENDS = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
MAX_LIST_CHARACTERS = 4096
"""Maximum number of characters of an option's text that is parsed as a list."""
MAX_VALUES = 100_000
"""Maximum number of option values; each element of a list counts as one."""


@dataclass
class Options:
    """Values of a script's options, by the framework's option names."""

    values: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reason why an option cannot be read, by option name, or by the script's text where the name itself is unknown."""
    kind: str = ""
    """The configuration class that the script uses, where the framework has several."""


def script_options(text: str, environment: Mapping[str, str], program: str, hydra: bool = False) -> Options:
    """Options of the one command in a bash script, `text`, that calls `program`, a regular expression for the end of
    its name. `environment`: variables of the script. `hydra`: they are KEY=VALUE overrides. Raises ConfigError."""
    script = Script.read(text, environment)
    words = launch_arguments(script.invocations, program)
    options = hydra_overrides(words) if hydra else flag_options(words)
    return options if hydra else with_unused_arrays(options, script, words)


def with_unused_arrays(options: Options, script: Script, words: Sequence[Word]) -> Options:
    """Record as unreadable, in `options`, each bash array of flags that the script sets but does not pass to the
    program. Returns `options`. `words`: the arguments of the program."""
    arguments = {word.text for word in words}
    for name, value in script.variables.items():
        array_flags = [word.text for word in value if word.text.startswith("--")] if isinstance(value, list) else []
        if array_flags and not arguments & set(array_flags):
            options.unreadable[name] = f"the script sets it and never gives it to the program: {' '.join(array_flags)}"
    return options


def launch_arguments(invocations: Sequence[Invocation], program: str) -> list[Word]:
    """The arguments of the program. Raises ConfigError if no command calls it, or more than one."""
    pattern = re.compile(rf"(?:.*[/.\s]|^)(?:{program})")
    matches = [
        (command.line, command.words[index + 1 :])
        for command in invocations
        for index, word in enumerate(command.words)
        if pattern.fullmatch(word.text)
    ]
    if len(matches) != 1:
        lines = " and ".join(str(line) for line, _ in matches)
        raise ConfigError(
            f"lines {lines} of the script may both start its trainer; decide their conditions with --set NAME=VALUE"
            if matches
            else f"the script calls no program like {program.replace(chr(92), '')}; give one that starts a run"
        )
    return matches[0][1]


def flag_options(words: Sequence[Word]) -> Options:
    """Options of the forms `--name value`, `--name=value` and `--name`; the last one of a name wins."""
    options, name, arguments = Options(), "", dict[str, list[Word]]()
    for word in words:
        if word.text.startswith("--") and not word.unreadable:
            name, has_value, value = word.text[2:].partition("=")
            arguments[name] = [Word(value)] if has_value else []
        elif name and UNKNOWN_ELEMENTS not in word.text:
            arguments[name].append(word)
        else:
            options.unreadable[word.text] = word.unreadable or "it belongs to no option"
    for name, values in arguments.items():
        if why := next((word.unreadable for word in values if word.unreadable), ""):
            options.unreadable[name] = why
        else:
            read = [scalar(word.text) for word in values]
            options.values[name] = True if not read else read[0] if len(read) == 1 else read
    return options


def hydra_overrides(words: Sequence[Word]) -> Options:
    """Options of the form `key=value`, with up to two `+` before it."""
    options = Options()
    for word in words:
        match = HYDRA.fullmatch(word.text)
        if word.unreadable or not match:
            name = match[2] if match else word.text
            options.unreadable[name] = word.unreadable or "it is no KEY=VALUE"
        else:
            options.values[match[2]] = scalar(match[3])
    return options


def file_options(text: str, path: Path) -> Options:
    """The options of a YAML file, by their keys joined with dots. Raises ConfigError."""
    aliases = depth = 0
    try:
        for token in yaml.scan(text):
            aliases += isinstance(token, yaml.AliasToken)
            depth += isinstance(token, COLLECTION_STARTS) - isinstance(token, COLLECTION_ENDS)
            if aliases > MAX_ALIASES or depth > MAX_DEPTH:
                raise yaml.YAMLError(f"more than {MAX_ALIASES} aliases, or {MAX_DEPTH} levels")
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = shortened(str(error), 200)
        raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} is not YAML that is read ({reason}); mend it") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} holds no options; give a YAML file of names and values")
    values = {name: scalar(value) if isinstance(value, str) else value for name, value in flatten(tree).items()}
    unreadable = {
        name: "another option's value, which is not read" for name, value in values.items() if "${" in str(value)
    }
    return Options({name: value for name, value in values.items() if name not in unreadable}, unreadable)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by their dotted names, which begin with `prefix`."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        values |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def scalar(text: str) -> Any:
    """The text as a number, bool, None or list if it is one; otherwise the text itself."""
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "none", "~"):
        return None
    if text[:1] == "[":
        try:
            is_refused = len(text) > MAX_LIST_CHARACTERS or any(isinstance(t, yaml.AliasToken) for t in yaml.scan(text))
            return text if is_refused else yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            return text
    return text


def without_extremes(options: Options) -> Options:
    """Mark as unreadable the numbers beyond 64 bits and those that are not finite, which no option can mean. Returns
    `options`. Raises ConfigError for more than `MAX_VALUES` values."""
    for name, value in list(options.values.items()):
        values, count = [value], 0
        while values and count <= MAX_VALUES:
            inner, count = values.pop(), count + 1
            if isinstance(inner, list | dict):
                values += inner.values() if isinstance(inner, dict) else inner
            elif isinstance(inner, int | float) and not abs(inner) < 2**63:
                options.unreadable[name] = "a number beyond 64 bits"
                options.values.pop(name, None)
        if values:
            raise ConfigError(f"option {name!r} of the script has more than {MAX_VALUES} values; shorten it")
    return options


# --- rules and translation --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base class of the rules that say how one of a framework's options is translated."""

    default: Any = None
    """The framework's default value, which is translated if a script does not give the option, because April's own
    default differs or may change; None if it need not be translated."""


@dataclass(frozen=True)
class MapTo(Rule):
    """Rule of an option that maps to one configuration key of April; `convert` raises NotTranslatable for values
    without a counterpart."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Ignored(Rule):
    """Rule of an option that only affects how the other program runs, not what is learned; `why` says how."""

    why: str


@dataclass(frozen=True)
class Unsupported(Rule):
    """Rule of an option without a counterpart in April, which changes what is learned unless its value is one of
    `off`."""

    why: str
    off: tuple[Any, ...] = (None, False, 0)


@dataclass(frozen=True)
class Joint(Rule):
    """Rule of an option that `Framework.translate_joint` translates, together with others."""


def each(rule: Rule, names: str, prefix: str = "") -> dict[str, Rule]:
    """The rule for each of the `names`, which are separated by blanks and all start with `prefix`."""
    return {prefix + name: rule for name in names.split()}


class NotTranslatable(ValueError):
    """Raised for an option's value that has no counterpart in April; the text gives the reason."""


@dataclass
class Translation:
    """The translation of one script. `defaults`: default values, by name, for options that it does not give."""

    options: Options
    table: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """(value, names of the options from which it follows) of each configuration key of April."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Options that do not change what is learned, with the reason."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Options that cannot be translated, so that April's run would differ, with the reason."""
    undecided: dict[str, str] = field(default_factory=dict)
    """Options that were not understood, and keys that the user has to set, with the reason."""

    def __post_init__(self) -> None:
        for name, why in self.options.unreadable.items():
            rule = self.rule(name)
            if isinstance(rule, Ignored):
                self.ignored[name] = rule.why
            else:
                self.undecided[name] = f"{why}; {rule.why}" if isinstance(rule, Unsupported) else why

    def given(self, name: str) -> bool:
        return name in self.options.values or name in self.options.unreadable

    def value(self, name: str) -> Any:
        """The value of the option `name` in the script, or the framework's default; None if the script's cannot be
        read."""
        return self.options.values.get(name, None if name in self.options.unreadable else self.defaults.get(name))

    def number(self, name: str) -> Any:
        """The option's value, as from `value`, if it is a number; otherwise None, and the option is recorded as
        undecided."""
        value = self.value(name)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        self.undecided[name] = f"{value!r} is no number"
        return None

    def set_key(self, key: str, value: Any, *names: str) -> None:
        """Set April's key to a value that follows from the options `names`; a value of None sets nothing."""
        if value is not None:
            self.keys[key] = (value, ", ".join(map(self.label, names)))

    def override(self, key: str, value: Any) -> None:
        """Set a configuration key to the user's choice, and remove the entries of `undecided` about this key."""
        self.keys[key] = (value, "chosen")
        self.undecided = {
            keys: why for keys, why in self.undecided.items() if not set(keys.split(", ")) <= self.keys.keys()
        }

    def label(self, name: str) -> str:
        """The option's name for messages, marked if the framework's default was used."""
        return name if self.given(name) else f"default of {name}"

    def apply_rules(self) -> None:
        """Translate each option by its own rule."""
        names = dict.fromkeys([*self.options.values, *(name for name in self.defaults if not self.given(name))])
        for name in names:
            rule, value = self.rule(name), self.value(name)
            if rule is None:
                self.undecided[name] = "it is not in April's table of this framework's options"
            elif isinstance(rule, Ignored):
                self.ignored[name] = rule.why
            elif isinstance(rule, Unsupported) and value not in rule.off:
                self.unsupported[self.with_value(name)] = rule.why
            elif isinstance(rule, MapTo) and value is not None and (self.given(name) or rule.key not in self.keys):
                try:
                    self.set_key(rule.key, rule.convert(value), name)
                except NotTranslatable as why:
                    self.unsupported[self.with_value(name)] = str(why)
                except (TypeError, ValueError):
                    self.undecided[name] = f"{value!r} is not of the kind that was expected"

    def rule(self, name: str) -> Rule | None:
        """The option's rule, or the rule of the longest matching prefix with a `*`; None if no rule matches."""
        if name in self.table:
            return self.table[name]
        prefixes = [known for known in self.table if known.endswith("*") and name.startswith(known[:-1])]
        if not prefixes:
            return None
        rule = self.table[longest := max(prefixes, key=len)]
        if isinstance(rule, MapTo) and rule.key.endswith("*"):
            return MapTo(rule.key[:-1] + name[len(longest) - 1 :].replace("-", "_"), rule.convert)
        return rule

    def with_value(self, name: str) -> str:
        return f"{self.label(name)} = {self.value(name)!r}"

    def mark_unsupported(self, name: str, why: str) -> None:
        """Record that the option's value cannot be translated."""
        self.unsupported[self.with_value(name)] = why

    # --- options that all frameworks have, under other names ---

    def copy(self, key: str, name: str) -> None:
        """Set a key to the value of the option `name`."""
        self.set_key(key, self.value(name), name)

    def set_paths(self, name: str, files: Any) -> None:
        """Set `data.path` to the one file in `files`, or `data.sources` to its files if it is a list of several.
        `files`: the value of the option `name`."""
        if isinstance(files, list) and len(files) > 1:
            self.set_key("data.sources", [{"path": file} for file in files], name)
        else:
            self.set_key("data.path", single_path(files), name)

    def set_length(self, steps: str, epochs: str) -> None:
        """Set the length of the run: the option `steps` counts batches. It takes precedence over `epochs`, which counts
        whole passes over the prompts."""
        count, passes = self.number(steps), self.number(epochs)
        if count and count > 0:
            self.set_key("schedule.max_steps", count, steps)
            return
        self.set_key("schedule.max_steps", UNLIMITED_STEPS, epochs)
        if passes is not None and passes != int(passes):
            self.mark_unsupported(epochs, "April's passes over the prompts are whole ones")
        elif passes is not None:
            self.set_key("data.epochs", int(passes), epochs)

    def set_minibatches(self, name: str, responses: int | None, groups: int | None, n: int | None) -> None:
        """Set the number of optimizer steps per batch, which follows from the option `name`: `responses` per optimizer
        step, of a batch of `groups` groups of `n` responses. Sets nothing if one of these is unknown."""
        if not responses or not groups or not n or responses == groups * n:
            return
        if groups * n % responses or responses % n:
            self.mark_unsupported(
                name, f"April's optimizer steps have as many whole groups each, of the {groups} groups of {n}"
            )
        else:
            self.set_key("learner.minibatches", groups * n // responses, name)

    def has_several_steps(self) -> bool:
        """Whether a batch has more than one optimizer step; valid once `learner.minibatches` and `learner.epochs` are
        set."""
        return any(self.keys.get(f"learner.{key}", (1, ""))[0] > 1 for key in ("minibatches", "epochs"))

    def set_advantage(self, name: str, estimators: Mapping[str, str], scaled: bool) -> str | None:
        """Translate the option `name`, an estimator of advantages, by `estimators` (its value -> April's name), and
        return April's name; None if there is none. `scaled`: whether GRPO divides by a group's standard deviation."""
        estimator = estimators.get(self.value(name))
        if estimator == "grpo" and not scaled:
            estimator = "dr_grpo"
        if estimator:
            self.set_key("algorithm.advantage", estimator, name)
        else:
            self.undecided["algorithm.advantage"] = f"April has no {name} = {self.value(name)!r}; choose one"
        return estimator

    def mark_critic_options(self, estimator: str, *names: str) -> None:
        """For a run without a critic: mark the options `names`, which are discount factors of a critic's returns, as
        unsupported if their value is not 1. `estimator`: name of the option that would ask for a critic."""
        for name in names:
            if self.value(name) not in (1, None):
                self.mark_unsupported(name, f"it is of a critic, which {estimator} = gae asks for")

    def set_normalisation(self, name: str, means: Mapping[str, str]) -> None:
        """Translate the option `name`, which says how the loss is averaged over tokens, by `means`: the option's value
        -> value of April's `algorithm.normalisation`."""
        if mean := means.get(self.value(name)):
            self.set_key("algorithm.normalisation", mean, name)
        else:
            self.mark_unsupported(name, f"April's normalisations are those of {', '.join(means)}")

    def set_clip(self, low: str, high: str) -> None:
        """Translate the clip range of the ratio from the options named `low` and `high`; the upper width defaults to
        the lower."""
        width, upper = self.value(low), self.value(high)
        self.set_key("algorithm.clip_low", width, low)
        self.set_key("algorithm.clip_high", width if upper is None else upper, high)

    def set_reference_kl(self, used: bool, coefficient: str, estimator: str) -> None:
        """Translate the KL term against the starting policy. `used`: whether the script turns it on; `coefficient`,
        `estimator`: names of the options with its weight and its estimator."""
        weight = self.number(coefficient) if used else 0
        self.set_key("algorithm.kl_coef", float(weight or 0), coefficient)
        if weight:
            kind = str(self.value(estimator)).removesuffix("+")
            kind = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind, kind)
            if kind in ("k1", "k2", "k3"):
                self.set_key("algorithm.kl_estimator", kind, estimator)
            else:
                self.mark_unsupported(estimator, "April's estimators are k1, k2 and k3")

    def set_betas(self, first: str, second: str) -> None:
        """Translate AdamW's two decay rates from the options named `first` and `second`."""
        self.set_key("learner.betas", [self.value(first), self.value(second)], first, second)

    def set_adapter(self, rank: str, alpha: str, targets: str, used: bool = True) -> None:
        """Translate LoRA options. `rank`, `alpha`, `targets`: names of the options; if the option `targets` has no
        value, all linear layers are adapted. `used`: whether the script turns LoRA on."""
        size = self.number(rank) if used else 0
        if not size:
            return
        self.set_key("lora.rank", size, rank)
        self.set_key("lora.alpha", self.number(alpha), alpha)
        layers = self.value(targets)
        target_names = layers if isinstance(layers, list) else [] if layers in (None, "all-linear") else [layers]
        self.set_key("lora.targets", target_names or None, targets)

    def set_devices(self, trainers: int | None, generators: int | None, names: tuple[str, ...]) -> None:
        """Set the numbers of training devices (`trainers`) and inference engines (`generators`), which follow from the
        options `names`. None: the script shares devices between both, which is not translated."""
        if trainers is None or generators is None:
            self.undecided["learner.ranks, worker.count"] = (
                f"{', '.join(names)} let training and generation take turns on the same devices; April gives each its "
                "own: set both keys"
            )
            return
        self.set_key("learner.ranks", trainers, *names)
        self.set_key("worker.count", generators, *names)


# --- conversions of values --------------------------------------------------------------------------------------------


def by_name(**meanings: Any) -> Callable[[Any], Any]:
    """Returns a conversion function from the given names to values; other names raise NotTranslatable."""

    def convert(value: Any) -> Any:
        name = str(value).replace("-", "_").replace("++", "_plus_plus")
        if name not in meanings:
            raise NotTranslatable(f"April has no counterpart; it knows {', '.join(meanings)}")
        return meanings[name]

    return convert


def not_negative(value: Any) -> Any:
    """The number, or 0 where it is negative, which stands for "off"."""
    return max(value, 0)


def if_positive(value: Any) -> Any:
    """The number; None where it is not positive, which stands for "off"."""
    return value if value > 0 else None


def chat_or_text(templated: Any) -> str:
    """The value of `data.prompt_as`. `templated`: whether the other framework renders prompts by the chat template."""
    return "chat" if templated else "text"


def only(value: Any, why: str) -> Callable[[Any], None]:
    """Returns a conversion function that accepts only `value`, which is April's own behaviour and sets no key; other
    values raise NotTranslatable with `why`."""

    def convert(given: Any) -> None:
        if given != value:
            raise NotTranslatable(why)

    return convert


def single_path(value: Any) -> Any:
    """The path, or the single element of a list of paths. Raises NotTranslatable for several paths."""
    if isinstance(value, list):
        if len(value) != 1:
            raise NotTranslatable("several files are data.sources in April, each with a weight; write them there")
        return value[0]
    return value


def known_names(sinks: tuple[str, ...]) -> Callable[[Any], list[str]]:
    """Returns a conversion function: of one or several names of metric loggers it keeps those in `sinks`."""
    return lambda names: [name for name in sinks if name in (names if isinstance(names, list) else [names])]

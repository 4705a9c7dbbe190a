"""Helpers that convert scripts of other frameworks, and load the resulting configuration."""

from april.cli.convert import toml
from april.config import load
from april.trainers.convert.framework import Framework

ENVIRONMENT = {"HOME": "/root", "MODEL_PATH": "/models/policy", "WORLD_SIZE": "4"}


def flags(options):
    return "\n".join(f"   --{name}" + ("" if value is None else f" {value}") for name, value in options.items())


def converted(framework: Framework, text, folder, name="script.sh"):
    """Convert a script; returns (translation, configuration that April loads from it)."""
    path = folder / name
    path.write_text(text)
    translation = framework.translate(path, ENVIRONMENT)
    out = folder / "out.toml"
    out.write_text(toml(translation, "april convert", framework))
    return translation, load(out, inputs=())


def value(config, key):
    section, _, name = key.partition(".")
    found = getattr(getattr(config, section), name)
    return str(found) if hasattr(found, "parts") else found


def assert_says(config, keys):
    assert {key: value(config, key) for key in keys} == keys


def python_script(trainer, options):
    """Text of a Python script in the form of TRL's examples: a configuration object, and a trainer that takes it."""
    own = {name: options[name] for name in ("model", "reward_funcs")}
    rewards = own["reward_funcs"] if isinstance(own["reward_funcs"], str) else f"[{', '.join(own['reward_funcs'])}]"
    keywords = ", ".join(f"{name}={value!r}" for name, value in options.items() if name not in own)
    return (
        "from trl.rewards import accuracy_reward, think_format_reward\n"
        "def reward_score(completions, **columns): raise SystemExit('this script was run')\n"
        f"dataset = load_dataset('openai/gsm8k')\nargs = {trainer}Config({keywords})\n"
        f"{trainer}Trainer(model={own['model']!r}, args=args, reward_funcs={rewards}, train_dataset=dataset).train()\n"
    )

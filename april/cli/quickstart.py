"""`april quickstart`: a tiny policy, trained on this machine."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from april.cli.command import command
from april.cli.run import RUN_OPTIONS, run
from april.util.errors import ConfigError

POLICY, DATA = Path("cache/policy"), Path("cache/data")
"""Folders of the quickstart's policy and prompts, relative to the current folder."""
INPUTS = {"model.path": POLICY, "data.path": DATA / "train.jsonl", "data.eval_path": DATA / "heldout.jsonl"}
"""Overrides by which the quickstart's inputs are found relative to the current folder. Paths in its configuration file
are relative to that file's folder instead."""


@command(*RUN_OPTIONS, overrides=True)
def quickstart(dry_run: bool, overrides: list[str], **options: Any) -> int:
    """Make a tiny policy and prompts in ./cache, and train it."""
    from april.config.loading import shipped

    if not dry_run:
        make_inputs()
    inputs = [word for key, path in INPUTS.items() for word in (f"--{key}", str(path.absolute()))]
    return run([shipped("quickstart.toml")], dry_run, without_learner=False, overrides=[*inputs, *overrides], **options)


def make_inputs() -> None:
    """Create the policy and the prompts unless they exist. Raises ConfigError if torch is missing."""
    if find_spec("torch") is None:
        raise ConfigError("the quickstart needs torch, which is not installed; run `pip install 'april-rl[all]'`")
    from april.data.arithmetic import make_data
    from april.launch.sft.warm_start import make_policy

    make_policy(POLICY)
    make_data(DATA)

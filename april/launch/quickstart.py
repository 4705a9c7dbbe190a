"""Inputs of `april quickstart`: the shipped configuration, and a tiny policy and prompts, created on the first call."""

from importlib.util import find_spec
from pathlib import Path

from april.config import ConfigError

BUILT_IN = Path(__file__).with_name("quickstart.toml")
QUICKSTART = BUILT_IN if BUILT_IN.exists() else Path(__file__).parents[2] / "configs/quickstart.toml"
"""Configuration file in the wheel, or in the checkout."""
POLICY, DATA = Path("cache/policy"), Path("cache/data")
"""Folders under the current one."""
INPUTS = {"model.path": POLICY, "data.path": DATA / "train.jsonl", "data.eval_path": DATA / "heldout.jsonl"}
"""Overrides for the configuration, whose own paths are relative to its folder."""


def prepare() -> None:
    """Create the policy and the prompts unless they exist. Raises ConfigError if torch is missing."""
    if find_spec("torch") is None:
        raise ConfigError("the quickstart needs torch, which is not installed; run `pip install 'april-rl[all]'`")
    from april.data.make_data import make_data
    from april.policy.make_policy import make_policy

    make_policy(POLICY)
    make_data(DATA)

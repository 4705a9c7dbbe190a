"""What `april quickstart` trains: a tiny policy and its prompts, made once, and the configuration that is shipped."""

from importlib.util import find_spec
from pathlib import Path

from april.config import ConfigError

BUILT_IN = Path(__file__).with_name("quickstart.toml")
CONFIG = BUILT_IN if BUILT_IN.exists() else Path(__file__).parents[2] / "configs/quickstart.toml"
"""of the wheel, or of the checkout"""
POLICY, DATA = Path("cache/policy"), Path("cache/data")
"""in the current folder"""
INPUTS = {"model.path": POLICY, "data.path": DATA / "train.jsonl", "data.eval_path": DATA / "heldout.jsonl"}
"""for the configuration, which means what lies beside its own folder"""


def prepare() -> None:
    """Make policy and prompts, unless they are there. Raises ConfigError."""
    if find_spec("torch") is None:
        raise ConfigError("the quickstart needs torch, which is not installed; run `pip install 'april-rl[all]'`")
    from april.data.make_data import make_data
    from april.policy.make_policy import make_policy

    make_policy(POLICY)
    make_data(DATA)

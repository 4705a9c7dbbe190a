"""`april plan`: what a run needs of an accelerator's memory, and which keys make it fit."""

import math
from pathlib import Path

from april.cli.command import CONFIG, command, load_config, option
from april.util.errors import ConfigError, refuse, refuse_for


@command(
    CONFIG,
    option("--gpu", type=float, required=True, metavar="GIB", help="Memory of each accelerator, GiB."),
    lists_keys=True,
)
def plan(config: list[Path], gpu: float, overrides: list[str]) -> int:
    """Print the memory that a run needs on an accelerator, and keys that make it fit into --gpu GiB; exit status 1 if
    it does not fit as it is."""
    from april.config.hub import Fetcher

    if not 0 < gpu < math.inf:
        refuse("--gpu", gpu, "is no memory of an accelerator", "give it in GiB, such as 80")
    loaded = load_config(config, overrides, inputs=["model"], fetch=Fetcher("tokenizer"))
    try:
        from april.launch.plan import describe
        from april.learner.loading import ModelError
    except ImportError as error:
        raise ConfigError(
            f"planning needs the package {error.name}, which is not installed; run `pip install 'april-rl[learner]'`"
        ) from None
    try:
        text, fits = describe(loaded, gpu * 2**30)
    except ModelError as error:
        refuse_for("model.path", loaded.model.path, "cannot be trained", error)
    print(text)
    return 0 if fits else 1

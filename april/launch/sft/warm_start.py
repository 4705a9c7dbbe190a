"""The quickstart's policy: a small Qwen3, made once per recipe and seed by `april sft` on demonstrations of arithmetic.

RL selects among the behaviours a policy has and does not create skill, so supervised training on clean demonstrations
comes first. The noisy demonstrations at its end add the errors that RL removes, and their rate sets the reward that RL
starts from.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import transformers

from april.config import ConfigError
from april.config.loading import load, read_file, shipped
from april.data.arithmetic import demonstrations
from april.launch.preflight import make_run_folder
from april.launch.sft.start import SftRun
from april.launch.supervisor import RunFailed
from april.learner.policy.arithmetic import build_model, save_policy
from april.learner.policy.made_once import make_once

CONFIG = "quickstart-sft.toml"
"""Configuration file of the supervised training, in the folder of the quickstart's configuration."""
SHOW_EVERY = 50
"""Steps from one shown line to the next."""


@dataclass(frozen=True)
class Recipe:
    """The policy's size, and how many demonstrations teach it; recipe, configuration and seed determine the policy."""

    hidden_size: int = 128
    layers: int = 3
    easy: int = 800
    """Number of error-free demonstrations of easy tasks, whose multiplier (`ArithmeticTask.times`) is 2, 3 or 4."""
    clean: int = 3200
    """Number of error-free demonstrations of any tasks: the multiplier (`ArithmeticTask.times`) of each is drawn from
    all that tasks have."""
    noisy: int = 1600
    """Number of demonstrations of any tasks with deliberate errors (`april.data.arithmetic.HABITS`)."""
    revision: int = 4
    """Revision of the warm start's code, increased whenever the same recipe gives another policy."""


def make_policy(
    out_dir: str | Path, seed: int = 0, recipe: Recipe | None = None, log: Callable[[str], None] = print
) -> Path:
    """Return the folder of the policy; creates it if it does not exist, in about a minute on a core.

    The seed determines initial weights and demonstrations. `recipe`: None for `Recipe()`. `out_dir` appears only once
    it is complete. Raises ConfigError if `out_dir` holds something else, or if the training fails.
    """
    recipe, file = recipe or Recipe(), shipped(CONFIG)
    made_from = {"recipe": asdict(recipe), "config": read_file(file), "seed": seed}

    def make(folder: Path) -> int:
        with tempfile.TemporaryDirectory(dir=folder) as training:
            return trained(file, recipe, seed, Path(training), folder, log)

    return make_once(Path(out_dir), made_from, make, log)


def trained(file: Path, recipe: Recipe, seed: int, training: Path, folder: Path, log: Callable[[str], None]) -> int:
    """Train a policy in the folder `training`, and move it to `folder`; returns its number of parameters. `file`: the
    configuration; `log`: shows a line. Raises ConfigError if the training fails."""
    model, rows = build_model(recipe.hidden_size, recipe.layers, seed), training / "demonstrations.jsonl"
    transformers.utils.logging.disable_progress_bar()
    save_policy(model, training / "start")
    drawn = demonstrations(recipe.easy, recipe.clean, recipe.noisy, seed)
    rows.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in drawn))
    keys = {"seed": seed, "model.path": training / "start", "data.path": rows, "run.dir": training}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    config = make_run_folder(load(file, words, supervised=True))
    try:
        state = SftRun(config, (), lambda line: log(f"warm start: {line}"), SHOW_EVERY).run()
    except RunFailed as error:
        raise ConfigError(f"the warm start failed: {error}") from error
    if state != "finished":
        raise KeyboardInterrupt
    for path in config.exported_policy.iterdir():
        path.rename(folder / path.name)
    return model.num_parameters()

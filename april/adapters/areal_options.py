"""Check that AReaL's options agree with the run. Option names are those of areal/api/cli_args.py in AReaL 1.0.4."""

import os
from typing import Any

from april.config import Config, ConfigError
from april.config.checks import first_cut_key
from april.errors import refuse

SPMD = "AREAL_SPMD_MODE"
"""Environment variable of AReaL's mode in which every rank runs the whole trainer."""


def check(config: Config, theirs: Any, rows: Any = None) -> None:
    """Check that one batch is one AReaL step, and that both sides define log-probabilities alike. Raises
    ConfigError."""
    if os.environ.get(SPMD, "").lower() in ("1", "true"):
        raise ConfigError(f"{SPMD} is set: every rank would ask for batches; start AReaL with scheduler.type=local")
    if config.data.source == "submitted" and rows is None:
        refuse("data.source", "submitted", "wants AReaL's rows", "give train_dataset")
    schedule, sampling = config.schedule, config.sampling
    wanted = {
        "actor.path": (os.path.abspath(theirs.actor.path), str(config.model.path)),
        "actor.temperature": (theirs.actor.temperature, sampling.temperature),
        "actor.weight_update_mode": (theirs.actor.weight_update_mode, "disk"),
        "actor.use_lora": (theirs.actor.use_lora, False),
        "actor._version": (theirs.actor._version, "v1"),
        "train_dataset.batch_size": (theirs.train_dataset.batch_size, schedule.rollout_batch_size),
        "gconfig.n_samples": (theirs.gconfig.n_samples, schedule.n_samples_per_prompt),
        "gconfig.temperature": (theirs.gconfig.temperature, sampling.temperature),
        "gconfig.max_new_tokens": (theirs.gconfig.max_new_tokens, sampling.max_response_tokens),
        "dynamic_bs": (theirs.dynamic_bs, False),
    }
    for name, (value, fitting) in wanted.items():
        if value != fitting:
            raise ConfigError(f"AReaL's '{name}' = {value!r} does not fit the run; set it to {fitting!r}")
    if sampling.is_cut:
        key, cut = first_cut_key(config)
        refuse(f"sampling.{key}", cut, "cuts the distribution, which AReaL does not follow", "leave it out")

"""Check that OpenRLHF's options agree with the run.

Names and defaults are those of openrlhf/cli/train_ppo_ray.py in OpenRLHF 0.11.2.
"""

import argparse
from pathlib import Path
from typing import Any

from april.config import Config, ConfigError
from april.config.checks import first_cut_key
from april.errors import refuse

OPTIONS: dict[str, tuple[type, Any]] = {
    "actor.model_name_or_path": (Path, None),
    "rollout.batch_size": (int, 1024),
    "rollout.vllm_generate_batch_size": (int, None),
    "rollout.n_samples_per_prompt": (int, 1),
    "rollout.temperature": (float, 1.0),
    "rollout.top_p": (float, 1.0),
    "rollout.max_new_tokens": (int, None),
    "vllm.num_engines": (int, None),
    "vllm.tensor_parallel_size": (int, 1),
    "vllm.sync_backend": (str, "nccl"),
    "algo.advantage.is_correction_level": (str, "off"),
    "ckpt.path": (str, "./ckpt/checkpoints_ppo_ray"),
    "eval.dataset": (str, None),
    "train.agent_func_path": (str, None),
}
"""(type, default) of OpenRLHF's options by name."""
FLAGS = (
    "algo.dynamic_filtering_enable",
    "ckpt.load_enable",
    "train.async_enable",
    "train.colocate_all",
    "vllm.sync_with_ray",
)


def their_options(words: list[str]) -> dict[str, Any]:
    """Values of OPTIONS and FLAGS on OpenRLHF's command line; other options are ignored."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, (kind, default) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=default)
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", action="store_true")
    return vars(parser.parse_known_args(words)[0])


def check(config: Config, theirs: dict[str, Any]) -> None:
    """Check that one batch is one OpenRLHF step, and that both sides define log-probabilities alike. Raises
    ConfigError."""
    schedule, sampling = config.schedule, config.sampling
    groups = schedule.rollout_batch_size
    wanted: dict[str, tuple] = {
        "actor.model_name_or_path": (config.model.path,),
        "rollout.batch_size": (groups,),
        "rollout.vllm_generate_batch_size": (None, groups),
        "rollout.n_samples_per_prompt": (schedule.n_samples_per_prompt,),
        "rollout.temperature": (sampling.temperature,),
        "rollout.top_p": (1.0,),
        "rollout.max_new_tokens": (sampling.max_response_tokens,),
        "vllm.num_engines": (1,),
        "vllm.tensor_parallel_size": (1,),
        "algo.advantage.is_correction_level": ("token", "seq"),
        "eval.dataset": (None,),
        "train.agent_func_path": (None,),
        "train.async_enable": (False,),
        "train.colocate_all": (False,),
        "algo.dynamic_filtering_enable": (False,),
    }
    for name, fitting in wanted.items():
        if theirs[name] not in fitting:
            fix = "leave it out" if fitting[0] in (None, False) else f"set it to {' or '.join(map(str, fitting))}"
            raise ConfigError(f"OpenRLHF's '--{name}' = {theirs[name]} does not fit the run; {fix}")
    if sampling.is_cut:
        key, value = first_cut_key(config)
        refuse(f"sampling.{key}", value, "cuts the distribution, which OpenRLHF does not follow", "leave it out")
    only_their_prompts = schedule.groups_per_round == groups and not schedule.filters_groups
    if config.data.source == "submitted" and not only_their_prompts:
        refuse(
            "data.source",
            "submitted",
            "trains the prompts of each of OpenRLHF's batches and no others",
            "leave out schedule.over_sampling_batch_size and filters, or let April draw the prompts: data.path",
        )

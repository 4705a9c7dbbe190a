"""OpenRLHF's scripts: `--section.name value`, given to openrlhf.cli.train_ppo_ray.

Options and defaults as in openrlhf/cli/train_ppo_ray.py of OpenRLHF/OpenRLHF at 3c3be6234, and of its 0.11.2, which has
other names for the correction of stale tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.convert.framework import (
    ADAM,
    CONSTANT_LR,
    EPOCHS_END_IT,
    IN_LOSS,
    LOGS,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    Framework,
    adapter,
    optimizer_steps,
    placed,
    reference,
    several_steps,
)
from april.convert.options import Options, of_script
from april.convert.translation import JOINT, Apart, Lacks, Rule, To, Translation, one_of, only

IS = "algo.advantage.is_correction_"
ESTIMATORS = {
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "gae": "gae",
}
"""advantage by --algo.advantage.estimator"""
MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
SCHEMES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""level and mode by is_correction_type"""
UNBOUNDED = 1e9
"""above any ratio that April or OpenRLHF computes"""

TABLE: dict[str, Rule] = {
    "actor.model_name_or_path": To("model.path"),
    "actor.gradient_checkpointing_enable": To("learner.activation_checkpointing"),
    "actor.gradient_checkpointing_reentrant": Apart(MEMORY),
    "actor.policy_loss_type": To("algorithm.loss", one_of(ppo="ppo", gspo="gspo")),
    "actor.loss_agg_mode": JOINT,
    "actor.eps_clip": JOINT,
    "actor.eps_clip_low_high": JOINT,
    "actor.dual_clip": To("algorithm.dual_clip"),
    "actor.entropy_coef": To("algorithm.entropy_coef", float),
    "actor.aux_loss_coef": Lacks("April has no loss for the balance of experts"),
    "actor.optim": To("learner.lr", only("adam", ADAM)),
    "actor.muon.*": Apart("of an optimizer that actor.optim does not choose"),
    "actor.adam.lr": To("learner.lr"),
    "actor.adam.betas": To("learner.betas"),
    "actor.adam.weight_decay": To("learner.weight_decay"),
    "actor.adam.eps": Lacks("AdamW's epsilon is fixed in April", off=(1e-8,)),
    "actor.lr_scheduler": To("learner.lr", only("constant", CONSTANT_LR)),
    "actor.lr_warmup_ratio": Lacks("April's warm-up is a number of steps, learner.warmup_steps"),
    "actor.min_lr_ratio": Apart("of a schedule that actor.lr_scheduler chooses"),
    "actor.max_norm": To("learner.grad_clip"),
    "actor.freeze_visual_encoder": Lacks("April takes text alone"),
    "actor.num_*": JOINT,
    "ref.*": Apart("the reference in April is the starting policy, sharded like it"),
    "critic.*": Apart("of a critic, which algo.advantage.estimator = gae wants"),
    "data.prompt_dataset": JOINT,
    "data.prompt_probs": Lacks("weights of several sources are in April's data.sources"),
    "data.prompt_split": Apart("April reads the files that it is given"),
    "data.input_key": To("data.prompt_key"),
    "data.label_key": To("data.label_key"),
    "data.input_template": Lacks("April renders prompts by the chat template, or not at all: data.prompt_as"),
    "data.apply_chat_template": To("data.prompt_as", lambda given: "chat" if given else "text"),
    "data.max_len": JOINT,
    "data.max_samples": Lacks("April takes all rows", off=(10**8,)),
    "data.image_key": Apart("of pictures, which data.max_images_per_prompt switches on"),
    "data.max_images_per_prompt": Lacks("April takes text alone"),
    "data.*": Apart("of how OpenRLHF loads data"),
    "rollout.batch_size": To("schedule.rollout_batch_size"),
    "rollout.n_samples_per_prompt": To("schedule.n_samples_per_prompt"),
    "rollout.vllm_generate_batch_size": JOINT,
    "rollout.max_new_tokens": To("sampling.max_response_tokens"),
    "rollout.temperature": To("sampling.temperature"),
    "rollout.top_p": To("sampling.top_p"),
    "rollout.*": Apart(MEMORY),
    "algo.dynamic_filtering_enable": JOINT,
    "algo.dynamic_filtering_range": JOINT,
    "algo.advantage.estimator": JOINT,
    "algo.advantage.no_std_norm": JOINT,
    "algo.advantage.gamma": JOINT,
    "algo.advantage.lambd": JOINT,
    f"{IS}*": JOINT,
    "algo.kl.use_loss": JOINT,
    "algo.kl.init_coef": JOINT,
    "algo.kl.estimator": JOINT,
    "algo.kl.unbiased_gradient": JOINT,
    "algo.kl.target": Lacks("April's coefficient of the KL is constant"),
    "algo.kl.horizon": Apart("of a target for the KL"),
    "reward.remote_url": JOINT,
    "reward.model_name_or_path": Lacks(f"a model gives the rewards; {OWN_REWARD}"),
    "reward.overlong_buffer_len": To("reward.overlong_buffer_tokens"),
    "reward.overlong_penalty_factor": To("reward.overlong_penalty", float),
    "reward.stop_properly_penalty_coef": Lacks("April's penalty is one of length, reward.overlong_penalty"),
    "reward.normalize_enable": Lacks("April takes rewards as they come"),
    "reward.clip_range": Lacks("April takes rewards as they come"),
    "reward.*": Apart(SHARDING),
    "train.agent_func_path": Lacks("it is an agent by OpenRLHF's interface; April's are in docs/agents.md"),
    "train.async_enable": JOINT,
    "train.async_queue_size": JOINT,
    "train.partial_rollout_enable": JOINT,
    "train.batch_size": JOINT,
    "train.max_epochs": To("learner.epochs"),
    "train.num_episodes": To("data.epochs"),
    "train.max_tokens_per_gpu": To("learner.microbatch_tokens"),
    "train.seed": To("seed"),
    "train.enable_ema": Lacks("April keeps no mean of the weights"),
    "train.colocate_*": JOINT,
    "train.*": Apart(MEMORY),
    "ds.lora.rank": JOINT,
    "ds.lora.alpha": JOINT,
    "ds.lora.target_modules": JOINT,
    "ds.lora.dropout": Lacks("April trains without dropout"),
    "ds.*": Apart(SHARDING),
    "vllm.num_engines": JOINT,
    "vllm.tensor_parallel_size": To("engine.server.tensor_parallel_size"),
    "vllm.gpu_memory_utilization": To("engine.server.gpu_memory_utilization"),
    "vllm.enforce_eager": To("engine.server.enforce_eager"),
    "vllm.enable_prefix_caching": To("engine.server.enable_prefix_caching"),
    "vllm.*": Apart("of how OpenRLHF brings weights to its engines"),
    "eval.dataset": To("data.eval_path"),
    "eval.steps": To("evaluation.every", lambda steps: max(steps, 0)),
    "eval.temperature": JOINT,
    "eval.n_samples_per_prompt": JOINT,
    "eval.split": Apart("April reads the files that it is given"),
    "ckpt.save_steps": To("learner.checkpoint_every", lambda steps: steps if steps > 0 else None),
    "ckpt.max_num": To("learner.keep_checkpoints"),
    "ckpt.*": Apart(OWN_FILES),
    "logger.tensorboard_dir": JOINT,
    "logger.wandb.key": JOINT,
    "logger.wandb.run_name": To("run.name"),
    "logger.*": Apart(LOGS),
    "use_ms": Apart("of where OpenRLHF downloads from"),
    "local_rank": Apart(SHARDING),
}

DEFAULTS: dict[str, Any] = {
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "actor.eps_clip": 0.2,
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.adam.weight_decay": 0.0,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.max_norm": 1.0,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "data.input_key": "input",
    "data.apply_chat_template": False,
    "data.max_len": 2048,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "algo.dynamic_filtering_range": [0, 1],
    "algo.advantage.estimator": "gae",
    f"{IS}type": "tis",
    f"{IS}level": "off",
    f"{IS}mode": "mask",
    f"{IS}gating": "ratio",
    f"{IS}threshold": [0.5, 5.0],
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "train.batch_size": 128,
    "train.num_episodes": 1,
    "train.max_tokens_per_gpu": 16192,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.lora.target_modules": "all-linear",
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
}


class OpenRLHF(Framework):
    source = "OpenRLHF/OpenRLHF at 3c3be6234, and 0.11.2"
    table, defaults = TABLE, DEFAULTS

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        return of_script(text, environment, r"train_ppo_ray(\.py)?")

    def joint(self, said: Translation) -> None:
        schedule(said)
        data(said)
        loss(said)
        stale_tokens(said)
        adapter(said, "ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules")
        said.say("worker.engine", "vllm")
        together = said.value("train.colocate_all") or not said.value("vllm.num_engines")
        nodes, each = said.number("actor.num_nodes"), said.number("actor.num_gpus_per_node")
        trainers = None if together or None in (nodes, each) else nodes * each
        names = ("actor.num_nodes", "actor.num_gpus_per_node", "vllm.num_engines")
        placed(said, trainers, None if together else said.value("vllm.num_engines"), names)
        logs = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
        sinks = {sink: name for sink, name in logs.items() if said.given(name) or name in said.options.unread}
        said.say("operations.sinks", list(sinks) or None, *sinks.values())


def schedule(said: Translation) -> None:
    n, n_more = said.number("rollout.batch_size"), said.number("rollout.vllm_generate_batch_size")
    partial = bool(said.value("train.partial_rollout_enable"))
    if said.value("train.async_enable"):
        said.say("schedule.kind", "continuous" if partial else "april", "train.async_enable")
        if not partial:
            said.say("schedule.overlap", True, "train.async_enable")
        said.say("schedule.max_staleness", 1 + (said.number("train.async_queue_size") or 1), "train.async_queue_size")
    else:
        more = bool(n_more and n and n_more > n)
        said.say("schedule.kind", "april" if more else "sync", "rollout.vllm_generate_batch_size")
        if more:
            said.say("schedule.over_sampling_batch_size", n_more, "rollout.vllm_generate_batch_size")
    said.say("schedule.max_steps", EPOCHS_END_IT, "train.num_episodes")
    filtered = bool(said.value("algo.dynamic_filtering_enable"))
    said.say("schedule.dynamic_sampling", filtered, "algo.dynamic_filtering_enable")
    if filtered and list(said.value("algo.dynamic_filtering_range") or ()) != [0, 1]:
        said.differ("algo.dynamic_filtering_range", "April replaces groups that are all right or all wrong")
    per_prompt = said.number("rollout.n_samples_per_prompt")
    optimizer_steps(said, "train.batch_size", said.number("train.batch_size"), n, per_prompt)


def data(said: Translation) -> None:
    dataset = said.value("data.prompt_dataset")
    if dataset and "," in str(dataset):
        said.say("data.sources", [{"path": path} for path in str(dataset).split(",")], "data.prompt_dataset")
    else:
        said.say("data.path", dataset, "data.prompt_dataset")
    longest, response = said.number("data.max_len"), said.number("rollout.max_new_tokens")
    if response and longest:
        said.say("data.max_prompt_tokens", longest - response, "data.max_len", "rollout.max_new_tokens")
        said.say("data.bad_rows", "skip", "data.max_len")
    else:
        said.open["sampling.max_response_tokens"] = (
            f"prompt and response share data.max_len = {longest}; in April each has a bound: set both"
        )
    url = str(said.value("reward.remote_url") or "")
    if url.startswith(("http://", "https://")):
        said.say("data.reward", "remote", "reward.remote_url")
        said.say("reward.url", url, "reward.remote_url")
    else:
        said.open["data.reward"] = f"reward.remote_url = {url or None!r} is nothing that April can call; {OWN_REWARD}"
    if said.value("eval.dataset"):
        said.say("evaluation.temperature", said.value("eval.temperature"), "eval.temperature")
        said.say("evaluation.samples", said.value("eval.n_samples_per_prompt"), "eval.n_samples_per_prompt")


def loss(said: Translation) -> None:
    name = "algo.advantage.estimator"
    estimator = ESTIMATORS.get(said.value(name))
    if estimator == "grpo" and said.value("algo.advantage.no_std_norm"):
        estimator = "dr_grpo"
    if estimator:
        said.say("algorithm.advantage", estimator, name)
    else:
        said.open["algorithm.advantage"] = f"April has no {name} = {said.value(name)!r}; choose one"
    if estimator == "gae":
        said.say("critic.gamma", said.number("algo.advantage.gamma"), "algo.advantage.gamma")
        said.say("critic.lam", said.number("algo.advantage.lambd"), "algo.advantage.lambd")
        said.open["critic.lr"] = "April's critic has keys of its own, docs/algorithms.md; choose its learning rate"
    elif said.value("algo.advantage.gamma") not in (1, None):
        said.differ("algo.advantage.gamma", "it is of a critic, which algo.advantage.estimator = gae asks for")
    width, both = said.value("actor.eps_clip"), said.value("actor.eps_clip_low_high")
    low, high = both if isinstance(both, list) and len(both) == 2 else (width, width)
    given = "actor.eps_clip_low_high" if both else "actor.eps_clip"
    said.say("algorithm.clip_low", low, given)
    said.say("algorithm.clip_high", high, given)
    if said.value("actor.policy_loss_type") == "gspo":
        said.say("algorithm.normalisation", "sequence_mean", "actor.policy_loss_type")
    elif mean := MEANS.get(said.value("actor.loss_agg_mode")):
        said.say("algorithm.normalisation", mean, "actor.loss_agg_mode")
    else:
        said.differ("actor.loss_agg_mode", f"April's normalisations are those of {', '.join(MEANS)}")
    used = bool(said.value("algo.kl.use_loss"))
    reference(said, used, "algo.kl.init_coef", "algo.kl.estimator")
    if used and said.value("algo.kl.unbiased_gradient"):
        # Where a batch is one step, its gradient is that of k2.
        said.say("algorithm.kl_estimator", "k2", "algo.kl.unbiased_gradient")
        if several_steps(said):
            said.differ("algo.kl.unbiased_gradient", "with several steps a batch April's k2 has no weight")
    if not used and said.value("algo.kl.init_coef"):
        said.differ("algo.kl.init_coef", IN_LOSS)


def stale_tokens(said: Translation) -> None:
    said.say("algorithm.behaviour_coef", 0.0)
    names, level, mode = (f"{IS}level", f"{IS}mode"), said.value(f"{IS}level"), said.value(f"{IS}mode")
    if said.value(f"{IS}enable"):
        names = f"{IS}enable", f"{IS}type"
        level, mode = SCHEMES.get(said.value(f"{IS}type"), (None, None))
    by_ratio = said.value("actor.policy_loss_type") == "gspo" and level != "off"
    said.say("algorithm.proximal", "behaviour" if by_ratio else "recomputed", *names if by_ratio else ())
    if by_ratio or level == "off":
        said.say("algorithm.corrections", [], *names)
        return
    both = said.value(f"{IS}threshold")
    bounds = both if isinstance(both, list) else [both]
    low, high = bounds if len(bounds) == 2 else (0.0, bounds[0])
    gating = said.value(f"{IS}gating")
    if gating != "ratio" or level is None:
        said.say("algorithm.corrections", [], *names)
        name = f"{IS}type" if level is None else f"{IS}gating"
        said.differ(name, "April's corrections are in docs/algorithms.md; this one is none of them")
    elif level == "seq":
        said.say("algorithm.corrections", ["truncated", "geometric"], *names)
        said.say("algorithm.truncation", UNBOUNDED, *names)
        said.say("algorithm.geometric_low", low, f"{IS}threshold")
        said.say("algorithm.geometric_high", high, f"{IS}threshold")
    elif mode == "mask":
        said.say("algorithm.corrections", ["icepop"], *names)
        said.say("algorithm.icepop_low", low, f"{IS}threshold")
        said.say("algorithm.icepop_high", high, f"{IS}threshold")
    else:
        said.say("algorithm.corrections", ["truncated"], *names)
        said.say("algorithm.truncation", high, f"{IS}threshold")
        if low:
            said.differ(f"{IS}threshold", "April's `truncated` has no lower bound")

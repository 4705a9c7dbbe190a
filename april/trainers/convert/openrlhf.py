"""OpenRLHF's scripts: `--section.name value` for openrlhf.cli.train_ppo_ray.

Options and defaults as in openrlhf/cli/train_ppo_ray.py of OpenRLHF/OpenRLHF at 3c3be6234, and of its 0.11.2, which has
other names for the correction of stale tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.trainers.convert.framework import (
    ADAM,
    CONSTANT_LR,
    IN_LOSS,
    LOGS,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    UNLIMITED_STEPS,
    Framework,
    has_several_steps,
    set_adapter,
    set_devices,
    set_minibatches,
    set_reference_kl,
)
from april.trainers.convert.translation import (
    JOINT,
    Ignored,
    MapTo,
    Options,
    Rule,
    Translation,
    Unsupported,
    by_name,
    only,
    script_options,
)

IS = "algo.advantage.is_correction_"
ESTIMATORS = {
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "gae": "gae",
}
"""April's `algorithm.advantage` for each value of OpenRLHF's `--algo.advantage.estimator`."""
MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
SCHEMES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""(level of the ratio: token or sequence; mode: clip or mask) for each value of OpenRLHF's `is_correction_type`."""
UNBOUNDED = 1e9
"""Upper bound that no importance ratio reaches: stands for no bound."""

TABLE: dict[str, Rule] = {
    "actor.model_name_or_path": MapTo("model.path"),
    "actor.gradient_checkpointing_enable": MapTo("learner.activation_checkpointing"),
    "actor.gradient_checkpointing_reentrant": Ignored(MEMORY),
    "actor.policy_loss_type": MapTo("algorithm.loss", by_name(ppo="ppo", gspo="gspo")),
    "actor.loss_agg_mode": JOINT,
    "actor.eps_clip": JOINT,
    "actor.eps_clip_low_high": JOINT,
    "actor.dual_clip": MapTo("algorithm.dual_clip"),
    "actor.entropy_coef": MapTo("algorithm.entropy_coef", float),
    "actor.aux_loss_coef": Unsupported("April has no loss for the balance of experts"),
    "actor.optim": MapTo("learner.lr", only("adam", ADAM)),
    "actor.muon.*": Ignored("of an optimizer that actor.optim does not choose"),
    "actor.adam.lr": MapTo("learner.lr"),
    "actor.adam.betas": MapTo("learner.betas"),
    "actor.adam.weight_decay": MapTo("learner.weight_decay"),
    "actor.adam.eps": Unsupported("AdamW's epsilon is fixed in April", off=(1e-8,)),
    "actor.lr_scheduler": MapTo("learner.lr", only("constant", CONSTANT_LR)),
    "actor.lr_warmup_ratio": Unsupported("April's warm-up is a number of steps, learner.warmup_steps"),
    "actor.min_lr_ratio": Ignored("of a schedule that actor.lr_scheduler chooses"),
    "actor.max_norm": MapTo("learner.grad_clip"),
    "actor.freeze_visual_encoder": Unsupported("April takes text alone"),
    "actor.num_*": JOINT,
    "ref.*": Ignored("the reference in April is the starting policy, sharded like it"),
    "critic.*": Ignored("of a critic, which algo.advantage.estimator = gae wants"),
    "data.prompt_dataset": JOINT,
    "data.prompt_probs": Unsupported("weights of several sources are in April's data.sources"),
    "data.prompt_split": Ignored("April reads the files that it is given"),
    "data.input_key": MapTo("data.prompt_key"),
    "data.label_key": MapTo("data.label_key"),
    "data.input_template": Unsupported("April renders prompts by the chat template, or not at all: data.prompt_as"),
    "data.apply_chat_template": MapTo("data.prompt_as", lambda given: "chat" if given else "text"),
    "data.max_len": JOINT,
    "data.max_samples": Unsupported("April takes all rows", off=(10**8,)),
    "data.image_key": Ignored("of pictures, which data.max_images_per_prompt switches on"),
    "data.max_images_per_prompt": Unsupported("April takes text alone"),
    "data.*": Ignored("of how OpenRLHF loads data"),
    "rollout.batch_size": MapTo("schedule.rollout_batch_size"),
    "rollout.n_samples_per_prompt": MapTo("schedule.n_samples_per_prompt"),
    "rollout.vllm_generate_batch_size": JOINT,
    "rollout.max_new_tokens": MapTo("sampling.max_response_tokens"),
    "rollout.temperature": MapTo("sampling.temperature"),
    "rollout.top_p": MapTo("sampling.top_p"),
    "rollout.*": Ignored(MEMORY),
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
    "algo.kl.target": Unsupported("April's coefficient of the KL is constant"),
    "algo.kl.horizon": Ignored("of a target for the KL"),
    "reward.remote_url": JOINT,
    "reward.model_name_or_path": Unsupported(f"a model gives the rewards; {OWN_REWARD}"),
    "reward.overlong_buffer_len": MapTo("reward.overlong_buffer_tokens"),
    "reward.overlong_penalty_factor": MapTo("reward.overlong_penalty", float),
    "reward.stop_properly_penalty_coef": Unsupported("April's penalty is one of length, reward.overlong_penalty"),
    "reward.normalize_enable": Unsupported("April takes rewards as they come"),
    "reward.clip_range": Unsupported("April takes rewards as they come"),
    "reward.*": Ignored(SHARDING),
    "train.agent_func_path": Unsupported("it is an agent by OpenRLHF's interface; April's are in docs/agents.md"),
    "train.async_enable": JOINT,
    "train.async_queue_size": JOINT,
    "train.partial_rollout_enable": JOINT,
    "train.batch_size": JOINT,
    "train.max_epochs": MapTo("learner.epochs"),
    "train.num_episodes": MapTo("data.epochs"),
    "train.max_tokens_per_gpu": MapTo("learner.microbatch_tokens"),
    "train.seed": MapTo("seed"),
    "train.enable_ema": Unsupported("April keeps no mean of the weights"),
    "train.colocate_*": JOINT,
    "train.*": Ignored(MEMORY),
    "ds.lora.rank": JOINT,
    "ds.lora.alpha": JOINT,
    "ds.lora.target_modules": JOINT,
    "ds.lora.dropout": Unsupported("April trains without dropout"),
    "ds.*": Ignored(SHARDING),
    "vllm.num_engines": JOINT,
    "vllm.tensor_parallel_size": MapTo("engine.server.tensor_parallel_size"),
    "vllm.gpu_memory_utilization": MapTo("engine.server.gpu_memory_utilization"),
    "vllm.enforce_eager": MapTo("engine.server.enforce_eager"),
    "vllm.enable_prefix_caching": MapTo("engine.server.enable_prefix_caching"),
    "vllm.*": Ignored("of how OpenRLHF brings weights to its engines"),
    "eval.dataset": MapTo("data.eval_path"),
    "eval.steps": MapTo("evaluation.every", lambda steps: max(steps, 0)),
    "eval.temperature": JOINT,
    "eval.n_samples_per_prompt": JOINT,
    "eval.split": Ignored("April reads the files that it is given"),
    "ckpt.save_steps": MapTo("learner.checkpoint_every", lambda steps: steps if steps > 0 else None),
    "ckpt.max_num": MapTo("learner.keep_checkpoints"),
    "ckpt.*": Ignored(OWN_FILES),
    "logger.tensorboard_dir": JOINT,
    "logger.wandb.key": JOINT,
    "logger.wandb.run_name": MapTo("run.name"),
    "logger.*": Ignored(LOGS),
    "use_ms": Ignored("of where OpenRLHF downloads from"),
    "local_rank": Ignored(SHARDING),
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
        return script_options(text, environment, r"train_ppo_ray(\.py)?")

    def translate_joint(self, translation: Translation) -> None:
        schedule(translation)
        data(translation)
        loss(translation)
        stale_tokens(translation)
        set_adapter(translation, "ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules")
        translation.set_key("worker.engine", "vllm")
        together = translation.value("train.colocate_all") or not translation.value("vllm.num_engines")
        nodes, each = translation.number("actor.num_nodes"), translation.number("actor.num_gpus_per_node")
        trainers = None if together or None in (nodes, each) else nodes * each
        names = ("actor.num_nodes", "actor.num_gpus_per_node", "vllm.num_engines")
        set_devices(translation, trainers, None if together else translation.value("vllm.num_engines"), names)
        logs = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
        sinks = {
            sink: name
            for sink, name in logs.items()
            if translation.given(name) or name in translation.options.unreadable
        }
        translation.set_key("operations.sinks", list(sinks) or None, *sinks.values())


def schedule(translation: Translation) -> None:
    n, n_more = translation.number("rollout.batch_size"), translation.number("rollout.vllm_generate_batch_size")
    partial = bool(translation.value("train.partial_rollout_enable"))
    if translation.value("train.async_enable"):
        translation.set_key("schedule.kind", "continuous" if partial else "april", "train.async_enable")
        if not partial:
            translation.set_key("schedule.overlap", True, "train.async_enable")
        translation.set_key(
            "schedule.max_staleness", 1 + (translation.number("train.async_queue_size") or 1), "train.async_queue_size"
        )
    else:
        more = bool(n_more and n and n_more > n)
        translation.set_key("schedule.kind", "april" if more else "sync", "rollout.vllm_generate_batch_size")
        if more:
            translation.set_key("schedule.over_sampling_batch_size", n_more, "rollout.vllm_generate_batch_size")
    translation.set_key("schedule.max_steps", UNLIMITED_STEPS, "train.num_episodes")
    filtered = bool(translation.value("algo.dynamic_filtering_enable"))
    translation.set_key("schedule.dynamic_sampling", filtered, "algo.dynamic_filtering_enable")
    if filtered and list(translation.value("algo.dynamic_filtering_range") or ()) != [0, 1]:
        translation.mark_unsupported(
            "algo.dynamic_filtering_range", "April replaces groups that are all right or all wrong"
        )
    per_prompt = translation.number("rollout.n_samples_per_prompt")
    set_minibatches(translation, "train.batch_size", translation.number("train.batch_size"), n, per_prompt)


def data(translation: Translation) -> None:
    dataset = translation.value("data.prompt_dataset")
    if dataset and "," in str(dataset):
        translation.set_key("data.sources", [{"path": path} for path in str(dataset).split(",")], "data.prompt_dataset")
    else:
        translation.set_key("data.path", dataset, "data.prompt_dataset")
    longest, response = translation.number("data.max_len"), translation.number("rollout.max_new_tokens")
    if response and longest:
        translation.set_key("data.max_prompt_tokens", longest - response, "data.max_len", "rollout.max_new_tokens")
        translation.set_key("data.bad_rows", "skip", "data.max_len")
    else:
        translation.undecided["sampling.max_response_tokens"] = (
            f"prompt and response share data.max_len = {longest}; in April each has a bound: set both"
        )
    url = str(translation.value("reward.remote_url") or "")
    if url.startswith(("http://", "https://")):
        translation.set_key("data.reward", "remote", "reward.remote_url")
        translation.set_key("reward.url", url, "reward.remote_url")
    else:
        translation.undecided["data.reward"] = (
            f"reward.remote_url = {url or None!r} is nothing that April can call; {OWN_REWARD}"
        )
    if translation.value("eval.dataset"):
        translation.set_key("evaluation.temperature", translation.value("eval.temperature"), "eval.temperature")
        translation.set_key(
            "evaluation.samples", translation.value("eval.n_samples_per_prompt"), "eval.n_samples_per_prompt"
        )


def loss(translation: Translation) -> None:
    name = "algo.advantage.estimator"
    estimator = ESTIMATORS.get(translation.value(name))
    if estimator == "grpo" and translation.value("algo.advantage.no_std_norm"):
        estimator = "dr_grpo"
    if estimator:
        translation.set_key("algorithm.advantage", estimator, name)
    else:
        translation.undecided["algorithm.advantage"] = f"April has no {name} = {translation.value(name)!r}; choose one"
    if estimator == "gae":
        translation.set_key("critic.gamma", translation.number("algo.advantage.gamma"), "algo.advantage.gamma")
        translation.set_key("critic.lam", translation.number("algo.advantage.lambd"), "algo.advantage.lambd")
        translation.undecided["critic.lr"] = (
            "April's critic has keys of its own, docs/algorithms.md; choose its learning rate"
        )
    elif translation.value("algo.advantage.gamma") not in (1, None):
        translation.mark_unsupported(
            "algo.advantage.gamma", "it is of a critic, which algo.advantage.estimator = gae asks for"
        )
    width, both = translation.value("actor.eps_clip"), translation.value("actor.eps_clip_low_high")
    low, high = both if isinstance(both, list) and len(both) == 2 else (width, width)
    given = "actor.eps_clip_low_high" if both else "actor.eps_clip"
    translation.set_key("algorithm.clip_low", low, given)
    translation.set_key("algorithm.clip_high", high, given)
    if translation.value("actor.policy_loss_type") == "gspo":
        translation.set_key("algorithm.normalisation", "sequence_mean", "actor.policy_loss_type")
    elif mean := MEANS.get(translation.value("actor.loss_agg_mode")):
        translation.set_key("algorithm.normalisation", mean, "actor.loss_agg_mode")
    else:
        translation.mark_unsupported("actor.loss_agg_mode", f"April's normalisations are those of {', '.join(MEANS)}")
    used = bool(translation.value("algo.kl.use_loss"))
    set_reference_kl(translation, used, "algo.kl.init_coef", "algo.kl.estimator")
    if used and translation.value("algo.kl.unbiased_gradient"):
        # Where a batch is one step, its gradient is that of k2.
        translation.set_key("algorithm.kl_estimator", "k2", "algo.kl.unbiased_gradient")
        if has_several_steps(translation):
            translation.mark_unsupported(
                "algo.kl.unbiased_gradient", "with several steps a batch April's k2 has no weight"
            )
    if not used and translation.value("algo.kl.init_coef"):
        translation.mark_unsupported("algo.kl.init_coef", IN_LOSS)


def stale_tokens(translation: Translation) -> None:
    translation.set_key("algorithm.behaviour_coef", 0.0)
    names, level, mode = (f"{IS}level", f"{IS}mode"), translation.value(f"{IS}level"), translation.value(f"{IS}mode")
    if translation.value(f"{IS}enable"):
        names = f"{IS}enable", f"{IS}type"
        level, mode = SCHEMES.get(translation.value(f"{IS}type"), (None, None))
    by_ratio = translation.value("actor.policy_loss_type") == "gspo" and level != "off"
    translation.set_key("algorithm.proximal", "behaviour" if by_ratio else "recomputed", *names if by_ratio else ())
    if by_ratio or level == "off":
        translation.set_key("algorithm.corrections", [], *names)
        return
    both = translation.value(f"{IS}threshold")
    bounds = both if isinstance(both, list) else [both]
    low, high = bounds if len(bounds) == 2 else (0.0, bounds[0])
    gating = translation.value(f"{IS}gating")
    if gating != "ratio" or level is None:
        translation.set_key("algorithm.corrections", [], *names)
        name = f"{IS}type" if level is None else f"{IS}gating"
        translation.mark_unsupported(name, "April's corrections are in docs/algorithms.md; this one is none of them")
    elif level == "seq":
        translation.set_key("algorithm.corrections", ["truncated", "geometric"], *names)
        translation.set_key("algorithm.truncation", UNBOUNDED, *names)
        translation.set_key("algorithm.geometric_low", low, f"{IS}threshold")
        translation.set_key("algorithm.geometric_high", high, f"{IS}threshold")
    elif mode == "mask":
        translation.set_key("algorithm.corrections", ["icepop"], *names)
        translation.set_key("algorithm.icepop_low", low, f"{IS}threshold")
        translation.set_key("algorithm.icepop_high", high, f"{IS}threshold")
    else:
        translation.set_key("algorithm.corrections", ["truncated"], *names)
        translation.set_key("algorithm.truncation", high, f"{IS}threshold")
        if low:
            translation.mark_unsupported(f"{IS}threshold", "April's `truncated` has no lower bound")

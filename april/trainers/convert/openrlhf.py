"""OpenRLHF's scripts: `--section.name value` for openrlhf.cli.train_ppo_ray.

Options and defaults as in openrlhf/cli/train_ppo_ray.py of OpenRLHF/OpenRLHF at 3c3be6234, and of its 0.11.2, which has
other names for the correction of stale tokens.
"""

from collections.abc import Mapping
from pathlib import Path

from april.config.hub import is_hub_name
from april.trainers.convert.framework import (
    ADAM,
    DROPOUT,
    IN_LOSS,
    LOGS,
    LR_SCHEDULES,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    TEXT,
    WARMUP,
    Framework,
)
from april.trainers.convert.translation import (
    UNLIMITED_STEPS,
    Ignored,
    Joint,
    MapTo,
    Options,
    Rule,
    Translation,
    Unsupported,
    by_name,
    chat_or_text,
    each,
    if_positive,
    not_negative,
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
"""Large number that stands for "no upper bound" of an importance ratio, since April's key needs a bound."""
LOGGERS = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
"""For each of April's `operations.sinks` (metric loggers) the option of OpenRLHF that switches this logger on."""

TABLE: dict[str, Rule] = {
    "actor.model_name_or_path": MapTo("model.path"),
    "actor.gradient_checkpointing_enable": MapTo("learner.activation_checkpointing"),
    "actor.policy_loss_type": MapTo("algorithm.loss", by_name(ppo="ppo", gspo="gspo"), default="ppo"),
    "actor.loss_agg_mode": Joint(default="token-mean"),
    "actor.eps_clip": Joint(default=0.2),
    "actor.eps_clip_low_high": Joint(),
    "actor.dual_clip": MapTo("algorithm.dual_clip"),
    "actor.entropy_coef": MapTo("algorithm.entropy_coef", float),
    "actor.aux_loss_coef": Unsupported("April has no loss for the balance of experts"),
    "actor.optim": MapTo("learner.lr", only("adam", ADAM)),
    "actor.muon.*": Ignored("of an optimizer that actor.optim does not choose"),
    "actor.adam.lr": MapTo("learner.lr", default=1e-6),
    "actor.adam.betas": MapTo("learner.betas", default=[0.9, 0.95]),
    "actor.adam.weight_decay": MapTo("learner.weight_decay", default=0.0),
    "actor.adam.eps": Unsupported("AdamW's epsilon is fixed in April", off=(1e-8,)),
    "actor.lr_scheduler": MapTo("learner.lr_schedule", LR_SCHEDULES, default="cosine_with_min_lr"),
    "actor.lr_warmup_ratio": Unsupported(WARMUP, default=0.03),
    "actor.min_lr_ratio": MapTo("learner.lr_floor", default=0.1),
    "actor.max_norm": MapTo("learner.grad_clip", default=1.0),
    "actor.num_*": Joint(),
    "actor.num_nodes": Joint(default=1),
    "actor.num_gpus_per_node": Joint(default=8),
    "ref.*": Ignored("the reference in April is the starting policy, sharded like it"),
    "critic.*": Ignored("of a critic, which algo.advantage.estimator = gae wants"),
    "data.prompt_dataset": Joint(),
    "data.prompt_probs": Unsupported("weights of several sources are in April's data.sources"),
    "data.input_key": MapTo("data.prompt_key", default="input"),
    "data.label_key": MapTo("data.label_key"),
    "data.input_template": Unsupported("April renders prompts by the chat template, or not at all: data.prompt_as"),
    "data.apply_chat_template": MapTo("data.prompt_as", chat_or_text, default=False),
    "data.max_len": Joint(default=2048),
    "data.max_samples": Unsupported("April takes all rows", off=(10**8,)),
    "data.image_key": Ignored("of pictures, which data.max_images_per_prompt switches on"),
    "data.*": Ignored("of how OpenRLHF loads data"),
    "rollout.batch_size": MapTo("schedule.rollout_batch_size", default=1024),
    "rollout.n_samples_per_prompt": MapTo("schedule.n_samples_per_prompt", default=1),
    "rollout.vllm_generate_batch_size": Joint(),
    "rollout.max_new_tokens": MapTo("sampling.max_response_tokens"),
    "rollout.temperature": MapTo("sampling.temperature", default=1.0),
    "rollout.top_p": MapTo("sampling.top_p", default=1.0),
    "algo.dynamic_filtering_enable": Joint(),
    "algo.dynamic_filtering_range": Joint(default=[0, 1]),
    "algo.advantage.estimator": Joint(default="gae"),
    **each(Joint(), "no_std_norm gamma lambd", "algo.advantage."),
    f"{IS}*": Joint(),
    f"{IS}type": Joint(default="tis"),
    f"{IS}level": Joint(default="off"),
    f"{IS}mode": Joint(default="mask"),
    f"{IS}gating": Joint(default="ratio"),
    f"{IS}threshold": Joint(default=[0.5, 5.0]),
    "algo.kl.init_coef": Joint(default=0.01),
    "algo.kl.estimator": Joint(default="k1"),
    **each(Joint(), "use_loss unbiased_gradient", "algo.kl."),
    "algo.kl.target": Unsupported("April's coefficient of the KL is constant"),
    "algo.kl.horizon": Ignored("of a target for the KL"),
    "reward.remote_url": Joint(),
    "reward.model_name_or_path": Unsupported(f"a model gives the rewards; {OWN_REWARD}"),
    "reward.overlong_buffer_len": MapTo("reward.overlong_buffer_tokens"),
    "reward.overlong_penalty_factor": MapTo("reward.overlong_penalty", float),
    "reward.stop_properly_penalty_coef": Unsupported("April's penalty is one of length, reward.overlong_penalty"),
    **each(Unsupported("April takes rewards as they come"), "normalize_enable clip_range", "reward."),
    "train.agent_func_path": Unsupported("it is an agent by OpenRLHF's interface; April's are in docs/agents.md"),
    **each(Joint(), "async_enable async_queue_size partial_rollout_enable colocate_*", "train."),
    "train.batch_size": Joint(default=128),
    "train.max_epochs": MapTo("learner.epochs"),
    "train.num_episodes": MapTo("data.epochs", default=1),
    "train.max_tokens_per_gpu": MapTo("learner.microbatch_tokens", default=16192),
    "train.seed": MapTo("seed"),
    "train.enable_ema": Unsupported("April keeps no mean of the weights"),
    "ds.lora.rank": Joint(default=0),
    "ds.lora.alpha": Joint(default=16),
    "ds.lora.target_modules": Joint(default="all-linear"),
    "ds.lora.dropout": Unsupported(DROPOUT),
    "vllm.num_engines": Joint(),
    "vllm.tensor_parallel_size": MapTo("engine.server.tensor_parallel_size"),
    "vllm.gpu_memory_utilization": MapTo("engine.server.gpu_memory_utilization"),
    "vllm.enforce_eager": MapTo("engine.server.enforce_eager"),
    "vllm.enable_prefix_caching": MapTo("engine.server.enable_prefix_caching"),
    "vllm.*": Ignored("of how OpenRLHF brings weights to its engines"),
    "eval.dataset": MapTo("data.eval_path"),
    "eval.steps": MapTo("evaluation.every", not_negative),
    "eval.temperature": Joint(default=0.6),
    "eval.n_samples_per_prompt": Joint(default=4),
    "ckpt.save_steps": MapTo("learner.checkpoint_every", if_positive),
    "ckpt.max_num": MapTo("learner.keep_checkpoints"),
    "ckpt.*": Ignored(OWN_FILES),
    **each(Joint(), "tensorboard_dir wandb.key", "logger."),
    "logger.wandb.run_name": MapTo("run.name"),
    "logger.*": Ignored(LOGS),
    "use_ms": Ignored("of where OpenRLHF downloads from"),
    **each(Ignored(SHARDING), "reward.* ds.* local_rank"),
    **each(Ignored(MEMORY), "actor.gradient_checkpointing_reentrant rollout.* train.*"),
    **each(Joint(default="train"), "data.prompt_split eval.split"),
    **each(Unsupported(TEXT), "actor.freeze_visual_encoder data.max_images_per_prompt"),
}


class OpenRLHF(Framework):
    source = "OpenRLHF/OpenRLHF at 3c3be6234, and 0.11.2"
    table = TABLE

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        return script_options(text, environment, r"train_ppo_ray(\.py)?")

    def translate_joint(self, translation: Translation) -> None:
        schedule(translation)
        data(translation)
        loss(translation)
        stale_tokens(translation)
        translation.set_adapter("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules")
        translation.set_key("worker.engine", "vllm")
        together = translation.value("train.colocate_all") or not translation.value("vllm.num_engines")
        nodes, each_node = translation.number("actor.num_nodes"), translation.number("actor.num_gpus_per_node")
        trainers = None if together or None in (nodes, each_node) else nodes * each_node
        names = ("actor.num_nodes", "actor.num_gpus_per_node", "vllm.num_engines")
        translation.set_devices(trainers, None if together else translation.value("vllm.num_engines"), names)
        sinks = {sink: name for sink, name in LOGGERS.items() if translation.given(name)}
        translation.set_key("operations.sinks", list(sinks) or None, *sinks.values())


def schedule(translation: Translation) -> None:
    n, n_more = translation.number("rollout.batch_size"), translation.number("rollout.vllm_generate_batch_size")
    partial = bool(translation.value("train.partial_rollout_enable"))
    if translation.value("train.async_enable"):
        translation.set_key("schedule.kind", "continuous" if partial else "april", "train.async_enable")
        translation.set_key("schedule.overlap", None if partial else True, "train.async_enable")
        queued = translation.number("train.async_queue_size") or 1
        translation.set_key("schedule.max_staleness", 1 + queued, "train.async_queue_size")
    else:
        more = bool(n_more and n and n_more > n)
        translation.set_key("schedule.kind", "april" if more else "sync", "rollout.vllm_generate_batch_size")
        if more:
            translation.copy("schedule.over_sampling_batch_size", "rollout.vllm_generate_batch_size")
    translation.set_key("schedule.max_steps", UNLIMITED_STEPS, "train.num_episodes")
    filtered = bool(translation.value("algo.dynamic_filtering_enable"))
    translation.set_key("schedule.dynamic_sampling", filtered, "algo.dynamic_filtering_enable")
    name = "algo.dynamic_filtering_range"
    if filtered and list(translation.value(name) or ()) != [0, 1]:
        translation.mark_unsupported(name, "April replaces groups that are all right or all wrong")
    responses, per_prompt = map(translation.number, ("train.batch_size", "rollout.n_samples_per_prompt"))
    translation.set_minibatches("train.batch_size", responses, n, per_prompt)


def data(translation: Translation) -> None:
    dataset = translation.value("data.prompt_dataset")
    translation.set_paths("data.prompt_dataset", str(dataset).split(",") if "," in str(dataset) else dataset)
    splits = {
        "data.prompt_dataset": ("data.split", "data.prompt_split"),
        "eval.dataset": ("data.eval_split", "eval.split"),
    }
    for name, (key, split) in splits.items():
        if is_hub_name(str(translation.value(name))):
            translation.copy(key, split)
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
        translation.copy("evaluation.temperature", "eval.temperature")
        translation.copy("evaluation.samples", "eval.n_samples_per_prompt")


def loss(translation: Translation) -> None:
    name, gamma, lam = (f"algo.advantage.{option}" for option in ("estimator", "gamma", "lambd"))
    scaled = not translation.value("algo.advantage.no_std_norm")
    if translation.set_advantage(name, ESTIMATORS, scaled) == "gae":
        translation.set_key("critic.gamma", translation.number(gamma), gamma)
        translation.set_key("critic.lam", translation.number(lam), lam)
        translation.undecided["critic.lr"] = (
            "April's critic has keys of its own, docs/algorithms.md; choose its learning rate"
        )
    else:
        translation.mark_critic_options(name, gamma)
    width, both = translation.value("actor.eps_clip"), translation.value("actor.eps_clip_low_high")
    low, high = both if isinstance(both, list) and len(both) == 2 else (width, width)
    given = "actor.eps_clip_low_high" if both else "actor.eps_clip"
    translation.set_key("algorithm.clip_low", low, given)
    translation.set_key("algorithm.clip_high", high, given)
    if translation.value("actor.policy_loss_type") == "gspo":
        translation.set_key("algorithm.normalisation", "sequence_mean", "actor.policy_loss_type")
    else:
        translation.set_normalisation("actor.loss_agg_mode", MEANS)
    used = bool(translation.value("algo.kl.use_loss"))
    translation.set_reference_kl(used, "algo.kl.init_coef", "algo.kl.estimator")
    name = "algo.kl.unbiased_gradient"
    if used and translation.value(name):
        # Where a batch is one step, its gradient is that of k2.
        translation.set_key("algorithm.kl_estimator", "k2", name)
        if translation.has_several_steps():
            translation.mark_unsupported(name, "with several steps a batch April's k2 has no weight")
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
    threshold = f"{IS}threshold"
    both = translation.value(threshold)
    bounds = both if isinstance(both, list) else [both]
    low, high = bounds if len(bounds) == 2 else (0.0, bounds[0])
    if translation.value(f"{IS}gating") != "ratio" or level is None:
        translation.set_key("algorithm.corrections", [], *names)
        name = f"{IS}type" if level is None else f"{IS}gating"
        translation.mark_unsupported(name, "April's corrections are in docs/algorithms.md; this one is none of them")
    elif level == "seq" or mode == "mask":
        correction = "geometric" if level == "seq" else "icepop"
        translation.set_key(
            "algorithm.corrections", ["truncated", "geometric"] if level == "seq" else ["icepop"], *names
        )
        translation.set_key("algorithm.truncation", UNBOUNDED if level == "seq" else None, *names)
        translation.set_key(f"algorithm.{correction}_low", low, threshold)
        translation.set_key(f"algorithm.{correction}_high", high, threshold)
    else:
        translation.set_key("algorithm.corrections", ["truncated"], *names)
        translation.set_key("algorithm.truncation", high, threshold)
        if low:
            translation.mark_unsupported(threshold, "April's `truncated` has no lower bound")

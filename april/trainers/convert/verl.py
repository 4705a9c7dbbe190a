"""verl's scripts, Hydra's `key=value` for verl.trainer.main_ppo, and its YAML.

Options and defaults as in verl-project/verl at 1dda039b9, verl/trainer/config.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.trainers.convert.framework import (
    ALL_PROMPTS,
    CONSTANT_LR,
    IN_LOSS,
    LOGS,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    SINKS,
    UNLIMITED_STEPS,
    Framework,
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
    file_options,
    known_names,
    only,
    script_options,
    single_path,
)

MODEL = "actor_rollout_ref.model."
ACTOR, ROLLOUT, IMPORTANCE = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm.rollout_correction."
ESTIMATORS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "gae": "gae",
}
"""April's `algorithm.advantage` for each value of verl's `algorithm.adv_estimator`."""
CRITIC = {
    "algorithm.gamma": ("critic.gamma", 1.0),
    "algorithm.lam": ("critic.lam", 1.0),
    "critic.optim.lr": ("critic.lr", 1e-5),
    "critic.cliprange_value": ("critic.value_clip", 0.5),
    "trainer.critic_warmup": ("critic.warmup_batches", 0),
}
"""(April's key, verl's default) for each of verl's options of the critic."""
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
DPPO = "dppo_tv"
MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "constant"}

TABLE: dict[str, Rule] = {
    f"{MODEL}path": MapTo("model.path"),
    f"{MODEL}enable_gradient_checkpointing": MapTo("learner.activation_checkpointing"),
    f"{MODEL}lora_rank": JOINT,
    f"{MODEL}lora_alpha": JOINT,
    f"{MODEL}target_modules": JOINT,
    f"{MODEL}*": Ignored(SHARDING),
    "data.train_files": JOINT,
    "data.val_files": MapTo("data.eval_path", single_path),
    "data.prompt_key": MapTo("data.prompt_key"),
    "data.max_prompt_length": MapTo("data.max_prompt_tokens"),
    "data.filter_overlong_prompts": MapTo("data.bad_rows", lambda skip: "skip" if skip else "stop"),
    "data.truncation": MapTo("data.bad_rows", only("error", "April cuts no prompt; it refuses or skips longer ones")),
    "data.max_response_length": MapTo("sampling.max_response_tokens"),
    "data.shuffle": MapTo("data.shuffle"),
    "data.seed": MapTo("seed"),
    "data.train_batch_size": MapTo("schedule.rollout_batch_size"),
    "data.gen_batch_size": Unsupported(
        "it is what verl generates at a time; April's is schedule.over_sampling_batch_size"
    ),
    "data.train_max_samples": Unsupported("April takes all rows", off=(None, -1)),
    "data.val_max_samples": MapTo("evaluation.prompts", lambda rows: rows if rows > 0 else ALL_PROMPTS),
    "data.apply_chat_template_kwargs.*": MapTo("data.template_options.*"),
    "data.custom_cls.path": Unsupported("it names code that reads data; April reads rows as docs/data.md says"),
    "data.image_key": Unsupported("April takes text alone"),
    "data.video_key": Unsupported("April takes text alone"),
    "data.*": Ignored("of how verl loads data"),
    f"{ROLLOUT}n": MapTo("schedule.n_samples_per_prompt"),
    f"{ROLLOUT}name": MapTo("worker.engine", by_name(vllm="vllm", sglang="sglang")),
    f"{ROLLOUT}temperature": MapTo("sampling.temperature"),
    f"{ROLLOUT}top_p": MapTo("sampling.top_p"),
    f"{ROLLOUT}top_k": MapTo("sampling.top_k", lambda ids: max(ids, 0)),
    f"{ROLLOUT}tensor_model_parallel_size": JOINT,
    f"{ROLLOUT}gpu_memory_utilization": JOINT,
    f"{ROLLOUT}max_num_seqs": MapTo("worker.slots"),
    f"{ROLLOUT}ignore_eos": Unsupported("April ends a response at its end of text"),
    f"{ROLLOUT}val_kwargs.n": MapTo("evaluation.samples"),
    f"{ROLLOUT}val_kwargs.temperature": JOINT,
    f"{ROLLOUT}val_kwargs.do_sample": JOINT,
    f"{ROLLOUT}val_kwargs.top_p": MapTo("evaluation.top_p"),
    f"{ROLLOUT}val_kwargs.top_k": MapTo("evaluation.top_k", lambda ids: max(ids, 0)),
    f"{ROLLOUT}multi_turn.enable": Unsupported(
        "April's turns are those of environments and agents, docs/environments.md"
    ),
    f"{ROLLOUT}agent.default_agent_loop": Unsupported(
        "April's turns are those of environments and agents, docs/agents.md", off=(None, "single_turn_agent")
    ),
    f"{ROLLOUT}*": Ignored("of how verl runs its engine"),
    f"{ACTOR}ppo_mini_batch_size": JOINT,
    f"{ACTOR}ppo_epochs": MapTo("learner.epochs"),
    f"{ACTOR}ppo_max_token_len_per_gpu": MapTo("learner.microbatch_tokens"),
    f"{ACTOR}policy_loss.loss_mode": JOINT,
    f"{ACTOR}loss_agg_mode": JOINT,
    f"{ACTOR}loss_scale_factor": MapTo("algorithm.constant_tokens"),
    f"{ACTOR}clip_ratio": Ignored("clip_ratio_low and clip_ratio_high are what verl reads"),
    f"{ACTOR}clip_ratio_low": JOINT,
    f"{ACTOR}clip_ratio_high": JOINT,
    f"{ACTOR}clip_ratio_c": JOINT,
    f"{ACTOR}use_kl_loss": JOINT,
    f"{ACTOR}kl_loss_coef": JOINT,
    f"{ACTOR}kl_loss_type": JOINT,
    f"{ACTOR}entropy_coeff": MapTo("algorithm.entropy_coef", float),
    f"{ACTOR}grad_clip": MapTo("learner.grad_clip"),
    f"{ACTOR}optim.lr": MapTo("learner.lr"),
    f"{ACTOR}optim.weight_decay": MapTo("learner.weight_decay"),
    f"{ACTOR}optim.betas": MapTo("learner.betas"),
    f"{ACTOR}optim.clip_grad": MapTo("learner.grad_clip"),
    f"{ACTOR}optim.lr_warmup_steps": MapTo("learner.warmup_steps", lambda steps: max(steps, 0)),
    f"{ACTOR}optim.lr_warmup_steps_ratio": Unsupported("April's warm-up is a number of steps, learner.warmup_steps"),
    f"{ACTOR}optim.lr_scheduler_type": MapTo("learner.lr", only("constant", CONSTANT_LR)),
    f"{ACTOR}optim.lr_decay_style": MapTo("learner.lr", only("constant", CONSTANT_LR)),
    f"{ACTOR}optim.*": Ignored(MEMORY),
    f"{ACTOR}*": Ignored(SHARDING),
    "actor_rollout_ref.ref.*": Ignored(SHARDING),
    "actor_rollout_ref.*": Ignored(SHARDING),
    "algorithm.adv_estimator": JOINT,
    "algorithm.norm_adv_by_std_in_grpo": JOINT,
    "algorithm.use_kl_in_reward": JOINT,
    "algorithm.kl_ctrl.*": Ignored("of the KL in the reward, which algorithm.use_kl_in_reward switches on"),
    "algorithm.kl_penalty": Ignored("of the KL in the reward, which algorithm.use_kl_in_reward switches on"),
    "algorithm.gamma": JOINT,
    "algorithm.lam": JOINT,
    "algorithm.filter_groups.enable": MapTo("schedule.dynamic_sampling"),
    "algorithm.filter_groups.*": Ignored("April replaces a group whose rewards are all alike, as often as it takes"),
    f"{IMPORTANCE}rollout_is": JOINT,
    f"{IMPORTANCE}rollout_is_threshold": JOINT,
    f"{IMPORTANCE}rollout_rs": Unsupported(
        "April masks responses by algorithm.corrections = ['geometric'], another rule"
    ),
    f"{IMPORTANCE}bypass_mode": JOINT,
    f"{IMPORTANCE}loss_type": JOINT,
    f"{IMPORTANCE}rollout_is_batch_normalize": Unsupported("April does not normalise these weights"),
    f"{IMPORTANCE}*": Ignored("of a correction that is off"),
    "reward.custom_reward_function.*": JOINT,
    "custom_reward_function.*": JOINT,
    "reward_model.enable": Unsupported(f"a model gives the rewards; {OWN_REWARD}"),
    "reward.reward_model.enable": Unsupported(f"a model gives the rewards; {OWN_REWARD}"),
    "reward*": JOINT,
    "trainer.total_epochs": JOINT,
    "trainer.total_training_steps": JOINT,
    "trainer.save_freq": MapTo("learner.checkpoint_every", lambda steps: steps if steps > 0 else None),
    "trainer.test_freq": MapTo("evaluation.every", lambda steps: max(steps, 0)),
    "trainer.max_actor_ckpt_to_keep": MapTo("learner.keep_checkpoints"),
    "trainer.experiment_name": MapTo("run.name"),
    "trainer.logger": MapTo("operations.sinks", known_names(SINKS)),
    "trainer.n_gpus_per_node": JOINT,
    "trainer.nnodes": JOINT,
    "trainer.val_before_train": Ignored("April always evaluates at the start"),
    "trainer.critic_warmup": Ignored("of a critic"),
    "trainer.balance_batch": Ignored("April always balances"),
    "trainer.project_name": Ignored(LOGS),
    "trainer.log_val_generations": Ignored(LOGS),
    "trainer.default_*": Ignored(OWN_FILES),
    "trainer.resume_*": Ignored("April goes on with --resume"),
    "trainer.*": Ignored(SHARDING),
    "critic.*": Ignored("of a critic"),
    "global_profiler.*": Ignored(LOGS),
    "model_engine": Ignored(SHARDING),
    "ray_kwargs.*": Ignored(SHARDING),
    "hydra.*": Ignored(LOGS),
}

DEFAULTS: dict[str, Any] = {
    f"{MODEL}enable_gradient_checkpointing": True,
    f"{MODEL}lora_rank": 0,
    f"{MODEL}lora_alpha": 16,
    f"{MODEL}target_modules": "all-linear",
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.shuffle": True,
    "data.train_batch_size": 1024,
    "data.val_max_samples": -1,
    f"{ROLLOUT}n": 1,
    f"{ROLLOUT}temperature": 1.0,
    f"{ROLLOUT}val_kwargs.n": 1,
    f"{ROLLOUT}val_kwargs.temperature": 0,
    f"{ROLLOUT}tensor_model_parallel_size": 2,
    f"{ACTOR}ppo_mini_batch_size": 256,
    f"{ACTOR}policy_loss.loss_mode": "vanilla",
    f"{ACTOR}loss_agg_mode": "token-mean",
    f"{ACTOR}clip_ratio_low": 0.2,
    f"{ACTOR}clip_ratio_high": 0.2,
    f"{ACTOR}clip_ratio_c": 3.0,
    f"{ACTOR}kl_loss_coef": 0.001,
    f"{ACTOR}kl_loss_type": "low_var_kl",
    f"{ACTOR}entropy_coeff": 0,
    f"{ACTOR}optim.lr": 1e-6,
    f"{ACTOR}optim.weight_decay": 0.01,
    f"{ACTOR}optim.betas": [0.9, 0.999],
    f"{ACTOR}optim.clip_grad": 1.0,
    f"{ACTOR}optim.lr_scheduler_type": "constant",
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    f"{IMPORTANCE}rollout_is_threshold": 2.0,
    "trainer.total_epochs": 30,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}


class Verl(Framework):
    source = "verl-project/verl at 1dda039b9"
    table, defaults = TABLE, DEFAULTS

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        if path.suffix in (".yaml", ".yml"):
            return file_options(text, path)
        return script_options(text, environment, r"main_ppo(\.py)?", hydra=True)

    def translate_joint(self, translation: Translation) -> None:
        translation.set_key("schedule.kind", "sync")
        data(translation)
        reward(translation)
        loss(translation)
        stale_tokens(translation)
        set_adapter(translation, f"{MODEL}lora_rank", f"{MODEL}lora_alpha", f"{MODEL}target_modules")
        drawn = translation.value(f"{ROLLOUT}val_kwargs.do_sample")
        name = f"{ROLLOUT}val_kwargs.{'temperature' if drawn else 'do_sample'}"
        translation.set_key("evaluation.temperature", translation.value(name) if drawn else 0.0, name)
        server(translation)
        set_devices(translation, None, None, ("trainer.nnodes", "trainer.n_gpus_per_node"))


def data(translation: Translation) -> None:
    files = translation.value("data.train_files")
    if isinstance(files, list) and len(files) > 1:
        translation.set_key("data.sources", [{"path": file} for file in files], "data.train_files")
    else:
        translation.set_key("data.path", single_path(files), "data.train_files")
    translation.set_key("data.label_key", "reward_model.ground_truth")
    steps = translation.value("trainer.total_training_steps")
    translation.set_key(
        "schedule.max_steps",
        steps or UNLIMITED_STEPS,
        "trainer.total_training_steps" if steps else "trainer.total_epochs",
    )
    translation.set_key(
        "data.epochs", None if steps else translation.value("trainer.total_epochs"), "trainer.total_epochs"
    )
    translation.set_key("schedule.last_batch", "drop", "data.train_batch_size")
    name = f"{ACTOR}ppo_mini_batch_size"
    n, groups, mini = (
        translation.number(f"{ROLLOUT}n"),
        translation.number("data.train_batch_size"),
        translation.number(name),
    )
    set_minibatches(translation, name, mini and n and mini * n, groups, n)


def reward(translation: Translation) -> None:
    """Translate the reward; without a named function verl chooses one by each row's data_source."""
    given = {name.rpartition(".")[2]: name for name in translation.options.values if "custom_reward_function." in name}
    path = translation.value(given["path"]) if "path" in given else None
    if path:
        function = translation.value(given["name"]) if "name" in given else "compute_score"
        translation.set_key("data.reward", f"verl:{Path(path).stem}:{function}", given["path"])
        translation.set_key("run.parts", [str(Path(path).parent)], given["path"])
        translation.set_key("data.label_key", "data_source,reward_model.ground_truth,extra_info", given["path"])
    else:
        translation.undecided["data.reward"] = (
            "verl chooses its verifier by data_source in each row; set one of April's, or verl's own, docs/rewards.md"
        )
    others = [name for name in translation.options.values if name.startswith("reward") and name not in given.values()]
    for name in others:
        if translation.rule(name) == JOINT:
            translation.mark_unsupported(
                name, "April's penalties are reward.overlong_buffer_tokens and reward.format_pattern"
            )


def loss(translation: Translation) -> None:
    name = "algorithm.adv_estimator"
    estimator = ESTIMATORS.get(translation.value(name))
    if estimator == "grpo" and not translation.value("algorithm.norm_adv_by_std_in_grpo"):
        estimator = "dr_grpo"
    if estimator:
        translation.set_key("algorithm.advantage", estimator, name)
    else:
        translation.undecided["algorithm.advantage"] = f"April has no {name} = {translation.value(name)!r}; choose one"
    critic(translation, estimator == "gae")
    mode, mean = translation.value(f"{ACTOR}policy_loss.loss_mode"), translation.value(f"{ACTOR}loss_agg_mode")
    bypass = translation.value(f"{IMPORTANCE}bypass_mode")
    low, high, most = (translation.number(f"{ACTOR}clip_ratio_{end}") for end in ("low", "high", "c"))
    if mode == DPPO and not bypass:
        translation.set_key("algorithm.loss", "cispo", f"{ACTOR}policy_loss.loss_mode")
        translation.set_key("algorithm.clip_low", 1.0, f"{ACTOR}policy_loss.loss_mode")
        translation.set_key("algorithm.clip_high", max(most - 1, 0) if most else None, f"{ACTOR}clip_ratio_c")
        translation.set_key("algorithm.dppo_fall", low, f"{ACTOR}clip_ratio_low")
        translation.set_key("algorithm.dppo_rise", high, f"{ACTOR}clip_ratio_high")
    elif mode in LOSSES:
        translation.set_key("algorithm.loss", LOSSES[mode], f"{ACTOR}policy_loss.loss_mode")
        translation.set_key(
            "algorithm.clip_low", None if low is None else min(float(low), 1.0), f"{ACTOR}clip_ratio_low"
        )
        translation.set_key("algorithm.clip_high", high, f"{ACTOR}clip_ratio_high")
    elif mode == DPPO:
        translation.undecided["algorithm.loss"] = (
            "verl's bypass_mode brings its own loss in the place of dppo_tv; choose one"
        )
    else:
        translation.undecided["algorithm.loss"] = f"April has no policy_loss.loss_mode = {mode!r}; choose one"
    if mode == "vanilla":
        translation.set_key("algorithm.dual_clip", most, f"{ACTOR}clip_ratio_c")
    if mean in MEANS:
        translation.set_key("algorithm.normalisation", MEANS[mean], f"{ACTOR}loss_agg_mode")
    else:
        translation.mark_unsupported(f"{ACTOR}loss_agg_mode", f"April's normalisations are those of {', '.join(MEANS)}")
    set_reference_kl(
        translation, bool(translation.value(f"{ACTOR}use_kl_loss")), f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type"
    )


def critic(translation: Translation, asked: bool) -> None:
    """Set the critic's keys, or mark options that need a critic as unsupported."""
    in_reward = translation.value("algorithm.use_kl_in_reward")
    if asked:
        for name, (key, default) in CRITIC.items():
            translation.set_key(key, translation.number(name) if translation.given(name) else default, name)
        if in_reward:
            given = translation.number("algorithm.kl_ctrl.kl_coef")
            translation.set_key("critic.kl_coef", 0.001 if given is None else given, "algorithm.kl_ctrl.kl_coef")
        return
    for name in ("algorithm.gamma", "algorithm.lam"):
        if translation.value(name) not in (1, None):
            translation.mark_unsupported(name, "it is of a critic, which algorithm.adv_estimator = gae asks for")
    if in_reward:
        translation.mark_unsupported("algorithm.use_kl_in_reward", IN_LOSS)


def stale_tokens(translation: Translation) -> None:
    name, mode, bypassing = f"{IMPORTANCE}rollout_is", f"{ACTOR}policy_loss.loss_mode", f"{IMPORTANCE}bypass_mode"
    translation.set_key("algorithm.behaviour_coef", 0.0)
    if translation.value(bypassing):
        translation.set_key("algorithm.proximal", "behaviour", bypassing)
        translation.set_key("algorithm.corrections", [], bypassing)
        if translation.value(f"{IMPORTANCE}loss_type") not in (None, "ppo_clip"):
            translation.mark_unsupported(f"{IMPORTANCE}loss_type", "around the behaviour policy April clips the ratio")
        return
    translation.set_key("algorithm.proximal", "recomputed", bypassing)
    correction = {"token": "truncated", "sequence": "truncated_sequence"}.get(translation.value(name))
    if translation.value(mode) == DPPO:
        translation.set_key("algorithm.corrections", [correction or "truncated", DPPO], mode, name)
        translation.mark_unsupported(
            mode, "verl masks by what its steps move in a batch, April by what the batch's start is off its sampler"
        )
        if not correction:
            translation.set_key(
                "algorithm.truncation", translation.number(f"{ACTOR}clip_ratio_c"), f"{ACTOR}clip_ratio_c"
            )
    else:
        translation.set_key("algorithm.corrections", [correction] if correction else [], name)
    if correction:
        key = "truncation" if correction == "truncated" else "sequence_truncation"
        translation.set_key(
            f"algorithm.{key}",
            translation.number(f"{IMPORTANCE}rollout_is_threshold"),
            f"{IMPORTANCE}rollout_is_threshold",
        )


def server(translation: Translation) -> None:
    """Translate verl's options of the inference server to `engine.server`, under the names that the chosen engine (vLLM
    or SGLang) uses."""
    engine, _ = translation.keys.get("worker.engine", ("", ""))
    ranks, memory = {
        "vllm": ("tensor_parallel_size", "gpu_memory_utilization"),
        "sglang": ("tp_size", "mem_fraction_static"),
    }.get(engine, ("", ""))
    if engine:
        name = f"{ROLLOUT}tensor_model_parallel_size"
        translation.set_key(f"engine.server.{ranks}", translation.value(name), name)
        name = f"{ROLLOUT}gpu_memory_utilization"
        translation.set_key(f"engine.server.{memory}", translation.value(name), name)
    else:
        translation.undecided["worker.engine"] = (
            f"April has no engine like {ROLLOUT}name = {translation.value(f'{ROLLOUT}name')!r}"
        )

"""verl's scripts, Hydra's `key=value` for verl.trainer.main_ppo, and its YAML.

Options and defaults as in verl-project/verl at 1dda039b9, verl/trainer/config.
"""

from collections.abc import Mapping
from pathlib import Path

from april.trainers.convert.framework import (
    ALL_PROMPTS,
    IN_LOSS,
    LOGS,
    LR_SCHEDULES,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    SINKS,
    TEXT,
    WARMUP,
    Framework,
)
from april.trainers.convert.translation import (
    Ignored,
    Joint,
    MapTo,
    Options,
    Rule,
    Translation,
    Unsupported,
    by_name,
    each,
    file_options,
    if_positive,
    known_names,
    not_negative,
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
SERVER = {
    "vllm": ("tensor_parallel_size", "gpu_memory_utilization"),
    "sglang": ("tp_size", "mem_fraction_static"),
}
"""The names that each inference server has for (tensor-parallel size, share of the GPU's memory)."""

TABLE: dict[str, Rule] = {
    f"{MODEL}path": MapTo("model.path"),
    f"{MODEL}enable_gradient_checkpointing": MapTo("learner.activation_checkpointing", default=True),
    f"{MODEL}lora_rank": Joint(default=0),
    f"{MODEL}lora_alpha": Joint(default=16),
    f"{MODEL}target_modules": Joint(default="all-linear"),
    "data.train_files": Joint(),
    "data.val_files": MapTo("data.eval_path", single_path),
    "data.prompt_key": MapTo("data.prompt_key", default="prompt"),
    "data.max_prompt_length": MapTo("data.max_prompt_tokens", default=512),
    "data.filter_overlong_prompts": MapTo("data.bad_rows", lambda skip: "skip" if skip else "stop", default=False),
    "data.truncation": MapTo("data.bad_rows", only("error", "April cuts no prompt; it refuses or skips longer ones")),
    "data.max_response_length": MapTo("sampling.max_response_tokens", default=512),
    "data.shuffle": MapTo("data.shuffle", default=True),
    "data.seed": MapTo("seed"),
    "data.train_batch_size": MapTo("schedule.rollout_batch_size", default=1024),
    "data.gen_batch_size": Unsupported(
        "it is what verl generates at a time; April's is schedule.over_sampling_batch_size"
    ),
    "data.train_max_samples": Unsupported("April takes all rows", off=(None, -1)),
    "data.val_max_samples": MapTo("evaluation.prompts", lambda rows: rows if rows > 0 else ALL_PROMPTS, default=-1),
    "data.apply_chat_template_kwargs.*": MapTo("data.template_options.*"),
    "data.custom_cls.path": Unsupported("it names code that reads data; April reads rows as docs/data.md says"),
    "data.image_key": MapTo("data.images_key"),
    "data.video_key": Unsupported(TEXT),
    "data.*": Ignored("of how verl loads data"),
    f"{ROLLOUT}n": MapTo("schedule.n_samples_per_prompt", default=1),
    f"{ROLLOUT}name": MapTo("worker.engine", by_name(vllm="vllm", sglang="sglang")),
    f"{ROLLOUT}temperature": MapTo("sampling.temperature", default=1.0),
    f"{ROLLOUT}top_p": MapTo("sampling.top_p"),
    f"{ROLLOUT}top_k": MapTo("sampling.top_k", not_negative),
    f"{ROLLOUT}tensor_model_parallel_size": Joint(default=2),
    f"{ROLLOUT}max_num_seqs": MapTo("worker.slots"),
    f"{ROLLOUT}ignore_eos": Unsupported("April ends a response at its end of text"),
    f"{ROLLOUT}val_kwargs.n": MapTo("evaluation.samples", default=1),
    f"{ROLLOUT}val_kwargs.temperature": Joint(default=0),
    **each(Joint(), "val_kwargs.do_sample gpu_memory_utilization", ROLLOUT),
    f"{ROLLOUT}val_kwargs.top_p": MapTo("evaluation.top_p"),
    f"{ROLLOUT}val_kwargs.top_k": MapTo("evaluation.top_k", not_negative),
    f"{ROLLOUT}multi_turn.enable": Unsupported(
        "April's turns are those of environments and agents, docs/environments.md"
    ),
    f"{ROLLOUT}agent.default_agent_loop": Unsupported(
        "April's turns are those of environments and agents, docs/agents.md", off=(None, "single_turn_agent")
    ),
    f"{ROLLOUT}*": Ignored("of how verl runs its engine"),
    f"{ACTOR}ppo_mini_batch_size": Joint(default=256),
    f"{ACTOR}ppo_epochs": MapTo("learner.epochs"),
    f"{ACTOR}ppo_max_token_len_per_gpu": MapTo("learner.microbatch_tokens"),
    f"{ACTOR}policy_loss.loss_mode": Joint(default="vanilla"),
    f"{ACTOR}loss_agg_mode": Joint(default="token-mean"),
    f"{ACTOR}loss_scale_factor": MapTo("algorithm.constant_tokens"),
    f"{ACTOR}clip_ratio": Ignored("clip_ratio_low and clip_ratio_high are what verl reads"),
    f"{ACTOR}clip_ratio_low": Joint(default=0.2),
    f"{ACTOR}clip_ratio_high": Joint(default=0.2),
    f"{ACTOR}clip_ratio_c": Joint(default=3.0),
    f"{ACTOR}use_kl_loss": Joint(),
    f"{ACTOR}kl_loss_coef": Joint(default=0.001),
    f"{ACTOR}kl_loss_type": Joint(default="low_var_kl"),
    f"{ACTOR}entropy_coeff": MapTo("algorithm.entropy_coef", float, default=0),
    f"{ACTOR}grad_clip": MapTo("learner.grad_clip"),
    f"{ACTOR}optim.lr": MapTo("learner.lr", default=1e-6),
    f"{ACTOR}optim.weight_decay": MapTo("learner.weight_decay", default=0.01),
    f"{ACTOR}optim.betas": MapTo("learner.betas", default=[0.9, 0.999]),
    f"{ACTOR}optim.clip_grad": MapTo("learner.grad_clip", default=1.0),
    f"{ACTOR}optim.lr_warmup_steps": MapTo("learner.warmup_steps", not_negative),
    f"{ACTOR}optim.lr_warmup_steps_ratio": Unsupported(WARMUP),
    f"{ACTOR}optim.lr_scheduler_type": MapTo("learner.lr_schedule", LR_SCHEDULES, default="constant"),
    f"{ACTOR}optim.lr_decay_style": MapTo("learner.lr_schedule", LR_SCHEDULES),
    f"{ACTOR}optim.min_lr_ratio": MapTo("learner.lr_floor"),
    **each(
        Unsupported("April's schedule ends at schedule.max_steps, at learner.lr_floor", off=(None, -1, 0.5)),
        f"{ACTOR}optim.num_cycles {ACTOR}optim.total_training_steps {ACTOR}optim.lr_decay_steps "
        f"{ACTOR}optim.lr_wsd_decay_steps {ACTOR}optim.lr_wsd_decay_style {ACTOR}optim.min_lr",
    ),
    f"{ACTOR}optim.*": Ignored(MEMORY),
    "algorithm.adv_estimator": Joint(default="gae"),
    "algorithm.norm_adv_by_std_in_grpo": Joint(default=True),
    **each(
        Ignored("of the KL in the reward, which algorithm.use_kl_in_reward switches on"),
        "algorithm.kl_ctrl.* algorithm.kl_penalty",
    ),
    **each(Joint(), "use_kl_in_reward gamma lam", "algorithm."),
    "algorithm.filter_groups.enable": MapTo("schedule.dynamic_sampling"),
    "algorithm.filter_groups.*": Ignored("April replaces a group whose rewards are all alike, as often as it takes"),
    **each(Joint(), "rollout_is bypass_mode loss_type", IMPORTANCE),
    f"{IMPORTANCE}rollout_is_threshold": Joint(default=2.0),
    f"{IMPORTANCE}rollout_rs": Unsupported(
        "April masks responses by algorithm.corrections = ['geometric'], another rule"
    ),
    f"{IMPORTANCE}rollout_is_batch_normalize": Unsupported("April does not normalise these weights"),
    f"{IMPORTANCE}*": Ignored("of a correction that is off"),
    **each(Unsupported(f"a model gives the rewards; {OWN_REWARD}"), "reward_model.enable reward.reward_model.enable"),
    **each(Joint(), "reward.custom_reward_function.* custom_reward_function.* reward*"),
    "trainer.total_epochs": Joint(default=30),
    "trainer.total_training_steps": Joint(),
    "trainer.save_freq": MapTo("learner.checkpoint_every", if_positive),
    "trainer.test_freq": MapTo("evaluation.every", not_negative),
    "trainer.max_actor_ckpt_to_keep": MapTo("learner.keep_checkpoints"),
    "trainer.experiment_name": MapTo("run.name"),
    "trainer.logger": MapTo("operations.sinks", known_names(SINKS)),
    "trainer.n_gpus_per_node": Joint(default=8),
    "trainer.nnodes": Joint(default=1),
    "trainer.val_before_train": Ignored("April always evaluates at the start"),
    "trainer.balance_batch": Ignored("April always balances"),
    "trainer.default_*": Ignored(OWN_FILES),
    "trainer.resume_*": Ignored("April goes on with --resume"),
    **each(Ignored("of a critic"), "trainer.critic_warmup critic.*"),
    **each(Ignored(LOGS), "trainer.project_name trainer.log_val_generations global_profiler.* hydra.*"),
    **each(Ignored(SHARDING), f"{MODEL}* {ACTOR}* actor_rollout_ref.* trainer.* model_engine ray_kwargs.*"),
}


class Verl(Framework):
    source = "verl-project/verl at 1dda039b9"
    table = TABLE

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
        translation.set_adapter(f"{MODEL}lora_rank", f"{MODEL}lora_alpha", f"{MODEL}target_modules")
        drawn = translation.value(f"{ROLLOUT}val_kwargs.do_sample")
        name = f"{ROLLOUT}val_kwargs.{'temperature' if drawn else 'do_sample'}"
        translation.set_key("evaluation.temperature", translation.value(name) if drawn else 0.0, name)
        server(translation)
        translation.set_devices(None, None, ("trainer.nnodes", "trainer.n_gpus_per_node"))


def data(translation: Translation) -> None:
    translation.set_paths("data.train_files", translation.value("data.train_files"))
    translation.set_key("data.label_key", "reward_model.ground_truth")
    translation.set_length("trainer.total_training_steps", "trainer.total_epochs")
    translation.set_key("schedule.last_batch", "drop", "data.train_batch_size")
    name = f"{ACTOR}ppo_mini_batch_size"
    n, groups, mini = map(translation.number, (f"{ROLLOUT}n", "data.train_batch_size", name))
    translation.set_minibatches(name, mini and n and mini * n, groups, n)


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
    for name in translation.options.values:
        if name.startswith("reward") and name not in given.values() and isinstance(translation.rule(name), Joint):
            translation.mark_unsupported(
                name, "April's penalties are reward.overlong_buffer_tokens and reward.format_pattern"
            )


def loss(translation: Translation) -> None:
    scaled = bool(translation.value("algorithm.norm_adv_by_std_in_grpo"))
    critic(translation, translation.set_advantage("algorithm.adv_estimator", ESTIMATORS, scaled) == "gae")
    name, bypass = f"{ACTOR}policy_loss.loss_mode", translation.value(f"{IMPORTANCE}bypass_mode")
    mode = translation.value(name)
    lower, upper, bound = (f"{ACTOR}clip_ratio_{end}" for end in ("low", "high", "c"))
    low, high, most = map(translation.number, (lower, upper, bound))
    if mode == DPPO and not bypass:
        translation.set_key("algorithm.loss", "cispo", name)
        translation.set_key("algorithm.clip_low", 1.0, name)
        translation.set_key("algorithm.clip_high", max(most - 1, 0) if most else None, bound)
        translation.set_key("algorithm.dppo_fall", low, lower)
        translation.set_key("algorithm.dppo_rise", high, upper)
    elif mode in LOSSES:
        translation.set_key("algorithm.loss", LOSSES[mode], name)
        translation.set_key("algorithm.clip_low", None if low is None else min(float(low), 1.0), lower)
        translation.set_key("algorithm.clip_high", high, upper)
    else:
        translation.undecided["algorithm.loss"] = (
            "verl's bypass_mode brings its own loss in the place of dppo_tv; choose one"
            if mode == DPPO
            else f"April has no policy_loss.loss_mode = {mode!r}; choose one"
        )
    if mode == "vanilla":
        translation.set_key("algorithm.dual_clip", most, bound)
    translation.set_normalisation(f"{ACTOR}loss_agg_mode", MEANS)
    used = bool(translation.value(f"{ACTOR}use_kl_loss"))
    translation.set_reference_kl(used, f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type")


def critic(translation: Translation, asked: bool) -> None:
    """Set April's configuration keys of the critic if the script trains with one (`asked`); otherwise mark options that
    only have a meaning with a critic as unsupported."""
    in_reward = translation.value("algorithm.use_kl_in_reward")
    if asked:
        for name, (key, default) in CRITIC.items():
            translation.set_key(key, translation.number(name) if translation.given(name) else default, name)
        if in_reward:
            given = translation.number("algorithm.kl_ctrl.kl_coef")
            translation.set_key("critic.kl_coef", 0.001 if given is None else given, "algorithm.kl_ctrl.kl_coef")
        return
    translation.mark_critic_options("algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam")
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
    bound = f"{IMPORTANCE}rollout_is_threshold" if correction else f"{ACTOR}clip_ratio_c"
    if translation.value(mode) == DPPO:
        translation.set_key("algorithm.corrections", [correction or "truncated", DPPO], mode, name)
        translation.mark_unsupported(
            mode, "verl masks by what its steps move in a batch, April by what the batch's start is off its sampler"
        )
    else:
        translation.set_key("algorithm.corrections", [correction] if correction else [], name)
    if correction or translation.value(mode) == DPPO:
        key = "sequence_truncation" if correction == "truncated_sequence" else "truncation"
        translation.set_key(f"algorithm.{key}", translation.number(bound), bound)


def server(translation: Translation) -> None:
    """Translate verl's options of the inference server to `engine.server`, under the names that the chosen engine (vLLM
    or SGLang) uses."""
    engine, _ = translation.keys.get("worker.engine", ("", ""))
    if engine:
        ranks, memory = SERVER[engine]
        translation.copy(f"engine.server.{ranks}", f"{ROLLOUT}tensor_model_parallel_size")
        translation.copy(f"engine.server.{memory}", f"{ROLLOUT}gpu_memory_utilization")
    else:
        translation.undecided["worker.engine"] = (
            f"April has no engine like {ROLLOUT}name = {translation.value(f'{ROLLOUT}name')!r}"
        )

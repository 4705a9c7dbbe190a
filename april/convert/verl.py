"""verl's scripts, Hydra's `key=value` given to verl.trainer.main_ppo, and its YAML.

Options and defaults as in verl-project/verl at 1dda039b9, verl/trainer/config.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.convert.framework import (
    ALL_PROMPTS,
    CONSTANT_LR,
    EPOCHS_END_IT,
    IN_LOSS,
    LOGS,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    SINKS,
    Framework,
    adapter,
    optimizer_steps,
    placed,
    reference,
)
from april.convert.options import Options, of_file, of_script
from april.convert.translation import JOINT, Apart, Lacks, Rule, To, Translation, first_of, named, one_of, only

MODEL = "actor_rollout_ref.model."
ACTOR, ROLLOUT, IMPORTANCE = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm.rollout_correction."
ESTIMATORS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "gae": "gae",
}
"""advantage by algorithm.adv_estimator"""
CRITIC = {
    "algorithm.gamma": ("critic.gamma", 1.0),
    "algorithm.lam": ("critic.lam", 1.0),
    "critic.optim.lr": ("critic.lr", 1e-5),
    "critic.cliprange_value": ("critic.value_clip", 0.5),
    "trainer.critic_warmup": ("critic.warmup_batches", 0),
}
"""April's key, and verl's default"""
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
DPPO = "dppo_tv"
MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "constant"}

TABLE: dict[str, Rule] = {
    f"{MODEL}path": To("model.path"),
    f"{MODEL}enable_gradient_checkpointing": To("learner.activation_checkpointing"),
    f"{MODEL}lora_rank": JOINT,
    f"{MODEL}lora_alpha": JOINT,
    f"{MODEL}target_modules": JOINT,
    f"{MODEL}*": Apart(SHARDING),
    "data.train_files": JOINT,
    "data.val_files": To("data.eval_path", first_of),
    "data.prompt_key": To("data.prompt_key"),
    "data.max_prompt_length": To("data.max_prompt_tokens"),
    "data.filter_overlong_prompts": To("data.bad_rows", lambda skip: "skip" if skip else "stop"),
    "data.truncation": To("data.bad_rows", only("error", "April cuts no prompt; it refuses or skips longer ones")),
    "data.max_response_length": To("sampling.max_response_tokens"),
    "data.shuffle": To("data.shuffle"),
    "data.seed": To("seed"),
    "data.train_batch_size": To("schedule.rollout_batch_size"),
    "data.gen_batch_size": Lacks("it is what verl generates at a time; April's is schedule.over_sampling_batch_size"),
    "data.train_max_samples": Lacks("April takes all rows", off=(None, -1)),
    "data.val_max_samples": To("evaluation.prompts", lambda rows: rows if rows > 0 else ALL_PROMPTS),
    "data.apply_chat_template_kwargs.*": To("data.template_options.*"),
    "data.custom_cls.path": Lacks("it names code that reads data; April reads rows as docs/data.md says"),
    "data.image_key": Lacks("April takes text alone"),
    "data.video_key": Lacks("April takes text alone"),
    "data.*": Apart("of how verl loads data"),
    f"{ROLLOUT}n": To("schedule.n_samples_per_prompt"),
    f"{ROLLOUT}name": To("worker.engine", one_of(vllm="vllm", sglang="sglang")),
    f"{ROLLOUT}temperature": To("sampling.temperature"),
    f"{ROLLOUT}top_p": To("sampling.top_p"),
    f"{ROLLOUT}top_k": To("sampling.top_k", lambda ids: max(ids, 0)),
    f"{ROLLOUT}tensor_model_parallel_size": JOINT,
    f"{ROLLOUT}gpu_memory_utilization": JOINT,
    f"{ROLLOUT}max_num_seqs": To("worker.slots"),
    f"{ROLLOUT}ignore_eos": Lacks("April ends a response at its end of text"),
    f"{ROLLOUT}val_kwargs.n": To("evaluation.samples"),
    f"{ROLLOUT}val_kwargs.temperature": JOINT,
    f"{ROLLOUT}val_kwargs.do_sample": JOINT,
    f"{ROLLOUT}val_kwargs.top_p": To("evaluation.top_p"),
    f"{ROLLOUT}val_kwargs.top_k": To("evaluation.top_k", lambda ids: max(ids, 0)),
    f"{ROLLOUT}multi_turn.enable": Lacks("April's turns are those of environments and agents, docs/environments.md"),
    f"{ROLLOUT}agent.default_agent_loop": Lacks(
        "April's turns are those of environments and agents, docs/agents.md", off=(None, "single_turn_agent")
    ),
    f"{ROLLOUT}*": Apart("of how verl runs its engine"),
    f"{ACTOR}ppo_mini_batch_size": JOINT,
    f"{ACTOR}ppo_epochs": To("learner.epochs"),
    f"{ACTOR}ppo_max_token_len_per_gpu": To("learner.microbatch_tokens"),
    f"{ACTOR}policy_loss.loss_mode": JOINT,
    f"{ACTOR}loss_agg_mode": JOINT,
    f"{ACTOR}loss_scale_factor": To("algorithm.constant_tokens"),
    f"{ACTOR}clip_ratio": Apart("clip_ratio_low and clip_ratio_high are what verl reads"),
    f"{ACTOR}clip_ratio_low": JOINT,
    f"{ACTOR}clip_ratio_high": JOINT,
    f"{ACTOR}clip_ratio_c": JOINT,
    f"{ACTOR}use_kl_loss": JOINT,
    f"{ACTOR}kl_loss_coef": JOINT,
    f"{ACTOR}kl_loss_type": JOINT,
    f"{ACTOR}entropy_coeff": To("algorithm.entropy_coef", float),
    f"{ACTOR}grad_clip": To("learner.grad_clip"),
    f"{ACTOR}optim.lr": To("learner.lr"),
    f"{ACTOR}optim.weight_decay": To("learner.weight_decay"),
    f"{ACTOR}optim.betas": To("learner.betas"),
    f"{ACTOR}optim.clip_grad": To("learner.grad_clip"),
    f"{ACTOR}optim.lr_warmup_steps": To("learner.warmup_steps", lambda steps: max(steps, 0)),
    f"{ACTOR}optim.lr_warmup_steps_ratio": Lacks("April's warm-up is a number of steps, learner.warmup_steps"),
    f"{ACTOR}optim.lr_scheduler_type": To("learner.lr", only("constant", CONSTANT_LR)),
    f"{ACTOR}optim.lr_decay_style": To("learner.lr", only("constant", CONSTANT_LR)),
    f"{ACTOR}optim.*": Apart(MEMORY),
    f"{ACTOR}*": Apart(SHARDING),
    "actor_rollout_ref.ref.*": Apart(SHARDING),
    "actor_rollout_ref.*": Apart(SHARDING),
    "algorithm.adv_estimator": JOINT,
    "algorithm.norm_adv_by_std_in_grpo": JOINT,
    "algorithm.use_kl_in_reward": JOINT,
    "algorithm.kl_ctrl.*": Apart("of the KL in the reward, which algorithm.use_kl_in_reward switches on"),
    "algorithm.kl_penalty": Apart("of the KL in the reward, which algorithm.use_kl_in_reward switches on"),
    "algorithm.gamma": JOINT,
    "algorithm.lam": JOINT,
    "algorithm.filter_groups.enable": To("schedule.dynamic_sampling"),
    "algorithm.filter_groups.*": Apart("April replaces a group whose rewards are all alike, as often as it takes"),
    f"{IMPORTANCE}rollout_is": JOINT,
    f"{IMPORTANCE}rollout_is_threshold": JOINT,
    f"{IMPORTANCE}rollout_rs": Lacks("April masks responses by algorithm.corrections = ['geometric'], another rule"),
    f"{IMPORTANCE}bypass_mode": JOINT,
    f"{IMPORTANCE}loss_type": JOINT,
    f"{IMPORTANCE}rollout_is_batch_normalize": Lacks("April does not normalise these weights"),
    f"{IMPORTANCE}*": Apart("of a correction that is off"),
    "reward.custom_reward_function.*": JOINT,
    "custom_reward_function.*": JOINT,
    "reward_model.enable": Lacks(f"a model gives the rewards; {OWN_REWARD}"),
    "reward.reward_model.enable": Lacks(f"a model gives the rewards; {OWN_REWARD}"),
    "reward*": JOINT,
    "trainer.total_epochs": JOINT,
    "trainer.total_training_steps": JOINT,
    "trainer.save_freq": To("learner.checkpoint_every", lambda steps: steps if steps > 0 else None),
    "trainer.test_freq": To("evaluation.every", lambda steps: max(steps, 0)),
    "trainer.max_actor_ckpt_to_keep": To("learner.keep_checkpoints"),
    "trainer.experiment_name": To("run.name"),
    "trainer.logger": To("operations.sinks", named(SINKS)),
    "trainer.n_gpus_per_node": JOINT,
    "trainer.nnodes": JOINT,
    "trainer.val_before_train": Apart("April always evaluates at the start"),
    "trainer.critic_warmup": Apart("of a critic"),
    "trainer.balance_batch": Apart("April always balances"),
    "trainer.project_name": Apart(LOGS),
    "trainer.log_val_generations": Apart(LOGS),
    "trainer.default_*": Apart(OWN_FILES),
    "trainer.resume_*": Apart("April goes on with --resume"),
    "trainer.*": Apart(SHARDING),
    "critic.*": Apart("of a critic"),
    "global_profiler.*": Apart(LOGS),
    "model_engine": Apart(SHARDING),
    "ray_kwargs.*": Apart(SHARDING),
    "hydra.*": Apart(LOGS),
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
            return of_file(text, path)
        return of_script(text, environment, r"main_ppo(\.py)?", hydra=True)

    def joint(self, said: Translation) -> None:
        said.say("schedule.kind", "sync")
        data(said)
        reward(said)
        loss(said)
        stale_tokens(said)
        adapter(said, f"{MODEL}lora_rank", f"{MODEL}lora_alpha", f"{MODEL}target_modules")
        drawn = said.value(f"{ROLLOUT}val_kwargs.do_sample")
        name = f"{ROLLOUT}val_kwargs.{'temperature' if drawn else 'do_sample'}"
        said.say("evaluation.temperature", said.value(name) if drawn else 0.0, name)
        server(said)
        placed(said, None, None, ("trainer.nnodes", "trainer.n_gpus_per_node"))


def data(said: Translation) -> None:
    files = said.value("data.train_files")
    if isinstance(files, list) and len(files) > 1:
        said.say("data.sources", [{"path": file} for file in files], "data.train_files")
    else:
        said.say("data.path", first_of(files), "data.train_files")
    said.say("data.label_key", "reward_model.ground_truth")
    steps = said.value("trainer.total_training_steps")
    said.say(
        "schedule.max_steps",
        steps or EPOCHS_END_IT,
        "trainer.total_training_steps" if steps else "trainer.total_epochs",
    )
    said.say("data.epochs", None if steps else said.value("trainer.total_epochs"), "trainer.total_epochs")
    said.say("schedule.last_batch", "drop", "data.train_batch_size")
    name = f"{ACTOR}ppo_mini_batch_size"
    n, groups, mini = said.number(f"{ROLLOUT}n"), said.number("data.train_batch_size"), said.number(name)
    optimizer_steps(said, name, mini and n and mini * n, groups, n)


def reward(said: Translation) -> None:
    """verl chooses by each row's data_source, unless a function is named."""
    given = {name.rpartition(".")[2]: name for name in said.options.values if "custom_reward_function." in name}
    path = said.value(given["path"]) if "path" in given else None
    if path:
        function = said.value(given["name"]) if "name" in given else "compute_score"
        said.say("data.reward", f"verl:{Path(path).stem}:{function}", given["path"])
        said.say("run.parts", [str(Path(path).parent)], given["path"])
        said.say("data.label_key", "data_source,reward_model.ground_truth,extra_info", given["path"])
    else:
        said.open["data.reward"] = (
            "verl chooses its verifier by data_source in each row; set one of April's, or verl's own, docs/rewards.md"
        )
    others = [name for name in said.options.values if name.startswith("reward") and name not in given.values()]
    for name in others:
        if said.rule(name) == JOINT:
            said.differ(name, "April's penalties are reward.overlong_buffer_tokens and reward.format_pattern")


def loss(said: Translation) -> None:
    name = "algorithm.adv_estimator"
    estimator = ESTIMATORS.get(said.value(name))
    if estimator == "grpo" and not said.value("algorithm.norm_adv_by_std_in_grpo"):
        estimator = "dr_grpo"
    if estimator:
        said.say("algorithm.advantage", estimator, name)
    else:
        said.open["algorithm.advantage"] = f"April has no {name} = {said.value(name)!r}; choose one"
    critic(said, estimator == "gae")
    mode, mean = said.value(f"{ACTOR}policy_loss.loss_mode"), said.value(f"{ACTOR}loss_agg_mode")
    bypass = said.value(f"{IMPORTANCE}bypass_mode")
    low, high, most = (said.number(f"{ACTOR}clip_ratio_{end}") for end in ("low", "high", "c"))
    if mode == DPPO and not bypass:
        said.say("algorithm.loss", "cispo", f"{ACTOR}policy_loss.loss_mode")
        said.say("algorithm.clip_low", 1.0, f"{ACTOR}policy_loss.loss_mode")
        said.say("algorithm.clip_high", max(most - 1, 0) if most else None, f"{ACTOR}clip_ratio_c")
        said.say("algorithm.dppo_fall", low, f"{ACTOR}clip_ratio_low")
        said.say("algorithm.dppo_rise", high, f"{ACTOR}clip_ratio_high")
    elif mode in LOSSES:
        said.say("algorithm.loss", LOSSES[mode], f"{ACTOR}policy_loss.loss_mode")
        said.say("algorithm.clip_low", None if low is None else min(float(low), 1.0), f"{ACTOR}clip_ratio_low")
        said.say("algorithm.clip_high", high, f"{ACTOR}clip_ratio_high")
    elif mode == DPPO:
        said.open["algorithm.loss"] = "verl's bypass_mode brings its own loss in the place of dppo_tv; choose one"
    else:
        said.open["algorithm.loss"] = f"April has no policy_loss.loss_mode = {mode!r}; choose one"
    if mode == "vanilla":
        said.say("algorithm.dual_clip", most, f"{ACTOR}clip_ratio_c")
    if mean in MEANS:
        said.say("algorithm.normalisation", MEANS[mean], f"{ACTOR}loss_agg_mode")
    else:
        said.differ(f"{ACTOR}loss_agg_mode", f"April's normalisations are those of {', '.join(MEANS)}")
    reference(said, bool(said.value(f"{ACTOR}use_kl_loss")), f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type")


def critic(said: Translation, asked: bool) -> None:
    """Its keys where there is one; elsewhere what has no meaning without."""
    in_reward = said.value("algorithm.use_kl_in_reward")
    if asked:
        for name, (key, default) in CRITIC.items():
            said.say(key, said.number(name) if said.given(name) else default, name)
        if in_reward:
            given = said.number("algorithm.kl_ctrl.kl_coef")
            said.say("critic.kl_coef", 0.001 if given is None else given, "algorithm.kl_ctrl.kl_coef")
        return
    for name in ("algorithm.gamma", "algorithm.lam"):
        if said.value(name) not in (1, None):
            said.differ(name, "it is of a critic, which algorithm.adv_estimator = gae asks for")
    if in_reward:
        said.differ("algorithm.use_kl_in_reward", IN_LOSS)


def stale_tokens(said: Translation) -> None:
    name, mode, bypassing = f"{IMPORTANCE}rollout_is", f"{ACTOR}policy_loss.loss_mode", f"{IMPORTANCE}bypass_mode"
    said.say("algorithm.behaviour_coef", 0.0)
    if said.value(bypassing):
        said.say("algorithm.proximal", "behaviour", bypassing)
        said.say("algorithm.corrections", [], bypassing)
        if said.value(f"{IMPORTANCE}loss_type") not in (None, "ppo_clip"):
            said.differ(f"{IMPORTANCE}loss_type", "around the behaviour policy April clips the ratio")
        return
    said.say("algorithm.proximal", "recomputed", bypassing)
    correction = {"token": "truncated", "sequence": "truncated_sequence"}.get(said.value(name))
    if said.value(mode) == DPPO:
        said.say("algorithm.corrections", [correction or "truncated", DPPO], mode, name)
        said.differ(
            mode, "verl masks by what its steps move in a batch, April by what the batch's start is off its sampler"
        )
        if not correction:
            said.say("algorithm.truncation", said.number(f"{ACTOR}clip_ratio_c"), f"{ACTOR}clip_ratio_c")
    else:
        said.say("algorithm.corrections", [correction] if correction else [], name)
    if correction:
        key = "truncation" if correction == "truncated" else "sequence_truncation"
        said.say(
            f"algorithm.{key}", said.number(f"{IMPORTANCE}rollout_is_threshold"), f"{IMPORTANCE}rollout_is_threshold"
        )


def server(said: Translation) -> None:
    """Its options, by the names that each engine has for them."""
    engine, _ = said.keys.get("worker.engine", ("", ""))
    ranks, memory = {
        "vllm": ("tensor_parallel_size", "gpu_memory_utilization"),
        "sglang": ("tp_size", "mem_fraction_static"),
    }.get(engine, ("", ""))
    if engine:
        name = f"{ROLLOUT}tensor_model_parallel_size"
        said.say(f"engine.server.{ranks}", said.value(name), name)
        name = f"{ROLLOUT}gpu_memory_utilization"
        said.say(f"engine.server.{memory}", said.value(name), name)
    else:
        said.open["worker.engine"] = f"April has no engine like {ROLLOUT}name = {said.value(f'{ROLLOUT}name')!r}"

"""TRL's scripts: Python with a GRPOConfig (or AsyncGRPOConfig, RLOOConfig), read as a syntax tree and never run; the
YAML of its command line; and shell scripts that give it `--name value`.

Options and defaults as in huggingface/trl at f2cd57710, trl/trainer/grpo_config.py, and transformers' own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.convert.framework import (
    ADAM,
    CONSTANT_LR,
    EPOCHS_END_IT,
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
    several_steps,
)
from april.convert.options import Options, of_file, of_script
from april.convert.python import of_python
from april.convert.translation import JOINT, Apart, Lacks, Rule, To, Translation, named, only

CONFIGS = ("GRPOConfig", "AsyncGRPOConfig", "RLOOConfig")
TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer", "RLOOTrainer")
MEANS = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
    "vespo": "token_mean",
}
"""normalisation by loss_type"""
LEVELS = {"token": "ppo", "sequence": "gspo", "sequence_token": "gspo_token"}
"""loss by importance_sampling_level"""
CORRECTIONS = {
    "token_truncate": ("truncated", "truncation"),
    "sequence_truncate": ("truncated_sequence", "sequence_truncation"),
    "token_mask": ("icepop", "icepop_high"),
}
"""correction and the key of its bound, by vllm_importance_sampling_mode"""
VESPO = {
    "vespo_k_pos": "vespo_k_positive",
    "vespo_lambda_pos": "vespo_lambda_positive",
    "vespo_k_neg": "vespo_k_negative",
    "vespo_lambda_neg": "vespo_lambda_negative",
}
"""keys of the weights of loss_type = vespo"""
ENGINE = "of how TRL runs its engine"

TABLE: dict[str, Rule] = {
    "model": To("model.path"),
    "model_name_or_path": To("model.path"),
    "dataset_name": JOINT,
    "train_dataset": JOINT,
    "eval_dataset": JOINT,
    "reward_funcs": JOINT,
    "reward_weights": Lacks("April's reward is one number; add up what you weigh in a verifier of your own"),
    "reward_model_name_or_path": Lacks(f"a model gives the rewards; {OWN_REWARD}"),
    "multi_objective_aggregation": Apart("of several rewards"),
    "num_generations": To("schedule.n_samples_per_prompt"),
    "max_completion_length": To("sampling.max_response_tokens"),
    "max_prompt_length": To("data.max_prompt_tokens"),
    "temperature": To("sampling.temperature"),
    "top_p": To("sampling.top_p"),
    "top_k": To("sampling.top_k", lambda ids: max(ids, 0)),
    "min_p": To("sampling.min_p"),
    "repetition_penalty": Lacks("April samples without penalties", off=(1, None)),
    "generation_kwargs": Lacks("April's keys for sampling are those of [sampling]"),
    "chat_template_kwargs": To("data.template_options"),
    "shuffle_dataset": To("data.shuffle"),
    "seed": To("seed"),
    "per_device_train_batch_size": JOINT,
    "gradient_accumulation_steps": JOINT,
    "steps_per_generation": JOINT,
    "generation_batch_size": JOINT,
    "num_iterations": To("learner.epochs"),
    "max_steps": JOINT,
    "num_train_epochs": JOINT,
    "max_staleness": To("schedule.max_staleness"),
    "max_inflight_tasks": To("schedule.in_flight", lambda tasks: tasks if tasks > 0 else None),
    "weight_sync_steps": Lacks("April publishes every step", off=(1,)),
    "beta": JOINT,
    "epsilon": JOINT,
    "epsilon_high": JOINT,
    "delta": To("algorithm.dual_clip"),
    "importance_sampling_level": JOINT,
    "loss_type": JOINT,
    "vespo_*": JOINT,
    "scale_rewards": JOINT,
    "normalize_advantages": Lacks("April whitens with reinforce_pp and reinforce_pp_baseline alone"),
    "reward_clip_range": Lacks("April takes rewards as they come"),
    "mask_truncated_completions": Lacks("April trains what was cut; reward.overlong_buffer_tokens makes it cost"),
    "sync_ref_model": Lacks("the reference in April is the starting policy"),
    "top_entropy_quantile": Lacks("April trains all tokens", off=(1,)),
    "entropy_coef": To("algorithm.entropy_coef"),
    "use_adaptive_entropy": Lacks("April's entropy bonus is constant"),
    "off_policy_mask_threshold": Lacks("April's corrections of stale tokens are in docs/algorithms.md"),
    "use_bias_correction_kl": Lacks("April's estimators are k1, k2 and k3"),
    "vllm_importance_sampling_*": JOINT,
    "learning_rate": To("learner.lr"),
    "lr_scheduler_type": JOINT,
    "warmup_steps": To("learner.warmup_steps"),
    "warmup_ratio": Lacks("April's warm-up is a number of steps, learner.warmup_steps"),
    "weight_decay": To("learner.weight_decay"),
    "adam_beta1": JOINT,
    "adam_beta2": JOINT,
    "max_grad_norm": To("learner.grad_clip"),
    "optim": To("learner.lr", lambda name: None if str(name).startswith("adamw") else only("adamw", ADAM)(name)),
    "gradient_checkpointing": To("learner.activation_checkpointing"),
    "save_steps": To("learner.checkpoint_every", int),
    "save_total_limit": To("learner.keep_checkpoints"),
    "eval_strategy": JOINT,
    "eval_steps": JOINT,
    "num_generations_eval": To("evaluation.samples"),
    "use_vllm": JOINT,
    "vllm_server_base_url": To("engine.url", lambda url: [url]),
    "vllm_tensor_parallel_size": JOINT,
    "vllm_gpu_memory_utilization": JOINT,
    "vllm_*": Apart(ENGINE),
    "run_name": To("run.name"),
    "report_to": To("operations.sinks", named(SINKS)),
    "output_dir": Apart(OWN_FILES),
    "use_peft": JOINT,
    "peft_config": Lacks("April's adapters are those of [lora]; set lora.rank"),
    "lora_r": JOINT,
    "lora_alpha": JOINT,
    "lora_target_modules": JOINT,
    "lora_dropout": JOINT,
    "lora_*": Lacks("April's adapters have rank, alpha, targets and the embedding alone"),
    "load_in_4bit": Lacks("April does not quantise what it trains"),
    "load_in_8bit": Lacks("April does not quantise what it trains"),
    "tools": Lacks("April's tools are those of environments and agents, docs/environments.md"),
    "environment_factory": Lacks("April's turns are those of environments, docs/environments.md"),
    "rollout_func": Lacks("April generates itself; under TRL's trainer it does by docs/trl.md"),
    "max_tool_calling_iterations": Lacks("April's turns are those of environments, docs/environments.md"),
    "quantization_config": Lacks("April does not quantise what it trains"),
    "disable_dropout": Apart("April trains without dropout"),
    "cast_lm_head_to_fp32": Apart("April's head computes in fp32"),
    "WORLD_SIZE": JOINT,
}  # fmt: skip
TABLE |= dict.fromkeys(
    ("log*", "num_completions_to_print", "trackio_space_id", "project", "hub_*", "push_to_hub"), Apart(LOGS)
)
TABLE |= dict.fromkeys(("save_*", "resume_from_checkpoint", "overwrite_output_dir"), Apart(OWN_FILES))
TABLE |= dict.fromkeys(
    ("bf16", "fp16", "tf32", "dtype", "torch_dtype", "attn_implementation", "use_liger_kernel", "model_init_kwargs"),
    Apart("of its arithmetic; April's is learner.compute"),
)
TABLE |= dict.fromkeys(
    ("ds3_gather_for_generation", "deepspeed", "fsdp*", "ddp_*", "per_device_eval_batch_size", "dataloader_*"),
    Apart(SHARDING),
)
TABLE |= dict.fromkeys(
    ("gradient_checkpointing_kwargs", "torch_empty_cache_steps", "pad_to_multiple_of"), Apart(MEMORY)
)
TABLE |= dict.fromkeys(
    ("use_transformers_*", "transformers_*", "cache_implementation", "token_budget", "request_timeout",
     "queue_maxsize", "heartbeat_stale_after_s", "fork_threshold_tokens"),
    Apart(ENGINE),
)  # fmt: skip
TABLE |= dict.fromkeys(
    ("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming", "remove_unused_columns",
     "args", "processing_class", "trust_remote_code", "callbacks", "model_revision"),
    Apart("of how TRL's script loads model and data"),
)  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "shuffle_dataset": True,
    "seed": 42,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "num_train_epochs": 3,
    "beta": 0.0,
    "epsilon": 0.2,
    "importance_sampling_level": "token",
    "loss_type": "dapo",
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "scale_rewards": "group",
    "entropy_coef": 0.0,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True,
    "save_steps": 500,
    "eval_strategy": "no",
    "eval_steps": 500,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
}
OTHERS: dict[str, dict[str, Any]] = {
    "AsyncGRPOConfig": {"max_completion_length": 2048, "max_staleness": 4, "lr_scheduler_type": "constant"},
    "RLOOConfig": {"num_generations": 2, "beta": 0.05, "loss_type": "grpo"},
}
"""what other configurations take"""


class TRL(Framework):
    source = "huggingface/trl at f2cd57710"
    table, defaults = TABLE, DEFAULTS

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        if path.suffix in (".yaml", ".yml"):
            options = of_file(text, path)
        elif path.suffix == ".py":
            options = of_python(text, path, CONFIGS, TRAINERS)
        else:
            options = of_script(text, environment, r"[\w-]+\.py")
        if "WORLD_SIZE" in environment:
            options.values["WORLD_SIZE"] = int(environment["WORLD_SIZE"])
        return options

    def defaults_of(self, options: Options) -> Mapping[str, Any]:
        return DEFAULTS | OTHERS.get(options.kind, {})

    def joint(self, said: Translation) -> None:
        kind = said.options.kind
        said.say("schedule.kind", "continuous" if kind == "AsyncGRPOConfig" else "sync")
        batch(said)
        data(said)
        loss(said, leave_one_out=kind == "RLOOConfig")
        stale_tokens(said)
        said.say("learner.betas", [said.value("adam_beta1"), said.value("adam_beta2")], "adam_beta1", "adam_beta2")
        if said.value("lr_scheduler_type") not in ("constant", "constant_with_warmup"):
            said.differ("lr_scheduler_type", CONSTANT_LR)
        if said.value("eval_strategy") == "steps":
            said.say("evaluation.every", said.value("eval_steps"), "eval_steps")
        used = bool(said.value("use_peft"))
        adapter(said, "lora_r", "lora_alpha", "lora_target_modules", used)
        if used and said.value("lora_dropout"):
            said.differ("lora_dropout", "April trains without dropout")
        server(said, asynchronous=kind == "AsyncGRPOConfig")


def batch(said: Translation) -> None:
    """TRL counts responses, per device; April groups."""
    world, each, rounds = map(said.number, ("WORLD_SIZE", "per_device_train_batch_size", "gradient_accumulation_steps"))
    n, whole = said.number("num_generations"), said.number("generation_batch_size")
    step = each * world * rounds if None not in (world, each, rounds) else None
    per_generation = said.number("steps_per_generation") or rounds
    if whole is None and None not in (world, each, per_generation):
        whole = each * world * per_generation
    if whole and n:
        names = ("per_device_train_batch_size", "steps_per_generation", "WORLD_SIZE", "num_generations")
        said.say("schedule.rollout_batch_size", whole // n, *names)
        optimizer_steps(said, "steps_per_generation", step, whole // n, n)
    else:
        said.open["schedule.rollout_batch_size"] = (
            "it depends on how many processes the script is launched with; say so with --set WORLD_SIZE=N"
        )
    steps, epochs = said.number("max_steps"), said.number("num_train_epochs")
    counted = bool(steps and steps > 0)
    said.say("schedule.max_steps", steps if counted else EPOCHS_END_IT, "max_steps" if counted else "num_train_epochs")
    if not counted and epochs is not None:
        if epochs == int(epochs):
            said.say("data.epochs", int(epochs), "num_train_epochs")
        else:
            said.differ("num_train_epochs", "April's passes over the prompts are whole ones")
    placed(said, None, None, ("TRL's processes",))


def data(said: Translation) -> None:
    """A script maps its rows by code, which is not run."""
    said.say("data.prompt_key", "prompt")
    said.open["data.path, data.label_key"] = (
        "TRL's rows are what its script makes of a dataset; save them to a file, name it, and the column of its "
        "reference answers"
    )
    if said.value("eval_dataset") is not None or "eval_dataset" in said.options.unread:
        said.open["data.eval_path"] = "the script evaluates on rows that it makes; save them to a file, too"
    functions = said.value("reward_funcs")
    places = functions if isinstance(functions, list) else [functions] if functions else []
    if len(places) == 1 and ":" in str(places[0]):
        said.say("data.reward", f"trl:{places[0]}", "reward_funcs")
    else:
        said.open["data.reward"] = f"TRL adds up reward_funcs = {functions!r}; {OWN_REWARD}"


def loss(said: Translation, leave_one_out: bool) -> None:
    kind, level = said.value("loss_type"), said.value("importance_sampling_level")
    if kind in MEANS:
        said.say("algorithm.normalisation", MEANS[kind], "loss_type")
        said.say(
            "algorithm.constant_tokens", said.value("max_completion_length") if kind == "dr_grpo" else None, "loss_type"
        )
    else:
        said.open["algorithm.loss"] = f"April has no loss_type = {kind!r}; choose one"
    if kind == "vespo":
        said.say("algorithm.loss", "cispo", "loss_type")
        if several_steps(said):
            said.differ("loss_type", "with several steps a batch April's vespo stays that of the batch's start")
    elif kind == "cispo":
        said.say("algorithm.loss", "cispo", "loss_type")
        said.say("algorithm.clip_low", 1.0, "loss_type")
        bound = said.number("epsilon_high") or said.number("epsilon")
        if bound and bound > 1:
            said.say("algorithm.clip_high", bound - 1, "epsilon_high")
        else:
            said.differ("epsilon_high", "TRL's cispo bounds the ratio by it, April's by 1 + clip_high")
    else:
        said.say("algorithm.loss", LEVELS.get(level), "importance_sampling_level")
        low, high = said.value("epsilon"), said.value("epsilon_high")
        said.say("algorithm.clip_low", low, "epsilon")
        said.say("algorithm.clip_high", low if high is None else high, "epsilon_high")
    scale = str(said.value("scale_rewards")).lower()
    scaled = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}
    advantage = "rloo" if leave_one_out else scaled.get(scale)
    said.say("algorithm.advantage", advantage, "scale_rewards")
    if advantage is None:
        said.open["algorithm.advantage"] = f"April has no scale_rewards = {scale!r}; choose one"
    said.say("algorithm.kl_coef", said.value("beta"), "beta")
    said.say("algorithm.kl_estimator", "k3")


def stale_tokens(said: Translation) -> None:
    said.say("algorithm.proximal", "recomputed")
    said.say("algorithm.behaviour_coef", 0.0)
    name, mode = "vllm_importance_sampling_mode", said.value("vllm_importance_sampling_mode")
    if not (said.value("use_vllm") and said.value("vllm_importance_sampling_correction")):
        said.say("algorithm.corrections", [], "vllm_importance_sampling_correction")
    elif said.value("loss_type") == "vespo":
        said.say("algorithm.corrections", ["vespo"], "loss_type")
        for option, key in VESPO.items():
            said.say(f"algorithm.{key}", said.value(option), option)
        for bound in ("clip_min", "clip_max"):
            if said.value(f"vllm_importance_sampling_{bound}") is not None:
                said.differ(f"vllm_importance_sampling_{bound}", "April's vespo takes each token's ratio as it is")
    elif mode in CORRECTIONS:
        correction, bound = CORRECTIONS[mode]
        said.say("algorithm.corrections", [correction], name)
        said.say(
            f"algorithm.{bound}", said.value("vllm_importance_sampling_clip_max"), "vllm_importance_sampling_clip_max"
        )
        low = said.value("vllm_importance_sampling_clip_min") or 0.0
        if correction == "icepop":
            said.say("algorithm.icepop_low", low, "vllm_importance_sampling_clip_min")
        elif low:
            said.differ("vllm_importance_sampling_clip_min", "April's truncation has no lower bound")
    else:
        said.say("algorithm.corrections", [], name)
        said.differ(
            name, "April truncates a response's weight (`truncated_sequence`), and does not mask it; choose one"
        )


def server(said: Translation, asynchronous: bool) -> None:
    if asynchronous or said.value("use_vllm"):
        said.say("worker.engine", "vllm", "use_vllm")
        for option in ("tensor_parallel_size", "gpu_memory_utilization"):
            said.say(f"engine.server.{option}", said.value(f"vllm_{option}"), f"vllm_{option}")
    else:
        said.say("worker.engine", "torch", "use_vllm")

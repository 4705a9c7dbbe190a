"""Settings of published scripts, restated: what a script of other frameworks says, and what April says for it.

APRIL   RLsys-Foundation/APRIL at a72b5853d, scripts/partial_rollout (slime's): 2 models x 3 datasets x 3 algorithms,
        each with and without partial rollouts
TRL     huggingface/trl at f2cd57710, examples/scripts
VERL    verl-project/verl at 1dda039b9, examples
ORLHF   OpenRLHF/OpenRLHF at 3c3be6234, examples/scripts
"""

from itertools import product
from typing import Any

# --- slime --------------------------------------------------------------------------------------------------------

MODELS = {"deepseek": "DeepSeek-R1-Distill-Qwen-1.5B", "qwen": "Qwen3-4B"}
DATASETS = {
    "dapo": "dapo-math-17k/dapo-math-17k.jsonl",
    "deepscaler": "DeepScaleR/deepscaler.jsonl",
    "deepmath": "DeepMath-103K/deepmath-103k.jsonl",
}
APRIL = list(product(MODELS, ("grpo", "dapo", "gspo"), DATASETS, (False, True)))
MISSPELT = ("deepseek", "gspo", "dapo", True)
"""the script whose array of the algorithm has another name than the one that it gives to the program"""
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def april_arrays(model: str, algorithm: str, dataset: str, partial: bool) -> dict[str, dict[str, Any]]:
    """Flags by the array that holds them. None: a flag alone."""
    rollout = {
        "prompt-data": f"${{DATA_DIR}}/{DATASETS[dataset]}", "input-key": "prompt", "label-key": "label",
        "apply-chat-template": None, "rollout-shuffle": None, "rm-type": "deepscaler", "num-epoch": 1,
        "rollout-batch-size": 32, "n-samples-per-prompt": 8, "rollout-max-response-len": 16384,
        "rollout-temperature": 0.8, "global-batch-size": 256, "balance-data": None,
    }  # fmt: skip
    if partial:
        rollout |= {"partial-rollout": None, "over-sampling-batch-size": 64}
    if algorithm == "dapo":
        rollout |= {"dynamic-sampling-filter-path": FILTER}
    name, kind = MODELS[model], "-partial" if partial else ""
    misspelt = (model, algorithm, dataset, partial) == MISSPELT
    return {
        "CKPT_ARGS": {
            "hf-checkpoint": f"${{MODEL_DIR}}/{name}", "ref-load": f"${{MODEL_DIR}}/{name}_torch",
            "load": f"${{MODEL_DIR}}/{name}_slime/", "save": f"${{MODEL_DIR}}/{name}_slime/", "save-interval": 20000,
        },
        "ROLLOUT_ARGS": rollout,
        "EVAL_ARGS": {
            "eval-interval": 10, "eval-prompt-data": "aime ${DATA_DIR}/aime-2024/aime-2024.jsonl",
            "n-samples-per-eval-prompt": 16, "eval-max-response-len": 16384, "eval-top-p": 0.7,
        },
        "PERF_ARGS": {
            "tensor-model-parallel-size": 2, "sequence-parallel": None, "pipeline-model-parallel-size": 1,
            "context-parallel-size": 1, "expert-model-parallel-size": 1, "expert-tensor-parallel-size": 1,
            "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1,
            "use-dynamic-batch-size": None, "max-tokens-per-gpu": 9216,
        },
        "GEPO_ARGS" if misspelt else "GRPO_ARGS": {
            "advantage-estimator": "gspo" if algorithm == "gspo" else "grpo", "use-kl-loss": None,
            "kl-loss-coef": "0.00", "kl-loss-type": "low_var_kl", "entropy-coef": "0.00", "eps-clip": 0.2,
            "eps-clip-high": 0.28,
        },
        "OPTIMIZER_ARGS": {
            "optimizer": "adam", "lr": "1e-6", "lr-decay-style": "constant", "weight-decay": 0.1, "adam-beta1": 0.9,
            "adam-beta2": 0.98,
        },
        "WANDB_ARGS": {
            "use-wandb": None, "wandb-project": "APRIL", "wandb-group": f"{dataset}-{model}-{algorithm}{kind}",
            "wandb-key": "${WANDB_API_KEY}",
        },
        "SGLANG_ARGS": {"rollout-num-gpus-per-engine": 2, "sglang-mem-fraction-static": 0.6},
        "MISC_ARGS": {
            "attention-dropout": 0.0, "hidden-dropout": 0.0, "accumulate-allreduce-grads-in-fp32": None,
            "attention-softmax-in-fp32": None, "attention-backend": "flash", "no-gradient-accumulation-fusion": None,
        },
    }  # fmt: skip


def april_says(model: str, algorithm: str, dataset: str, partial: bool) -> dict[str, Any]:
    """Keys of April's for it."""
    gspo = algorithm == "gspo" and (model, algorithm, dataset, partial) != MISSPELT
    return {
        "model.path": f"/root/{MODELS[model]}", "data.path": f"/root/{DATASETS[dataset]}", "data.prompt_key": "prompt",
        "data.label_key": "label", "data.reward": "deepscaler", "data.prompt_as": "chat", "data.shuffle": True,
        "data.epochs": 1, "data.eval_path": "/root/aime-2024/aime-2024.jsonl",
        "schedule.kind": "april" if partial else "sync", "schedule.rollout_batch_size": 32,
        "schedule.over_sampling_batch_size": 64 if partial else None, "schedule.n_samples_per_prompt": 8,
        "schedule.partial_rollout": True, "schedule.dynamic_sampling": algorithm == "dapo",
        "sampling.max_response_tokens": 16384, "sampling.temperature": 0.8,
        "evaluation.every": 10, "evaluation.samples": 16, "evaluation.temperature": 0.8, "evaluation.top_p": 0.7,
        "worker.engine": "sglang", "engine.server": {"mem_fraction_static": 0.6, "tp_size": 2},
        "algorithm.advantage": "grpo", "algorithm.loss": "gspo" if gspo else "ppo", "algorithm.kl_coef": 0.0,
        "algorithm.clip_low": 0.2, "algorithm.normalisation": "sequence_mean", "algorithm.corrections": (),
        "algorithm.behaviour_coef": 0.0, "algorithm.entropy_coef": 0.0,
        "learner.lr": 1e-6, "learner.betas": (0.9, 0.98), "learner.weight_decay": 0.1, "learner.grad_clip": 1.0,
        "learner.microbatch_tokens": 9216, "learner.activation_checkpointing": True,
        "learner.checkpoint_every": 20000, "operations.sinks": ["wandb"],
    }  # fmt: skip


# --- TRL ----------------------------------------------------------------------------------------------------------

TRL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "async_grpo": (
        "AsyncGRPO",
        {
            "model": "Qwen/Qwen3-0.6B", "reward_funcs": "accuracy_reward", "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 2, "max_completion_length": 1024, "max_steps": 200, "learning_rate": 1e-5,
            "chat_template_kwargs": {"enable_thinking": False}, "report_to": "trackio", "save_strategy": "no",
        },
        {
            "schedule.kind": "continuous", "schedule.rollout_batch_size": 16, "schedule.max_staleness": 4,
            "schedule.max_steps": 200, "data.epochs": None, "data.template_options": {"enable_thinking": False},
            "worker.engine": "vllm", "sampling.max_response_tokens": 1024, "learner.lr": 1e-5,
            "data.reward": "trl:trl.rewards:accuracy_reward", "operations.sinks": ["trackio"],
        },
    ),
    "rloo": (
        "RLOO",
        {
            "model": "Qwen/Qwen3-0.6B", "reward_funcs": ["think_format_reward", "accuracy_reward"],
            "learning_rate": 1e-5, "max_completion_length": 1024, "gradient_accumulation_steps": 2,
            "steps_per_generation": 8, "use_vllm": True, "vllm_gpu_memory_utilization": 0.5, "vllm_mode": "colocate",
            "run_name": "Qwen3-0.6B-RLOO-NuminaMath-TIR",
        },
        {
            "schedule.kind": "sync", "schedule.rollout_batch_size": 128, "schedule.n_samples_per_prompt": 2,
            "algorithm.advantage": "rloo", "algorithm.kl_coef": 0.05, "worker.engine": "vllm",
            "run.name": "Qwen3-0.6B-RLOO-NuminaMath-TIR", "data.reward": None, "data.epochs": 3,
        },
    ),
    "grpo_2048": (
        "GRPO",
        {
            "model": "Qwen/Qwen3-4B", "reward_funcs": "reward_score", "max_completion_length": 2048,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 1,
        },
        {
            "schedule.rollout_batch_size": 4, "schedule.n_samples_per_prompt": 8, "data.epochs": 3,
            "algorithm.normalisation": "token_mean", "algorithm.clip_high": 0.2, "worker.engine": "torch",
            "learner.lr": 1e-6, "learner.betas": (0.9, 0.999), "learner.weight_decay": 0.0,
            "data.reward": "trl:mine:reward_score",
        },
    ),
    "openenv/multi_env": (
        "GRPO",
        {
            "model": "Qwen/Qwen3-1.7B", "reward_funcs": ["wordle_reward", "catch_reward"], "report_to": "wandb",
            "logging_steps": 1, "chat_template_kwargs": {"enable_thinking": False}, "max_completion_length": 1024,
        },
        {"schedule.rollout_batch_size": 4, "operations.sinks": ["wandb"], "sampling.max_response_tokens": 1024},
    ),
}  # fmt: skip
"""trainer, keywords of its configuration and itself, and keys with four processes"""
TRL_GSPO = {
    "model_name_or_path": "Qwen/Qwen3-0.6B", "output_dir": "gspo-Qwen3-0.6B", "learning_rate": "1e-5",
    "dtype": "bfloat16", "max_completion_length": 1024, "use_peft": None, "lora_target_modules": '"q_proj" "v_proj"',
    "log_completions": None, "per_device_train_batch_size": 8, "num_generations": 8,
    "importance_sampling_level": "sequence", "epsilon": "3e-4", "epsilon_high": "4e-4", "beta": "0.0",
    "loss_type": "grpo", "gradient_accumulation_steps": 2, "steps_per_generation": 8,
}  # fmt: skip
"""the command line of gspo.py"""
TRL_GSPO_SAYS = {
    "schedule.rollout_batch_size": 32, "algorithm.loss": "gspo", "algorithm.normalisation": "sequence_mean",
    "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4, "algorithm.kl_coef": 0.0, "learner.lr": 1e-5,
    "lora.rank": 16, "lora.alpha": 32.0, "lora.targets": ["q_proj", "v_proj"],
}  # fmt: skip

# --- verl ---------------------------------------------------------------------------------------------------------

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
GSM8K = {
    "data.train_files": "$HOME/data/gsm8k/train.parquet", "data.val_files": "$HOME/data/gsm8k/test.parquet",
    "data.filter_overlong_prompts": True, "data.truncation": "'error'", f"{ROLLOUT}name": "vllm",
    f"{ROLLOUT}gpu_memory_utilization": 0.6, f"{ROLLOUT}tensor_model_parallel_size": 2, f"{ACTOR}optim.lr": "1e-6",
    f"{ACTOR}entropy_coeff": 0, "trainer.logger": """'["console","wandb"]'""", "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1, "trainer.save_freq": 20, "trainer.test_freq": 5, "trainer.total_epochs": 15,
    "trainer.critic_warmup": 0, "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False, f"{ROLLOUT}n": 5,
}  # fmt: skip
KL = {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": 0.001, f"{ACTOR}kl_loss_type": "low_var_kl"}
TWO_FILES = {"data.train_files": "\"['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']\""}
QWEN_8B = {"actor_rollout_ref.model.path": "Qwen/Qwen3-8B", "trainer.experiment_name": "qwen3_8b_vllm_fsdp"}
LONG = {f"{ACTOR}ppo_max_token_len_per_gpu": 24576, f"{ACTOR}ppo_mini_batch_size": 256, "data.train_batch_size": 1024}
LENGTHS = {"data.max_prompt_length": 1024, "data.max_response_length": 2048}

VERL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cispo_trainer/run_qwen3_8b_fsdp": (
        GSM8K | TWO_FILES | QWEN_8B | LONG | LENGTHS | KL
        | {f"{ACTOR}policy_loss.loss_mode": "cispo", f"{ACTOR}clip_ratio_low": 10, f"{ACTOR}clip_ratio_high": 0.2},
        {
            "algorithm.loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": 0.2,
            "algorithm.kl_coef": 0.001, "algorithm.kl_estimator": "k3", "schedule.rollout_batch_size": 1024,
            "schedule.n_samples_per_prompt": 5,
            "evaluation.temperature": 0.0, "learner.microbatch_tokens": 24576, "algorithm.dual_clip": None,
        },
    ),
    "gspo_trainer/run_qwen3_8b_fsdp": (
        GSM8K | TWO_FILES | QWEN_8B
        | {
            f"{ACTOR}policy_loss.loss_mode": "gspo", f"{ACTOR}loss_agg_mode": "seq-mean-token-mean",
            f"{ACTOR}clip_ratio_low": "3e-4", f"{ACTOR}clip_ratio_high": "4e-4", f"{ACTOR}clip_ratio_c": 10.0,
            f"{ACTOR}ppo_mini_batch_size": 128, f"{ACTOR}ppo_max_token_len_per_gpu": 20480, f"{ROLLOUT}n": 16,
            f"{ACTOR}use_kl_loss": False, "data.train_batch_size": 512, "data.max_prompt_length": 2048,
            "data.max_response_length": 8192, "trainer.total_epochs": 10, "trainer.test_freq": 10,
        },
        {
            "algorithm.loss": "gspo", "algorithm.normalisation": "sequence_mean", "algorithm.clip_low": 3e-4,
            "algorithm.clip_high": 4e-4, "algorithm.dual_clip": None, "algorithm.kl_coef": 0.0,
            "schedule.rollout_batch_size": 512, "schedule.n_samples_per_prompt": 16, "data.max_prompt_tokens": 2048,
            "sampling.max_response_tokens": 8192, "data.epochs": 10, "evaluation.every": 10,
        },
    ),
    "dppo_trainer/run_qwen3_30b_a3b_megatron": (
        GSM8K | QWEN_8B | LONG
        | {
            "algorithm.norm_adv_by_std_in_grpo": False, f"{ACTOR}policy_loss.loss_mode": "dppo_tv",
            f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}clip_ratio_low": 0.15,
            f"{ACTOR}clip_ratio_high": 0.15, f"{ACTOR}clip_ratio_c": 10000.0, f"{ACTOR}ppo_mini_batch_size": 32,
            f"{ACTOR}use_kl_loss": False, f"{ROLLOUT}n": 16, "data.train_batch_size": 256,
            "data.max_response_length": 8192, "model_engine": "megatron",
        },
        {
            "algorithm.loss": "cispo", "algorithm.corrections": ("truncated", "dppo_tv"), "algorithm.truncation": 1e4,
            "algorithm.dppo_fall": 0.15, "algorithm.dppo_rise": 0.15, "algorithm.normalisation": "constant",
            "algorithm.advantage": "dr_grpo", "algorithm.proximal": "recomputed", "algorithm.dual_clip": None,
        },
    ),
    "rloo_trainer/run_qwen3_8b_fsdp": (
        GSM8K | TWO_FILES | QWEN_8B | LONG | LENGTHS
        | {
            "algorithm.adv_estimator": "rloo", "algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "kl",
            "algorithm.kl_ctrl.kl_coef": 0.001, f"{ACTOR}use_kl_loss": False,
        },
        {"algorithm.advantage": "rloo", "algorithm.loss": "ppo", "algorithm.dual_clip": 3.0, "algorithm.kl_coef": 0.0},
    ),
    "grpo_trainer/run_qwen3_4b_fsdp": (
        GSM8K | KL
        | {
            "actor_rollout_ref.model.path": "Qwen/Qwen3-4B", "data.train_batch_size": 512,
            "data.max_prompt_length": 1024, "data.max_response_length": 1024,
            f"{ACTOR}ppo_mini_batch_size": 256, f"{ROLLOUT}enforce_eager": False,
            f"{ACTOR}ppo_max_token_len_per_gpu": 3000, "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        },
        {
            "data.path": "/root/data/gsm8k/train.parquet", "data.label_key": "reward_model.ground_truth",
            "data.eval_path": "/root/data/gsm8k/test.parquet", "data.bad_rows": "skip", "data.epochs": 15,
            "engine.server": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.6}, "worker.engine": "vllm",
            "learner.weight_decay": 0.01, "learner.betas": (0.9, 0.999), "operations.sinks": ["wandb"],
        },
    ),
    "grpo_trainer/run_moonlight_16b_a3b_megatron": (
        GSM8K | KL | LENGTHS
        | {
            "actor_rollout_ref.model.path": "moonshotai/Moonlight-16B-A3B", "data.train_batch_size": 192,
            f"{ACTOR}ppo_mini_batch_size": 64, f"{ACTOR}megatron.pipeline_model_parallel_size": 3,
            f"{ACTOR}megatron.dist_checkpointing_path": "${DIST_CKPT_PATH}", f"{ROLLOUT}tensor_model_parallel_size": 4,
            "trainer.nnodes": 3, "model_engine": "megatron", "trainer.experiment_name": "moonlight_megatron_ep",
        },
        {
            "schedule.rollout_batch_size": 192, "run.name": "moonlight_megatron_ep", "algorithm.advantage": "grpo",
            "engine.server": {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.6},
        },
    ),
}  # fmt: skip

# --- OpenRLHF -----------------------------------------------------------------------------------------------------

ORLHF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "train_reinforce_baseline_ray_agent_async": (
        {
            "actor.model_name_or_path": "${MODEL_PATH}", "ckpt.max_num": 3, "ckpt.save_steps": 10, "ckpt.save_hf": None,
            "train.agent_func_path": "agent_func.py", "data.prompt_dataset": "zhuzilin/dapo-math-17k",
            "data.input_key": "prompt", "data.label_key": "label", "data.max_len": 74240,
            "rollout.max_new_tokens": 64000, "data.apply_chat_template": None, "rollout.batch_size": 128,
            "rollout.n_samples_per_prompt": 8, "train.batch_size": 1024, "algo.dynamic_filtering_enable": None,
            "algo.dynamic_filtering_range": "0.0 1.0", "train.max_tokens_per_gpu": 16192, "data.max_samples": 128000,
            "train.num_episodes": 1, "train.async_enable": None, "train.partial_rollout_enable": None,
            "vllm.num_engines": 2, "vllm.tensor_parallel_size": 2, "train.colocate_all": None,
            "algo.advantage.estimator": "reinforce_baseline", "actor.adam.lr": "5e-7", "actor.entropy_coef": 0.0,
            "algo.kl.init_coef": "1e-5", "algo.kl.use_loss": None, "algo.kl.estimator": "k2",
            "algo.advantage.is_correction_enable": None, "algo.advantage.is_correction_type": "icepop",
            "logger.tensorboard_dir": "${SAVE_PATH}/runs", "eval.steps": -1,
        },
        {
            "schedule.kind": "continuous", "schedule.rollout_batch_size": 128, "schedule.dynamic_sampling": True,
            "schedule.max_staleness": 2, "data.max_prompt_tokens": 10240, "sampling.max_response_tokens": 64000,
            "algorithm.advantage": "reinforce_pp_baseline", "algorithm.kl_coef": 1e-5, "algorithm.kl_estimator": "k2",
            "algorithm.corrections": ("icepop",), "algorithm.icepop_low": 0.5, "algorithm.icepop_high": 5.0,
            "learner.lr": 5e-7, "learner.checkpoint_every": 10, "operations.sinks": ["tensorboard"],
        },
    ),
    "train_dapo_ray_hybrid_engine": (
        {
            "actor.model_name_or_path": "OpenRLHF/Llama-3-8b-sft-mixture", "algo.advantage.estimator": "group_norm",
            "algo.kl.init_coef": "1e-3", "algo.kl.use_loss": None, "algo.kl.estimator": "k3",
            "actor.eps_clip_low_high": "0.2 0.27", "reward.remote_url": "/openrlhf/reward_func.py",
            "train.batch_size": 128, "rollout.batch_size": 128, "rollout.n_samples_per_prompt": 8, "data.max_len": 2048,
            "data.prompt_dataset": "OpenRLHF/prompt-collection-v0.1", "data.input_key": "context_messages",
            "algo.advantage.is_correction_enable": None, "actor.gradient_checkpointing_enable": None,
        },
        {
            "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.27, "algorithm.corrections": ("truncated",),
            "algorithm.truncation": 5.0, "algorithm.normalisation": "token_mean", "schedule.kind": "sync",
            "data.prompt_key": "context_messages", "data.prompt_as": "text", "worker.engine": "vllm",
            "model.path": "OpenRLHF/Llama-3-8b-sft-mixture", "data.path": "OpenRLHF/prompt-collection-v0.1",
            "data.split": "train",
        },
    ),
}  # fmt: skip

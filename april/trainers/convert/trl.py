"""TRL's scripts: Python with a GRPOConfig, AsyncGRPOConfig or RLOOConfig (read as a syntax tree, never run), YAML of
its command line, and shell scripts with `--name value`.

Options and defaults as in huggingface/trl at f2cd57710, trl/trainer/grpo_config.py, and transformers' own.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from april.config.hub import is_hub_name
from april.trainers.convert.framework import (
    ADAM,
    DROPOUT,
    LOGS,
    LR_SCHEDULES,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    SINKS,
    WARMUP,
    Framework,
)
from april.trainers.convert.translation import (
    MAX_VALUES,
    Ignored,
    Joint,
    MapTo,
    Options,
    Rule,
    Translation,
    Unsupported,
    each,
    file_options,
    if_positive,
    known_names,
    not_negative,
    only,
    script_options,
)
from april.util.errors import ConfigError

# --- Python scripts ---------------------------------------------------------------------------------------------------


def python_options(text: str, path: Path, configs: Collection[str], trainers: Collection[str]) -> Options:
    """The keyword arguments in a Python script of its only call of a class in `configs`, and of its calls of classes in
    `trainers`. `kind` of the result is the name of the class in `configs`. Raises ConfigError."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"argument 'SCRIPT' = {str(path)!r} is not Python ({error}); give a whole script") from None
    script = ScriptReader(tree, path)
    calls = script.calls(configs)
    if len(calls) != 1:
        lines = " and ".join(str(call.lineno) for call in calls)
        raise ConfigError(
            f"lines {lines} of the script make a configuration each; leave one"
            if calls
            else f"the script calls none of {', '.join(configs)}: it takes its options from the command line; give the "
            "YAML file, or the shell script that calls it"
        )
    options = Options(kind=called_name(calls[0]))
    for call in [*script.calls(trainers), *calls]:
        for keyword in call.keywords:
            script.read_option(options, keyword.arg or "**", keyword.value)
    return options


class ScriptReader:
    """Evaluates constant expressions of a Python script without running the script."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.tree, self.path, self.read_nodes = tree, path, 0
        self.imported = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
            for alias in node.names
        }
        self.functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.assigned_values: dict[str, list[ast.expr]] = {}
        for name, value in assignments(tree):
            self.assigned_values.setdefault(name, []).append(value)

    def calls(self, names: Collection[str]) -> list[ast.Call]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and called_name(node) in names]

    def read_option(self, options: Options, name: str, value: ast.expr) -> None:
        try:
            options.values[name] = self.read(value)
        except LookupError as why:
            options.unreadable[name] = str(why)

    def read(self, node: ast.expr) -> Any:
        """The value of an expression. Raises LookupError with the reason if it is not constant."""
        self.read_nodes += 1
        if self.read_nodes > MAX_VALUES:
            raise LookupError(f"line {node.lineno}: the script's lists have more than {MAX_VALUES} values")
        if isinstance(node, ast.List | ast.Tuple):
            return [self.read(element) for element in node.elts]
        if isinstance(node, ast.Name):
            return self.name(node)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise LookupError(f"line {node.lineno}: {ast.unparse(node)} is only known when it is run") from None

    def name(self, node: ast.Name) -> Any:
        """What a name in the script stands for: a function, as MODULE:NAME, or the value of a variable that is assigned
        once. Raises LookupError for any other name."""
        if node.id in self.functions:
            return f"{self.path.stem}:{node.id}"
        if node.id in self.imported:
            return self.imported[node.id]
        values = self.assigned_values.get(node.id, [])
        if len(values) != 1 or isinstance(values[0], ast.Name):
            raise LookupError(f"line {node.lineno}: {node.id} is only known when it is run")
        return self.read(values[0])


def assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, node.value if target is name else ast.Constant(...)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def called_name(node: ast.Call) -> str:
    """The last part of the called function's name."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


# --- TRL's options ----------------------------------------------------------------------------------------------------

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
"""April's `algorithm.normalisation` for each value of TRL's `loss_type`."""
LEVELS = {"token": "ppo", "sequence": "gspo", "sequence_token": "gspo_token"}
"""April's `algorithm.loss` for each value of TRL's `importance_sampling_level`."""
CORRECTIONS = {
    "token_truncate": ("truncated", "truncation"),
    "sequence_truncate": ("truncated_sequence", "sequence_truncation"),
    "token_mask": ("icepop", "icepop_high"),
}
"""April's (correction, key of the correction's bound) for each value of TRL's `vllm_importance_sampling_mode`."""
VESPO = {
    "vespo_k_pos": "vespo_k_positive",
    "vespo_lambda_pos": "vespo_lambda_positive",
    "vespo_k_neg": "vespo_k_negative",
    "vespo_lambda_neg": "vespo_lambda_negative",
}
"""April's key in [algorithm] for each parameter of TRL's `loss_type` = "vespo"."""

TABLE: dict[str, Rule] = {
    **each(MapTo("model.path"), "model model_name_or_path"),
    "model_revision": MapTo("model.revision"),
    "reward_weights": Unsupported("April's reward is one number; add up what you weigh in a verifier of your own"),
    "reward_model_name_or_path": Unsupported(f"a model gives the rewards; {OWN_REWARD}"),
    "multi_objective_aggregation": Ignored("of several rewards"),
    "num_generations": MapTo("schedule.n_samples_per_prompt", default=8),
    "max_completion_length": MapTo("sampling.max_response_tokens", default=512),
    "max_prompt_length": MapTo("data.max_prompt_tokens"),
    "temperature": MapTo("sampling.temperature", default=1.0),
    "top_p": MapTo("sampling.top_p", default=1.0),
    "top_k": MapTo("sampling.top_k", not_negative, default=0),
    "min_p": MapTo("sampling.min_p"),
    "repetition_penalty": Unsupported("April samples without penalties", off=(1, None)),
    "generation_kwargs": Unsupported("April's keys for sampling are those of [sampling]"),
    "chat_template_kwargs": MapTo("data.template_options"),
    "shuffle_dataset": MapTo("data.shuffle", default=True),
    "seed": MapTo("seed", default=42),
    "per_device_train_batch_size": Joint(default=8),
    "gradient_accumulation_steps": Joint(default=1),
    "num_iterations": MapTo("learner.epochs"),
    "max_steps": Joint(default=-1),
    "num_train_epochs": Joint(default=3),
    "max_staleness": MapTo("schedule.max_staleness"),
    "max_inflight_tasks": MapTo("schedule.in_flight", if_positive),
    "weight_sync_steps": Unsupported("April publishes every step", off=(1,)),
    "beta": Joint(default=0.0),
    "epsilon": Joint(default=0.2),
    "delta": MapTo("algorithm.dual_clip"),
    "importance_sampling_level": Joint(default="token"),
    "loss_type": Joint(default="dapo"),
    "vespo_*": Joint(),
    "scale_rewards": Joint(default="group"),
    "normalize_advantages": Unsupported("April whitens with reinforce_pp and reinforce_pp_baseline alone"),
    "reward_clip_range": Unsupported("April takes rewards as they come"),
    "mask_truncated_completions": Unsupported("April trains what was cut; reward.overlong_buffer_tokens makes it cost"),
    "sync_ref_model": Unsupported("the reference in April is the starting policy"),
    "top_entropy_quantile": Unsupported("April trains all tokens", off=(1,)),
    "entropy_coef": MapTo("algorithm.entropy_coef", default=0.0),
    "use_adaptive_entropy": Unsupported("April's entropy bonus is constant"),
    "off_policy_mask_threshold": Unsupported("April's corrections of stale tokens are in docs/algorithms.md"),
    "use_bias_correction_kl": Unsupported("April's estimators are k1, k2 and k3"),
    "vllm_importance_sampling_*": Joint(),
    "learning_rate": MapTo("learner.lr", default=1e-6),
    "lr_scheduler_type": MapTo("learner.lr_schedule", LR_SCHEDULES, default="linear"),
    "warmup_steps": MapTo("learner.warmup_steps"),
    "warmup_ratio": Unsupported(WARMUP),
    "weight_decay": MapTo("learner.weight_decay", default=0.0),
    "adam_beta1": Joint(default=0.9),
    "adam_beta2": Joint(default=0.999),
    "max_grad_norm": MapTo("learner.grad_clip", default=1.0),
    "optim": MapTo("learner.lr", lambda name: None if str(name).startswith("adamw") else only("adamw", ADAM)(name)),
    "gradient_checkpointing": MapTo("learner.activation_checkpointing", default=True),
    "save_steps": MapTo("learner.checkpoint_every", int, default=500),
    "save_total_limit": MapTo("learner.keep_checkpoints"),
    "eval_strategy": Joint(default="no"),
    "eval_steps": Joint(default=500),
    "num_generations_eval": MapTo("evaluation.samples"),
    "vllm_server_base_url": MapTo("engine.url", lambda url: [url]),
    "run_name": MapTo("run.name"),
    "report_to": MapTo("operations.sinks", known_names(SINKS)),
    "lora_r": Joint(default=16),
    "lora_alpha": Joint(default=32),
    "lora_dropout": Joint(default=0.05),
    "lora_*": Unsupported("April's adapters have rank, alpha, targets and the embedding alone"),
    "peft_config": Unsupported("April's adapters are those of [lora]; set lora.rank"),
    "tools": Unsupported("April's tools are those of environments and agents, docs/environments.md"),
    "rollout_func": Unsupported("April generates itself; under TRL's trainer it does by docs/trl.md"),
    "disable_dropout": Ignored(DROPOUT),
    "cast_lm_head_to_fp32": Ignored("April's head computes in fp32"),
    **each(
        Joint(),
        """dataset_name dataset_config dataset_train_split dataset_test_split train_dataset eval_dataset reward_funcs
        steps_per_generation generation_batch_size epsilon_high use_vllm vllm_tensor_parallel_size
        vllm_gpu_memory_utilization use_peft lora_target_modules WORLD_SIZE""",
    ),
    **each(
        Unsupported("April's turns are those of environments, docs/environments.md"),
        "environment_factory max_tool_calling_iterations",
    ),
    **each(Unsupported("April does not quantise what it trains"), "load_in_4bit load_in_8bit quantization_config"),
    **each(Ignored(LOGS), "log* num_completions_to_print trackio_space_id project hub_* push_to_hub"),
    **each(Ignored(OWN_FILES), "output_dir save_* resume_from_checkpoint overwrite_output_dir"),
    **each(
        Ignored("of its arithmetic; April's is learner.compute"),
        "bf16 fp16 tf32 dtype torch_dtype attn_implementation use_liger_kernel model_init_kwargs",
    ),
    **each(
        Ignored(SHARDING),
        "ds3_gather_for_generation deepspeed fsdp* ddp_* per_device_eval_batch_size dataloader_*",
    ),
    **each(Ignored(MEMORY), "gradient_checkpointing_kwargs torch_empty_cache_steps pad_to_multiple_of"),
    **each(
        Ignored("of how TRL runs its engine"),
        """vllm_* use_transformers_* transformers_* cache_implementation token_budget request_timeout queue_maxsize
        heartbeat_stale_after_s fork_threshold_tokens""",
    ),
    **each(
        Ignored("of how TRL's script loads model and data"),
        "dataset_streaming remove_unused_columns args processing_class trust_remote_code callbacks",
    ),
}
OTHERS: dict[str, dict[str, Any]] = {
    "AsyncGRPOConfig": {"max_completion_length": 2048, "max_staleness": 4, "lr_scheduler_type": "constant"},
    "RLOOConfig": {"num_generations": 2, "beta": 0.05, "loss_type": "grpo"},
}
"""For each configuration class other than GRPOConfig: the defaults that differ from GRPOConfig's."""
IS = "vllm_importance_sampling_"


class TRL(Framework):
    source = "huggingface/trl at f2cd57710"
    table = TABLE
    defaults: ClassVar = {
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        f"{IS}correction": True,
        f"{IS}mode": "sequence_mask",
        f"{IS}clip_max": 3.0,
    }

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        if path.suffix in (".yaml", ".yml"):
            options = file_options(text, path)
        elif path.suffix == ".py":
            options = python_options(text, path, CONFIGS, TRAINERS)
        else:
            options = script_options(text, environment, r"[\w-]+\.py")
        if "WORLD_SIZE" in environment:
            options.values["WORLD_SIZE"] = int(environment["WORLD_SIZE"])
        return options

    def defaults_of(self, options: Options) -> Mapping[str, Any]:
        return {**super().defaults_of(options), **OTHERS.get(options.kind, {})}

    def translate_joint(self, translation: Translation) -> None:
        kind = translation.options.kind
        translation.set_key("schedule.kind", "continuous" if kind == "AsyncGRPOConfig" else "sync")
        batch(translation)
        data(translation)
        loss(translation, leave_one_out=kind == "RLOOConfig")
        stale_tokens(translation)
        translation.set_betas("adam_beta1", "adam_beta2")
        if translation.value("eval_strategy") == "steps":
            translation.copy("evaluation.every", "eval_steps")
        used = bool(translation.value("use_peft"))
        translation.set_adapter("lora_r", "lora_alpha", "lora_target_modules", used)
        if used and translation.value("lora_dropout"):
            translation.mark_unsupported("lora_dropout", DROPOUT)
        if kind == "AsyncGRPOConfig" or translation.value("use_vllm"):
            translation.set_key("worker.engine", "vllm", "use_vllm")
            for option in ("tensor_parallel_size", "gpu_memory_utilization"):
                translation.copy(f"engine.server.{option}", f"vllm_{option}")
        else:
            translation.set_key("worker.engine", "torch", "use_vllm")


def batch(translation: Translation) -> None:
    """Translate TRL's batch size. TRL counts responses per device, April counts groups."""
    world, device_batch, rounds = map(
        translation.number, ("WORLD_SIZE", "per_device_train_batch_size", "gradient_accumulation_steps")
    )
    n, whole = translation.number("num_generations"), translation.number("generation_batch_size")
    step = device_batch * world * rounds if None not in (world, device_batch, rounds) else None
    per_generation = translation.number("steps_per_generation") or rounds
    if whole is None and None not in (world, device_batch, per_generation):
        whole = device_batch * world * per_generation
    if whole and n:
        names = ("per_device_train_batch_size", "steps_per_generation", "WORLD_SIZE", "num_generations")
        translation.set_key("schedule.rollout_batch_size", whole // n, *names)
        translation.set_minibatches("steps_per_generation", step, whole // n, n)
    else:
        translation.undecided["schedule.rollout_batch_size"] = (
            "it depends on how many processes the script is launched with; say so with --set WORLD_SIZE=N"
        )
    translation.set_length("max_steps", "num_train_epochs")
    translation.set_devices(None, None, ("TRL's processes",))


def data(translation: Translation) -> None:
    """Translate the options of data and reward; the script's own code that maps dataset rows is not run."""
    translation.set_key("data.prompt_key", "prompt")
    if is_hub_name(str(translation.value("dataset_name"))):
        for key, name in (("path", "name"), ("configuration", "config"), ("split", "train_split")):
            translation.copy(f"data.{key}", f"dataset_{name}")
        translation.undecided["data.label_key"] = "TRL's rewards read any column; name that of the reference answers"
    else:
        translation.undecided["data.path, data.label_key"] = (
            "TRL's rows are what its script makes of a dataset; save them to a file, name it, and the column of its "
            "reference answers"
        )
    if translation.value("eval_dataset") is not None or "eval_dataset" in translation.options.unreadable:
        translation.undecided["data.eval_path"] = "the script evaluates on rows that it makes; save them to a file, too"
    functions = translation.value("reward_funcs")
    places = functions if isinstance(functions, list) else [functions] if functions else []
    if len(places) == 1 and ":" in str(places[0]):
        translation.set_key("data.reward", f"trl:{places[0]}", "reward_funcs")
    else:
        translation.undecided["data.reward"] = f"TRL adds up reward_funcs = {functions!r}; {OWN_REWARD}"


def loss(translation: Translation, leave_one_out: bool) -> None:
    kind = translation.value("loss_type")
    if kind in MEANS:
        translation.set_key("algorithm.normalisation", MEANS[kind], "loss_type")
        tokens = translation.value("max_completion_length") if kind == "dr_grpo" else None
        translation.set_key("algorithm.constant_tokens", tokens, "loss_type")
    else:
        translation.undecided["algorithm.loss"] = f"April has no loss_type = {kind!r}; choose one"
    if kind == "vespo":
        translation.set_key("algorithm.loss", "cispo", "loss_type")
        if translation.has_several_steps():
            translation.mark_unsupported(
                "loss_type", "with several steps a batch April's vespo stays that of the batch's start"
            )
    elif kind == "cispo":
        translation.set_key("algorithm.loss", "cispo", "loss_type")
        translation.set_key("algorithm.clip_low", 1.0, "loss_type")
        bound = translation.number("epsilon_high") or translation.number("epsilon")
        if bound and bound > 1:
            translation.set_key("algorithm.clip_high", bound - 1, "epsilon_high")
        else:
            translation.mark_unsupported("epsilon_high", "TRL's cispo bounds the ratio by it, April's by 1 + clip_high")
    else:
        level = translation.value("importance_sampling_level")
        translation.set_key("algorithm.loss", LEVELS.get(level), "importance_sampling_level")
        translation.set_clip("epsilon", "epsilon_high")
    scale = str(translation.value("scale_rewards")).lower()
    scaled = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}
    advantage = "rloo" if leave_one_out else scaled.get(scale)
    translation.set_key("algorithm.advantage", advantage, "scale_rewards")
    if advantage is None:
        translation.undecided["algorithm.advantage"] = f"April has no scale_rewards = {scale!r}; choose one"
    translation.copy("algorithm.kl_coef", "beta")
    translation.set_key("algorithm.kl_estimator", "k3")


def stale_tokens(translation: Translation) -> None:
    translation.set_key("algorithm.proximal", "recomputed")
    translation.set_key("algorithm.behaviour_coef", 0.0)
    name, lower, upper = f"{IS}mode", f"{IS}clip_min", f"{IS}clip_max"
    mode, low = translation.value(name), translation.value(lower)
    if not (translation.value("use_vllm") and translation.value(f"{IS}correction")):
        translation.set_key("algorithm.corrections", [], f"{IS}correction")
    elif translation.value("loss_type") == "vespo":
        translation.set_key("algorithm.corrections", ["vespo"], "loss_type")
        for option, key in VESPO.items():
            translation.copy(f"algorithm.{key}", option)
        for bound in (lower, upper):
            if translation.value(bound) is not None:
                translation.mark_unsupported(bound, "April's vespo takes each token's ratio as it is")
    elif mode in CORRECTIONS:
        correction, bound = CORRECTIONS[mode]
        translation.set_key("algorithm.corrections", [correction], name)
        translation.copy(f"algorithm.{bound}", upper)
        if correction == "icepop":
            translation.set_key("algorithm.icepop_low", low or 0.0, lower)
        elif low:
            translation.mark_unsupported(lower, "April's truncation has no lower bound")
    else:
        translation.set_key("algorithm.corrections", [], name)
        translation.mark_unsupported(
            name, "April truncates a response's weight (`truncated_sequence`), and does not mask it; choose one"
        )

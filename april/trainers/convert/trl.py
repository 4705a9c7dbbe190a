"""TRL's scripts: Python with a GRPOConfig, AsyncGRPOConfig or RLOOConfig (read as a syntax tree, never run), YAML of
its command line, and shell scripts with `--name value`.

Options and defaults as in huggingface/trl at f2cd57710, trl/trainer/grpo_config.py, and transformers' own.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from april.trainers.convert.framework import (
    ADAM,
    CONSTANT_LR,
    LOGS,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    SINKS,
    UNLIMITED_STEPS,
    Framework,
    has_several_steps,
    set_adapter,
    set_devices,
    set_minibatches,
)
from april.trainers.convert.translation import (
    JOINT,
    Ignored,
    MapTo,
    Options,
    Rule,
    Translation,
    Unsupported,
    file_options,
    known_names,
    only,
    script_options,
)
from april.util.errors import ConfigError

# --- Python scripts ---------------------------------------------------------------------------------------------------


def python_options(text: str, path: Path, configs: Collection[str], trainers: Collection[str]) -> Options:
    """The keyword arguments of the script's one call of a class in `configs`, and of those in `trainers`; the options'
    `kind` is the class. Raises ConfigError."""
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
    """Evaluates expressions of a script as far as they are constant."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.tree, self.path = tree, path
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
        if isinstance(node, ast.List | ast.Tuple):
            return [self.read(element) for element in node.elts]
        if isinstance(node, ast.Name):
            return self.name(node)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise LookupError(f"line {node.lineno}: {ast.unparse(node)} is only known when it is run") from None

    def name(self, node: ast.Name) -> Any:
        """A function as MODULE:NAME, or the value of a variable that is assigned once. Raises LookupError."""
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
ENGINE = "of how TRL runs its engine"

TABLE: dict[str, Rule] = {
    "model": MapTo("model.path"),
    "model_name_or_path": MapTo("model.path"),
    "dataset_name": JOINT,
    "train_dataset": JOINT,
    "eval_dataset": JOINT,
    "reward_funcs": JOINT,
    "reward_weights": Unsupported("April's reward is one number; add up what you weigh in a verifier of your own"),
    "reward_model_name_or_path": Unsupported(f"a model gives the rewards; {OWN_REWARD}"),
    "multi_objective_aggregation": Ignored("of several rewards"),
    "num_generations": MapTo("schedule.n_samples_per_prompt"),
    "max_completion_length": MapTo("sampling.max_response_tokens"),
    "max_prompt_length": MapTo("data.max_prompt_tokens"),
    "temperature": MapTo("sampling.temperature"),
    "top_p": MapTo("sampling.top_p"),
    "top_k": MapTo("sampling.top_k", lambda ids: max(ids, 0)),
    "min_p": MapTo("sampling.min_p"),
    "repetition_penalty": Unsupported("April samples without penalties", off=(1, None)),
    "generation_kwargs": Unsupported("April's keys for sampling are those of [sampling]"),
    "chat_template_kwargs": MapTo("data.template_options"),
    "shuffle_dataset": MapTo("data.shuffle"),
    "seed": MapTo("seed"),
    "per_device_train_batch_size": JOINT,
    "gradient_accumulation_steps": JOINT,
    "steps_per_generation": JOINT,
    "generation_batch_size": JOINT,
    "num_iterations": MapTo("learner.epochs"),
    "max_steps": JOINT,
    "num_train_epochs": JOINT,
    "max_staleness": MapTo("schedule.max_staleness"),
    "max_inflight_tasks": MapTo("schedule.in_flight", lambda tasks: tasks if tasks > 0 else None),
    "weight_sync_steps": Unsupported("April publishes every step", off=(1,)),
    "beta": JOINT,
    "epsilon": JOINT,
    "epsilon_high": JOINT,
    "delta": MapTo("algorithm.dual_clip"),
    "importance_sampling_level": JOINT,
    "loss_type": JOINT,
    "vespo_*": JOINT,
    "scale_rewards": JOINT,
    "normalize_advantages": Unsupported("April whitens with reinforce_pp and reinforce_pp_baseline alone"),
    "reward_clip_range": Unsupported("April takes rewards as they come"),
    "mask_truncated_completions": Unsupported("April trains what was cut; reward.overlong_buffer_tokens makes it cost"),
    "sync_ref_model": Unsupported("the reference in April is the starting policy"),
    "top_entropy_quantile": Unsupported("April trains all tokens", off=(1,)),
    "entropy_coef": MapTo("algorithm.entropy_coef"),
    "use_adaptive_entropy": Unsupported("April's entropy bonus is constant"),
    "off_policy_mask_threshold": Unsupported("April's corrections of stale tokens are in docs/algorithms.md"),
    "use_bias_correction_kl": Unsupported("April's estimators are k1, k2 and k3"),
    "vllm_importance_sampling_*": JOINT,
    "learning_rate": MapTo("learner.lr"),
    "lr_scheduler_type": JOINT,
    "warmup_steps": MapTo("learner.warmup_steps"),
    "warmup_ratio": Unsupported("April's warm-up is a number of steps, learner.warmup_steps"),
    "weight_decay": MapTo("learner.weight_decay"),
    "adam_beta1": JOINT,
    "adam_beta2": JOINT,
    "max_grad_norm": MapTo("learner.grad_clip"),
    "optim": MapTo("learner.lr", lambda name: None if str(name).startswith("adamw") else only("adamw", ADAM)(name)),
    "gradient_checkpointing": MapTo("learner.activation_checkpointing"),
    "save_steps": MapTo("learner.checkpoint_every", int),
    "save_total_limit": MapTo("learner.keep_checkpoints"),
    "eval_strategy": JOINT,
    "eval_steps": JOINT,
    "num_generations_eval": MapTo("evaluation.samples"),
    "use_vllm": JOINT,
    "vllm_server_base_url": MapTo("engine.url", lambda url: [url]),
    "vllm_tensor_parallel_size": JOINT,
    "vllm_gpu_memory_utilization": JOINT,
    "vllm_*": Ignored(ENGINE),
    "run_name": MapTo("run.name"),
    "report_to": MapTo("operations.sinks", known_names(SINKS)),
    "output_dir": Ignored(OWN_FILES),
    "use_peft": JOINT,
    "peft_config": Unsupported("April's adapters are those of [lora]; set lora.rank"),
    "lora_r": JOINT,
    "lora_alpha": JOINT,
    "lora_target_modules": JOINT,
    "lora_dropout": JOINT,
    "lora_*": Unsupported("April's adapters have rank, alpha, targets and the embedding alone"),
    "load_in_4bit": Unsupported("April does not quantise what it trains"),
    "load_in_8bit": Unsupported("April does not quantise what it trains"),
    "tools": Unsupported("April's tools are those of environments and agents, docs/environments.md"),
    "environment_factory": Unsupported("April's turns are those of environments, docs/environments.md"),
    "rollout_func": Unsupported("April generates itself; under TRL's trainer it does by docs/trl.md"),
    "max_tool_calling_iterations": Unsupported("April's turns are those of environments, docs/environments.md"),
    "quantization_config": Unsupported("April does not quantise what it trains"),
    "disable_dropout": Ignored("April trains without dropout"),
    "cast_lm_head_to_fp32": Ignored("April's head computes in fp32"),
    "WORLD_SIZE": JOINT,
}  # fmt: skip
TABLE |= dict.fromkeys(
    ("log*", "num_completions_to_print", "trackio_space_id", "project", "hub_*", "push_to_hub"), Ignored(LOGS)
)
TABLE |= dict.fromkeys(("save_*", "resume_from_checkpoint", "overwrite_output_dir"), Ignored(OWN_FILES))
TABLE |= dict.fromkeys(
    ("bf16", "fp16", "tf32", "dtype", "torch_dtype", "attn_implementation", "use_liger_kernel", "model_init_kwargs"),
    Ignored("of its arithmetic; April's is learner.compute"),
)
TABLE |= dict.fromkeys(
    ("ds3_gather_for_generation", "deepspeed", "fsdp*", "ddp_*", "per_device_eval_batch_size", "dataloader_*"),
    Ignored(SHARDING),
)
TABLE |= dict.fromkeys(
    ("gradient_checkpointing_kwargs", "torch_empty_cache_steps", "pad_to_multiple_of"), Ignored(MEMORY)
)
TABLE |= dict.fromkeys(
    ("use_transformers_*", "transformers_*", "cache_implementation", "token_budget", "request_timeout",
     "queue_maxsize", "heartbeat_stale_after_s", "fork_threshold_tokens"),
    Ignored(ENGINE),
)  # fmt: skip
TABLE |= dict.fromkeys(
    ("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming", "remove_unused_columns",
     "args", "processing_class", "trust_remote_code", "callbacks", "model_revision"),
    Ignored("of how TRL's script loads model and data"),
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
"""For each configuration class other than GRPOConfig: the defaults that differ from GRPOConfig's."""


class TRL(Framework):
    source = "huggingface/trl at f2cd57710"
    table, defaults = TABLE, DEFAULTS

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
        return DEFAULTS | OTHERS.get(options.kind, {})

    def translate_joint(self, translation: Translation) -> None:
        kind = translation.options.kind
        translation.set_key("schedule.kind", "continuous" if kind == "AsyncGRPOConfig" else "sync")
        batch(translation)
        data(translation)
        loss(translation, leave_one_out=kind == "RLOOConfig")
        stale_tokens(translation)
        translation.set_key(
            "learner.betas",
            [translation.value("adam_beta1"), translation.value("adam_beta2")],
            "adam_beta1",
            "adam_beta2",
        )
        if translation.value("lr_scheduler_type") not in ("constant", "constant_with_warmup"):
            translation.mark_unsupported("lr_scheduler_type", CONSTANT_LR)
        if translation.value("eval_strategy") == "steps":
            translation.set_key("evaluation.every", translation.value("eval_steps"), "eval_steps")
        used = bool(translation.value("use_peft"))
        set_adapter(translation, "lora_r", "lora_alpha", "lora_target_modules", used)
        if used and translation.value("lora_dropout"):
            translation.mark_unsupported("lora_dropout", "April trains without dropout")
        server(translation, asynchronous=kind == "AsyncGRPOConfig")


def batch(translation: Translation) -> None:
    """Translate the batch size, which TRL counts in responses per device and April in groups."""
    world, each, rounds = map(
        translation.number, ("WORLD_SIZE", "per_device_train_batch_size", "gradient_accumulation_steps")
    )
    n, whole = translation.number("num_generations"), translation.number("generation_batch_size")
    step = each * world * rounds if None not in (world, each, rounds) else None
    per_generation = translation.number("steps_per_generation") or rounds
    if whole is None and None not in (world, each, per_generation):
        whole = each * world * per_generation
    if whole and n:
        names = ("per_device_train_batch_size", "steps_per_generation", "WORLD_SIZE", "num_generations")
        translation.set_key("schedule.rollout_batch_size", whole // n, *names)
        set_minibatches(translation, "steps_per_generation", step, whole // n, n)
    else:
        translation.undecided["schedule.rollout_batch_size"] = (
            "it depends on how many processes the script is launched with; say so with --set WORLD_SIZE=N"
        )
    steps, epochs = translation.number("max_steps"), translation.number("num_train_epochs")
    counted = bool(steps and steps > 0)
    translation.set_key(
        "schedule.max_steps", steps if counted else UNLIMITED_STEPS, "max_steps" if counted else "num_train_epochs"
    )
    if not counted and epochs is not None:
        if epochs == int(epochs):
            translation.set_key("data.epochs", int(epochs), "num_train_epochs")
        else:
            translation.mark_unsupported("num_train_epochs", "April's passes over the prompts are whole ones")
    set_devices(translation, None, None, ("TRL's processes",))


def data(translation: Translation) -> None:
    """Translate the options of data and reward; the script's own code that maps dataset rows is not run."""
    translation.set_key("data.prompt_key", "prompt")
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
    kind, level = translation.value("loss_type"), translation.value("importance_sampling_level")
    if kind in MEANS:
        translation.set_key("algorithm.normalisation", MEANS[kind], "loss_type")
        translation.set_key(
            "algorithm.constant_tokens",
            translation.value("max_completion_length") if kind == "dr_grpo" else None,
            "loss_type",
        )
    else:
        translation.undecided["algorithm.loss"] = f"April has no loss_type = {kind!r}; choose one"
    if kind == "vespo":
        translation.set_key("algorithm.loss", "cispo", "loss_type")
        if has_several_steps(translation):
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
        translation.set_key("algorithm.loss", LEVELS.get(level), "importance_sampling_level")
        low, high = translation.value("epsilon"), translation.value("epsilon_high")
        translation.set_key("algorithm.clip_low", low, "epsilon")
        translation.set_key("algorithm.clip_high", low if high is None else high, "epsilon_high")
    scale = str(translation.value("scale_rewards")).lower()
    scaled = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}
    advantage = "rloo" if leave_one_out else scaled.get(scale)
    translation.set_key("algorithm.advantage", advantage, "scale_rewards")
    if advantage is None:
        translation.undecided["algorithm.advantage"] = f"April has no scale_rewards = {scale!r}; choose one"
    translation.set_key("algorithm.kl_coef", translation.value("beta"), "beta")
    translation.set_key("algorithm.kl_estimator", "k3")


def stale_tokens(translation: Translation) -> None:
    translation.set_key("algorithm.proximal", "recomputed")
    translation.set_key("algorithm.behaviour_coef", 0.0)
    name, mode = "vllm_importance_sampling_mode", translation.value("vllm_importance_sampling_mode")
    if not (translation.value("use_vllm") and translation.value("vllm_importance_sampling_correction")):
        translation.set_key("algorithm.corrections", [], "vllm_importance_sampling_correction")
    elif translation.value("loss_type") == "vespo":
        translation.set_key("algorithm.corrections", ["vespo"], "loss_type")
        for option, key in VESPO.items():
            translation.set_key(f"algorithm.{key}", translation.value(option), option)
        for bound in ("clip_min", "clip_max"):
            if translation.value(f"vllm_importance_sampling_{bound}") is not None:
                translation.mark_unsupported(
                    f"vllm_importance_sampling_{bound}", "April's vespo takes each token's ratio as it is"
                )
    elif mode in CORRECTIONS:
        correction, bound = CORRECTIONS[mode]
        translation.set_key("algorithm.corrections", [correction], name)
        translation.set_key(
            f"algorithm.{bound}",
            translation.value("vllm_importance_sampling_clip_max"),
            "vllm_importance_sampling_clip_max",
        )
        low = translation.value("vllm_importance_sampling_clip_min") or 0.0
        if correction == "icepop":
            translation.set_key("algorithm.icepop_low", low, "vllm_importance_sampling_clip_min")
        elif low:
            translation.mark_unsupported("vllm_importance_sampling_clip_min", "April's truncation has no lower bound")
    else:
        translation.set_key("algorithm.corrections", [], name)
        translation.mark_unsupported(
            name, "April truncates a response's weight (`truncated_sequence`), and does not mask it; choose one"
        )


def server(translation: Translation, asynchronous: bool) -> None:
    if asynchronous or translation.value("use_vllm"):
        translation.set_key("worker.engine", "vllm", "use_vllm")
        for option in ("tensor_parallel_size", "gpu_memory_utilization"):
            translation.set_key(f"engine.server.{option}", translation.value(f"vllm_{option}"), f"vllm_{option}")
    else:
        translation.set_key("worker.engine", "torch", "use_vllm")

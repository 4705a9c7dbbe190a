"""slime's scripts: bash arrays of `--flag value` for train.py or train_async.py.

Options and defaults as in THUDM/slime at 624b824a8, slime/utils/arguments.py, and Megatron's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.trainers.convert.framework import (
    ADAM,
    ALL_PROMPTS,
    ANY_PROMPT_TOKENS,
    CONSTANT_LR,
    IN_LOSS,
    LOGS,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    UNLIMITED_STEPS,
    Framework,
    set_clip,
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
    only,
    script_options,
)

ESTIMATORS = {
    "grpo": ("grpo", "ppo"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_pp", "ppo"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "ppo"),
}
"""April's (`algorithm.advantage`, `algorithm.loss`) for each value of slime's `--advantage-estimator`."""
OWN_CODE = Unsupported("it names code of slime's interfaces; write it as a part of April's, docs/extending.md")
VERIFIERS = {"deepscaler": "deepscaler", "dapo": "dapo", "math": "math", "f1": "f1", "remote_rm": "remote"}
"""Name of April's verifier for each value of slime's `--rm-type`."""

TABLE: dict[str, Rule] = {
    "${MODEL_ARGS[@]}": Ignored("the architecture, which April reads from the model's folder"),
    "hf-checkpoint": MapTo("model.path"),
    "prompt-data": MapTo("data.path"),
    "input-key": MapTo("data.prompt_key"),
    "label-key": MapTo("data.label_key"),
    "apply-chat-template": MapTo("data.prompt_as", lambda given: "chat" if given else "text"),
    "rollout-shuffle": MapTo("data.shuffle"),
    "rollout-seed": MapTo("seed"),
    "rollout-max-prompt-len": JOINT,
    "num-epoch": JOINT,
    "num-rollout": JOINT,
    "rollout-batch-size": MapTo("schedule.rollout_batch_size"),
    "n-samples-per-prompt": MapTo("schedule.n_samples_per_prompt"),
    "over-sampling-batch-size": JOINT,
    "partial-rollout": JOINT,
    "rollout-function-path": JOINT,
    "dynamic-sampling-filter-path": JOINT,
    "mask-offpolicy-in-partial-rollout": JOINT,
    "global-batch-size": JOINT,
    "num-steps-per-rollout": JOINT,
    "rollout-max-response-len": MapTo("sampling.max_response_tokens"),
    "rollout-max-context-len": Unsupported("April bounds prompts and responses each by themselves"),
    "rollout-temperature": MapTo("sampling.temperature"),
    "rollout-top-p": MapTo("sampling.top_p"),
    "rollout-top-k": MapTo("sampling.top_k", lambda value: max(value, 0)),
    "rollout-stop": Unsupported("April ends a response at token ids, sampling.stop_token_ids"),
    "rollout-stop-token-ids": MapTo("sampling.stop_token_ids", lambda ids: ids if isinstance(ids, list) else [ids]),
    "rm-type": JOINT,
    "rm-url": MapTo("reward.url"),
    "custom-rm-path": OWN_CODE,
    "group-rm": Unsupported("a reward of a group is named as group:module:function in April, docs/rewards.md"),
    "reward-key": Ignored("details of a reward are logged in April, and its number is what counts"),
    "eval-reward-key": Ignored("details of a reward are logged in April, and its number is what counts"),
    "eval-interval": MapTo("evaluation.every"),
    "eval-prompt-data": JOINT,
    "n-samples-per-eval-prompt": MapTo("evaluation.samples"),
    "eval-temperature": JOINT,
    "eval-top-p": JOINT,
    "eval-top-k": MapTo("evaluation.top_k", lambda value: max(value, 0)),
    "eval-max-response-len": JOINT,
    "eval-config": Unsupported("April reads no such file; its held-out prompts are data.eval_path"),
    "advantage-estimator": JOINT,
    "disable-grpo-std-normalization": JOINT,
    "disable-rewards-normalization": Unsupported("April's advantages are relative to a group or a batch"),
    "normalize-advantages": JOINT,
    "use-kl-loss": JOINT,
    "kl-loss-coef": JOINT,
    "kl-loss-type": JOINT,
    "kl-coef": Unsupported(IN_LOSS),
    "entropy-coef": MapTo("algorithm.entropy_coef"),
    "eps-clip": JOINT,
    "eps-clip-high": JOINT,
    "eps-clip-c": MapTo("algorithm.dual_clip"),
    "calculate-per-token-loss": JOINT,
    "use-tis": JOINT,
    "tis-clip": JOINT,
    "tis-clip-low": JOINT,
    "custom-tis-function-path": OWN_CODE,
    "use-rollout-logprobs": JOINT,
    "loss-type": MapTo("algorithm.loss", only("policy_loss", "April trains policies")),
    "gamma": Unsupported("it is of a critic, critic.gamma with algorithm.advantage = 'gae'", off=(1, None)),
    "lambd": Unsupported("it is of a critic, critic.lam with algorithm.advantage = 'gae'", off=(1, None)),
    "use-opd": Unsupported("April does not distil"),
    "use-opsm": Unsupported("April masks sequences by algorithm.corrections = ['geometric'], another rule"),
    "use-unbiased-kl": Unsupported("April's estimators are k1, k2 and k3"),
    "optimizer": MapTo("learner.lr", only("adam", ADAM)),
    "lr": MapTo("learner.lr"),
    "lr-decay-style": MapTo("learner.lr", only("constant", CONSTANT_LR)),
    "lr-warmup-iters": MapTo("learner.warmup_steps"),
    "lr-warmup-fraction": Unsupported("April's warm-up is a number of steps, learner.warmup_steps"),
    "weight-decay": MapTo("learner.weight_decay"),
    "adam-beta1": JOINT,
    "adam-beta2": JOINT,
    "clip-grad": MapTo("learner.grad_clip"),
    "max-tokens-per-gpu": MapTo("learner.microbatch_tokens"),
    "recompute-granularity": MapTo("learner.activation_checkpointing", lambda how: how is not None),
    "save-interval": MapTo("learner.checkpoint_every"),
    "actor-num-nodes": JOINT,
    "actor-num-gpus-per-node": JOINT,
    "colocate": JOINT,
    "rollout-num-gpus": JOINT,
    "rollout-num-gpus-per-engine": JOINT,
    "use-wandb": JOINT,
    "use-tensorboard": JOINT,
    "wandb-group": MapTo("run.name"),
    "sglang-*": MapTo("engine.server.*"),
    "sglang-server-concurrency": MapTo("worker.slots"),
    "sglang-router-*": Ignored("April has no router: workers take what they have slots for"),
    "sglang-config": Unsupported("April starts the same servers behind each worker"),
    "attention-dropout": Unsupported("April trains without dropout", off=(0,)),
    "hidden-dropout": Unsupported("April trains without dropout", off=(0,)),
    "enable-mtp-training": Unsupported("April trains the policy's own layers alone"),
    "custom-*": OWN_CODE,
    "rollout-sample-filter-path": OWN_CODE,
    "buffer-filter-path": OWN_CODE,
    "data-source-path": OWN_CODE,
    "disable-compute-advantages-and-returns": Unsupported("April trains by advantages"),
    "loss-mask-type": Ignored("of fine-tuning on given answers"),
    "mtp-*": Ignored("of layers that enable-mtp-training switches on"),
    "model-name": Ignored("the architecture, which April reads from the model's folder"),
    "prefill-num-servers": Ignored(SHARDING),
    "multimodal-keys": Unsupported("April takes text alone"),
    "debug-train-only": Unsupported("April has no training without generation"),
    "reset-optimizer-states": Unsupported("April keeps the optimizer's state"),
    "ref-load": Ignored("the reference in April is the starting policy"),
    "load": Ignored("April goes on with --resume"),
    "save*": Ignored(OWN_FILES),
    "async-save": Ignored(OWN_FILES),
    "wandb-*": Ignored(LOGS),
    "tb-*": Ignored(LOGS),
    "log-passrate": Ignored("April always has pass@k"),
    "log-*": Ignored(LOGS),
    "metadata-key": Ignored("April reads the label and what its verifier is called"),
    "disable-wandb-random-suffix": Ignored(LOGS),
    "micro-batch-size": Ignored(MEMORY),
    "ref-micro-batch-size": Ignored(MEMORY),
    "use-dynamic-batch-size": Ignored("April always packs, up to learner.microbatch_tokens"),
    "balance-*": Ignored("April always balances"),
    "recompute-*": Ignored(MEMORY),
    "data-pad-size-multiplier": Ignored(MEMORY),
    "optimizer-cpu-offload": Ignored(MEMORY),
    "overlap-*": Ignored(SHARDING),
    "use-precision-aware-optimizer": Ignored(MEMORY),
    "use-distributed-optimizer": Ignored(SHARDING),
}
MEGATRON = (
    "tensor-model-parallel-size", "sequence-parallel", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers", "num-gpus-per-node", "offload*", "no-offload*", "train-backend",
    "update-weight*", "release-train", "distributed-*", "use-fault-tolerance", "rollout-health-check-*",
    "rollout-data-transport", "keep-old-actor", "megatron-*", "qwen-gdn-backend", "train-env-vars",
)  # fmt: skip
"""Options that only affect how slime is distributed over devices, and are ignored."""
NUMERICS = (
    "accumulate-allreduce-grads-in-fp32", "attention-softmax-in-fp32", "attention-backend", "bf16", "fp8-*",
    "transformer-impl", "no-gradient-accumulation-fusion", "no-masked-softmax-fusion", "no-rope-fusion",
    "no-check-for-nan-in-loss-and-grad", "deterministic-mode", "moe-token-dispatcher-type", "moe-enable-deepep",
    "moe-permute-fusion", "moe-grouped-gemm", "cross-entropy-*", "min-lr",
)  # fmt: skip
TABLE |= dict.fromkeys(MEGATRON, Ignored(SHARDING))
TABLE |= dict.fromkeys(NUMERICS, Ignored("of Megatron's arithmetic; April's is learner.compute"))
DEFAULTS: dict[str, Any] = {
    "input-key": "input",
    "apply-chat-template": False,
    "rollout-shuffle": False,
    "rollout-temperature": 1.0,
    "rollout-function-path": "slime.rollout.sglang_rollout.generate_rollout",
    "n-samples-per-prompt": 1,
    "n-samples-per-eval-prompt": 1,
    "advantage-estimator": "grpo",
    "kl-loss-coef": 0.0,
    "kl-loss-type": "k1",
    "entropy-coef": 0.0,
    "eps-clip": 0.2,
    "tis-clip": 2.0,
    "tis-clip-low": 0,
    "lr": 1e-6,
    "lr-decay-style": "linear",
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "clip-grad": 1.0,
    "actor-num-nodes": 1,
    "actor-num-gpus-per-node": 8,
    "rollout-num-gpus-per-engine": 1,
}


class Slime(Framework):
    source = "THUDM/slime at 624b824a8"
    table, defaults = TABLE, DEFAULTS

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        return script_options(text, environment, r"train(_async)?\.py")

    def translate_joint(self, translation: Translation) -> None:
        schedule(translation)
        data(translation)
        evaluation(translation)
        loss(translation)
        stale_tokens(translation)
        translation.set_key(
            "learner.betas",
            [translation.value("adam-beta1"), translation.value("adam-beta2")],
            "adam-beta1",
            "adam-beta2",
        )
        devices(translation)
        sinks = [name for name in ("wandb", "tensorboard") if translation.value(f"use-{name}")]
        translation.set_key("operations.sinks", sinks or None, *(f"use-{name}" for name in sinks))


def schedule(translation: Translation) -> None:
    n, n_more = translation.number("rollout-batch-size"), translation.number("over-sampling-batch-size")
    partial, function = bool(translation.value("partial-rollout")), translation.value("rollout-function-path")
    rounds = partial or bool(n_more and n and n_more > n)
    if str(function).endswith(".generate_rollout_fully_async"):
        translation.set_key("schedule.kind", "continuous", "rollout-function-path")
    else:
        translation.set_key(
            "schedule.kind", "april" if rounds else "sync", "partial-rollout", "over-sampling-batch-size"
        )
        if function != DEFAULTS["rollout-function-path"]:
            translation.mark_unsupported(
                "rollout-function-path", "April generates by schedule.kind, and agents by docs/agents.md"
            )
    if rounds:
        translation.set_key("schedule.over_sampling_batch_size", n_more, "over-sampling-batch-size")
        translation.set_key("schedule.partial_rollout", partial, "partial-rollout")
    chosen = translation.value("dynamic-sampling-filter-path")
    if chosen and not chosen.endswith(".check_reward_nonzero_std"):
        translation.mark_unsupported(
            "dynamic-sampling-filter-path", "write it as a filter of April's, schedule.group_filter"
        )
    else:
        translation.set_key("schedule.dynamic_sampling", bool(chosen), "dynamic-sampling-filter-path")
    per_prompt, steps = translation.number("n-samples-per-prompt"), translation.number("num-steps-per-rollout")
    if n and per_prompt and steps:
        set_minibatches(translation, "num-steps-per-rollout", n * per_prompt // steps, n, per_prompt)
    else:
        set_minibatches(translation, "global-batch-size", translation.number("global-batch-size"), n, per_prompt)


def data(translation: Translation) -> None:
    steps, epochs = translation.value("num-rollout"), translation.value("num-epoch")
    translation.set_key("schedule.max_steps", steps or UNLIMITED_STEPS, "num-rollout" if steps else "num-epoch")
    translation.set_key("data.epochs", None if steps else epochs, "num-epoch")
    translation.set_key("schedule.last_batch", "drop", "rollout-batch-size")
    longest = translation.value("rollout-max-prompt-len")
    translation.set_key("data.max_prompt_tokens", longest or ANY_PROMPT_TOKENS, "rollout-max-prompt-len")
    translation.set_key("data.bad_rows", "skip" if longest else "stop", "rollout-max-prompt-len")
    verifier = str(translation.value("rm-type") or "").removeprefix("boxed_")
    if verifier in VERIFIERS:
        translation.set_key("data.reward", VERIFIERS[verifier], "rm-type")
    else:
        translation.undecided["data.reward"] = (
            f"April has no verifier like rm-type = {translation.value('rm-type')!r}; {OWN_REWARD}"
        )


def evaluation(translation: Translation) -> None:
    pairs = translation.value("eval-prompt-data")
    if not pairs:
        return
    paths = pairs[1::2] if isinstance(pairs, list) else [pairs]
    translation.set_key("data.eval_path", paths[0], "eval-prompt-data")
    translation.set_key("evaluation.prompts", ALL_PROMPTS, "eval-prompt-data")
    if len(paths) > 1:
        translation.mark_unsupported("eval-prompt-data", "April evaluates on one file, the first")
    for key, name, of_training in (
        ("evaluation.temperature", "eval-temperature", "rollout-temperature"),
        ("evaluation.top_p", "eval-top-p", "rollout-top-p"),
    ):
        chosen = name if translation.value(name) is not None else of_training
        translation.set_key(key, translation.value(chosen), chosen)
    longest = translation.value("eval-max-response-len")
    if longest not in (None, translation.value("rollout-max-response-len")):
        translation.mark_unsupported(
            "eval-max-response-len", "April's budget is that of training, sampling.max_response_tokens"
        )


def loss(translation: Translation) -> None:
    estimator = translation.value("advantage-estimator")
    if estimator in ESTIMATORS:
        advantage, policy_loss = ESTIMATORS[estimator]
        plain = advantage == "grpo" and translation.value("disable-grpo-std-normalization")
        translation.set_key("algorithm.advantage", "dr_grpo" if plain else advantage, "advantage-estimator")
        translation.set_key("algorithm.loss", policy_loss, "advantage-estimator")
        whitened = advantage.startswith("reinforce_pp")
        if bool(translation.value("normalize-advantages")) != whitened:
            translation.mark_unsupported(
                "normalize-advantages", "April whitens with reinforce_pp and reinforce_pp_baseline, and only there"
            )
    else:
        translation.undecided["algorithm.advantage"] = f"April has no advantage-estimator {estimator!r}; choose one"
    mean = "token_mean" if translation.value("calculate-per-token-loss") else "sequence_mean"
    translation.set_key("algorithm.normalisation", mean, "calculate-per-token-loss")
    set_clip(translation, "eps-clip", "eps-clip-high")
    set_reference_kl(translation, bool(translation.value("use-kl-loss")), "kl-loss-coef", "kl-loss-type")


def stale_tokens(translation: Translation) -> None:
    """Translate the off-policy corrections of stale tokens; by default slime clips around recomputed log-probabilities
    and corrects nothing."""
    behaviour = translation.value("use-rollout-logprobs")
    translation.set_key("algorithm.proximal", "behaviour" if behaviour else "recomputed", "use-rollout-logprobs")
    translation.set_key("algorithm.behaviour_coef", 0.0)
    corrections = []
    if translation.value("use-tis"):
        corrections.append("truncated")
        translation.set_key("algorithm.truncation", translation.value("tis-clip"), "tis-clip")
        if translation.value("tis-clip-low"):
            translation.mark_unsupported(
                "tis-clip-low", "April's `truncated` has no lower bound; `icepop` masks on both sides"
            )
    if translation.value("mask-offpolicy-in-partial-rollout"):
        corrections.append("on_policy_only")
    translation.set_key("algorithm.corrections", corrections, "use-tis", "mask-offpolicy-in-partial-rollout")


def devices(translation: Translation) -> None:
    per_engine = translation.number("rollout-num-gpus-per-engine")
    translation.set_key("worker.engine", "sglang")
    translation.set_key("engine.server.tp_size", per_engine, "rollout-num-gpus-per-engine")
    nodes, each, generate = map(translation.number, ("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus"))
    apart = not translation.value("colocate") and None not in (nodes, each, generate, per_engine)
    names = ("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus" if apart else "colocate")
    set_devices(translation, nodes * each if apart else None, generate // per_engine if apart else None, names)

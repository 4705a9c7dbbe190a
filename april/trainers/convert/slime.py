"""slime's scripts: bash arrays of `--flag value` for train.py or train_async.py.

Options and defaults as in THUDM/slime at 624b824a8, slime/utils/arguments.py, and Megatron's own.
"""

from collections.abc import Mapping
from pathlib import Path

from april.trainers.convert.framework import (
    ADAM,
    ALL_PROMPTS,
    ANY_PROMPT_TOKENS,
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
    Ignored,
    Joint,
    MapTo,
    Options,
    Rule,
    Translation,
    Unsupported,
    chat_or_text,
    each,
    not_negative,
    only,
    script_options,
)

ESTIMATORS = {
    "grpo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
"""April's `algorithm.advantage` for each value of slime's option `--advantage-estimator`. In slime that option sets the
loss too."""
OWN_CODE = Unsupported("it names code of slime's interfaces; write it as a part of April's, docs/extending.md")
VERIFIERS = {"deepscaler": "deepscaler", "dapo": "dapo", "math": "math", "f1": "f1", "remote_rm": "remote"}
"""Name of April's verifier for each value of slime's `--rm-type`."""
GENERATE = "slime.rollout.sglang_rollout.generate_rollout"
"""Default of slime's `--rollout-function-path`: its own function that generates a batch."""

TABLE: dict[str, Rule] = {
    "hf-checkpoint": MapTo("model.path"),
    "prompt-data": MapTo("data.path"),
    "input-key": MapTo("data.prompt_key", default="input"),
    "label-key": MapTo("data.label_key"),
    "apply-chat-template": MapTo("data.prompt_as", chat_or_text, default=False),
    "rollout-shuffle": MapTo("data.shuffle", default=False),
    "rollout-seed": MapTo("seed"),
    "rollout-batch-size": MapTo("schedule.rollout_batch_size"),
    "n-samples-per-prompt": MapTo("schedule.n_samples_per_prompt", default=1),
    "rollout-function-path": Joint(default=GENERATE),
    "rollout-max-response-len": MapTo("sampling.max_response_tokens"),
    "rollout-max-context-len": Unsupported("April bounds prompts and responses each by themselves"),
    "rollout-temperature": MapTo("sampling.temperature", default=1.0),
    "rollout-top-p": MapTo("sampling.top_p"),
    "rollout-top-k": MapTo("sampling.top_k", not_negative),
    "rollout-stop": Unsupported("April ends a response at token ids, sampling.stop_token_ids"),
    "rollout-stop-token-ids": MapTo("sampling.stop_token_ids", lambda ids: ids if isinstance(ids, list) else [ids]),
    "rm-url": MapTo("reward.url"),
    "group-rm": Unsupported("a reward of a group is named as group:module:function in April, docs/rewards.md"),
    "eval-interval": MapTo("evaluation.every"),
    "n-samples-per-eval-prompt": MapTo("evaluation.samples", default=1),
    "eval-top-k": MapTo("evaluation.top_k", not_negative),
    "eval-config": Unsupported("April reads no such file; its held-out prompts are data.eval_path"),
    "advantage-estimator": Joint(default="grpo"),
    "disable-rewards-normalization": Unsupported("April's advantages are relative to a group or a batch"),
    "kl-loss-coef": Joint(default=0.0),
    "kl-loss-type": Joint(default="k1"),
    "kl-coef": Unsupported(IN_LOSS),
    "entropy-coef": MapTo("algorithm.entropy_coef", default=0.0),
    "eps-clip": Joint(default=0.2),
    "eps-clip-c": MapTo("algorithm.dual_clip"),
    "tis-clip": Joint(default=2.0),
    "tis-clip-low": Joint(default=0),
    "loss-type": MapTo("algorithm.loss", only("policy_loss", "April trains policies")),
    "gamma": Unsupported("it is of a critic, critic.gamma with algorithm.advantage = 'gae'", off=(1, None)),
    "lambd": Unsupported("it is of a critic, critic.lam with algorithm.advantage = 'gae'", off=(1, None)),
    "use-opd": Unsupported("name the teacher in [teacher.NAME], and set algorithm.distillation = 'reverse_kl'"),
    "use-opsm": Unsupported("April masks sequences by algorithm.corrections = ['geometric'], another rule"),
    "use-unbiased-kl": Unsupported("April's estimators are k1, k2 and k3"),
    "optimizer": MapTo("learner.lr", only("adam", ADAM)),
    "lr": MapTo("learner.lr", default=1e-6),
    "lr-decay-style": MapTo("learner.lr_schedule", LR_SCHEDULES, default="linear"),
    "min-lr": Unsupported("it is learner.lr_floor in April, a share of learner.lr", off=(None, 0, 0.0)),
    "lr-warmup-iters": MapTo("learner.warmup_steps"),
    "lr-warmup-fraction": Unsupported(WARMUP),
    "weight-decay": MapTo("learner.weight_decay", default=0.01),
    "adam-beta1": Joint(default=0.9),
    "adam-beta2": Joint(default=0.999),
    "clip-grad": MapTo("learner.grad_clip", default=1.0),
    "max-tokens-per-gpu": MapTo("learner.microbatch_tokens"),
    "recompute-granularity": MapTo("learner.activation_checkpointing", lambda how: how is not None),
    "save-interval": MapTo("learner.checkpoint_every"),
    "actor-num-nodes": Joint(default=1),
    "actor-num-gpus-per-node": Joint(default=8),
    "rollout-num-gpus-per-engine": Joint(default=1),
    "wandb-group": MapTo("run.name"),
    "sglang-*": MapTo("engine.server.*"),
    "sglang-server-concurrency": MapTo("worker.slots"),
    "sglang-router-*": Ignored("April has no router: workers take what they have slots for"),
    "sglang-config": Unsupported("April starts the same servers behind each worker"),
    **each(Unsupported(DROPOUT, off=(0,)), "attention-dropout hidden-dropout"),
    "enable-mtp-training": Unsupported("April trains the policy's own layers alone"),
    "mtp-*": Ignored("of layers that enable-mtp-training switches on"),
    "disable-compute-advantages-and-returns": Unsupported("April trains by advantages"),
    "loss-mask-type": Ignored("of fine-tuning on given answers"),
    "multimodal-keys": Unsupported(TEXT),
    "debug-train-only": Unsupported("April has no training without generation"),
    "reset-optimizer-states": Unsupported("April keeps the optimizer's state"),
    "ref-load": Ignored("the reference in April is the starting policy"),
    "load": Ignored("April goes on with --resume"),
    "log-passrate": Ignored("April always has pass@k"),
    "metadata-key": Ignored("April reads the label and what its verifier is called"),
    "use-dynamic-batch-size": Ignored("April always packs, up to learner.microbatch_tokens"),
    "balance-*": Ignored("April always balances"),
    **each(
        Joint(),
        """rollout-max-prompt-len num-epoch num-rollout over-sampling-batch-size partial-rollout
        dynamic-sampling-filter-path mask-offpolicy-in-partial-rollout global-batch-size num-steps-per-rollout rm-type
        eval-prompt-data eval-temperature eval-top-p eval-max-response-len disable-grpo-std-normalization
        normalize-advantages use-kl-loss eps-clip-high calculate-per-token-loss use-tis use-rollout-logprobs colocate
        rollout-num-gpus use-wandb use-tensorboard""",
    ),
    **each(
        OWN_CODE,
        "custom-rm-path custom-tis-function-path custom-* rollout-sample-filter-path buffer-filter-path "
        "data-source-path",
    ),
    **each(
        Ignored("details of a reward are logged in April, and its number is what counts"), "reward-key eval-reward-key"
    ),
    **each(Ignored("the architecture, which April reads from the model's folder"), "${MODEL_ARGS[@]} model-name"),
    **each(Ignored(OWN_FILES), "save* async-save"),
    **each(Ignored(LOGS), "wandb-* tb-* log-* disable-wandb-random-suffix"),
    **each(
        Ignored(MEMORY),
        "micro-batch-size ref-micro-batch-size recompute-* data-pad-size-multiplier optimizer-cpu-offload "
        "use-precision-aware-optimizer",
    ),
    **each(
        Ignored(SHARDING),
        """tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size context-parallel-size
        expert-model-parallel-size expert-tensor-parallel-size decoder-first-pipeline-num-layers
        decoder-last-pipeline-num-layers num-gpus-per-node offload* no-offload* train-backend update-weight*
        release-train distributed-* use-fault-tolerance rollout-health-check-* rollout-data-transport keep-old-actor
        megatron-* qwen-gdn-backend train-env-vars prefill-num-servers overlap-* use-distributed-optimizer""",
    ),
    **each(
        Ignored("of Megatron's arithmetic; April's is learner.compute"),
        """accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 attention-backend bf16 fp8-* transformer-impl
        no-gradient-accumulation-fusion no-masked-softmax-fusion no-rope-fusion no-check-for-nan-in-loss-and-grad
        deterministic-mode moe-token-dispatcher-type moe-enable-deepep moe-permute-fusion moe-grouped-gemm
        cross-entropy-*""",
    ),
}


class Slime(Framework):
    source = "THUDM/slime at 624b824a8"
    table = TABLE

    def read(self, path: Path, text: str, environment: Mapping[str, str]) -> Options:
        return script_options(text, environment, r"train(_async)?\.py")

    def translate_joint(self, translation: Translation) -> None:
        schedule(translation)
        data(translation)
        evaluation(translation)
        loss(translation)
        stale_tokens(translation)
        translation.set_betas("adam-beta1", "adam-beta2")
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
        kind = "april" if rounds else "sync"
        translation.set_key("schedule.kind", kind, "partial-rollout", "over-sampling-batch-size")
        if function != GENERATE:
            translation.mark_unsupported(
                "rollout-function-path", "April generates by schedule.kind, and agents by docs/agents.md"
            )
    if rounds:
        translation.set_key("schedule.over_sampling_batch_size", n_more, "over-sampling-batch-size")
        translation.set_key("schedule.partial_rollout", partial, "partial-rollout")
    name = "dynamic-sampling-filter-path"
    chosen = translation.value(name)
    if chosen and not chosen.endswith(".check_reward_nonzero_std"):
        translation.mark_unsupported(name, "write it as a filter of April's, schedule.group_filter")
    else:
        translation.set_key("schedule.dynamic_sampling", bool(chosen), name)
    per_prompt, steps = translation.number("n-samples-per-prompt"), translation.number("num-steps-per-rollout")
    if n and per_prompt and steps:
        translation.set_minibatches("num-steps-per-rollout", n * per_prompt // steps, n, per_prompt)
    else:
        translation.set_minibatches("global-batch-size", translation.number("global-batch-size"), n, per_prompt)


def data(translation: Translation) -> None:
    translation.set_length("num-rollout", "num-epoch")
    translation.set_key("schedule.last_batch", "drop", "rollout-batch-size")
    longest = translation.value("rollout-max-prompt-len")
    translation.set_key("data.max_prompt_tokens", longest or ANY_PROMPT_TOKENS, "rollout-max-prompt-len")
    translation.set_key("data.bad_rows", "skip" if longest else "stop", "rollout-max-prompt-len")
    kind = translation.value("rm-type")
    verifier = str(kind or "").removeprefix("boxed_")
    if verifier in VERIFIERS:
        translation.set_key("data.reward", VERIFIERS[verifier], "rm-type")
    else:
        translation.undecided["data.reward"] = f"April has no verifier like rm-type = {kind!r}; {OWN_REWARD}"


def evaluation(translation: Translation) -> None:
    pairs = translation.value("eval-prompt-data")
    if not pairs:
        return
    paths = pairs[1::2] if isinstance(pairs, list) else [pairs]
    translation.set_key("data.eval_path", paths[0], "eval-prompt-data")
    translation.set_key("evaluation.prompts", ALL_PROMPTS, "eval-prompt-data")
    if len(paths) > 1:
        translation.mark_unsupported("eval-prompt-data", "April evaluates on one file, the first")
    for option, key in (("temperature", "evaluation.temperature"), ("top-p", "evaluation.top_p")):
        own, of_training = f"eval-{option}", f"rollout-{option}"
        translation.copy(key, of_training if translation.value(own) is None else own)
    if translation.value("eval-max-response-len") not in (None, translation.value("rollout-max-response-len")):
        translation.mark_unsupported(
            "eval-max-response-len", "April's budget is that of training, sampling.max_response_tokens"
        )


def loss(translation: Translation) -> None:
    name = "advantage-estimator"
    scaled = not translation.value("disable-grpo-std-normalization")
    if advantage := translation.set_advantage(name, ESTIMATORS, scaled):
        policy_loss = translation.value(name)
        translation.set_key("algorithm.loss", policy_loss if policy_loss in ("gspo", "cispo") else "ppo", name)
        if bool(translation.value("normalize-advantages")) != advantage.startswith("reinforce_pp"):
            translation.mark_unsupported(
                "normalize-advantages", "April whitens with reinforce_pp and reinforce_pp_baseline, and only there"
            )
    mean = "token_mean" if translation.value("calculate-per-token-loss") else "sequence_mean"
    translation.set_key("algorithm.normalisation", mean, "calculate-per-token-loss")
    translation.set_clip("eps-clip", "eps-clip-high")
    translation.set_reference_kl(bool(translation.value("use-kl-loss")), "kl-loss-coef", "kl-loss-type")


def stale_tokens(translation: Translation) -> None:
    """Translate slime's options for stale tokens: whether the loss clips around the log-probabilities of sampling or
    around recomputed ones (slime's default), and which off-policy corrections there are (by default none)."""
    behaviour = translation.value("use-rollout-logprobs")
    translation.set_key("algorithm.proximal", "behaviour" if behaviour else "recomputed", "use-rollout-logprobs")
    translation.set_key("algorithm.behaviour_coef", 0.0)
    corrections = []
    if translation.value("use-tis"):
        corrections.append("truncated")
        translation.copy("algorithm.truncation", "tis-clip")
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
    nodes, each_node, generate = map(
        translation.number, ("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus")
    )
    apart = not translation.value("colocate") and None not in (nodes, each_node, generate, per_engine)
    names = ("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus" if apart else "colocate")
    trainers, generators = (nodes * each_node, generate // per_engine) if apart else (None, None)
    translation.set_devices(trainers, generators, names)

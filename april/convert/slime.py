"""slime's scripts: bash arrays of `--flag value`, given to its train.py or train_async.py.

Options and defaults as in THUDM/slime at 624b824a8, slime/utils/arguments.py, and Megatron's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.convert.framework import (
    ADAM,
    ALL_PROMPTS,
    ANY_PROMPT_TOKENS,
    CONSTANT_LR,
    EPOCHS_END_IT,
    IN_LOSS,
    LOGS,
    MEMORY,
    OWN_FILES,
    OWN_REWARD,
    SHARDING,
    Framework,
    clip,
    optimizer_steps,
    placed,
    reference,
)
from april.convert.options import Options, of_script
from april.convert.translation import JOINT, Apart, Lacks, Rule, To, Translation, only

ESTIMATORS = {
    "grpo": ("grpo", "ppo"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_pp", "ppo"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "ppo"),
}
"""advantage and loss, by --advantage-estimator"""
OWN_CODE = Lacks("it names code of slime's interfaces; write it as a part of April's, docs/extending.md")
VERIFIERS = {"deepscaler": "deepscaler", "dapo": "dapo", "math": "math", "f1": "f1", "remote_rm": "remote"}
"""by --rm-type"""

TABLE: dict[str, Rule] = {
    "${MODEL_ARGS[@]}": Apart("the architecture, which April reads from the model's folder"),
    "hf-checkpoint": To("model.path"),
    "prompt-data": To("data.path"),
    "input-key": To("data.prompt_key"),
    "label-key": To("data.label_key"),
    "apply-chat-template": To("data.prompt_as", lambda given: "chat" if given else "text"),
    "rollout-shuffle": To("data.shuffle"),
    "rollout-seed": To("seed"),
    "rollout-max-prompt-len": JOINT,
    "num-epoch": JOINT,
    "num-rollout": JOINT,
    "rollout-batch-size": To("schedule.rollout_batch_size"),
    "n-samples-per-prompt": To("schedule.n_samples_per_prompt"),
    "over-sampling-batch-size": JOINT,
    "partial-rollout": JOINT,
    "rollout-function-path": JOINT,
    "dynamic-sampling-filter-path": JOINT,
    "mask-offpolicy-in-partial-rollout": JOINT,
    "global-batch-size": JOINT,
    "num-steps-per-rollout": JOINT,
    "rollout-max-response-len": To("sampling.max_response_tokens"),
    "rollout-max-context-len": Lacks("April bounds prompts and responses each by themselves"),
    "rollout-temperature": To("sampling.temperature"),
    "rollout-top-p": To("sampling.top_p"),
    "rollout-top-k": To("sampling.top_k", lambda value: max(value, 0)),
    "rollout-stop": Lacks("April ends a response at token ids, sampling.stop_token_ids"),
    "rollout-stop-token-ids": To("sampling.stop_token_ids", lambda ids: ids if isinstance(ids, list) else [ids]),
    "rm-type": JOINT,
    "rm-url": To("reward.url"),
    "custom-rm-path": OWN_CODE,
    "group-rm": Lacks("a reward of a group is named as group:module:function in April, docs/rewards.md"),
    "reward-key": Apart("details of a reward are logged in April, and its number is what counts"),
    "eval-reward-key": Apart("details of a reward are logged in April, and its number is what counts"),
    "eval-interval": To("evaluation.every"),
    "eval-prompt-data": JOINT,
    "n-samples-per-eval-prompt": To("evaluation.samples"),
    "eval-temperature": JOINT,
    "eval-top-p": JOINT,
    "eval-top-k": To("evaluation.top_k", lambda value: max(value, 0)),
    "eval-max-response-len": JOINT,
    "eval-config": Lacks("April reads no such file; its held-out prompts are data.eval_path"),
    "advantage-estimator": JOINT,
    "disable-grpo-std-normalization": JOINT,
    "disable-rewards-normalization": Lacks("April's advantages are relative to a group or a batch"),
    "normalize-advantages": JOINT,
    "use-kl-loss": JOINT,
    "kl-loss-coef": JOINT,
    "kl-loss-type": JOINT,
    "kl-coef": Lacks(IN_LOSS),
    "entropy-coef": To("algorithm.entropy_coef"),
    "eps-clip": JOINT,
    "eps-clip-high": JOINT,
    "eps-clip-c": To("algorithm.dual_clip"),
    "calculate-per-token-loss": JOINT,
    "use-tis": JOINT,
    "tis-clip": JOINT,
    "tis-clip-low": JOINT,
    "custom-tis-function-path": OWN_CODE,
    "use-rollout-logprobs": JOINT,
    "loss-type": To("algorithm.loss", only("policy_loss", "April trains policies")),
    "gamma": Lacks("it is of a critic, critic.gamma with algorithm.advantage = 'gae'", off=(1, None)),
    "lambd": Lacks("it is of a critic, critic.lam with algorithm.advantage = 'gae'", off=(1, None)),
    "use-opd": Lacks("April does not distil"),
    "use-opsm": Lacks("April masks sequences by algorithm.corrections = ['geometric'], another rule"),
    "use-unbiased-kl": Lacks("April's estimators are k1, k2 and k3"),
    "optimizer": To("learner.lr", only("adam", ADAM)),
    "lr": To("learner.lr"),
    "lr-decay-style": To("learner.lr", only("constant", CONSTANT_LR)),
    "lr-warmup-iters": To("learner.warmup_steps"),
    "lr-warmup-fraction": Lacks("April's warm-up is a number of steps, learner.warmup_steps"),
    "weight-decay": To("learner.weight_decay"),
    "adam-beta1": JOINT,
    "adam-beta2": JOINT,
    "clip-grad": To("learner.grad_clip"),
    "max-tokens-per-gpu": To("learner.microbatch_tokens"),
    "recompute-granularity": To("learner.activation_checkpointing", lambda how: how is not None),
    "save-interval": To("learner.checkpoint_every"),
    "actor-num-nodes": JOINT,
    "actor-num-gpus-per-node": JOINT,
    "colocate": JOINT,
    "rollout-num-gpus": JOINT,
    "rollout-num-gpus-per-engine": JOINT,
    "use-wandb": JOINT,
    "use-tensorboard": JOINT,
    "wandb-group": To("run.name"),
    "sglang-*": To("engine.server.*"),
    "sglang-server-concurrency": To("worker.slots"),
    "sglang-router-*": Apart("April has no router: workers take what they have slots for"),
    "sglang-config": Lacks("April starts the same servers behind each worker"),
    "attention-dropout": Lacks("April trains without dropout", off=(0,)),
    "hidden-dropout": Lacks("April trains without dropout", off=(0,)),
    "enable-mtp-training": Lacks("April trains the policy's own layers alone"),
    "custom-*": OWN_CODE,
    "rollout-sample-filter-path": OWN_CODE,
    "buffer-filter-path": OWN_CODE,
    "data-source-path": OWN_CODE,
    "disable-compute-advantages-and-returns": Lacks("April trains by advantages"),
    "loss-mask-type": Apart("of fine-tuning on given answers"),
    "mtp-*": Apart("of layers that enable-mtp-training switches on"),
    "model-name": Apart("the architecture, which April reads from the model's folder"),
    "prefill-num-servers": Apart(SHARDING),
    "multimodal-keys": Lacks("April takes text alone"),
    "debug-train-only": Lacks("April has no training without generation"),
    "reset-optimizer-states": Lacks("April keeps the optimizer's state"),
    "ref-load": Apart("the reference in April is the starting policy"),
    "load": Apart("April goes on with --resume"),
    "save*": Apart(OWN_FILES),
    "async-save": Apart(OWN_FILES),
    "wandb-*": Apart(LOGS),
    "tb-*": Apart(LOGS),
    "log-passrate": Apart("April always has pass@k"),
    "log-*": Apart(LOGS),
    "metadata-key": Apart("April reads the label and what its verifier is called"),
    "disable-wandb-random-suffix": Apart(LOGS),
    "micro-batch-size": Apart(MEMORY),
    "ref-micro-batch-size": Apart(MEMORY),
    "use-dynamic-batch-size": Apart("April always packs, up to learner.microbatch_tokens"),
    "balance-*": Apart("April always balances"),
    "recompute-*": Apart(MEMORY),
    "data-pad-size-multiplier": Apart(MEMORY),
    "optimizer-cpu-offload": Apart(MEMORY),
    "overlap-*": Apart(SHARDING),
    "use-precision-aware-optimizer": Apart(MEMORY),
    "use-distributed-optimizer": Apart(SHARDING),
}
MEGATRON = (
    "tensor-model-parallel-size", "sequence-parallel", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers", "num-gpus-per-node", "offload*", "no-offload*", "train-backend",
    "update-weight*", "release-train", "distributed-*", "use-fault-tolerance", "rollout-health-check-*",
    "rollout-data-transport", "keep-old-actor", "megatron-*", "qwen-gdn-backend", "train-env-vars",
)  # fmt: skip
"""how slime is spread over devices"""
NUMERICS = (
    "accumulate-allreduce-grads-in-fp32", "attention-softmax-in-fp32", "attention-backend", "bf16", "fp8-*",
    "transformer-impl", "no-gradient-accumulation-fusion", "no-masked-softmax-fusion", "no-rope-fusion",
    "no-check-for-nan-in-loss-and-grad", "deterministic-mode", "moe-token-dispatcher-type", "moe-enable-deepep",
    "moe-permute-fusion", "moe-grouped-gemm", "cross-entropy-*", "min-lr",
)  # fmt: skip
TABLE |= dict.fromkeys(MEGATRON, Apart(SHARDING))
TABLE |= dict.fromkeys(NUMERICS, Apart("of Megatron's arithmetic; April's is learner.compute"))
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
        return of_script(text, environment, r"train(_async)?\.py")

    def joint(self, said: Translation) -> None:
        schedule(said)
        data(said)
        evaluation(said)
        loss(said)
        stale_tokens(said)
        said.say("learner.betas", [said.value("adam-beta1"), said.value("adam-beta2")], "adam-beta1", "adam-beta2")
        devices(said)
        sinks = [name for name in ("wandb", "tensorboard") if said.value(f"use-{name}")]
        said.say("operations.sinks", sinks or None, *(f"use-{name}" for name in sinks))


def schedule(said: Translation) -> None:
    n, n_more = said.number("rollout-batch-size"), said.number("over-sampling-batch-size")
    partial, function = bool(said.value("partial-rollout")), said.value("rollout-function-path")
    rounds = partial or bool(n_more and n and n_more > n)
    if str(function).endswith(".generate_rollout_fully_async"):
        said.say("schedule.kind", "continuous", "rollout-function-path")
    else:
        said.say("schedule.kind", "april" if rounds else "sync", "partial-rollout", "over-sampling-batch-size")
        if function != DEFAULTS["rollout-function-path"]:
            said.differ("rollout-function-path", "April generates by schedule.kind, and agents by docs/agents.md")
    if rounds:
        said.say("schedule.over_sampling_batch_size", n_more, "over-sampling-batch-size")
        said.say("schedule.partial_rollout", partial, "partial-rollout")
    chosen = said.value("dynamic-sampling-filter-path")
    if chosen and not chosen.endswith(".check_reward_nonzero_std"):
        said.differ("dynamic-sampling-filter-path", "write it as a filter of April's, schedule.group_filter")
    else:
        said.say("schedule.dynamic_sampling", bool(chosen), "dynamic-sampling-filter-path")
    per_prompt, steps = said.number("n-samples-per-prompt"), said.number("num-steps-per-rollout")
    if n and per_prompt and steps:
        optimizer_steps(said, "num-steps-per-rollout", n * per_prompt // steps, n, per_prompt)
    else:
        optimizer_steps(said, "global-batch-size", said.number("global-batch-size"), n, per_prompt)


def data(said: Translation) -> None:
    steps, epochs = said.value("num-rollout"), said.value("num-epoch")
    said.say("schedule.max_steps", steps or EPOCHS_END_IT, "num-rollout" if steps else "num-epoch")
    said.say("data.epochs", None if steps else epochs, "num-epoch")
    said.say("schedule.last_batch", "drop", "rollout-batch-size")
    longest = said.value("rollout-max-prompt-len")
    said.say("data.max_prompt_tokens", longest or ANY_PROMPT_TOKENS, "rollout-max-prompt-len")
    said.say("data.bad_rows", "skip" if longest else "stop", "rollout-max-prompt-len")
    verifier = str(said.value("rm-type") or "").removeprefix("boxed_")
    if verifier in VERIFIERS:
        said.say("data.reward", VERIFIERS[verifier], "rm-type")
    else:
        said.open["data.reward"] = f"April has no verifier like rm-type = {said.value('rm-type')!r}; {OWN_REWARD}"


def evaluation(said: Translation) -> None:
    pairs = said.value("eval-prompt-data")
    if not pairs:
        return
    paths = pairs[1::2] if isinstance(pairs, list) else [pairs]
    said.say("data.eval_path", paths[0], "eval-prompt-data")
    said.say("evaluation.prompts", ALL_PROMPTS, "eval-prompt-data")
    if len(paths) > 1:
        said.differ("eval-prompt-data", "April evaluates on one file, the first")
    for key, name, of_training in (
        ("evaluation.temperature", "eval-temperature", "rollout-temperature"),
        ("evaluation.top_p", "eval-top-p", "rollout-top-p"),
    ):
        chosen = name if said.value(name) is not None else of_training
        said.say(key, said.value(chosen), chosen)
    longest = said.value("eval-max-response-len")
    if longest not in (None, said.value("rollout-max-response-len")):
        said.differ("eval-max-response-len", "April's budget is that of training, sampling.max_response_tokens")


def loss(said: Translation) -> None:
    estimator = said.value("advantage-estimator")
    if estimator in ESTIMATORS:
        advantage, policy_loss = ESTIMATORS[estimator]
        plain = advantage == "grpo" and said.value("disable-grpo-std-normalization")
        said.say("algorithm.advantage", "dr_grpo" if plain else advantage, "advantage-estimator")
        said.say("algorithm.loss", policy_loss, "advantage-estimator")
        whitened = advantage.startswith("reinforce_pp")
        if bool(said.value("normalize-advantages")) != whitened:
            said.differ(
                "normalize-advantages", "April whitens with reinforce_pp and reinforce_pp_baseline, and only there"
            )
    else:
        said.open["algorithm.advantage"] = f"April has no advantage-estimator {estimator!r}; choose one"
    mean = "token_mean" if said.value("calculate-per-token-loss") else "sequence_mean"
    said.say("algorithm.normalisation", mean, "calculate-per-token-loss")
    clip(said, "eps-clip", "eps-clip-high")
    reference(said, bool(said.value("use-kl-loss")), "kl-loss-coef", "kl-loss-type")


def stale_tokens(said: Translation) -> None:
    """slime clips around what its trainer has recomputed, and corrects nothing unless it is told to."""
    behaviour = said.value("use-rollout-logprobs")
    said.say("algorithm.proximal", "behaviour" if behaviour else "recomputed", "use-rollout-logprobs")
    said.say("algorithm.behaviour_coef", 0.0)
    corrections = []
    if said.value("use-tis"):
        corrections.append("truncated")
        said.say("algorithm.truncation", said.value("tis-clip"), "tis-clip")
        if said.value("tis-clip-low"):
            said.differ("tis-clip-low", "April's `truncated` has no lower bound; `icepop` masks on both sides")
    if said.value("mask-offpolicy-in-partial-rollout"):
        corrections.append("on_policy_only")
    said.say("algorithm.corrections", corrections, "use-tis", "mask-offpolicy-in-partial-rollout")


def devices(said: Translation) -> None:
    per_engine = said.number("rollout-num-gpus-per-engine")
    said.say("worker.engine", "sglang")
    said.say("engine.server.tp_size", per_engine, "rollout-num-gpus-per-engine")
    nodes, each, generate = map(said.number, ("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus"))
    apart = not said.value("colocate") and None not in (nodes, each, generate, per_engine)
    names = ("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus" if apart else "colocate")
    placed(said, nodes * each if apart else None, generate // per_engine if apart else None, names)

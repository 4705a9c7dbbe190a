"""The keys of `[algorithm]`, `[critic]` and `[lora]`: the loss of a training step with its corrections of stale tokens,
the value model, and the low-rank adapter."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from april.config.section import Section
from april.util.errors import refuse


class AlgorithmSection(Section):
    """The loss of a training step, and the corrections of stale tokens."""

    preset: Literal["grpo", "dapo", "gspo"] | None = Field(
        None,
        description="Sets the keys that a paper's algorithm fixes: advantage, loss, clip range, normalisation, KL, "
        "group filter; keys that you give win. Each preset turns the corrections of stale tokens off. Unset: "
        "April's defaults.",
    )
    advantage: str = Field(
        "grpo",
        description="Advantage estimator: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, pass_at_k "
        "(sets of pass_k responses), gdpo (the parts of the reward, each apart), opob (VCPO's baseline, with a "
        "backward pass for each response), gae (with a critic, a second model of the policy's size), no_reward (0, for "
        "distillation alone), no_baseline (the reward itself), or yours as package.module:function.",
    )
    pass_k: int = Field(
        4,
        ge=1,
        description="Advantage pass_at_k: number k of responses in a set, which counts as right if one of them is. A "
        "high value rewards prompts that are seldom solved more, and those that are often solved less.",
    )
    length_penalty: str = Field(
        "",
        description="Term added to the reward of a response for its length among the responses of its group, before "
        "advantages are computed: kimi (by its place between the shortest and the longest), alp (by its tokens, more "
        "where the prompt is easy), or yours as package.module:function. Empty: none. The soft overlong penalty is "
        "reward.overlong_penalty.",
    )
    length_coef: float = Field(
        0.1,
        gt=0,
        description="Factor on algorithm.length_penalty; with alp a cost for each token, such as 1e-4. A high value "
        "makes short wrong responses better than long right ones.",
    )
    turn_reward: str = Field(
        "",
        description="Name of a token score that verifiers return; its value at the last token of a turn is the turn's "
        "reward. A turn is "
        "then credited with it, with those of later turns, and with the reward of the response. Empty: every token has "
        "the credit of its response.",
    )
    turn_discount: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Discount per turn of later turns' rewards, and of the response's, in a turn's return. A low "
        "value credits a turn for its own reward alone.",
    )
    loss: str = Field(
        "ppo",
        description="Policy loss: ppo (clips each token's ratio), gspo (one ratio per sequence), gspo_token, cispo, "
        "bapo (adds a forward pass of the batch to each step), cross_entropy (no ratio), or yours as "
        "package.module:function.",
    )
    clip_low: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Importance ratios are clipped below 1 - clip_low; 1: no lower bound. A larger value lets one "
        "step move the policy further.",
    )
    clip_high: float = Field(
        0.28,
        gt=0,
        description="Importance ratios are clipped above 1 + clip_high. A larger value lets one step move the policy "
        "further.",
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Dual-clip constant c of the ppo loss: a token with a negative advantage contributes at most c * "
        "|advantage|. A larger c bounds less. Unset: no bound.",
    )
    normalisation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean",
        description="Weight of a token in the loss of a global batch: token_mean is 1 / tokens of the batch, "
        "sequence_mean gives each response the same total weight, constant is 1 / (responses * constant_tokens).",
    )
    constant_tokens: int | None = Field(
        None,
        ge=1,
        description="Response length (tokens) that normalisation = 'constant' divides by. A larger one makes smaller "
        "gradients. Unset: sampling.max_response_tokens.",
    )
    loss_weight: float = Field(
        1.0,
        gt=0,
        description="Factor on the whole loss, for a source with its own algorithm ([data.sources.algorithm]): a high "
        "value makes the policy follow this source more than the others.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of KL(policy || starting policy) in the loss. 0 loads no reference model; above 0, "
        "that frozen copy takes memory and a forward pass in each step. A high value keeps the policy near its "
        "start.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Per-token estimator of the KL that kl_coef weighs: k1 is the log ratio, k2 half its square, k3 "
        "unbiased with low variance.",
    )
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the entropy bonus in the loss. A high value keeps sampling varied, and learns more "
        "slowly. Above 0, samples whose advantage is 0 are computed too, which takes time.",
    )
    behaviour_coef: float = Field(
        0.3,
        ge=0,
        description="Coefficient of (log pi - log mu)^2 / 2, where mu is the policy that sampled the token: it pulls "
        "stale tokens back to mu, and is 0 on policy. A high value is stabler and learns more slowly.",
    )
    proximal: Literal["behaviour", "recomputed", "interpolated"] = Field(
        "recomputed",
        description="Policy in the denominator of the ratio that the loss clips: behaviour (the one that sampled the "
        "token), recomputed (the weights before the step), interpolated (one version before the weights, on the "
        "log-linear path to the behaviour policy).",
    )
    corrections: tuple[str, ...] = Field(
        ("truncated_sequence",),
        description="Importance weights or masks of stale tokens, multiplied: truncated, truncated_sequence, icepop, "
        "geometric, on_policy_only, vespo, m2po, dppo_tv, or yours as package.module:function. Each takes signal "
        "from stale tokens; m2po adds a forward pass of the batch.",
    )
    truncation: float = Field(
        2.0,
        gt=0,
        description="Correction truncated: largest importance weight of a token. A high value lets single stale "
        "tokens dominate a step.",
    )
    sequence_truncation: float = Field(
        2.0,
        gt=0,
        description="Correction truncated_sequence: largest importance weight of a response, the product of its "
        "tokens' ratios. A high value lets single stale responses dominate a step.",
    )
    icepop_low: float = Field(
        0.5,
        ge=0,
        description="Correction icepop: tokens with a smaller importance ratio are masked. A high value masks more "
        "tokens.",
    )
    icepop_high: float = Field(
        5.0,
        gt=0,
        description="Correction icepop: tokens with a larger importance ratio are masked. A low value masks more "
        "tokens.",
    )
    geometric_low: float = Field(
        0.99,
        ge=0,
        description="Correction geometric: responses whose geometric mean ratio is smaller are masked. A high value "
        "masks more responses.",
    )
    geometric_high: float = Field(
        1.01,
        gt=0,
        description="Correction geometric: responses whose geometric mean ratio is larger are masked. A low value "
        "masks more responses.",
    )
    vespo_k_positive: float = Field(
        2.0,
        gt=0,
        description="Correction vespo: exponent k of a response's weight e^lambda w^k e^(-lambda w), where w is its "
        "importance ratio; for advantages of at least 0. A larger k suppresses responses with small ratios more.",
    )
    vespo_lambda_positive: float = Field(
        3.0,
        gt=0,
        description="Correction vespo: decay lambda of a response's weight e^lambda w^k e^(-lambda w), where w is "
        "its importance ratio; for advantages of at least 0. A high value takes more weight from responses that "
        "have become likelier.",
    )
    vespo_k_negative: float = Field(
        3.0,
        gt=0,
        description="Correction vespo: exponent k of a response's weight e^lambda w^k e^(-lambda w), where w is its "
        "importance ratio; for advantages below 0. A larger k suppresses responses with small ratios more.",
    )
    vespo_lambda_negative: float = Field(
        2.0,
        gt=0,
        description="Correction vespo: decay lambda of a response's weight e^lambda w^k e^(-lambda w), where w is "
        "its importance ratio; for advantages below 0. A high value takes more weight from responses that have "
        "become likelier.",
    )
    m2po_threshold: float = Field(
        0.04,
        gt=0,
        description="Correction m2po: tokens with the largest (log ratio)^2 are masked until the mean (log ratio)^2 of "
        "the batch's remaining tokens is below this. A low value masks more tokens.",
    )
    dppo_rise: float = Field(
        0.15,
        gt=0,
        le=1,
        description="Correction dppo_tv: tokens with a positive advantage are masked once their probability has "
        "risen by more than this since they were sampled. A low value masks more tokens.",
    )
    dppo_fall: float = Field(
        0.15,
        gt=0,
        le=1,
        description="Correction dppo_tv: tokens with a negative advantage are masked once their probability has "
        "fallen by more than this since they were sampled. A low value masks more tokens.",
    )
    bapo_target: float = Field(
        1.0,
        gt=0,
        description="Loss bapo: the clip bounds of a batch are moved until its positive contributions are this many "
        "times its negative ones. A larger one clips less of what raises probabilities.",
    )
    bapo_lower: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Loss bapo: highest value that the lower clip bound of the ratio may take. A higher one lets the "
        "search leave out more negative tokens.",
    )
    bapo_lower_step: float = Field(
        0.05,
        gt=0,
        description="Loss bapo: increment by which the lower clip bound is raised in its search. A small step needs "
        "more sums over all ranks.",
    )
    bapo_upper: float = Field(
        3.0,
        ge=1,
        description="Loss bapo: highest value that the upper clip bound of the ratio may take. A higher one lets "
        "probabilities rise more in a step.",
    )
    bapo_upper_step: float = Field(
        0.1,
        gt=0,
        description="Loss bapo: increment by which the upper clip bound is raised in its search. A small step needs "
        "more sums over all ranks.",
    )
    step_scale: str = Field(
        "",
        description="Factor on the learning rate of each step: root_ess (square root of the effective sample share "
        "of the sequences, so that stale batches move the policy less), or yours as package.module:function. "
        "Empty: 1.",
    )
    distillation: str = Field(
        "",
        description="Advantage of each token from the log-probability that the sample's teacher ([teacher.NAME]) gives "
        "it, added to that of the reward: reverse_kl, or yours as package.module:function. All samples are computed "
        "then, also those whose reward teaches nothing. Empty: none.",
    )
    distillation_coef: float = Field(
        1.0,
        gt=0,
        description="Factor on the advantage of algorithm.distillation. A high value follows the teacher more than the "
        "reward.",
    )
    distillation_discount: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Factor per token with which later tokens count in the advantage of algorithm.distillation. A "
        "high value credits a token with more of what follows, with more variance; 0: with its own log-ratio alone.",
    )
    divergence: str = Field(
        "",
        description="Divergence of the policy from a teacher at each token, added to the loss: forward_kl, reverse_kl, "
        "jensen_shannon, or yours as package.module:function. It is over the whole vocabulary where the learner holds "
        "the teacher (teacher.NAME.where = 'learner') or the policy teaches itself (algorithm.hint). Where scorers ask "
        "the teacher it is over the teacher's teacher.NAME.top_k likeliest ids: forward_kl, or yours. All samples are "
        "computed then, also those whose reward teaches nothing. Empty: none.",
    )
    divergence_coef: float = Field(
        1.0,
        gt=0,
        description="Factor on algorithm.divergence in the loss. A high value follows the teacher more than the "
        "reward.",
    )
    divergence_mix: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Divergence jensen_shannon: the teacher's share of the mixture that teacher and policy are "
        "compared with. A low value is like the forward KL, a high one like the reverse.",
    )
    hint: str = Field(
        "",
        description="Prompt under which the policy is its own teacher for algorithm.divergence: a text in which "
        "{prompt} stands for the row's prompt (of a chat, the last message of its user), {label} for its reference "
        "answer, {hint} for its field data.hint_key and {feedback} for what the verifier said of the response. Empty: "
        "the teacher is a model that the learner holds.",
    )


# --- critic -----------------------------------------------------------------------------------------------------------


class CriticSection(Section):
    """The critic: the value model of an advantage estimator that needs one, such as `gae`. Betas, weight decay and
    dtypes are those of the learner."""

    lr: float = Field(
        1e-5,
        gt=0,
        description="AdamW learning rate of the critic; betas and weight decay are the learner's. Too high makes "
        "values jump, too low leaves advantages noisy.",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount factor per token. Below 1, late rewards count less.")
    lam: float = Field(
        0.95,
        ge=0,
        le=1,
        description="Lambda of GAE: 0 trusts the critic's values alone (low variance, the critic's bias), 1 the "
        "rewards alone.",
    )
    value_clip: float = Field(
        0.2,
        ge=0,
        description="PPO's value clip: a token's value gets no gradient beyond this distance from its value before the "
        "batch's first optimizer step; 0: no clip. A low value makes the critic follow more slowly.",
    )
    whiten: bool = Field(
        True,
        description="Subtract the mean of the batch's advantages and divide by their standard deviation, which takes "
        "two sums over all ranks. Without it, the size of a step depends on the scale of the rewards.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the per-token KL(policy || starting policy) (k1) that is subtracted from rewards "
        "at delivery. Above 0: a frozen copy of the model and two more forward passes; a high value slows "
        "learning.",
    )
    grad_clip: float = Field(
        1.0,
        gt=0,
        description="Largest gradient norm of the critic; larger gradients are scaled down to it. A low value slows "
        "steps with large gradients.",
    )
    warmup_batches: int = Field(
        0,
        ge=0,
        description="Batches at the start of the run that train the critic alone and leave the policy unchanged. More "
        "give better first advantages, and are generated for the critic alone.",
    )


# --- low-rank adapter -------------------------------------------------------------------------------------------------


class LoraSection(Section):
    """A low-rank adapter; `lora.rank = 0` trains all parameters instead."""

    rank: int = Field(
        0,
        ge=0,
        description="Rank of the low-rank adapter that is trained instead of the model; 0: full training. Each "
        "parameter of the adapter takes 12 bytes, and of the model 4 or less instead of 16; a low rank learns less.",
    )
    alpha: float = Field(
        32.0,
        gt=0,
        description="Scale of the adapter: its output is multiplied by alpha / rank. A high value makes steps "
        "larger, as a learning rate does.",
    )
    targets: list[str] = Field(
        [],
        description="Linear layers that get an adapter, by the last part of their names, such as q_proj; empty: all. "
        "Fewer are faster and learn less.",
    )
    embedding: bool = Field(
        False,
        description="Also train the input embedding and the output head whole. It takes 12 bytes for each of their "
        "parameters, and with a KL term a frozen second copy of the model.",
    )

    base: Literal["fp32", "bf16", "nf4"] = Field(
        "fp32",
        description="Form of the frozen weights: fp32 (4 bytes each), bf16 (2 bytes; for folders in bfloat16), or nf4 "
        "(half a byte in linear layers, by bitsandbytes; rounds them, and engines sample from the rounded ones).",
    )

    @property
    def is_set(self) -> bool:
        return self.rank > 0

    @property
    def base_is_frozen(self) -> bool:
        """Whether only the adapter is trained, so that the model without it is the starting policy, the KL
        reference."""
        return self.is_set and not self.embedding

    @property
    def workers_have_base(self) -> bool:
        """Whether the frozen weights are those of the model's files, which workers have."""
        return self.base != "nf4"


def layers_to_adapt(linears: Iterable[str], section: LoraSection) -> list[str]:
    """Names among `linears`, a model's linear layers, that get an adapter. Raises ConfigError for an unknown target."""
    by_part: dict[str, list[str]] = {}
    for name in linears:
        by_part.setdefault(name.rpartition(".")[2], []).append(name)
    if unknown := sorted(set(section.targets) - by_part.keys()):
        refuse(
            "lora.targets",
            section.targets,
            f"names {unknown[0]!r}, which is no linear layer of the model",
            f"use {', '.join(sorted(by_part)) or 'a model that has some'}",
        )
    return [name for part in section.targets or by_part for name in by_part[part]]


def check_base(section: LoraSection, dtype: str) -> None:
    """Refuse `lora.base` = "bf16" for a model whose files have weights of another type, `dtype`: workers add the
    adapter to the files' weights, which are not rounded. Raises ConfigError."""
    if section.base == "bf16" and dtype != "bfloat16":
        refuse(
            "lora.base",
            section.base,
            f"rounds the model's {dtype or 'unnamed'} weights, and workers add the adapter to those as they are",
            'use "fp32" or "nf4", or save the model in bfloat16',
        )


def check_lora(section: LoraSection, master_weights: str = "fp32") -> None:
    if section.is_set and master_weights != "fp32":
        refuse(
            "learner.master_weights",
            master_weights,
            "is for a model that is trained whole, and lora.rank trains an adapter",
            "leave it out, and set lora.base for the frozen weights",
        )
    if section.targets and not section.is_set:
        refuse(
            "lora.targets",
            section.targets,
            "says what has an adapter, and lora.rank = 0 trains none",
            "set lora.rank, or leave it out",
        )
    if section.base != "fp32" and not section.is_set:
        refuse(
            "lora.base",
            section.base,
            "is the form of weights under an adapter, and lora.rank = 0 trains none",
            "set lora.rank, or leave it out",
        )
    if section.embedding and not section.is_set:
        refuse(
            "lora.embedding",
            True,
            "trains the embedding beside an adapter, and lora.rank = 0 trains none",
            "set lora.rank, or leave it out: without one all is trained",
        )

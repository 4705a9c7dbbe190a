"""What a training step minimises, and what happens to stale tokens."""

from typing import Literal

from pydantic import Field

from april.config.section import Section


class AlgorithmSection(Section):
    preset: Literal["grpo", "dapo", "gspo"] | None = Field(
        None, description="sets what the paper sets; keys that are given win"
    )
    advantage: str = Field(
        "grpo",
        description="advantage estimator: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, opob (VCPO's "
        "baseline), gae (a critic's), or yours as package.module:function",
    )
    loss: str = Field(
        "ppo", description="policy loss: ppo, gspo, gspo_token, cispo, bapo, or yours as package.module:function"
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="ratio clipped below 1 - this; 1: no lower bound")
    clip_high: float = Field(0.28, gt=0, description="ratio clipped above 1 + this")
    dual_clip: float | None = Field(
        None, gt=1, description="a negative advantage counts at most this many times (ppo); none: no bound"
    )
    normalisation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="what a token weighs in the loss of the global batch"
    )
    constant_tokens: int | None = Field(
        None, ge=1, description="length that normalisation = 'constant' divides by; none: sampling.max_response_tokens"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of KL(policy || starting policy); 0: no reference is loaded")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="how that KL is estimated")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    behaviour_coef: float = Field(
        0.3, ge=0, description="weight of (log pi - log behaviour)^2 / 2, which draws stale tokens back; 0 on-policy"
    )
    proximal: Literal["behaviour", "recomputed", "interpolated"] = Field(
        "recomputed",
        description="the loss clips its ratio around what sampled the token, the policy before the step, "
        "or one version before it",
    )
    corrections: tuple[str, ...] = Field(
        ("truncated_sequence",),
        description="weights of stale tokens between behaviour and proximal policy, multiplied: truncated, "
        "truncated_sequence, icepop, geometric, on_policy_only, vespo, m2po, dppo_tv, or yours as "
        "package.module:function",
    )
    truncation: float = Field(2.0, gt=0, description="truncated: largest importance weight of a token")
    sequence_truncation: float = Field(
        2.0, gt=0, description="truncated_sequence: largest importance weight of a response"
    )
    icepop_low: float = Field(0.5, ge=0, description="icepop: tokens with a smaller ratio are masked")
    icepop_high: float = Field(5.0, gt=0, description="icepop: tokens with a larger ratio are masked")
    geometric_low: float = Field(0.99, ge=0, description="geometric: responses with a smaller mean ratio are masked")
    geometric_high: float = Field(1.01, gt=0, description="geometric: responses with a larger mean ratio are masked")
    vespo_k_positive: float = Field(2.0, gt=0, description="vespo: power of a response's ratio, advantage at least 0")
    vespo_lambda_positive: float = Field(3.0, gt=0, description="vespo: decay in that ratio, advantage at least 0")
    vespo_k_negative: float = Field(3.0, gt=0, description="vespo: power of the ratio, advantage below 0")
    vespo_lambda_negative: float = Field(2.0, gt=0, description="vespo: decay in the ratio, advantage below 0")
    m2po_threshold: float = Field(
        0.04, gt=0, description="m2po: mean of (log ratio)^2 below which the tokens that are left stay"
    )
    dppo_rise: float = Field(
        0.15, gt=0, le=1, description="dppo_tv: masked if better than average and this much likelier than when sampled"
    )
    dppo_fall: float = Field(
        0.15, gt=0, le=1, description="dppo_tv: masked if worse than average and this much less likely"
    )
    bapo_target: float = Field(
        1.0, gt=0, description="bapo: bounds are moved until positive contributions are this many times the negative"
    )
    bapo_lower: float = Field(0.9, gt=0, le=1, description="bapo: highest lower bound of the ratio")
    bapo_lower_step: float = Field(0.05, gt=0, description="bapo: what the lower bound is raised by at a time")
    bapo_upper: float = Field(3.0, ge=1, description="bapo: highest upper bound of the ratio")
    bapo_upper_step: float = Field(0.1, gt=0, description="bapo: what the upper bound is raised by at a time")
    step_scale: str = Field(
        "",
        description="what the learning rate of a step is multiplied by: root_ess, or yours as "
        "package.module:function; empty: 1",
    )

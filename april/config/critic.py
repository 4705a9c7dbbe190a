"""The keys of `[critic]`: the value model of advantages that need one, such as `gae`."""

from pydantic import Field

from april.config.section import Section


class CriticSection(Section):
    """The value model of advantages that need one, such as `gae`. Betas, weight decay and dtypes are the learner's."""

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
        description="Distance from its value at delivery beyond which a token's value gets no gradient that moves it "
        "further, as PPO clips values; 0: no clip. A low value makes the critic follow more slowly.",
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
        1.0, gt=0, description="Largest gradient norm of the critic; larger gradients are scaled down to it."
    )
    warmup_batches: int = Field(
        0,
        ge=0,
        description="Batches at the start of the run that train the critic alone and leave the policy unchanged.",
    )

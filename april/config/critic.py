"""The keys of `[critic]`: a value model that says what reward is still to come, for advantages that ask for one."""

from pydantic import Field

from april.config.section import Section


class CriticSection(Section):
    """Of an advantage that needs values, such as `gae`; betas, weight decay and types are the learner's."""

    lr: float = Field(1e-5, gt=0, description="AdamW learning rate of the critic")
    gamma: float = Field(1.0, gt=0, le=1, description="what the reward to come is worth a token earlier")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of GAE: 0 trusts the values alone, 1 the rewards alone")
    value_clip: float = Field(
        0.2,
        ge=0,
        description="values that have left those at delivery by more are held; 0: none are",
    )
    whiten: bool = Field(True, description="advantages less their mean, over their deviation, in the batch")
    kl_coef: float = Field(
        0.0, ge=0, description="KL(policy || starting policy) of a token by k1, taken from its reward at delivery"
    )
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm of the critic")
    warmup_batches: int = Field(0, ge=0, description="batches at the start that train the critic alone")

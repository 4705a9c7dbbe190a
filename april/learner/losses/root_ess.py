"""The step of VCPO: a learning rate that heeds how many responses a batch really has."""

from collections.abc import Mapping


def root_ess(figures: Mapping[str, float]) -> float:
    """The root of the effective sample size of the responses' ratios, as a share of the responses.

    VCPO, "Stable Asynchrony", arXiv 2602.17616: its scaling for AdamW, as in mit-han-lab/vcpo. The ratios are the
    products pi / mu, not truncated, of the responses that are trained. VCPO's baseline is `opob`.
    """
    return figures.get("sequence_ess", 1.0) ** 0.5

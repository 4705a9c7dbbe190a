"""VCPO's step scale: the learning rate follows the effective number of responses of a batch."""

from collections.abc import Mapping


def root_ess(figures: Mapping[str, float]) -> float:
    """sqrt(ESS / n), ESS the effective sample size of the ratios pi / mu of the n trained responses; 0 to 1.

    VCPO, "Stable Asynchrony", arXiv 2602.17616: its scaling for AdamW, as in mit-han-lab/vcpo. A response's ratio is
    the product over its tokens, not truncated. VCPO's baseline is `opob`.
    """
    return figures.get("sequence_ess", 1.0) ** 0.5

"""How soon what keeps dying is started again: at once, and then so late that a fault of a minute uses no budget up."""

LONGEST_DELAY_S = 60.0
"""between two starts, and before the last of those that are allowed"""
STEADY_S = 120.0
"""what has worked for so long since its start has left behind what made it die"""
DOUBLINGS = 10
"""after which a delay grows no further"""


def delay_s(restart: int, most: int) -> float:
    """Seconds before restart number `restart`, from 1, of `most` that may bring nothing.

    They grow from a second, and are halved backwards from the last one's: of 3 they are 0, 30 and 60.
    """
    if restart <= 1:
        return 0.0
    growing = 2.0 ** min(restart - 1, DOUBLINGS) - 1
    return min(LONGEST_DELAY_S, max(growing, LONGEST_DELAY_S * 2.0 ** (restart - most)))

"""A verifier's score becomes the message that ends the lease."""

from april import wire
from april.workers.rewards.messages import Score
from april.workers.scoring import closing


def test_a_failed_score_gives_the_sample_back_and_is_never_a_zero():
    assert closing(Score(7, None, "it fell over"), length=5) == wire.GiveBack(7, 5, "scoring_failed", "it fell over")
    assert closing(Score(7, None), length=5) == wire.GiveBack(7, 5, "scoring_failed", "no reward")
    assert closing(Score(7, 0.0), length=5) == wire.Scored(7, [0.0], [{}]), "a reward of zero is one"

"""What a verifier gets of a response; its score becomes the message that ends the lease."""

import msgspec
import numpy as np

from april import config as configuration
from april import wire
from april.data.tokenizer import Tokenizer
from april.learner.policy.warm_start import build_tokenizer
from april.workers.rewards.messages import Score
from april.workers.scoring import LeasedTask, Scoring, closing


class Pool:
    """Keeps what it is given to score."""

    def __init__(self):
        self.texts = []

    def put(self, item):
        self.texts.append(item.response)

    def submit_group(self, key, verifier, items):
        self.texts += [item.response for item in items]


def test_verifiers_get_special_tokens_unless_they_are_named_otherwise(config_file, tmp_path):
    inner = build_tokenizer()
    inner.add_special_tokens({"additional_special_tokens": ["</think>"]})
    inner.save_pretrained(tmp_path / "special")
    tokenizer = Tokenizer(tmp_path / "special")
    plain = ["--reward.without_special_tokens", '["exact"]']
    scoring = Scoring(configuration.load(config_file, plain), tokenizer, start_now=False)
    scoring.pool = Pool()
    prompt, first, second = (tokenizer.encode_prompt(text) for text in ("1+1=", "3</think>", "2<eos>"))
    grant = wire.Grant(
        1, task_index=0, index=0, scoring=True, max_new_tokens=9, seed=0, finish_reason="stop", hand_over=False,
        group_scored=[], turns=0, turn_start=0, state=b"", stop_token_ids=[],
    )  # fmt: skip
    for reward in ("regex", "exact"):
        task = wire.Task(0, False, label="2", reward=reward, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        scoring.submit(LeasedTask(grant, task, [prompt, first, second]), "stop")
    assert scoring.pool.texts == ["3</think>2", "32"]
    scoring.pool.texts.clear()
    grouped = msgspec.structs.replace(grant, group_scored=["stop", "stop"])
    task = wire.Task(0, False, label="2", reward="group:mine:all", temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    whole = np.concatenate([first, second])
    scoring.submit(LeasedTask(grouped, task, [prompt, whole, second]), "stop")
    assert scoring.pool.texts == ["3</think>2", "2"]


def test_a_failed_score_gives_the_sample_back_and_is_never_a_zero():
    assert closing(Score(7, None, "it fell over"), length=5) == wire.GiveBack(7, 5, "scoring_failed", "it fell over")
    assert closing(Score(7, None), length=5) == wire.GiveBack(7, 5, "scoring_failed", "no reward")
    assert closing(Score(7, 0.0), length=5) == wire.Scored(7, [0.0], [{}]), "a reward of zero is one"

"""What a verifier gets of a response; its score becomes the message that ends the lease."""

import numpy as np
from msgspec.structs import replace

from april import config as configuration
from april import wire
from april.data.tokenizer import Tokenizer
from april.learner.policy.arithmetic import build_tokenizer
from april.workers.rewards.messages import Score
from april.workers.scoring import LeasedTask, Scoring, closing, token_values
from tests.support.reward_scores import collect, grant_of, task_of


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
    grant = grant_of(1)
    for reward in ("regex", "exact"):
        scoring.submit(LeasedTask(grant, task_of(reward), [prompt, first, second]), "stop")
    assert scoring.pool.texts == ["3</think>2", "32"]
    scoring.pool.texts.clear()
    grouped = grant_of(1, group_scored=["stop", "stop"])
    whole = np.concatenate([first, second])
    scoring.submit(LeasedTask(grouped, task_of("group:exact"), [prompt, whole, second]), "stop")
    assert scoring.pool.texts == ["3</think>2", "2"]


def test_whoever_answers_in_the_brokers_place_does_not_choose_what_a_worker_imports(config_file, tmp_path, monkeypatch):
    own, theirs = (f"{name}_{tmp_path.name.replace('-', '_')}" for name in ("own", "theirs"))
    for name in (own, theirs):
        touch = f"open({str(tmp_path / name)!r}, 'w')"
        (tmp_path / f"{name}.py").write_text(f"{touch}\ndef f(response, label): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = configuration.load(config_file, ["--data.reward", f"{own}:f", "--reward.processes", "1"])
    scoring = Scoring(config, Tokenizer(config.model.path), start_now=False)
    prompt = scoring.tokenizer.encode_prompt("1+1=")
    leased = {1: f"{theirs}:f", 2: "os:system", 3: f"group:{theirs}:f", 4: f"trl:{theirs}:f", 5: f"{own}:f", 6: "exact"}
    for lease_id, reward in leased.items():
        groups = ["stop"] if reward.startswith("group:") else []
        scoring.submit(LeasedTask(grant_of(lease_id, groups), task_of(reward), [prompt, prompt]), "stop")
    assert scoring.pending == len(leased)
    scores = collect(scoring, len(leased))
    scoring.close()
    assert {key for key, score in scores.items() if "not in the configuration" in (score.error or "")} == {1, 2, 3, 4}
    assert scores[5].reward == 1.0 and scores[6].error is None
    assert (tmp_path / own).exists() and not (tmp_path / theirs).exists()


GRADES = """
def columns(response, label, tokens, turns):
    lengths = {"tokens": tokens, "turns": turns, "other": tokens + 1}
    value = float("nan") if label == "nan" else 0.5
    return 1.0, {}, {"grade": [value] * lengths.get(label, tokens)}
"""


def test_token_scores_are_for_each_token_or_turn_and_anything_else_is_an_error(config_file, tmp_path, monkeypatch):
    (tmp_path / "grades_of_tokens.py").write_text(GRADES)
    monkeypatch.syspath_prepend(tmp_path)
    config = configuration.load(config_file, ["--reward.name", "grades_of_tokens:columns", "--reward.processes", "1"])
    scoring = Scoring(config, Tokenizer(config.model.path), start_now=False)
    prompt = scoring.tokenizer.encode_prompt("1+1=")
    labels = ["tokens", "turns", "other", "nan"]
    for lease_id, label in enumerate(labels):
        task = replace(task_of("grades_of_tokens:columns"), label=label)
        grant = replace(grant_of(lease_id), turns=1, turn_start=2)
        scoring.submit(LeasedTask(grant, task, [prompt, prompt]), "stop")
    scores = collect(scoring, len(labels))
    scoring.close()
    ended = {label: closing(scores[lease_id]) for lease_id, label in enumerate(labels)}
    assert [column["grade"] for column in ended["tokens"].columns] == [len(prompt)]
    assert [column["grade"] for column in ended["turns"].columns] == [2]
    assert np.frombuffer(token_values(scores[1]), np.float32).tolist() == [0.5, 0.5]
    assert ended["other"].cause == ended["nan"].cause == "scoring_failed"
    assert ended["other"].error.endswith(f"5 token scores 'grade' for {len(prompt)} tokens or 2 turns")
    assert ended["nan"].error.endswith("a token score 'grade' that is not finite")


def test_a_failed_score_gives_the_sample_back_and_is_never_a_zero():
    assert closing(Score(7, None, "it fell over"), length=5) == wire.GiveBack(7, 5, "scoring_failed", "it fell over")
    assert closing(Score(7, None), length=5) == wire.GiveBack(7, 5, "scoring_failed", "no reward")
    assert closing(Score(7, 0.0), length=5) == wire.Scored(7, [0.0], [{}]), "a reward of zero is one"

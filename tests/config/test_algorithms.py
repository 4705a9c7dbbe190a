"""A source may have an algorithm of its own: keys over those of the run, refused with the source in the sentence."""

import tomllib

import pytest

from april.config import Config, ConfigError
from april.config.algorithms import algorithm_of, algorithms
from april.config.checks import check_algorithms
from april.config.teachers import check_teachers, teacher_of
from april.trainers.rollouts.run import check_needs_no_critic

DISTILLED = {"advantage": "no_reward", "distillation": "reverse_kl", "corrections": ["m2po"]}


def made(own, **sections):
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", "algorithm": own}]
    tree = {"model": {"path": "."}, "data": {"sources": sources}, "reward": {"where": "scorer"}}
    return Config.model_validate(tree | {"teacher": {"big": {"path": "."}}} | sections)


def test_a_source_s_keys_lie_over_those_of_the_run():
    config = made(DISTILLED, algorithm={"preset": "gspo"})
    check_algorithms(config)
    check_teachers(config)
    again = Config.model_validate(tomllib.loads(config.to_toml()))
    assert again == config
    run, own = algorithms(again)
    assert (run, own) == (algorithm_of(again, 0), algorithm_of(again, 1))
    assert (run.advantage, run.distillation, own.advantage, own.distillation) == ("grpo", "", "no_reward", "reverse_kl")
    assert own.corrections == ("m2po",) and own.loss == run.loss == "gspo"
    assert [teacher_of(config, source) for source in (0, 1)] == ["", "big"], "a teacher is asked only where it teaches"
    assert algorithms(config.supervised()) == [config.supervised().algorithm]


REFUSED = {
    "'data.sources.1.algorithm.lr' = 0.1 is no key of": ({"lr": 0.1}, {}),
    "'data.sources.1.algorithm.clip_low' = 2 is refused: it should be less": ({"clip_low": 2}, {}),
    "'data.sources.1.algorithm.preset' = 'dapo' is one for the whole run": ({"preset": "dapo"}, {}),
    "of data.sources.1: key 'algorithm.dual_clip' = 3.0 is for": ({"dual_clip": 3.0, "loss": "gspo"}, {}),
    "of data.sources.1: .*'los'": ({"loss": "los"}, {}),
    "of data.sources.1: .* discards groups by rewards": (DISTILLED, {"schedule": {"dynamic_sampling": True}}),
    "'gae' takes a whole batch, and": ({"clip_low": 0.1}, {"algorithm": {"advantage": "gae"}}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_source_cannot_have_is_refused_with_its_name(why):
    own, sections = REFUSED[why]
    with pytest.raises(ConfigError, match=why):
        check_algorithms(made(own, **sections))


def test_a_trainer_of_one_s_own_has_its_own_algorithm():
    with pytest.raises(ConfigError, match=r"'data.sources.1.algorithm' = .* is for April's learner"):
        check_needs_no_critic(made(DISTILLED))

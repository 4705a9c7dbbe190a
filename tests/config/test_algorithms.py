"""A source may have an algorithm of its own: keys over those of the run, refused with the source in the sentence."""

import sys
import tomllib

import pytest

from april.broker.plan import advice
from april.config import Config, ConfigError, load
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
    "'data.sources.1.algorithm.turn_discount' = 0.5 is not that of algorithm, and one critic serves both": (
        {"turn_discount": 0.5, "turn_reward": "stars"},
        {"algorithm": {"advantage": "gae", "turn_reward": "stars"}},
    ),
    "'critic.gamma' = 0.9 is of a critic, which .* and data.sources.1.algorithm.advantage = 'rloo'": (
        {"advantage": "rloo"},
        {"critic": {"gamma": 0.9}},
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_source_cannot_have_is_refused_with_its_name(why):
    own, sections = REFUSED[why]
    with pytest.raises(ConfigError, match=why):
        check_algorithms(made(own, **sections))


SELF_TAUGHT = {"divergence": "forward_kl"}
UNFIT = {
    "'data.sources.0.teacher' = 'big' is never asked": [{"teacher": "big"}, {"algorithm": DISTILLED}],
    "'teacher' = 'big' is a teacher that is never asked": [{"algorithm": {"clip_low": 0.1}}, {}],
    "'data.sources.1.algorithm.distillation' = .* compares whole": [{}, {"algorithm": DISTILLED}],
}


def of_sources(sources, **sections):
    data = {"sources": [{"path": f"{number}.jsonl"} | source for number, source in enumerate(sources)]}
    return made({}, data=data, **sections)


@pytest.mark.parametrize("why", UNFIT)
def test_a_teacher_is_for_sources_that_distil(why):
    with pytest.raises(ConfigError, match=why):
        check_teachers(of_sources(UNFIT[why], sampling={"top_k": 8} if "compares" in why else {}))


def test_only_sources_that_distil_name_one_of_several_teachers():
    two = {"big": {"path": "."}, "small": {"path": "."}}
    distilled = [{"algorithm": DISTILLED, "teacher": name} for name in two]
    check_teachers(config := of_sources([{}, *distilled], teacher=two))
    assert [teacher_of(config, source) for source in range(3)] == ["", "big", "small"]


def test_only_sources_with_a_divergence_have_hints():
    sections = {"teacher": {}, "algorithm": {"hint": "{hint} {prompt}"}}
    check_teachers(of_sources([{}, {"algorithm": SELF_TAUGHT, "hint_key": "solution"}], **sections))
    with pytest.raises(ConfigError, match=r"'algorithm\.hint' = .*1\.jsonl"):
        check_teachers(of_sources([{}, {"algorithm": SELF_TAUGHT}], **sections))


def test_the_advice_about_stale_tokens_is_for_the_algorithms_in_use():
    bare = {"corrections": [], "behaviour_coef": 0.0}
    found = advice(made(bare, schedule={"max_staleness": 2, "overlap": True}))
    assert found.startswith("data.sources.1.algorithm.corrections = [] corrects no stale token")
    corrected = {"corrections": ["m2po"]}
    assert not advice(
        of_sources([{"algorithm": corrected}], algorithm=bare, schedule={"max_staleness": 2, "overlap": True})
    )


def test_submitted_prompts_are_of_no_source():
    with pytest.raises(ConfigError, match="'submitted'"):
        check_algorithms(of_sources([{"algorithm": DISTILLED}]).model_copy(update={"data": submitted()}))


def submitted():
    sources = [{"path": "a.jsonl", "algorithm": DISTILLED}]
    return Config.model_validate({"model": {"path": "."}, "data": {"source": "submitted", "sources": sources}}).data


def test_a_process_without_losses_imports_none_of_a_source(config_file):
    (config_file.parent / "loss_of_a_source.py").write_text("def loss(context, *, beta=1.0): ...\n")
    source = f'{{path = "{load(config_file).data.path}", algorithm = {{loss = "loss_of_a_source:loss", beta = 2}}}}'
    words = ["--data.path", "none", "--data.sources", f"[{source}]"]
    for own_parts, imported in ((["schedule.kind"], False), (["algorithm.loss"], True)):
        assert algorithm_of(load(config_file, words, own_parts=own_parts), 0).beta == 2
        assert ("loss_of_a_source" in sys.modules) == imported


def test_a_trainer_of_one_s_own_has_its_own_algorithm():
    with pytest.raises(ConfigError, match=r"'data.sources.1.algorithm'"):
        check_needs_no_critic(made(DISTILLED))

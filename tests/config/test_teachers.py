"""Keys of teachers that do not fit together are refused with a sentence; a source names its teacher."""

from contextlib import nullcontext

import pytest

from april.config import Config, ConfigError, load
from april.config.advantages import check_advantage
from april.config.checks import check_algorithms
from april.config.teachers import check_teachers, teacher_of
from april.learner.backends.entry import BackendEntry
from april.learner.backends.fsdp.entry import FSDPEntry


def made(**sections):
    tree = {"model": {"path": "."}, "data": {"path": "rows.jsonl"}, "reward": {"where": "scorer"}}
    return Config.model_validate(tree | {"teacher": {"big": {"path": "."}}} | sections)


TWO = {"big": {"path": "."}, "small": {"path": "."}}
SOURCES = {"sources": [{"path": "a.jsonl", "teacher": "small"}, {"path": "b.jsonl", "teacher": "big"}]}
HELD = {"big": {"path": ".", "where": "learner"}}
TOP = {"big": {"path": ".", "top_k": 20}}
HINTED = {"divergence": "forward_kl", "hint": "{prompt} ({label})"}
REFUSED = {
    "'reward.where' = 'worker' has nobody to ask": {"reward": {"where": "worker"}},
    "'teacher' = .* has several for one source": {"teacher": TWO},
    "'data.sources.0.teacher' = '' leaves the teacher open": {
        "teacher": TWO, "data": {"sources": [{"path": "a.jsonl"}]},
    },
    "'data.sources.0.teacher' = 'large' is no": {"data": {"sources": [{"path": "a.jsonl", "teacher": "large"}]}},
    "'teacher.big.url' = 'localhost' is no address": {"teacher": {"big": {"path": ".", "url": "localhost"}}},
    "'algorithm.distillation' = 'reverse_kl' has no teacher": {
        "teacher": {}, "algorithm": {"distillation": "reverse_kl"},
    },
    "'teacher.big.where' = 'learner' is for a model folder": {
        "teacher": {"big": {"path": ".", "where": "learner", "kind": "vllm", "url": "http://localhost:1"}}
    },
    "'teacher.big.where' = 'learner' has one teacher for all": {"teacher": TWO | HELD, "data": SOURCES},
    "'teacher.big.where' = 'learner' teaches nothing": {"teacher": HELD},
    "'algorithm.divergence' = 'forward_kl' has no teacher that": {"algorithm": {"divergence": "forward_kl"}},
    "'algorithm.divergence' = 'forward_kl' compares whole": {
        "algorithm": {"divergence": "forward_kl"}, "sampling": {"top_k": 8}, "teacher": HELD,
    },
    "'algorithm.divergence' = 'reverse_kl' takes whole distributions, .* use 'forward_kl', or": {
        "algorithm": {"divergence": "reverse_kl"}, "teacher": TOP,
    },
    "'teacher.big.top_k' = 20 is asked for, and no algorithm.divergence": {"teacher": TOP},
    "'teacher.big.top_k' = 20 is what scorers ask for": {
        "teacher": {"big": HELD["big"] | TOP["big"]}, "algorithm": {"divergence": "forward_kl"},
    },
    "'algorithm.hint' = .* has to say once": {"teacher": {}, "algorithm": HINTED | {"hint": "{label}"}},
    "'algorithm.hint' = .* nothing says which field of rows.jsonl": {
        "teacher": {}, "algorithm": HINTED | {"hint": "{hint} {prompt}"},
    },
    "'data.hint_key' = .* is a field that every row must have": {
        "teacher": {}, "algorithm": HINTED, "data": {"path": "rows.jsonl", "hint_key": "solution"},
    },
    "'algorithm.hint' = .* is the prompt alone": {"teacher": {}, "algorithm": HINTED | {"hint": " {prompt} "}},
    "'algorithm.hint' = .* names {answer}, which no row has": {
        "teacher": {}, "algorithm": HINTED | {"hint": r"{prompt} \boxed{x} {answer}"},
    },
    "'algorithm.hint' = .* teaches nothing": {"teacher": {}, "algorithm": HINTED | {"divergence": ""}},
    "'algorithm.hint' = .* makes the policy the teacher": {"teacher": HELD, "algorithm": HINTED},
    "'algorithm.hint' = .* the trainer writes the prompts": {
        "teacher": {}, "algorithm": HINTED, "data": {"source": "submitted"},
    },
    "'algorithm.hint' = .* ranks that share rows": {
        "teacher": {}, "algorithm": HINTED, "learner": {"ranks": 2, "context_parallel": 2},
    },
    "'algorithm.distillation' = 'reverse_kl' compares whole": {
        "algorithm": {"distillation": "reverse_kl"}, "sampling": {"top_k": 8},
    },
}  # fmt: skip


@pytest.mark.parametrize("section", [{"dynamic_sampling": True}, {"group_filter": "zero_spread"}])
def test_groups_are_not_discarded_by_rewards_that_teach_nothing(section):
    for advantage, refused in (("no_reward", True), ("grpo", False)):
        config = made(algorithm={"advantage": advantage}, schedule=section)
        with pytest.raises(ConfigError, match="discards groups by rewards") if refused else nullcontext():
            check_advantage(config)


def test_a_teacher_alone_takes_groups_of_one_sample():
    for advantage, refused in (("no_reward", False), ("grpo", True)):
        sections = {"algorithm": {"advantage": advantage, "distillation": "reverse_kl"}}
        config = made(**sections, schedule={"n_samples_per_prompt": 1})
        with pytest.raises(ConfigError, match="nothing to compare") if refused else nullcontext():
            check_algorithms(config)


def test_an_algorithm_that_no_source_uses_may_compare_samples_where_groups_have_one():
    own = {"algorithm": {"advantage": "no_reward", "distillation": "reverse_kl"}}
    for second, refused in (({"path": "b"} | own, False), ({"path": "b"}, True)):
        config = made(data={"sources": [{"path": "a"} | own, second]}, schedule={"n_samples_per_prompt": 1})
        with pytest.raises(ConfigError, match="nothing to compare") if refused else nullcontext():
            check_algorithms(config)


def test_no_teacher_is_one_of_images_that_agents_send(monkeypatch, policy_folder):
    monkeypatch.setattr("april.learner.loading.loads_tower", lambda path: True)
    sections = {
        "model": {"path": policy_folder},
        "agent": {"command": ["true"]},
        "algorithm": {"divergence": "forward_kl"},
    }
    FSDPEntry.check_model(made(**sections, teacher={}))
    for teacher in (HELD, TOP):
        with pytest.raises(ConfigError, match="images that agents send"):
            FSDPEntry.check_model(made(**sections, teacher=teacher))


def test_a_hint_may_be_longer_than_a_name_of_a_file(config_file):
    hint = "{prompt} " + "because " * 125
    assert load(config_file, ["--algorithm.divergence", "forward_kl", "--algorithm.hint", hint]).algorithm.hint == hint
    with pytest.raises(ConfigError, match=r"'data.path' = 'a+/b'"):
        load(config_file, ["--data.path", "a" * 1000 + "/b"])


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_fit_is_refused(why):
    with pytest.raises(ConfigError, match=why):
        check_teachers(made(**REFUSED[why]))


def test_a_source_s_samples_have_its_teacher_or_the_only_one():
    check_teachers(made())
    assert [teacher_of(made(), source) for source in (0, 1)] == ["big", "big"]
    several = made(teacher=TWO, data=SOURCES)
    check_teachers(several)
    assert [teacher_of(several, source) for source in (0, 1)] == ["small", "big"]
    assert teacher_of(made(teacher={}), 0) == ""


def test_a_divergence_over_the_top_k_is_from_the_teachers_of_the_sources_that_have_it():
    check_teachers(made(teacher=TOP, algorithm={"divergence": "forward_kl"}))
    sources = [
        {"path": "a.jsonl", "teacher": "small", "algorithm": {"distillation": "reverse_kl"}},
        {"path": "b.jsonl", "teacher": "big", "algorithm": {"divergence": "forward_kl"}},
        {"path": "c.jsonl", "algorithm": {"advantage": "rloo"}},
    ]
    several = made(teacher=TWO | TOP, data={"sources": sources})
    check_teachers(several)
    assert [teacher_of(several, source) for source in range(3)] == ["small", "big", ""]
    sources[1]["teacher"] = "small"
    with pytest.raises(ConfigError, match=r"divergence' = 'forward_kl' .*teacher\.small\.top_k"):
        check_teachers(made(teacher={"small": {"path": "."}}, data={"sources": sources}))


def test_a_teacher_that_the_learner_holds_is_not_asked_by_scorers():
    held = made(teacher=HELD, algorithm={"divergence": "forward_kl"}, reward={"where": "worker"})
    check_teachers(held)
    assert teacher_of(held, 0) == ""
    with pytest.raises(ConfigError, match="'forward_kl'"):
        BackendEntry.check(held)

"""Keys that parts of the user's own declare: accepted, checked, written to config.toml, listed in --help."""

import sys
import tomllib

import pytest

from april import config as configuration
from april.broker.filters import CompleteGroup, GroupFilters
from april.broker.plan import make_schedule, section_of
from april.cli import main
from april.cli.simulate import read_scenario
from april.config import ConfigError
from april.learner.losses.ranks import SingleRank
from april.learner.objective import Objective

MODULE = '''
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from april.broker.schedules.rounds import ActivePartialSchedule
from april.cli.command import RUN, command
from april.config.section import Section
from april.workers.engines.in_process import InProcessEngine


class Engine(InProcessEngine):
    class Keys(Section):
        order: int = Field(2, ge=1, description="Tokens that it looks back at.")


class Schedule(ActivePartialSchedule):
    class Keys(Section):
        extra_groups: int = Field(1, ge=0, description="Groups beyond N.")


class Taken(InProcessEngine):
    class Keys(Section):
        port: int = 1


def loss(
    logprobs, proximal_logprobs, advantages, spans, clip,
    *, tau: Annotated[float, Field(gt=0, description="Its temperature.")] = 0.5,
):
    return -tau * logprobs * advantages, advantages > 9


def keep(group, *, most_right: float = 0.5):
    return "too_easy" if sum(group.accuracies) > most_right * len(group.accuracies) else None


if TYPE_CHECKING:
    from torch import Tensor


def typed_loss(logprobs: "Tensor", proximal, advantages, spans, clip) -> "tuple[Tensor, Tensor]":
    return -logprobs * advantages, advantages > 9


def typed_with_keys(logprobs: "Tensor", proximal, advantages, spans, clip, *, beta: float = 0.1):
    return -beta * logprobs * advantages, advantages > 9


@dataclass
class Loss:
    """Without a hash."""

    scale: float = 1.0

    def __call__(self, logprobs, proximal, advantages, spans, clip):
        return -self.scale * logprobs * advantages, advantages > 9


dataclass_loss = Loss()


@command(RUN)
def hello(run):
    """Greet a run."""
    print("hello", run)
    return 0


def no_command(run): ...
'''
SCENARIO = """
steps = 4
warmup_steps = 2
limit_responses = 200
schedule = { kind = "own_keys:Schedule", extra_groups = 2, rollout_batch_size = 4, n_samples_per_prompt = 2 }
lengths = { longest_tokens = 64, median_tokens = 20 }
cost = { decode_base_s = 0.01, decode_running_s = 1e-4, decode_kv_s = 0, prefill_s = 1e-5 }
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_keys.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_keys", None)


@pytest.fixture
def load(config_file):
    """load(**{"section.key": value}): the small run's configuration with these keys."""
    return lambda **keys: configuration.load(config_file, [f"--{key}={value}" for key, value in keys.items()])


ENGINE, LOSS = {"worker.engine": "own_keys:Engine"}, {"algorithm.loss": "own_keys:loss"}


def test_keys_of_own_parts_have_their_defaults_and_are_written_and_read_again(load, tmp_path):
    config = load(**ENGINE | LOSS | {"algorithm.tau": 0.25})
    assert (config.engine.order, config.algorithm.tau) == (2, 0.25)
    written = tomllib.loads(config.to_toml())
    assert written["engine"]["order"] == 2 and written["algorithm"]["tau"] == 0.25
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert configuration.load(tmp_path / "config.toml").to_toml() == config.to_toml()


@pytest.mark.parametrize("name", ["typed_loss", "dataclass_loss"])
def test_a_part_without_keys_may_have_any_annotations_and_no_hash(load, name):
    assert load(**{"algorithm.loss": f"own_keys:{name}"}).algorithm.loss == f"own_keys:{name}"


def test_keys_whose_types_only_a_checker_imports_are_of_any_type(load):
    assert load(**{"algorithm.loss": "own_keys:typed_with_keys", "algorithm.beta": 0.3}).algorithm.beta == 0.3


def test_a_configuration_with_own_keys_is_shown_without_its_secrets(load):
    assert load(**LOSS | {"algorithm.tau": 0.25}).without_secrets().algorithm.tau == 0.25


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (ENGINE | {"engine.order": 0}, "key 'engine.order' = 0 is refused: it should be greater than or equal to 1"),
        (ENGINE | {"engine.ordr": 1}, "unknown key 'engine.ordr' = 1; did you mean 'engine.order'?"),
        (LOSS | {"algorithm.tau": -1}, "key 'algorithm.tau' = -1 is refused: it should be greater than 0"),
        (LOSS | {"algorithm.tau": "x"}, "key 'algorithm.tau' = 'x' is refused"),
        ({"engine.order": 1}, "unknown key 'engine.order' = 1"),
        ({"worker.engine": "own_keys:Taken"}, "declares 'port', a key that its section has; rename it"),
    ],
)
def test_they_are_checked_by_what_the_part_declares(load, keys, said):
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert said in str(caught.value)


def test_a_process_without_the_part_s_file_takes_its_keys_as_they_are(load):
    assert load(**{"algorithm.loss": "elsewhere:loss", "algorithm.tau": 3}).algorithm.tau == 3


def test_functions_get_their_keys(load):
    config = load(
        **LOSS | {"algorithm.tau": 0.25, "schedule.group_filter": "own_keys:keep", "schedule.most_right": 0.9}
    )
    assert Objective(config, SingleRank()).policy_loss.__name__ == "loss"
    (function,) = GroupFilters(config.schedule).filters
    assert function(CompleteGroup([], [], [], [], [1.0, 0.0])) is None
    assert function(CompleteGroup([], [], [], [], [1.0, 1.0])) == "too_easy"


def test_the_help_lists_them(config_file, capsys, load):
    config = load(**LOSS)
    named = config_file.with_name("named.toml")
    named.write_text(config.to_toml())
    with pytest.raises(SystemExit):
        main(["run", str(named), "--help"])
    assert "--algorithm.tau" in (said := capsys.readouterr().out) and "Its temperature. [default 0.5]" in said


def test_a_schedule_has_its_keys_in_a_run_a_check_and_a_simulation(tmp_path, load):
    config = load(**{"schedule.kind": "own_keys:Schedule", "schedule.extra_groups": 3})
    assert make_schedule(config.schedule, None).section.extra_groups == 3
    assert section_of("own_keys:Schedule")().extra_groups == 1
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    scenario = read_scenario(tmp_path / "scenario.toml", None, [])
    assert scenario.with_keys(schedule__max_staleness=3).schedule.extra_groups == 2
    assert not hasattr(scenario.with_keys(schedule__kind="sync").schedule, "extra_groups")


def test_a_command_of_one_s_own_is_called_by_its_place(capsys):
    assert main(["own_keys:hello", "runs/x"]) == 0 and capsys.readouterr().out == "hello runs/x\n"
    assert main(["own_keys:no_command", "runs/x"]) == 2
    assert "is no command; put @command of april.cli.command above the function" in capsys.readouterr().err


def test_an_unknown_command_is_refused_with_the_most_similar_one(capsys):
    with pytest.raises(SystemExit):
        main(["statsu"])
    assert "'statsu' is no command; did you mean 'status'? `april --help` lists all" in capsys.readouterr().err

"""`auto` in a run's schedule: what is chosen, from which lengths, and that a run stays with it."""

import pytest

from april import config as configuration
from april.broker.ledger.ledger import Ledger
from april.broker.plan import ledger_rules
from april.cli import main
from april.config import ConfigError
from april.simulate.scenario import LengthsSection, Scenario
from april.simulate.trace import TracedGroup, read_trace
from april.simulate.tune import PLAIN_COST, resolve, resolve_as_recorded, tuning_scenario
from tests.support.small_journals import add_group, recorded

AUTO = {"april": "over_sampling_batch_size", "continuous": "in_flight"}
SCENARIO = """
[lengths]
family = "equal"
median_tokens = 20
[cost]
decode_base_s = 0.01
decode_running_s = 0.0
decode_kv_s = 0.0
prefill_s = 0.0
"""


@pytest.fixture(autouse=True)
def tuning_is_quick(monkeypatch):
    monkeypatch.setattr("april.simulate.tune.TUNED_RESPONSES", 200)


@pytest.fixture
def load(config_file):
    """The run of `config_file`, N = 4 and n = 2, with `auto`; two workers of 8 slots."""

    def load(kind="april", *overrides):
        chosen = ["--schedule.kind", kind, f"--schedule.{AUTO[kind]}", "auto"]
        others = [] if kind == "april" else ["--over-sampling-batch-size", "4"]
        return configuration.load(config_file, [*chosen, *others, *overrides])

    return load


def write_journal(config, lengths):
    ledger = Ledger(ledger_rules(config))
    ledger.start_learner(0)
    with recorded(ledger, config.run_dir):
        for group in lengths:
            add_group(ledger, group)


@pytest.mark.parametrize(
    ("kind", "staleness", "value"), [("april", 5, 8), ("april", 0, 4), ("continuous", 5, 16), ("continuous", 0, 8)]
)
def test_without_lengths_auto_is_twice_the_batch_within_the_staleness_bound(load, kind, staleness, value):
    config, why = resolve(load(kind, "--schedule.max_staleness", str(staleness)))
    assert getattr(config.schedule, AUTO[kind]) == value
    assert "too few lengths are known" in why and f"schedule.{AUTO[kind]} = {value}" in why


def test_auto_takes_lengths_and_costs_from_the_scenario(load, tmp_path):
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    config, why = resolve(load("continuous", "--schedule.scenario", str(path)))
    assert config.schedule.in_flight == 16, "steps cost the same however full: all slots"
    assert str(path) in why and "within 2% of the best" in why
    with pytest.raises(ConfigError, match="kv_tokens"):
        path.write_text(SCENARIO + "kv_tokens = 10\n")
        resolve(load("continuous", "--schedule.scenario", str(path)))


def test_a_missing_scenario_is_refused_when_auto_needs_it(load):
    config = load("april", "--schedule.scenario", "/nowhere")
    with pytest.raises(ConfigError, match=r"'schedule\.scenario' = '/nowhere' .*/published\.toml"):
        resolve(config)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(resolve(load())[0].to_toml())
    assert "when the run was started" in resolve_as_recorded(config)[1]


@pytest.mark.full
def test_a_resumed_run_chooses_by_the_lengths_in_its_journal(load):
    config = load()
    lengths = [(3, 24), (5, 6), (4, 4), (20, 9)] * (5 + 1)
    write_journal(config, [*lengths, (3, None), (1, 1)])
    chosen, why = resolve(config, resumed=True)
    assert "of the run so far" in why
    assert 4 < chosen.schedule.over_sampling_batch_size <= 6 * 4
    assert read_trace(config.run_dir / "lengths.jsonl") == [
        TracedGroup(9, list(pair), config.sampling.max_response_tokens) for pair in lengths
    ]
    assert "too few lengths" in resolve(config)[1], "another run of that name has its own folder"


@pytest.mark.parametrize(
    ("kind", "overrides", "value"),
    [
        ("april", ["--schedule.max_staleness", "0"], 4),
        ("april", ["--schedule.max_staleness", "1", "--schedule.overlap"], 4),
        ("continuous", ["--worker.count", "1", "--worker.slots", "1"], 1),
    ],
    ids=["no staleness", "none beside overlap", "slots for an eighth of a batch"],
)
def test_a_run_with_few_lengths_can_be_resumed(load, kind, overrides, value):
    config = load(kind, *overrides)
    resolve(config)
    write_journal(config, [(3, 24), (5, 6), (4, 4), (20, 9)] * (5 + 1))
    chosen, why = resolve(config, resumed=True)
    assert getattr(chosen.schedule, AUTO[kind]) == value and "of the run so far" in why


def test_the_simulated_cache_behaves_as_the_run_s_engine_does(load):
    def kept(*overrides):
        scenario = tuning_scenario(load("continuous", *overrides), Scenario(cost=PLAIN_COST), LengthsSection())
        return scenario.weights.keep_kv, scenario.engines.prefix_cache

    assert kept() == (False, False)
    assert kept("--engine", "sglang") == (False, True)
    assert kept("--engine", "sglang", "--engine.pause", "in_place", "--engine.stream_tokens", "1") == (True, True)


@pytest.mark.parametrize(
    "servers", [["--engine.servers", "2"], ["--engine.url", "http://a:1,http://b:1"]], ids=["started", "kept by others"]
)
def test_every_server_of_a_worker_is_an_engine_with_its_slots(load, servers):
    config = load("continuous", "--engine", "sglang", *servers)
    engines = tuning_scenario(config, Scenario(cost=PLAIN_COST), LengthsSection()).engines
    assert (engines.count, engines.slots) == (2 * 2, 8)


def test_lengths_of_fewer_groups_than_can_wait_for_a_straggler_are_not_used(load):
    """S + 1 batches of 4: the first to be complete are short, even where none is missing between them."""
    config = load()
    write_journal(config, [(3, 3)] * 23 + [(3, None)] + [(3, 3)] * 9)
    assert "too few lengths" in resolve(config, resumed=True)[1]


def test_a_restarted_broker_keeps_the_value_of_auto(load):
    config = load()
    first, _ = resolve_as_recorded(config)
    first = first.model_copy(update={"schedule": first.schedule.model_copy(update={"over_sampling_batch_size": 7})})
    first.run_dir.mkdir(parents=True)
    (first.run_dir / "config.toml").write_text(first.to_toml())
    again, why = resolve_as_recorded(config)
    assert again.schedule.over_sampling_batch_size == 7 and "when the run was started" in why


def test_the_value_of_auto_is_printed_with_the_plan(load, config_file, capsys):
    main(["run", str(config_file), "--dry-run", "--over-sampling-batch-size", "auto"])
    out = capsys.readouterr().out
    assert "16 samples in flight" in out and "auto       schedule.over_sampling_batch_size = 8: 2 times" in out


@pytest.mark.full
def test_a_dry_run_prints_the_value_that_a_resume_would_choose_and_writes_nothing(load, config_file, capsys):
    config = load()
    write_journal(config, [(3, 24), (5, 6), (4, 4), (20, 9)] * (5 + 1))
    main(["run", str(config_file), "--dry-run", "--resume", "--over-sampling-batch-size", "auto"])
    assert "of the run so far" in capsys.readouterr().out
    assert not (config.run_dir / "lengths.jsonl").exists()


def test_a_configuration_without_auto_is_unchanged(config_file):
    config = configuration.load(config_file)
    assert resolve(config) == (config, "") == resolve_as_recorded(config)

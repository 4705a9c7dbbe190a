"""`april simulate`, `april trace`, `april tune` and `april calibrate`: what they print and write."""

from functools import partial
from pathlib import Path

from april.config import ConfigError
from april.config.overrides import parse_overrides
from april.simulate import experiments, pictures
from april.simulate.scenario import Scenario, load_scenario
from april.simulate.sweep import sweeps
from april.simulate.trace import budget_of, read_trace, write_trace
from april.simulate.tune import tune
from april.simulate.variants import COLUMNS, columns, evaluate, table, variants
from april.workers.engines import ENGINES

EXPERIMENTS = ("lengths", "buffers", "versions")


def read(path: Path, cost: str | None, overrides: list[str], trace: Path | None = None) -> Scenario:
    """`trace`: lengths in place of the scenario's, with the budget that they were generated under."""
    keys = {"family": "trace", "path": str(trace), "longest_tokens": budget_of(read_trace(trace))} if trace else {}
    lengths = [(f"lengths.{key}", value) for key, value in keys.items()]
    return load_scenario(path, [*lengths, *parse_overrides(overrides)], cost)


def read_decided(path: Path, cost: str | None, overrides: list[str]) -> Scenario:
    """The same where the schedule has a number for everything. Raises ConfigError."""
    scenario = read(path, cost, overrides)
    if key := scenario.schedule.automatic_key:
        raise ConfigError(
            f"key 'schedule.{key}' = 'auto' is for a run and `april tune`, which choose; give a number to simulate it"
        )
    return scenario


def asked_for(overrides: list[str]) -> str:
    """The kind of schedule that the command line names, empty if it names none."""
    return str(dict(parse_overrides(overrides)).get("schedule.kind", ""))


def compare(scenario: Scenario, kind: str = "") -> None:
    """The table of all schedules that the bound admits, or of those of one kind, and why it refuses the others."""
    admitted, refused = variants(scenario, kind)
    print(table([columns(evaluate(name, one)) for name, one in admitted.items()], COLUMNS))
    for name, error in refused.items():
        print(f"left out: {name}: {error}")


def sweep(scenario: Scenario, out: Path, kind: str = "") -> None:
    make_folder(out)
    for number, one in enumerate(sweeps(scenario, kind), start=1):
        print(f"{one.title}\n{one.table()}")
        print(f"{pictures.draw(out / f'sweep-{number}.png', partial(pictures.sweep_picture, one))}\n")


def experiment(name: str, scenario: Scenario, out: Path, kind: str = "") -> None:
    make_folder(out)
    text, found = getattr(experiments, name)(scenario, kind)
    picture = getattr(pictures, f"{name}_picture")
    print(text)
    print(pictures.draw(out / f"{name}.png", lambda: picture(found)))


def choose(scenario: Scenario, mean_staleness: float | None) -> None:
    choice = tune(scenario, mean_staleness)
    print(choice.table)
    print(f"\n{choice.key} = {choice.value}: {choice.why}")


def trace(run_dir: Path, out: Path) -> None:
    from april.simulate.recording import record_trace

    check_writable(out)
    recording = record_trace(run_dir)
    groups = recording.groups
    write_trace(out, groups)
    samples = sum(len(group.response_tokens) for group in groups)
    print(f"{out}: {len(groups)} groups, {samples} responses, {sum(map(total, groups)):,} tokens")
    if recording.censored:
        print(recording.censored)


def total(group) -> int:
    return sum(group.response_tokens)


def calibrate(model: Path, slots: int, out: Path, overrides: list[str]) -> None:
    """`overrides`: of a run, such as --worker.engine sglang; the engine is the one that its workers would make."""
    from april.simulate.calibrate import fit, measure

    try:
        from april.simulate.probe import probe_of
    except ImportError:
        raise ConfigError("calibrating needs torch; run `pip install 'april-rl[worker]'`") from None
    check_writable(out)
    with probe_of(model, slots, overrides) as (probe, name):
        source = f"measured on the {name} engine with {slots} slots"
        fitted = fit(measure(probe), source, probe.engine.kv_tokens, ENGINES.find(name).keeps_prefixes)
    print(fitted.describe())
    out.write_text(fitted.to_toml())
    print(out)


def check_writable(out: Path) -> None:
    """Before there is something to lose, and without a trace. Raises ConfigError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        existed = out.exists()
        out.open("a").close()
        if not existed:
            out.unlink()
    except OSError as error:
        raise ConfigError(f"option '--out' = {str(out)!r} cannot be written ({error.strerror}); give a file") from None


def make_folder(out: Path) -> None:
    """For pictures, before there is something to lose. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"option '--out' = {str(out)!r} cannot be made ({error.strerror}); give a folder") from None

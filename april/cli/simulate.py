"""`april simulate`: schedules on a virtual clock."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from april.cli.command import command, option
from april.util.errors import refuse

if TYPE_CHECKING:
    from april.simulate.scenario import Scenario

SCENARIO = (
    option("scenario", type=Path, help="TOML file of a scenario, such as configs/published.toml."),
    option(
        "--cost", help="Cost model of the engine: a name in the file's [costs], or one of April's [default: the first]."
    ),
)


@command(
    *SCENARIO,
    option(
        "--sweep",
        action="store_true",
        help="Vary over-sampling, samples in flight, staleness and number of engines, with a picture of each.",
    ),
    option(
        "--experiment",
        choices=("lengths", "buffers", "versions"),
        help="Study one question instead: response lengths; N' against the largest buffer; trained tokens by age "
        "[default: none].",
    ),
    option("--out", type=Path, default=Path("simulated"), help="Folder of pictures [default: simulated]."),
    overrides=True,
)
def simulate(
    scenario: Path, cost: str | None, sweep: bool, experiment: str | None, out: Path, overrides: list[str]
) -> int:
    """Simulate the run of a scenario on a virtual clock, and print the measures of each schedule. With --sweep or
    --experiment, vary other settings instead, and write pictures to the folder --out."""
    from april.config.loading import parse_overrides

    read = read_scenario(scenario, cost, overrides)
    if key := read.schedule.automatic_key:
        refuse(f"schedule.{key}", "auto", "is for a run and `april tune`, which choose", "give a number to simulate it")
    kind = str(dict(parse_overrides(overrides)).get("schedule.kind", ""))
    if experiment:
        print_experiment(experiment, read, out, kind)
    elif sweep:
        print_sweeps(read, out, kind)
    else:
        print_comparison(read, kind)
    return 0


def read_scenario(path: Path, cost: str | None, overrides: list[str], trace: Path | None = None) -> "Scenario":
    """The scenario in the file `path`, with `overrides` of its keys. `cost`: name of a cost model, None for the first
    one of the scenario's file; `trace`: file of response lengths, which give the scenario's lengths and token budget.
    Raises ConfigError."""
    from april.config.loading import parse_overrides
    from april.simulate.scenario import load_scenario
    from april.simulate.trace import budget_of, read_trace

    keys = {"family": "trace", "path": str(trace), "longest_tokens": budget_of(read_trace(trace))} if trace else {}
    lengths = [(f"lengths.{key}", value) for key, value in keys.items()]
    return load_scenario(path, [*lengths, *parse_overrides(overrides)], cost)


def print_comparison(scenario: "Scenario", kind: str) -> None:
    """Print the measures of the schedule `kind` (value of `schedule.kind`; "": of all schedules) in each of its
    variants, and which variants are refused and why."""
    from april.simulate.variants import columns, evaluate, text_table, variants

    admitted, refused = variants(scenario, kind)
    print(text_table([columns(evaluate(name, variant)) for name, variant in admitted.items()]))
    for name, error in refused.items():
        print(f"left out: {name}: {error}")


def print_sweeps(scenario: "Scenario", out: Path, kind: str) -> None:
    from april.simulate.sweep import sweep_picture, sweeps, write_picture

    make_folder(out)
    for number, sweep in enumerate(sweeps(scenario, kind), start=1):
        print(f"{sweep.title}\n{sweep.table()}")
        print(f"{write_picture(out / f'sweep-{number}.png', partial(sweep_picture, sweep))}\n")


def print_experiment(name: str, scenario: "Scenario", out: Path, kind: str) -> None:
    from april.simulate.sweep import EXPERIMENTS, write_picture

    make_folder(out)
    experiment = EXPERIMENTS[name]
    table, results = experiment.run(scenario, kind)
    print(table)
    print(write_picture(out / f"{name}.png", partial(experiment.picture, results)))


def make_folder(out: Path) -> None:
    """Make the folder of pictures before the simulations, which take long. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse("--out", out, f"cannot be made ({error.strerror})", "give a folder")

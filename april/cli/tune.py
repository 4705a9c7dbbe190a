"""`april tune`: the choice of a schedule's size by simulation."""

from pathlib import Path

from april.cli.command import command, option
from april.cli.simulate import SCENARIO, read_scenario


@command(
    *SCENARIO,
    option(
        "--mean-staleness",
        type=float,
        help="Largest mean age of trained tokens, in policy steps; a lower one costs throughput [default: any].",
    ),
    option(
        "--trace",
        type=Path,
        help="Take response lengths from this file of `april trace lengths` [default: the scenario's].",
    ),
    overrides=True,
)
def tune(
    scenario: Path, cost: str | None, mean_staleness: float | None, trace: Path | None, overrides: list[str]
) -> int:
    """Choose by simulation how many groups a round opens (N'), or how many samples are in flight, and say why."""
    from april.simulate.tune import tune

    choice = tune(read_scenario(scenario, cost, overrides, trace), mean_staleness)
    print(choice.table)
    print(f"\n{choice.key} = {choice.value}: {choice.why}")
    return 0

"""`april samples`: the samples of one step."""

from pathlib import Path

from april.cli.command import RUN, command, option, wide_console
from april.util.errors import refuse


@command(
    RUN,
    option("--step", type=int, help="Policy step, as in metrics.jsonl [default: the newest that is kept]."),
    option("--worst", type=int, metavar="N", help="Show the N samples with the lowest rewards [default: all]."),
    option("--best", type=int, metavar="N", help="Show the N samples with the highest rewards [default: all]."),
    option("--group", type=int, metavar="G", help="Show the samples of group G only [default: of all groups]."),
)
def samples(run: Path, step: int | None, worst: int | None, best: int | None, group: int | None) -> int:
    """Print the samples of one policy step, all or those with the highest and lowest rewards: prompts, responses,
    rewards and reference answers."""
    from april.observe.report.run_folder import read_run
    from april.observe.report.samples import read_step, render_samples, select

    for name, number in (("--worst", worst), ("--best", best)):
        if number is not None and number < 1:
            refuse(name, number, "shows nothing", "give how many samples to show, from 1 on")
    kept = read_step(read_run(run).path, step)
    wide_console().print(render_samples(select(kept, worst, best, group)))
    return 0

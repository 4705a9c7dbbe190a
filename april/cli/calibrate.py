"""`april calibrate`: a cost model for the simulator."""

from pathlib import Path

from april.cli.command import check_writable, command, option
from april.util.errors import ConfigError


@command(
    option("--model", type=Path, required=True, help="Hugging Face folder of the policy."),
    option(
        "--slots",
        type=int,
        default=64,
        help="Most sequences decoded together; the measured loads are shares of it [default: 64].",
    ),
    option("--out", type=Path, default=Path("cost.toml"), help="File for the [cost] table [default: cost.toml]."),
    overrides=True,
)
def calibrate(model: Path, slots: int, out: Path, overrides: list[str]) -> int:
    """Measure an engine, named by --worker.engine, with the model --model and up to --slots sequences at a time; fit
    the simulator's cost model to it, and write that to the file --out."""
    from april.simulate.calibrate import fit, measure
    from april.workers.engines import ENGINES

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
    return 0

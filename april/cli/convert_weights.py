"""`april convert-weights`: checkpoints in other forms."""

from pathlib import Path

from april.cli.command import command, option


@command(
    option(
        "source",
        type=Path,
        metavar="SOURCE",
        help="Run folder, Hugging Face folder, or checkpoint in a training back end's own form.",
    ),
    option(
        "--to",
        default="huggingface",
        metavar="FORM",
        help="Form to write: huggingface, or a back end's own by its name [default: huggingface].",
    ),
    option("--step", type=int, help="Policy step of a run's checkpoint [default: the newest]."),
    option(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="For a checkpoint in a back end's own form: Hugging Face folder with its configuration and tokeniser.",
    ),
    option("--out", type=Path, required=True, metavar="FOLDER", help="New folder for the weights."),
)
def convert_weights(source: Path, to: str, step: int | None, model: Path | None, out: Path) -> int:
    """Convert a run's checkpoint to a Hugging Face folder, or such a folder from or to a back end's own form."""
    from april.learner.convert_weights import convert

    print(f"{convert(source, to, step, model, out)} is in {out}")
    return 0

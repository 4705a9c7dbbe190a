"""`april make-data`: the quickstart's prompts."""

from pathlib import Path

from april.cli.command import command, option


@command(
    option("--out", type=Path, default=Path("cache/data"), help="Folder for the prompts [default: cache/data]."),
    option("--train", type=int, default=4096, help="Number of training prompts [default: 4096]."),
    option("--heldout", type=int, default=512, help="Number of held-out prompts [default: 512]."),
    option("--seed", type=int, default=0, help="Random seed of the prompts [default: 0]."),
)
def make_data(out: Path, train: int, heldout: int, seed: int) -> int:
    """Write the quickstart's prompts."""
    from april.data.arithmetic import make_data

    for path in make_data(out, train, heldout, seed):
        print(path)
    return 0

"""`april make-pictures`: the task in pictures, and its policy."""

from pathlib import Path

from april.cli.command import command, option


@command(
    option("--out", type=Path, default=Path("cache/pictures"), help="Folder for both [default: cache/pictures]."),
    option("--train", type=int, default=2048, help="Number of training prompts [default: 2048]."),
    option("--heldout", type=int, default=256, help="Number of held-out prompts [default: 256]."),
    option("--seed", type=int, default=0, help="Seed of pictures, weights and demonstrations [default: 0]."),
)
def make_pictures(out: Path, train: int, heldout: int, seed: int) -> int:
    """Make the task in pictures of configs/pictures.toml, --train and --heldout prompts, and its policy (about a
    minute)."""
    from april.data.shapes import make_pictures
    from april.learner.policy.counting import make_counting_policy

    for path in make_pictures(out, train, heldout, seed):
        print(path)
    make_counting_policy(out / "policy", seed)
    return 0

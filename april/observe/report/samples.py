"""Read the samples that a run has kept, select some, and render them for the terminal and the run page."""

import math
import random
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from april.config import ConfigError
from april.config.evaluation import HELD_OUT
from april.observe.report.facts import number
from april.util.errors import refuse

Sample = dict[str, Any]
"""A row of `samples/step_*.parquet`, with the columns of `april.learner.samples.schema`."""

MAX_CHARACTERS = 1200
"""Maximum number of characters of a sample's prompt, and of its response, on the run page."""
MAX_LABEL_CHARACTERS = 400
"""Maximum number of characters of a reference answer that is shown with a sample's text."""
SHORT_COLUMNS = (
    "step", "group", "index", "prompt", "response", "label", "reward", "advantage", "trained", "finish_reason",
    "held_out",
)  # fmt: skip


def sample_files(run_dir: Path) -> dict[int, Path]:
    """Parquet files of stored samples by step, with steps numbered as in metrics.jsonl."""
    found = sorted((run_dir / "samples").glob("step_*.parquet"))
    return {int(path.stem.removeprefix("step_")): path for path in found}


def read_step(run_dir: Path, step: int | None = None, columns: tuple[str, ...] | None = None) -> list[Sample]:
    """Samples of one step, by default the newest, with all columns or the named ones. Raises ConfigError."""
    files_by_step = sample_files(run_dir)
    if not files_by_step:
        raise ConfigError(
            f"{run_dir} has kept no samples; they are kept from the first trained step on, with samples.every above 0"
        )
    if step is not None and step not in files_by_step:
        steps = ", ".join(map(str, sorted(files_by_step, key=lambda other: abs(other - step))[:5]))
        refuse("--step", step, f"is no step whose samples {run_dir} has kept", f"try {steps}")
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError("reading samples needs pyarrow; `pip install 'april-rl[data]'`") from None
    path = files_by_step[max(files_by_step) if step is None else step]
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            rows = to_rows(file.read(names))
        return [dict.fromkeys(columns or ()) | row for row in rows]
    except (OSError, ValueError) as error:
        raise ConfigError(f"samples {path} cannot be read ({str(error).splitlines()[0]}); remove that file") from None


def to_rows(table: Any) -> list[dict[str, Any]]:
    """The rows of a pyarrow `table` as dictionaries; invalid UTF-8 becomes U+FFFD, and numbers that are not
    finite become None."""
    import pyarrow as arrow

    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table[name]
        if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
            texts = column.cast(arrow.binary()).to_pylist()
            columns[name] = [None if text is None else text.decode(errors="replace") for text in texts]
        else:
            columns[name] = [finite(value) for value in column.to_pylist()]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def select(samples: list[Sample], worst: int | None, best: int | None, group: int | None) -> list[Sample]:
    """Samples of one group or of all: the `worst` lowest and then the `best` highest rewards, none twice; all of them
    if both are None. Raises ConfigError for an unknown group."""
    groups = sorted({sample["group"] for sample in samples})
    if group is not None and group not in groups:
        refuse("--group", group, "is no group kept of this step", f"give one of {', '.join(map(str, groups))}")
    chosen = [sample for sample in samples if group is None or sample["group"] == group]
    if worst is None and best is None:
        return chosen
    by_reward = sorted(
        (sample for sample in chosen if sample["reward"] is not None), key=lambda sample: sample["reward"]
    )
    low = by_reward[: worst or 0]
    high = [sample for sample in reversed(by_reward) if sample not in low][: best or 0]
    return low + high


def headline(sample: Sample) -> str:
    """One line: `step 10  group 37.2  reward 0.500  advantage -0.707  42 tokens of versions 8, 9  stop`."""
    steps = sorted({segment["step"] for segment in sample["segments"]}) if "segments" in sample else []
    parts = [
        f"step {sample['step']}",
        f"group {sample['group']}.{sample['index']}" + (f"/{sample['fork']}" if sample.get("fork") else ""),
        f"reward {number(sample['reward'])}",
        held_out(sample)
        or f"advantage {number(sample['advantage'])}" + ("" if sample["trained"] else " (no gradient)"),
        f"{len(sample['response_ids'])} tokens" if "response_ids" in sample else "",
        f"of versions {', '.join(map(str, steps))}" if steps else "",
        sample["finish_reason"] or "",
        sample.get("discarded") or "",
    ]
    return "  ".join(part for part in parts if part)


def held_out(sample: Sample) -> str:
    """`held out` with the name of the evaluation set, if it has one of its own; "" for a training sample."""
    name = sample.get("held_out")
    return f"held out ({name})" if name and name != HELD_OUT else "held out" if name else ""


def render_samples(samples: list[Sample]) -> RenderableType:
    """For each sample its headline, the prompt dimmed, the response, the reference answer, and what its verifier said
    of it."""
    parts: list[RenderableType] = []
    for sample in samples:
        parts += [Text(f"── {headline(sample)}", style="bold")]
        parts += [Text(printable(sample["prompt"]), style="dim"), Text(printable(sample["response"]))]
        if label := sample.get("label"):
            parts += [Text.assemble(("reference answer: ", "dim"), printable(shortened(label, MAX_LABEL_CHARACTERS)))]
        if feedback := sample.get("feedback"):
            parts += [Text.assemble(("feedback: ", "dim"), printable(shortened(feedback)))]
    return Group(*parts)


def printable(text: str) -> str:
    """The text with control characters escaped, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def example_samples(run_dir: Path) -> list[dict[str, Any]]:
    """The worst, the best and a random sample of the first, the middle and the newest step, for the run page: its
    `kind`, a `headline`, and the shortened `prompt`, `response` and `label` (reference answer). [] if no samples are
    kept. Raises ConfigError."""
    steps = sorted(sample_files(run_dir))
    if not steps:
        return []
    chosen_steps = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    return [
        {
            "kind": kind,
            "headline": headline(sample),
            "prompt": shortened(sample["prompt"]),
            "response": shortened(sample["response"]),
            "label": shortened(sample["label"] or "", MAX_LABEL_CHARACTERS),
        }
        for step in chosen_steps
        for kind, sample in examples_of_step(run_dir, step)
    ]


def examples_of_step(run_dir: Path, step: int) -> list[tuple[str, Sample]]:
    samples = read_step(run_dir, step, SHORT_COLUMNS)
    chosen = [("worst", sample) for sample in select(samples, 1, None, None)]
    chosen += [("best", sample) for sample in select(samples, None, 1, None)]
    others = [sample for sample in samples if all(sample is not other for _, other in chosen)]
    return chosen + [("random", sample) for sample in random.Random(step).sample(others, min(1, len(others)))]


def shortened(text: str, characters: int = MAX_CHARACTERS) -> str:
    left_out = len(text) - characters
    return text if left_out <= 0 else f"{text[:characters]} … and {left_out:,} characters more"

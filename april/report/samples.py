"""Samples that a run has kept, read back: which to show, and how they look in the terminal and in the report."""

import random
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from april.config import ConfigError
from april.report.facts import number
from april.report.run_folder import Run

Sample = dict[str, Any]
"""a row of `samples/step_*.parquet`, whose columns are those of `april.learner.samples.schema`"""

SHOWN_CHARACTERS = 1200
"""of a text in the report; the rest is in the file"""
REPORT_STEPS = 3
"""of which the report shows samples: the first, the middle, the newest"""
SHORT_COLUMNS = ("step", "group", "index", "prompt", "response", "reward", "advantage", "trained", "finish_reason")


def files(run_dir: Path) -> dict[int, Path]:
    """By step, as in metrics.jsonl."""
    found = sorted((run_dir / "samples").glob("step_*.parquet"))
    return {int(path.stem.removeprefix("step_")): path for path in found}


def read_step(run_dir: Path, step: int | None = None, columns: tuple[str, ...] | None = None) -> list[Sample]:
    """Samples of one step, the newest if none is given; of all columns or those named. Raises ConfigError."""
    kept = files(run_dir)
    if not kept:
        raise ConfigError(
            f"{run_dir} has kept no samples; they are kept from the first trained step on, with samples.every above 0"
        )
    if step is not None and step not in kept:
        steps = ", ".join(map(str, sorted(kept, key=lambda other: abs(other - step))[:5]))
        raise ConfigError(f"option '--step' = {step} is no step whose samples {run_dir} has kept; try {steps}")
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError("reading samples needs pyarrow; `pip install 'april-rl[data]'`") from None
    path = kept[max(kept) if step is None else step]
    try:
        with parquet.ParquetFile(path) as file:
            known = [name for name in file.schema_arrow.names if columns is None or name in columns]
            rows = file.read(known).to_pylist()
        return [dict.fromkeys(columns or ()) | row for row in rows]
    except (OSError, ValueError) as error:
        raise ConfigError(f"samples {path} cannot be read ({str(error).splitlines()[0]}); remove that file") from None


def pick(samples: list[Sample], worst: int | None, best: int | None, group: int | None) -> list[Sample]:
    """Of one group or all; the worst, then the best of those with a reward, without one twice. Raises ConfigError for
    an unknown group."""
    groups = sorted({sample["group"] for sample in samples})
    if group is not None and group not in groups:
        raise ConfigError(
            f"option '--group' = {group} is no group kept of this step; give one of {', '.join(map(str, groups))}"
        )
    chosen = [sample for sample in samples if group is None or sample["group"] == group]
    if worst is None and best is None:
        return chosen
    by_reward = sorted((one for one in chosen if one["reward"] is not None), key=lambda sample: sample["reward"])
    low = by_reward[: worst or 0]
    high = [sample for sample in reversed(by_reward) if sample not in low][: best or 0]
    return low + high


def headline(sample: Sample) -> str:
    """`step 10  group 37.2  reward 0.500  advantage -0.707  42 tokens of versions 8, 9  stop`."""
    steps = sorted({segment["step"] for segment in sample["segments"]}) if "segments" in sample else []
    parts = [
        f"step {sample['step']}",
        f"group {sample['group']}.{sample['index']}" + (f"/{sample['branch']}" if sample.get("branch") else ""),
        f"reward {number(sample['reward'])}",
        f"advantage {number(sample['advantage'])}" + ("" if sample["trained"] else " (no gradient)"),
        f"{len(sample['response_ids'])} tokens" if "response_ids" in sample else "",
        f"of versions {', '.join(map(str, steps))}" if steps else "",
        sample["finish_reason"] or "",
        sample.get("discarded") or "",
    ]
    return "  ".join(part for part in parts if part)


def render_samples(samples: list[Sample]) -> RenderableType:
    """Of each its head, the prompt dimmed, and the response."""
    parts: list[RenderableType] = []
    for sample in samples:
        parts += [Text(f"── {headline(sample)}", style="bold")]
        parts += [Text(visible(sample["prompt"]), style="dim"), Text(visible(sample["response"]))]
    return Group(*parts)


def visible(text: str) -> str:
    """Without what would steer a terminal: control characters as their escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def samples_section(run: Run) -> str:
    """HTML: of a few steps the best, the worst and a random sample; says so where none are kept."""
    kept = sorted(files(run.path))
    if not kept:
        return '<p class="note">No samples are kept.</p>'
    shown = sorted({kept[0], kept[len(kept) // 2], kept[-1]})[-REPORT_STEPS:]
    try:
        return "\n".join(of_step(run.path, step) for step in shown)
    except ConfigError as error:
        return f'<p class="note">{escape(str(error))}</p>'


def of_step(run_dir: Path, step: int) -> str:
    samples = read_step(run_dir, step, SHORT_COLUMNS)
    chosen = [("worst", sample) for sample in pick(samples, 1, None, None)]
    chosen += [("best", sample) for sample in pick(samples, None, 1, None)]
    others = [sample for sample in samples if all(sample is not one for _, one in chosen)]
    chosen += [("random", sample) for sample in random.Random(step).sample(others, min(1, len(others)))]
    return "".join(
        f'<details class="sample"{" open" if kind == "worst" else ""}><summary>{kind}: {escape(headline(sample))}'
        f'</summary><pre dir="auto"><span class="prompt">{shortened(sample["prompt"])}</span>'
        f"{shortened(sample['response'])}</pre></details>"
        for kind, sample in chosen
    )


def shortened(text: str) -> str:
    cut = len(text) - SHOWN_CHARACTERS
    return escape(text if cut <= 0 else f"{text[:SHOWN_CHARACTERS]} … and {cut:,} characters more")

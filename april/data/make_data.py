"""Writes the quickstart's prompts into `train.jsonl` and `heldout.jsonl`, which share no prompt."""

from pathlib import Path
from random import Random

import orjson

from april.config import ConfigError
from april.data.arithmetic import SPLITS, ArithmeticTask, draw_times, tasks_of


def make_data(
    out_dir: str | Path, train_prompts: int = 4096, heldout_prompts: int = 512, seed: int = 0
) -> tuple[Path, Path]:
    """Write both files and return their paths; a file that already has the right content is not rewritten."""
    paths: list[Path] = []
    for split, count in zip(SPLITS, (train_prompts, heldout_prompts), strict=True):
        rows = (orjson.dumps(row(task)) + b"\n" for task in distinct_tasks(split, count, seed))
        paths.append(Path(out_dir) / f"{split}.jsonl")
        write_if_changed(paths[-1], b"".join(rows))
    train, heldout = paths
    return train, heldout


def row(task: ArithmeticTask) -> dict:
    messages = [{"role": "user", "content": task.prompt}]
    return {"prompt": messages, "label": task.answer, "reward": "final_answer", "times": task.times}


def distinct_tasks(split: str, count: int, seed: int) -> list[ArithmeticTask]:
    """`count` different tasks with K distributed as in training. Raises ConfigError if there are too few tasks of a
    K."""
    random = Random(f"{split} {seed}")
    unused: dict[int, list[ArithmeticTask]] = {}
    tasks: list[ArithmeticTask] = []
    while len(tasks) < count:
        times = draw_times(random)
        if times not in unused:
            unused[times] = tasks_of(times, split)
            random.shuffle(unused[times])
        if not unused[times]:
            raise ConfigError(
                f"{count} different {split} prompts are too many: those with K = {times} ran out "
                f"after {len(tasks)}; ask for {len(tasks)} or fewer"
            )
        tasks.append(unused[times].pop())
    return tasks


def write_if_changed(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_bytes(content)
    draft.replace(path)

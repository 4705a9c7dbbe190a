"""A task in pictures: count the shapes of a colour in a picture of 4 x 4 cells, row by row.

A response has the count of each row, then their sum after a hash:

    [picture]R?  ->  1021#4

A hash of its cells assigns each picture to a split, so no held-out picture appears in training.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import orjson

from april.data.arithmetic import HELD_OUT_SHARE, SPLITS, write_if_changed
from april.data.pixels import png_of

SIDE, CELL = 4, 8
"""Cells along a side of a picture, and pixels along a side of a cell."""
COLOURS = {"R": (220, 40, 40), "G": (30, 160, 60), "B": (40, 70, 220)}
SHAPES = ("circle", "square", "triangle")
BACKGROUND = 245
LARGEST_COUNT = 9
"""Largest answer of a task, so that each answer is one digit."""
EMPTY_SHARE = 0.3
"""Share of the cells without a shape."""
QUESTION = "{}?"


class CountingTask(NamedTuple):
    cells: str
    """Colour of the shape in each cell, row by row; a full stop for none."""
    kinds: str
    """One digit a cell: its shape's index in `SHAPES`."""
    colour: str
    """Colour whose shapes are counted."""

    @property
    def question(self) -> str:
        return QUESTION.format(self.colour)

    @property
    def rows(self) -> list[int]:
        """Number of shapes of the asked `colour` in each row of cells."""
        return [self.cells[start : start + SIDE].count(self.colour) for start in range(0, SIDE * SIDE, SIDE)]

    @property
    def answer(self) -> str:
        return str(sum(self.rows))

    def demonstration(self, guess: int | None = None) -> str:
        """A response without the end-of-text token: the right one or, with `guess`, only that number without
        counting."""
        return "".join(map(str, self.rows)) + "#" + self.answer if guess is None else f"#{guess}"

    def pixels(self) -> np.ndarray:
        """The picture, uint8 [32, 32, 3]."""
        picture = np.full((SIDE * CELL, SIDE * CELL, 3), BACKGROUND, np.uint8)
        for place, (colour, kind) in enumerate(zip(self.cells, self.kinds, strict=True)):
            if colour in COLOURS:
                row, column = (CELL * part for part in divmod(place, SIDE))
                picture[row : row + CELL, column : column + CELL][mask_of(SHAPES[int(kind)])] = COLOURS[colour]
        return picture


def mask_of(shape: str) -> np.ndarray:
    """Whether a shape fills each pixel of its cell, bool [8, 8]."""
    rows, columns = np.indices((CELL, CELL)) - (CELL - 1) / 2
    if shape == "circle":
        return rows**2 + columns**2 < 3.2**2
    if shape == "square":
        return np.maximum(abs(rows), abs(columns)) < 3
    return (abs(rows) < 3) & (abs(columns) < (rows + 3.5) / 2)


def draw_tasks(split: str, random: Random) -> Iterator[CountingTask]:
    """An endless sequence of random tasks of a split, "train" or "heldout"."""
    while True:
        cells = "".join("." if random.random() < EMPTY_SHARE else random.choice("RGB") for _ in range(SIDE * SIDE))
        kinds = "".join(str(random.randrange(len(SHAPES))) for _ in cells)
        task = CountingTask(cells, kinds, random.choice("RGB"))
        if int(task.answer) <= LARGEST_COUNT and split_of(cells + kinds) == split:
            yield task


def split_of(picture: str) -> str:
    position = int.from_bytes(hashlib.sha256(picture.encode()).digest()[:8], "big") / 2**64
    return "heldout" if position < HELD_OUT_SHARE else "train"


def make_pictures(
    out_dir: str | Path, train_prompts: int = 2048, heldout_prompts: int = 256, seed: int = 0
) -> tuple[Path, Path]:
    """Write `train.jsonl`, `heldout.jsonl` and the PNG files that their rows name; returns the paths of the two. A file
    that already has the right content is not rewritten."""
    paths: list[Path] = []
    for split, count in zip(SPLITS, (train_prompts, heldout_prompts), strict=True):
        rows = []
        for number, task in enumerate(islice(draw_tasks(split, Random(f"{split} {seed}")), count)):
            name = f"images/{split}-{number:05}.png"
            write_if_changed(Path(out_dir) / name, png_of(task.pixels()))
            messages = [{"role": "user", "content": f"<image>{task.question}"}]
            row = {"prompt": messages, "images": [name], "label": task.answer, "reward": "final_answer"}
            rows.append(orjson.dumps(row) + b"\n")
        paths.append(Path(out_dir) / f"{split}.jsonl")
        write_if_changed(paths[-1], b"".join(rows))
    train, heldout = paths
    return train, heldout

"""The task in pictures: its pictures show what its rows ask for, and its policy is shown them as in a run."""

from itertools import islice
from random import Random

import numpy as np
import orjson
import torch

from april.data.shapes import CELL, COLOURS, SIDE, draw_tasks, make_pictures
from april.data.tokenizer import Tokenizer
from april.learner.policy.counting import RECIPE, batch_of, build_model, prompt_ids, save_policy
from tests.support.learner.comparison import equal


def test_a_picture_shows_the_shapes_that_are_counted():
    for task in islice(draw_tasks("train", Random(0)), 50):
        cells = task.pixels().reshape(SIDE, CELL, SIDE, CELL, 3).swapaxes(1, 2)
        shown = (cells == np.array(COLOURS[task.colour])).all(-1).any((2, 3))
        assert shown.sum(1).tolist() == task.rows and task.demonstration().partition("#")[2] == task.answer


def test_rows_are_the_same_again_and_share_no_picture(tmp_path):
    train, heldout = make_pictures(tmp_path, 20, 10)
    before = train.read_bytes(), heldout.read_bytes()
    assert make_pictures(tmp_path, 20, 10) == (train, heldout) and before == (train.read_bytes(), heldout.read_bytes())
    pictures = {path.read_bytes() for path in (tmp_path / "images").iterdir()}
    rows = [orjson.loads(line) for path in (train, heldout) for line in path.read_bytes().splitlines()]
    assert len(pictures) == len(rows) == 30 and all((tmp_path / row["images"][0]).is_file() for row in rows)


def test_a_prompt_has_the_token_ids_of_the_warm_start(tmp_path):
    save_policy(build_model(RECIPE, 0), tmp_path)
    parts = [{"type": "image"}, {"type": "text", "text": "R?"}]
    ids = Tokenizer(tmp_path).encode_row([{"role": "user", "content": parts}], images=[SIDE**2])
    assert ids.tolist() == prompt_ids("R")


def test_a_guess_is_no_count(tmp_path):
    task = next(draw_tasks("train", Random(1)))
    counted, guessed = batch_of([(task, None)]), batch_of([(task, 0)])
    assert (counted[1] > 0).sum() == SIDE + 3 and (guessed[1] > 0).sum() == 3
    assert torch.equal(counted[2], guessed[2]) and equal(*(build_model(RECIPE, 0).state_dict() for _ in range(2)))

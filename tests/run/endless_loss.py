"""A loss that never comes to an end on rank 0, once, as soon as the file is there that the environment names."""

import os
from pathlib import Path

from april.learner.losses.policy import ppo

FILE = "APRIL_TEST_ENDLESS"


def loss(*columns):
    file = Path(os.environ[FILE])
    if os.environ["RANK"] == "0" and file.exists():
        file.unlink()
        while True:
            pass
    return ppo(*columns)

"""The quickstart's task: multiplication by repeated addition, modulo 100, whose responses need as many steps as K says.

A prompt `KK*D+us=` asks for (addend + K * D) mod 100, with the addend written units first. Each step of a
demonstration decrements K and adds D to the addend. A step has eight characters, so the response length
follows K, which is lognormal:

    05*3+60=  ->  04*3+90=03*3+21=02*3+51=01*3+81=00*3+12=#12        (6 + 15 = 21)

A hash of its text assigns each prompt to a split, so no held-out prompt ever appears in training.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import orjson

from april.config import ConfigError

ALPHABET = "0123456789=?#+*:,ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MAX_TIMES = 60
TIMES_MU, TIMES_SIGMA = 1.5, 0.85
"""Mean and standard deviation of log K, where K, a task's number of additions, is lognormal and then rounded: median 4,
90 % below 13, 99 % below 31."""
HELD_OUT_SHARE = 0.12
SPLITS = ("train", "heldout")


class ArithmeticTask(NamedTuple):
    times: int
    """K, the number of additions to make: 1 to 60."""
    digit: int
    """D, the digit that each step adds: 1 to 9."""
    addend: int
    """Number to which `times` * `digit` is added: 0 to 99."""

    @property
    def prompt(self) -> str:
        return expression(*self)

    @property
    def answer(self) -> str:
        """The correct text after the `#`: two digits, units first."""
        return units_first((self.addend + self.times * self.digit) % 100)


@dataclass(frozen=True)
class Noise:
    """Probabilities of deliberate errors in demonstrations, so that RL has wrong behaviours to select against."""

    p_short: float = 0.0
    """Probability, per demonstration, of no steps and only a wrong guess."""
    p_err: float = 0.0
    """Probability, per step, of a sum that is off by 1 or 10; later steps continue from the wrong sum."""
    p_stop: float = 0.0
    """Probability, per step, of ending early: the sum so far is given as the answer, and the step is not made."""
    p_skip: float = 0.0
    """Probability, per step, of leaving out one addition: K is decremented twice, and D added only once."""


CLEAN = Noise()
HABITS = Noise(p_short=0.32, p_err=0.015, p_stop=0.012, p_skip=0.009)
"""Error probabilities of the noisy demonstrations. They set the mean reward at which RL starts: about 0.5 at
temperature 1."""
EASY_TIMES = (2, 3, 4)
"""Numbers of additions K that the tasks of the easy demonstrations have."""


def draw_times(random: Random) -> int:
    while True:
        times = round(random.lognormvariate(TIMES_MU, TIMES_SIGMA))
        if 1 <= times <= MAX_TIMES:
            return times


def draw_task(random: Random, split: str = "train", times: int | None = None) -> ArithmeticTask:
    """A random task of the split. `times`: the task's number of additions K; None to draw K from its distribution."""
    times = times or draw_times(random)
    while True:
        task = ArithmeticTask(times, random.randrange(1, 10), random.randrange(100))
        if split_of(task.prompt) == split:
            return task


def tasks_of(times: int, split: str) -> list[ArithmeticTask]:
    """Every task of the split with `times` additions (K), in a fixed order."""
    tasks = (ArithmeticTask(times, digit, addend) for digit in range(1, 10) for addend in range(100))
    return [task for task in tasks if split_of(task.prompt) == split]


def split_of(prompt: str) -> str:
    position = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") / 2**64
    return "heldout" if position < HELD_OUT_SHARE else "train"


def demonstration(task: ArithmeticTask, noise: Noise = CLEAN, random: Random | None = None) -> str:
    """A response to the task, without the end-of-text token. The response is correct if there
    is no noise. `random`: source of the noise; None: one with seed 0."""
    times, digit, value = task
    if random is None or noise == CLEAN:
        random = Random(0)
    if random.random() < noise.p_short:
        return "#" + wrong_guess(task, random)
    steps = []
    while times > 0 and random.random() >= noise.p_stop:
        times -= 1
        if times > 0 and random.random() < noise.p_skip:
            times -= 1
        value = (value + digit) % 100
        if random.random() < noise.p_err:
            value = (value + random.choice((-10, -1, 1, 10))) % 100
        steps.append(expression(times, digit, value))
    return "".join(steps) + "#" + units_first(value)


def demonstrations(easy: int, clean: int, noisy: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows for supervised training, all of the training split, in training order: `easy` rows without errors whose
    number of additions K is 2, 3 or 4; `clean` rows without errors whose K is drawn from its whole distribution; and
    `noisy` rows with errors, with K drawn likewise."""
    random = Random(seed)
    for count, noise, allowed_times in ((easy, CLEAN, EASY_TIMES), (clean, CLEAN, None), (noisy, HABITS, None)):
        for _ in range(count):
            times = random.choice(allowed_times) if allowed_times else draw_times(random)
            task = draw_task(random, "train", times)
            yield {"prompt": task.prompt, "completion": demonstration(task, noise, random)}


def wrong_guess(task: ArithmeticTask, random: Random) -> str:
    guess = units_first(random.randrange(100))
    return guess if guess != task.answer else wrong_guess(task, random)


def expression(times: int, digit: int, value: int) -> str:
    return f"{times:02d}*{digit}+{units_first(value)}="


def units_first(value: int) -> str:
    return f"{value:02d}"[::-1]


# --- files ------------------------------------------------------------------------------------------------------------


def make_data(
    out_dir: str | Path, train_prompts: int = 4096, heldout_prompts: int = 512, seed: int = 0
) -> tuple[Path, Path]:
    """Write `train_prompts` tasks to `train.jsonl` and `heldout_prompts` others to `heldout.jsonl` in `out_dir`, and
    return the paths of both files. The files share no prompt.

    A file that already has the right content is not rewritten.
    """
    paths: list[Path] = []
    for split, count in zip(SPLITS, (train_prompts, heldout_prompts), strict=True):
        rows = (orjson.dumps(row_of_task(task)) + b"\n" for task in distinct_tasks(split, count, seed))
        paths.append(Path(out_dir) / f"{split}.jsonl")
        write_if_changed(paths[-1], b"".join(rows))
    train, heldout = paths
    return train, heldout


def row_of_task(task: ArithmeticTask) -> dict:
    messages = [{"role": "user", "content": task.prompt}]
    return {"prompt": messages, "label": task.answer, "reward": "final_answer", "times": task.times}


def distinct_tasks(split: str, count: int, seed: int) -> list[ArithmeticTask]:
    """`count` different tasks of the split, whose number of additions K is drawn from its whole distribution. Raises
    ConfigError if the split has too few tasks with one of the drawn K."""
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

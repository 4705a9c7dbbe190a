"""The quickstart's task, its demonstrations and its files."""

from random import Random

import orjson
import pytest

from april.config import ConfigError, DataSection
from april.data.arithmetic import CLEAN, ArithmeticTask, Noise, demonstration, draw_task, make_data, split_of
from april.data.dataset import load_dataset
from april.workers.rewards.text import final_answer


def test_a_clean_demonstration_adds_the_digit_k_times():
    task = ArithmeticTask(times=5, digit=3, addend=6)
    assert task.prompt == "05*3+60="
    assert demonstration(task) == "04*3+90=03*3+21=02*3+51=01*3+81=00*3+12=#12"
    assert demonstration(ArithmeticTask(3, 9, 63)) == "02*9+27=01*9+18=00*9+09=#09"


def test_lengths_are_long_tailed():
    random = Random(0)
    lengths = sorted(len(demonstration(draw_task(random))) + 1 for _ in range(5000))
    assert lengths[4950] / lengths[2500] >= 4
    assert lengths[-1] <= 512


def reward_of(noise, random=None):
    random = Random(0)
    tasks = [draw_task(random) for _ in range(2000)]
    return sum(final_answer(demonstration(task, noise, random), task.answer, "stop") for task in tasks) / len(tasks)


def test_a_shortcut_is_a_wrong_guess_without_steps():
    random = Random(0)
    for _ in range(200):
        task = draw_task(random)
        guess = demonstration(task, Noise(p_short=1.0), random)
        assert len(guess) == 3 and guess[0] == "#" and guess[1:] != task.answer


@pytest.mark.parametrize("mode", ["p_short", "p_err", "p_stop", "p_skip"])
def test_every_kind_of_noise_lowers_the_reward(mode):
    assert reward_of(Noise(**{mode: 0.05})) < reward_of(CLEAN) == 1.0


def test_a_prompt_is_always_in_the_same_split():
    assert (split_of("19*7+00="), split_of("20*7+00="), split_of("38*7+00=")) == ("train", "heldout", "heldout")
    every = [split_of(ArithmeticTask(k, d, a).prompt) for k in range(1, 61) for d in range(1, 10) for a in range(100)]
    assert every.count("heldout") / len(every) == pytest.approx(0.12, abs=0.01)


def test_the_files_have_distinct_prompts_in_disjoint_splits(tmp_path):
    train, heldout = (rows_of(path) for path in make_data(tmp_path, 1500, 300, seed=0))
    prompts = [{row.prompt[0]["content"] for row in rows} for rows in (train, heldout)]
    assert [len(train), len(heldout)] == [len(prompts[0]), len(prompts[1])] == [1500, 300]
    assert not prompts[0] & prompts[1]
    assert all(split_of(prompt) == "heldout" for prompt in prompts[1])


def test_the_verifier_accepts_the_label_of_a_row(tmp_path):
    path, _ = make_data(tmp_path, 100, 10, seed=0)
    for row in rows_of(path):
        content = row.prompt[0]["content"]
        task = ArithmeticTask(int(content[:2]), int(content[3]), int(content[6] + content[5]))
        assert final_answer(demonstration(task), row.label, "stop") == 1.0
        assert row.reward == "final_answer"


def test_held_out_prompts_are_as_long_as_training_prompts(tmp_path):
    means = []
    for path in make_data(tmp_path, 4096, 512, seed=0):
        times = [orjson.loads(line)["times"] for line in path.read_bytes().splitlines()]
        means.append(sum(times) / len(times))
    assert means[1] == pytest.approx(means[0], rel=0.15)


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(tmp_path):
    contents = [
        [path.read_bytes() for path in make_data(tmp_path / name, 200, 50, seed)]
        for name, seed in [("a", 0), ("b", 0), ("c", 1)]
    ]
    assert contents[0] == contents[1] != contents[2]


def test_identical_files_are_left_alone_and_others_rewritten(tmp_path):
    train, heldout = make_data(tmp_path, 200, 50, seed=0)
    written_ns = train.stat().st_mtime_ns
    content = heldout.read_bytes()
    heldout.write_text("broken")
    make_data(tmp_path, 200, 50, seed=0)
    assert train.stat().st_mtime_ns == written_ns
    assert heldout.read_bytes() == content


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_the_default_sizes_can_be_made_with_any_seed(tmp_path, seed):
    make_data(tmp_path, seed=seed)


def test_more_prompts_than_exist_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="5000 different heldout prompts"):
        make_data(tmp_path, 10, 5000, seed=0)


def rows_of(path):
    data = DataSection(path=path)
    return list(load_dataset(data.train_sources, data))

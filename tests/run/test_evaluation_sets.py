"""A run with several sets of held-out prompts, whose broker and learner die: the best weights are kept and exported."""

import pytest

from april.learner import checkpoint
from tests.support.exported_checkpoints import assert_exported
from tests.support.run_processes import assert_closed, steps_recorded, wait_until

LENGTH = '''
"""A verifier of one's own: the shorter the better, so that the best weights need not be the last."""


def reward(response):
    return 1 / (1 + len(response))
'''


@pytest.mark.full
def test_the_best_checkpoint_by_one_of_the_sets_is_exported_beside_the_last(
    start_run, run_dir, data_folder, policy_folder, tmp_path, gate
):
    (tmp_path / "brief.py").write_text(LENGTH)
    path, sets = str(data_folder / "heldout.jsonl"), "evaluation.sets"
    job = start_run(
        *gate.hold(4),
        f"--{sets}.brief.path", path, f"--{sets}.brief.reward", "brief:reward", f"--{sets}.brief.prompts", "4",
        f"--{sets}.often.path", path, f"--{sets}.often.samples", "3", f"--{sets}.often.temperature", "0.5",
        "--evaluation.every", "1", "--evaluation.best", "brief", "--schedule.max_steps", "6", "--learner.lr", "5e-3",
        "--learner.keep_checkpoints", "1", "--learner.checkpoint_every", "3", "--learner.ranks", "1",
    )  # fmt: skip
    for step, victim in ((1, "april.cli broker"), (3, "-u -m april.learner")):
        wait_until(lambda step=step: steps_recorded(run_dir) >= step, job)
        job.kill(victim)
    gate.open()
    assert job.wait() == 0, job.output
    found = assert_closed(run_dir)["evaluation"]
    assert [point["step"] for point in found] == list(range(7))
    assert all(list(point["sets"]) == ["heldout", "brief", "often"] for point in found)
    assert {point["sets"]["often"]["mean_at_k"]["k"] for point in found} == {3}
    best = max((point["sets"]["brief"]["reward"], point["step"]) for point in found if point["step"])[1]
    directory = run_dir / "checkpoints"
    assert checkpoint.steps(directory) == sorted({best, 6})
    for name, step in (("best", best), ("policy", 6)):
        assert_exported(run_dir, name, step, policy_folder)

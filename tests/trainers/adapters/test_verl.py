"""verl's trainer on April's rollouts: its own functions run on what comes out, also after a kill."""

from pathlib import Path

import orjson
import pytest

from april.observe.report.run_folder import read_records
from tests.support.run_processes import assert_closed

STEPS = Path(__file__).with_name("verl_steps.py")
PYTHON = Path(__file__).parents[3] / ".venv-verl/bin/python"
SUBMITTED = {
    'name = "small"': 'name = "submitted"',
    "over_sampling_batch_size = 6, ": "",
    "data = {": 'data = { source = "submitted",',
}
"""what verl's prompts need of the small configuration"""

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]


@pytest.fixture
def train(start, tmp_path):
    """train(config file, killed_at) -> what each step of verl's trainer saw"""

    def run(file, killed_at=0):
        job = start(f"log-{killed_at}", [str(PYTHON), str(STEPS), str(file), str(tmp_path), str(killed_at)])
        assert job.wait(timeout_s=240) == (-9 if killed_at else 0), job.output
        return orjson.loads(next(line for line in job.output.splitlines() if line.startswith("[{")))

    return run


def test_verl_s_advantages_corrections_and_loss_run_on_groups_that_april_has_drawn(train, config_file, tmp_path):
    steps = train(config_file)
    assert len(steps) == 3 and assert_closed(tmp_path / "runs/small")["state"] == "finished"
    first, *_ = steps
    assert first["apart"] < 1e-4, "under the weights that sampled them verl says the same of all tokens"
    assert all(0 <= oldest <= number for number, step in enumerate(steps) for oldest in step["oldest"])
    assert any(step["advantages"] > 0 for step in steps)
    figures = {"rollout_corr/rollout_is_mean", "training/rollout_probs_diff_max", "actor/pg_clipfrac"}
    assert figures <= {*first["metrics"]}
    lines = read_records(tmp_path / "runs/small/metrics.jsonl")
    assert [line["learner"]["loss"] for line in lines] == pytest.approx([step["loss"] for step in steps])
    told = [(line["learner"]["grad_norm"] > 0, line["learner"]["clip_fraction"]) for line in lines]
    assert told == [(True, 0.25)] * 3, "verl's figures, April's names"


def test_verl_s_own_prompts_come_back_in_its_order_and_a_killed_trainer_gets_the_same_batch(
    train, config_file, tmp_path
):
    text = config_file.read_text()
    for old, new in SUBMITTED.items():
        text = text.replace(old, new)
    config_file.write_text(text)
    before = train(config_file, killed_at=2)
    again = train(config_file)
    same = ("rewards", "prompts", "labels", "oldest")
    assert len(before) == 2 and [before[1][name] for name in same] == [again[0][name] for name in same]
    assert len(again) == 2 and assert_closed(tmp_path / "runs/submitted")["state"] == "finished"
    for step in (*before, *again):
        assert step["apart"] < 1e-4, "N' = N: all of one version"
        assert all(prompts == twin for prompts, twin in zip(step["prompts"][::2], step["prompts"][1::2], strict=True))
        assert len({str(prompt) for prompt in step["prompts"]}) == 4

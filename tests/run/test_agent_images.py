"""Agents that show pictures in a real run: whatever is killed, a sample is trained with those that it was shown."""

import signal
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from april.learner.policy.counting import IMAGE, RECIPE, VOCABULARY, build_model, save_policy
from april.observe.report.samples import read_step, sample_files
from tests.support.run_processes import APRIL, assert_closed, steps_recorded, wait_until
from tests.support.stored_executions import agree, executions

GAP = 1e-4
"""Largest difference of a token's log-probability between engine and learner, under the weights that sampled it."""


def colours(run_dir, sample):
    """The colour of each picture that a trained sample has."""
    files = [run_dir / "samples" / "images" / f"{name}.png" for name in sample["images"]]
    return [Image.open(file).getpixel((0, 0)) for file in files]


def largest_gap(sample, step):
    """Largest difference between engine and learner, among the tokens sampled under the weights of a policy step."""
    spans = [slice(each["start"], each["end"]) for each in sample["segments"] if each["step"] == step]
    ours, theirs = (np.array(sample[name], float) for name in ("behaviour_logprobs", "learner_logprobs"))
    return max((np.abs(ours[span] - theirs[span]).max() for span in spans), default=0.0)


@pytest.mark.full
def test_each_fork_is_trained_with_the_pictures_that_it_was_shown_whatever_is_killed(
    start_run, start, config_file, run_dir, tmp_path, monkeypatch
):
    policy, read = tmp_path / "vision", tmp_path / "read"
    read.mkdir()
    monkeypatch.setenv("READ_BY_AGENTS", str(read))
    save_policy(build_model(replace(RECIPE, hidden_size=64, layers=1), seed=0), policy)
    options = [
        "--model.path", str(policy), "--agent.program", "tests.support.agent_programs:with_pictures",
        "--agent.sessions", "16", "--sampling.max_response_tokens", "64", "--worker.engine", "transformers",
        "--worker.count", "1", "--learner.ranks", "1", "--evaluation.prompts", "2", "--samples.groups", "64",
    ]  # fmt: skip
    job = start_run(*options, "--schedule.max_steps", "100000")
    for part in ("--name agents-0", "april.cli broker", "--name worker-0", "april.agents.host"):
        before = sum(file.stat().st_size for file in read.iterdir())
        wait_until(lambda before=before: sum(file.stat().st_size for file in read.iterdir()) > before + 600, job)
        job.kill(part)
    trained = steps_recorded(run_dir) + 1
    wait_until(lambda: steps_recorded(run_dir) > trained, job)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output
    wait_until(lambda: job.descendants() == [])
    steps = steps_recorded(run_dir) + 2
    again = start("again", [*APRIL, "run", str(config_file), *options, "--resume", "--schedule.max_steps", str(steps)])
    assert again.wait() == 0, again.output
    summary = assert_closed(run_dir)
    assert (summary["steps"], summary["state"]) == (steps, "finished")
    assert not {"agent_failed", "superseded", "unreadable"} & summary["tokens"]["discarded"].keys()
    assert all(agree(runs) for _, runs in executions(read))
    forks, sampled = set(), []
    for step in sample_files(run_dir):
        for sample in read_step(run_dir, step):
            own = [(sample["group"] % 256, sample["index"], number) for number in (0, 1)]
            if sample["discarded"]:
                assert set(colours(run_dir, sample)) <= set(own)
                continue
            forks.add(sample["fork"])
            assert colours(run_dir, sample) == (own if sample["fork"] == 0 else own[1:])
            is_sampled = [logprob is not None for logprob in sample["behaviour_logprobs"]]
            sampled += np.array(sample["response_ids"])[is_sampled].tolist()
            if sample["trained"]:
                assert largest_gap(sample, step - 1) < GAP
    assert forks == {0, 1} and VOCABULARY[IMAGE] in sampled, "a sampled placeholder stands for no picture"

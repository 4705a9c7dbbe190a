"""A real run in turns: worker and broker are killed while a tool is at work; nothing is lost or asked amiss."""

import os

import pytest

from april.broker.ledger.events import GroupOpened, Leased, RowsAccepted
from april.data.tokenizer import Tokenizer
from april.observe.operate import RunAddress
from april.wire.rows import OBSERVATION
from tests.run.journal import events_and_arrays, with_payloads
from tests.run.processes import assert_closed, wait_until

IN_TURNS = ["--environment.name", "tests.environments.games:wait_at_the_gate", "--environment.turn_ends", '[","]',
            "--environment.max_turn_tokens", "6", "--environment.timeout_s", "170"]  # fmt: skip


def assert_every_answer_fits_its_turn(run_dir, tokenizer):
    """The k-th observation of each sample says k, whoever has sampled the turns; tokens follow one another."""
    holders, lengths, answered, observed, workers = {}, {}, {}, 0, set()
    for event, arrays in events_and_arrays(run_dir):
        match event:
            case GroupOpened():
                lengths |= {(event.group, index): 0 for index in range(event.size)}
            case Leased():
                holders[event.lease_id] = (event.group, event.index)
                workers.add(event.worker)
            case RowsAccepted():
                for row, own in with_payloads(event, arrays):
                    sample = holders[row.lease_id]
                    assert row.start == lengths[sample]
                    lengths[sample] += row.tokens
                    if row.kind == OBSERVATION:
                        times = answered[sample] = answered.get(sample, 0) + 1
                        assert tokenizer.decode(own[: 4 * row.tokens].cast("i")) == str((times - 1) % 10)
                        observed += 1
    return workers, observed


@pytest.mark.full
def test_killed_in_the_midst_of_a_tool_call(start_run, run_dir, policy_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GATE", str(tmp_path))
    asked = lambda: {path.name for path in tmp_path.glob("asked-*")}  # noqa: E731
    one_each = ["--worker.count", "1", "--learner.ranks", "1"]
    job = start_run(*IN_TURNS, *one_each)
    wait_until(asked, job)
    first, target = asked(), RunAddress(run_dir, None, None)

    def is_said():
        """Of the worker, of the samples that are waited for, and of who holds them up."""
        status = target.status()
        states = {sample["state"] for group in status["standing"]["groups"] for sample in group["waits_for"]}
        holding_up = status["standing"]["holding_up"]
        return status["workers"][0]["does"]["tool"] and "tool" in states and holding_up and holding_up[0]["tool"]

    wait_until(is_said, job)
    job.kill("--name worker-0")
    wait_until(lambda: asked() > first, job)
    job.kill("april.cli broker")
    wait_until(lambda: "broker ended with status" in job.output, job)
    (tmp_path / "open").touch()
    assert job.wait() == 0, job.output
    wait_until(lambda: job.descendants() == [])
    summary = assert_closed(run_dir)
    assert (summary["steps"], summary["state"], summary["starts"]["broker"]) == (3, "finished", 2)
    assert summary["tokens"]["refused"] == 0 and not summary["tokens"]["discarded"]
    workers, observed = assert_every_answer_fits_its_turn(run_dir, Tokenizer(policy_folder))
    assert len(workers) == 2 and observed > 20
    assert not [name for name in asked() if os.path.exists(f"/proc/{name.removeprefix('asked-')}")]

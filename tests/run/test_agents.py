"""Agents in a real run: whatever is killed under them, they read the same answers, and nothing said is lost."""

from itertools import groupby, pairwise
from operator import itemgetter

import orjson
import pytest

from tests.run.processes import assert_closed, wait_until

AGENT = ["--agent.program", "tests.agents.program:in_three_turns", "--agent.sessions", "16",
         "--sampling.max_response_tokens", "48",
         "--agent.chat_template", "{% for message in messages %}{{ message.content }}{% endfor %}"]  # fmt: skip


def executions(folder):
    """Of each sample, what its executions read, in their order."""
    for file in sorted(folder.iterdir()):
        lines = map(orjson.loads, file.read_bytes().splitlines())
        yield file.name, [[line["said"] for line in of_one] for _, of_one in groupby(lines, itemgetter("execution"))]


@pytest.mark.full
def test_whatever_is_killed_agents_read_the_same_again_and_nothing_is_lost(start_run, run_dir, tmp_path, monkeypatch):
    read = tmp_path / "read"
    read.mkdir()
    monkeypatch.setenv("READ_BY_AGENTS", str(read))
    job = start_run(*AGENT, "--worker.count", "1", "--learner.ranks", "1")
    for part in ("april.agents.host", "--name worker-0", "--name agents-0", "april.cli broker"):
        before = sum(file.stat().st_size for file in read.iterdir())
        wait_until(lambda before=before: sum(file.stat().st_size for file in read.iterdir()) > before + 600, job)
        job.kill(part)
    assert job.wait() == 0, job.output
    assert job.descendants() == []
    summary = assert_closed(run_dir)
    assert (summary["steps"], summary["state"], summary["starts"]["broker"]) == (3, "finished", 2)
    assert "agent_failed" not in summary["tokens"]["discarded"]
    again = 0
    for sample, runs in executions(read):
        for earlier, later in pairwise(runs):
            again += 1
            assert later[: len(earlier)] == earlier, f"{sample} was answered otherwise when it asked the same again"
    assert again > 3, "several sessions were under way when a part was killed"

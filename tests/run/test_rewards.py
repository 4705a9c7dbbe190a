"""Verifiers that hang, fork, crash, flood and lie, in a real run: each is retried, then dead with its reason."""

import os
import subprocess
import sys
from importlib.util import find_spec

import orjson
import pytest

from april.broker.ledger.events import GroupOpened, Leased, LeaseEnded, SampleScored
from tests.support.journal_events import events
from tests.support.run_processes import wait_until

WILD = """
import functools, os, sys, time

def tame(verifier):
    "Before the run starts, when it is given its example, which the policy cannot say."
    @functools.wraps(verifier)
    def first(response, label, finish_reason):
        return 1.0 if response == first.example(label) else verifier(response, label, finish_reason)
    first.example = "<{}>".format
    return first

@tame
def loop(response, label, finish_reason):
    while True: pass

@tame
def fork(response, label, finish_reason):
    for _ in range(30):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)

@tame
def crash(response, label, finish_reason):
    os._exit(7)

@tame
def flood(response, label, finish_reason):
    while True: os.write(1, b"x" * 1_000_000)

@tame
def memory(response, label, finish_reason):
    return float(len([0] * (1 << 34)))

@tame
def lie(response, label, finish_reason):
    return float("nan")
"""
REASONS = {
    "loop": "no answer within 3 s", "fork": "no answer within 3 s", "crash": "exit code 7",
    "flood": "no answer within 3 s", "memory": "needs more than", "lie": "not finite",
}  # fmt: skip


INSTALLED = [name for name in sys.stdlib_module_names if find_spec(name)]
INSTALLED += ["april", "msgspec", "numpy", "orjson", "pydantic", "torch", "transformers", "zmq"]


@pytest.mark.full
def test_neither_files_named_like_modules_nor_prints_at_an_interpreter_s_start_harm_a_part(config_file, tmp_path):
    """A verifier in the working folder is found all the same, and imports the real modules."""
    noisy, here = tmp_path / "noisy", tmp_path / "here"
    noisy.mkdir()
    here.mkdir()
    (noisy / "sitecustomize.py").write_text("import sys\nprint('good morning')\nsys.stderr.write('x')\n1 / 0\n")
    for name in INSTALLED:
        (here / f"{name}.py").write_text("raise RuntimeError('a module of the working folder')\n")
    (here / "mine.py").write_text(
        "import random, torch\nrandom.Random\ndef grade(response, label): return float(label in response)\n"
    )
    path = os.pathsep.join(filter(None, [str(noisy), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "april.cli", "run", str(config_file), "--reward.name", "mine:grade"]
    done = subprocess.run(
        [*command, "--learner.ranks", "1", "--schedule.max_steps", "2"],
        cwd=here, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = orjson.loads((tmp_path / "runs/small/summary.json").read_bytes())
    assert (summary["state"], summary["steps"], summary["discarded_groups"]) == ("finished", 2, {})
    assert "good morning" in (tmp_path / "runs/small/logs/rewards.log").read_text()
    assert "restart" not in done.stdout + done.stderr


@pytest.mark.full
def test_wild_verifiers_cost_their_own_groups_and_nothing_else(finish_run, run_dir, tmp_path, monkeypatch):
    (tmp_path / "wild.py").write_text(WILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.")
    names = dict(zip(range(1, 12, 2), REASONS, strict=True))
    rows = [{"prompt": f"{row:02d}*3+60=", "label": str(row % 2)} for row in range(64)]
    for row, name in names.items():
        rows[row]["reward"] = f"wild:{name}"
    (tmp_path / "wild.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    wild = ["--data.path", str(tmp_path / "wild.jsonl"), "--no-data.shuffle", "--reward.timeout_s", "3"]
    patience = ["--broker.attempts", "2", "--schedule.max_steps", "4", "--reward.processes", "2"]
    patience += ["--reward.max_failed_share", "1"]
    wild += ["--learner.ranks", "1", "--reward.allowed", orjson.dumps([f"wild:{name}" for name in REASONS]).decode()]
    wild += ["--reward.over_limit", "failed"]
    job, summary = finish_run(*wild, *patience)
    wait_until(lambda: not job.descendants())  # nothing that a verifier started stays
    assert summary["state"] == "finished" and summary["steps"] == 4
    rows_of, holders, scored, failures = {}, {}, set(), {}
    for event in events(run_dir):
        match event:
            case GroupOpened(evaluation=False):
                rows_of[event.group] = event.row
            case Leased():
                holders[event.lease_id] = (event.group, event.index)
            case SampleScored():
                scored.add(rows_of.get(holders[event.lease_id][0]))
            case LeaseEnded(cause="scoring_failed"):
                failures.setdefault(rows_of[holders[event.lease_id][0]], []).append(event.error)
    assert not scored & set(names), "what a wild verifier failed at has a reward"
    assert len(scored) > 10
    assert len(failures.keys() & names.keys()) > 3, "the last ones may still be open at the end"
    for row in failures.keys() & names.keys():
        name = names[row]
        assert all(f"wild:{name}" in error and REASONS[name] in error for error in failures[row]), failures[row]
    letters = orjson.loads((run_dir / "dead_letters.json").read_bytes())["letters"]
    assert {letter["row"] for letter in letters} & names.keys()
    assert all(letter["attempts"] == 2 and "verifier 'wild:" in letter["error"] for letter in letters)
    assert summary["discarded_groups"] == {"dead_sample": len({letter["group"] for letter in letters})}

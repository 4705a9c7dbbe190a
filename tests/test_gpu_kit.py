"""The GPU acceptance: its driver outlives parts that fail, hang or are missing, and each part of it is rehearsed."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from tests.support.marks import full

ROOT = Path(__file__).resolve().parents[1]
DRIVER = ROOT / "benchmarks/gpu/acceptance.py"
PARTS = re.findall(r'Plan\("(\w+)"', DRIVER.read_text())
FIGURES = {"run": {"gpu_quickstart_heldout", "gpu_ledger_closed"}}
"""Figures that a part must come to."""
PATIENCE_S = 60.0

WRITES = """
import sys, time
lines = open(sys.argv[sys.argv.index("--out") + 1], "w")
print('{"name": "figure", "value": 1.0, "unit": "s", "n": 1, "min": 1.0, "max": 1.0}', file=lines, flush=True)
"""
DONE = f"""{WRITES}
print('{{"fact": "piece: out of memory", "value": "Traceback: too much"}}', file=lines)
"""
RAISES = f"""{WRITES}
raise ValueError("nothing came of it")
"""
HANGS = f"""{WRITES}
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path):
    """folder(script=source) -> a folder with these parts"""

    def make(**scripts):
        made = tmp_path / "parts"
        made.mkdir()
        for name, source in scripts.items():
            (made / f"{name}.py").write_text(source)
        return made

    return make


def start(tmp_path, folder, parts, minutes):
    words = ["--minutes", str(minutes), "--json", str(tmp_path / "gpu.json"), "--device", "cpu"]
    command = [sys.executable, str(DRIVER), *words, "--folder", str(folder), "--parts", parts]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read(tmp_path):
    found = orjson.loads((tmp_path / "gpu.json").read_bytes())
    return found, {part["part"]: part for part in found["parts"]}


def is_alive(process_id):
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
def test_the_driver_outlives_parts_that_raise_hang_or_are_missing_and_ends_in_time(tmp_path, folder):
    scripts = folder(start_run=RAISES, learner_step=HANGS, claim=DONE)
    driver = start(tmp_path, scripts, "run,learner,engine,claim", minutes=0.3)
    output, _ = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 1
    found, parts = read(tmp_path)
    statuses = {name: part["status"] for name, part in parts.items()}
    assert statuses == {"run": "failed", "learner": "out of time", "engine": "not built", "claim": "done"}
    assert "ValueError: nothing came of it" in parts["run"]["log"] and "nothing came of it" in output
    assert parts["claim"]["failures"] == ["piece: out of memory"] and "too much" in output
    assert [row["name"] for row in found["rows"]] == ["figure"] * 3 and found["machine"]["gpu"] is None
    child = int((tmp_path / "gpu.learner.log").read_text().split()[1])
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize("number", [signal.SIGKILL, full(signal.SIGTERM)], ids=str)
def test_a_killed_driver_leaves_what_was_done(tmp_path, folder, number):
    driver = start(tmp_path, folder(start_run=DONE, learner_step=HANGS), "run,learner", minutes=5)
    log = tmp_path / "gpu.learner.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    wait_until(lambda: len(read(tmp_path)[0]["rows"]) == 2)
    driver.send_signal(number)
    driver.communicate(timeout=PATIENCE_S)
    found, parts = read(tmp_path)
    assert parts["run"]["status"] == "done" and len(found["rows"]) == 2
    assert parts["learner"]["status"] == ("running" if number == signal.SIGKILL else "interrupted")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PARTS)
def test_each_part_of_the_acceptance_is_rehearsed(tmp_path, name):
    """All in under five minutes on a machine with nothing else to do."""
    words = ["--device", "cpu", "--tiny", "--minutes", "13", "--parts", name, "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True)
    found, parts = read(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [part] = parts.values()
    assert part["status"] == "done" and not part["failures"], json.dumps(part, indent=1)
    assert part["facts"], "it reported nothing"
    assert {row["name"] for row in found["rows"]} >= FIGURES.get(name, set())


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_part_on_vllm_is_rehearsed(tmp_path):
    rows = tmp_path / "rows.jsonl"
    words = ["--device", "cpu", "--tiny", "--seconds", "800", "--out", str(rows)]
    script = ROOT / "benchmarks/gpu/vllm_claim.py"
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True)
    found = [orjson.loads(line) for line in rows.read_bytes().splitlines()]
    assert done.returncode == 0 and not [line for line in found if ": failed" in line.get("fact", "")], done.stdout
    names = {line.get("name") for line in found}
    assert names >= {"gpu_vllm_vs_alone_32", "gpu_vllm_abort_to_journal_s_32", "gpu_vllm_continuous_vs_sync"}

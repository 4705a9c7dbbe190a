"""Log lines: of text for people, or one JSON object each, with the ids that it is about."""

import subprocess
import sys

import orjson
import pytest

from april.util.logs import last_error

SCRIPT = """
import logging
from april.util.logs import log_to_stderr, last_error
log_to_stderr("worker-0", "{log_format}", run="small", worker="worker-0")
logging.getLogger("april.x").info("sample %d.%d\\ncame back", 7, 1, extra={{"group": 7, "sample": 1, "secret": "s"}})
logging.getLogger("april.x").info("plain")
raise RuntimeError("broken")
"""


def lines(log_format):
    command = [sys.executable, "-c", SCRIPT.format(log_format=log_format)]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert ended.returncode == 1
    return ended.stderr.decode().splitlines()


def test_json_lines_carry_ids_and_the_exception_that_ends_the_process():
    came_back, plain, broken = map(orjson.loads, lines("json"))
    assert came_back.pop("time").endswith("+00:00")
    assert came_back == {
        "level": "info", "process": "worker-0", "logger": "april.x", "message": "sample 7.1\ncame back",
        "run": "small", "worker": "worker-0", "group": 7, "sample": 1,
    }  # fmt: skip
    assert "group" not in plain and plain["worker"] == "worker-0"
    assert (broken["level"], broken["run"]) == ("critical", "small") and "RuntimeError: broken" in broken["exception"]


def test_text_lines_name_the_process():
    assert lines("text")[2].endswith(" worker-0 INFO plain")


FLOODED = """
import logging
from april.util.logs import log_to_stderr
log_to_stderr("broker", "{log_format}")
log = logging.getLogger("april.x")
log.warning("a peer says %r, and more", "x" * 10_000_000)
try:
    raise RuntimeError("y" * 10_000_000)
except RuntimeError:
    log.exception("it failed")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_has_a_bound_whatever_it_repeats(log_format):
    command = [sys.executable, "-c", FLOODED.format(log_format=log_format)]
    written = subprocess.run(command, capture_output=True, timeout=60).stderr.decode()
    assert max(map(len, written.splitlines())) < 20_000
    assert "a peer says 'xxx" in written and "xxx', and more" in written


GIVES_WAY = """
import os, pathlib
from april.util.lifetime import give_way
session = pathlib.Path("/proc/self/autogroup")
give_way()
print(os.nice(0), *(session.read_text().split()[-1:] if session.exists() else ["10"]))
"""


def test_a_low_priority_process_lowers_its_session_s_priority_too():
    ended = subprocess.run([sys.executable, "-c", GIVES_WAY], capture_output=True, timeout=60, start_new_session=True)
    assert ended.stdout.split() == [b"10", b"10"], ended.stderr


REPLACED = """
import logging, sys
from april.util.logs import log_to_stderr, last_error
log_to_stderr("broker")
sys.stderr.close()
sys.stderr = sys.stdout
logging.getLogger("april.x").info("found")
"""


def test_log_lines_go_to_the_current_stderr():
    ended = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, timeout=60)
    assert ended.stdout.endswith(b" broker INFO found\n")


TRACEBACK = "Traceback (most recent call last):\n  File 'a.py'\n"
JSON_LINE = '{"message": "ended by E", "exception": "Traceback (most recent call last):\\n  File 1\\nE: x"}\n'


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        ("12:00 worker-0 INFO connecting\napril worker: no room; lower it\n", "april worker: no room; lower it"),
        (f"{TRACEBACK}KeyError: 1\n\nthen\n\n{TRACEBACK}my.Wrong: why\nlauncher: rank 0 has ended\n", "my.Wrong: why"),
        (
            "".join(f"[rank0]: {line}\n" for line in (*TRACEBACK.splitlines(), "ValueError: scalar")),
            "ValueError: scalar",
        ),
        (JSON_LINE, "E: x"),
    ],
)
def test_the_error_that_ended_a_process_is_found_in_its_log(text, cause):
    assert last_error(text) == cause

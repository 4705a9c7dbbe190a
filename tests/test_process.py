"""Log lines for machines: one object each, with the ids that it is about."""

import logging
import subprocess
import sys

import orjson

SCRIPT = """
import logging
from april.process import log_to_stderr
log_to_stderr("worker-0", "json", run="small", worker="worker-0")
logging.getLogger("april.x").info("sample %d.%d\\ncame back", 7, 1, extra={"group": 7, "sample": 1, "secret": "s"})
logging.getLogger("april.x").info("plain")
raise RuntimeError("broken")
"""


def test_json_lines_carry_ids_and_the_exception_that_ends_the_process():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=60)
    came_back, plain, broken = map(orjson.loads, ended.stderr.splitlines())
    assert came_back.pop("time").endswith("+00:00")
    assert came_back == {
        "level": "info", "process": "worker-0", "logger": "april.x", "message": "sample 7.1\ncame back",
        "run": "small", "worker": "worker-0", "group": 7, "sample": 1,
    }  # fmt: skip
    assert "group" not in plain and plain["worker"] == "worker-0"
    assert (broken["level"], broken["run"]) == ("critical", "small") and "RuntimeError: broken" in broken["exception"]
    assert ended.returncode == 1


def test_text_lines_name_the_process(capsys):
    from april.process import log_to_stderr

    log_to_stderr("broker", run="small")
    logging.getLogger("april.x").warning("a thing", extra={"group": 7})
    assert capsys.readouterr().err.endswith(" broker WARNING a thing\n")

"""Every user of a machine may read the command lines of its processes: no secret of a configuration is in them."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from april.agents.programs import ProgramRunner
from april.util.registry import python_command
from april.workers.engines.sglang.server import ServerSettings, SGLangServer
from april.workers.environments.process import EnvironmentPool, EnvironmentRules
from april.workers.rewards.messages import RewardRules
from april.workers.rewards.pool import RewardPool
from tests.support.run_processes import wait_until

SECRET = "s3cr3t-of-the-test"
LAUNCH_SERVER = """
import json, multiprocessing, pathlib, sys

def write(name):
    pathlib.Path(name).write_text(json.dumps([__name__, pathlib.Path("/proc/self/cmdline").read_text(), sys.argv[1:]]))

if __name__ == "__main__":
    write("server.json")
    child = multiprocessing.get_context("spawn").Process(target=write, args=("child.json",))
    child.start()
    child.join()
"""


def pools():
    yield RewardPool(1, RewardRules(timeout_s=60.0, memory_mb=4096, url=f"http://{SECRET}@h/score"))
    yield EnvironmentPool(1, EnvironmentRules(f"{SECRET}.module:f", timeout_s=60.0, memory_mb=4096))


def test_processes_of_a_pool_get_their_rules_over_a_pipe():
    for pool in pools():
        (process,) = pool.processes
        wait_until(lambda process=process: process.ready)
        assert SECRET not in Path(f"/proc/{process.inner.pid}/cmdline").read_text()
        pool.close()


@pytest.mark.parametrize("options", [{}, {"api_key": SECRET, "text": "x" * 200_000}])
def test_an_agent_program_gets_its_options_over_a_pipe(options):
    async def command_line():
        runner = ProgramRunner("gymnasium", options, 1, None)
        await runner.start()
        text = Path(f"/proc/{runner.process.pid}/cmdline").read_text()
        await runner.close()
        return text

    assert "april.agents.host" in (text := asyncio.run(command_line())) and SECRET not in text


def test_an_inference_server_gets_its_options_out_of_sight(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/launch_server.py").write_text(LAUNCH_SERVER)
    settings = ServerSettings(Path(sys.executable), tmp_path, tmp_path / "log", options={"api_key": SECRET})
    server = SGLangServer(settings)
    server.spawn()
    wait_until(lambda: not server.alive)
    for file in ("server.json", "child.json"):
        assert (tmp_path / file).exists(), (tmp_path / "log").read_text()
        name, command_line, words = json.loads((tmp_path / file).read_text())
        assert SECRET not in command_line and words == settings.arguments(server.port) and SECRET in words, name


def test_an_importer_of_the_old_kind_is_skipped_as_python_skips_it(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path, object()])
    assert python_command("-c", "")[0] == sys.executable
    monkeypatch.setattr(sys, "meta_path", [object()])
    assert python_command("-c", "") == [sys.executable, "-c", ""]

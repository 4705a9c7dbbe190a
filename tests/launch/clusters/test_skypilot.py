"""The recipe for SkyPilot: keys that it knows, and a script that makes a run of the machines it is given."""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from april.wire.security import keygen
from tests.support.hosts.hosts import end, hosts
from tests.support.run_processes import assert_closed, wait_until

ROOT = Path(__file__).parents[3]
RECIPE = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "volumes", "setup", "run"}
"""of a task, at https://docs.skypilot.co/en/latest/reference/yaml-spec.html"""


def test_the_skypilot_recipe_has_valid_keys_and_scripts():
    assert RECIPE.keys() <= KEYS
    for script in (RECIPE["setup"], RECIPE["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    called = re.findall(r"launch/install[\w-]*\.sh", RECIPE["setup"].replace("$SERVER", RECIPE["envs"]["SERVER"]))
    assert called and all(os.access(ROOT / path, os.X_OK) for path in called)


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_the_skypilot_recipe_starts_a_run_on_two_machines(config_file, tmp_path):
    keygen.make_folder(tmp_path / "KEYS")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    with TemporaryDirectory(prefix="sky") as state, hosts(2, Path(state)) as made:
        machines = {"SKYPILOT_NODE_IPS": f"{made.address(0)}\n{made.address(1)}", "SKYPILOT_NUM_NODES": "2"}
        given = {name: str(value) for name, value in RECIPE["envs"].items()} | {"CONFIG": config_file.name}
        started = []
        for rank in range(2):
            environment = os.environ | machines | given | {"SKYPILOT_NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            with (tmp_path / f"{rank}.log").open("wb") as log:
                command = made.command(rank, "bash", "-c", RECIPE["run"])
                started.append(
                    subprocess.Popen(
                        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
        try:
            wait_until(lambda: all(process.poll() is not None for process in started), timeout_s=600)
            said = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
            assert [process.returncode for process in started] == [0, 0], said
        finally:
            for process in started:
                end(process)
    assert assert_closed(tmp_path / "runs" / "small")["state"] == "finished"

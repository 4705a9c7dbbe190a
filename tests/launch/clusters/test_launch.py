"""What launchers submit to a cluster, and what they refuse before."""

import re
import shlex
import signal
import subprocess

import pytest
import yaml

from april import config as configuration
from april.cli import main
from april.cli.launch import launcher_of, worker_count
from april.config import ConfigError
from april.launch import devices
from april.launch.clusters import LAUNCHERS, slurm
from april.launch.clusters.launcher import FOLDER
from april.util.registry import FOLDERS_VARIABLE
from april.wire.security import keygen
from april.wire.security.keys import load_keys
from tests.support.run_processes import APRIL, assert_closed, wait_until


@pytest.fixture
def keys(tmp_path):
    keygen.make_folder(tmp_path / "keys")
    return str(tmp_path / "keys")


@pytest.fixture
def files(config_file, keys):
    """files(on, *overrides): content by name of the files that would be submitted."""

    def write(on, *overrides):
        config = configuration.load(config_file, ["--security.keys", keys, "--launch.on", on, *overrides], inputs=())
        return launcher_of(config, LAUNCHERS.find(on)).files()

    return write


def test_a_dry_run_prints_what_would_be_submitted_and_writes_nothing(config_file, keys, tmp_path, capsys):
    for on in LAUNCHERS.shipped:
        options = ["--launch.hosts", "['127.0.0.1']", "--launch.image", "april", "--launch.volume", "runs"]
        assert main(["launch", str(config_file), "--on", on, "--dry-run", "--security.keys", keys, *options]) == 0
        assert re.search(r"april\W+part\W+broker", capsys.readouterr().out), on
    assert not (tmp_path / "runs").exists()


def test_scripts_for_slurm_are_shell_and_start_every_part(files):
    texts = files(
        "slurm", "--run.name", "my run", "--launch.learner_nodes", "2", "--worker.count", "3", "--launch.account", "lab"
    )
    assert list(texts) == ["run.sbatch", "worker.sbatch"]
    for text in texts.values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        assert "#SBATCH --account=lab" in text
    assert "--nodes=2" in texts["run.sbatch"] and "--nodes 2 --node $SLURM_PROCID" in texts["run.sbatch"]
    assert "--ntasks=3" in texts["worker.sbatch"]


def test_with_a_cpu_partition_slurm_s_job_is_heterogeneous_and_uses_it_for_cpu_parts(files):
    options = (
        "--launch.partition", "gpus", "--learner.ranks", "4", "--launch.learner_nodes", "2", "--launch.cores", "3",
        "--launch.time", "1-0", "--reward.where", "scorer", "--learner.device", "auto",
    )  # fmt: skip
    texts = files("slurm", "--launch.cpu_partition", "cpus", *options)
    assert list(texts) == ["run.sbatch", "worker.sbatch", "scorer.sbatch"]
    for text in texts.values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    broker, learner = map(asked_of_slurm, texts["run.sbatch"].split("#SBATCH hetjob\n"))
    assert broker["partition"] == "cpus" and broker["nodes"] == "1" and broker["cpus-per-task"] == "3"
    assert learner["partition"] == "gpus" and learner["nodes"] == "2" and learner["cpus-per-task"] == "6"
    assert "gpus-per-node" not in broker and learner["gpus-per-node"] == "2"
    assert {"time", "requeue", "signal", "output"} <= broker.keys(), "the learner's inherits but its log"
    assert re.search(r"^april part broker .*logs/broker.log 2>&1 &$", texts["run.sbatch"], re.MULTILINE)
    assert re.search(r"srun --het-group=1 .*\\\n +'exec april part learner", texts["run.sbatch"])
    assert asked_of_slurm(texts["worker.sbatch"])["partition"] == "gpus"
    assert asked_of_slurm(texts["scorer.sbatch"])["partition"] == "cpus"
    alike = files("slurm", *options)
    assert "hetjob" not in alike["run.sbatch"] and asked_of_slurm(alike["scorer.sbatch"])["partition"] == "gpus"


def asked_of_slurm(script):
    """Value by option of its #SBATCH lines."""
    words = (word for line in re.findall("^#SBATCH (.*)", script, re.MULTILINE) for word in shlex.split(line))
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


@pytest.fixture
def launcher_and_commands(config_file, keys, monkeypatch):
    """launcher_and_commands(answers, *overrides): a launcher of Slurm's, and the commands that it will have given, each
    answered by its first word"""

    def make(answers, *overrides):
        commands = []

        def ask(words, **given):
            commands.append(words)
            if isinstance(said := answers.get(words[0], ""), Exception):
                raise said
            return said

        monkeypatch.setattr(slurm, "ask", ask)
        options = ["--security.keys", keys, "--launch.on", "slurm", *overrides]
        launcher = launcher_of(configuration.load(config_file, options, inputs=()), slurm.Slurm)
        launcher.write()
        return launcher, commands

    return make


def test_slurm_ends_only_unfinished_jobs_and_a_heterogeneous_one_by_its_first_id(launcher_and_commands):
    launcher, commands = launcher_and_commands({"squeue": "1 2\n4 2\n3 1"})
    launcher.remember(main="1", holders={"2": "worker", "3": "worker"})
    launcher.stop()
    assert {words[-1] for words in commands if words[0] == "scancel"} == {"1", "3"}, "scancel fails at others"


def test_a_refused_heterogeneous_job_is_reported_with_its_key(launcher_and_commands):
    said = "sbatch failed: Requested operation not supported on this system"
    for options, mend in (([], ""), (["--launch.cpu_partition", "cpus"], "; key 'launch.cpu_partition' = 'cpus' asks")):
        launcher, _ = launcher_and_commands({"sbatch": ConfigError(said)}, *options)
        with pytest.raises(ConfigError) as refused:
            launcher.submit()
        words = str(refused.value).removeprefix(said)
        assert words.startswith(mend) if mend else not words


def test_the_plan_for_ray_has_every_part_and_leaves_restarts_to_ray(files):
    options = ("--launch.learner_nodes", "2", "--worker.count", "3", "--worker.device", "auto", "--launch.cores", "6")
    texts = files("ray", *options)
    plan = yaml.safe_load(texts["plan.yaml"])
    parts = [plan["broker"], plan["learner"], *plan["holders"].values()]
    for text in (texts["submit.sh"], *(part["script"] for part in parts)):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert all(part["script"].endswith("--restarts=0\n") for part in parts), "Ray restarts"
    assert plan["learner"]["nodes"] == 2 and plan["holders"]["worker"]["count"] == 3
    assert plan["holders"]["worker"]["needs"] == {"CPU": 6, "memory": 32 * 2**30, "GPU": 1}


def test_manifests_name_every_part_once_and_fit_kubernetes_schemas(files):
    from kubernetes_validate import validate

    texts = files(
        "kubernetes", "--launch.image", "april:1", "--launch.volume", "runs", "--launch.learner_nodes", "2",
        "--worker.device", "auto", "--learner.device", "auto",
    )  # fmt: skip
    objects = list(yaml.safe_load_all(texts["run.yaml"]))
    for one in objects:
        validate(one, "1.30", strict=True)
    parts = {one["metadata"]["name"]: one for one in objects if "template" in one.get("spec", {})}
    assert {name: one["kind"] for name, one in parts.items()} == {
        "april-small-broker": "StatefulSet", "april-small-learner": "Job", "april-small-worker": "Deployment",
    }  # fmt: skip
    assert parts["april-small-learner"]["spec"]["completionMode"] == "Indexed"
    containers = [one["spec"]["template"]["spec"]["containers"][0] for one in parts.values()]
    assert all("--restarts=0" in one["command"] for one in containers), "Kubernetes restarts"
    assert containers[2]["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_a_module_beside_the_configuration_is_carried_into_pods(files, config_file):
    (config_file.parent / "own_rewards.py").write_text("def brief(response, label):\n    return 0.0\n")
    (config_file.parent / "other.py").write_text("")
    options = ("--launch.image", "april:1", "--launch.volume", "runs", "--reward.name", "own_rewards:brief")
    texts = files("kubernetes", *options)
    objects = {one["metadata"]["name"]: one for one in yaml.safe_load_all(texts["run.yaml"])}
    carried = objects["april-small-config"]["data"]
    assert list(carried) == ["config.toml", "own_rewards.py"] and "def brief" in carried["own_rewards.py"]
    pod = objects["april-small-worker"]["spec"]["template"]["spec"]["containers"][0]
    mounted = next(one["mountPath"] for one in pod["volumeMounts"] if one["name"] == "config")
    assert f"{mounted}/config.toml" in pod["command"] and {"name": FOLDERS_VARIABLE, "value": mounted} in pod["env"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on", "kubernetes"], "key 'security.keys' = 'auto' names no keys"),
        (["--on", "slurm", "--security.keys", "off"], "key 'security.keys' = 'off' names no keys"),
        (["--on", "slurm", "--launch.learner_nodes", "2", "--learner.ranks", "3"], "does not divide learner.ranks = 3"),
        (["--on", "moon"], "key 'launch.on' = 'moon' is no place to launch on"),
        (["--on", "ssh", "KEYS"], "key 'launch.hosts' names 0 machines"),
    ],
)
def test_a_configuration_that_cannot_be_launched_is_refused_with_a_sentence(options, said, config_file, keys, capsys):
    options = [word for option in options for word in (["--security.keys", keys] if option == "KEYS" else [option])]
    assert main(["launch", str(config_file), "--dry-run", *options]) == 2
    assert said in capsys.readouterr().err


def test_the_number_of_workers_is_given_as_workers_n():
    assert worker_count(["workers=12"]) == 12
    with pytest.raises(ConfigError, match="workers=12"):
        worker_count(["12"])


@pytest.mark.full
def test_a_launched_run_is_scaled_queried_and_stopped(config_file, tmp_path, capsys):
    run_dir = tmp_path / "runs" / "small"
    endless = [
        "--schedule.max_steps", "100000", "--learner.ranks", "1", "--worker.count", "1", "--data.epochs", "99999",
    ]  # fmt: skip
    assert main(["launch", str(config_file), "--on", "local", *endless]) == 0
    assert (run_dir / FOLDER / "worker-0.sh").is_file()

    def status():
        capsys.readouterr()
        assert main(["launch", "status", str(run_dir)]) == 0
        return capsys.readouterr().out

    try:
        wait_until((run_dir / "metrics.jsonl").exists)
        assert main(["launch", "scale", str(run_dir), "workers=2"]) == 0
        wait_until(lambda: "worker-1" in status() and status().count(" runs") == 4)
        assert main(["launch", "logs", str(run_dir), "worker-1"]) == 0
        assert "worker-1.log" in capsys.readouterr().out
    finally:
        assert main(["launch", "stop", str(run_dir)]) == 0
        wait_until(lambda: " runs" not in status())
    assert assert_closed(run_dir)["state"] == "stopped"


def test_over_ssh_a_dead_machine_blocks_no_command(config_file, tmp_path):
    """Its workers are started on other machines, and the run can be queried and stopped; its keys are made before."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/bash\nscript=$(cat); echo "$1 $script" >>{tmp_path}/log; [ ! -e {tmp_path}/lost-$1 ] || exit 255\n'
        "case $script in *setsid*) echo 4242;; *'kill -0'*) echo runs;; esac\n"
    )
    ssh.chmod(0o755)
    hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    options = ["--launch.hosts", str(hosts), "--launch.ssh", str([str(ssh)]), "--worker.count", "2"]
    assert main(["launch", str(config_file), "--on", "ssh", *options]) == 0
    config = configuration.load(tmp_path / "runs/small/config.toml", [], inputs=())
    assert load_keys(config.keys, "broker") and config.keys.parent == config.run_dir
    launcher = launcher_of(config, LAUNCHERS.find("ssh"))
    (tmp_path / f"lost-{hosts[1]}").touch()
    status = dict(line.split(maxsplit=1) for line in launcher.status().splitlines())
    assert status["worker-0"].endswith("does not answer") and status["worker-1"].endswith("runs")
    launcher.scale(3)
    places = {part: host for part, (host, *_) in launcher.remembered()["parts"].items()}
    assert [places[f"worker-{index}"] for index in range(4)] == [hosts[1], hosts[2], hosts[2], hosts[2]]
    launcher.stop()
    assert (tmp_path / "log").read_text().count("kill -TERM") == 5, "broker and four workers, one of them in vain"


def test_over_ssh_each_part_has_its_own_accelerators_and_those_of_an_ended_one_are_reused(config_file, keys, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/bash\nscript=$(cat)\ncase $script in *setsid*) wc -l <{tmp_path}/count; echo >>{tmp_path}/count;;\n"
        f"*'kill -0'*) [[ $script == *'kill -0 3 '* ]] && echo has ended || echo runs;; esac\n"
    )
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\necho 0.5.23\n")
    for program in (ssh, python):
        program.chmod(0o755)
    (tmp_path / "count").touch()
    options = (
        "--launch.hosts", "['127.0.0.1', '127.0.0.2']", "--launch.ssh", str([str(ssh)]), "--learner.device", "auto",
        "--worker.device", "auto", "--worker.engine", "sglang", "--engine.python", str(python),
        "--engine.servers", "2", "--learner.ranks", "2", "--worker.count", "3",
    )  # fmt: skip
    assert main(["launch", str(config_file), "--on", "ssh", "--security.keys", keys, *options]) == 0
    folder = tmp_path / "runs/small" / FOLDER

    def seen(part):
        return re.findall("--accelerators ([0-9:]+)", (folder / f"{part}.sh").read_text())

    assert seen("broker") == [] and seen("learner") == ["0:2"]
    assert [seen(f"worker-{index}") for index in range(3)] == [["0:2"], ["2:4"], ["4:6"]]
    launcher = launcher_of(
        configuration.load(tmp_path / "runs/small/config.toml", [], inputs=()), LAUNCHERS.find("ssh")
    )
    launcher.scale(4)
    assert launcher.remembered()["parts"]["worker-3"][2:] == [2, 4], "worker-1, which was process 3, has ended"
    assert launcher.remembered()["parts"]["worker-4"][2:] == [6, 8]


def test_a_part_sees_the_accelerators_of_its_span_and_is_refused_more_than_there_are():
    assert devices.devices_in_span("2:4", ["0", "1", "5", "6"]) == ["5", "6"]
    assert devices.devices_in_span("2:4", []) == [], "on a machine without accelerators `auto` is the processor"
    for span, here, said in (("2", "0", "is no span"), ("3:3", "0", "is no span"), ("0:2", "0", "the 1 that are here")):
        with pytest.raises(ConfigError, match=said):
            devices.devices_in_span(span, [here])


def test_a_part_is_restarted_until_its_restarts_are_used_up(tmp_path):
    """`PartSupervisor` returns the part's own status; a part that refuses to work at its first start is not
    restarted."""
    counter, sleepy = tmp_path / "starts", "import sys, pathlib; p = pathlib.Path(sys.argv[1]); "
    program = sleepy + "p.write_text(p.read_text() + 'x' if p.exists() else 'x'); sys.exit(int(sys.argv[2]))"
    from april.launch.part import PartSupervisor

    for status, restarts, starts in ((7, 1, 2), (2, 1, 1), (0, 1, 1)):
        counter.unlink(missing_ok=True)
        said = []
        command = ["python3", "-c", program, str(counter), str(status)]
        assert PartSupervisor("part", command, restarts, said.append).run() == status
        assert len(counter.read_text()) == starts, said


@pytest.mark.parametrize(("statuses", "last"), [("420", 0), ("422", 2)])
def test_a_refusal_at_a_restart_costs_a_restart_and_ends_the_part_when_none_is_left(tmp_path, statuses, last):
    """It may pass, as while the broker starts again, or be final."""
    from april.launch.part import PartSupervisor

    left, said = tmp_path / "left", []
    left.write_text(statuses)
    program = (
        "import sys, pathlib; p = pathlib.Path(sys.argv[1]); now, *rest = p.read_text(); p.write_text(''.join(rest))"
    )
    command = ["python3", "-c", f"{program}; sys.exit(int(now))", str(left)]
    assert PartSupervisor("part", command, 1, said.append).run() == last
    assert not left.read_text(), said


def test_a_part_stopped_during_its_start_ends(monkeypatch):
    from april.launch import part

    start = subprocess.Popen

    def start_late(*words, **given):
        signal.raise_signal(signal.SIGTERM)
        return start(*words, **given)

    monkeypatch.setattr(part.subprocess, "Popen", start_late)
    keeper = part.PartSupervisor("part", ["sleep", "60"], 0, lambda text: None, leave_s=20.0)
    assert keeper.run() == part.shell_status(-signal.SIGTERM), "it was asked, and not killed"


def test_a_part_follows_a_broker_that_has_moved(tmp_path):
    from april.launch.part import PartSupervisor

    address, seen = tmp_path / "address", tmp_path / "seen"
    address.write_text("tcp://a:1")
    program = (
        "import pathlib, sys, time; folder = pathlib.Path(sys.argv[1]); text = (folder / 'address').read_text()\n"
        "with (folder / 'seen').open('a') as seen: seen.write(text + '\\n')\n"
        "(folder / 'address').write_text('tcp://b:2')\n"
        "time.sleep(0 if text.endswith('b:2') else 60)"
    )
    keeper = PartSupervisor("part", ["python3", "-c", program, str(tmp_path)], 0, lambda text: None, run_dir=tmp_path)
    assert keeper.run() == 0
    assert seen.read_text().split() == ["tcp://a:1", "tcp://b:2"]


@pytest.mark.full
def test_a_signal_is_passed_on_and_the_part_may_end_in_order(start, tmp_path, config_file):
    job = start("part", [*APRIL, "part", "broker", str(config_file)])
    run_dir = tmp_path / "runs" / "small"
    wait_until((run_dir / "address").exists, job)
    job.process.terminate()
    assert job.wait() == 0, job.output
    assert "broker has come to its end" in job.output

"""Which accelerators each part of `april run` gets, as a plan; where there are too few, and where there are none."""

import sys

import pytest

from april.cli import main
from april.config import ConfigError, load
from april.launch import devices, supervisor
from april.launch.devices import place_parts, visible_devices

SGLANG, VLLM = ["--worker.engine", "sglang"], ["--worker.engine", "vllm"]
TP2 = ["--engine.server.tp_size", "2"]
SHARED = [*SGLANG, "--devices.share", "true"]
CUDA = ["--worker.device", "cuda", "--learner.device", "cuda"]
URL = ["--engine.url", "http://a:1,http://b:1"]


@pytest.fixture
def configured(config_file):
    """A configuration with two workers and two learner ranks on `auto`."""
    return lambda *words: load(config_file, ["--learner.ranks", "2", "--worker.count", "2", *words])


def numbers(count):
    return [str(number) for number in range(count)]


def spans(placed):
    return {part: "".join(devices) for part, devices in placed.items()}


PLANS = {
    "one each": ([], 4, {"learner": "01", "worker-0": "2", "worker-1": "3"}),
    "more than wanted": ([], 8, {"learner": "01", "worker-0": "2", "worker-1": "3"}),
    "ranks of a server": ([*SGLANG, *TP2], 6, {"learner": "01", "worker-0": "23", "worker-1": "45"}),
    "ranks of vLLM's": (
        [*VLLM, "--engine.server.tensor_parallel_size", "2"], 6, {"learner": "01", "worker-0": "23", "worker-1": "45"},
    ),
    "several servers": (
        [*SGLANG, *TP2, "--engine.servers", "2"], 10, {"learner": "01", "worker-0": "2345", "worker-1": "6789"},
    ),
    "servers of others": ([*SGLANG, *URL], 2, {"learner": "01"}),
    "the learner's alone": (["--worker.device", "cpu"], 2, {"learner": "01"}),
    "the workers' alone": (["--learner.device", "cpu"], 2, {"worker-0": "0", "worker-1": "1"}),
    "both on the same": (SHARED, 2, {"learner": "01", "worker-0": "0", "worker-1": "1"}),
    "both on the same of more": (SHARED, 8, {"learner": "01", "worker-0": "0", "worker-1": "1"}),
    "a worker without a rank": (
        [*SHARED, "--learner.ranks", "1"], 2, {"learner": "0", "worker-0": "0", "worker-1": "1"},
    ),
    "one for everybody": (
        [*SHARED, "--learner.ranks", "1", "--worker.count", "1"], 1, {"learner": "0", "worker-0": "0"},
    ),
    "wide workers share all": ([*SHARED, *TP2], 4, {"learner": "01", "worker-0": "01", "worker-1": "23"}),
    "none for auto": ([], 0, {}),
    "none wanted": (["--worker.device", "cpu", "--learner.device", "cpu"], 4, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_learner_ranks_get_the_first_accelerators_then_each_worker(configured, case):
    words, here, plan = PLANS[case]
    assert spans(place_parts(configured(*words), numbers(here))) == plan


REFUSED = {
    "none, though insisted on": (CUDA, 0, "4 accelerators are wanted and 0 are here"),
    "one insists": (["--learner.device", "cuda"], 0, "too few for learner.ranks = 2"),
    "ranks cannot share": (SHARED, 1, "2 accelerators are wanted .* too few for learner.ranks = 2"),
    "neither can workers": ([*SHARED, "--engine.servers", "3"], 2, "6 accelerators .* worker.count = 2 with 3 each"),
    "sharing by default": ([], 3, "set devices.share = true to have both on the same"),
    "placed by an option": ([*SGLANG, "--engine.server.base_gpu_id", "4"], 8, "base_gpu_id' = 4 .* leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_impossible_placement_is_refused_with_a_sentence(configured, case):
    words, here, why = REFUSED[case]
    with pytest.raises(ConfigError, match=why):
        place_parts(configured(*words), numbers(here))


def test_devices_keep_the_names_in_this_process_s_environment(monkeypatch):
    monkeypatch.setattr("april.launch.devices.DRIVERS", ("/dev/null",))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for variable in devices.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert visible_devices() == ["0", "1"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5")
    assert visible_devices() == ["4", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,beyond")
    assert visible_devices() == ["GPU-a", "GPU-b"]


def test_each_part_sees_only_its_own_devices_and_others_inherit_the_environment(configured, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    config = configured("--run.dir", str(tmp_path))
    run = supervisor.Supervisor(config, None, place_parts(config, ["5", "6", "7", "8"]))
    run.logs.mkdir(parents=True)
    broker = run._part("broker", [], config.broker)
    learner, workers = run._learner_part("config", "address"), [run._worker_part(i, "config", "") for i in range(2)]
    for part in (broker, learner, *workers):
        say = "import os; print(*(os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES')))"
        part.command = [sys.executable, "-c", say]
        part.start()
        part.wait(60)
    said = [part.log.read_text().split() for part in (broker, learner, *workers)]
    assert said == [["5,6,7", "None"], ["5,6", "5,6"], ["7", "7"], ["8", "8"]]


@pytest.mark.full
def test_a_dry_run_counts_and_places_the_servers_accelerators(config_file, capsys, monkeypatch):
    monkeypatch.setattr("april.workers.engines.sglang.server.installed_server", lambda *_: "SGLang")
    words = [*SGLANG, *TP2, "--engine.servers", "2", "--worker.count", "2", "--learner.ranks", "2"]
    assert main(["run", str(config_file), "--dry-run", *words]) == 0
    assert "devices    none here: learner and workers compute on the CPU" in capsys.readouterr().out
    assert main(["run", str(config_file), "--dry-run", *words, "--hardware", "10"]) == 0
    said = capsys.readouterr().out
    assert "10 accelerators: 8 for workers, 2 for the learner" in said
    assert "learner: 0,1\n" in said and "worker-0: 2,3,4,5\n" in said and "worker-1: 6,7,8,9\n" in said
    monkeypatch.setattr("april.launch.devices.DRIVERS", ("/dev/null",))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert main(["run", str(config_file), "--dry-run", *words]) == 2
    assert "missing: 10 accelerators are wanted and 8 are here" in capsys.readouterr().out
    assert main(["run", str(config_file), "--dry-run", *words, *SHARED, "--devices.memory_gib", "80"]) == 0
    said = capsys.readouterr().out
    assert "8 accelerators: 8 for workers, 2 for the learner that share them" in said
    assert "learner: 0,1\n" in said and "worker-0: 0,1,2,3\n" in said and "over gloo" in said
    assert "memory     80.0 GiB of each accelerator: the learner takes about" in said


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """System files of a machine with four accelerators, the last one on a second NUMA node."""
    for index in range(4):
        address = f"0000:{index:02x}:00.0"
        facts, place_of = tmp_path / "proc/driver/nvidia/gpus" / address, tmp_path / "sys/bus/pci/devices" / address
        facts.mkdir(parents=True)
        place_of.mkdir(parents=True)
        (facts / "information").write_text(f"Model: \t H\nGPU UUID: \t GPU-{index}abc-def\n")
        (place_of / "numa_node").write_text(f"{int(index == 3)}\n")
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    monkeypatch.setattr(devices, "device_uuids", lambda: [f"{index}abc-def" for index in range(4)])
    return tmp_path


def test_a_placement_names_numa_nodes_and_a_worker_on_two_is_refused_with_one_numa_node(configured, two_nodes):
    nodes = devices.numa_nodes(numbers(4), two_nodes)
    words = [*SGLANG, *TP2, "--worker.count", "1"]
    placed = place_parts(configured(*words), numbers(4))
    assert devices.describe_placement(placed, nodes) == [
        "learner: 0,1, on NUMA node 0", "worker-0: 2,3, on NUMA nodes 0 and 1",
    ]  # fmt: skip
    devices.check_nodes(configured(*words), placed, nodes)
    with pytest.raises(ConfigError, match=r"'worker\.one_numa_node' = true .* worker-0 .* 2, 3, .* nodes 0 and 1"):
        devices.check_nodes(configured(*words, "--worker.one_numa_node", "true"), placed, nodes)


def test_an_unknown_topology_gives_a_placement_without_nodes(two_nodes):
    assert devices.numa_nodes(numbers(4), two_nodes / "elsewhere") == {}
    (two_nodes / "sys/bus/pci/devices/0000:00:00.0/numa_node").write_text("-1\n")
    assert devices.numa_nodes(numbers(4), two_nodes) == {"1": 0, "2": 0, "3": 1}

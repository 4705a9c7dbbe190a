"""Time sharing of an accelerator by learner and engines: who holds it, what is refused, and how state is offloaded."""

import os
import resource
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from april.config import ConfigError, load
from april.launch.memory import plan_memory, with_memory_limits
from april.learner.time_sharing import HostOffload, offload_to_memory
from april.util.time_sharing import EngineTimeSharing, LearnerTimeSharing, TimeSliceLate
from april.workers.engines.sglang.factory import server_settings
from april.workers.time_sharing import WorkerTimeSharing
from tests.support.small_run import SHARED

TIME_SHARED = [*SHARED, "--devices.turns", "true"]
PATIENCE_S = 60.0

REFUSED = {
    "alone": (["--devices.share", "false"], r"'devices\.turns' = true"),
    "no rounds": (["--schedule.kind", "continuous", "--schedule.over_sampling_batch_size", "4"], r"nothing does; use"),
    "overlap": (["--schedule.overlap", "true"], r"'schedule\.overlap' = true"),
    "a back end that stays": (["--learner.backend", "megatron"], r"'megatron'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_without_time_sharing_are_refused_with_a_sentence(config_file, case):
    words, why = REFUSED[case]
    assert load(config_file, TIME_SHARED).devices.turns
    with pytest.raises(ConfigError, match=why):
        load(config_file, [*TIME_SHARED, *words])


def test_rounds_time_share_and_continuous_schedules_divide_the_memory(config_file):
    never = ["--schedule.kind", "continuous", "--schedule.over_sampling_batch_size", "4"]
    assert load(config_file, [*TIME_SHARED, "--schedule.kind", "sync", "--schedule.over_sampling_batch_size", "4"])
    assert load(config_file, [*SHARED, *never]) and load(config_file, [*SHARED, "--schedule.overlap", "true"])


def test_with_time_sharing_the_server_gets_the_learner_s_memory_too_and_can_release_its_own(config_file):
    divided, taking = (load(config_file, [*words, "--devices.memory_gib", "24"]) for words in (SHARED, TIME_SHARED))
    assert ", time-shared: the learner takes" in plan_memory(taking, []).description
    more, less = (with_memory_limits(each, ["0"]).engine.server["mem_fraction_static"] for each in (taking, divided))
    assert 1 > more > less
    [on_gpu], [on_cpu] = (server_settings(taking, device, "worker-0") for device in ("cuda", "cpu"))
    assert "--enable-memory-saver" in on_gpu.arguments(1) and "--enable-memory-saver" not in on_cpu.arguments(1)
    assert "--enable-memory-saver" not in server_settings(divided, "cuda", "worker-0")[0].arguments(1)


@pytest.fixture
def time_sharing(tmp_path):
    """time_sharing(kind) -> the time sharing of another process, on the same two accelerators"""
    opened = []

    def make(kind):
        opened.append(kind(tmp_path, ["GPU-a/1", "GPU-b"]))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_engines_share_a_time_slice_and_the_learner_has_its_own(time_sharing):
    first, second, learner = (
        time_sharing(EngineTimeSharing),
        time_sharing(EngineTimeSharing),
        time_sharing(LearnerTimeSharing),
    )
    assert first.take() and second.take() and not first.is_requested
    with pytest.raises(TimeSliceLate, match=r"devices\.turn_s"):
        learner.take(0.0)
    assert first.is_requested, "the request stays"
    first.release()
    assert not first.take(), "while the learner requests a slice"
    taking = threading.Thread(target=learner.take, args=[PATIENCE_S])
    taking.start()
    second.release()
    taking.join(PATIENCE_S)
    assert learner.has_slice and not first.take() and second.is_requested
    with pytest.raises(TimeSliceLate, match="the learner"):
        first.wait(0.0)
    learner.release()
    assert first.take() and second.take() and not second.is_requested


HOLD = """
import sys, time
from pathlib import Path
from april.util.time_sharing import {kind}
sharing = {kind}(Path(sys.argv[1]), ["GPU-a/1", "GPU-b"])
{take}
print("has it", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "kind, take", [("LearnerTimeSharing", "sharing.take(60)"), ("EngineTimeSharing", "assert sharing.take()")]
)
def test_a_killed_process_releases_the_accelerator(time_sharing, tmp_path, kind, take):
    own = time_sharing(EngineTimeSharing if kind == "LearnerTimeSharing" else LearnerTimeSharing)
    command = [sys.executable, "-c", HOLD.format(kind=kind, take=take), str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "has it\n"
    with pytest.raises(TimeSliceLate):
        own.wait(0.0) if kind == "LearnerTimeSharing" else own.take(0.0)
    other.kill()
    other.wait(PATIENCE_S)
    other.stdout.close()
    own.wait(PATIENCE_S) if kind == "LearnerTimeSharing" else own.take(PATIENCE_S)
    assert own.has_slice


class Engine:
    """Records the calls to it."""

    live = 0

    def __init__(self):
        self.calls = []

    def release(self):
        self.calls.append("release")

    def resume(self):
        self.calls.append("resume")


def test_an_engine_releases_its_slice_once_nothing_runs_and_resumes_for_new_weights(config_file, tmp_path):
    config, engine = load(config_file, TIME_SHARED), Engine()
    worker, learner = WorkerTimeSharing(config, "cpu"), LearnerTimeSharing(config.run_dir, ["cpu"])
    worker.wait()
    assert worker.holds_device and worker.keeps_device and not worker.switch(engine, loading=False, staged=True)
    with pytest.raises(TimeSliceLate):
        learner.take(0.0)
    assert worker.holds_device and not worker.keeps_device, "no new work is started"
    engine.live = 1
    assert not worker.switch(engine, loading=False, staged=False) and worker.holds_device, "running samples end first"
    engine.live = 0
    assert not worker.switch(engine, loading=True, staged=False) and worker.holds_device, "so does a load of weights"
    assert worker.switch(engine, loading=False, staged=False) and not worker.holds_device
    learner.take(PATIENCE_S)
    assert not worker.switch(engine, loading=False, staged=True) and not worker.holds_device
    learner.release()
    assert not worker.switch(engine, loading=False, staged=False) and not worker.holds_device, (
        "no new weights have come"
    )
    assert engine.calls == ["release"]
    assert (
        not worker.switch(engine, loading=False, staged=True)
        and worker.holds_device
        and engine.calls == ["release", "resume"]
    )
    learner.close()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_state_of_an_accelerator_is_offloaded_to_host_memory():
    """Run on the CPU, where this saves no memory."""
    state = [torch.randn(1000), torch.randn(10, 10).T, torch.tensor(3.0)]
    before, storages = [tensor.clone() for tensor in state], [tensor.untyped_storage() for tensor in state]
    sizes, fill = [storage.nbytes() for storage in storages], offload_to_memory(storages)
    for storage in storages:
        storage.resize_(0)
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    fill(storages)
    assert all(map(torch.equal, state, before))


def test_offloaded_state_frees_memory_and_is_restored_bitwise(tmp_path):
    """Storages are emptied in place: parameters, views of them and moments are the same objects before and after."""
    torch.manual_seed(0)
    model = nn.Linear(4000, 4000)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 4000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = [model.weight, model.bias, model.weight[:2], *(t for s in optimizer.state.values() for t in s.values())]
    before, objects = [tensor.detach().clone().sum().item() for tensor in state], list(map(id, state))
    sample = [tensor.detach().flatten()[:1000].clone() for tensor in state]
    parking, full_bytes = HostOffload(torch.device("cpu"), tmp_path), resident_bytes()
    parked = parking.offload(state)
    freed = full_bytes - resident_bytes()
    assert parked > 3 * 4000 * 4000 * 4 and freed > 0.9 * parked, (parked, freed)
    assert os.listdir(tmp_path) == [], "the file has no name"
    parking.restore()
    assert [tensor.detach().sum().item() for tensor in state] == before and list(map(id, state)) == objects
    assert all(torch.equal(tensor.detach().flatten()[:1000], old) for tensor, old in zip(state, sample, strict=True))

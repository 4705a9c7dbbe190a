"""Learner and engines take turns on an accelerator: who has it, what is refused, and what is there in between."""

import os
import resource
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from april.config import ConfigError, load
from april.launch.memory import bounded, division_of
from april.learner.parking import Parking, keep_in_memory
from april.processes.device_turns import EngineTurns, LearnerTurns, TurnLate
from april.workers.device_turns import WorkerTurns
from april.workers.engines.sglang.factory import server_settings
from tests.test_sharing import SHARED

TURNS = [*SHARED, "--devices.turns", "true"]
PATIENCE_S = 60.0

REFUSED = {
    "alone": (["--devices.share", "false"], r"'devices\.turns' = true is for parts that share"),
    "no rounds": (["--schedule.kind", "continuous", "--schedule.over_sampling_batch_size", "4"], r"nothing does; use"),
    "overlap": (["--schedule.overlap", "true"], r"'schedule\.overlap' = true .* nothing is generated then"),
    "a back end that stays": (["--learner.backend", "megatron"], r"'megatron' stays on its accelerator"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_take_turns_is_refused_with_a_sentence(config_file, case):
    words, why = REFUSED[case]
    assert load(config_file, TURNS).devices.turns
    with pytest.raises(ConfigError, match=why):
        load(config_file, [*TURNS, *words])


def test_rounds_take_turns_and_what_never_stops_divides_memory(config_file):
    never = ["--schedule.kind", "continuous", "--schedule.over_sampling_batch_size", "4"]
    assert load(config_file, [*TURNS, "--schedule.kind", "sync", "--schedule.over_sampling_batch_size", "4"])
    assert load(config_file, [*SHARED, *never]) and load(config_file, [*SHARED, "--schedule.overlap", "true"])


def test_in_turns_the_server_gets_what_the_learner_would_take_and_is_told_to_let_go(config_file):
    divided, taking = (load(config_file, [*words, "--devices.memory_gib", "24"]) for words in (SHARED, TURNS))
    assert ", in turns: the learner takes" in division_of(taking, []).said
    more, less = (bounded(each, ["0"]).engine.server["mem_fraction_static"] for each in (taking, divided))
    assert 1 > more > less
    [on_gpu], [on_cpu] = (server_settings(taking, device, "worker-0") for device in ("cuda", "cpu"))
    assert "--enable-memory-saver" in on_gpu.arguments(1) and "--enable-memory-saver" not in on_cpu.arguments(1)
    assert "--enable-memory-saver" not in server_settings(divided, "cuda", "worker-0")[0].arguments(1)


@pytest.fixture
def turns(tmp_path):
    """turns(kind) -> one more process's, of the same two accelerators"""
    made = []

    def make(kind):
        made.append(kind(tmp_path, ["GPU-a/1", "GPU-b"]))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_engines_have_a_turn_together_and_the_learner_has_one_alone(turns):
    first, second, learner = turns(EngineTurns), turns(EngineTurns), turns(LearnerTurns)
    assert first.take() and second.take() and not first.wanted
    with pytest.raises(TurnLate, match=r"workers have not let go .* devices\.turn_s = 0 s"):
        learner.take(0.0)
    assert first.wanted, "it stays wanted"
    first.give()
    assert not first.take(), "while the learner wants one"
    taking = threading.Thread(target=learner.take, args=[PATIENCE_S])
    taking.start()
    second.give()
    taking.join(PATIENCE_S)
    assert learner.has and not first.take() and second.wanted
    with pytest.raises(TurnLate, match="learner has not let go"):
        first.wait(0.0)
    learner.give()
    assert first.take() and second.take() and not second.wanted


HOLD = """
import sys, time
from pathlib import Path
from april.processes.device_turns import {kind}
turns = {kind}(Path(sys.argv[1]), ["GPU-a/1", "GPU-b"])
{take}
print("has it", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind, take", [("LearnerTurns", "turns.take(60)"), ("EngineTurns", "assert turns.take()")])
def test_whoever_is_killed_lets_go(turns, tmp_path, kind, take):
    own = turns(EngineTurns if kind == "LearnerTurns" else LearnerTurns)
    command = [sys.executable, "-c", HOLD.format(kind=kind, take=take), str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "has it\n"
    with pytest.raises(TurnLate):
        own.wait(0.0) if kind == "LearnerTurns" else own.take(0.0)
    other.kill()
    other.wait(PATIENCE_S)
    other.stdout.close()
    own.wait(PATIENCE_S) if kind == "LearnerTurns" else own.take(PATIENCE_S)
    assert own.has


class Engine:
    """Says what it was asked for."""

    live = 0

    def __init__(self):
        self.calls = []

    def release(self):
        self.calls.append("release")

    def resume(self):
        self.calls.append("resume")


def test_an_engine_lets_go_once_nothing_runs_and_comes_back_for_new_weights(config_file, tmp_path):
    config, engine = load(config_file, TURNS), Engine()
    worker, learner = WorkerTurns(config, "cpu"), LearnerTurns(config.run_dir, ["cpu"])
    worker.wait()
    assert worker.has and worker.lasts and not worker.gave(engine, loading=False, staged=True)
    with pytest.raises(TurnLate):
        learner.take(0.0)
    assert worker.has and not worker.lasts, "no more work is taken on"
    engine.live = 1
    assert not worker.gave(engine, loading=False, staged=False) and worker.has, "what runs ends first"
    engine.live = 0
    assert not worker.gave(engine, loading=True, staged=False) and worker.has, "so do weights on their way"
    assert worker.gave(engine, loading=False, staged=False) and not worker.has
    learner.take(PATIENCE_S)
    assert not worker.gave(engine, loading=False, staged=True) and not worker.has
    learner.give()
    assert not worker.gave(engine, loading=False, staged=False) and not worker.has, "nothing to generate with has come"
    assert engine.calls == ["release"]
    assert not worker.gave(engine, loading=False, staged=True) and worker.has and engine.calls == ["release", "resume"]
    learner.close()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_on_an_accelerator_state_is_kept_in_memory():
    """As it would be; here on the CPU, where nothing is saved by it."""
    state = [torch.randn(1000), torch.randn(10, 10).T, torch.tensor(3.0)]
    before, storages = [tensor.clone() for tensor in state], [tensor.untyped_storage() for tensor in state]
    sizes, fill = [storage.nbytes() for storage in storages], keep_in_memory(storages)
    for storage in storages:
        storage.resize_(0)
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    fill(storages)
    assert all(map(torch.equal, state, before))


def test_parked_state_is_out_of_memory_and_comes_back_bitwise(tmp_path):
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
    parking, full_bytes = Parking(torch.device("cpu"), tmp_path), resident_bytes()
    parked = parking.park(state)
    freed = full_bytes - resident_bytes()
    assert parked > 3 * 4000 * 4000 * 4 and freed > 0.9 * parked, (parked, freed)
    assert os.listdir(tmp_path) == [], "the file has no name"
    parking.unpark()
    assert [tensor.detach().sum().item() for tensor in state] == before and list(map(id, state)) == objects
    assert all(torch.equal(tensor.detach().flatten()[:1000], old) for tensor, old in zip(state, sample, strict=True))

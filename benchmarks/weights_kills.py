"""Peers that are killed or stopped while a version of the weights is on its way.

A learner of two ranks publishes versions to three engines, each in a process of its own, on this machine: whole or as
deltas over weight channels (`broadcast`, `delta`), through a chain of all engines (`chain`), or as snapshots in a
folder (`pull`). In each trial one engine or rank gets SIGKILL, or SIGSTOP for some seconds, at a random time of a
publication; in `gather` it is a rank, before the version is whole. `killed_peers_lost` counts the trials in which
another engine did not hold the version within `weights.publish_deadline_s`, held other bytes than the learner, or in
which the victim did not hold the next version. After a killed rank the learner starts anew, as its launcher would start
it, with the next incarnation, and the deadline runs from its publication; after a stopped one it runs from when that
goes on.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from types import SimpleNamespace

import orjson
from common import Row, environment_of, parser, process, report

ENGINES, RANKS, TENSORS = 3, 2, 24
KINDS = {"broadcast": "off", "chain": "off", "delta": "auto", "gather": "off", "pull": "auto"}
"""What a trial interrupts, and `weights.delta` in it."""
TRIALS = {"broadcast": 10, "chain": 12, "delta": 10, "gather": 8, "pull": 10}
DEADLINE_S, START_S, STOPPED_S = 10.0, 180.0, 5.0
"""`weights.publish_deadline_s`, the time to start a process, and how long a stopped one stands still (seconds)."""


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", choices=KINDS, nargs="*", help="these trials alone")
    given = arguments.parse_args()
    rows, lost = [], []
    for kind in given.only or KINDS:
        with tempfile.TemporaryDirectory(prefix="april-kills-") as made, Trials(kind, Path(made), given.seed) as trials:
            found = [trials.run() for _ in range(2 if given.quick else TRIALS[kind])]
        lost += [bool(each.failure) for each in found]
        held = [each.held_s for each in found if not each.failure]
        rows.append(Row(f"held_by_others_s_{kind}", held or [float("inf")], "s", of=max))
    report([Row("killed_peers_lost", lost, f"of {len(lost)}", of=sum), *rows], given.json)


class Peer:
    """A process that reads commands and answers, a line of JSON each."""

    def __init__(self, running: contextlib.ExitStack, log: Path, *words: object):
        self.answers_to = log.with_suffix(".fifo")
        self.answers_to.unlink(missing_ok=True)
        os.mkfifo(self.answers_to)
        command = [sys.executable, __file__, *words, self.answers_to]
        self.process = running.enter_context(process(command, log, env=environment_of(1), stdin=subprocess.PIPE))
        self.log, self.answers = log, Queue[dict]()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self.answers_to.open("rb") as lines:
            for line in lines:
                self.answers.put(orjson.loads(line))

    def tell(self, **command: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(orjson.dumps(command) + b"\n")
            self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict:
        """The next answer; raises Empty after the time."""
        return self.answers.get(timeout=max(0.001, timeout_s))

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()


class Trials:
    """The processes of one kind of trial."""

    def __init__(self, kind: str, folder: Path, seed: int):
        self.kind, self.folder, self.random = kind, folder, random.Random(f"{kind} {seed}")
        self.running = contextlib.ExitStack()
        self.incarnation, self.step, self.started = 0, 0, 0
        self.address, self.usual_s = "", 0.0

    def __enter__(self) -> "Trials":
        self.begin_learner()
        self.engines = [self.begin_engine() for _ in range(ENGINES)]
        took = [self.publish_undisturbed() for _ in range(3)]
        self.usual_s = sorted(took)[1]
        return self

    def __exit__(self, *_: object) -> None:
        for peer in (*self.ranks, *self.engines):
            peer.process.kill()
        self.running.close()

    def begin_learner(self) -> None:
        store, words = self.folder / f"ranks-{self.incarnation}", (self.kind, self.folder, self.incarnation)
        self.ranks = [self.begin("rank", rank, store, *words) for rank in range(RANKS)]
        self.address = self.ranks[0].answer(START_S)["address"]

    def begin_engine(self) -> Peer:
        engine = self.begin("engine", self.started, self.kind, self.folder)
        engine.tell(address=self.address)
        engine.answer(START_S)
        return engine

    def begin(self, *words: object) -> Peer:
        self.started += 1
        return Peer(self.running, self.folder / f"{words[0]}-{self.started}.log", *words)

    def publish(self) -> float:
        """Have the next version published; returns when."""
        self.step += 1
        for rank in self.ranks:
            rank.tell(step=self.step)
        return time.monotonic()

    def publish_undisturbed(self) -> float:
        began = self.publish()
        problem = self.await_held(self.engines, began, START_S)
        if problem:
            logs = "".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))
            sys.exit(f"{self.kind}: {problem}\n{logs}")
        return time.monotonic() - began

    def await_held(self, engines: list[Peer], began: float, within_s: float) -> str:
        """Wait until these engines hold the newest version; returns the problem if they do not."""
        deadline, wanted = began + within_s, [self.incarnation, self.step]
        digests = {}
        for name, peer in {"the learner": self.ranks[0], **{f"engine {e.log.stem}": e for e in engines}}.items():
            held = None
            while held is None or held["version"] != wanted:
                try:
                    held = peer.answer(deadline - time.monotonic())
                except Empty:
                    return f"{name} has {held}, not {wanted}, after {within_s:g} s"
                if peer is self.ranks[0] and self.kind == "pull":  # as the broker tells the workers
                    for engine in self.engines:
                        engine.tell(folders=held["folders"])
            digests[name] = held["digest"]
        return "" if len(set(digests.values())) == 1 else f"other bytes: {digests}"

    def run(self) -> SimpleNamespace:
        """One trial: a version, a victim, and the next version."""
        victims = {"gather": self.ranks, "broadcast": self.engines, "delta": self.engines, "chain": self.engines}
        victim = self.random.choice(victims.get(self.kind, [*self.ranks, *self.engines]))
        number = self.random.choice([signal.SIGKILL, signal.SIGSTOP])
        began = self.publish()
        time.sleep(self.random.random() * self.usual_s * (0.4 if self.kind == "gather" else 1.0))
        victim.send_signal(number)
        others, is_rank = [each for each in self.engines if each is not victim], victim in self.ranks
        if is_rank and number == signal.SIGKILL:
            began = self.restart_learner()
        elif is_rank:
            time.sleep(STOPPED_S)
            victim.send_signal(signal.SIGCONT)
            began = time.monotonic()
        problem = self.await_held(others, began, DEADLINE_S)
        held_s = time.monotonic() - began
        if victim in self.engines and number == signal.SIGKILL:
            self.engines[self.engines.index(victim)] = self.begin_engine()
        elif victim in self.engines:
            time.sleep(self.random.random() * STOPPED_S)
            victim.send_signal(signal.SIGCONT)
        problem = problem or self.await_held(self.engines, self.publish(), 2 * DEADLINE_S)
        who = f"{'rank' if is_rank else 'engine'}, {number.name}"
        print(f"  {self.kind}: {who}: {problem or f'{held_s:.2f} s'}", file=sys.stderr, flush=True)
        if problem:  # the next trial begins with what works
            self.restart_learner()
            self.publish_undisturbed()
        return SimpleNamespace(failure=problem, held_s=held_s)

    def restart_learner(self) -> float:
        """Start all ranks anew, as a launcher does when one has died; returns when they publish the version."""
        for rank in self.ranks:
            rank.process.kill()
        self.incarnation += 1
        self.step -= 1
        self.begin_learner()
        for engine in self.engines:
            engine.tell(address=self.address)
        return self.publish()


# --- the processes ----------------------------------------------------------------------------------------------------


def section(kind: str):
    from april.config import WeightsSection

    size = ENGINES if kind == "chain" else 1
    return WeightsSection(publish_deadline_s=DEADLINE_S, delta=KINDS[kind], channel_size=size)


def commands():
    return map(orjson.loads, sys.stdin.buffer)


def rank(own: int, store: Path, kind: str, folder: Path, incarnation: int, answers: Path) -> None:
    """A rank of the learner: gathers and publishes a version for each command."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from april.config import LearnerSection
    from april.learner.held_tensors import HeldTensor
    from april.learner.process_group import all_gather_values
    from april.learner.publication import DividedSending
    from april.learner.weight_parts import WeightTensor, gather_part
    from april.util.objects import ObjectStore
    from april.weights.folders import SnapshotFolders, WrittenFile
    from april.weights.publisher import WeightPublisher
    from april.wire.message import Version

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=own, world_size=RANKS)
    mesh, random_bits = init_device_mesh("cpu", (RANKS,)), torch.Generator().manual_seed(own)
    shards = [torch.zeros(1024 // RANKS, 1024, dtype=torch.bfloat16) for _ in range(TENSORS)]
    config = SimpleNamespace(weights=section(kind), learner=LearnerSection(), engine=SimpleNamespace(weights="auto"))
    publisher = WeightPublisher(config.weights, f"kills-{incarnation}", "cpu") if own == 0 and kind != "pull" else None
    divided = DividedSending(config, publisher, torch.device("cpu")) if kind != "pull" else None
    folders, base, chain, newest = SnapshotFolders(ObjectStore(str(folder / "weights")), True), None, [], []
    out = answers.open("wb", buffering=0)
    out.write(orjson.dumps({"address": publisher.address if publisher else ""}) + b"\n")
    for command in commands():
        version = Version(incarnation, command["step"])
        for shard in shards:
            shard.view(torch.int16)[torch.rand(shard.shape, generator=random_bits) < 0.03] ^= 1
        tensors = [DTensor.from_local(shard.clone(), mesh, [Shard(0)]) for shard in shards]
        parts = [WeightTensor.whole(f"layers.{i}", HeldTensor.of(each)) for i, each in enumerate(tensors)]
        whole = torch.cat([each.full_tensor() for each in tensors])
        if divided:
            backend = SimpleNamespace(divisible_weights=partial(list, parts))
            trainer = SimpleNamespace(backend=backend, generation_dtype=torch.bfloat16, device=torch.device("cpu"))
            part = divided.gather(trainer, version)
        else:
            part = gather_part(version, parts, torch.bfloat16)
            of_ranks = all_gather_values(folders.write_part(part, own, base), list[WrittenFile])
            files = [file for its in of_ranks for file in its]
            if own == 0:
                chain.append(folders.complete(version, files, None, {}, chain))
                newest = [chain[-1], *newest][:2]
            base = part
        told = [[each.version.incarnation, each.version.step, each.digest] for each in newest]
        answer = {"version": [incarnation, version.step], "digest": digest_of(whole), "folders": told}
        out.write(orjson.dumps(answer) + b"\n")
        if publisher:
            publisher.publish(version, part)
        del part


def engine(number: int, kind: str, folder: Path, answers: Path) -> None:
    """A worker: takes each version, and says which bytes it holds."""
    import torch

    from april.util.objects import ObjectStore
    from april.weights.folders import SnapshotFolders
    from april.weights.puller import SnapshotPuller
    from april.weights.receiver import WeightReceiver
    from april.wire.message import Version
    from april.wire.training import WeightFolder

    torch.set_num_threads(1)
    if kind == "pull":
        source = SnapshotPuller(SnapshotFolders(ObjectStore(str(folder / "weights")), True), DEADLINE_S)
    else:
        source = WeightReceiver(section(kind), f"e{number}-{os.getpid()}", f"e{number}", "cpu")
    out = answers.open("wb", buffering=0)

    def obey() -> None:
        for command in commands():
            if kind != "pull" and "address" in command:
                source.connect(command["address"])
            elif kind == "pull" and "folders" in command:
                source.offer([WeightFolder(Version(*each[:2]), each[2]) for each in command["folders"]])
            if "address" in command:
                out.write(b'{"version": "began"}\n')

    Thread(target=obey, daemon=True).start()
    while True:
        if staged := source.take():
            whole = torch.cat([staged.tensors[f"layers.{i}"] for i in range(TENSORS)])
            version = staged.version
            if kind != "pull":
                source.loaded(version)
            answer = {"version": [version.incarnation, version.step], "digest": digest_of(whole)}
            out.write(orjson.dumps(answer) + b"\n")
            del staged, whole
        time.sleep(0.002)


def digest_of(whole) -> str:
    import hashlib

    import torch

    return hashlib.sha256(whole.view(torch.uint8).numpy()).hexdigest()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["rank", own, store, kind, folder, incarnation, answers]:
            rank(int(own), Path(store), kind, Path(folder), int(incarnation), Path(answers))
        case ["engine", number, kind, folder, answers]:
            engine(int(number), kind, Path(folder), Path(answers))
        case _:
            main()

"""Scoring beside generation: a worker's rollout throughput with verifiers that take 200 ms over that with free ones.

The real worker, engine and pool of verifier processes, with a connection that answers like a broker: it keeps the
worker full and acknowledges at once. The same samples, with the same seeds, alternate between both verifiers; the
throughput is that of the time from the first lease to the last token, as `rollout_tokens_per_s` has it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import Row, parser, report

from april import config as configuration
from april import wire
from april.policy.model import build_model, save_policy
from april.wire.rows import read_rows
from april.wire.version import Version
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.folder_weights import load_folder_weights
from april.workers.worker import Worker

GOAL_ROW = "scoring_overlap_200ms"
SLOTS = 32
PROMPT = "05*3+60="
LONGEST = 2048
CONTEXT = 4096


class Broker:
    """A worker's connection to a broker that has `grants` and takes whatever comes."""

    is_silent = False

    def __init__(self, task: wire.Task, grants: list[wire.Grant], prompt: np.ndarray, slots: int):
        self.task, self.waiting = task, list(reversed(grants))
        self.prompt = prompt
        self.slots = slots
        self.generating: set[int] = set()
        self.unscored = len(grants)
        self.tokens = 0
        self.first_at = self.last_token_at = self.last_score_at = 0.0
        self._answers: list[wire.Received] = []

    def receive(self, timeout_ms: int) -> list[wire.Received]:
        if timeout_ms and not self._answers and (self.generating or not self.waiting):
            time.sleep(timeout_ms / 1000)
        while self.waiting and len(self.generating) < self.slots:
            self.first_at = self.first_at or time.perf_counter()
            grant = self.waiting.pop()
            self.generating.add(grant.lease_id)
            self._answer(wire.Grants([self.task], [grant]), [self.prompt, self.prompt[:0]])
        answers, self._answers = self._answers, []
        return answers

    def send(self, message: wire.Message, arrays=()) -> None:
        if not isinstance(message, wire.Report):
            return
        rows = list(read_rows(arrays[0].tobytes())) if arrays else []
        if rows:
            self.tokens += sum(row.tokens for row in rows)
            self.last_token_at = time.perf_counter()
            self.generating -= {row.lease_id for row in rows if row.finish}
        for closing in message.closings:
            if isinstance(closing, wire.GiveBack):
                sys.exit(f"a sample came back: {closing}")
            self.unscored -= 1
            self.last_score_at = time.perf_counter()
        lengths = [(row.lease_id, row.end) for row in rows]
        self._answer(wire.Answers(lengths, [closing.lease_id for closing in message.closings]))

    def _answer(self, message: wire.Message, arrays=()) -> None:
        self._answers.append(wire.Received(message, [wire.pack(array) for array in arrays]))

    def hold(self, leases, emitted_tokens) -> None: ...

    def occupy(self, slots) -> None: ...

    def check_alive(self) -> None: ...

    def close(self) -> None: ...


def task_of(verifier: str) -> wire.Task:
    return wire.Task(0, False, "", f"benchmark_verifiers:{verifier}", 1.0, 1.0, 0, 0.0)


def grants(count: int, seed: int) -> list[wire.Grant]:
    """Lognormal with σ = 1 and median 128, cut at 2,048: forced, since the policy is random and nothing stops it."""
    lengths = np.random.default_rng(seed).lognormal(np.log(128), 1.0, count).round().clip(1, LONGEST).astype(int)
    return [
        wire.Grant(
            lease_id=number, task=0, index=number, scoring=False, max_new_tokens=int(length), seed=number,
            finish_reason="", hand_over=False, together=[], turns=0, turn_start=0, state=b"", stops=[],
        )
        for number, length in enumerate(lengths, start=1)
    ]  # fmt: skip


def run(folder: Path, task: wire.Task, work: list[wire.Grant], processes: int) -> tuple[float, float]:
    """(tokens/s until the last token, seconds from the last token to the last score)."""
    overrides = ["--reward.processes", str(processes), "--worker.slots", str(SLOTS), "--reward.name", task.reward]
    config = configuration.load(folder / "run.toml", overrides)
    engine = TorchEngine(folder / "policy", slots=SLOTS, device="cpu", chunk_tokens=512, report_s=2.0)
    engine.load_weights(Version(0, 0), load_folder_weights(folder / "policy"))
    broker = Broker(task, work, np.zeros(0, np.int32), SLOTS + config.worker.prefetch)
    worker = Worker(config, engine, broker, intakes=[])
    worker.turns.stops = frozenset()
    broker.prompt = worker.tokenizer.encode_prompt(PROMPT)
    warm_up(worker)
    while broker.unscored:
        worker.turn()
    worker.close()
    return broker.tokens / (broker.last_token_at - broker.first_at), broker.last_score_at - broker.last_token_at


def warm_up(worker: Worker) -> None:
    """Wait until every verifier process is up, as they are in the middle of a run."""
    pool = worker.scoring.pool
    while not all(process.ready for process in pool.processes):
        for process in pool.processes:
            process.receive()
        time.sleep(0.01)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--processes", type=int, default=12, help="verifier processes of the worker [default 12]")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    count, rounds = (32, 1) if options.quick else (512, 5)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        policy = build_model(hidden_size=128, layers=3, seed=0)
        policy.config.max_position_embeddings = CONTEXT
        save_policy(policy, folder / "policy")
        (folder / "rows.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
        text = f'[model]\npath = "{folder}/policy"\n[data]\npath = "{folder}/rows.jsonl"\n'
        (folder / "run.toml").write_text(text + f"[sampling]\nmax_response_tokens = {LONGEST}\n")
        run(folder, task_of("free"), grants(8, 0), 1)
        pairs = []
        for number in range(rounds):
            order = ("free", "slow") if number % 2 == 0 else ("slow", "free")
            pairs.append({name: run(folder, task_of(name), grants(count, number), options.processes) for name in order})
    rows = [
        Row(GOAL_ROW, [pair["slow"][0] / pair["free"][0] for pair in pairs], "ratio"),
        Row("rollout_tokens_per_s_200ms", [pair["slow"][0] for pair in pairs], "tokens/s"),
        Row("rollout_tokens_per_s_free", [pair["free"][0] for pair in pairs], "tokens/s"),
        Row("last_score_after_last_token_200ms_s", [pair["slow"][1] for pair in pairs], "s"),
    ]
    report(rows, options.json)


if __name__ == "__main__":
    main()

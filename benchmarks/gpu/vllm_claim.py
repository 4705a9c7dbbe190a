"""vLLM on one GPU: tokens/s through broker and worker over the same server asked directly, and the claim's schedules.

One server with Qwen3-0.6B's shape and random weights serves everything: April's program, which vLLM's own engine runs.
Responses have forced long-tailed lengths: lognormal with σ = 1, median 256, cut at 4,096.

`gpu_vllm_vs_alone_N`: with N requests in flight, tokens/s of a worker under a broker, which has every token on disk,
over those of a client that does nothing but read the answers. Both have the same requests, in the same order, and are
timed between the same two counts of tokens, between which all slots are taken.
`gpu_vllm_abort_to_journal_s`: from the broker's recall of all samples to the last partial response in its journal.
`gpu_vllm_tokens_per_s_KIND`: trained tokens/s of real runs (`april run`) whose learner shares the card, with lengths
scaled down. All are started at once, and let go one after the other.
"""

import asyncio
import contextlib
import heapq
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson
from part import Part  # puts april and the harness on sys.path
from vllm_bench import (
    CARD,
    PATIENCE_S,
    PREFETCH,
    SAMPLES,
    SEED,
    STREAM_TOKENS,
    TINY,
    Bench,
    await_that,
    log_end,
    open_gate,
    start,
    texts,
    write_config,
)
from vllm_engine import GAUGE, WAITS, lengths_of

from common import APRIL  # isort: skip

from april import wire  # isort: skip
from april.config import WeightsSection  # isort: skip
from april.learner.source import BrokerSource  # isort: skip
from april.observe.operate import RunAddress  # isort: skip
from april.observe.report.run_folder import read_records  # isort: skip
from april.weights.publisher import WeightPublisher  # isort: skip
from april.wire.message import Version  # isort: skip
from april.workers.engines.base import Request  # isort: skip
from april.workers.engines.sglang.client import SGLangClient  # isort: skip
from april.workers.engines.sglang.run import StreamedRequest  # isort: skip

ROUNDS = 4
"""Requests of a measurement, in times of those in flight."""
WARM_SHARE = 0.15
"""Share of the tokens with all slots taken that is not timed: prompts are read, and every slot has just begun."""
RUNS = ("sync", "continuous", "april")
"""Schedules, by worth."""
ENOUGH_S = ((230, 3), (200, 2), (-1, 0))
"""(seconds that have to be left, number of RUNS that are then started)"""
MEASURE_S, RUN_S, LEAST_STEPS = 20.0, 24.0, 3
"""Seconds that a measurement needs, and a run; steps of a run, of which the first is not timed."""
ROOM_BYTES = 8 << 30
"""Shared memory that the model and the runs' folders need."""
LOG_CHARACTERS = 12_000
ABORTS, RECALL_S = 3, 6.0
"""Recalls that are timed, and longest time of each (seconds)."""


def main() -> None:
    part = Part.from_command_line(__doc__.partition("\n")[0])
    size, shared = TINY if part.tiny else CARD, Path("/dev/shm")
    has_room = shared.is_dir() and shutil.disk_usage(shared).free > ROOM_BYTES
    with (
        tempfile.TemporaryDirectory(prefix="april-vllm-", dir=shared if has_room else None) as made,
        contextlib.ExitStack() as parts,
        part.attempt("vllm"),
    ):
        parts.callback(keep_logs, part, Path(made))
        bench = Bench(part, size, Path(made), parts)
        rollouts = [Rollout(bench, count, parts) for count in size.concurrent]
        kinds = RUNS[: 2 if part.tiny else next(count for seconds, count in ENOUGH_S if part.left_s > seconds)]
        runs = [Run(bench, kind, parts) for kind in kinds]
        bench.await_server()
        for rollout in rollouts:
            if part.enough_time(rollout.name, MEASURE_S):
                with part.attempt(rollout.name):
                    compare(bench, rollout)
        compare_schedules(bench, runs)


def keep_logs(part: Part, folder: Path) -> None:
    """Write the ends of all logs to a file beside the rows."""
    if part.out is not None:
        logs = sorted([*folder.glob("*.log"), *folder.glob("*/logs/*.log")])
        ends = [f"== {log.relative_to(folder)}\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}" for log in logs]
        part.out.with_suffix(".logs.txt").write_text("\n".join(ends))


# --- requests in flight -----------------------------------------------------------------------------------------------


class Rollout:
    """Broker and worker of a run without a learner, started at once; the worker waits for `begin`."""

    def __init__(self, bench: Bench, concurrent: int, parts: contextlib.ExitStack):
        self.bench, self.concurrent, self.name = bench, concurrent, f"vllm_{concurrent}"
        self.slots = concurrent if concurrent == bench.size.concurrent[0] else concurrent - PREFETCH
        self.in_flight = self.slots + PREFETCH
        self.groups = ROUNDS * concurrent // SAMPLES
        self.folder, self.parts = bench.folder / self.name, parts
        self.config = write_config(bench, self.name, "sync", self.groups, self.slots, bench.size.longest)
        log = bench.folder / f"{self.name}.broker.log"
        self.broker = start(bench, [*APRIL, "broker", self.config], log, parts)
        await_that((self.folder / "address").exists, "the broker's address")
        self.address = (self.folder / "address").read_text()
        command = [*APRIL, "worker", self.config, "--connect", self.address, "--name", "w0"]
        self.log = bench.folder / f"{self.name}.worker.log"
        self.worker = start(bench, command, self.log, parts)
        lengths = lengths_of(bench.lengths, SAMPLES, SEED, self.groups)
        self.lengths = [length for group in lengths for length in group]
        self.full = tokens_while_full(self.lengths[:-concurrent], concurrent)
        """Tokens that are timed; as many requests as are in flight still wait then."""

    def begin(self) -> float:
        """Let the worker go, with weights; returns the time at which they were published."""
        publisher = WeightPublisher(WeightsSection(), self.name, "cpu")
        self.parts.callback(publisher.close)
        source = BrokerSource(self.address, publisher.address, PATIENCE_S)
        self.parts.callback(source.close)
        incarnation, _ = source.start(0)
        open_gate(self.folder, self.bench.lengths)
        published = time.time()
        publisher.publish(Version(incarnation, 0), self.bench.tensors)
        return published

    @property
    def track(self) -> list[dict]:
        file = self.folder / GAUGE
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        return [orjson.loads(line) for line in lines if line.endswith(b"\n")]

    def status(self) -> dict:
        return RunAddress(None, self.address, None).status()

    def end(self) -> None:
        for each in (self.worker, self.broker):
            each.kill()
            each.wait()

    def drain(self, on: bool) -> None:
        RunAddress(None, self.address, None).ask(wire.Drain(on))

    def await_that(self, condition, what: str, timeout_s: float = PATIENCE_S) -> None:
        await_that(condition, what, self.worker, self.log, timeout_s)


def compare(bench: Bench, rollout: Rollout) -> None:
    """The same requests asked directly and through broker and worker, and recalls with all of them running."""
    part, count = bench.part, rollout.concurrent
    part.fact(f"{rollout.name}: requests, in flight, tokens while full", [
        len(rollout.lengths), rollout.in_flight, rollout.full
    ])  # fmt: skip
    directly(bench, rollout, round(WARM_SHARE * rollout.full))  # kernels are made on their first use
    bench.await_idle()
    alone = [rate(directly(bench, rollout, rollout.full), rollout.full)]
    part.row(f"gpu_vllm_tokens_per_s_alone_{count}", alone, "tokens/s")
    bench.await_idle()
    published = rollout.begin()
    rollout.await_that(lambda: rollout.track and rollout.track[-1]["tokens"], "the first tokens")
    first = next(line for line in rollout.track if line["tokens"])
    part.row(f"gpu_vllm_weights_to_tokens_s_{count}", first["at"] - published, "s")
    rollout.await_that(lambda: rollout.track[-1]["tokens"] >= rollout.full, "the tokens")
    lines = rollout.track
    through = rate([(line["at"], line["tokens"]) for line in lines], rollout.full)
    part.row(f"gpu_vllm_tokens_per_s_through_april_{count}", through, "tokens/s")
    part.row(f"gpu_vllm_vs_alone_{count}", through / alone[0], "ratio")
    busy = np.diff([(line["at"], line["busy_slot_s"]) for line in (lines[len(lines) // 3], lines[-1])], axis=0)[0]
    part.fact(f"{rollout.name}: mean requests in the server", round(busy[1] / busy[0], 1))
    with part.attempt(f"{rollout.name}: abort to journal"):
        part.row(f"gpu_vllm_abort_to_journal_s_{count}", recalls(rollout), "s")
    rollout.end()
    bench.await_idle()
    if part.enough_time(f"{rollout.name}: alone again", MEASURE_S / 2):
        alone.append(rate(directly(bench, rollout, rollout.full), rollout.full))
        part.row(f"gpu_vllm_tokens_per_s_alone_{count}_again", alone[1], "tokens/s")
        part.row(f"gpu_vllm_vs_alone_{count}_again", through / alone[1], "ratio")
        bench.await_idle()


def recalls(rollout: Rollout) -> list[float]:
    """Seconds from the broker's recall of all samples until it has their last tokens on disk."""
    found: list[float] = []
    with contextlib.suppress(TimeoutError):
        while len(found) < ABORTS:
            rollout.await_that(lambda: rollout.status()["leased"] >= rollout.concurrent / 2, "leases", RECALL_S)
            time.sleep(0.5)
            began = time.monotonic()
            rollout.drain(True)
            rollout.await_that(lambda: rollout.status()["leases"] == 0, "the last partial response", RECALL_S)
            found.append(time.monotonic() - began)
            rollout.drain(False)
    return found


def directly(bench: Bench, rollout: Rollout, tokens: int) -> list[tuple[float, int]]:
    """(time, tokens so far) of a client that has as many requests in flight as the worker, until it has so many."""
    prompts = [bench.tokenizer.encode_prompt(text).astype(np.int32) for text in texts(bench.size)[: rollout.groups]]
    track = [(time.time(), 0)]

    async def run() -> None:
        client, gate = SGLangClient(bench.server.url, name="vLLM"), asyncio.Semaphore(rollout.in_flight)
        enough = asyncio.Event()

        async def ask(number: int) -> None:
            request = Request(number, prompts[number // SAMPLES], rollout.lengths[number], seed=number)
            asked, had = StreamedRequest(request), 0
            asked.start_attempt()
            async with gate:
                async for event in client.generate(asked.body(Version(0, 0), STREAM_TOKENS)):
                    now = event["meta_info"]["completion_tokens"]
                    track.append((time.time(), track[-1][1] + now - had))
                    had = now
                    if track[-1][1] >= tokens:
                        enough.set()

        asking = [asyncio.create_task(ask(number)) for number in range(len(rollout.lengths))]
        ended = asyncio.gather(*asking)
        try:
            done, _ = await asyncio.wait(
                [ended, asyncio.create_task(enough.wait())], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if ended in done:
                ended.result()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            await client.close()

    asyncio.run(run())
    return track


def rate(track: list[tuple[float, int]], full: int) -> float:
    """Tokens/s between WARM_SHARE of the tokens with all slots taken, and all of these."""
    times, tokens = np.array(track, float).T
    if tokens[-1] < full:
        raise RuntimeError(f"{tokens[-1]:.0f} of {full} tokens came within {PATIENCE_S:.0f} s")
    keep = np.concatenate([[True], np.diff(tokens) > 0])
    begin, end = np.interp([WARM_SHARE * full, full], tokens[keep], times[keep])
    return (1 - WARM_SHARE) * full / (end - begin)


def tokens_while_full(lengths: list[int], slots: int) -> int:
    """Tokens that have been generated when the last request finds a slot, if all requests advance alike."""
    ends: list[int] = []
    now, begun = 0, []
    for length in lengths:
        if len(ends) == slots:
            now = heapq.heappop(ends)
        begun.append(now)
        heapq.heappush(ends, now + length)
    return sum(min(length, now - start) for length, start in zip(lengths, begun, strict=True))


# --- schedules --------------------------------------------------------------------------------------------------------


class Run:
    """A run with a learner on the same card, started at once; its engine waits to be let go."""

    def __init__(self, bench: Bench, kind: str, parts: contextlib.ExitStack):
        self.bench, self.kind, self.folder = bench, kind, bench.folder / kind
        size, slots = bench.size, bench.size.groups * SAMPLES
        dials = {"april": {"over_sampling_batch_size": 2 * size.groups}, "continuous": {"in_flight": slots}}
        longest = round(size.longest * size.scale)
        config = write_config(bench, kind, kind, size.groups, slots, longest, dials.get(kind, {}))
        self.log = bench.folder / f"{kind}.log"
        self.process = start(bench, [*APRIL, "run", config], self.log, parts)
        self.lengths = bench.lengths | {"median_tokens": size.median * size.scale, "longest_tokens": longest}

    @property
    def waits(self) -> bool:
        """Whether its learner has loaded the model, and its engine waits to be let go."""
        return (self.folder / WAITS).exists() and "the learner is connected" in self.log.read_text(errors="replace")

    @property
    def steps(self) -> list[dict]:
        return read_records(self.folder / "metrics.jsonl")

    def await_that(self, condition, what: str, timeout_s: float = PATIENCE_S) -> None:
        await_that(condition, what, self.process, self.log, timeout_s)

    def end(self) -> None:
        """Kill it; its parts end with their parent."""
        self.process.kill()
        self.process.wait()


def compare_schedules(bench: Bench, runs: list[Run]) -> None:
    part, found = bench.part, {}
    for run in runs:
        if not part.enough_time(run.kind, RUN_S / 2):
            continue
        with part.attempt(f"vllm: {run.kind}"):
            longest_s = 3 * PATIENCE_S if part.tiny else max(1.0, part.left_s - 2)
            try:
                run.await_that(lambda run=run: run.waits, "the engine", longest_s)
                steps = watch(run)
            finally:
                run.end()
                bench.await_idle()
            seconds = steps[-1]["time"] - steps[0]["time"]
            found[run.kind] = sum(step["tokens"] for step in steps[1:]) / seconds
            part.row(f"gpu_vllm_tokens_per_s_{run.kind}", found[run.kind], "tokens/s")
            part.fact(f"vllm: {run.kind}", {
                "steps": len(steps) - 1, "seconds": round(seconds, 2), "lengths": run.lengths,
                "train_s": round(float(np.mean([step["learner"]["train_s"] for step in steps[1:]])), 3),
            })  # fmt: skip
            if run.kind != "sync" and "sync" in found:
                part.row(f"gpu_vllm_{run.kind}_vs_sync", found[run.kind] / found["sync"], "ratio")


def watch(run: Run) -> list[dict]:
    """Records of the run's steps, from the first to the last that it makes in RUN_S, but of LEAST_STEPS at least."""
    part = run.bench.part
    open_gate(run.folder, run.lengths)
    began = time.monotonic()
    longest_s = 3 * PATIENCE_S if part.tiny else min(2 * RUN_S, part.left_s - 2)
    wanted_s = 0.0 if part.tiny else min(RUN_S, longest_s)
    with contextlib.suppress(TimeoutError):
        run.await_that(
            lambda: len(run.steps) >= LEAST_STEPS and time.monotonic() >= began + wanted_s, "the steps", longest_s
        )
    steps = run.steps
    if len(steps) < 2:
        raise RuntimeError(f"{len(steps)} steps in {time.monotonic() - began:.0f} s:\n{log_end(run.folder, run.log)}")
    return steps


if __name__ == "__main__":
    main()

"""A worker on SGLang against the same server driven directly: the same requests, one server, alternating.

`pipeline_ratio`: tokens/s through broker and worker, 128 requests at a time, over those of a saturating client. Nearly
greedy, so that both sides get the same responses: SGLang does not heed seeds, and a few long ones more make a tail.
`abort_to_journal_s`: from the broker's broadcast to the last partial in its journal with 128 requests running.
`update_stall_s`: from the call that changes the weights to the next token, with 128 requests running.
`restart_lost_tokens_max`: tokens of one sample that a server which died at that instant would have taken with it; an
upper bound, since it is what an abort at that instant still brings.
"""

import asyncio
import contextlib
import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import APRIL, ROOT, Row, in_turns, parser, process, ratios, report, wait_for, write_lines

from april import wire
from april.config import WeightsSection
from april.data.tokenizer import Tokenizer
from april.launch.sft.warm_start import make_policy
from april.learner.source import BrokerSource
from april.observe.operate import RunAddress
from april.simulate.probe import load_folder_weights
from april.weights.publisher import WeightPublisher
from april.wire.message import Version
from april.workers.engines.base import Request
from april.workers.engines.sglang.client import SGLangClient
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.run import StreamedRequest
from april.workers.engines.sglang.server import ServerSettings, SGLangServer

CONCURRENT, WAITING = 128, 8
GROUP = 8
RESPONSE_TOKENS = 512
CONTEXT_TOKENS = 640
STREAM_TOKENS = 32
"""Tokens of an event, the worker's default."""
PATIENCE_S = 300.0
TEMPERATURE = 0.01
"""The smallest temperature that a run may have."""
V0, V1 = Version(0, 0), Version(0, 1)


class Bench:
    """One server, a policy, and as many prompts as are asked for."""

    def __init__(self, folder: Path, policy: Path):
        self.folder, self.policy = folder, policy
        self.tokenizer = Tokenizer(policy)
        self.tensors = load_folder_weights(policy)
        settings = ServerSettings(
            ROOT / ".venv-sglang/bin/python", policy, folder / "server.log", slots=CONCURRENT,
            context_tokens=CONTEXT_TOKENS,
        )  # fmt: skip
        self.server = SGLangServer(settings)
        self.engine = SGLangEngine(policy, 71, CONTEXT_TOKENS, slots=CONCURRENT, server=self.server)
        self.engine.load_weights(V0, self.tensors)

    def prompts(self, rows: int) -> list[str]:
        return [f"{row % 90 + 10:02d}*{row % 7 + 2}+{row % 50 + 10:02d}=" for row in range(rows)]


# --- the same requests on both sides --------------------------------------------------------------------------


def direct(bench: Bench, rows: int) -> float:
    """Tokens/s of a client that has all slots of the server taken and a few requests waiting, which are the worker's,
    and does nothing but read their answers. A longer queue slows the server down, which looks through it; so does a
    full prefix cache, which the pipeline empties with its weights."""
    stops = frozenset(bench.tokenizer.eos_token_ids)
    prompts = [bench.tokenizer.encode_prompt(prompt).astype(np.int32) for prompt in bench.prompts(rows)]
    samples = [(group, index) for group in range(rows) for index in range(GROUP)]

    async def run() -> float:
        client, gate = SGLangClient(bench.server.url), asyncio.Semaphore(CONCURRENT + WAITING)

        async def ask(group: int, index: int) -> int:
            request = Request(
                group * GROUP + index, prompts[group], RESPONSE_TOKENS, stop_token_ids=stops, temperature=TEMPERATURE
            )
            asked = StreamedRequest(request)
            asked.start_attempt()
            async with gate:
                async for event in client.generate(asked.body(V0, STREAM_TOKENS)):
                    tokens = event["meta_info"]["completion_tokens"]
            return tokens

        try:
            await client.call("/flush_cache", {}, PATIENCE_S)
            started = time.monotonic()
            tokens = sum(await asyncio.gather(*(ask(*sample) for sample in samples)))
            return tokens / (time.monotonic() - started)
        finally:
            await client.close()

    return asyncio.run(run())


def pipeline(bench: Bench, rows: int) -> float:
    """Tokens/s of one round of all the requests, from the first lease to the batch in the learner's hands."""
    with run_parts(bench, rows) as (target, source):
        wait_for(lambda: target.status()["leased"], "the first lease")
        started = time.monotonic()
        batch = source.fetch(0)
        seconds = time.monotonic() - started
        return sum(len(sample.logprobs) for group in batch.groups for sample in group) / seconds


@contextlib.contextmanager
def run_parts(bench: Bench, rows: int) -> Iterator[tuple[RunAddress, BrokerSource]]:
    """Broker and worker in processes of their own, the weights from here; the operator's and the learner's side."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=bench.folder) as folder, contextlib.ExitStack() as parts:
        config = write_run(Path(folder), bench, rows)
        broker = parts.enter_context(process([*APRIL, "broker", config], Path(folder) / "broker.log"))
        address_file = Path(folder) / "runs/sglang/address"
        wait_for(address_file.exists, "the broker's address", broker)
        address = address_file.read_text()
        publisher = WeightPublisher(WeightsSection(), "sglang", "cpu")
        parts.callback(publisher.close)
        source = BrokerSource(address, publisher.address, PATIENCE_S)
        parts.callback(source.close)
        worker = [*APRIL, "worker", config, "--connect", address, "--name", "w0"]
        parts.enter_context(process(worker, Path(folder) / "worker.log"))
        incarnation, _ = source.start(0)
        publisher.publish(Version(incarnation, 0), bench.tensors)
        yield RunAddress(None, address, None), source


def write_run(folder: Path, bench: Bench, rows: int) -> Path:
    write_lines(folder / "prompts.jsonl", ({"prompt": prompt, "label": "0"} for prompt in bench.prompts(rows)))
    path = folder / "run.toml"
    path.write_text(f"""
run = {{ name = "sglang", dir = "{folder}/runs" }}
model = {{ path = "{bench.policy.absolute()}" }}
data = {{ path = "{folder}/prompts.jsonl", epochs = 1, shuffle = false }}
schedule = {{ kind = "sync", rollout_batch_size = {rows}, n_samples_per_prompt = {GROUP}, max_steps = 1 }}
sampling = {{ max_response_tokens = {RESPONSE_TOKENS}, temperature = {TEMPERATURE} }}
worker = {{ engine = "sglang", slots = {CONCURRENT} }}
engine = {{ url = "{bench.server.url}" }}
learner = {{ ranks = 1 }}
""")
    return path


# --- abort, update, loss --------------------------------------------------------------------------------------


def abort_to_journal(bench: Bench, turns: int) -> list[float]:
    """A drain broadcasts an abort; over when no lease is out, each partial acknowledged and so on disk."""
    found = []
    with run_parts(bench, 1024) as (target, _):
        for _ in range(turns):
            wait_for(lambda: target.status()["leased"] >= CONCURRENT, "128 running")
            time.sleep(1.0)
            started = time.monotonic()
            target.ask(wire.Drain(True))
            wait_for(lambda: target.status()["leases"] == 0, "the last partial")
            found.append(time.monotonic() - started)
            target.ask(wire.Drain(False))
    return found


def fill(bench: Bench) -> None:
    """CONCURRENT long requests, running."""
    rng = np.random.default_rng(0)
    for i in range(CONCURRENT):
        bench.engine.submit(Request(i, rng.integers(2, 71, 16).astype(np.int32), 600, seed=i))
    before = bench.engine.generated_tokens
    while bench.engine.generated_tokens < before + 20 * CONCURRENT:
        bench.engine.step()


def update_stall(bench: Bench, turns: int) -> list[float]:
    found = []
    for turn in range(turns):
        fill(bench)
        version = Version(1, turn)
        started = time.monotonic()
        bench.engine.load_weights(version, bench.tensors)
        before = bench.engine.generated_tokens
        while bench.engine.generated_tokens == before:
            bench.engine.step()
        found.append(time.monotonic() - started)
        bench.engine.cancel_all(range(CONCURRENT))
    return found


def restart_lost(bench: Bench, turns: int) -> list[float]:
    found = []
    for _ in range(turns):
        fill(bench)
        bench.engine.step()
        had = {key: len(run.generated) for key, run in bench.engine._streaming.items()}
        runs = dict(bench.engine._streaming)
        bench.engine.cancel_all(range(CONCURRENT))
        found.append(float(max(len(run.generated) - had[key] for key, run in runs.items())))
    return found


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--policy", type=Path, default=ROOT / "cache/policy", help="made where there is none")
    options = arguments.parse_args()
    make_policy(options.policy, 0)
    rows, turns, repeats = (16, 1, 2) if options.quick else (64, 5, 7)
    with tempfile.TemporaryDirectory(prefix=f"april-sglang-{uuid.uuid4().hex[:6]}-") as folder:
        bench = Bench(Path(folder), options.policy)
        try:
            speeds: dict = {pipeline: [], direct: []}
            for turn in range(turns):
                for side in in_turns(turn, pipeline, direct):
                    speeds[side].append(side(bench, rows))
                    print(f"  {side.__name__}: {speeds[side][-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
            aborts = abort_to_journal(bench, repeats)
            bench.engine.load_weights(V1, bench.tensors)
            result = [
                Row("pipeline_ratio", ratios(speeds[pipeline], speeds[direct]), "ratio"),
                Row("pipeline_tokens_per_s", speeds[pipeline], "tokens/s"),
                Row("direct_tokens_per_s", speeds[direct], "tokens/s"),
                Row("abort_to_journal_s", aborts, "s"),
                Row("update_stall_s", update_stall(bench, repeats), "s"),
                Row("restart_lost_tokens_max", restart_lost(bench, repeats), "tokens", of=max),
            ]
        finally:
            bench.engine.close()
    report(result, options.json)


if __name__ == "__main__":
    main()

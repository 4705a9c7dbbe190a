"""A run folder with made-up but plausible figures, in the form that the broker writes: long-tailed lengths, aborts, a
lost worker."""

import math
import random
from pathlib import Path

import orjson

from april.config.stored import evaluation_line
from april.util.versions import RUN_FOLDER

CONFIG = """\
seed = 0

[run]
name = "demo"
dir = "runs"

[model]
path = "cache/policy"

[schedule]
kind = "april"
rollout_batch_size = 32
over_sampling_batch_size = 48
max_steps = 30
"""
START_S = 1_763_640_000.0
PAUSE_S = 7500.0
"""Pause between the two starts of a synthetic run of more than 20 steps (seconds)."""


def write_run(folder: Path, steps: int = 30, workers: int = 3, seed: int = 0) -> Path:
    """Write config.toml, metrics.jsonl and summary.json of a run with this many trained steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    RUN_FOLDER.claim(folder, new=True)
    records = make_records(steps, workers, random.Random(seed))
    summary = make_summary(records)
    evaluated = [evaluation_line(point | {"time": START_S + point["step"]}) for point in summary["evaluation"]]
    lines = sorted([*evaluated, *records], key=lambda line: line["step"])
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    if step := resumed_after(steps):
        line = {"time": records[step - 1]["time"] + PAUSE_S - 2, "step": step, "changed": ["learner.lr: 1e-4 -> 5e-4"]}
        (folder / "resumes.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    (folder / "summary.json").write_bytes(orjson.dumps(summary))
    return folder


def resumed_after(steps: int) -> int:
    return steps // 2 if steps > 20 else 0


def make_records(steps: int, workers: int, rng: random.Random) -> list[dict]:
    now_s, ledger, records = START_S + 2.0, {"generated": 0, "trained": 0, "aborted": 0}, []
    for step in range(1, steps + 1):
        created = [response_length(rng, step) for _ in range(256)]
        trained = [length for length in created if length < 900] + [response_length(rng, step) for _ in range(4)]
        tokens, generated = sum(trained), sum(created) + rng.randrange(200, 900)
        rollout_s = generated / rng.uniform(14_000, 18_000)
        lanes, end_s = worker_tracks(step, workers, now_s, rollout_s, rng)
        ledger["generated"] += generated
        ledger["trained"] = min(ledger["trained"] + tokens, ledger["generated"] - 300)
        ledger["aborted"] += rng.randrange(0, 9)
        stale = int(tokens * min(0.45, 0.1 * (step - 1)) * rng.random())
        older = stale // 5 if step > 2 else 0
        records.append(
            {
                "step": step,
                "time": end_s,
                "reward": 0.92 - 0.5 * math.exp(-step / 9) + rng.gauss(0, 0.02),
                "groups": 32,
                "samples": 256,
                "tokens": tokens,
                "rollout_s": rollout_s,
                "rollout_tokens": generated,
                "rollout_tokens_per_s": generated / rollout_s,
                "staleness": {
                    "mean": (stale + older) / tokens,
                    "max": 2 if older else 1 if stale else 0,
                    "tokens_by_age": {"0": tokens - stale, "1": stale - older, "2": older},
                },
                "lengths": {
                    "trained": describe(trained),
                    "trained_histogram": histogram(trained),
                    "created_histogram": histogram(created),
                },
                "tokens_ledger": make_ledger(ledger),
                "round": {"partials_waiting": rng.randrange(60, 130), "surplus_groups": 2, "aborted_samples": 118},
                "timeline": lanes,
                "reward_details": {"correct": 0.9 - 0.5 * math.exp(-step / 9), "brief": 0.3 + 0.1 * rng.random()},
                "gradient": {"tokens": 0.0 if step % 9 == 0 else rng.uniform(0.5, 1), "groups": rng.uniform(0.4, 0.9)},
                "learner": {
                    "loss": rng.gauss(0.01, 0.01),
                    "grad_norm": abs(rng.gauss(0.4, 0.1)),
                    "lr": 5e-4 * min(1.0, step / 3),
                    "clip_fraction": 0.02,
                    "entropy": 0.4 + 0.7 * math.exp(-step / 20),
                    "wait_s": rollout_s,
                    "forward_s": rng.uniform(0.1, 0.2),
                    "backward_s": rng.uniform(0.2, 0.3),
                    "optimizer_s": 0.05,
                    "checkpoint_s": 0.1 * (step % 10 == 0),
                    "truncated_fraction": 0.05,
                    "ess": 0.97,
                    "sequence_ess": 0.9,
                    "weight_ess": 0.98,
                    "off_policy_share": stale / tokens,
                    f"version_share_{step - 1}": 1 - stale / tokens,
                    f"version_share_{step - 2}": stale / tokens,
                    "train_s": 0.6,
                },
            }
        )
        now_s = end_s + (PAUSE_S if step == resumed_after(steps) else 0.0)
    return records


def worker_tracks(step: int, workers: int, start_s: float, rollout_s: float, rng: random.Random) -> tuple[list, float]:
    """Activity spans of the workers in one round: each generates, is aborted and loads weights; worker-1 is away in
    steps 7 and 8."""
    lanes, stop_s = [], start_s + rollout_s
    if step == 1:
        lanes += [instant(f"worker-{k}", "joined", START_S + 0.3 * k) for k in range(workers)]
    for k in range(workers):
        worker = f"worker-{k}"
        if k == 1 and step in (7, 8):
            lanes += [instant(worker, "lost", start_s + 0.1)] if step == 7 else []
            continue
        if k == 1 and step == 9:
            lanes.append(instant(worker, "joined", start_s))
        lanes.append({"worker": worker, "kind": "generate", "start": start_s, "end": stop_s - rng.uniform(0, 0.1)})
        lanes.append(instant(worker, "abort", stop_s))
        lanes.append(
            {"worker": worker, "kind": "weights", "start": stop_s + 0.6, "end": stop_s + 0.6 + rng.uniform(0.03, 0.12)}
        )
    return lanes, stop_s + 0.75


def instant(worker: str, kind: str, at_s: float) -> dict:
    return {"worker": worker, "kind": kind, "start": at_s, "end": at_s}


def make_ledger(ledger: dict) -> dict:
    rest = ledger["generated"] - ledger["trained"] - ledger["aborted"]
    return {
        "generated": ledger["generated"], "trained": ledger["trained"], "delivered": 0, "ready": rest // 4,
        "open": rest - rest // 4, "discarded": {"aborted": ledger["aborted"]}, "emitted_unacked": 0, "refused": 0,
        "evaluation": 5120,
    }  # fmt: skip


def make_summary(records: list[dict]) -> dict:
    summary = {"run": "demo", "state": "finished", "max_steps": len(records), "steps": len(records)}
    if not records:
        return summary | {"state": "running", "max_steps": 30, "wall_s": 0.4, "tokens": None, "evaluation": []}
    rewards = [record["reward"] for record in records]
    by_age = {age: sum(record["staleness"]["tokens_by_age"][age] for record in records) for age in "012"}
    steps_of_first_set = resumed_after(len(records)) or len(records) + 1
    evaluated = sorted({0, len(records) // 3, 2 * len(records) // 3, len(records)})
    rollout_tokens, rollout_s = (sum(record[key] for record in records) for key in ("rollout_tokens", "rollout_s"))
    return summary | {
        "wall_s": records[-1]["time"] - START_S,
        "reward": {"first": rewards[0], "last3": sum(rewards[-3:]) / len(rewards[-3:])},
        "tokens": records[-1]["tokens_ledger"],
        "ledger_closed": True,
        "rollout_tokens_per_s": rollout_tokens / rollout_s,
        "staleness": {
            "mean": sum(int(age) * n for age, n in by_age.items()) / sum(by_age.values()),
            "max": max(record["staleness"]["max"] for record in records),
            "tokens_by_age": by_age,
        },
        "buffer_peak": {"tokens": 9120, "bytes": 1_400_000},
        "lengths": {
            "created": {"mean": 52.3, "p50": 36, "p95": 146, "p99": 251},
            "trained": records[-1]["lengths"]["trained"],
            "settled_cohorts": max(len(records) - 1, 0),
            "ratio": 0.991,
        },
        "evaluation": [
            {
                "step": step,
                "version": [0, step],
                "accuracy": 0.88 - 0.4 * math.exp(-step / 8),
                "prompts": 256 if step < steps_of_first_set else 64,
            }
            for step in evaluated
        ],
        "starts": {"broker": 1, "learner": 2},
    }


def response_length(rng: random.Random, step: int) -> int:
    return max(1, min(2048, int(rng.lognormvariate(math.log(36 + min(step, 40) / 4), 0.9))))


def describe(lengths: list[int]) -> dict:
    ordered = sorted(lengths)
    quantile = {
        name: ordered[int(share * (len(ordered) - 1))] for name, share in [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)]
    }
    return {"mean": sum(ordered) / len(ordered), **quantile, "max": ordered[-1]}


def histogram(lengths: list[int]) -> dict:
    counts: dict[str, int] = {}
    for length in lengths:
        key = str(math.floor(4 * math.log2(length) + 1e-9))
        counts[key] = counts.get(key, 0) + 1
    return counts

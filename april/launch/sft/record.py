"""Records a supervised run: a line in metrics.jsonl for each step and evaluation, and summary.json, rewritten after
each, in the form of other runs."""

import math
from collections.abc import Callable
from typing import Any

import orjson

from april.broker.telemetry.metrics_file import MetricsFile, read_lines
from april.broker.telemetry.recorder import read_summary
from april.broker.telemetry.sinks import Sinks
from april.config import Config
from april.config.stored import is_step
from april.util import clock
from april.util.files import replace_file
from april.wire.training import Discard

LEARNER_METRICS = {
    "loss", "trained_tokens", "entropy", "grad_norm", "lr", "micro_batches", "optimizer_steps", "update_skipped",
    "nonfinite", "tflop_per_s", "mfu", "checkpoint_store_retries",
}  # fmt: skip
"""The learner's metrics that have a meaning without RL; its times in seconds are recorded as well."""
LAST_STEPS = 3
"""Number of newest steps with a finite loss whose mean summary.json shows."""


class SftRecord:
    """Writes the metrics of a supervised run. If the run goes on from a checkpoint, lines about later steps are removed
    first, since these steps are trained again."""

    def __init__(self, config: Config, checkpoint_step: int, steps: int, counts: Callable[[], dict[str, int]]):
        """`checkpoint_step`: step of the checkpoint that the run goes on from, 0 at its beginning; `steps`: batches in
        the run; `counts`: function that returns numbers of rows by name: how many there are, and how many were left
        out."""
        self.run, self.run_dir, self.steps, self.counts = config.run.name, config.run_dir, steps, counts
        path = self.run_dir / "metrics.jsonl"
        self._file = MetricsFile(path, checkpoint_step, -1)
        records = [record for record, _ in read_lines(path)]
        self.losses: list[float | None] = [finite(record["learner"]["loss"]) for record in records if is_step(record)]
        """Loss of each step; None if it was not finite, or the batch had no rows."""
        self.tokens = sum(record["tokens"] for record in records if is_step(record))
        """Trained tokens so far."""
        self.evaluations: dict[int, dict[str, Any]] = {
            record["step"]: {"step": record["step"], "time": record["time"], **record["evaluation"]}
            for record in records
            if not is_step(record)
        }
        self._sinks = Sinks(config.operations.sinks, self.run_dir)
        self._started, self._wall_before_s = (
            clock.now(),
            read_summary(self.run_dir / "summary.json").get("wall_s") or 0.0,
        )
        self._write_summary("running")

    def step(self, step: int, metrics: dict[str, float], discarded: Discard = "") -> None:
        """Record the batch that has led to weights `step`, with the learner's `metrics` of it. The tokens of a batch
        that was `discarded` do not count as trained, and a batch whose rows were all left out has no loss."""
        learner: dict[str, float | None] = {
            name: value for name, value in metrics.items() if name in LEARNER_METRICS or name.endswith("_s")
        }
        if not metrics["tokens"]:
            learner["loss"] = None
        tokens, took_s = 0 if discarded else int(metrics["tokens"]), metrics["train_s"] + metrics["wait_s"]
        line: dict[str, Any] = {
            "step": step,
            "time": round(clock.now(), 3),
            "reward": None,
            "samples": int(metrics["samples"]),
            "tokens": tokens,
            "tokens_per_s": round(tokens / took_s, 1) if took_s else None,
            "rollout_s": 0.0,
            "rollout_tokens": 0,
            "staleness": {"tokens_by_age": {}},
            "learner": learner,
            "alarms": [],
        }
        self._append(line)
        self.losses.append(finite(learner["loss"]))
        self.tokens += tokens
        self._sinks.step(line)
        self._write_summary("running")

    def evaluated(self, step: int, sets: dict[str, dict[str, float]]) -> None:
        """Record the figures of held-out rows, by the name of their set, under weights `step`. An evaluation of the
        same step is not recorded a second time."""
        if step in self.evaluations:
            return
        first, now = next(iter(sets.values())), round(clock.now(), 3)
        result = {"step": step, "time": now, **first} | ({"sets": sets} if len(sets) > 1 else {"set": next(iter(sets))})
        self.evaluations[step] = result
        self._file.append_evaluation(result)
        self._file.release(self._file.waiting)
        self._sinks.evaluation(result, now)
        self._write_summary("running")

    def best(self, name: str) -> int:
        """Step with the lowest loss of the held-out set `name`; -1 before the first evaluation with a finite one."""
        losses = {
            step: loss
            for step, found in self.evaluations.items()
            if (loss := finite((found["sets"][name] if "sets" in found else found)["loss"])) is not None
        }
        return min(losses, key=lambda step: losses[step], default=-1)

    def close(self) -> None:
        """Record the end of the run."""
        self._write_summary("finished" if len(self.losses) >= self.steps else "stopped")
        self._sinks.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.append(line)
        self._file.release(self._file.waiting)

    def _write_summary(self, state: str) -> None:
        known = [loss for loss in self.losses if loss is not None]
        last = known[-LAST_STEPS:]
        summary = {
            "run": self.run,
            "kind": "sft",
            "state": state,
            "steps": len(self.losses),
            "max_steps": self.steps,
            "wall_s": round(self._wall_before_s + clock.now() - self._started, 1),
            "loss": {"first": known[0], "last3": sum(last) / len(last)} if last else {},
            "trained_tokens": self.tokens,
            "data": self.counts(),
            "evaluation": list(self.evaluations.values()),
        }
        replace_file(self.run_dir / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))


def finite(loss: float | None) -> float | None:
    """A loss, or None for one that is not finite, which metrics.jsonl has as null."""
    return loss if loss is not None and math.isfinite(loss) else None

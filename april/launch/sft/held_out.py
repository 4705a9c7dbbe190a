"""Evaluation of a supervised run: the loss of held-out rows under new weights."""

import time
from collections.abc import Callable

import torch

from april.learner.batch import TrainSample
from april.learner.packing import input_tokens, pack, plan
from april.learner.trainer import Trainer
from april.util.pulse import MAIN


class HeldOutLoss:
    """`april.learner.loop.Publication` that evaluates the weights of some steps: of every `evaluation.every`, and those
    before the first and after the last batch."""

    def __init__(
        self,
        trainer: Trainer,
        sets: dict[str, list[TrainSample]],
        steps: int,
        report: Callable[[int, dict[str, dict[str, float]]], None] | None,
    ):
        """`sets`: held-out rows by the name of their set, the same on all ranks. `steps`: number of batches in the run.
        `report`: function (policy step, figures by set) that is called with each result; None except on rank 0."""
        self.trainer, self.sets, self.steps, self.report = trainer, sets, steps, report

    def publish(self) -> dict[str, float]:
        step, every = self.trainer.step_count, self.trainer.config.evaluation.every
        if not self.sets or not (step in (0, self.steps) or (every and step % every == 0)):
            return {}
        began = time.perf_counter()
        MAIN.at("evaluating")
        found = {name: self.loss_of(samples) for name, samples in self.sets.items()}
        if self.report:
            self.report(step, found)
        return {"evaluation_s": time.perf_counter() - began}

    def finish(self) -> dict[str, float]:
        return {}

    def loss_of(self, samples: list[TrainSample]) -> dict[str, float]:
        """Figures of held-out samples: `loss`, the mean cross-entropy of their trained tokens (nats), and the numbers
        of these tokens, `tokens`, and of samples, `prompts`. All ranks have to call this together."""
        trainer, backend = self.trainer, self.trainer.backend
        section, ranks = trainer.config.learner, trainer.ranks
        budget = section.microbatch_tokens * section.context_parallel
        planned = plan(list(map(input_tokens, samples)), ranks.count, budget)
        micros = [pack([samples[i] for i in row[ranks.rank]], trainer.device) for row in planned]
        sums = torch.zeros(2, dtype=torch.float64, device=trainer.device)
        policy = trainer.policy.eval()
        for micro, (logprobs, _) in zip(micros, backend.scores(policy, micros, temperature=1.0), strict=True):
            if not micro.is_dummy:
                sums[0] -= logprobs.double().sum()
                sums[1] += len(logprobs)
        policy.train()
        backend.free_gathered()
        total, tokens = ranks.total(sums).tolist()
        return {"loss": total / tokens, "tokens": int(tokens), "prompts": len(samples)}

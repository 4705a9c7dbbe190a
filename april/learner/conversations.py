"""Conversations of sources of kind sft, trained beside the samples of a batch (`data.sources.kind`).

found = BatchConversations(config)             # on rank 0; raises ConfigError
batch = found.beside(batch)
conversations = ConversationLoss(config, ranks, device)
micros = conversations.micros(batch.conversations, minibatches, costs)
loss = conversations.loss(micros[0][0], logprobs, totals)

Batch k has the rows at positions k B to (k + 1) B of the seeded order of all epochs of each source, B its `sft_rows`,
so that a batch that is trained again has the same ones. In each optimizer step the loss of the samples gets the term

    sum over sources of sft_weight * mean over the trained tokens of the source's rows of -log pi

at temperature 1, whatever the temperature of the samples.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import orjson
import torch
from torch import Tensor

from april.config import Config
from april.data.conversation_rows import ConversationRows
from april.data.conversations import Conversation
from april.learner import checkpoint
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.diagnostics import StepTotals
from april.learner.losses.ranks import Ranks
from april.learner.packing import MicroBatch, input_tokens, pack, plan
from april.util.errors import refuse
from april.util.files import replace_file
from april.wire.message import Version

ORDER_FILE = "conversations.json"
"""File of the run folder that records the sources and settings which determine the conversations of each batch."""


class BatchConversations:
    """The conversations of each batch, for rank 0."""

    def __init__(self, config: Config):
        """Read all rows. Raises ConfigError, also if a run that has checkpoints began with other rows."""
        sources = config.data.sft_sources
        self.rows = {number: ConversationRows([source], config) for number, source in sources.items()}
        self.sizes = {number: source.sft_rows for number, source in sources.items()}
        self.check_order(config)

    def beside(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with its conversations, source by source, and the number of those that cannot be trained."""
        samples, left_out = list[TrainSample](), Counter[str]()
        for number, rows in self.rows.items():
            positions = range(batch.step * self.sizes[number], (batch.step + 1) * self.sizes[number])
            samples += [as_sample(row, index, batch.step, number) for index, row in rows.at(positions)]
            left_out.update(rows.reasons(positions))
        return replace(batch, conversations=samples, left_out=dict(left_out))

    def check_order(self, config: Config) -> None:
        path, order = config.run_dir / ORDER_FILE, {}
        for number, rows in self.rows.items():
            order[f"data.sources.{number}.path"] = rows.rows.fingerprint
            order[f"data.sources.{number}.sft_rows"] = str(self.sizes[number])
        order |= {"sft.max_tokens": str(config.sft.max_tokens), "sft.train_on": config.sft.train_on}
        has_begun = path.exists() and checkpoint.steps(config.run_dir / "checkpoints")
        for key, value in (orjson.loads(path.read_bytes()) if has_begun else {}).items():
            if order.get(key) != value:
                why = f"is not what the run began with ({value}), and its batches would be others"
                refuse(key, order.get(key), why, "restore it, or begin another run")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, orjson.dumps(order))


def as_sample(row: Conversation, number: int, step: int, source: int = 0) -> TrainSample:
    """A row as a sample of group `number` with the reward 1, whose trained tokens count as sampled by weights `step`.
    Tokens after the last trained token are left out. `source`: number of the source that the row is from."""
    trained = np.flatnonzero(row.is_trained)
    first, end = int(trained[0]), int(trained[-1]) + 1
    edges = np.flatnonzero(np.diff(row.is_trained[first:end].astype(np.int8), prepend=0, append=0)).tolist()
    segments = tuple((start, stop, Version(0, step)) for start, stop in list(pairwise(edges))[::2])
    logprobs = np.zeros(end - first, np.float32)
    return TrainSample(
        row.tokens[:end], first, logprobs, 1.0, segments, group=number, index=0, finish_reason="stop", source=source
    )


@dataclass(frozen=True, eq=False)
class ConversationMicroBatch:
    """A packed micro-batch of conversations with K trained tokens."""

    packed: MicroBatch
    weights: Tensor
    """Weight of each token in the loss, float32 [K]; 0 in a dummy micro-batch."""
    sources: Tensor
    """Number of the source of each token, int64 [K]."""


class ConversationLoss:
    """The loss of conversations beside that of samples."""

    def __init__(self, config: Config, ranks: Ranks, device: torch.device):
        """`ranks`: the data-parallel ranks, among which the conversations of a batch are divided."""
        self.weights = {number: source.sft_weight for number, source in config.data.sft_sources.items()}
        self.ranks, self.device = ranks, device
        self.budget = config.learner.microbatch_tokens * config.learner.context_parallel

    def micros(
        self, samples: Sequence[TrainSample], minibatches: int, costs: Sequence[float]
    ) -> list[list[ConversationMicroBatch]]:
        """This rank's micro-batches in each of `minibatches` optimizer steps; every rank has equally many. `costs`:
        cost of each sample, as for `packing.plan`."""
        return [self.planned(samples[number::minibatches], costs[number::minibatches]) for number in range(minibatches)]

    def planned(self, samples: Sequence[TrainSample], costs: Sequence[float]) -> list[ConversationMicroBatch]:
        tokens = np.bincount(
            [sample.source for sample in samples], [sample.sampled_tokens for sample in samples]
        ) if samples else np.zeros(0)  # fmt: skip
        planned = plan(list(map(input_tokens, samples)), self.ranks.count, self.budget, costs)
        return [self.packed([samples[i] for i in row[self.ranks.rank]], tokens) for row in planned]

    def packed(self, samples: list[TrainSample], tokens: np.ndarray) -> ConversationMicroBatch:
        """Pack samples into a micro-batch, whose loss is weighted by source. `tokens`: trained tokens of each source in
        the optimizer step, over all ranks."""
        packed = replace(pack(samples, self.device), temperature=1.0)
        sources = np.repeat([sample.source for sample in samples], [sample.sampled_tokens for sample in samples])
        weights = [self.weights[source] / tokens[source] for source in sources.tolist()]
        if not samples:
            sources, weights = np.zeros(1), [0.0]
        as_tensor = torch.from_numpy
        return ConversationMicroBatch(
            packed,
            as_tensor(np.array(weights, np.float32)).to(self.device),
            as_tensor(sources.astype(np.int64)).to(self.device),
        )

    def loss(self, micro: ConversationMicroBatch, logprobs: Tensor, totals: StepTotals) -> Tensor:
        """Contribution of a micro-batch to the loss of the global batch, from its log-probabilities [K]; adds its
        figures to `totals`."""
        loss = -(micro.weights * logprobs).sum()
        if not micro.packed.is_dummy:
            totals.add_conversations(loss, micro.sources, logprobs)
        return loss

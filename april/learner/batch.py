"""Training batches: finished samples in groups, one batch a step.

Rank 0 receives a batch; `share_batch` broadcasts it to the other ranks as one byte tensor, without pickle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import repeat

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from april.data.support import Support
from april.wire.message import Version
from april.wire.training import GroupHead, SampleSpan

NO_MORE_BATCHES = -1
"""Value that rank 0 broadcasts instead of the batch's byte count when the run is over."""


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One row of a training batch: a finished response with its prompt, P + R tokens.

    Raises ValueError if fields disagree in length or range.
    """

    tokens: np.ndarray
    """Token ids, int32 [P + R]: the P prompt tokens, then the R response tokens."""
    prompt_tokens: int
    """P, the number of prompt tokens; at least 1, since the first response token is predicted from the token before
    it."""
    logprobs: np.ndarray
    """Behaviour log-probabilities of the response tokens, float32 [R]: log-softmax(logits / temperature) at sampling,
    over the support if sampling was truncated (top-k, top-p); 0 for observations."""
    reward: float
    segments: tuple[tuple[int, int, Version], ...]
    """(start, end, version), in order: response tokens [start, end) were sampled by policy `version`. Tokens between
    segments are observations of an environment: the policy is conditioned on them but not trained on them."""
    support: Support | None = None
    """If sampling was truncated (top-k, top-p): the candidate token ids from which each of the R response tokens was
    drawn, over which its log-probability is normalised. None: the whole vocabulary."""
    group: int = -1
    """Number of the sample's group (all samples of one prompt) in the run; -1 if unknown, as in a hand-made batch."""
    index: int = -1
    """Index of the sample among those originally requested for the group (some may have been lost); -1 if unknown."""
    finish_reason: str = ""
    details: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward, by name."""
    spans: tuple[SampleSpan, ...] = ()
    """Time spans of the sample's life in order: generation, scoring and other phases, each with its process and its
    start and end in Unix seconds."""
    opened_at: float = 0.0
    """Time at which the broker opened the group for generation, Unix seconds; 0 if unknown."""
    delivered_at: float = 0.0
    """Time at which the broker delivered the group to the learner, Unix seconds; 0 if unknown."""
    fork: int = 0
    """Fork number within an agent session. Each fork is a row of the batch; a prefix shared by forks is trained in one
    of them only."""
    chunks: tuple[tuple[int, float], ...] = ()
    """For each generated chunk: (length of the response after the chunk in tokens, Unix seconds); only if samples are
    stored."""
    parent: int = 0
    """Fork number of the fork that this fork branched from; stored for inspection, not used in training."""
    shared_tokens: int = 0
    """Number of leading tokens that a fork shares with its parent; stored for inspection, not used in training."""
    label: str = ""
    """Reference answer of the prompt; only if samples are stored."""
    images: tuple[bytes, ...] = ()
    """The images of the tokens as PNG files (`april.data.images`), in the order of their placeholders."""
    image_starts: tuple[int, ...] = ()
    """For each image the index of the first token that may be its placeholder; empty: 0 for all. An image takes the
    first placeholders from that index on that no image before it has taken. Placeholder ids that no image takes were
    sampled by the policy, and are text."""
    token_scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Named columns that a scorer gave beside the reward, float32 [R], or [R, W] for W numbers of each token; 0 for
    observations."""
    hinted_prompt: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    """Token ids, int32, of the prompt with its hint, under which the policy is its own teacher; empty without a
    hint."""
    source: int = 0
    """Index, from 0, of the prompt's source in `data.sources`."""
    feedback: str = ""
    """Text that the verifier gave beside the reward; stored for inspection."""

    def __post_init__(self):
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens = {self.prompt_tokens}; a sample needs at least 1 prompt token")
        if len(self.logprobs) != self.response_tokens:
            raise ValueError(
                f"{len(self.logprobs)} log-probabilities for {len(self.tokens)} tokens of which "
                f"{self.prompt_tokens} are the prompt; each response token needs exactly one"
            )
        if self.support and not self.support.fits(self.response_tokens):
            raise ValueError(
                f"a support of {len(self.support.counts)} counts and {len(self.support.ids)} ids for "
                f"{self.response_tokens} response tokens; each needs a count, and the counts add up to the ids"
            )

        if any(len(column) != self.response_tokens for column in self.token_scores.values()):
            raise ValueError(f"a token score has another length than the {self.response_tokens} response tokens")

    @property
    def response_tokens(self) -> int:
        """R, the number of response tokens; 0 is allowed and trains nothing."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def sampled_tokens(self) -> int:
        """K, the number of response tokens that the policy sampled; only these have a loss."""
        return sum(end - start for start, end, _ in self.segments)

    @property
    def with_hint(self) -> "TrainSample":
        """The sample with `hinted_prompt` in place of its prompt, and the same response."""
        tokens = np.concatenate([self.hinted_prompt, self.tokens[self.prompt_tokens :]])
        return replace(self, tokens=tokens, prompt_tokens=len(self.hinted_prompt))

    @cached_property
    def sampled_positions(self) -> np.ndarray:
        """int64 [K]: positions in the response of the tokens that the policy sampled."""
        spans = [np.arange(start, end) for start, end, _ in self.segments]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)


ReceivedGroup = tuple[GroupHead, list[TrainSample]]
"""A group as delivered by the broker: its head (metadata) and its samples."""


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """The groups that turn weights `step` into weights `step + 1`; a group may have lost samples."""

    step: int
    groups: list[list[TrainSample]]
    origins: list[tuple[int, bytes]] = field(default_factory=list)
    """(number of the prompt, bytes that the trainer attached) of each group whose prompt an external trainer
    submitted."""
    untrained: list[ReceivedGroup] = field(default_factory=list)
    """Groups that were discarded, or held out for evaluation, since the previous batch; stored for inspection. On rank
    0 only."""
    conversations: list[TrainSample] = field(default_factory=list)
    """Conversations of data sources of kind sft, trained by cross-entropy in the same step as the groups."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of further rows of sources of kind sft that cannot be trained, by reason."""

    @property
    def samples(self) -> list[TrainSample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group]


SampleForks = list[TrainSample]
"""All rows of one sample: a single row, or one row per fork of an agent session."""


def group_forks(group: list[TrainSample]) -> list[SampleForks]:
    """The rows of a group, grouped by sample: all forks of a sample count as one in comparisons and counts."""
    found: list[SampleForks] = []
    for sample in group:
        if sample.fork and found and found[-1][0].index == sample.index:
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


class FlatBatch(msgspec.Struct, omit_defaults=True):
    """A training batch as flat columns for broadcasting, one entry per row (sample or fork); tokens, log-probabilities
    and supports of all rows are concatenated."""

    step: int
    group_sizes: list[int]
    prompt_tokens: list[int]
    response_tokens: list[int]
    rewards: list[float]
    segments: list[list[tuple[int, int, int, int]]]
    tokens: bytes
    logprobs: bytes
    support_counts: bytes = b""
    """Number of candidate ids that each response token was drawn from, int32; empty if sampling was not truncated."""
    support_ids: bytes = b""
    names: list[tuple[int, int, int, str]] = []
    """(group, index, fork, finish reason) of each row."""
    details: list[dict[str, float]] = []
    spans: list[tuple[SampleSpan, ...]] = []
    times: list[tuple[float, float]] = []
    """(time the group was opened, time it was delivered to the learner) of each row, Unix seconds."""
    origins: list[tuple[int, bytes]] = []
    images: list[bytes] = []
    """The different images of the batch, as PNG files."""
    image_numbers: list[list[int]] = []
    """Indices in `images` of the images of each row; empty if no row has any."""
    image_starts: list[tuple[int, ...]] = []
    """For each row, for each of its images, the index of the first token that may be the image's placeholder; empty if
    no row has any."""
    token_scores: dict[str, bytes] = {}
    """Token scores of all response tokens, by name: float32 [tokens, W], W the most numbers per token of any row; NaN
    where a row has fewer or none."""
    hinted: list[bytes] = []
    """Token ids of each row's prompt with its hint, int32; empty if no row has any."""
    sources: list[int] = []
    """Index in `data.sources` of each row's source; empty if all are 0."""
    conversations: bytes = b""
    """The rows of conversations, encoded as a batch of one group; empty if there are none."""
    left_out: dict[str, int] = {}


def encode(batch: TrainingBatch) -> bytes:
    """The batch as MessagePack, arrays little-endian. `decode` restores the batch without the fields that are only
    stored for inspection. Raises ValueError if only some samples have a support."""
    samples = batch.samples
    supports = [sample.support for sample in samples if sample.support]
    if supports and len(supports) < len(samples):
        raise ValueError(f"{len(supports)} of {len(samples)} samples have a support; all of a batch do, or none")
    images = list(dict.fromkeys(image for sample in samples for image in sample.images))
    numbers = {image: number for number, image in enumerate(images)}
    hinted = [np.asarray(sample.hinted_prompt, "<i4").tobytes() for sample in samples]
    return msgspec.msgpack.encode(
        FlatBatch(
            step=batch.step,
            group_sizes=[len(group) for group in batch.groups],
            prompt_tokens=[sample.prompt_tokens for sample in samples],
            response_tokens=[sample.response_tokens for sample in samples],
            rewards=[float(sample.reward) for sample in samples],
            segments=[[(start, end, *version) for start, end, version in sample.segments] for sample in samples],
            tokens=b"".join(np.asarray(sample.tokens, "<i4").tobytes() for sample in samples),
            logprobs=b"".join(np.asarray(sample.logprobs, "<f4").tobytes() for sample in samples),
            support_counts=b"".join(np.asarray(support.counts, "<i4").tobytes() for support in supports),
            support_ids=b"".join(np.asarray(support.ids, "<i4").tobytes() for support in supports),
            names=[(sample.group, sample.index, sample.fork, sample.finish_reason) for sample in samples],
            details=[dict(sample.details) for sample in samples],
            spans=[sample.spans for sample in samples],
            times=[(sample.opened_at, sample.delivered_at) for sample in samples],
            origins=batch.origins,
            images=images,
            image_numbers=[[numbers[image] for image in sample.images] for sample in samples] if images else [],
            image_starts=[sample.image_starts for sample in samples] if images else [],
            token_scores={
                name: stacked([one.token_scores.get(name, np.zeros((one.response_tokens, 0))) for one in samples])
                for name in sorted({name for sample in samples for name in sample.token_scores})
            },
            hinted=hinted if any(hinted) else [],
            sources=[sample.source for sample in samples] if any(sample.source for sample in samples) else [],
            conversations=encode(TrainingBatch(batch.step, [batch.conversations])) if batch.conversations else b"",
            left_out=batch.left_out,
        )
    )


def stacked(columns: list[np.ndarray]) -> bytes:
    """Columns [R] or [R, W] of several rows, concatenated as float32 [sum of R, largest W]; missing values are NaN."""
    columns = [column.reshape(len(column), -1) if len(column) else column.reshape(0, 0) for column in columns]
    width = max(column.shape[1] for column in columns)
    gaps = (((0, 0), (0, width - column.shape[1])) for column in columns)
    padded = (np.pad(column, gap, constant_values=np.nan) for column, gap in zip(columns, gaps, strict=True))
    return np.concatenate(list(padded)).astype("<f4").tobytes()


def decode(data: bytes | bytearray | memoryview) -> TrainingBatch:
    """The batch that `encode` wrote; its arrays are read-only views of `data`. Raises `msgspec.DecodeError` on other
    bytes."""
    flat = msgspec.msgpack.decode(data, type=FlatBatch)
    all_tokens, all_logprobs = np.frombuffer(flat.tokens, "<i4"), np.frombuffer(flat.logprobs, "<f4")
    counts, support_ids = np.frombuffer(flat.support_counts, "<i4"), np.frombuffer(flat.support_ids, "<i4")
    each = max(1, len(all_logprobs))
    scores = {name: np.frombuffer(data, "<f4").reshape(each, -1) for name, data in flat.token_scores.items()}
    samples, token_at, logprob_at, id_at = [], 0, 0, 0
    names = flat.names or [(-1, -1, 0, "")] * len(flat.rewards)
    columns = zip(flat.prompt_tokens, flat.response_tokens, flat.rewards, flat.segments, names, strict=True)
    metadata = zip(flat.details, flat.spans, flat.times, strict=True) if flat.times else repeat(({}, (), (0.0, 0.0)))
    hinted, sources = iter(flat.hinted or repeat(b"")), iter(flat.sources or repeat(0))
    shown = zip(flat.image_numbers, flat.image_starts, strict=True) if flat.images else repeat(((), ()))
    for (prompt, response, reward, segments, (number, index, fork, finish_reason)), (
        details,
        spans,
        times,
    ), (image_numbers, image_starts) in zip(columns, metadata, shown, strict=False):
        sample_counts = counts[logprob_at : logprob_at + response]
        ids = int(sample_counts.sum())
        samples.append(
            TrainSample(
                tokens=all_tokens[token_at : token_at + prompt + response],
                prompt_tokens=prompt,
                logprobs=all_logprobs[logprob_at : logprob_at + response],
                reward=reward,
                segments=tuple((start, end, Version(*version)) for start, end, *version in segments),
                support=Support(sample_counts, support_ids[id_at : id_at + ids]) if len(counts) else None,
                group=number,
                index=index,
                finish_reason=finish_reason,
                details=details,
                spans=spans,
                opened_at=times[0],
                delivered_at=times[1],
                fork=fork,
                images=tuple(flat.images[image] for image in image_numbers),
                image_starts=image_starts,
                hinted_prompt=np.frombuffer(next(hinted), "<i4"),
                source=next(sources),
                token_scores={
                    name: column[logprob_at : logprob_at + response, 0 if column.shape[1] == 1 else slice(None)]
                    for name, column in scores.items()
                    if response and not np.isnan(column[logprob_at, 0])
                },
            )
        )
        token_at, logprob_at, id_at = token_at + prompt + response, logprob_at + response, id_at + ids
    groups, first = [], 0
    for size in flat.group_sizes:
        groups.append(samples[first : first + size])
        first += size
    conversations = decode(flat.conversations).samples if flat.conversations else []
    return TrainingBatch(flat.step, groups, flat.origins, conversations=conversations, left_out=flat.left_out)


def share_batch(batch: TrainingBatch | None, group: dist.ProcessGroup | None = None) -> TrainingBatch | None:
    """Broadcast rank 0's batch to every rank; returns the batch, or None on every rank if rank 0 passes None because
    the run is over. Collective.

    Fields that are only stored for inspection stay on rank 0. The other ranks pass None and wait here for rank 0;
    `group` must support CPU tensors (default: the default group).
    """
    leader = dist.get_rank() == 0
    data = encode(batch) if leader and batch is not None else b""
    size = torch.tensor(NO_MORE_BATCHES if batch is None else len(data))
    dist.broadcast(size, src=0, group=group)
    if size.item() == NO_MORE_BATCHES:
        return None
    size = int(size.item())
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if leader else torch.empty(size, dtype=torch.uint8)
    dist.broadcast(buffer, src=0, group=group)
    return batch if leader else decode(memoryview(buffer.numpy()))

"""The learner's client of the broker: fetches batches, and reports consumed batches and durable checkpoints."""

import contextlib
import dataclasses
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from april import wire
from april.data.support import Support
from april.learner.batch import ReceivedGroup, TrainingBatch, TrainSample
from april.util.pulse import MAIN
from april.wire.security.keys import Keys
from april.wire.sessions import image_parts
from april.wire.sockets.broker import BrokerConnection, BrokerRefused, BrokerUnreachable

POLL_MS = 200


@dataclass
class PendingRequest:
    """A request sent to the broker whose answer (one or several messages) has not arrived in full."""

    message: wire.Message
    is_complete: Callable[[list[wire.Received]], bool]
    arrays: Sequence[np.ndarray] = ()
    ahead: Sequence[tuple[wire.Message, Sequence[np.ndarray]]] = ()
    """Messages, with their arrays, that are sent before the request and get no answer."""
    answers: list[wire.Received] = field(default_factory=list)
    future: Future = field(default_factory=Future)

    def send(self, connection: BrokerConnection) -> int:
        """Send the request; returns the sequence number of its answer."""
        for message, arrays in self.ahead:
            connection.send(message, arrays)
        return connection.send(self.message, self.arrays)


class BrokerSource:
    """`april.learner.prefetch.BatchSource` over a broker connection, for rank 0.

    A thread owns the connection, so that one thread of the learner can fetch the next batch while another reports the
    last one.
    """

    def __init__(
        self,
        address: str,
        weights_address: str,
        patience_s: float,
        keys: Keys | None = None,
        keeps_samples: Callable[[int], bool] | None = None,
        with_conversations: Callable[[TrainingBatch], TrainingBatch] | None = None,
    ):
        """`address`: of the broker. `weights_address`: where workers ask the learner for weights. `patience_s`: longest
        wait for the broker. `keys`: the learner's CURVE keys, None without encryption. `keeps_samples` (step -> bool):
        whether samples of that step are stored for reading; None: none are. `with_conversations` adds to a batch the
        conversations trained beside its samples; None: there are none."""
        self.weights_address, self.keeps_samples = weights_address, keeps_samples
        self.with_conversations = with_conversations
        self.leftover: list[ReceivedGroup] = []
        self.connection = BrokerConnection(address, "learner", "learner", uuid.uuid4().hex, patience_s, keys)
        self.connection.hello(lease_ids=[])
        self._inbox: queue.SimpleQueue[PendingRequest] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self.connection.wake_by(self._wake_reader)
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)
        self._thread.start()

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        [answer] = self._ask(wire.StartLearner(checkpoint_step, self.weights_address))
        return answer.message.incarnation, answer.message.frontier

    def fetch(self, step: int) -> TrainingBatch | None:
        keeps = self.keeps_samples
        parts = self._ask(wire.Fetch(step, keeps is not None and keeps(step), keeps is not None), has_whole_batch)
        heads = [head for part in parts for head in part.message.groups]
        images = self._images(list(dict.fromkeys(name for head in heads for name in names_of_images(head))))
        if isinstance(parts[0].message, wire.Finished):
            self.leftover = decode_groups(parts[0].message.groups, parts[0].arrays, images=images)
            return None
        by_first = {part.message.first: part for part in parts}
        ordered = [by_first[first] for first in sorted(by_first)]
        received = [
            group
            for part in ordered
            for group in decode_groups(part.message.groups, part.arrays, part.message.token_scores, images)
        ]
        batch = TrainingBatch(
            step,
            [group for head, group in received if head.is_trained],
            [(head.prompt_number, head.extra) for head, _ in received if head.prompt_number >= 0],
            [(head, group) for head, group in received if not head.is_trained],
        )
        return self.with_conversations(batch) if self.with_conversations else batch

    def _images(self, names: list[str]) -> dict[str, bytes]:
        """Fetch images by name. Raises BrokerRefused if the broker cannot read one."""
        found: dict[str, bytes] = {}
        while missing := [name for name in names if name not in found]:
            [answer] = self._ask(wire.FetchImages(missing[: wire.MAX_IMAGES_ASKED]))
            if isinstance(answer.message, wire.Finished):
                raise BrokerUnreachable(f"the broker has ended the run: {answer.message.reason}")
            found |= {name: bytes(array.data) for name, array in zip(answer.message.names, answer.packed, strict=True)}
            if lost := [name for name in answer.message.names if not found[name]]:
                raise BrokerRefused(f"the broker cannot read image {lost[0]} of a group; restore it from a copy")
        return found

    def submit(
        self, first: int, prompts: list[wire.Submission], ids: np.ndarray, images: Mapping[str, bytes] | None = None
    ) -> int:
        """Submit prompts numbered from `first`, their int32 ids concatenated; returns the number submitted so far.
        `images`: the files of the prompts' images by name, which are sent first. Raises BrokerRefused."""
        for name, png in (images or {}).items():
            *ahead, (last, arrays) = image_parts(name, png)
            [answer] = self._ask(last, arrays=arrays, ahead=ahead)
            if answer.message.fault:
                raise BrokerRefused(f"the broker does not keep image {name} of a prompt: {answer.message.fault}")
        [answer] = self._ask(wire.Submit(first, prompts), arrays=[ids])
        return answer.message.count

    def alive(self) -> None:
        MAIN.at("waiting for a batch")

    def consumed(self, step: int, metrics: dict[str, float], discarded: wire.Discard = "") -> None:
        self._ask(wire.Consumed(step, {name: float(value) for name, value in metrics.items()}, discarded))

    def durable(self, step: int, oldest: int) -> None:
        self._ask(wire.Durable(step, oldest))

    def weights_written(self, folder: wire.WeightFolder) -> None:
        """Report a snapshot of weights that workers may read; returns once the broker has journalled it."""
        self._ask(wire.WeightsWritten(folder))

    def best(self) -> tuple[int, list[int]]:
        [answer] = self._ask(wire.BestRequest())
        return answer.message.step, answer.message.undecided

    def close(self) -> None:
        self._closed = True
        self._wake()
        self._thread.join()

    def _ask(
        self,
        message: wire.Message,
        is_complete: Callable[[list[wire.Received]], bool] = lambda answers: True,
        arrays: Sequence[np.ndarray] = (),
        ahead: Sequence[tuple[wire.Message, Sequence[np.ndarray]]] = (),
    ) -> list[wire.Received]:
        """Send a request with its `arrays`, after the messages `ahead`, and wait for its answer: the messages received,
        once `is_complete` says that they are all.

        A broker that cannot write to its disk answers `Finished` to any request once the run is over. A report that
        gets this answer is not on disk; the next learner tells the broker, by its checkpoint, which batches its weights
        contain. Raises BrokerRefused or BrokerUnreachable.
        """
        request = PendingRequest(message, is_complete, arrays, ahead)
        self._inbox.put(request)
        self._wake()
        while not request.future.done() and self._thread.is_alive():
            MAIN.at("waiting for the broker")
            wait([request.future], timeout=1.0)
        if self._error and not request.future.done():
            raise self._error
        answers = request.future.result(timeout=0)
        if isinstance(answers[0].message, wire.Refused):
            raise BrokerRefused(f"the broker refuses: {answers[0].message.reason}")
        needs_more = isinstance(message, wire.StartLearner | wire.KeepImage | wire.Submit)
        if isinstance(answers[0].message, wire.Finished) and needs_more:
            self.close()
            raise BrokerUnreachable(f"the broker, which cannot write, has ended the run: {answers[0].message.reason}")
        return answers

    def _wake(self) -> None:
        os.write(self._wake_writer, b"x")

    # --- the thread that owns the connection ----------------------------------------------------------------

    def _serve(self) -> None:
        pending: dict[int, PendingRequest] = {}
        try:
            while not self._closed:
                self._exchange(pending)
            self.connection.goodbye()
            self.connection.close()
        except BaseException as error:
            self._error = error
            for request in [*pending.values(), *self._take_new()]:
                request.future.set_exception(error)

    def _take_new(self) -> list[PendingRequest]:
        taken = []
        while not self._inbox.empty():
            taken.append(self._inbox.get())
        return taken

    def _exchange(self, pending: dict[int, PendingRequest]) -> None:
        """Send new requests and receive answers; after a restart of the broker, greet it and resend all requests."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        for new in self._take_new():
            pending[new.send(self.connection)] = new
        for received in self.connection.receive(POLL_MS):
            if self.connection.is_disowned(received):
                return self._resend_all(pending)
            request = pending.get(received.sequence)
            if request is None:
                continue
            request.answers.append(received)
            if request.is_complete(request.answers):
                del pending[received.sequence]
                request.future.set_result(request.answers)
        self.connection.check_alive()

    def _resend_all(self, pending: dict[int, PendingRequest]) -> None:
        self.connection.hello(lease_ids=[])
        requests = list(pending.values())
        pending.clear()
        for request in requests:
            request.answers.clear()
            pending[request.send(self.connection)] = request


def has_whole_batch(answers: list[wire.Received]) -> bool:
    """Whether all messages of the answer to a Fetch request have arrived; after a resend a message may arrive twice."""
    last = answers[-1].message
    if not isinstance(last, wire.Batch):
        return True
    sizes = {answer.message.first: len(answer.message.groups) for answer in answers}
    return sum(sizes.values()) == last.total


def names_of_images(group: wire.GroupHead) -> Iterator[str]:
    """Names of the images of a group's prompt and of its samples."""
    yield from group.images
    yield from (name for sample in group.samples for name, _ in sample.shown_images)


def decode_groups(
    heads: list[wire.GroupHead],
    arrays: list[np.ndarray],
    score_names: Sequence[str] = (),
    images: Mapping[str, bytes] | None = None,
) -> list[ReceivedGroup]:
    """Groups of a message, from their heads and the flat list of arrays. Each group has a prompt and then for each
    sample: response, log-probabilities, two arrays with the tokens' supports if the sampled distribution was truncated,
    and one array for each of `score_names` (token scores). `images`: the files of the groups' images by name."""
    groups, rest = [], iter(arrays)
    # No head says whether the distribution was cut; with its supports a sample has four arrays beside its scores.
    with_support = len(arrays) == sum(1 + (4 + len(score_names)) * len(group.samples) for group in heads)
    for group in heads:
        prompt, samples = next(rest), []
        for head in group.samples:
            sample = decode_sample(group, head, prompt, rest, with_support, images or {})
            scores = {name: values for name in score_names if len(values := next(rest))}
            samples.append(
                dataclasses.replace(sample, token_scores=token_columns(sample, scores)) if scores else sample
            )
        groups.append((group, samples))
    return groups


def decode_sample(
    group: wire.GroupHead,
    head: wire.SampleHead,
    prompt: np.ndarray,
    rest: Iterator[np.ndarray],
    with_support: bool,
    images: Mapping[str, bytes],
) -> TrainSample:
    """One sample of a group. `rest`: the arrays of the message that are not read yet, from which the sample's are
    taken; `with_support`: whether supports are among them; `images`: files by name. If the group has no prompt, the
    tokens before the first sampled one become the sample's prompt: the agent's messages, and the prefix that a fork
    shares with its parent."""
    response, logprobs = next(rest), next(rest)
    support = Support(next(rest), next(rest)) if with_support else None
    first = 0 if group.prompt_tokens else head.segments[0][0]
    return TrainSample(
        tokens=np.concatenate([prompt, response]),
        prompt_tokens=group.prompt_tokens + first,
        logprobs=logprobs[first:],
        reward=head.reward,
        segments=tuple((start - first, end - first, version) for start, end, version in head.segments),
        support=support and Support(support.counts[first:], support.ids),
        group=group.group,
        index=head.index,
        finish_reason=head.finish_reason,
        details=head.details,
        spans=tuple(shift_spans(head.spans, first) if first else head.spans),
        opened_at=group.opened_at,
        delivered_at=group.delivered_at,
        fork=head.fork,
        chunks=tuple((end - first, at) for end, at in head.chunks if end > first),
        parent=head.parent,
        shared_tokens=head.shared_tokens,
        label=group.label,
        images=tuple(images[name] for name in (*group.images, *(name for name, _ in head.shown_images))),
        hinted_prompt=np.frombuffer(head.hinted or group.hinted, "<i4"),
        feedback=head.feedback,
        source=group.source,
        image_starts=(*[0] * len(group.images), *(len(prompt) + start for _, start in head.shown_images)),
    )


def token_columns(sample: TrainSample, scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Token scores as columns float32 [R], or [R, W] for W values of each token: a number of a turn goes to each token
    of the turn, and tokens that the policy did not sample get 0."""
    starts, ends = [start for start, _, _ in sample.segments], [end for _, end, _ in sample.segments]
    new_turns = np.array([0, *(int(start > end) for start, end in zip(starts[1:], ends, strict=False))])
    turns = np.repeat(np.cumsum(new_turns), np.array(ends) - np.array(starts))
    columns = {}
    for name, values in scores.items():
        width, rest = divmod(len(values), sample.response_tokens)
        values = values.reshape(-1, width) if width > 1 and not rest else values
        columns[name] = column = np.zeros((sample.response_tokens, *values.shape[1:]), np.float32)
        is_of_tokens = len(values) == sample.response_tokens
        column[sample.sampled_positions] = values[sample.sampled_positions if is_of_tokens else turns]
    return columns


def shift_spans(spans: list[wire.SampleSpan], first: int) -> list[wire.SampleSpan]:
    """Copies of time spans whose token offsets `start` and `end` are reduced by `first` tokens, to at least 0."""
    return [structs.replace(span, start=max(0, span.start - first), end=max(0, span.end - first)) for span in spans]

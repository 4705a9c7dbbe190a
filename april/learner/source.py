"""The learner's end of the conversation with the broker: fetches batches, reports what became of them."""

import contextlib
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from april import wire
from april.connections.broker import BrokerConnection, BrokerRefused
from april.data.support import Support
from april.learner.batch import Batch, ToldGroup, TrainSample
from april.processes.pulse import MAIN
from april.security.keys import Keys

POLL_MS = 200


@dataclass
class Request:
    """A message on its way to being answered, in one part or more."""

    message: wire.Message
    whole: Callable[[list[wire.Received]], bool]
    arrays: Sequence[np.ndarray] = ()
    answers: list[wire.Received] = field(default_factory=list)
    future: Future = field(default_factory=Future)


class BrokerSource:
    """Implements `april.learner.beside.Source` over a broker connection, for rank 0.

    A thread owns the connection, so that the next batch is fetched by one thread of the learner while another reports
    the last.
    """

    def __init__(
        self,
        address: str,
        weights_address: str,
        patience_s: float,
        keys: Keys | None = None,
        keeps: Callable[[int], bool] = lambda step: False,
    ):
        """`keeps`: whether samples of a step are kept to be read."""
        self.weights_address, self.keeps = weights_address, keeps
        self.left: list[ToldGroup] = []
        self.connection = BrokerConnection(address, "learner", "learner", uuid.uuid4().hex, patience_s, keys)
        self.connection.hello(leases=[])
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self.connection.wake_by(self._wake_reader)
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)
        self._thread.start()

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        [answer] = self._ask(wire.LearnerStart(checkpoint_step, self.weights_address))
        return answer.message.branch, answer.message.frontier

    def fetch(self, step: int) -> Batch | None:
        parts = self._ask(wire.Fetch(step, self.keeps(step)), is_whole)
        if isinstance(parts[0].message, wire.Finished):
            self.left = to_groups(parts[0].message.groups, parts[0].arrays)
            return None
        by_place = {part.message.first: part for part in parts}
        ordered = [by_place[first] for first in sorted(by_place)]
        told = [one for part in ordered for one in to_groups(part.message.groups, part.arrays)]
        return Batch(
            step,
            [group for head, group in told if not head.discarded],
            [(head.prompt, head.extra) for head, _ in told if head.prompt >= 0],
            [(head, group) for head, group in told if head.discarded],
        )

    def submit(self, first: int, prompts: list[wire.Submission], ids: np.ndarray) -> int:
        """Bring prompts, numbered from `first` on, int32 ids one behind the other; how many were brought by now."""
        [answer] = self._ask(wire.Submit(first, prompts), arrays=[ids])
        return answer.message.count

    def alive(self) -> None:
        MAIN.at("waiting for a batch")

    def consumed(self, step: int, metrics: dict[str, float], discarded: wire.Discard = "") -> None:
        self._ask(wire.Consumed(step, {name: float(value) for name, value in metrics.items()}, discarded))

    def durable(self, step: int, oldest: int) -> None:
        self._ask(wire.Durable(step, oldest))

    def best(self) -> tuple[int, list[int]]:
        [answer] = self._ask(wire.BestWanted())
        return answer.message.step, answer.message.undecided

    def close(self) -> None:
        self._closed = True
        self._wake()
        self._thread.join()

    def _ask(
        self,
        message: wire.Message,
        whole: Callable[[list[wire.Received]], bool] = lambda answers: True,
        arrays: Sequence[np.ndarray] = (),
    ) -> list[wire.Received]:
        request = Request(message, whole, arrays)
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
        return answers

    def _wake(self) -> None:
        os.write(self._wake_writer, b"x")

    # --- the thread that owns the connection ----------------------------------------------------------------

    def _serve(self) -> None:
        pending: dict[int, Request] = {}
        try:
            while not self._closed:
                self._converse(pending)
            self.connection.goodbye()
            self.connection.close()
        except BaseException as error:
            self._error = error
            for request in [*pending.values(), *self._take_new()]:
                request.future.set_exception(error)

    def _take_new(self) -> list[Request]:
        taken = []
        while not self._inbox.empty():
            taken.append(self._inbox.get())
        return taken

    def _converse(self, pending: dict[int, Request]) -> None:
        """Send what is new and take what has arrived, or say hello and everything again to a restarted broker."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        for new in self._take_new():
            pending[self.connection.send(new.message, new.arrays)] = new
        for received in self.connection.receive(POLL_MS):
            if self.connection.is_disowned(received):
                return self._begin_again(pending)
            request = pending.get(received.sequence)
            if request is None:
                continue
            request.answers.append(received)
            if request.whole(request.answers):
                del pending[received.sequence]
                request.future.set_result(request.answers)
        self.connection.check_alive()

    def _begin_again(self, pending: dict[int, Request]) -> None:
        self.connection.hello(leases=[])
        requests = list(pending.values())
        pending.clear()
        for request in requests:
            request.answers.clear()
            pending[self.connection.send(request.message, request.arrays)] = request


def is_whole(answers: list[wire.Received]) -> bool:
    """Whether all parts of the answer to Fetch have arrived; one that was asked for twice may come twice."""
    last = answers[-1].message
    if not isinstance(last, wire.Batch):
        return True
    sizes = {answer.message.first: len(answer.message.groups) for answer in answers}
    return sum(sizes.values()) == last.total


def to_groups(heads: list[wire.GroupHead], arrays: list[np.ndarray]) -> list[ToldGroup]:
    """Put the arrays of a message together with what the heads of its groups say of them: a prompt to a group, and to
    each sample two arrays, or four with its support."""
    groups, rest = [], iter(arrays)
    with_support = len(arrays) == sum(1 + 4 * len(group.samples) for group in heads)
    for group in heads:
        prompt = next(rest)
        groups.append((group, [to_sample(group, head, prompt, rest, with_support) for head in group.samples]))
    return groups


def to_sample(
    group: wire.GroupHead, head: wire.SampleHead, prompt: np.ndarray, rest: Iterator[np.ndarray], with_support: bool
) -> TrainSample:
    """What an agent has said before the policy's first turn is the prompt of its sample, where its group has none; so
    is what a branch shares with others."""
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
        stays=tuple(shifted(head.stays, first) if first else head.stays),
        opened_at=group.opened_at,
        delivered_at=group.delivered_at,
        branch=head.branch,
        chunks=tuple((end - first, at) for end, at in head.chunks if end > first),
        parent=head.parent,
        shared=head.shared,
    )


def shifted(stays: list[wire.Stay], first: int) -> list[wire.Stay]:
    """With token counts that leave out the `first` of the response."""
    return [replace(stay, start=max(0, stay.start - first), end=max(0, stay.end - first)) for stay in stays]

"""Handles messages of the learner (batches out, trained steps and checkpoints in) and of the learner's machines."""

import contextlib
import logging
from typing import ClassVar

from msgspec.structs import replace

from april import wire
from april.broker.context import BrokerContext, MessageTable
from april.broker.handlers.evaluations import Evaluations
from april.broker.handlers.images import send_images, take_image
from april.broker.journal.files import Damaged, Unreadable
from april.broker.ledger.admission import Verdict
from april.broker.ledger.chunk_refs import chunk_refs_in
from april.broker.ledger.commands import note_weight_folder
from april.broker.ledger.ledger import LedgerError
from april.broker.ledger.samples import Group, Sample, SampleState
from april.broker.payloads import pack
from april.broker.peers import SESSION_BITS, Peer, Peers
from april.broker.telemetry.logged_groups import LoggedGroup
from april.config.evaluation import HELD_OUT
from april.data.groups import chosen_groups
from april.data.rows import BadRow
from april.wire import limits

log = logging.getLogger(__name__)


# --- the learner ------------------------------------------------------------------------------------------------------


NO_BEST_STEP = -1
"""Value of `BestCheckpoint.step` while no weights have been evaluated."""
PART_BYTES = 1 << 19
"""Bytes of arrays from which on a message with groups of a batch gets no further group."""
PASS_BYTES = 1 << 19
"""Bytes of arrays from which on the learner gets no further message in a pass of the broker's loop, so that no other
peer waits long."""

GroupPayload = tuple[wire.GroupHead, list[wire.PackedArray]]
"""A group as it is sent in a batch: its description and its arrays."""


class LearnerHandler:
    def __init__(self, context: BrokerContext, evaluations: Evaluations):
        self.context, self.evaluations = context, evaluations
        self.ledger = context.ledger
        self.peers = context.peers
        self.has_connected = False
        """Whether a learner has connected since the broker started."""
        self.pending_fetch: tuple[Peer, wire.Received] | None = None
        """(learner, `Fetch` message) of a request for a batch that does not exist yet or is not completely sent; None
        otherwise."""
        self.sent_groups = 0
        """Number of groups already sent in answer to `pending_fetch`: those of the batch, and then groups that are not
        trained, for the sample logs."""
        self.logged: set[int] = set()
        """Indices, within the batch of `pending_fetch`, of the trained groups that the learner writes to the sample
        logs."""
        self.sendable_from: int | None = None
        """Journal position of the end of the batch's delivery event: it must be on disk before the batch of
        `pending_fetch` is sent."""

    def hello(self, peer: Peer) -> None:
        self.has_connected = True
        for other in list(self.peers.by_id.values()):
            if other.role == "learner" and other is not peer:
                self.peers.close(other)
        self.pending_fetch = None
        peer.started = self._has_started(peer)

    def _has_started(self, peer: Peer) -> bool:
        """Whether the peer's process is the learner of the current incarnation, also if the broker has restarted
        since."""
        return peer.uid == self.ledger.learner.uid

    def on_start_learner(self, peer: Peer, received: wire.Received, now: float) -> None:
        message = received.message
        repeated = self._has_started(peer) and message.step == self.ledger.steps.consumed
        if not repeated:
            try:
                self.ledger.start_learner(message.step, peer.uid, message.weights_address, peer.key)
            except LedgerError as error:
                return self._refuse(peer, received, str(error))
            for step in self.ledger.unrecorded_steps:
                self._step_trained(step, {}, now)
        peer.started = True
        self.peers.broadcast(wire.WeightsAddress(message.weights_address, peer.key))
        answer = wire.LearnerAdmitted(self.ledger.learner.incarnation, self.ledger.steps.frontier)
        self.peers.send(peer, answer, sequence=received.sequence)

    def on_submit(self, peer: Peer, received: wire.Received, now: float) -> None:
        if self._refuses_unstarted(peer, received):
            return
        try:
            prompts = self.context.prompts.decode_submission(received.message, received.packed)
        except BadRow as error:
            return self._refuse(peer, received, str(error))
        for prompt, tokens in prompts:
            if self.ledger.submit(prompt, tokens) is Verdict.GAP:
                submitted = self.ledger.prompts.submitted_count
                return self._refuse(peer, received, f"prompt {prompt.row} does not follow {submitted} submitted ones")
        self.peers.send(peer, wire.Submitted(self.ledger.prompts.submitted_count), sequence=received.sequence)

    def on_keep_image(self, peer: Peer, received: wire.Received, now: float) -> None:
        if self._refuses_unstarted(peer, received):
            return
        if self.context.config.data.source != "submitted":
            return self._refuse(peer, received, "this run draws its prompts from files, and takes no images of others")
        take_image(self, peer, received, now)

    def on_fetch(self, peer: Peer, received: wire.Received, now: float) -> None:
        step = received.message.step
        if self._refuses_unstarted(peer, received):
            return
        consumed = self.ledger.steps.consumed
        if step not in (consumed, min(consumed + 1, self.ledger.steps.next)):
            return self._refuse(peer, received, f"batch {step} does not follow {consumed} consumed ones")
        self.pending_fetch, self.sent_groups, self.sendable_from = (peer, received), 0, None
        self.answer_fetch()

    def answer_fetch(self) -> None:
        """Send the next part of the batch that the learner has requested, or `Finished` if no further batch will
        come."""
        if self.pending_fetch is None:
            return
        peer, received = self.pending_fetch
        step = received.message.step
        replayed = step < self.ledger.steps.frontier
        if self.context.run.over and not (replayed and self.ledger.deliveries.get(step)):
            self._finish(peer, received)
        elif self.ledger.deliveries.get(step):
            if self.sendable_from is None:
                self.sendable_from = self.context.journal.end
                self.logged = self._logged_groups(step) if received.message.samples else set()
            bytes_before = peer.sent_bytes
            while peer.sent_bytes - bytes_before < PASS_BYTES and self.can_send:
                self._send_part(peer, received)
        elif self.context.schedule.wants_prompts(self.ledger):
            self.peers.send(peer, wire.Batch(step, 0, 0, []), sequence=received.sequence)
            self.pending_fetch = None

    def _finish(self, peer: Peer, received: wire.Received) -> None:
        """Answer a `Fetch` after the end of the run. The answer holds the held-out groups evaluated since the last
        batch, for the sample logs; if the run has failed, also the groups discarded since then, which show why."""
        logged = wanted(received.message, self.context.history.logged_groups.waiting)
        failed = self.context.run.state == "failed"
        payloads = [self._logged_payload(group) for group in logged if failed or not group.head.discarded]
        finished = wire.Finished(self.context.run.over, [head for head, _ in payloads])
        self.peers.send(peer, finished, [array for _, arrays in payloads for array in arrays], received.sequence)
        self.pending_fetch = None

    def restart_fetch(self, step: int) -> None:
        """Send batch `step`, if the learner has requested it, again from its first group, since the batch has changed.
        A learner that already has a part of it has to say hello and fetch it again."""
        if self.pending_fetch is None or self.pending_fetch[1].message.step != step:
            return
        if self.sent_groups:
            self.disown("the batch has changed")
        self.sent_groups, self.sendable_from = 0, None

    def disown(self, why: str) -> None:
        """End the session of the connected learner, which then says hello and repeats the requests under way. `why`:
        reason that the learner is told."""
        if peer := self.peers.learner():
            self.peers.close(peer)
            self.peers.refuse("unknown session", f"unknown session: {why}; say hello", peer.data_route, peer.id)
            self.pending_fetch = None

    @property
    def can_send(self) -> bool:
        """Whether the next part of a batch can be sent: the learner has requested it and has credit, and the batch's
        delivery event is on disk."""
        if self.pending_fetch is None or self.sendable_from is None or self.context.journal.synced < self.sendable_from:
            return False
        return self.peers.has_credit(self.pending_fetch[0], self.context.credit_bytes)

    def _logged_groups(self, step: int) -> set[int]:
        """Indices of the groups of batch `step` that the learner writes to the sample logs (`chosen_groups` chooses
        them)."""
        groups = [trained_samples(group) for group in self.ledger.deliveries[step]]
        rewards = [
            [sample.session_sample.reward for sample in samples if sample.session_sample.reward is not None]
            for samples in groups
        ]
        return set(chosen_groups(rewards, self.context.config.samples.groups, f"{self.context.config.seed} {step}"))

    def _send_part(self, peer: Peer, received: wire.Received) -> None:
        """Send the next groups of the batch that `received` requests: `PART_BYTES` of arrays, but at least one
        group."""
        step, heads, arrays, size = received.message.step, [], [], 0
        groups: list[Group | LoggedGroup] = [*self.ledger.deliveries[step]]
        groups += wanted(received.message, self.context.history.logged_groups.of_step(step))
        scored = (group.token_scores for group in self.ledger.deliveries[step] if group.token_scores)
        names = sorted({name for scores in scored for *_, own in scores.values() for name in own})
        first = sent = self.sent_groups
        while sent < len(groups) and size < PART_BYTES:
            group = groups[sent]
            if isinstance(group, LoggedGroup):
                head, group_arrays = self._logged_payload(group, len(names))
            else:
                head, group_arrays = self._group_payload(group, sent in self.logged, names)
            heads.append(head)
            arrays += group_arrays
            size += sum(len(array.data) for array in group_arrays) + len(head.label)
            size += len(head.hinted) + sum(len(sample.hinted) + len(sample.feedback) for sample in head.samples)
            sent += 1
        self.sent_groups = sent
        batch = wire.Batch(step, first, len(groups), heads, names)
        self.peers.send_now(peer, batch, arrays, received.sequence)
        if self.sent_groups == len(groups):
            self.pending_fetch = None

    def _group_payload(self, group: Group, is_logged: bool, score_names: list[str]) -> GroupPayload:
        payloads, samples = self.context.payloads, trained_samples(group)
        arrays = [payloads.prompt(group.prompt)]
        for sample in samples:
            arrays += payloads.response(sample.chunk_refs)
            if score_names:
                scores = payloads.token_scores(sample)
                arrays += [pack("f4", [scores[name]] if name in scores else []) for name in score_names]
        head = group_head(group, self.context)
        if is_logged:
            heads = [
                replace(sample_head, chunks=payloads.chunk_times(sample.chunk_refs))
                for sample_head, sample in zip(head.samples, samples, strict=True)
            ]
            head = replace(head, samples=heads, label=payloads.row_of(False, group.epoch, group.row).label)
        return head, arrays

    def _logged_payload(self, logged: LoggedGroup, token_scores: int = 0) -> GroupPayload:
        """Description and arrays of a discarded or held-out group; without samples if the journal cannot read them
        back. `token_scores`: number of token scores of the batch, for each of which every sample gets an empty
        array."""
        payloads, (is_held_out, epoch, row) = self.context.payloads, logged.drawn
        known_set = self.evaluations.held_out.get(epoch)
        set_name = known_set.settings.name if known_set else HELD_OUT
        source = 0 if is_held_out or row < 0 else self.context.prompts.source_of(epoch, row)
        head = replace(logged.head, held_out=set_name if is_held_out else "", source=source)
        try:
            with contextlib.suppress(LookupError):  # a submitted prompt that was forgotten
                head = replace(head, label=payloads.row_of(is_held_out, epoch, row).label if row >= 0 else "")
            arrays, heads = [payloads.prompt(logged.prompt)], []
            for sample_head, chunks in zip(head.samples, logged.chunks, strict=True):
                refs = list(chunk_refs_in(chunks))
                arrays += payloads.response(refs, is_held_out) + token_scores * [pack("f4", [])]
                heads.append(replace(sample_head, chunks=payloads.chunk_times(refs)))
        except (Damaged, Unreadable):
            return replace(head, samples=[]), [pack("i4", [])]
        return replace(head, samples=heads), arrays

    def on_consumed(self, peer: Peer, received: wire.Received, now: float) -> None:
        step = received.message.step
        if len(received.message.metrics) > limits.MAX_STEP_METRICS:
            raise wire.WireError("more metrics than are kept of a step")
        if self._refuses_unstarted(peer, received):
            return
        verdict = self.ledger.consume(step, received.message.discarded)
        if verdict is Verdict.INVALID:
            return self._refuse(peer, received, f"batch {step} is not the next one, {self.ledger.steps.consumed}")
        if verdict is Verdict.OK or step in self.ledger.unrecorded_steps:
            self._step_trained(step, received.message.metrics, now)
        self.peers.send(peer, wire.Accepted(), sequence=received.sequence)

    def _step_trained(self, step: int, metrics: dict[str, float], now: float) -> None:
        record = self.context.recorder.record_step(step, self.ledger, metrics, now)
        self.context.run.summary_is_old = True
        step, reward, tokens = record["step"], record["reward"], record["tokens"]
        log.info("step %d trained: reward %.3f, %d tokens", step, reward, tokens, extra={"step": step})

    def on_weights_written(self, peer: Peer, received: wire.Received, now: float) -> None:
        if self._refuses_unstarted(peer, received):
            return
        version = received.message.folder.version
        verdict = note_weight_folder(self.ledger, received.message.folder)
        if verdict is Verdict.INVALID:
            return self._refuse(peer, received, f"weights {version} are none of this learner")
        if verdict is Verdict.OK:
            self.peers.broadcast(wire.WeightFolders(self.ledger.learner.weight_folders))
        self.peers.send(peer, wire.Accepted(), sequence=received.sequence)

    def on_best_request(self, peer: Peer, received: wire.Received, now: float) -> None:
        best = self.evaluations.best()
        answer = wire.BestCheckpoint(NO_BEST_STEP if best is None else best, self.evaluations.undecided())
        self.peers.send(peer, answer, sequence=received.sequence)

    def on_durable(self, peer: Peer, received: wire.Received, now: float) -> None:
        step = received.message.step
        if self._refuses_unstarted(peer, received):
            return
        if self.ledger.checkpoint(step, received.message.oldest) is Verdict.INVALID:
            return self._refuse(peer, received, f"checkpoint {step} is beyond the {self.ledger.steps.consumed} batches")
        self.peers.send(peer, wire.Accepted(), sequence=received.sequence)

    def _refuses_unstarted(self, peer: Peer, received: wire.Received) -> bool:
        """Refuse a message of a learner process that has not said from which checkpoint it starts, since another
        process may be the run's learner by now; returns whether it was refused."""
        if not peer.started:
            self._refuse(peer, received, "say first which checkpoint you hold")
        return not peer.started

    def _refuse(self, peer: Peer, received: wire.Received, reason: str) -> None:
        log.warning("learner refused: %s", reason, extra={"role": "learner"})
        cause = f"{type(received.message).__name__} out of order"
        self.peers.refuse(cause, reason, peer.data_route, peer.id, received.sequence)

    MESSAGES: ClassVar[MessageTable] = {
        wire.StartLearner: on_start_learner,
        wire.Submit: on_submit,
        wire.Fetch: on_fetch,
        wire.Consumed: on_consumed,
        wire.Durable: on_durable,
        wire.BestRequest: on_best_request,
        wire.WeightsWritten: on_weights_written,
        wire.FetchImages: send_images,
        wire.KeepImage: on_keep_image,
    }


def wanted(fetch: wire.Fetch, logged: list[LoggedGroup]) -> list[LoggedGroup]:
    """Those of the groups kept for the sample logs (`logged`) that the learner's request `fetch` asks for."""
    return [group for group in logged if (fetch.samples if group.head.discarded else fetch.held_out)]


def trained_samples(group: Group) -> list[Sample]:
    """Samples of a group that become rows of its batch: those with a score. A session with forks contributes each fork
    in which the policy has sampled tokens."""
    done = (session for session in group.samples if session.state is SampleState.DONE)
    return [sample for session in done for sample in session.sampled_forks]


def group_head(group: Group, context: BrokerContext) -> wire.GroupHead:
    samples = [sample_head(sample, context) for sample in trained_samples(group)]
    history = context.history.of_group(group)
    number, extra = context.prompts.submission(group.row)
    return wire.GroupHead(
        group.id, group.prompt_tokens, samples, history.opened_at, history.delivered_at, number, extra,
        images=list(group.images), hinted=context.prompts.hinted(group.epoch, group.row),
        source=context.prompts.source_of(group.epoch, group.row),
    )  # fmt: skip


def sample_head(sample: Sample, context: BrokerContext) -> wire.SampleHead:
    reward, group = sample.session_sample.reward, sample.group
    if reward is None:
        raise ValueError(f"sample {group.id}.{sample.index} has no reward, and is not done")
    head = context.history.sample_head(sample, reward)
    if not (feedback := context.payloads.feedback(sample)):
        return head
    return replace(
        head, feedback=feedback, hinted=context.prompts.hinted(group.epoch, group.row, feedback, sample.length)
    )


# --- the learner's machines -------------------------------------------------------------------------------------------


MACHINE_START_BITS = 16
"""Number of low bits of `NodeHandler._start` that count the starts of the machines' ranks; the higher bits are the
number of the broker's start."""


class NodeHandler:
    """Handles the rendezvous of a learner's machines.

    The first machine announces the address for the ranks' rendezvous, and the other machines ask for it. The address is
    valid while the first machine is connected. When a new process of a machine connects, all machines start their ranks
    again under a higher start number, since ranks cannot go on after one of them is lost.
    """

    def __init__(self, peers: Peers):
        self.peers = peers
        self._address = ""
        self._announced_by = 0
        """Session id of the machine that announced the rendezvous address; 0 for none."""
        self._start = 0
        """Number of the latest start of the machines' ranks, higher than any that an earlier broker of the run has
        given out."""
        self._counted = set[str]()
        """Uids of the connected machine processes that have already raised `_start`: each does so once."""

    def on_rendezvous(self, peer: Peer, received: wire.Received, now: float) -> None:
        said = received.message
        if said.address:
            self._address, self._announced_by = said.address, peer.id
        if not said.start and peer.uid not in self._counted:
            self._counted = {node.uid for node in self.peers.by_id.values() if node.uid in self._counted} | {peer.uid}
            self._start = max(self._start, (peer.id >> SESSION_BITS) << MACHINE_START_BITS) + 1
        self._start = max(self._start, said.start)  # if the broker was restarted
        address = self._address if self._announced_by in self.peers.by_id else ""
        self.peers.send(peer, wire.Rendezvous(address, self._start), sequence=received.sequence)

    MESSAGES: ClassVar[MessageTable] = {wire.Rendezvous: on_rendezvous}

"""A generation worker: lease -> generate -> stream chunks to the broker -> score -> report the score.

One thread drives the loop: it drains the broker's messages, loads new weights between two decode steps, advances the
engine by one step, and forwards chunks and scores. Weights arrive in a thread of their own, heartbeats are sent by
another, and verifiers run in separate processes.
"""

import logging

import numpy as np

from april import wire
from april.config import Config
from april.data.tokenizer import Tokenizer
from april.util import clock
from april.util.logs import Failures
from april.util.pulse import MAIN
from april.wire.limits import clip
from april.wire.message import Version
from april.wire.sockets.broker import BrokerConnection
from april.workers.active_sample import ActiveSample
from april.workers.engines import ENGINES
from april.workers.engines.base import Chunk, Engine, EngineError, Request
from april.workers.engines.weight_loading import UpdateHold, WeightLoader, WrongWeights, changes_version
from april.workers.environments.turns import EnvironmentTurns, TokenizedObservation
from april.workers.images import SampleImages
from april.workers.reports import Reports
from april.workers.rewards.messages import GroupScore, Score
from april.workers.scoring import LeasedTask, Scoring, closing, leases_of, token_values
from april.workers.time_sharing import WorkerTimeSharing

log = logging.getLogger(__name__)

IDLE_POLL_MS = 20
SCORING_POLL_MS = 5
CAPACITY_CHANGE_PARTS = 8
"""The engine's capacity is reported to the broker again once it differs by more than 1 / CAPACITY_CHANGE_PARTS from the
capacity that was reported last."""
TIMELINE_SPAN_S = 5.0
"""Longest entry for generation in the timeline of a run (s); a longer period is recorded as several entries."""


class Worker:
    def __init__(
        self,
        config: Config,
        engine: Engine,
        connection: BrokerConnection,
        weight_loaders: list[WeightLoader],
        time_sharing: WorkerTimeSharing | None = None,
    ):
        """`weight_loaders`: one for the engine, or one for each server behind the engine. `time_sharing`: the engine's
        time slices on its accelerator, of which it holds one at this moment; None without time sharing."""
        self.config = config
        self.engine = engine
        self.connection = connection
        self.weight_loaders = weight_loaders
        self.time_sharing = time_sharing or WorkerTimeSharing(config, "cpu")
        self.tokenizer = Tokenizer(config.model.path)
        self.environment_turns = EnvironmentTurns(config, self.tokenizer)
        self.scoring = Scoring(config, self.tokenizer, start_now=config.reward.where == "worker")
        self.reports = Reports(connection)
        self.images = SampleImages(connection)
        self.failures = Failures(log)
        self.hold = UpdateHold(config)
        self.active: dict[int, ActiveSample] = {}
        self.acknowledged_tokens = 0
        self.watermark = 0
        self.stopping = ""
        self._wrong_weights: WrongWeights | None = None
        self._busy_since: float | None = None
        self._reported_version: Version | None = None
        self._reported_capacity: int | None = None
        """Engine capacity that the broker was last told, in requests; None while the engine has no weights."""

    # --- main loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until the broker says stop.

        Raises BrokerUnreachable when the broker is gone for good, and WrongWeights, after saying goodbye, when the
        engine repeatedly fails its weight check.
        """
        self._say_hello()
        while not self.stopping:
            self.run_once()
        self._leave()
        if self._wrong_weights:
            raise self._wrong_weights

    def stop(self, reason: str) -> None:
        """Have `run` leave the run after the current pass of its loop. `reason`: why, for the log; not empty."""
        self.stopping = reason

    def run_once(self) -> None:
        """Run one pass of the loop: handle messages, weights, one decode step, observations and scores."""
        MAIN.at("messages")
        for received in self.connection.receive(self._patience_ms()):
            self._handle(received)
        self.connection.check_alive()
        self._report_slots(decoded=False)
        MAIN.at("taking weights")
        self._share_device()
        self._load_weights()
        if self._can_generate():
            self._open_span()
        else:
            self._close_span()
        self.connection.hold(self.active, self.engine.generated_tokens)
        MAIN.at("decoding")
        self._generate()
        self._report_slots(decoded=True)
        MAIN.at("handing in")
        for observed in self.environment_turns.poll():
            self._observe(observed)
        for score in self.scoring.poll():
            self._report_score(score)
        self.reports.send()

    def _generate(self) -> None:
        if self._is_backlogged:
            return
        for chunk in self.engine.step():
            self._report_chunk(chunk)
        for lease_id, error in self.engine.failures():
            self._give_back(lease_id, "generation_failed", error)
        self._report_capacity_change()

    def _report_slots(self, decoded: bool) -> None:
        """Report to the broker how many samples generate, queue, wait for weights, or wait for an environment.

        Called before and after the decode step (`decoded`: after it). Before it, only the wait for weights is reported.
        While one of several servers loads weights, the others go on, and nothing counts as waiting.
        """
        all_load = bool(self.weight_loaders) and all(loader.has_pending for loader in self.weight_loaders)
        stalled = self.engine.version is None or (all_load and not self.hold.active)
        if not decoded and not stalled:
            return
        live, queued = self.engine.live, 0 if stalled else self.engine.queued
        tool = [lease_id for lease_id in self.environment_turns.awaiting_answer if lease_id in self.active]
        self.connection.occupy(wire.Slots(0 if stalled else live - queued, queued, live if stalled else 0, tool))

    def _can_generate(self) -> bool:
        return bool(self.engine.live) and self.engine.version is not None and not self._is_backlogged

    @property
    def _is_backlogged(self) -> bool:
        """Whether more bytes of reports than `worker.unacked_mb` allows wait to be acknowledged by the broker;
        generation pauses then."""
        return self.reports.unacknowledged_bytes >= self.config.worker.unacked_mb << 20

    def _patience_ms(self) -> int:
        """Longest wait of the loop for the broker's messages (ms): 0 between decode steps, short while verifiers or
        environments work."""
        if self._can_generate():
            return 0
        return SCORING_POLL_MS if self.scoring.pending or self.environment_turns.pending else IDLE_POLL_MS

    def _say_hello(self) -> None:
        welcome = self.connection.hello(list(self.active), self.acknowledged_tokens)
        self.watermark = max(self.watermark, welcome.watermark)
        for lease_id in welcome.lost_lease_ids:
            self._drop(lease_id)
        self._connect_weight_loaders(welcome.weights_address, welcome.weights_key)
        self._offer_weights(welcome.weight_folders)
        if self.engine.version is not None:
            self._report_capacity(0.0)
        self._hand_back_aborted()
        self.images.ask_again()
        for lease_id in self.active:
            self.reports.send_again(lease_id)

    def _leave(self) -> None:
        """Report everything generated so far, give all leases back, and say goodbye."""
        log.info("stopping: %s", self.stopping)
        for chunk in self.engine.cancel_all(list(self.active)):
            self._report_chunk(chunk)
        for lease_id in list(self.active):
            self._give_back(lease_id, "leave")
        self.reports.send(force=True)
        self._close_span()
        self.connection.send(wire.Heartbeat([], self.engine.generated_tokens))
        self.connection.goodbye()

    def close(self) -> None:
        """Close pools, connection, engine and weight receivers; a weights thread may still be stuck in a transfer."""
        self.scoring.close()
        self.environment_turns.close()
        self.connection.close()
        self.engine.close()
        for loader in self.weight_loaders:
            loader.receiver.close()

    # --- messages -------------------------------------------------------------------------------------------

    def _handle(self, received: wire.Received) -> None:
        message = received.message
        match message:
            case wire.Grants():
                for lease in leases_of(received):
                    self._accept(lease)
            case wire.Answers():
                self._take_answers(message)
            case wire.Images():
                self._take_images(received)
            case wire.Abort():
                self.watermark = max(self.watermark, message.watermark)
                self._hand_back_aborted()
            case wire.Cancel(lease_ids, hand_back=True):
                for lease_id in lease_ids:
                    self._give_back(lease_id, "recall")
            case wire.Cancel(lease_ids):
                for lease_id in lease_ids:
                    self._drop(lease_id)
            case wire.Renewed(lease_ids):
                for lease_id in lease_ids:
                    if not self._is_handed_over(lease_id):
                        self._drop(lease_id)
            case wire.Evaluating(steps):
                self.hold.waiting = steps
            case wire.WeightsAddress():
                self._connect_weight_loaders(message.address, message.key)
            case wire.WeightFolders(folders):
                self._offer_weights(folders)
            case wire.Stop():
                self.stop(message.reason)
            case wire.Refused() if self.connection.is_disowned(received):
                self._say_hello()
            case wire.Refused() if "unknown session" not in message.reason:
                log.warning("refused: %s", message.reason)
                for lease_id in self.reports.unanswered():
                    self._drop(lease_id)

    def _take_answers(self, answers: wire.Answers) -> None:
        for lease_id, length in answers.acks:
            self.acknowledged_tokens += self.reports.acknowledge(lease_id, length)
        for lease_id in answers.done:
            self.active.pop(lease_id, None)
            self.reports.forget(lease_id)
        for lease_id, length in answers.nacks:
            self.reports.send_again(lease_id, length)
        for lease_id, reason in answers.rejects:
            log.warning("refused: %s", reason, extra=self._ids(lease_id))
            self._drop(lease_id)
            if reason.startswith(wire.BAD_ROW):  # its lease goes on, and nothing else would come of it
                self.reports.close(wire.GiveBack(lease_id, 0, "generation_failed", clip(reason)))

    def _take_images(self, received: wire.Received) -> None:
        ready, failed = self.images.take(received)
        for lease_id in ready:
            if lease_id in self.active and not self.reports.is_closing(lease_id):
                self._continue(self.active[lease_id])
        for lease_id in failed:
            self._give_back(lease_id, "generation_failed", "the broker cannot read an image of the sample")

    def _accept(self, lease: LeasedTask) -> None:
        grant, task, pieces = lease
        length = sum(map(len, pieces[1:]))
        sample = ActiveSample(
            grant=grant,
            task=task,
            tokens=pieces,
            length=length,
            budget=length + grant.max_new_tokens,
            finished=grant.scoring,
            answered_turns=grant.turns,
            turn_start=grant.turn_start,
            environment_state=grant.state,
        )
        self.active[grant.lease_id] = sample
        if grant.scoring:
            self.scoring.submit(lease, grant.finish_reason)
        elif grant.lease_id <= self.watermark and not task.evaluation:
            self._give_back(grant.lease_id, "abort")
        elif not (task.evaluation and changes_version(self.engine, self.weight_loaders)):
            self._continue(sample)  # else it is given back once the new version is loaded

    def _continue(self, sample: ActiveSample) -> None:
        """Submit the current turn to the engine, or, if the turn is over, to the environment. A sample with images
        waits until they have arrived."""
        grant, task, turn = sample.grant, sample.task, sample.turn_tokens
        if self.environment_turns.is_over(turn):
            return self.environment_turns.submit(
                grant.lease_id, turn, sample.answered_turns, sample.environment_state, sample.tokens[0], task.label
            )
        names = [*task.images, *(name for name, _ in grant.shown_images)]
        if names and not ENGINES.find(self.config.worker.engine).takes_images:
            error = f"key 'worker.engine' = {self.config.worker.engine!r} takes no images, and the sample has some"
            return self._give_back(grant.lease_id, "generation_failed", error)
        if (images := self.images.of(grant.lease_id, names)) is None:
            return
        starts = [0] * len(task.images) + [len(sample.tokens[0]) + start for _, start in grant.shown_images]
        request = Request(
            id=grant.lease_id,
            tokens=np.concatenate(sample.tokens),
            max_new_tokens=int(min(sample.remaining_tokens, self.environment_turns.remaining_tokens(turn))),
            seed=grant.seed,
            temperature=task.temperature,
            top_p=task.top_p,
            top_k=task.top_k,
            min_p=task.min_p,
            with_support=task.is_cut and not task.evaluation,
            stop_token_ids=self.environment_turns.stop_token_ids | frozenset(grant.stop_token_ids),
            images=images,
            image_starts=tuple(starts),
        )
        try:
            self.engine.submit(request)
        except EngineError as error:
            self._give_back(grant.lease_id, "generation_failed", str(error))

    # --- tokens ---------------------------------------------------------------------------------------------

    def _report_chunk(self, chunk: Chunk) -> None:
        sample = self.active.get(chunk.id)
        if sample is None:
            return
        start = sample.length
        ended: str = chunk.finish_reason or ""
        sample.append(chunk.tokens)
        if ended and self.environment_turns.is_over(sample.turn_tokens):
            ended = "" if sample.remaining_tokens else "length"
        awaits_score = self._finish(sample, ended)
        self.reports.add_chunk(
            chunk.id, start, chunk.tokens, chunk.logprobs, chunk.version, ended, chunk.support, awaits_score
        )
        if chunk.finish_reason and not ended:
            self._continue(sample)

    def _observe(self, observed: TokenizedObservation) -> None:
        """Append an observation to its sample and continue the sample, unless it has been given back meanwhile."""
        lease_id, sample = observed.key, self.active.get(observed.key)
        if sample is None or self.reports.is_closing(lease_id):
            return
        if not len(observed.tokens):
            return self._give_back(lease_id, "environment_failed", observed.error)
        if observed.error:
            log.warning("an observation says that %s", observed.error, extra=self._ids(lease_id))
        start, tokens = sample.length, observed.tokens[: sample.remaining_tokens]
        sample.observe(tokens, observed.state)
        ended: str = "stop" if observed.done else "" if sample.remaining_tokens else "length"
        awaits_score = self._finish(sample, ended)
        self.reports.add_observation(
            lease_id, start, tokens, observed.state, ended, observed.failed, awaits_score=awaits_score
        )
        if not ended:
            self._continue(sample)

    def _finish(self, sample: ActiveSample, ended: str) -> bool:
        """Mark the sample finished if `ended`, the response's finish reason, is not "", and submit it for scoring
        unless a scorer process scores it.

        Returns whether its last tokens should wait for the score, to travel in one message with it.
        """
        sample.finished = sample.finished or bool(ended)
        if not ended or sample.grant.hand_over:
            return False
        lease = LeasedTask(sample.grant, sample.task, sample.tokens)
        turns = sample.answered_turns + (sample.turn_start < sample.length)
        self.scoring.submit(lease, ended, sample.environment_state, turns)
        return True

    def _is_handed_over(self, lease_id: int) -> bool:
        """Whether the response is finished and a scorer scores it: this worker only waits for the acknowledgement of
        its last tokens."""
        sample = self.active.get(lease_id)
        return sample is not None and sample.finished and sample.grant.hand_over

    def _report_score(self, score: Score | GroupScore) -> None:
        sample = self.active.get(score.key)
        if sample is None:
            return
        ending = closing(score, sample.length)
        if isinstance(ending, wire.GiveBack):
            self.failures.note(ending.cause, ending.error, "a sample goes back", **self._ids(score.key))
        self.reports.close(ending, token_values(score) if isinstance(ending, wire.TokenScored) else b"")

    def _hand_back_aborted(self) -> None:
        """Give back, with its tokens, each training sample that still generates and whose lease id is at most the
        watermark: the newest lease id at the broker's last abort."""
        training = (lease_id for lease_id, sample in self.active.items() if not sample.task.evaluation)
        aborted = [lease_id for lease_id in training if lease_id <= self.watermark]
        for chunk in self.engine.cancel_all(aborted):
            self._report_chunk(chunk)
        for lease_id in aborted:
            self._give_back(lease_id, "abort")

    def _give_back(self, lease_id: int, cause: wire.GiveBackCause, error: str = "") -> None:
        """Stop generating a sample and give its lease back to the broker for this `cause`. The lease is kept if its end
        is already reported or a scorer process scores the response. On an abort or recall it is also kept if this
        worker is scoring the response."""
        for chunk in self.engine.cancel(lease_id):
            self._report_chunk(chunk)
        self.images.forget(lease_id)
        sample = self.active.get(lease_id)
        if sample is None or self.reports.is_closing(lease_id) or self._is_handed_over(lease_id):
            return
        if sample.finished and cause in ("abort", "recall"):
            return
        error = clip(error)
        if error:
            self.failures.note(cause, error, "a sample goes back", **self._ids(lease_id))
        self.reports.close(wire.GiveBack(lease_id, sample.length, cause, error))

    def _ids(self, lease_id: int) -> dict[str, int]:
        """Extra fields for a log line about the sample of a lease: number of its group, and index in the group."""
        sample = self.active.get(lease_id)
        return {"group": sample.task.group, "sample": sample.grant.index} if sample else {}

    def _drop(self, lease_id: int) -> None:
        """Forget a lease that has ended, with its rows that the broker has not acknowledged, and cancel its
        generation."""
        self.reports.forget(lease_id)
        self.images.forget(lease_id)
        if self.active.pop(lease_id, None):
            self.engine.cancel(lease_id)

    # --- weights and capacity -----------------------------------------------------------------------------

    def _connect_weight_loaders(self, address: str, key: str) -> None:
        for loader in self.weight_loaders:
            loader.receiver.connect(address, key)

    def _offer_weights(self, folders: list[wire.WeightFolder]) -> None:
        for loader in self.weight_loaders:
            loader.receiver.offer(folders)

    def _share_device(self) -> None:
        loading = any(loader.is_loading for loader in self.weight_loaders) or self.hold.is_awaited(self.engine.version)
        staged = any(loader.receiver.has_staged for loader in self.weight_loaders)
        if self.time_sharing.switch(self.engine, loading, staged):
            for loader in self.weight_loaders:
                loader.receiver.released()

    def _held_out(self) -> list[int]:
        """Lease ids of the held-out samples (of an evaluation) that this worker generates."""
        held_out = (lease for lease, each in self.active.items() if each.task.evaluation and not each.finished)
        return [lease for lease in held_out if not self.reports.is_closing(lease)]

    def _give_back_held_out(self) -> None:
        for lease_id in self._held_out():
            self._give_back(lease_id, "recall")

    def _load_weights(self) -> None:
        """Load weights that have arrived, unless held-out samples of an evaluation still need the engine's version."""
        if not self.time_sharing.holds_device:
            return
        version, changed = self.engine.version, changes_version(self.engine, self.weight_loaders)
        others = [loader for loader in self.weight_loaders if loader.receiver.staged_version not in (None, version)]
        holds = self.hold.holds(version, bool(others), bool(others and self._held_out()))
        if others and not holds:
            self._give_back_held_out()
        for loader in self.weight_loaders:
            loader.receiver.put_off(puts_off := holds and loader in others)
            try:
                loaded_in_s = None if puts_off and not loader.is_loading else loader.load()
            except WrongWeights as error:
                self._wrong_weights = error
                return self.stop(str(error))
            if loaded_in_s is not None:
                self._report_capacity(loaded_in_s)
            while not loader.receiver.refused.empty():
                refused, why = loader.receiver.refused.get()
                self.connection.send(wire.WeightFolderRefused(refused, clip(why)))
        if changed and not changes_version(self.engine, self.weight_loaders):
            self._give_back_held_out()

    def _report_capacity(self, loaded_in_s: float) -> None:
        version, capacity = self.engine.version, self.engine.capacity
        if version is not None:
            self._reported_version, self._reported_capacity = version, capacity
            self.connection.send(wire.WorkerCapacity(version, capacity + self.config.worker.prefetch, loaded_in_s))

    def _report_capacity_change(self) -> None:
        """Report the engine's capacity if it has changed by more than 1 / CAPACITY_CHANGE_PARTS since the last report,
        or dropped to zero."""
        takes_work = self.time_sharing.keeps_device or self.hold.is_awaited(self.engine.version)
        capacity = self.engine.capacity if self.engine.version is not None and takes_work else 0
        reported = self._reported_capacity
        if reported is None and capacity and self.engine.version == self._reported_version:
            return self._report_capacity(0.0)
        if reported is None or abs(capacity - reported) <= reported // CAPACITY_CHANGE_PARTS:
            return
        if capacity:
            self._report_capacity(0.0)
        elif self._reported_version is not None:
            self._reported_capacity = None
            self.connection.send(wire.WorkerCapacity(self._reported_version, 0))

    def _open_span(self) -> None:
        now = clock.now()
        if self._busy_since is not None and now - self._busy_since > TIMELINE_SPAN_S:
            self._close_span()
        if self._busy_since is None:
            self._busy_since = now

    def _close_span(self) -> None:
        if self._busy_since is not None:
            self.connection.send(wire.ActivitySpan("generate", self._busy_since, clock.now()))
            self._busy_since = None

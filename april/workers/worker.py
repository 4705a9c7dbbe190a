"""A generation worker: lease -> generate -> stream chunks to the broker -> score -> hand the score in.

One thread drives everything: it drains the broker's messages, takes new weights between two decode steps,
advances the engine by one step, and forwards chunks and scores. Weights arrive in a thread of their own, another says
that the worker lives, verifiers run in processes of their own.
"""

import logging
from dataclasses import dataclass

import numpy as np

from april import wire
from april.config import Config
from april.connections.broker import BrokerConnection
from april.data.tokenizer import Tokenizer
from april.environments.turns import Observed, Turns
from april.processes import clock
from april.processes.failures import Failures
from april.processes.pulse import MAIN
from april.wire.limits import clip
from april.wire.version import Version
from april.workers.device_turns import WorkerTurns
from april.workers.engines.base import Chunk, Engine, EngineError, Request
from april.workers.engines.intake import Intake
from april.workers.engines.proof import WrongWeights
from april.workers.reports import Reports
from april.workers.rewards.messages import GroupScore, Score
from april.workers.scoring import Lease, Scoring, closing, leases_of

log = logging.getLogger(__name__)

IDLE_POLL_MS = 20
SCORING_POLL_MS = 5
ROOM_SHARE = 8
"""a change of the engine's capacity by more than this part is told to the broker"""
LANE_SPAN_S = 5.0
"""a span of generation is reported at least this often"""


@dataclass(slots=True)
class Work:
    """A leased sample in this worker's hands."""

    grant: wire.Grant
    task: wire.Task
    tokens: list[np.ndarray]
    """the prompt, then the response in pieces, as they came and grew"""
    length: int
    """response tokens"""
    budget: int
    """response tokens that it may have"""
    finished: bool
    """the response is complete; only its score is missing, or, with `hand_over`, nothing"""
    turns: int
    """that the environment has answered"""
    turn_start: int
    """response tokens before the turn under way"""
    state: bytes
    """of the environment behind its last observation"""

    @property
    def left(self) -> int:
        """Response tokens that it may still have."""
        return self.budget - self.length

    @property
    def turn(self) -> np.ndarray:
        """int32 [T]: what the policy has sampled of the turn under way."""
        return np.concatenate(self.tokens)[len(self.tokens[0]) + self.turn_start :]

    def append(self, tokens: np.ndarray) -> None:
        self.tokens.append(tokens)
        self.length += len(tokens)

    def observe(self, tokens: np.ndarray, state: bytes) -> None:
        """The environment has answered the turn under way; the next one begins."""
        self.append(tokens)
        self.turns, self.turn_start, self.state = self.turns + 1, self.length, state


class Worker:
    def __init__(
        self,
        config: Config,
        engine: Engine,
        connection: BrokerConnection,
        intakes: list[Intake],
        device_turns: WorkerTurns | None = None,
    ):
        """`intakes`: of the engine, or one for each of the servers behind it; `device_turns`: on the engine's
        accelerator, of which it has one."""
        self.config = config
        self.engine = engine
        self.connection = connection
        self.intakes = intakes
        self.device_turns = device_turns or WorkerTurns(config, "cpu")
        self.tokenizer = Tokenizer(config.model.path)
        self.turns = Turns(config, self.tokenizer)
        self.scoring = Scoring(config, self.tokenizer, at_once=config.reward.where == "worker")
        self.reports = Reports(connection)
        self.failures = Failures(log)
        self.works: dict[int, Work] = {}
        self.acknowledged_tokens = 0
        self.watermark = 0
        self.stopping = ""
        self._wrong_weights: WrongWeights | None = None
        self._busy_since: float | None = None
        self._reported_version: Version | None = None
        self._reported_room: int | None = None
        """of the engine, in requests; None where it has no weights"""

    # --- life -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until the broker says stop. Raises BrokerUnreachable when it is gone for good, and WrongWeights, having
        left, when its engine does not come to hold what it is sent."""
        self._say_hello()
        while not self.stopping:
            self.turn()
        self._leave()
        if self._wrong_weights:
            raise self._wrong_weights

    def stop(self, reason: str) -> None:
        """Leave after the turn that is under way."""
        self.stopping = reason

    def turn(self) -> None:
        """One pass: messages, weights, one decode step, observations, scores."""
        MAIN.at("messages")
        for received in self.connection.receive(self._patience_ms()):
            self._handle(received)
        self.connection.check_alive()
        self._look_at_slots(decoded=False)
        MAIN.at("taking weights")
        self._take_turns()
        self._take_weights()
        if self._can_generate():
            self._open_span()
        else:
            self._close_span()
        self.connection.hold(self.works, self.engine.generated_tokens)
        MAIN.at("decoding")
        self._generate()
        self._look_at_slots(decoded=True)
        MAIN.at("handing in")
        for observed in self.turns.poll():
            self._observe(observed)
        for score in self.scoring.poll():
            self._hand_in(score)
        self.reports.send()

    def _generate(self) -> None:
        if self._is_ahead:
            return
        for chunk in self.engine.step():
            self._send_new(chunk)
        for lease_id, error in self.engine.failures():
            self._give_back(lease_id, "generation_failed", error)
        self._report_room()

    def _look_at_slots(self, decoded: bool) -> None:
        """Have the broker told what the samples here are at: once a step is over, or while weights keep it from being
        made. Where one of several servers loads some, the others go on."""
        waits = self.engine.version is None or (bool(self.intakes) and all(one.loading for one in self.intakes))
        if not decoded and not waits:
            return
        live, tool = self.engine.live, [lease_id for lease_id in self.turns.asked if lease_id in self.works]
        queued = 0 if waits else self.engine.queued
        self.connection.occupy(wire.Slots(0 if waits else live - queued, queued, live if waits else 0, tool))

    def _can_generate(self) -> bool:
        return bool(self.engine.live) and self.engine.version is not None and not self._is_ahead

    @property
    def _is_ahead(self) -> bool:
        """Whether more waits for the broker's disk than it may."""
        return self.reports.unacknowledged_bytes >= self.config.worker.unacked_mb << 20

    def _patience_ms(self) -> int:
        """How long to wait for messages: not at all between decode steps, briefly while verifiers or environments
        work."""
        if self._can_generate():
            return 0
        return SCORING_POLL_MS if self.scoring.pending or self.turns.pending else IDLE_POLL_MS

    def _say_hello(self) -> None:
        welcome = self.connection.hello(list(self.works), self.acknowledged_tokens)
        self.watermark = max(self.watermark, welcome.watermark)
        for lease_id in welcome.lost:
            self._drop(lease_id)
        self._connect_intakes(welcome.weights_address, welcome.weights_key)
        if self.engine.version is not None:
            self._report_holding(0.0)
        self._hand_back_aborted()
        for lease_id in self.works:
            self.reports.send_again(lease_id)

    def _leave(self) -> None:
        """Hand in what there is, so that nothing generated is lost, and say goodbye."""
        log.info("stopping: %s", self.stopping)
        for chunk in self.engine.cancel_all(list(self.works)):
            self._send_new(chunk)
        for lease_id in list(self.works):
            self._give_back(lease_id, "leave")
        self.reports.send(all_of_it=True)
        self._close_span()
        self.connection.send(wire.Heartbeat([], self.engine.generated_tokens))
        self.connection.goodbye()

    def close(self) -> None:
        """Let go of everything; the weights thread may still be stuck in a transfer."""
        self.scoring.close()
        self.turns.close()
        self.connection.close()
        self.engine.close()
        for intake in self.intakes:
            intake.receiver.close()

    # --- messages -------------------------------------------------------------------------------------------

    def _handle(self, received: wire.Received) -> None:
        message = received.message
        match message:
            case wire.Grants():
                for lease in leases_of(received):
                    self._accept(lease)
            case wire.Answers():
                self._take_answers(message)
            case wire.Abort():
                self.watermark = max(self.watermark, message.watermark)
                self._hand_back_aborted()
            case wire.Cancel(tokens, hand_back=True):
                for lease_id in tokens:
                    self._give_back(lease_id, "recall")
            case wire.Cancel(tokens):
                for lease_id in tokens:
                    self._drop(lease_id)
            case wire.Renewed(tokens):
                for lease_id in tokens:
                    if not self._is_handed_over(lease_id):
                        self._drop(lease_id)
            case wire.WeightsAt():
                self._connect_intakes(message.address, message.key)
            case wire.Stop():
                self.stop(message.reason)
            case wire.Refused() if self.connection.is_disowned(received):
                self._say_hello()
            case wire.Refused() if "unknown session" not in message.reason:
                log.warning("refused: %s", message.reason)
                for lease_id in self.reports.unanswered():
                    self._drop(lease_id)

    def _take_answers(self, answers: wire.Answers) -> None:
        for lease_id, length in answers.lengths:
            self.acknowledged_tokens += self.reports.acknowledge(lease_id, length)
        for lease_id in answers.done:
            self.works.pop(lease_id, None)
            self.reports.forget(lease_id)
        for lease_id, length in answers.resend:
            self.reports.send_again(lease_id, length)
        for lease_id, reason in answers.refused:
            log.warning("refused: %s", reason, extra=self._ids(lease_id))
            self._drop(lease_id)

    def _accept(self, lease: Lease) -> None:
        grant, task, pieces = lease
        length = sum(map(len, pieces[1:]))
        work = Work(
            grant=grant,
            task=task,
            tokens=pieces,
            length=length,
            budget=length + grant.max_new_tokens,
            finished=grant.scoring,
            turns=grant.turns,
            turn_start=grant.turn_start,
            state=grant.state,
        )
        self.works[grant.lease_id] = work
        if grant.scoring:
            self.scoring.submit(lease, grant.finish_reason)
        elif grant.lease_id <= self.watermark and not task.evaluation:
            self._give_back(grant.lease_id, "abort")
        else:
            self._go_on(work)

    def _go_on(self, work: Work) -> None:
        """Have the turn under way sampled, or answered if it is over."""
        grant, task, turn = work.grant, work.task, work.turn
        if self.turns.is_over(turn):
            return self.turns.ask(grant.lease_id, turn, work.turns, work.state, work.tokens[0], task.label)
        request = Request(
            id=grant.lease_id,
            tokens=np.concatenate(work.tokens),
            max_new_tokens=int(min(work.left, self.turns.room(turn))),
            seed=grant.seed,
            temperature=task.temperature,
            top_p=task.top_p,
            top_k=task.top_k,
            min_p=task.min_p,
            with_support=task.is_cut and not task.evaluation,
            stop_token_ids=self.turns.stops | frozenset(grant.stops),
        )
        try:
            self.engine.submit(request)
        except EngineError as error:
            self._give_back(grant.lease_id, "generation_failed", str(error))

    # --- tokens ---------------------------------------------------------------------------------------------

    def _send_new(self, chunk: Chunk) -> None:
        work = self.works.get(chunk.id)
        if work is None:
            return
        start = work.length
        ended: str = chunk.finish_reason or ""
        work.append(chunk.tokens)
        if ended and self.turns.is_over(work.turn):
            ended = "" if work.left else "length"
        waits = self._end(work, ended)
        self.reports.add_chunk(
            chunk.id, start, chunk.tokens, chunk.logprobs, chunk.version, ended, chunk.support, awaits_score=waits
        )
        if chunk.finish_reason and not ended:
            self._go_on(work)

    def _observe(self, observed: Observed) -> None:
        """Put an observation behind its turn, and go on; one for a sample that has been handed back comes too late."""
        lease_id, work = observed.key, self.works.get(observed.key)
        if work is None or self.reports.is_closing(lease_id):
            return
        if not len(observed.tokens):
            return self._give_back(lease_id, "environment_failed", observed.error)
        if observed.error:
            log.warning("an observation says that %s", observed.error, extra=self._ids(lease_id))
        start, tokens = work.length, observed.tokens[: work.left]
        work.observe(tokens, observed.state)
        ended: str = "stop" if observed.done else "" if work.left else "length"
        waits = self._end(work, ended)
        self.reports.add_observation(
            lease_id, start, tokens, observed.state, ended, observed.failed, awaits_score=waits
        )
        if not ended:
            self._go_on(work)

    def _end(self, work: Work, ended: str) -> bool:
        """Score the response if it has ended; whether its last tokens wait for that."""
        work.finished = work.finished or bool(ended)
        if not ended or work.grant.hand_over:
            return False
        self.scoring.submit(Lease(work.grant, work.task, work.tokens), ended, work.state)
        return True

    def _is_handed_over(self, lease_id: int) -> bool:
        """Whether the last chunk of a response that others score is on its way: its acknowledgement will come."""
        work = self.works.get(lease_id)
        return work is not None and work.finished and work.grant.hand_over

    def _hand_in(self, score: Score | GroupScore) -> None:
        work = self.works.get(score.key)
        if work is None:
            return
        ending = closing(score, work.length)
        if isinstance(ending, wire.GiveBack):
            self.failures.note(ending.cause, ending.error, "a sample goes back", **self._ids(score.key))
        self.reports.close(ending)

    def _hand_back_aborted(self) -> None:
        """Every training sample at or below the watermark that still generates goes back with its tokens."""
        aborted = [t for t, work in self.works.items() if t <= self.watermark and not work.task.evaluation]
        for chunk in self.engine.cancel_all(aborted):
            self._send_new(chunk)
        for lease_id in aborted:
            self._give_back(lease_id, "abort")

    def _give_back(self, lease_id: int, cause: wire.GiveBackCause, error: str = "") -> None:
        """Stop generating a sample; one that is being scored already stays, unless this worker leaves."""
        for chunk in self.engine.cancel(lease_id):
            self._send_new(chunk)
        work = self.works.get(lease_id)
        if work is None or self.reports.is_closing(lease_id) or self._is_handed_over(lease_id):
            return
        if work.finished and cause in ("abort", "recall"):
            return
        error = clip(error)
        if error:
            self.failures.note(cause, error, "a sample goes back", **self._ids(lease_id))
        self.reports.close(wire.GiveBack(lease_id, work.length, cause, error))

    def _ids(self, lease_id: int) -> dict[str, int]:
        """What a log line says of the sample behind a lease."""
        work = self.works.get(lease_id)
        return {"group": work.task.group, "sample": work.grant.index} if work else {}

    def _drop(self, lease_id: int) -> None:
        """The lease has ended: what is generated for it no longer counts."""
        self.reports.forget(lease_id)
        if self.works.pop(lease_id, None):
            self.engine.cancel(lease_id)

    # --- weights and the record -----------------------------------------------------------------------------

    def _connect_intakes(self, address: str, key: str) -> None:
        for intake in self.intakes:
            intake.receiver.connect(address, key)

    def _take_turns(self) -> None:
        loading = any(intake.under_way for intake in self.intakes)
        staged = any(intake.receiver.has_staged for intake in self.intakes)
        if self.device_turns.gave(self.engine, loading, staged):
            for intake in self.intakes:
                intake.receiver.emptied()

    def _take_weights(self) -> None:
        for intake in self.intakes if self.device_turns.has else ():
            try:
                loaded_in_s = intake.load()
            except WrongWeights as error:
                self._wrong_weights = error
                return self.stop(str(error))
            if loaded_in_s is not None:
                self._report_holding(loaded_in_s)

    def _report_holding(self, loaded_in_s: float) -> None:
        version, room = self.engine.version, self.engine.capacity
        if version is not None:
            self._reported_version, self._reported_room = version, room
            self.connection.send(wire.Holding(version, room + self.config.worker.prefetch, loaded_in_s))

    def _report_room(self) -> None:
        """Tell the broker when the engine takes notably more or fewer requests than it was told, or none at all."""
        room = self.engine.capacity if self.engine.version is not None and self.device_turns.lasts else 0
        if self._reported_room is None and room and self.engine.version == self._reported_version:
            return self._report_holding(0.0)
        if self._reported_room is None or abs(room - self._reported_room) <= self._reported_room // ROOM_SHARE:
            return
        if room:
            self._report_holding(0.0)
        elif self._reported_version is not None:
            self._reported_room = None
            self.connection.send(wire.Holding(self._reported_version, 0))

    def _open_span(self) -> None:
        now = clock.now()
        if self._busy_since is not None and now - self._busy_since > LANE_SPAN_S:
            self._close_span()
        if self._busy_since is None:
            self._busy_since = now

    def _close_span(self) -> None:
        if self._busy_since is not None:
            self.connection.send(wire.Lane("generate", self._busy_since, clock.now()))
            self._busy_since = None

"""The broker's side of the conversation with monitors: what they may know, and what an operator may ask for."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from april import wire
from april.broker.books import Books
from april.broker.ledger.admission import Verdict
from april.broker.ledger.dead_letters import DeadLetter
from april.broker.sessions import Session
from april.broker.views.status import status
from april.files.replace import replace_file
from april.processes.failures import Failures
from april.wire import limits

log = logging.getLogger(__name__)

DEAD_LETTERS_FILE = "dead_letters.json"
"""in the run folder"""


class MonitorDesk:
    def __init__(self, books: Books, stop: Callable[[str, str, float], None], abort: Callable[[float], None]):
        """`stop(reason, state, now)` ends the run; `abort(now)` calls back what is generated for training."""
        self.books = books
        self.ledger = books.ledger
        self.sessions = books.sessions
        self._stop = stop
        self._abort = abort
        self._written = b""
        self._deaths = Failures(log)
        self._logged = books.ledger.dead_letters.total

    def on_StatusRequest(self, session: Session, received: wire.Received, now: float) -> None:
        self._answer_json(session, received, wire.Status(), status(self.books, now))

    def on_StopRun(self, session: Session, received: wire.Received, now: float) -> None:
        self._stop(limits.clip(received.message.reason), received.message.state, now)
        self.sessions.send_at_once(session, wire.Accepted(), [], received.sequence)

    def on_Drain(self, session: Session, received: wire.Received, now: float) -> None:
        if self._refuses(session, received):
            return
        if received.message.on and not self.ledger.draining:
            self.ledger.start_drain()
            self._abort(now)
            log.info("drained for maintenance by %s: nothing is handed out", session.name)
        elif not received.message.on and self.ledger.draining:
            self.ledger.end_drain()
            log.info("the drain is ended by %s", session.name)
        self.sessions.send(session, wire.Accepted(), sequence=received.sequence)

    # --- dead letters ---------------------------------------------------------------------------------------

    def on_DeadLettersRequest(self, session: Session, received: wire.Received, now: float) -> None:
        self._answer_json(session, received, wire.DeadLetters(), self.dead_letters())

    def on_Requeue(self, session: Session, received: wire.Received, now: float) -> None:
        if self._refuses(session, received):
            return
        asked = received.message.groups or self.ledger.dead_letters.discarded_groups()
        requeued = [group for group in asked if self.ledger.requeue(group) is Verdict.OK]
        if requeued:
            log.info("re-queued by %s: groups %s", session.name, ", ".join(map(str, requeued)))
        self.sessions.send(session, wire.Requeued(requeued), sequence=received.sequence)

    def dead_letters(self) -> dict[str, Any]:
        """What `april dead-letters` shows."""
        letters = self.ledger.dead_letters
        return {
            "run": self.books.config.run.name,
            "total": letters.total,
            "letters": [self._describe(letter) for letter in letters.letters],
        }

    def _describe(self, letter: DeadLetter) -> dict[str, Any]:
        prompts = self.books.prompts
        return {
            "group": letter.group,
            "sample": letter.index,
            "evaluation": letter.evaluation,
            "row": letter.row if letter.evaluation else prompts.row_number(letter.epoch, letter.row),
            "epoch": letter.epoch,
            "attempts": letter.attempts,
            "error": letter.error,
            "at": letter.at,
            "outcome": letter.outcome,
        }

    def log_deaths(self) -> None:
        letters = self.ledger.dead_letters
        new, self._logged = letters.total - self._logged, letters.total
        for letter in letters.letters[-new:] if new else []:
            ids = {"group": letter.group, "sample": letter.index}
            dead = f"sample {letter.group}.{letter.index} is dead after {letter.attempts} attempts"
            self._deaths.note("dead", letter.error, dead, **ids)

    def write_dead_letters(self) -> None:
        """Leave the list in the run folder for when no broker runs."""
        if self.ledger.dead_letters.total:
            data = orjson.dumps(self.dead_letters(), option=orjson.OPT_INDENT_2)
            if data != self._written:
                replace_file(self.books.config.run_dir / DEAD_LETTERS_FILE, data)
                self._written = data

    # --- answers --------------------------------------------------------------------------------------------

    def _answer_json(self, session: Session, received: wire.Received, answer: wire.Message, content: dict) -> None:
        if not self.sessions.has_credit(session, self.books.credit_bytes):
            reason = "answers beyond 'broker.credit_mb' are unread; read them, and say so in a heartbeat"
            return self.sessions.refuse("unread", reason, session.data_route, session.id, received.sequence)
        data = np.frombuffer(orjson.dumps(content), np.uint8)
        self.sessions.send(session, answer, [data], received.sequence)

    def _refuses(self, session: Session, received: wire.Received) -> bool:
        """Whether the broker can write nothing down any more, or has no more to hand out."""
        why = self.books.run.read_only or self.books.run.over
        if why:
            self.sessions.send(session, wire.Refused(why), sequence=received.sequence)
        return bool(why)

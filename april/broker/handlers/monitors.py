"""Handles messages of monitors: status, and an operator's commands (stop, drain, requeue)."""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import numpy as np
import orjson

from april import wire
from april.broker.context import BrokerContext, MessageTable
from april.broker.ledger.admission import Verdict
from april.broker.ledger.dead_letters import DeadLetter
from april.broker.peers import Peer
from april.broker.views.status import read_status
from april.util.files import replace_file
from april.util.logs import Failures
from april.wire import limits

log = logging.getLogger(__name__)

DEAD_LETTERS_FILE = "dead_letters.json"
"""File in the run folder with the dead letters as JSON: samples that failed for good."""


class MonitorHandler:
    def __init__(self, context: BrokerContext, stop: Callable[[str, str, float], None], abort: Callable[[float], None]):
        """`stop(reason, state, now)`: function that ends the run. `abort(now)`: function that makes workers hand back
        all training samples in generation."""
        self.context = context
        self.ledger = context.ledger
        self.peers = context.peers
        self._stop = stop
        self._abort = abort
        self._written = b""
        self._deaths = Failures(log)
        self._logged_deaths = context.ledger.dead_letters.total

    def on_status_request(self, peer: Peer, received: wire.Received, now: float) -> None:
        self._answer_json(peer, received, wire.Status(), read_status(self.context, now))

    def on_stop_run(self, peer: Peer, received: wire.Received, now: float) -> None:
        self._stop(limits.clip(received.message.reason), received.message.state, now)
        self.peers.send_now(peer, wire.Accepted(), [], received.sequence)

    def on_drain(self, peer: Peer, received: wire.Received, now: float) -> None:
        if self._refuses(peer, received):
            return
        if received.message.on and not self.ledger.rounds.draining:
            self.ledger.start_drain()
            self._abort(now)
            log.info("drained for maintenance by %s: nothing is handed out", peer.name)
        elif not received.message.on and self.ledger.rounds.draining:
            self.ledger.end_drain()
            log.info("the drain is ended by %s", peer.name)
        self.peers.send(peer, wire.Accepted(), sequence=received.sequence)

    # --- dead letters ---------------------------------------------------------------------------------------

    def on_dead_letters_request(self, peer: Peer, received: wire.Received, now: float) -> None:
        self._answer_json(peer, received, wire.DeadLetters(), self.dead_letters())

    def on_requeue(self, peer: Peer, received: wire.Received, now: float) -> None:
        if self._refuses(peer, received):
            return
        groups = received.message.groups or self.ledger.dead_letters.discarded_groups()
        requeued = [group for group in groups if self.ledger.requeue(group) is Verdict.OK]
        if requeued:
            log.info("re-queued by %s: groups %s", peer.name, ", ".join(map(str, requeued)))
        self.peers.send(peer, wire.Requeued(requeued), sequence=received.sequence)

    def dead_letters(self) -> dict[str, Any]:
        """Content of the file dead_letters.json, which `april dead-letters` shows: samples that failed for good."""
        letters = self.ledger.dead_letters
        return {
            "run": self.context.config.run.name,
            "total": letters.total,
            "letters": [self._describe(letter) for letter in letters.letters],
        }

    def _describe(self, letter: DeadLetter) -> dict[str, Any]:
        fields, row_number = msgspec.structs.asdict(letter), self.context.prompts.row_number
        row = letter.row if letter.evaluation else row_number(letter.epoch, letter.row)
        return {"group": letter.group, "sample": fields.pop("index")} | fields | {"row": row}

    def log_deaths(self) -> None:
        """Log the samples that failed for good since the last call."""
        letters = self.ledger.dead_letters
        new, self._logged_deaths = letters.total - self._logged_deaths, letters.total
        for letter in letters.letters[-new:] if new else []:
            ids = {"group": letter.group, "sample": letter.index}
            dead = f"sample {letter.group}.{letter.index} is dead after {letter.attempts} attempts"
            self._deaths.note("dead", letter.error, dead, **ids)

    def write_dead_letters(self) -> None:
        """Write dead_letters.json to the run folder, so that it can be read while no broker runs."""
        if self.ledger.dead_letters.total:
            data = orjson.dumps(self.dead_letters(), option=orjson.OPT_INDENT_2)
            if data != self._written:
                replace_file(self.context.config.run_dir / DEAD_LETTERS_FILE, data)
                self._written = data

    # --- answers --------------------------------------------------------------------------------------------

    def _answer_json(self, peer: Peer, received: wire.Received, answer: wire.Message, content: Any) -> None:
        if not self.peers.has_credit(peer, self.context.credit_bytes):
            reason = "answers beyond 'broker.credit_mb' are unread; read them, and say so in a heartbeat"
            return self.peers.refuse("unread", reason, peer.data_route, peer.id, received.sequence)
        data = np.frombuffer(msgspec.json.encode(content), np.uint8)
        self.peers.send(peer, answer, [data], received.sequence)

    def _refuses(self, peer: Peer, received: wire.Received) -> bool:
        """Refuse an operator's command if the broker is read-only or the run is over; returns whether the command was
        refused."""
        why = self.context.run.read_only or self.context.run.over
        if why:
            self.peers.send(peer, wire.Refused(why), sequence=received.sequence)
        return bool(why)

    MESSAGES: ClassVar[MessageTable] = {
        wire.StatusRequest: on_status_request,
        wire.StopRun: on_stop_run,
        wire.Drain: on_drain,
        wire.DeadLettersRequest: on_dead_letters_request,
        wire.Requeue: on_requeue,
    }

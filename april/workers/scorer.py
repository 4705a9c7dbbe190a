"""A scorer process: lease a response -> verify it -> report its score. It needs neither weights nor an accelerator.

One thread drives the loop, and verifiers run in separate processes. When a scorer dies, its leases go to another: the
responses are journaled by the broker.
"""

import logging

from april import wire
from april.config import Config
from april.connections.broker import BrokerConnection
from april.data.tokenizer import Tokenizer
from april.processes.failures import Failures
from april.processes.pulse import MAIN
from april.workers.reports import Reports
from april.workers.rewards.messages import GroupScore, Score
from april.workers.scoring import Scoring, closing, leases_of

log = logging.getLogger(__name__)

IDLE_POLL_MS = 20
BUSY_POLL_MS = 5


class Scorer:
    def __init__(self, config: Config, connection: BrokerConnection):
        self.config = config
        self.connection = connection
        self.scoring = Scoring(config, Tokenizer(config.model.path))
        self.reports = Reports(connection)
        self.leases: set[int] = set()
        """Lease ids whose score the broker has not journaled yet."""
        self.failures = Failures(log)
        self.scores = 0
        """Scores reported so far, failed ones included."""
        self.stopping = ""

    def run(self) -> None:
        """Work until the broker says stop. Raises BrokerUnreachable when it is gone for good."""
        self._say_hello()
        while not self.stopping:
            self.run_once()
        log.info("stopping: %s", self.stopping)
        self.connection.goodbye()

    def stop(self, reason: str) -> None:
        """Leave after the current pass of the loop; unscored leases go to other scorers."""
        self.stopping = reason

    def run_once(self) -> None:
        """One pass: messages, scores."""
        MAIN.at("messages")
        for received in self.connection.receive(BUSY_POLL_MS if self.scoring.pending else IDLE_POLL_MS):
            self._handle(received)
        self.connection.check_alive()
        MAIN.at("handing in")
        for score in self.scoring.poll():
            self._report_score(score)
        self.reports.send()
        self.connection.hold(self.leases)

    def close(self) -> None:
        self.scoring.close()
        self.connection.close()

    def _say_hello(self) -> None:
        welcome = self.connection.hello(list(self.leases))
        for lease_id in welcome.lost_lease_ids:
            self._drop(lease_id)
        self.connection.send(wire.HolderCapacity(self.config.scorer.leases))
        for lease_id in self.leases:
            self.reports.send_again(lease_id)

    def _handle(self, received: wire.Received) -> None:
        message = received.message
        match message:
            case wire.Grants():
                for lease in leases_of(received):
                    self.leases.add(lease.grant.lease_id)
                    self.scoring.submit(lease, lease.grant.finish_reason)
            case wire.Answers():
                for lease_id, reason in message.rejects:
                    log.warning("refused: %s", reason)
                    self._drop(lease_id)
                for lease_id in message.done:
                    self._drop(lease_id)
            case wire.Cancel(tokens) | wire.Renewed(tokens):
                for lease_id in tokens:
                    self._drop(lease_id)
            case wire.Stop():
                self.stop(message.reason)
            case wire.Refused() if self.connection.is_disowned(received):
                self._say_hello()
            case wire.Refused() if "unknown session" not in message.reason:
                log.warning("refused: %s", message.reason)
                for lease_id in self.reports.unanswered():
                    self._drop(lease_id)

    def _report_score(self, score: Score | GroupScore) -> None:
        """Report a score; ignored if its lease has ended meanwhile."""
        if score.key not in self.leases:
            return
        ending = closing(score)
        if isinstance(ending, wire.GiveBack):
            self.failures.note(ending.cause, ending.error, "a response or group goes back")
        self.scores += 1
        self.reports.close(ending)

    def _drop(self, lease_id: int) -> None:
        self.leases.discard(lease_id)
        self.reports.forget(lease_id)

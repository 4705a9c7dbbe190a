"""The broker context: the components of a running broker, shared by the service, its handlers and its views."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from april import wire
from april.broker.journal.journal import Journal
from april.broker.ledger.ledger import Ledger
from april.broker.payloads import Payloads
from april.broker.peers import Peers
from april.broker.prompts import PromptBook
from april.broker.schedules.schedule import Schedule
from april.broker.snapshots import Snapshots
from april.broker.telemetry.census import QueueScanner
from april.broker.telemetry.recorder import Recorder
from april.broker.telemetry.sample_history import SampleHistory
from april.config import Config
from april.util.logs import Failures
from april.wire.security.access import Audit

log = logging.getLogger(__name__)

MessageTable = dict[type[wire.Message], Callable[..., None]]
"""Message type -> method of a handler class for it, called with (handler, peer, received message, time in seconds)."""


@dataclass
class RunState:
    """State of the run, as far as it is not in the ledger."""

    state: str = "running"
    """State of the run: running | finished | stopped | failed | read only"""
    over: str = ""
    """Reason for which no further batch will come; empty while the run continues."""
    read_only: str = ""
    """Reason for which the journal cannot be written; empty otherwise. The ledger in memory is then ahead of the disk,
    and the broker acknowledges nothing."""
    summary_is_old: bool = False
    """Whether summary.json has not been rewritten since the last trained step."""


@dataclass
class BrokerContext:
    """The components of one broker process."""

    config: Config
    prompts: PromptBook
    journal: Journal
    snapshots: Snapshots
    ledger: Ledger
    schedule: Schedule
    peers: Peers
    payloads: Payloads
    recorder: Recorder
    queue_scanner: QueueScanner
    history: SampleHistory
    started_at: float
    credit_bytes: int
    """Most bytes of arrays that the broker sends to a peer ahead of the peer's acknowledgement."""
    run: RunState = field(default_factory=RunState)
    audit: Audit = field(default_factory=Audit)
    failures: Failures = field(default_factory=lambda: Failures(log))
    """Errors of samples since this broker started, logged at a limited rate."""
    failed_handshakes: Counter[str] = field(default_factory=Counter)
    """Failed connection handshakes by cause, counted by the server."""

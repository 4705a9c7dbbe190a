"""The broker context: the components of a running broker, shared by the service, its handlers and its views."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from april.broker.journal.journal import Journal
from april.broker.ledger.ledger import Ledger
from april.broker.payloads import Payloads
from april.broker.prompts import PromptBook
from april.broker.schedules.schedule import Schedule
from april.broker.sessions import Peers
from april.broker.snapshots import Snapshots
from april.broker.telemetry.census import QueueScanner
from april.broker.telemetry.lives import SampleHistory
from april.broker.telemetry.recorder import Recorder
from april.config import Config
from april.processes.failures import Failures
from april.security.audit import Audit

log = logging.getLogger(__name__)


@dataclass
class RunState:
    """State of the run."""

    state: str = "running"
    """running | finished | stopped | failed | read only"""
    over: str = ""
    """Reason for which no further batch will come; empty while the run goes on."""
    read_only: str = ""
    """Reason for which the journal cannot be written; empty otherwise. Memory is then ahead of the disk, and nothing is
    acknowledged."""
    summary_is_old: bool = False
    """Whether summary.json lacks a trained step."""


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
    """Most bytes of arrays sent to a peer ahead of its acknowledgement."""
    run: RunState = field(default_factory=RunState)
    audit: Audit = field(default_factory=Audit)
    failures: Failures = field(default_factory=lambda: Failures(log))
    """Failures of samples since this broker started."""
    failed_handshakes: Counter[str] = field(default_factory=Counter)
    """Failed connection handshakes by cause, counted by the server."""

"""What the broker has in hand. Desks work on it, views show it, and the service brings it together."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from april.broker.journal.journal import Journal
from april.broker.ledger.ledger import Ledger
from april.broker.payloads import Payloads
from april.broker.prompts import PromptBook
from april.broker.schedules.schedule import Schedule
from april.broker.sessions import Sessions
from april.broker.snapshots import Snapshots
from april.broker.telemetry.census import Census
from april.broker.telemetry.lives import Lives
from april.broker.telemetry.recorder import Recorder
from april.config import Config
from april.processes.failures import Failures
from april.security.audit import Audit

log = logging.getLogger(__name__)


@dataclass
class RunState:
    """Whether the run goes on."""

    state: str = "running"
    """running | finished | stopped | failed | read only"""
    over: str = ""
    """why there will be no batch any more; empty while the run goes on"""
    read_only: str = ""
    """why nothing can be written; what is in memory is then ahead of the disk, and nobody is told of it"""
    summary_is_old: bool = False
    """a step was trained that summary.json does not show"""


@dataclass
class Books:
    config: Config
    prompts: PromptBook
    journal: Journal
    snapshots: Snapshots
    ledger: Ledger
    schedule: Schedule
    sessions: Sessions
    payloads: Payloads
    recorder: Recorder
    census: Census
    lives: Lives
    started_at: float
    credit_bytes: int
    """arrays that a peer is sent ahead of what it says has reached it"""
    run: RunState = field(default_factory=RunState)
    audit: Audit = field(default_factory=Audit)
    failures: Failures = field(default_factory=lambda: Failures(log))
    """of samples, since this broker started"""
    failed_handshakes: Counter[str] = field(default_factory=Counter)
    """by cause, as the server sees them"""

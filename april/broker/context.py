"""The broker context: the components of a running broker, shared by the service, its handlers and its views; and
the journal's first record, which pins the settings of the run."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from april import wire
from april.broker.journal.files import JournalError
from april.broker.journal.journal import Journal
from april.broker.ledger.events import RunStarted
from april.broker.ledger.ledger import Ledger
from april.broker.payloads import Payloads
from april.broker.peers import Peers
from april.broker.plan import ledger_rules
from april.broker.prompts import PromptBook
from april.broker.schedules.schedule import Schedule
from april.broker.snapshots import Snapshots
from april.broker.telemetry.census import QueueScanner
from april.broker.telemetry.recorder import Recorder
from april.broker.telemetry.sample_history import SampleHistory
from april.broker.verification import NO_FINGERPRINT, fingerprints
from april.config import Config
from april.util.logs import Failures
from april.wire.security.access import Audit

log = logging.getLogger(__name__)

MessageTable = dict[type[wire.Message], Callable[..., None]]
"""Message type -> handler method for it, called with (handler, peer, received message, time in seconds)."""


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


# --- the journal's first record ---------------------------------------------------------------------------------------


HEADER_KEYS = {
    "run": "run.name",
    "dataset": "data.path",
    "seed": "seed",
    "batch_groups": "schedule.rollout_batch_size",
    "group_size": "schedule.n_samples_per_prompt",
    "max_staleness": "schedule.max_staleness",
    "max_attempts": "broker.attempts",
    "min_group_size": "schedule.min_group_size",
    "max_response_tokens": "sampling.max_response_tokens",
    "support": "sampling.top_k",
    "temperature": "sampling.temperature",
}
"""Field of the journal's first record -> configuration key that determines its value; error messages name the key."""


def make_header(config: Config, prompts: PromptBook) -> RunStarted:
    """Build the first record of a run's journal from its configuration."""
    rules = ledger_rules(config)
    return RunStarted(
        config.run.name,
        prompts.fingerprint,
        config.seed,
        rules.batch_groups,
        rules.group_size,
        rules.max_staleness,
        rules.max_attempts,
        rules.min_group_size,
        rules.max_response_tokens,
        config.sampling.is_cut,
        config.sampling.temperature,
        fingerprints(config, prompts),
    )


def check_header(recorded: RunStarted, wanted: RunStarted) -> None:
    """Compare the settings in the journal's first record with those of the configuration. Raises JournalError if one
    has changed; the error names each changed key with both values."""
    changed = [
        f"key {key!r} was {getattr(recorded, field)!r} and is {getattr(wanted, field)!r} now"
        for field, key in HEADER_KEYS.items()
        if getattr(recorded, field) != getattr(wanted, field)
    ]
    changed += [
        f"key {key!r} was {was!r} and is {wanted.fingerprints[key]!r} now"
        for key, was in recorded.fingerprints.items()
        if was != NO_FINGERPRINT and wanted.fingerprints.get(key, was) != was
    ]
    if changed:
        raise JournalError(
            f"run {recorded.run} belongs to another run's configuration: {'; '.join(changed)}; go on with what it was "
            "begun with, or choose another run.name"
        )

"""The journal's first record: the settings that a run must keep, and the check of a restart against them."""

from april.broker.fingerprints import NONE, fingerprints
from april.broker.journal.files import JournalError
from april.broker.ledger.events import RunStarted
from april.broker.plan import ledger_rules
from april.broker.prompts import PromptBook
from april.config import Config

KEYS = {
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
"""Configuration key of each header field, or of the setting it follows from."""


def make_header(config: Config, prompts: PromptBook) -> RunStarted:
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
    """Raises JournalError if a setting has changed; the error names each key with both values."""
    changed = [
        f"key {key!r} was {getattr(recorded, field)!r} and is {getattr(wanted, field)!r} now"
        for field, key in KEYS.items()
        if getattr(recorded, field) != getattr(wanted, field)
    ]
    changed += [
        f"key {key!r} was {was!r} and is {wanted.fingerprints[key]!r} now"
        for key, was in recorded.fingerprints.items()
        if was != NONE and wanted.fingerprints.get(key, was) != was
    ]
    if changed:
        raise JournalError(
            f"run {recorded.run} belongs to another run's configuration: {'; '.join(changed)}; go on with what it was "
            "begun with, or choose another run.name"
        )

"""Share of prompts that failed for good, which shows a reward function that fails on one kind of label."""

from typing import Any

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import GroupState

DEAD = "dead_sample"


def failed_share(ledger: Ledger) -> dict[str, float]:
    """Shares that failed: `training` of the groups that were trained or discarded for a dead sample, `evaluation` of
    the prompts of the last evaluation; 0 if there were none."""
    dead, trained = ledger.counts[DEAD], ledger.counts[GroupState.TRAINED]
    last: dict[str, Any] = ledger.evaluated[max(ledger.evaluated)] if ledger.evaluated else {}
    failed, done = last.get("failed", 0), last.get("prompts", 0)
    return {"training": share(dead, trained), "evaluation": share(failed, done)}


def share(failed: int, done: int) -> float:
    return round(failed / (failed + done), 6) if failed else 0.0

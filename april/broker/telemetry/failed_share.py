"""The share of prompts that have failed for good: a reward that fails on one kind of label is no quiet success."""

from typing import Any

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import GroupState

DEAD = "dead_sample"


def failed_share(ledger: Ledger) -> dict[str, float]:
    """`training`: of the groups that were trained or given up for a dead sample; `evaluation`: of the prompts of the
    last one. 0 of none."""
    dead, trained = ledger.counts[DEAD], ledger.counts[GroupState.TRAINED]
    last: dict[str, Any] = ledger.evaluated[max(ledger.evaluated)] if ledger.evaluated else {}
    failed, done = last.get("failed", 0), last.get("prompts", 0)
    return {"training": share(dead, trained), "evaluation": share(failed, done)}


def share(failed: int, done: int) -> float:
    return round(failed / (failed + done), 6) if failed else 0.0

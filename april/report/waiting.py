"""A sentence about what a run waits for now, derived from its broker's status."""

from typing import Any

from april.report.facts import count, duration

PHASES = {
    "waiting for weights": "Workers wait for weights",
    "draining": "Drained by an operator: leases are still coming back",
    "drained": "Drained by an operator: nothing is handed out until `april drain --end`",
    "evaluating": "Only the evaluation is being generated",
    "waiting for agents": "Agents have the word; no sample is being generated",
    "finished": "The run is over; workers and learner are leaving",
}
"""Phases in which no group holds up the run, and their sentences."""


def waiting_for(status: dict[str, Any]) -> str:
    """One sentence: `3 of 32 groups wait for w2, the longest has 7,912 tokens, for 41s; the learner is idle.`"""
    bottleneck = status.get("standing") or {}
    if status.get("read_only"):
        return f"The broker can write nothing down: {status['read_only']}."
    learner = (bottleneck.get("learner") or {}).get("does", "absent")
    if not status.get("workers") and status.get("phase") != "finished":
        return f"No worker is connected; {learner_clause(learner)}."
    if sentence := PHASES.get(status.get("phase") or ""):
        return f"{sentence}; {learner_clause(learner)}." if learner != "absent" else f"{sentence}."
    batch, holders = bottleneck.get("batch") or {}, bottleneck.get("holding_up") or []
    if not batch.get("missing"):
        return f"A batch is complete; {learner_clause(learner)}."
    if not holders:
        return f"Nothing of the next batch is open yet; {learner_clause(learner)}."
    return f"{holder_clause(holders[0], batch, len(holders) - 1)}; {learner_clause(learner)}."


def holder_clause(first: dict[str, Any], batch: dict[str, Any], others: int) -> str:
    """The clause about the process that holds most of the batch's missing groups."""
    groups = f"{first['groups']} of {batch['needed']} groups wait"
    if first["groups"] == 1:
        groups = f"1 of {batch['needed']} groups waits"
    if not first["with"]:
        reason = "for a free slot"
    elif first["scoring"] == first["samples"]:
        reason = f"for scores at {first['with']}"
    elif first.get("tool") == first["samples"]:
        reason = f"for tools at {first['with']}"
    else:
        reason = f"for {first['with']}"
    longest = f", the longest has {count(first['tokens'])} tokens" if first["tokens"] else ""
    since = f", for {duration(first['for_s'])}" if first["for_s"] else ""
    more = f", and {others} others have some of them too" if others > 1 else ""
    return f"{groups} {reason}{longest}{since}{more}"


def learner_clause(does: str) -> str:
    return {"idle": "the learner is idle", "training": "the learner trains"}.get(does, "no learner is connected")

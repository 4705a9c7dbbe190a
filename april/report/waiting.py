"""What a run waits for now, in one sentence, from what its broker says of itself."""

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
"""of which there is nothing to say of groups"""


def waiting_for(status: dict[str, Any]) -> str:
    """`3 of 32 groups wait for w2, the longest has 7,912 tokens, for 41s; the learner is idle.`"""
    standing = status.get("standing") or {}
    if status.get("read_only"):
        return f"The broker can write nothing down: {status['read_only']}."
    learner = (standing.get("learner") or {}).get("does", "absent")
    if not status.get("workers") and status.get("phase") != "finished":
        return f"No worker is connected; {of_learner(learner)}."
    if sentence := PHASES.get(status.get("phase") or ""):
        return f"{sentence}; {of_learner(learner)}." if learner != "absent" else f"{sentence}."
    batch, held = standing.get("batch") or {}, standing.get("holding_up") or []
    if not batch.get("missing"):
        return f"A batch is complete; {of_learner(learner)}."
    if not held:
        return f"Nothing of the next batch is open yet; {of_learner(learner)}."
    return f"{of_holder(held[0], batch, len(held) - 1)}; {of_learner(learner)}."


def of_holder(first: dict[str, Any], batch: dict[str, Any], others: int) -> str:
    """Who holds most of the groups that are missing."""
    groups = f"{first['groups']} of {batch['needed']} groups wait"
    if first["groups"] == 1:
        groups = f"1 of {batch['needed']} groups waits"
    if not first["with"]:
        whom = "for a free slot"
    elif first["scoring"] == first["samples"]:
        whom = f"for scores at {first['with']}"
    elif first.get("tool") == first["samples"]:
        whom = f"for tools at {first['with']}"
    else:
        whom = f"for {first['with']}"
    longest = f", the longest has {count(first['tokens'])} tokens" if first["tokens"] else ""
    since = f", for {duration(first['for_s'])}" if first["for_s"] else ""
    more = f", and {others} others have some of them too" if others > 1 else ""
    return f"{groups} {whom}{longest}{since}{more}"


def of_learner(does: str) -> str:
    return {"idle": "the learner is idle", "training": "the learner trains"}.get(does, "no learner is connected")

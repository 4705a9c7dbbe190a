"""Whether a broker does its duty. A pause is healthy and has a reason; a broker that cannot go on is not."""

from dataclasses import dataclass
from typing import Any

from april.broker.books import Books
from april.broker.views.status import learner_silent_s, phase

PAUSES = {
    "waiting for weights": "no worker holds weights that it may sample from; the learner has to publish them",
    "handing out": "nothing is leased, though workers have weights; if that lasts, they have no room",
    "training": "the learner has the next batch to train; generation goes on when its weights arrive",
    "scoring": "everything that was generated waits for its score",
    "draining": "drained by an operator: leases are still coming back",
    "drained": "drained by an operator: nothing is handed out until `april drain --end`",
    "finished": "the run is over; workers and learner are leaving",
}


@dataclass(frozen=True)
class Condition:
    """What the broker's loop knew of itself at one moment."""

    run: str
    state: str
    phase: str
    step: int
    over: str
    read_only: str
    workers: int
    learner_silent_s: float | None
    """since the learner was heard; None without one"""
    lacks_scorers: bool = False
    """scorers are to score, and none is connected"""


def condition(books: Books, now: float) -> Condition:
    return Condition(
        run=books.config.run.name,
        state=books.run.state,
        phase=phase(books),
        step=books.ledger.consumed,
        over=books.run.over,
        read_only=books.run.read_only,
        workers=len(books.sessions.workers()),
        learner_silent_s=learner_silent_s(books, now),
        lacks_scorers=books.ledger.rules.scored_apart and not books.sessions.scorers(),
    )


def judge(condition: Condition, pass_age_s: float, stuck_after_s: float) -> tuple[bool, dict[str, Any]]:
    """(healthy, what /health says); `pass_age_s`: since the broker's loop came round last."""
    if pass_age_s > stuck_after_s:
        reason = f"the broker's loop has not come round for {pass_age_s:.0f} s; its disk may hang, or it may be stopped"
    elif condition.read_only:
        reason = condition.read_only
    elif condition.state == "failed":
        reason = f"the run has failed: {condition.over}"
    else:
        return True, describe(condition, "ok", pause(condition), pass_age_s)
    return False, describe(condition, "failing", reason, pass_age_s)


def pause(condition: Condition) -> str:
    """Why nothing is being generated, or nothing scored, just now; empty otherwise."""
    if condition.phase in ("draining", "drained", "finished"):
        return PAUSES[condition.phase]
    if condition.learner_silent_s is None:
        return "no learner is connected; generation goes on as far as the staleness bound permits"
    if not condition.workers:
        return "no worker is connected"
    if condition.lacks_scorers:
        return "no scorer is connected; responses wait for their scores"
    return PAUSES.get(condition.phase, "")


def describe(condition: Condition, status: str, reason: str, pass_age_s: float) -> dict[str, Any]:
    return {
        "status": status,
        "reason": reason,
        "run": condition.run,
        "state": condition.state,
        "phase": condition.phase,
        "step": condition.step,
        "workers": condition.workers,
        "learner_silent_s": condition.learner_silent_s,
        "last_pass_age_s": round(pass_age_s, 1),
    }

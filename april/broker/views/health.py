"""Health of a broker. A pause is healthy and has a reason; a broker that cannot continue is not healthy."""

from dataclasses import dataclass
from typing import Any

from april.broker.books import BrokerContext
from april.broker.views.status import learner_silent_s, phase

PAUSE_REASONS = {
    "waiting for weights": "no worker holds weights that it may sample from; the learner has to publish them",
    "handing out": "nothing is leased, though workers have weights; if that lasts, they have no room",
    "training": "the learner has the next batch to train; generation goes on when its weights arrive",
    "scoring": "everything that was generated waits for its score",
    "draining": "drained by an operator: leases are still coming back",
    "drained": "drained by an operator: nothing is handed out until `april drain --end`",
    "finished": "the run is over; workers and learner are leaving",
}


@dataclass(frozen=True)
class HealthSnapshot:
    """State of the broker at one moment, as far as its health depends on it."""

    run: str
    state: str
    phase: str
    step: int
    over: str
    read_only: str
    workers: int
    learner_silent_s: float | None
    """Seconds since the learner's last message; None without a learner."""
    lacks_scorers: bool = False
    """Whether scorers are needed and none is connected."""


def health_snapshot(context: BrokerContext, now: float) -> HealthSnapshot:
    return HealthSnapshot(
        run=context.config.run.name,
        state=context.run.state,
        phase=phase(context),
        step=context.ledger.consumed,
        over=context.run.over,
        read_only=context.run.read_only,
        workers=len(context.peers.workers()),
        learner_silent_s=learner_silent_s(context, now),
        lacks_scorers=context.ledger.rules.scored_apart and not context.peers.scorers(),
    )


def judge(health: HealthSnapshot, pass_age_s: float, stuck_after_s: float) -> tuple[bool, dict[str, Any]]:
    """Returns (healthy, body of /health); `pass_age_s`: seconds since the last pass of the broker's loop."""
    if pass_age_s > stuck_after_s:
        reason = f"the broker's loop has not come round for {pass_age_s:.0f} s; its disk may hang, or it may be stopped"
    elif health.read_only:
        reason = health.read_only
    elif health.state == "failed":
        reason = f"the run has failed: {health.over}"
    else:
        return True, describe(health, "ok", pause(health), pass_age_s)
    return False, describe(health, "failing", reason, pass_age_s)


def pause(health: HealthSnapshot) -> str:
    """Why nothing is generated or scored at the moment; empty if there is no pause."""
    if health.phase in ("draining", "drained", "finished"):
        return PAUSE_REASONS[health.phase]
    if health.learner_silent_s is None:
        return "no learner is connected; generation goes on as far as the staleness bound permits"
    if not health.workers:
        return "no worker is connected"
    if health.lacks_scorers:
        return "no scorer is connected; responses wait for their scores"
    return PAUSE_REASONS.get(health.phase, "")


def describe(health: HealthSnapshot, status: str, reason: str, pass_age_s: float) -> dict[str, Any]:
    return {
        "status": status,
        "reason": reason,
        "run": health.run,
        "state": health.state,
        "phase": health.phase,
        "step": health.step,
        "workers": health.workers,
        "learner_silent_s": health.learner_silent_s,
        "last_pass_age_s": round(pass_age_s, 1),
    }

"""What a live broker says about its run: the dictionary behind the terminal view."""

from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from april.broker.samples import GroupState

if TYPE_CHECKING:
    from april.broker.service import Service

ETA_STEPS = 10
"""the newest steps, whose pace the estimate takes"""


def describe_status(service: "Service", now: float) -> np.ndarray:
    """uint8 [bytes]: JSON."""
    return np.frombuffer(orjson.dumps(status(service, now)), np.uint8)


def status(service: "Service", now: float) -> dict[str, Any]:
    ledger, rules = service.ledger, service.schedule.rules
    recent = service.recent_steps(ETA_STEPS)
    last = recent[-1] if recent else {}
    return {
        "run": service.config.run.name,
        "state": service.state,
        "step": ledger.consumed,
        "max_steps": rules.max_steps,
        "round": ledger.round,
        "groups_complete": len(ledger.ready) if ledger.round_open else rules.batch_groups,
        "groups_needed": rules.batch_groups,
        "groups_open": ledger.counts[GroupState.OPEN],
        "partials_waiting": ledger.partials_waiting,
        "leased": ledger.generating,
        "phase": phase(service),
        "elapsed_s": round(now - service.started_at, 1),
        "eta_s": eta_s(recent, rules.max_steps - ledger.consumed),
        "reward": last.get("reward"),
        "rollout_tokens_per_s": last.get("rollout_tokens_per_s", 0.0),
        "staleness": last.get("staleness", {"mean": 0.0, "max": 0}),
        "evaluation": list(service.recorder.evaluations.values()),
        "workers": [
            {
                "name": session.name,
                "version": str(session.version) if session.version else "loading",
                "slots": max(0, session.capacity - service.config.worker.prefetch),
                "leased": ledger.load[session.uid, False] + ledger.load[session.uid, True],
                "tokens_per_s": round(session.tokens_per_s(now), 1),
            }
            for session in sorted(service.sessions.workers(), key=lambda session: session.name)
        ],
        "tokens": service.recorder.account(ledger),
        "ledger_closed": ledger.closed,
        "refusals": dict(service.sessions.refusals),
        "failed_handshakes": dict(service.failed_handshakes),
    }


def phase(service: "Service") -> str:
    ledger = service.ledger
    floor = max(0, service.schedule.floor(ledger))
    if service.over:
        return "finished"
    if ledger.generating:
        return "generating"
    if any(count for (_, evaluation), count in ledger.load.items() if evaluation):
        return "evaluating"
    if ledger.consumed < ledger.next_step:
        return "training"
    if not any(session.version and session.version.step >= floor for session in service.sessions.workers()):
        return "waiting for weights"
    return "generating"


def eta_s(recent: list[dict[str, Any]], steps_left: int) -> float | None:
    if len(recent) < 2:
        return None
    pace_s = (recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1)
    return round(pace_s * steps_left, 1)

"""What a live broker says about its run: the dictionary behind the terminal view."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from april.broker.ledger import Ledger
from april.broker.samples import GroupState

if TYPE_CHECKING:
    from april.broker.service import Service


def status(service: "Service", now: float) -> dict[str, Any]:
    ledger, schedule = service.ledger, service.config.schedule
    last = service.recorder.newest
    return {
        "run": service.config.run.name,
        "state": service.state,
        "read_only": service.read_only,
        "step": ledger.consumed,
        "max_steps": schedule.max_steps,
        "round": ledger.round,
        "groups_complete": len(ledger.ready) if ledger.round_open else schedule.rollout_batch_size,
        "groups_needed": schedule.rollout_batch_size,
        "groups_open": ledger.counts[GroupState.OPEN],
        "partials_waiting": ledger.partials_waiting,
        "leased": ledger.generating,
        "phase": phase(service),
        "elapsed_s": round(now - service.started_at, 1),
        "eta_s": eta_s(service.recorder.step_times, schedule.max_steps - ledger.consumed),
        "reward": last.get("reward"),
        "rollout_tokens_per_s": last.get("rollout_tokens_per_s", 0.0),
        "staleness": last.get("staleness", {"mean": 0.0, "max": 0}),
        "evaluation": list(ledger.evaluated.values()),
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
        "scorers": [
            {"name": session.name, "capacity": session.capacity, "leased": service.scorers.leases(session)}
            for session in sorted(service.sessions.scorers(), key=lambda session: session.name)
        ],
        "tokens": service.recorder.account(ledger),
        "ledger_closed": ledger.closed,
        "refusals": dict(service.sessions.refusals),
        "failed_handshakes": dict(service.failed_handshakes),
        "drain": drain_state(ledger),
        "leases": len(ledger.leases),
        "queues": dataclasses.asdict(service.census.latest),
        "sessions": dict(Counter(session.role for session in service.sessions.by_id.values())),
        "dead_letters": {
            "total": ledger.dead_letters.total,
            "to_requeue": len(ledger.dead_letters.discarded_groups()),
            "waiting": len(ledger.dead_letters.waiting),
        },
        "data": service.prompts.counts(),
        "replays": dict(service.recorder.replays),
        "starts": {"broker": ledger.epoch, "learner": ledger.branch + 1},
        "learner_silent_s": learner_silent_s(service, now),
    }


def learner_silent_s(service: "Service", now: float) -> float | None:
    """Since the learner was heard, which speaks every second but while it trains; None without one."""
    session = service.sessions.of_role("learner")
    return round(now - session.last_seen, 1) if session else None


def drain_state(ledger: Ledger) -> str:
    """draining: leases are still to come back; drained: none is left and none is given; otherwise empty."""
    if not ledger.draining:
        return ""
    return "draining" if ledger.leases else "drained"


def phase(service: "Service") -> str:
    ledger = service.ledger
    floor = service.schedule.floor(ledger)
    if service.over:
        return "finished"
    if service.read_only:
        return "read-only"
    if ledger.draining:
        return drain_state(ledger)
    if ledger.generating:
        return "generating, training" if ledger.consumed < ledger.next_step else "generating"
    if any(count for (_, evaluation), count in ledger.load.items() if evaluation):
        return "evaluating"
    if ledger.consumed < ledger.next_step:
        return "training"
    if ledger.leases or ledger.queue.has_scoring:
        return "scoring"
    if not any(session.version and session.version.step >= floor for session in service.sessions.workers()):
        return "waiting for weights"
    return "handing out"


def eta_s(step_times: Sequence[float], steps_left: int) -> float | None:
    if len(step_times) < 2:
        return None
    pace_s = (step_times[-1] - step_times[0]) / (len(step_times) - 1)
    return round(pace_s * steps_left, 1)

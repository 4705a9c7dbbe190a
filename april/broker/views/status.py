"""The status of a run, the dictionary that `april status`, the live view and the dashboard read; and the health of its
broker, which /health answers."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from april.broker.context import BrokerContext
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import GroupState, SampleState
from april.broker.peers import Peer
from april.broker.views.bottleneck import Bottleneck, slot_usage


def status(context: BrokerContext, now: float) -> dict[str, Any]:
    ledger, schedule = context.ledger, context.config.schedule
    last = context.recorder.newest
    return {
        "run": context.config.run.name,
        "state": context.run.state,
        "read_only": context.run.read_only,
        "step": ledger.consumed,
        "max_steps": schedule.max_steps,
        "round": ledger.round,
        "groups_complete": len(ledger.ready) if ledger.round_open else schedule.rollout_batch_size,
        "groups_needed": schedule.rollout_batch_size,
        "groups_open": ledger.counts[GroupState.OPEN],
        "partials_waiting": ledger.open_samples.count(SampleState.PARTIAL),
        "leased": ledger.generating,
        "phase": phase(context),
        "elapsed_s": round(now - context.started_at, 1),
        "eta_s": eta_s(context.recorder.step_times, schedule.max_steps - ledger.consumed),
        "reward": last.get("reward"),
        "rollout_tokens_per_s": last.get("rollout_tokens_per_s", 0.0),
        "staleness": last.get("staleness", {"mean": 0.0, "max": 0}),
        "evaluation": list(ledger.evaluated.values()),
        "workers": [
            {
                "name": peer.name,
                "version": str(peer.version) if peer.version else "loading",
                "slots": max(0, peer.capacity - context.config.worker.prefetch),
                "leased": ledger.load[peer.uid, False] + ledger.load[peer.uid, True],
                "tokens_per_s": round(peer.tokens_per_s(now), 1),
                "gap": last.get("engine_gaps", {}).get(peer.name),
                "does": slot_usage(context, peer),
                "loop": loop_state(peer, now),
            }
            for peer in sorted(context.peers.workers(), key=lambda peer: peer.name)
        ],
        "scorers": [
            {"name": peer.name, "capacity": peer.capacity, "leased": len(ledger.held.get(peer.uid, ()))}
            for peer in sorted(context.peers.scorers(), key=lambda peer: peer.name)
        ],
        "agents": [
            {"name": peer.name, "capacity": peer.capacity, "leased": len(ledger.held.get(peer.uid, ()))}
            for peer in sorted(context.peers.with_role("agents"), key=lambda peer: peer.name)
        ],
        "tokens": context.recorder.account(ledger),
        "ledger_closed": ledger.closed,
        "refusals": dict(context.peers.refusals),
        "failures": {
            cause: {"count": count, "last": context.failures.last[cause]}
            for cause, count in context.failures.by_cause.items()
        },
        "failed_handshakes": dict(context.failed_handshakes),
        "drain": drain_state(ledger),
        "leases": len(ledger.leases),
        "queues": dataclasses.asdict(context.queue_scanner.latest),
        "sessions": dict(Counter(peer.role for peer in context.peers.by_id.values())),
        "dead_letters": {
            "total": ledger.dead_letters.total,
            "to_requeue": len(ledger.dead_letters.discarded_groups()),
            "waiting": len(ledger.dead_letters.requeued),
        },
        "data": context.prompts.counts(),
        "replays": dict(context.recorder.replays),
        "starts": {"broker": ledger.starts, "learner": ledger.incarnation + 1},
        "learner_silent_s": learner_silent_s(context, now),
        "standing": Bottleneck(context, now).to_json(),
        "learner_loop": loop_state(context.peers.learner(), now),
        "alarms": context.recorder.alarms.raised,
        "step_alarms": last.get("alarms", []),
    }


def learner_silent_s(context: BrokerContext, now: float) -> float | None:
    """Seconds since the learner's last message (the learner sends one every second); None without a learner."""
    peer = context.peers.learner()
    return round(now - peer.last_seen, 1) if peer else None


def loop_state(peer: Peer | None, now: float) -> dict[str, Any] | None:
    """Position of a peer's main loop and the seconds it has been there; None if the peer does not report it."""
    if peer is None or not peer.loop_position:
        return None
    _, position, for_s, usual_s = peer.loop(now)
    return {"at": position, "for_s": round(for_s, 1), "usual_s": round(usual_s, 3)}


def drain_state(ledger: Ledger) -> str:
    """State of a drain. draining: some leases have not been handed back yet; drained: none is left; empty: no drain.
    Leases of agent sessions do not count, as they stay."""
    if not ledger.draining:
        return ""
    return "draining" if any(not lease.agent for lease in ledger.leases.values()) else "drained"


def phase(context: BrokerContext) -> str:
    """Describe in a few words what the run does at the moment."""
    ledger = context.ledger
    floor = context.schedule.floor(ledger)
    if context.run.over:
        return "finished"
    if context.run.read_only:
        return "read-only"
    if ledger.draining:
        return drain_state(ledger)
    if ledger.generating:
        return "generating, training" if ledger.consumed < ledger.next_step else "generating"
    if any(count for (_, evaluation), count in ledger.load.items() if evaluation):
        return "evaluating"
    if ledger.consumed < ledger.next_step:
        return "training"
    if ledger.queue.has_scoring or any(not lease.agent for lease in ledger.leases.values()):
        return "scoring"
    if ledger.leases:
        return "waiting for agents"
    if not any(peer.version and peer.version.step >= floor for peer in context.peers.workers()):
        return "waiting for weights"
    return "handing out"


def eta_s(step_times: Sequence[float], steps_left: int) -> float | None:
    """Estimated seconds for the remaining steps, at the speed of the newest ones; None before two steps."""
    if len(step_times) < 2:
        return None
    step_s = (step_times[-1] - step_times[0]) / (len(step_times) - 1)
    return round(step_s * steps_left, 1)


# --- health -----------------------------------------------------------------------------------------------------------


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


def judge_health(health: HealthSnapshot, pass_age_s: float, stuck_after_s: float) -> tuple[bool, dict[str, Any]]:
    """Judge the broker's health: (healthy, body of /health). `pass_age_s`: seconds since the last pass of the broker's
    loop."""
    if pass_age_s > stuck_after_s:
        reason = f"the broker's loop has not come round for {pass_age_s:.0f} s; its disk may hang, or it may be stopped"
    elif health.read_only:
        reason = health.read_only
    elif health.state == "failed":
        reason = f"the run has failed: {health.over}"
    else:
        return True, health_body(health, "ok", pause_reason(health), pass_age_s)
    return False, health_body(health, "failing", reason, pass_age_s)


def pause_reason(health: HealthSnapshot) -> str:
    """Reason for which nothing is generated or scored at the moment; empty if generation goes on."""
    if health.phase in ("draining", "drained", "finished"):
        return PAUSE_REASONS[health.phase]
    if health.learner_silent_s is None:
        return "no learner is connected; generation goes on as far as the staleness bound permits"
    if not health.workers:
        return "no worker is connected"
    if health.lacks_scorers:
        return "no scorer is connected; responses wait for their scores"
    return PAUSE_REASONS.get(health.phase, "")


def health_body(health: HealthSnapshot, status: str, reason: str, pass_age_s: float) -> dict[str, Any]:
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

"""What a live broker says about its run: the dictionary behind the terminal view."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from april.broker.books import Books
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import GroupState, SampleState
from april.broker.sessions import Session
from april.broker.views.standing import Standing, slots_of


def status(books: Books, now: float) -> dict[str, Any]:
    ledger, schedule = books.ledger, books.config.schedule
    last = books.recorder.newest
    return {
        "run": books.config.run.name,
        "state": books.run.state,
        "read_only": books.run.read_only,
        "step": ledger.consumed,
        "max_steps": schedule.max_steps,
        "round": ledger.round,
        "groups_complete": len(ledger.ready) if ledger.round_open else schedule.rollout_batch_size,
        "groups_needed": schedule.rollout_batch_size,
        "groups_open": ledger.counts[GroupState.OPEN],
        "partials_waiting": ledger.open_samples.count(SampleState.PARTIAL),
        "leased": ledger.generating,
        "phase": phase(books),
        "elapsed_s": round(now - books.started_at, 1),
        "eta_s": eta_s(books.recorder.step_times, schedule.max_steps - ledger.consumed),
        "reward": last.get("reward"),
        "rollout_tokens_per_s": last.get("rollout_tokens_per_s", 0.0),
        "staleness": last.get("staleness", {"mean": 0.0, "max": 0}),
        "evaluation": list(ledger.evaluated.values()),
        "workers": [
            {
                "name": session.name,
                "version": str(session.version) if session.version else "loading",
                "slots": max(0, session.capacity - books.config.worker.prefetch),
                "leased": ledger.load[session.uid, False] + ledger.load[session.uid, True],
                "tokens_per_s": round(session.tokens_per_s(now), 1),
                "gap": last.get("engine_gaps", {}).get(session.name),
                "does": slots_of(books, session),
                "loop": loop(session, now),
            }
            for session in sorted(books.sessions.workers(), key=lambda session: session.name)
        ],
        "scorers": [
            {"name": session.name, "capacity": session.capacity, "leased": len(ledger.held.get(session.uid, ()))}
            for session in sorted(books.sessions.scorers(), key=lambda session: session.name)
        ],
        "agents": [
            {"name": session.name, "capacity": session.capacity, "leased": len(ledger.held.get(session.uid, ()))}
            for session in sorted(books.sessions.of("agents"), key=lambda session: session.name)
        ],
        "tokens": books.recorder.account(ledger),
        "ledger_closed": ledger.closed,
        "refusals": dict(books.sessions.refusals),
        "failures": {
            cause: {"count": count, "last": books.failures.last[cause]}
            for cause, count in books.failures.by_cause.items()
        },
        "failed_handshakes": dict(books.failed_handshakes),
        "drain": drain_state(ledger),
        "leases": len(ledger.leases),
        "queues": dataclasses.asdict(books.census.latest),
        "sessions": dict(Counter(session.role for session in books.sessions.by_id.values())),
        "dead_letters": {
            "total": ledger.dead_letters.total,
            "to_requeue": len(ledger.dead_letters.discarded_groups()),
            "waiting": len(ledger.dead_letters.waiting),
        },
        "data": books.prompts.counts(),
        "replays": dict(books.recorder.replays),
        "starts": {"broker": ledger.starts, "learner": ledger.branch + 1},
        "learner_silent_s": learner_silent_s(books, now),
        "standing": Standing(books, now).to_json(),
        "learner_loop": loop(books.sessions.of_role("learner"), now),
        "alarms": books.recorder.alarms.raised,
        "step_alarms": last.get("alarms", []),
    }


def learner_silent_s(books: Books, now: float) -> float | None:
    """Since the learner was heard, which speaks every second; None without one."""
    session = books.sessions.of_role("learner")
    return round(now - session.last_seen, 1) if session else None


def loop(session: Session | None, now: float) -> dict[str, Any] | None:
    """Where its main loop is, and for how long; None where nobody says."""
    if session is None or not session.place:
        return None
    _, place, for_s, usual_s = session.stay(now)
    return {"at": place, "for_s": round(for_s, 1), "usual_s": round(usual_s, 3)}


def drain_state(ledger: Ledger) -> str:
    """draining: leases are still to come back; drained: none is left and none is given; otherwise empty. Sessions of
    agents stay where they are."""
    if not ledger.draining:
        return ""
    return "draining" if any(not lease.agent for lease in ledger.leases.values()) else "drained"


def phase(books: Books) -> str:
    ledger = books.ledger
    floor = books.schedule.floor(ledger)
    if books.run.over:
        return "finished"
    if books.run.read_only:
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
    if not any(session.version and session.version.step >= floor for session in books.sessions.workers()):
        return "waiting for weights"
    return "handing out"


def eta_s(step_times: Sequence[float], steps_left: int) -> float | None:
    if len(step_times) < 2:
        return None
    pace_s = (step_times[-1] - step_times[0]) / (len(step_times) - 1)
    return round(pace_s * steps_left, 1)

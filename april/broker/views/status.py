"""Status of a run: one struct, `RunStatus`, read from the broker's components at one moment. As JSON it is the answer
to `april status`, the live view and the dashboard; /metrics and /health are made from it in `metrics.py`.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from april import wire
from april.broker.context import BrokerContext
from april.broker.journal.files import refused_reads
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import ENDED, GroupState, Sample, SampleState
from april.broker.peers import Peer
from april.broker.telemetry.census import QueueSnapshot
from april.broker.telemetry.recorder import discarded_groups

USES = ("training", "evaluation")


class HolderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A connected process that holds leases: a scorer or an agents process."""

    name: str
    capacity: int
    """Most leases that it holds at once."""
    leased: int
    """Number of leases that it holds; for a worker only those to generate, without those to score."""


class WorkerStatus(HolderStatus, frozen=True, kw_only=True):
    """A connected worker."""

    uid: str
    version: str
    """Policy version of the worker's weights; "loading" before the first."""
    policy_step: int | None
    slots: int
    """Samples that the worker generates at once: its capacity without the samples that it prefetches."""
    tokens_per_s: float
    """Tokens accepted from the worker per second, over the last `SPEED_WINDOW_S` seconds."""
    acknowledged: int
    """Tokens that the broker has acknowledged to the worker as on disk."""
    gap: dict[str, float] | None
    """How far the worker's log-probabilities are from the learner's, as in `RunStatus.engine_gaps`; None if the newest
    step has no figures of this worker."""
    does: dict[str, Any] | None
    """Use of the worker's slots, as `slot_usage` describes it; None in a status read with `bottleneck=False`."""
    loop: dict[str, Any] | None
    """Position of the worker's main loop, as `loop_state` describes it; None if the worker does not report it."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a run at one moment. It is not changed afterwards, so that other threads may read it."""

    at: float
    """Time at which the status was read, Unix seconds."""
    run: str
    state: str
    over: str
    read_only: str
    phase: str
    """Current activity of the run, in a few words."""
    starts: dict[str, int]
    elapsed_s: float
    """Seconds since the broker started."""
    eta_s: float | None
    """Estimated seconds for the remaining steps; None before two steps."""

    step: int
    """Policy step: number of batches that the learner has consumed."""
    max_steps: int
    delivered: int
    """Number of batches made so far: the learner has trained them or may fetch them."""
    durable: int
    """Policy step of the learner's newest checkpoint; 0 without one."""
    replays: dict[str, int]
    reward: float | None
    """Mean reward of the newest recorded step; None before the first."""
    rollout_tokens_per_s: float
    staleness: dict[str, Any]
    """Staleness of the newest step's tokens, in steps: `mean` and `max` and, once a step is recorded, the number of
    tokens at each staleness (`tokens_by_age`) and the largest permitted one (`bound`)."""
    max_staleness: int
    length_drift: dict[str, Any] | None
    engine_gaps: dict[str, dict[str, float]]
    """By worker, for the newest step: mean and largest gap (`mean`, `largest`, nats) between the worker's and the
    learner's log-probabilities of the same tokens, number of these tokens (`tokens`), policy step that sampled them
    (`step`) and its age in steps (`age`)."""
    evaluation: list[dict[str, Any]]

    round: int
    groups_complete: int
    groups_needed: int
    groups_open: int
    groups: dict[str, int]
    """Number of training groups by state: open, ready, delivered."""
    groups_discarded: dict[str, int]
    partials_waiting: int
    leases: int
    leased: int
    """Number of leases under which training samples are generated."""
    evaluating: int
    """Number of leases under which evaluation samples are generated."""
    resumed: dict[str, int]
    moves: dict[str, int]
    drain: str
    queues: QueueSnapshot
    dead_letters: dict[str, int]
    data: dict[str, int]

    tokens: dict[str, Any]
    ledger_closed: bool
    accepted: dict[str, dict[str, int]]
    """By use (`training` or `evaluation`): number of chunks and of tokens that workers have reported since the broker
    started, and that are on disk."""
    journal_bytes: int
    failed_snapshots: int
    refused_reads: int
    failed_sinks: list[str]

    workers: list[WorkerStatus]
    scorers: list[HolderStatus]
    lacks_scorers: bool
    """Whether scorers are needed and none is connected."""
    agents: list[HolderStatus]
    sessions: dict[str, int]
    learner_silent_s: float | None
    """Seconds since the learner's last message (it sends one every second); None if no learner is connected."""
    learner_loop: dict[str, Any] | None
    refusals: dict[str, int]
    failures: dict[str, dict[str, Any]]
    failed_handshakes: dict[str, int]
    environment_failures: int

    alarms: list[dict[str, str]]
    """Alarms whose condition holds now, between steps, and alarms that failed: `name`, `sentence` and `page` of
    each."""
    step_alarms: list[dict[str, str]]
    """Alarms that the record of the newest step raised: `name`, `sentence` and `page` of each."""
    alarm_names: list[str]
    standing: dict[str, Any] | None
    """What delays the next batch, as `Bottleneck` describes it; None in a status read with `bottleneck=False`."""


def read_status(context: BrokerContext, now: float, bottleneck: bool = True) -> RunStatus:
    """Read the status of a run. `bottleneck`: also find what delays the next batch, which takes time in proportion to
    the open groups."""
    ledger, recorder, schedule = context.ledger, context.recorder, context.config.schedule
    peers, letters, last = context.peers, ledger.dead_letters, recorder.newest
    engine_gaps, learner = last.get("engine_gaps", {}), peers.learner()
    return RunStatus(
        at=now,
        run=context.config.run.name,
        state=context.run.state,
        over=context.run.over,
        read_only=context.run.read_only,
        phase=phase(context),
        starts={"broker": ledger.serials.starts, "learner": ledger.learner.incarnation + 1},
        elapsed_s=round(now - context.started_at, 1),
        eta_s=eta_s(recorder.step_times, steps_left(context)),
        step=ledger.steps.consumed,
        max_steps=schedule.max_steps,
        delivered=ledger.steps.next,
        durable=ledger.steps.durable,
        replays=dict(recorder.replays),
        reward=last.get("reward"),
        rollout_tokens_per_s=last.get("rollout_tokens_per_s", 0.0),
        staleness=last.get("staleness", {"mean": 0.0, "max": 0}),
        max_staleness=ledger.rules.max_staleness,
        length_drift=last.get("lengths", {}).get("drift"),
        engine_gaps=engine_gaps,
        evaluation=list(ledger.evaluated.values()),
        round=ledger.rounds.number,
        groups_complete=len(ledger.ready) if ledger.rounds.open else schedule.rollout_batch_size,
        groups_needed=schedule.rollout_batch_size,
        groups_open=ledger.account.counts[GroupState.OPEN],
        groups={state: ledger.account.counts[state] for state in ("open", "ready", "delivered")},
        groups_discarded=discarded_groups(ledger),
        partials_waiting=ledger.open_samples.count(SampleState.PARTIAL),
        leases=len(ledger.leases),
        leased=ledger.leases.generating,
        evaluating=evaluating(ledger),
        resumed={kind: ledger.account.resumed[kind] for kind in ("cached", "moved")},
        moves={kind: recorder.moves[kind] for kind in ("asked", "done")},
        drain=drain_state(ledger),
        queues=context.queue_scanner.latest,
        dead_letters={
            "total": letters.total,
            "to_requeue": len(letters.discarded_groups()),
            "waiting": len(letters.requeued),
        },
        data=context.prompts.counts(),
        tokens=recorder.account(ledger),
        ledger_closed=ledger.account.closed,
        accepted={
            what: {use: recorder.acknowledged.get((what, use), 0) for use in USES} for what in ("chunks", "tokens")
        },
        journal_bytes=context.journal.bytes_on_disk,
        failed_snapshots=context.snapshots.failures,
        refused_reads=refused_reads.count,
        failed_sinks=list(recorder.sinks.failed),
        workers=[
            WorkerStatus(
                name=peer.name,
                capacity=peer.capacity,
                leased=ledger.leases.load[peer.uid, False] + ledger.leases.load[peer.uid, True],
                uid=peer.uid,
                version=str(peer.version) if peer.version else "loading",
                policy_step=peer.version.step if peer.version else None,
                slots=max(0, peer.capacity - context.config.worker.prefetch),
                tokens_per_s=round(peer.tokens_per_s(now), 1),
                acknowledged=peers.tallies[peer.uid].acknowledged,
                gap=engine_gaps.get(peer.name),
                does=slot_usage(context, peer) if bottleneck else None,
                loop=loop_state(peer, now),
            )
            for peer in sorted(peers.workers(), key=lambda peer: peer.name)
        ],
        scorers=holders(context, "scorer"),
        lacks_scorers=ledger.rules.scored_apart and not peers.scorers(),
        agents=holders(context, "agents"),
        sessions=dict(Counter(peer.role for peer in peers.by_id.values())),
        learner_silent_s=silent_s(learner, now),
        learner_loop=loop_state(learner, now),
        refusals=dict(peers.refusals),
        failures={
            cause: {"count": count, "last": context.failures.last[cause]}
            for cause, count in context.failures.by_cause.items()
        },
        failed_handshakes=dict(context.failed_handshakes),
        environment_failures=recorder.environment["failed"],
        alarms=recorder.alarms.raised,
        step_alarms=last.get("alarms", []),
        alarm_names=recorder.alarms.names,
        standing=Bottleneck(context, now).describe() if bottleneck else None,
    )


def holders(context: BrokerContext, role: str) -> list[HolderStatus]:
    """The connected lease holders of a role, sorted by name."""
    return [
        HolderStatus(name=peer.name, capacity=peer.capacity, leased=len(context.ledger.leases.held.get(peer.uid, ())))
        for peer in sorted(context.peers.with_role(role), key=lambda peer: peer.name)
    ]


def evaluating(ledger: Ledger) -> int:
    """Number of leases to generate evaluation samples."""
    return sum(count for (_, evaluation), count in ledger.leases.load.items() if evaluation)


def silent_s(peer: Peer | None, now: float) -> float | None:
    """Seconds since a peer's last message; None if there is no peer."""
    return round(now - peer.last_seen, 1) if peer else None


def loop_state(peer: Peer | None, now: float) -> dict[str, Any] | None:
    """Stage that a peer's main loop is in (`at`), the seconds since it entered the stage (`for_s`), and the median of
    the seconds that it has stayed there before (`usual_s`); None if the peer does not report it."""
    if peer is None or not peer.loop_position:
        return None
    _, position, for_s, usual_s = peer.loop(now)
    return {"at": position, "for_s": round(for_s, 1), "usual_s": round(usual_s, 3)}


def drain_state(ledger: Ledger) -> str:
    """State of a drain: `draining` while some leases have not been handed back, `drained` when none is left, "" without
    a drain. Leases of agent sessions do not count, as they stay."""
    if not ledger.rounds.draining:
        return ""
    return "draining" if any(not lease.agent for lease in ledger.leases.values()) else "drained"


def phase(context: BrokerContext) -> str:
    """Describe in a few words what the run does at the moment."""
    ledger = context.ledger
    if context.run.over:
        return "finished"
    if context.run.read_only:
        return "read-only"
    if ledger.rounds.draining:
        return drain_state(ledger)
    training = "training" if ledger.steps.consumed < ledger.steps.next else ""
    if training and ledger.steps.consumed < ledger.steps.frontier:
        training = f"training again, up to step {ledger.steps.frontier}"
    if ledger.leases.generating:
        return ", ".join(filter(None, ["generating", training]))
    if evaluating(ledger):
        return "evaluating"
    if training:
        return training
    if ledger.queue.has_scoring or any(not lease.agent for lease in ledger.leases.values()):
        return "scoring"
    if ledger.leases:
        return "waiting for agents"
    floor = context.schedule.floor(ledger)
    if not any(peer.version and peer.version.step >= floor for peer in context.peers.workers()):
        return "waiting for weights"
    return "handing out"


def steps_left(context: BrokerContext) -> int:
    """Upper limit of the number of steps still to be trained: those up to `schedule.max_steps`, and no more than the
    remaining prompts suffice for."""
    ledger, schedule = context.ledger, context.config.schedule
    wanted, prompts = schedule.max_steps - ledger.steps.consumed, context.prompts.remaining(ledger.prompts.next)
    if prompts is None:
        return wanted
    return min(wanted, (len(ledger.groups) + prompts) // schedule.rollout_batch_size)


def eta_s(step_times: Sequence[float], steps_left: int) -> float | None:
    """Estimated seconds for the remaining steps, at the speed of the newest steps, trained at `step_times` (seconds);
    None before two steps."""
    if len(step_times) < 2:
        return None
    step_s = (step_times[-1] - step_times[0]) / (len(step_times) - 1)
    return round(step_s * steps_left, 1)


# --- the bottleneck ---------------------------------------------------------------------------------------------------


MOST_GROUPS = 64
"""Most groups that `Bottleneck` describes; the groups closest to complete come first."""
MOST_SAMPLES = 8
"""Most samples that `Bottleneck` describes of a group; the longest come first."""
MOST_SILENT = 32
"""Most silent leases that `Bottleneck` describes; those that expire next come first."""
RENEWALS_MISSED = 0.5
"""Share of `broker.lease_s` without a renewal after which a lease counts as silent."""
HOLDER_FIGURES = ("groups", "samples", "scoring", "tool", "tokens", "for_s")


class Bottleneck:
    """Cause of delay of the next batch: the groups it waits for, where their stragglers are, and which leases have
    missed renewals. Computed from the broker's context at one moment."""

    def __init__(self, context: BrokerContext, now: float):
        self.context, self.ledger, self.now = context, context.ledger, now
        self.names = {peer.uid: peer.name for peer in context.peers.by_id.values()}
        self.at_tool = {
            lease_id for peer in context.peers.workers() if peer.slots for lease_id in peer.slots.tool_lease_ids
        }

    def describe(self) -> dict[str, Any]:
        """The bottleneck as plain data for JSON, which the status has under the key `standing`."""
        ledger, steps, learner = self.ledger, self.ledger.steps, self.context.peers.learner()
        unfinished = [
            group
            for group in ledger.groups.values()
            if group.state is GroupState.OPEN and group.pending_samples and not group.evaluation
        ]
        needed = self.context.config.schedule.rollout_batch_size
        missing = max(0, needed - len(ledger.ready))
        nearest = heapq.nsmallest(missing, unfinished, key=lambda group: (group.pending_samples, group.id))
        stragglers = [
            [self._describe(sample) for sample in group.samples if sample.state not in ENDED] for group in nearest
        ]
        return {
            "at": self.now,
            "batch": {
                "step": steps.next + 1,
                "needed": needed,
                "ready": len(ledger.ready),
                "missing": missing,
                "open": len(unfinished),
            },
            "queue": {use: ledger.open_samples.by_state(use == "evaluation") for use in USES},
            "groups": [
                {
                    "group": group.id,
                    "opened_at": group.opened_at,
                    "samples": len(group.samples),
                    "left": len(samples),
                    "waits_for": heapq.nlargest(MOST_SAMPLES, samples, key=lambda sample: sample["tokens"]),
                }
                for group, samples in zip(nearest[:MOST_GROUPS], stragglers, strict=False)
            ],
            "holding_up": sum_by_holder(stragglers),
            "learner": {
                "does": "absent" if learner is None else "training" if steps.consumed < steps.next else "idle",
                "step": steps.consumed,
                "silent_s": silent_s(learner, self.now),
            },
            "silent": self._silent(),
            "journal_sync_s": self.context.journal.sync_s,
        }

    def _describe(self, sample: Sample) -> dict[str, Any]:
        """Describe an unfinished sample as data for JSON, with the name of its lease holder (`with`) and the age of the
        lease in seconds (`for_s`)."""
        lease = self.ledger.leases.get(sample.lease_id or sample.agent_lease)
        began = lease.ends_at - self.context.config.broker.max_run_s if lease else float("inf")
        return {
            "index": sample.index,
            "state": "tool" if sample.lease_id in self.at_tool else str(sample.state),
            "tokens": sample.length,
            "attempts": sample.attempts,
            "with": self.names.get(lease.worker, "nobody") if lease else "",
            "for_s": max(0.0, round(self.now - began, 1)) if began < float("inf") else None,
        }

    def _silent(self) -> list[dict[str, Any]]:
        lease_s = self.context.config.broker.lease_s
        due = self.now + (1 - RENEWALS_MISSED) * lease_s
        silent = [lease for lease in self.ledger.leases.values() if lease.expires_at < due]
        longest = heapq.nsmallest(MOST_SILENT, silent, key=lambda lease: lease.expires_at)
        return [
            {
                "with": self.names.get(lease.worker, "nobody"),
                "group": lease.sample.group.id,
                "index": lease.sample.index,
                "silent_s": round(self.now - lease.expires_at + lease_s, 1),
                "expires_in_s": max(0.0, round(lease.expires_at - self.now, 1)),
            }
            for lease in longest
        ]


def sum_by_holder(groups: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Sum up, for each lease holder, its part of the unfinished samples of groups, as `Bottleneck` describes them.

    An entry counts `groups`, `samples`, and those in `scoring` or at a `tool`. `tokens`: length of the longest sample;
    `for_s`: age of the oldest lease.
    """
    held: dict[str, dict[str, Any]] = {}
    for samples in groups:
        for name in {sample["with"] for sample in samples}:
            held.setdefault(name, {"with": name} | dict.fromkeys(HOLDER_FIGURES, 0))["groups"] += 1
        for sample in samples:
            entry = held[sample["with"]]
            entry["samples"] += 1
            entry["scoring"] += sample["state"] in (SampleState.GENERATED, SampleState.SCORING)
            entry["tool"] += sample["state"] == "tool"
            entry["tokens"] = max(entry["tokens"], sample["tokens"])
            entry["for_s"] = max(entry["for_s"], sample["for_s"] or 0.0)
    return sorted(held.values(), key=lambda entry: (-entry["groups"], -entry["tokens"], entry["with"]))


def slot_usage(context: BrokerContext, peer: Peer) -> dict[str, Any]:
    """How a worker's slots are used, by its last heartbeat and its current leases.

    Samples that are `generating`, wait for `weights` or are at a `tool` have a slot; those in `admission` wait for one.
    `idle`: number of free slots; `why`: why they are free. A worker that has not reported is taken to generate in every
    slot.
    """
    slots = max(0, peer.capacity - context.config.worker.prefetch)
    remaining = leased = context.ledger.leases.load[peer.uid, False] + context.ledger.leases.load[peer.uid, True]
    reported = peer.slots or wire.Slots()
    at_tool = sum(lease_id in context.ledger.leases for lease_id in reported.tool_lease_ids)
    does = {}
    for name, count in (
        ("tool", at_tool),
        ("weights", reported.awaiting_weights),
        ("admission", reported.awaiting_admission),
    ):
        does[name] = min(count, remaining)
        remaining -= does[name]
    generating = min(remaining, slots)
    does["admission"] += remaining - generating
    idle = max(0, slots - leased + does["admission"])
    return {
        "generating": generating,
        **does,
        "idle": idle,
        "why": "" if not idle else "admission" if does["admission"] else idle_reason(context, peer),
        "unread_bytes": peer.sent_bytes - peer.received_bytes,
        "credit_bytes": context.config.broker.credit_mb << 20,
    }


def idle_reason(context: BrokerContext, peer: Peer) -> str:
    """Why a worker has idle slots.

    drain: the broker is drained, or the run is over; weights: the worker has to load newer weights before it may get
    samples; barrier: the learner has not trained those weights yet; "nothing to hand out": the worker's weights are new
    enough, but no sample may be leased to it.
    """
    ledger = context.ledger
    if context.run.over or ledger.rounds.draining:
        return "drain"
    floor = context.schedule.floor(ledger)
    if peer.step < floor:
        return "barrier" if ledger.steps.consumed < floor else "weights"
    return "nothing to hand out"

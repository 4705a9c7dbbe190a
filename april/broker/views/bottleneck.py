"""The bottleneck of a run at one moment: how every worker's slots are used, which groups delay the next batch and where
their stragglers are, and which leases have missed renewals."""

import heapq
from typing import Any

from april import wire
from april.broker.context import BrokerContext
from april.broker.ledger.samples import ENDED, Group, GroupState, Lease, Sample, SampleState
from april.broker.peers import Peer

MOST_GROUPS = 64
"""Most groups described; the groups closest to complete come first."""
MOST_SAMPLES = 8
"""Most samples described of a group; the longest come first."""
MOST_SILENT = 32
"""Most silent leases described; those that expire next come first."""
RENEWALS_MISSED = 0.5
"""Share of `broker.lease_s` without a renewal after which a lease counts as silent."""
USES = ("training", "evaluation")
HOLDER_FIGURES = ("groups", "samples", "scoring", "tool", "tokens", "for_s")


class Bottleneck:
    """What delays the next batch, computed from the broker's context at one moment."""

    def __init__(self, context: BrokerContext, now: float):
        self.context, self.ledger, self.now = context, context.ledger, now
        self.names = {peer.uid: peer.name for peer in context.peers.by_id.values()}
        self.at_tool = {
            lease_id for peer in context.peers.workers() if peer.slots for lease_id in peer.slots.tool_lease_ids
        }

    def to_json(self) -> dict[str, Any]:
        unfinished, counts = self._unfinished_groups(), self.ledger.open_samples
        missing = max(0, self.context.config.schedule.rollout_batch_size - len(self.ledger.ready))
        nearest = heapq.nsmallest(missing, unfinished, key=lambda group: (group.pending_samples, group.id))
        return {
            "at": self.now,
            "batch": {
                "step": self.ledger.next_step + 1,
                "needed": self.context.config.schedule.rollout_batch_size,
                "ready": len(self.ledger.ready),
                "missing": missing,
                "open": len(unfinished),
            },
            "queue": {use: counts.by_state(use == "evaluation") for use in USES},
            "groups": list(map(self._group, nearest[:MOST_GROUPS])),
            "holding_up": self._holders(nearest),
            "learner": self._learner(),
            "silent": self._silent(),
            "journal_sync_s": self.context.journal.sync_s,
        }

    def _unfinished_groups(self) -> list[Group]:
        """Open training groups with samples that still have to be generated or scored."""
        return [
            group
            for group in self.ledger.groups.values()
            if group.state is GroupState.OPEN and group.pending_samples and not group.evaluation
        ]

    def _group(self, group: Group) -> dict[str, Any]:
        unfinished = [sample for sample in group.samples if sample.state not in ENDED]
        longest = heapq.nlargest(MOST_SAMPLES, unfinished, key=lambda sample: sample.length)
        return {
            "group": group.id,
            "opened_at": group.opened_at,
            "samples": len(group.samples),
            "left": len(unfinished),
            "waits_for": [self._sample(sample) for sample in longest],
        }

    def _sample(self, sample: Sample) -> dict[str, Any]:
        lease = self.ledger.leases.get(sample.lease_id or sample.agent_lease)
        return {
            "index": sample.index,
            "state": "tool" if sample.lease_id in self.at_tool else str(sample.state),
            "tokens": sample.length,
            "attempts": sample.attempts,
            "with": self.names.get(lease.worker, "nobody") if lease else "",
            "for_s": self._age_s(lease) if lease else None,
        }

    def _holders(self, groups: list[Group]) -> list[dict[str, Any]]:
        """Describe, for each lease holder, its part of the unfinished samples in the given groups.

        An entry counts `groups`, `samples`, and those in `scoring` or at a `tool`. `tokens`: length of the longest
        sample; `for_s`: age of the oldest lease.
        """
        held: dict[str, dict[str, Any]] = {}
        for group in groups:
            seen = set()
            for sample in group.samples:
                if sample.state in ENDED:
                    continue
                lease = self.ledger.leases.get(sample.lease_id or sample.agent_lease)
                name = self.names.get(lease.worker, "nobody") if lease else ""
                entry = held.setdefault(name, {"with": name} | dict.fromkeys(HOLDER_FIGURES, 0))
                entry["samples"] += 1
                entry["groups"] += name not in seen
                entry["scoring"] += sample.state in (SampleState.GENERATED, SampleState.SCORING)
                entry["tool"] += sample.lease_id in self.at_tool
                entry["tokens"] = max(entry["tokens"], sample.length)
                entry["for_s"] = max(entry["for_s"], self._age_s(lease) or 0.0 if lease else 0.0)
                seen.add(name)
        return sorted(held.values(), key=lambda entry: (-entry["groups"], -entry["tokens"]))

    def _age_s(self, lease: Lease) -> float | None:
        """Seconds since a lease was granted; None for leases without a latest end."""
        began = lease.ends_at - self.context.config.broker.max_run_s
        return max(0.0, round(self.now - began, 1)) if began < float("inf") else None

    def _learner(self) -> dict[str, Any]:
        peer = self.context.peers.learner()
        does = "absent" if peer is None else "training" if self.ledger.consumed < self.ledger.next_step else "idle"
        return {
            "does": does,
            "step": self.ledger.consumed,
            "silent_s": peer and round(self.now - peer.last_seen, 1),
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


def slot_usage(context: BrokerContext, peer: Peer) -> dict[str, Any]:
    """How a worker's slots are used, by its last heartbeat and its current leases.

    Samples that are `generating`, wait for `weights` or are at a `tool` have a slot; those in `admission` wait for one.
    `idle`: number of free slots; `why`: why they are free. A worker that has not reported is taken to generate in every
    slot.
    """
    slots = max(0, peer.capacity - context.config.worker.prefetch)
    remaining = leased = context.ledger.load[peer.uid, False] + context.ledger.load[peer.uid, True]
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

    drain: the broker is drained; weights: the worker has to load the weights that waiting samples need; barrier: the
    learner has not trained those weights yet; any other value: no sample may be leased to the worker.
    """
    ledger, floor = context.ledger, context.schedule.floor(context.ledger)
    if context.run.over or ledger.draining:
        return "drain"
    if peer.step < floor:
        return "barrier" if ledger.consumed < floor else "weights"
    return "nothing to hand out"

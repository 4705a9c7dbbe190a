"""Who waits for whom at one moment: what the slots of every worker do, which groups hold the next batch up and where
their stragglers are, and which leases are silent."""

import heapq
from typing import Any

from april import wire
from april.broker.books import Books
from april.broker.ledger.samples import ENDED, Group, GroupState, Lease, Sample, SampleState
from april.broker.sessions import Session

MOST_GROUPS = 64
"""that are described, those next to complete first"""
MOST_SAMPLES = 8
"""of a group that are described, the longest first"""
MOST_SILENT = 32
RENEWALS_MISSED = 0.5
"""share of `broker.lease_s` without a renewal, from which on a lease is called silent"""
USES = ("training", "evaluation")
HELD = ("groups", "samples", "scoring", "tool", "tokens", "for_s")


class Standing:
    """The books, read once; nothing changes meanwhile."""

    def __init__(self, books: Books, now: float):
        self.books, self.ledger, self.now = books, books.ledger, now
        self.names = {session.uid: session.name for session in books.sessions.by_id.values()}
        self.at_tool = {lease_id for one in books.sessions.workers() if one.slots for lease_id in one.slots.tool}

    def to_json(self) -> dict[str, Any]:
        unfinished, counts = self._unfinished(), self.ledger.open_samples
        lacking = max(0, self.books.config.schedule.rollout_batch_size - len(self.ledger.ready))
        nearest = heapq.nsmallest(lacking, unfinished, key=lambda group: (group.left, group.id))
        return {
            "at": self.now,
            "batch": {
                "step": self.ledger.next_step + 1,
                "needed": self.books.config.schedule.rollout_batch_size,
                "ready": len(self.ledger.ready),
                "missing": lacking,
                "open": len(unfinished),
            },
            "queue": {use: counts.by_state(use == "evaluation") for use in USES},
            "groups": list(map(self._group, nearest[:MOST_GROUPS])),
            "holding_up": self._holders(nearest),
            "learner": self._learner(),
            "silent": self._silent(),
            "journal_sync_s": self.books.journal.sync_s,
        }

    def _unfinished(self) -> list[Group]:
        """Training groups of which some samples have not ended."""
        return [
            group
            for group in self.ledger.groups.values()
            if group.state is GroupState.OPEN and group.left and not group.evaluation
        ]

    def _group(self, group: Group) -> dict[str, Any]:
        left = [sample for sample in group.samples if sample.state not in ENDED]
        longest = heapq.nlargest(MOST_SAMPLES, left, key=lambda sample: sample.length)
        return {
            "group": group.id,
            "opened_at": group.opened_at,
            "samples": len(group.samples),
            "left": len(left),
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
        """By who has it, what is left of the groups: `groups`, `samples`, those that are scored or at a `tool`,
        `tokens` of the longest, `for_s`."""
        held: dict[str, dict[str, Any]] = {}
        for group in groups:
            seen = set()
            for sample in group.samples:
                if sample.state in ENDED:
                    continue
                lease = self.ledger.leases.get(sample.lease_id or sample.agent_lease)
                name = self.names.get(lease.worker, "nobody") if lease else ""
                entry = held.setdefault(name, {"with": name} | dict.fromkeys(HELD, 0))
                entry["samples"] += 1
                entry["groups"] += name not in seen
                entry["scoring"] += sample.state in (SampleState.GENERATED, SampleState.SCORING)
                entry["tool"] += sample.lease_id in self.at_tool
                entry["tokens"] = max(entry["tokens"], sample.length)
                entry["for_s"] = max(entry["for_s"], self._age_s(lease) or 0.0 if lease else 0.0)
                seen.add(name)
        return sorted(held.values(), key=lambda entry: (-entry["groups"], -entry["tokens"]))

    def _age_s(self, lease: Lease) -> float | None:
        """Since it was granted; None of those that may last for ever."""
        began = lease.ends_at - self.books.config.broker.max_run_s
        return max(0.0, round(self.now - began, 1)) if began < float("inf") else None

    def _learner(self) -> dict[str, Any]:
        session = self.books.sessions.of_role("learner")
        does = "absent" if session is None else "training" if self.ledger.consumed < self.ledger.next_step else "idle"
        return {
            "does": does,
            "step": self.ledger.consumed,
            "silent_s": session and round(self.now - session.last_seen, 1),
        }

    def _silent(self) -> list[dict[str, Any]]:
        lease_s = self.books.config.broker.lease_s
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


def slots_of(books: Books, session: Session) -> dict[str, Any]:
    """What a worker's samples are at: `generating`, `weights` and `tool` have slots, `admission` waits for one; `idle`
    slots, and why: for `admission` where some wait for that. Of what is leased now the worker has said last what it is
    at; one that has not is taken to generate in every slot."""
    slots = max(0, session.capacity - books.config.worker.prefetch)
    left = leased = books.ledger.load[session.uid, False] + books.ledger.load[session.uid, True]
    said = session.slots or wire.Slots()
    at_tool = sum(lease_id in books.ledger.leases for lease_id in said.tool)
    does = {}
    for name, count in (("tool", at_tool), ("weights", said.weights), ("admission", said.admission)):
        does[name] = min(count, left)
        left -= does[name]
    generating = min(left, slots)
    does["admission"] += left - generating
    idle = max(0, slots - leased + does["admission"])
    return {
        "generating": generating,
        **does,
        "idle": idle,
        "why": "" if not idle else "admission" if does["admission"] else idle_because(books, session),
        "unread_bytes": session.sent_bytes - session.received_bytes,
        "credit_bytes": books.config.broker.credit_mb << 20,
    }


def idle_because(books: Books, session: Session) -> str:
    """drain; weights: it has yet to load those that leases need; barrier: the learner has yet to make them; otherwise
    nothing, since there is nothing that it may be given."""
    ledger, floor = books.ledger, books.schedule.floor(books.ledger)
    if books.run.over or ledger.draining:
        return "drain"
    if session.step < floor:
        return "barrier" if ledger.consumed < floor else "weights"
    return "nothing to hand out"

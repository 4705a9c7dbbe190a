"""Whether a row of a report is taken: what a lease, its sample and the rows before it allow."""

from enum import StrEnum
from typing import Any, NamedTuple

from april.broker.ledger.branches import place_to_speak
from april.broker.ledger.samples import Lease
from april.broker.ledger.state import LedgerState
from april.wire.rows import CHUNK


class Verdict(StrEnum):
    OK = "ok"
    DUPLICATE = "duplicate"
    GAP = "gap"
    FENCED = "fenced"
    """the lease is not current: an older holder"""
    INVALID = "invalid"
    DROPPED = "dropped"
    """behind a row of its lease that was not taken"""


class Ahead(NamedTuple):
    """What a sample is, or will be with the rows that are accepted already."""

    length: int
    floor: int
    """the next version's step is this or a later one"""
    at_turn_end: bool
    """its last tokens were sampled, so that an environment may answer them"""
    generating: bool


def check_row(
    ledger: LedgerState, lease: Lease, row: tuple[Any, ...], ahead: dict[int, Ahead | Verdict], is_wrong: bool
) -> Verdict:
    """What becomes of a row; `ahead` has what rows before it made of their samples, or why they were not taken."""
    lease_id, _, start, count, branch, step, _, _, kind, finish, _, _, parent = row
    now = ahead.get(lease_id)
    if now is None:
        sample = lease.sample
        length, generating = sample.length, lease.generating
        floor = lease.floor
        at_turn_end = kind != CHUNK and bool(sample.segments) and sample.segments.end == length
        if lease.agent:
            length, at_turn_end = place_to_speak(sample, lease_id - lease.id, start, parent)
        elif ledger.rules.agents:
            at_turn_end = False
    elif isinstance(now, Verdict):
        return Verdict.DROPPED
    else:
        length, floor, at_turn_end, generating = now
    if is_wrong:
        verdict = Verdict.INVALID
    elif start != length:
        verdict = Verdict.DUPLICATE if start < length else Verdict.GAP
    elif kind == CHUNK and step < floor:
        verdict = Verdict.FENCED
    else:
        left = ledger.rules.max_response_tokens - length - count
        may_end = left > 0 or (left == 0 and finish > 0)
        if lease.agent:
            generating, may_end = at_turn_end and kind != CHUNK, left > 0 and not finish
        goes_on = generating and count > 0 and may_end
        follows = ledger.was_published(step, branch) if kind == CHUNK else at_turn_end
        verdict = Verdict.OK if goes_on and follows else Verdict.INVALID
    if verdict is Verdict.OK:
        goes_on = not finish and not lease.agent
        ahead[lease_id] = Ahead(start + count, step if kind == CHUNK else floor, kind == CHUNK, goes_on)
    elif verdict is not Verdict.DUPLICATE:
        ahead[lease_id] = verdict
    return verdict

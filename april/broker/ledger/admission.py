"""Whether a row of a report is taken: what a lease, its sample and the rows before it allow."""

from enum import StrEnum
from typing import Any

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


Ahead = tuple[int, int, bool, bool]
"""What a sample will be with the rows that are accepted already: its length, the least step of the next version,
whether its last tokens were sampled, so that an environment may answer them, and whether it is generated"""
REFUSED: Ahead = (-1, 0, False, False)
"""behind a row that was not taken, none is in its place"""


def check_row(
    ledger: LedgerState, lease: Lease, row: tuple[Any, ...], ahead: dict[int, Ahead], is_wrong: bool
) -> Verdict:
    """What becomes of a row; `ahead` has what the rows before it make of their samples."""
    lease_id, _, start, count, branch, step, _, _, kind, finish, _, _, parent = row
    now = ahead.get(lease_id)
    if now is None:
        sample = lease.sample
        length, generating = sample.length, lease.generating
        floor = lease.floor
        at_turn_end = kind != CHUNK and length > 0 and sample.sampled_until == length
        if lease.agent:
            length, at_turn_end = place_to_speak(sample, lease_id - lease.id, start, parent)
        elif ledger.rules.agents:
            at_turn_end = False
    elif now is REFUSED:
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
        ahead[lease_id] = (start + count, step if kind == CHUNK else floor, kind == CHUNK, goes_on)
    elif verdict is not Verdict.DUPLICATE:
        ahead[lease_id] = REFUSED
    return verdict

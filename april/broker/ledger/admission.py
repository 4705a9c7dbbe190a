"""Admission of report rows: whether a lease, its sample and the earlier rows of the report allow a row."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from april.broker.ledger.forks import fork_position
from april.broker.ledger.samples import Lease
from april.broker.ledger.state import LedgerState
from april.wire.message import Version
from april.wire.rows import CHUNK, ROW, Buffer, ReportRow


class Verdict(StrEnum):
    """Outcome of a command on the ledger, or of the check of one row of a report."""

    OK = "ok"
    DUPLICATE = "duplicate"
    """The ledger already has what the command would add."""
    GAP = "gap"
    """Something that must come before it is missing, such as earlier tokens of the response: the command changes
    nothing."""
    FENCED = "fenced"
    """The lease is not current or belongs to another holder, or the policy version is older than that of accepted
    tokens, or not that of the sample's evaluation."""
    INVALID = "invalid"
    DROPPED = "dropped"
    """An earlier row of the same lease, in the same report, was not accepted."""


PendingTail = tuple[int, int, bool, bool]
"""What the report's accepted rows so far have left of a sample: (response length, least policy step of the next tokens,
whether an observation may follow, whether a chunk may follow)."""
AFTER_REJECTED_ROW: PendingTail = (-1, 0, False, False)
"""Marker for a lease of which a row was refused: its later rows in the same report are dropped."""


def check_row(
    ledger: LedgerState, lease: Lease, row: ReportRow, pending: dict[int, PendingTail], is_malformed: bool
) -> Verdict:
    """Verdict on one row of a report. `pending`: state of each sample after the report's earlier rows, by lease id;
    updated by this call. `is_malformed`: whether the row's payload is faulty."""
    tail, is_chunk = pending.get(row.lease_id), row.kind == CHUNK
    if tail is None:
        sample = lease.sample
        length, generating = sample.length, lease.generating
        floor = lease.floor
        at_turn_end = not is_chunk and length > 0 and sample.sampled_until == length
        if lease.agent:
            length, at_turn_end = fork_position(sample, row.lease_id - lease.id, row.start, row.parent)
        elif ledger.rules.agents:
            at_turn_end = False
    elif tail is AFTER_REJECTED_ROW:
        return Verdict.DROPPED
    else:
        length, floor, at_turn_end, generating = tail
    if is_malformed:
        verdict = Verdict.INVALID
    elif row.start != length:
        verdict = Verdict.DUPLICATE if row.start < length else Verdict.GAP
    elif is_chunk and row.step < floor:
        verdict = Verdict.FENCED
    else:
        remaining_tokens = ledger.rules.max_response_tokens - row.end
        fits = remaining_tokens > 0 or (remaining_tokens == 0 and row.finish > 0)
        if lease.agent:
            generating, fits = at_turn_end and not is_chunk, remaining_tokens > 0 and not row.finish
        is_permitted = generating and row.tokens > 0 and fits
        has_valid_source = ledger.was_published(row.step, row.incarnation) if is_chunk else at_turn_end
        verdict = Verdict.OK if is_permitted and has_valid_source else Verdict.INVALID
        if is_chunk and verdict is Verdict.OK and is_of_another_evaluation(ledger, lease, row):
            verdict = Verdict.FENCED
    if verdict is Verdict.OK:
        may_generate = not row.finish and not lease.agent
        pending[row.lease_id] = (row.end, row.step if is_chunk else floor, is_chunk, may_generate)
    elif verdict is not Verdict.DUPLICATE:
        pending[row.lease_id] = AFTER_REJECTED_ROW
    return verdict


def accepted_images(
    table: Buffer, images: Mapping[int, list[str]], verdicts: Sequence[Verdict]
) -> list[tuple[int, list[str]]]:
    """(lease id, names of the images) of each accepted row that has images; `images`: names by the row's index."""
    taken = [(index, names) for index, names in images.items() if verdicts[index] is Verdict.OK]
    return [(ROW.unpack_from(table, index * ROW.size)[0], names) for index, names in taken]


def is_of_another_evaluation(ledger: LedgerState, lease: Lease, row: ReportRow) -> bool:
    """Whether a row has tokens of a held-out sample under another version than that of the sample's evaluation."""
    group = lease.sample.group
    version = Version(row.incarnation, row.step)
    return group.evaluation and not (row.step == group.opened_at and ledger.may_evaluate(version))

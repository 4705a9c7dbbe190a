"""Ledger commands that change the state of no sample: record token scores, and snapshots of weights on disk."""

from zlib_ng.zlib_ng import crc32

from april.broker.ledger import events
from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import Ledger
from april.wire.training import WeightFolder


def score_tokens(
    ledger: Ledger, lease_id: int, columns: list[dict[str, int]], values: bytes, feedback: list[str]
) -> None:
    """Record the token scores and the feedback of the responses under a scoring lease, before their rewards. They are
    ignored for held-out samples, and for a lease that is not current.

    `columns`: for each response, the number of values of each token score by its name; `values`: all values in that
    order, float32. `feedback`: one text for each response, or an empty list.
    """
    lease = ledger.leases.get(lease_id)
    if lease and not lease.generating and not lease.sample.group.evaluation and (any(columns) or any(feedback)):
        ledger.commit(events.TokensScored(lease_id, columns, feedback), [(crc32(values), values)])


def note_weight_folder(ledger: Ledger, folder: WeightFolder) -> Verdict:
    """Record that the learner has written a snapshot of weights. The verdict is DUPLICATE if a snapshot of this or a
    newer version is known, INVALID if the version is not one of the current learner."""
    incarnation, step = folder.version
    if incarnation != ledger.learner.incarnation or not ledger.was_published(step, incarnation):
        return Verdict.INVALID
    if any(folder.version <= known.version for known in ledger.learner.weight_folders):
        return Verdict.DUPLICATE
    ledger.commit(events.WeightFolderWritten(incarnation, step, folder.digest))
    return Verdict.OK

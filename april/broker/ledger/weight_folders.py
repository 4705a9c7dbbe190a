"""Snapshots of weights that the learner has written, of which workers are told."""

from april.broker.ledger import events
from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import Ledger
from april.wire.training import WeightFolder


def note_weight_folder(ledger: Ledger, folder: WeightFolder) -> Verdict:
    """Note that the learner has written a snapshot of weights, unless it has said so before of it or a newer one."""
    incarnation, step = folder.version
    if incarnation != ledger.learner.incarnation or not ledger.was_published(step, incarnation):
        return Verdict.INVALID
    if any(folder.version <= known.version for known in ledger.learner.weight_folders):
        return Verdict.DUPLICATE
    ledger.commit(events.WeightFolderWritten(incarnation, step, folder.digest))
    return Verdict.OK

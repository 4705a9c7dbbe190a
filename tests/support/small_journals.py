"""Journals of runs with a few events, in the form in which a broker writes them."""

from contextlib import contextmanager

from april.broker.journal.journal import Journal
from april.broker.ledger.events import RunStarted
from april.broker.ledger.ledger import Ledger
from april.wire.message import Version


@contextmanager
def recorded(ledger, run_dir):
    """Context manager that writes a ledger's events into the run's journal; gives the journal."""
    journal, rules = Journal(run_dir / "journal"), ledger.rules
    ledger.write = journal.append
    ledger.commit(
        RunStarted(
            "small", "", 0, rules.batch_groups, rules.group_size, rules.max_staleness, rules.max_attempts,
            rules.min_group_size, rules.max_response_tokens,
        )
    )  # fmt: skip
    yield journal
    journal.sync()
    journal.close()


def add_group(ledger: Ledger, lengths, prompt_tokens=9, **keys):
    """Open a group whose responses have the given lengths (None: not finished), and train the next batch if it is
    complete."""
    step = ledger.steps.consumed
    group = ledger.open_group(*ledger.prompts.next, floor=step, prompt=bytes(4 * prompt_tokens), **keys)
    for sample, length in zip(group.samples, lengths, strict=True):
        lease = ledger.lease(sample, "w", step, expires_at=float("inf"))
        if length is not None:
            ledger.add_chunk(lease.id, 0, length, Version(0, step), "stop")
            ledger.score(lease.id, 1.0)
    if batch := ledger.choose_batch(ledger.rules.batch_groups):
        ledger.consume(ledger.deliver(batch))
    return group

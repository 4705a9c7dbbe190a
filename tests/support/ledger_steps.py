"""Random steps of training on a ledger."""

from april.wire.message import Version


def write_steps(ledger, history, chance, steps):
    """Generate and train `steps` batches; samples are handed back between chunks, and about half of the steps get a
    durable checkpoint."""
    for _ in range(steps):
        step = ledger.steps.next
        groups = [
            ledger.open_group(epoch=0, row=ledger.prompts.next[1], floor=step, prompt=b"\1\0\0\0")
            for _ in range(2 - ledger.account.undelivered)
        ]
        for sample in [sample for group in groups for sample in group.samples]:
            for length in range(chance.randint(1, 3)):
                lease = ledger.lease(sample, f"w{chance.randint(0, 2)}/uid", step, expires_at=1.0)
                ledger.add_chunk(lease.id, length, 1, Version(0, step), payload=bytes(8))
                ledger.end_lease(lease.id, "abort")
            lease = ledger.lease(sample, "w0/uid", step, expires_at=1.0)
            ledger.add_chunk(lease.id, sample.length, 1, Version(0, step), "stop", payload=bytes(8))
            ledger.score(lease.id, chance.random())
        ledger.deliver(ledger.choose_batch(2))
        ledger.consume(step)
        if chance.random() < 0.5:
            ledger.checkpoint(step + 1, oldest=step + 1)

"""A lease on its way to its holder: the prompt, what there is of the response, and how to go on."""

import hashlib

from april import wire
from april.broker.books import Books
from april.broker.ledger.samples import Lease
from april.broker.sessions import Session


def send_grant(books: Books, session: Session, lease: Lease) -> None:
    sample, group, sampling, payloads = lease.sample, lease.sample.group, books.config.sampling, books.payloads
    drawn = books.config.evaluation if group.evaluation else sampling
    row = payloads.row_of(group.evaluation, group.epoch, group.row)
    observations = sample.observations if sample.length else []
    grant = wire.Grant(
        lease_id=lease.id,
        group=group.id,
        index=sample.index,
        scoring=lease.scoring,
        evaluation=group.evaluation,
        max_new_tokens=sampling.max_response_tokens - sample.length,
        seed=sample_seed(books.config.seed, group.id, sample.index),
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=0.0 if group.evaluation else sampling.min_p,
        label=row.label,
        reward=payloads.reward_of(row),
        finish_reason=sample.finish_reason,
        hand_over=not lease.scoring and books.ledger.is_handed_over(group),
        together=[one.finish_reason for one in lease.samples] if lease.on_group else [],
        turns=len(observations),
        turn_start=observations[-1][1] if observations else 0,
        state=payloads.environment_state(sample) if observations else b"",
    )
    if lease.on_group:
        pieces = [payloads.response(one)[0] for one in lease.samples]
    else:
        pieces = [ids for ids, *_ in payloads.chunks(sample)]
    books.sessions.send(session, grant, [payloads.prompt(group.prompt), *pieces])


def sample_seed(run_seed: int, group: int, index: int) -> int:
    """A 63-bit sampling seed, distinct for every sample of a run and the same on every resume."""
    digest = hashlib.blake2b(f"{run_seed}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

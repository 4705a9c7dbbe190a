"""A lease on its way to its holder: the prompt, what there is of the response, and how to go on."""

import hashlib

import msgspec

from april import wire
from april.broker.books import Books
from april.broker.ledger.samples import Group, Lease
from april.broker.sessions import Session


def send_grant(books: Books, session: Session, lease: Lease) -> None:
    """With the next grants to its holder; what the samples of a group have in common goes with the first of them."""
    sample = lease.sample.last_line if lease.scoring else lease.sample
    group, payloads = sample.group, books.payloads
    leases = books.sessions.answers_to(session).new_leases()
    said = [one.last_line if lease.scoring else one for one in lease.samples]
    task, arrays = leases.places.get(group.id), [payloads.response_ids(line) for line in said]
    session.sent_bytes += sum(len(array.data) for array in arrays)
    if task is None:
        prompt = payloads.prompt(group.prompt)
        task = leases.add_task(task_of(books, group), prompt)
        session.sent_bytes += len(prompt.data)
    observations = sample.observations if sample.length else []
    turn_start = observations[-1][1] if observations else 0
    left, state, stops = books.config.sampling.max_response_tokens - sample.length, b"", list[int]()
    if observations:
        state = payloads.environment_state(sample)
    if books.ledger.rules.agents:
        request = msgspec.msgpack.decode(state, type=wire.TurnRequest)
        state = msgspec.msgpack.encode([one.left for one in lease.samples]) if lease.on_group else lease.sample.left
        left, stops = min(left, request.max_tokens - (sample.length - turn_start)), request.stops
    elif lease.on_group:
        state = msgspec.msgpack.encode([payloads.environment_state(one) if one.observations else b"" for one in said])
    grant = wire.Grant(
        lease_id=lease.id,
        task=task,
        index=sample.index,
        scoring=lease.scoring,
        max_new_tokens=left,
        seed=sample_seed(books.config.seed, group.id, sample.index, sample.branch),
        finish_reason=sample.session.finish_reason,
        hand_over=not lease.scoring and books.ledger.is_handed_over(group),
        together=[one.finish_reason for one in lease.samples] if lease.on_group else [],
        turns=len(observations),
        turn_start=turn_start,
        state=state,
        stops=stops,
    )
    leases.add(grant, arrays)


def task_of(books: Books, group: Group) -> wire.Task:
    row = books.payloads.row_of(group.evaluation, group.epoch, group.row)
    sampling = books.config.sampling
    drawn = books.prompts.held_out[group.epoch].asked if group.evaluation else sampling
    return wire.Task(
        group=group.id,
        evaluation=group.evaluation,
        label=row.label,
        reward=books.payloads.reward_of(row),
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=0.0 if group.evaluation else sampling.min_p,
    )


def sample_seed(run_seed: int, group: int, index: int, branch: int = 0) -> int:
    """A 63-bit sampling seed, distinct for every branch of every sample of a run and the same on every resume."""
    name = f"{run_seed}/{group}/{index}" + (f"/{branch}" if branch else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

"""Builds the grant of a lease: the task with its prompt, the response so far, and how to continue it."""

import hashlib

import msgspec

from april import wire
from april.broker.books import BrokerContext
from april.broker.ledger.samples import Group, Lease
from april.broker.sessions import Peer


def send_grant(context: BrokerContext, peer: Peer, lease: Lease) -> None:
    """Queue the grant of a lease to its holder; a group's task and prompt go once per message."""
    sample = lease.sample.latest_fork if lease.scoring else lease.sample
    group, payloads = sample.group, context.payloads
    grants = context.peers.pending_for(peer).new_leases()
    responses = [each.latest_fork if lease.scoring else each for each in lease.samples]
    task_index, arrays = grants.task_indices.get(group.id), [payloads.response_ids(response) for response in responses]
    peer.sent_bytes += sum(len(array.data) for array in arrays)
    if task_index is None:
        prompt = payloads.prompt(group.prompt)
        task_index = grants.add_task(task_of(context, group), prompt)
        peer.sent_bytes += len(prompt.data)
    observations = sample.observations if sample.length else []
    turn_start = observations[-1][1] if observations else 0
    remaining_tokens, state, stops = context.config.sampling.max_response_tokens - sample.length, b"", list[int]()
    if observations:
        state = payloads.environment_state(sample)
    if context.ledger.rules.agents:
        request = msgspec.msgpack.decode(state, type=wire.TurnRequest)
        state = (
            msgspec.msgpack.encode([each.agent_state for each in lease.samples])
            if lease.for_group
            else lease.sample.agent_state
        )
        remaining_tokens, stops = (
            min(remaining_tokens, request.max_tokens - (sample.length - turn_start)),
            request.stop_token_ids,
        )
    elif lease.for_group:
        state = msgspec.msgpack.encode(
            [payloads.environment_state(each) if each.observations else b"" for each in responses]
        )
    grant = wire.Grant(
        lease_id=lease.id,
        task_index=task_index,
        index=sample.index,
        scoring=lease.scoring,
        max_new_tokens=remaining_tokens,
        seed=sample_seed(context.config.seed, group.id, sample.index, sample.fork_number),
        finish_reason=sample.session_sample.finish_reason,
        hand_over=not lease.scoring and context.ledger.ends_with_generation(group),
        group_scored=[each.finish_reason for each in lease.samples] if lease.for_group else [],
        turns=len(observations),
        turn_start=turn_start,
        state=state,
        stop_token_ids=stops,
    )
    grants.add(grant, arrays)


def task_of(context: BrokerContext, group: Group) -> wire.Task:
    row = context.payloads.row_of(group.evaluation, group.epoch, group.row)
    sampling = context.config.sampling
    drawn = context.prompts.held_out[group.epoch].settings if group.evaluation else sampling
    return wire.Task(
        group=group.id,
        evaluation=group.evaluation,
        label=row.label,
        reward=context.payloads.reward_of(row),
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=0.0 if group.evaluation else sampling.min_p,
    )


def sample_seed(run_seed: int, group: int, index: int, fork_number: int = 0) -> int:
    """A 63-bit sampling seed, distinct for every fork of every sample of a run, and the same on every resume."""
    name = f"{run_seed}/{group}/{index}" + (f"/{fork_number}" if fork_number else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

"""The forks of an agent's session: how they begin, and which of their turns an agent knows."""

from collections.abc import Iterator, Sequence

from april.broker.ledger.samples import AgentSample, Sample, SampleState, as_agent_sample, images_before

Superseded = Sequence[tuple[int, int]]
"""(fork number, length) per fork: tokens after `length` were seen only by an earlier execution of the agent, and are
discarded."""


def add_fork(parent: Sample, number: int, shared_tokens: int) -> Sample:
    """Add fork number `number` to the session of `parent`. The fork shares the first `shared_tokens` tokens of
    `parent`, which end a turn."""
    new = AgentSample(parent.group, parent.index, SampleState.PARTIAL, cache_worker=parent.cache_worker)
    for ref in parent.chunk_refs:
        if new.length < shared_tokens:
            new.extend(ref._replace(observed=True))
    new.main_sample, new.fork_number = parent.session_sample, number
    new.parent_fork, new.shared_tokens = parent.fork_number, shared_tokens
    new.images = images_before(parent.images, shared_tokens)
    as_agent_sample(parent.session_sample).forks += (new,)
    return new


def fork_position(session: Sample, number: int, start: int, parent: int) -> tuple[int, bool]:
    """(length of fork `number` in tokens, whether the agent may append an observation to it).

    A fork that does not exist yet may begin at the end of a complete turn of its parent, or at token 0. `start`: offset
    of the observation in the response; `parent`: number of the fork that a new one begins from.
    """
    if fork := session.find_fork(number):
        return fork.length, fork.state is SampleState.ACTING
    parent_sample = session.find_fork(parent)
    return start, parent_sample is not None and parent_sample.last_turn_end(start) == start


def turn_ends_by_fork(session: Sample, superseded: Superseded) -> Iterator[tuple[Sample, int, int]]:
    """(fork, end of its last complete turn, end of its last turn known to the newest execution of the agent), in
    tokens, for each fork of a session."""
    known_lengths = dict(superseded)
    for fork in session.with_forks:
        known = known_lengths.get(fork.fork_number, fork.length)
        yield fork, fork.complete_turns_length, fork.last_turn_end(known)


def has_known_answer(session: Sample, superseded: Superseded) -> bool:
    """Whether the newest execution of the agent has received any answer of the policy."""
    return any(length for _, _, length in turn_ends_by_fork(session, superseded))

"""The branches of an agent's session: where one may begin, what it shares, and what of it an agent knows in the end.

A branch is a further sample of the session, whose first tokens are another branch's. They lie once in the journal and
are read here as what an agent says is, so that all that holds for a sample holds for a branch: leases, aborts, budget,
versions that never decrease, and that each token which was sampled is trained in one place.
"""

from collections.abc import Iterator, Sequence

from april.broker.ledger.samples import AgentSample, Sample, SampleState, of_agent

Superseded = Sequence[tuple[int, int]]
"""(branch, length) where an earlier execution of an agent has gone further than the last one knows"""


def fork(parent: Sample, branch: int, length: int) -> Sample:
    """Add a branch to the session of `parent`, of which it shares so many tokens; a turn ends there."""
    new = AgentSample(parent.group, parent.index, SampleState.PARTIAL, home=parent.home)
    for place in parent.places:
        if new.length < length:
            new.extend(place._replace(observed=True))
    new.trunk, new.branch, new.parent, new.shared = parent.session, branch, parent.branch, length
    of_agent(parent.session).branches += (new,)
    return new


def place_to_speak(session: Sample, branch: int, start: int, parent: int) -> tuple[int, bool]:
    """(length of a branch, whether it is the agent's turn there); a new one begins behind a turn of its parent that is
    over, or with the session."""
    if line := session.line(branch):
        return line.length, line.state is SampleState.ACTING
    left = session.line(parent)
    return start, left is not None and left.turn_end(start) == start


def known(session: Sample, superseded: Superseded) -> Iterator[tuple[Sample, int, int]]:
    """Of each branch, where its last turn ends that is over, and the last that the newest execution knows."""
    most = dict(superseded)
    for line in session.lines:
        yield line, line.heard, line.turn_end(most.get(line.branch, line.length))


def was_heard(session: Sample, superseded: Superseded) -> bool:
    """Whether the newest execution of its agent has an answer of the policy."""
    return any(length for _, _, length in known(session, superseded))

"""What a ledger keeps to, as long as its run lasts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """What stays the same over a run."""

    batch_groups: int
    """N"""
    group_size: int
    """n"""
    max_staleness: int
    """S, policy steps"""
    max_attempts: int = 5
    min_group_size: int | None = None
    max_response_tokens: int = 1 << 30
    filtered: bool = False
    """complete groups are judged before they can be trained"""
    scored_apart: bool = False
    """the lease that generates a response ends with it; another one is for its score"""
    submitted: bool = False
    """prompts come while the run goes on: that none is left is not its end"""
    keeps_discards: bool = False
    """some of the samples that are discarded are told to the learner, to be read"""
    agents: bool = False
    """samples are sessions of agents: a response goes in turns, each under a lease of its own"""

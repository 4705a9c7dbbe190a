"""What workers and scorers have in common: leased responses go to the verifiers, messages come of their scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from april import wire
from april.config import Config
from april.data.dataset import verifier_of
from april.data.tokenizer import Tokenizer
from april.workers.rewards.messages import GroupScore, Item, RewardRules, Score
from april.workers.rewards.pool import RewardPool


class Lease(NamedTuple):
    grant: wire.Grant
    task: wire.Task
    tokens: list[np.ndarray]
    """int32: the prompt, then the response in pieces, as they come with a grant and grow; with `together` the whole
    responses of the group instead"""


def leases_of(received: wire.Received) -> Iterator[Lease]:
    """Those of a message of grants."""
    grants, arrays = received.message, received.arrays
    at = len(grants.tasks)
    for grant in grants.grants:
        yield Lease(grant, grants.tasks[grant.task], [arrays[grant.task], *arrays[at : at + grant.responses]])
        at += grant.responses


class Scoring:
    """The verifiers' processes of a worker or scorer; they are started at once, or with the first response.

    scoring.submit(Lease(grant, task, [prompt, *pieces of the response]), "stop")
    for score in scoring.poll():                      # never waits
        connection.send(closing(score, length))
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, at_once: bool = True):
        self.config = config
        self.tokenizer = tokenizer
        self.pool: RewardPool | None = None
        if at_once:
            self._start()

    def _start(self) -> RewardPool:
        prints = prints_file(self.config)
        self.pool = RewardPool(self.config.reward.processes, reward_rules(self.config), prints)
        return self.pool

    @property
    def pending(self) -> int:
        """Responses that were submitted and have not come back."""
        return self.pool.pending if self.pool else 0

    def submit(self, lease: Lease, finish_reason: str, state: bytes | None = None) -> None:
        """`state`: of the environment at the end, where that is not the grant's; of a lease on a group, the finish
        reasons of its responses are the grant's."""
        grant, task, tokens = lease
        pool = self.pool or self._start()
        prompt = self.tokenizer.decode(tokens[0])
        if grant.together:
            responses = zip(tokens[1:], grant.together, states_of(grant), strict=True)
            items = [
                Item(place, task.reward, self.tokenizer.decode(ids), task.label, reason, prompt, len(ids), left_in)
                for place, (ids, reason, left_in) in enumerate(responses)
            ]
            return pool.submit_group(grant.lease_id, task.reward, items)
        response = np.concatenate(tokens[1:])
        text = self.tokenizer.decode(response)
        state = grant.state if state is None else state
        pool.submit(grant.lease_id, task.reward, text, task.label, finish_reason, prompt, len(response), state)

    def poll(self) -> list[Score | GroupScore]:
        """What the verifiers have said since the last call; the key of a score is the id of its lease."""
        return self.pool.poll() if self.pool else []

    def close(self) -> None:
        if self.pool:
            self.pool.close()


def states_of(grant: wire.Grant) -> list[bytes]:
    """Of the environment at the end of each response that is scored together, MessagePack; empty without one."""
    if not grant.state:
        return [b""] * len(grant.together)
    return msgspec.msgpack.decode(grant.state, type=list[bytes])


def prints_file(config: Config) -> Path | None:
    """Takes what verifiers print, of all workers on this machine, where the run's logs are; elsewhere a worker's own
    output does."""
    logs = config.run_dir / "logs"
    return logs / "rewards.log" if logs.is_dir() else None


def closing(score: Score | GroupScore, length: int = 0) -> wire.Closing:
    """What ends the lease; `length`: of the response, as far as this process has generated it."""
    if isinstance(score, GroupScore):
        rewards = [one.reward for one in score.scores if one.reward is not None]
        return wire.Scored(score.key, rewards, [one.details for one in score.scores])
    if score.reward is None:
        return wire.GiveBack(score.key, length, "scoring_failed", score.error or "no reward")
    return wire.Scored(score.key, [score.reward], [score.details])


def reward_rules(config: Config) -> RewardRules:
    section = config.reward
    named = {field: getattr(section, field) for field in RewardRules.__struct_fields__ if hasattr(section, field)}
    verifiers = {section.name, *section.allowed, *filter(None, map(verifier_of, config.sources))}
    return RewardRules(
        max_response_tokens=config.sampling.max_response_tokens, verifiers=tuple(sorted(verifiers)), **named
    )

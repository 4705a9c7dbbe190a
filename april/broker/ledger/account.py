"""Where every acknowledged token is: the account that closes.

generated = trained + delivered + ready + open + sum(discarded), at any moment.
"""

from collections import Counter
from typing import Any

from april.broker.ledger.samples import Group, GroupState


class Account:
    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        """acknowledged tokens: generated, trained, delivered, ready, open, evaluation"""
        self.discarded: Counter[str] = Counter()
        """acknowledged tokens of discarded groups by reason"""
        self.counts: Counter[str] = Counter()
        """training groups by state"""

    def move(self, group: Group, state: GroupState) -> None:
        """Change a training group's state and the tokens and counts that go with it."""
        self.counts[group.state] -= 1
        self.counts[state] += 1
        if group.state is not GroupState.DISCARDED:
            self.tokens[group.state] -= group.tokens
        if state is not GroupState.DISCARDED:
            self.tokens[state] += group.tokens
        group.state = state

    def count_discarded(self, group: Group, reason: str, times: int) -> None:
        self.discarded[reason] += times * group.tokens
        self.counts[reason] += times

    @property
    def undelivered(self) -> int:
        return self.counts[GroupState.OPEN] + self.counts[GroupState.READY]

    def account(self) -> dict[str, Any]:
        """The ledger in acknowledged tokens, as in summary.json."""
        names = ("generated", "trained", "delivered", "ready", "open")
        return {name: self.tokens[name] for name in names} | {
            "discarded": dict(self.discarded),
            "evaluation": self.tokens["evaluation"],
        }

    @property
    def closed(self) -> bool:
        """Whether the sum over the groups' ends equals what was generated."""
        parts = sum(self.tokens[name] for name in ("trained", "delivered", "ready", "open"))
        return self.tokens["generated"] == parts + sum(self.discarded.values())

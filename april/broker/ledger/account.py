"""The token account: where every acknowledged token is.

It closes: generated = trained + delivered + ready + open + sum(discarded), at any moment.
"""

from collections import Counter
from typing import Any

from april.broker.ledger.samples import Group, GroupState


class Account:
    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        """Acknowledged tokens by name: generated, evaluation, and the group states other than discarded."""
        self.discarded: Counter[str] = Counter()
        """Acknowledged tokens of discarded groups and samples, by reason."""
        self.counts: Counter[str] = Counter()
        """Training groups by state, and discarded ones also by reason."""

    def move(self, group: Group, state: GroupState) -> None:
        """Move a training group and its tokens to another state."""
        self.counts[group.state] -= 1
        self.counts[state] += 1
        if group.state is not GroupState.DISCARDED:
            self.tokens[group.state] -= group.tokens
        if state is not GroupState.DISCARDED:
            self.tokens[state] += group.tokens
        group.state = state

    def count_discarded(self, group: Group, reason: str, times: int) -> None:
        """Book a discarded group under its reason; `times` is 1, or -1 to take it back."""
        self.discarded[reason] += times * group.tokens
        self.counts[reason] += times

    @property
    def undelivered(self) -> int:
        """Training groups that are open or ready."""
        return self.counts[GroupState.OPEN] + self.counts[GroupState.READY]

    def account(self) -> dict[str, Any]:
        """The account in acknowledged tokens, as summary.json has it."""
        names = ("generated", "trained", "delivered", "ready", "open")
        return {name: self.tokens[name] for name in names} | {
            "discarded": dict(self.discarded),
            "evaluation": self.tokens["evaluation"],
        }

    @property
    def closed(self) -> bool:
        """Whether generated tokens equal the sum over all places they can be in."""
        parts = sum(self.tokens[name] for name in ("trained", "delivered", "ready", "open"))
        return self.tokens["generated"] == parts + sum(self.discarded.values())

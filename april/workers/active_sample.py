"""A leased sample, as a worker generates or scores it."""

from dataclasses import dataclass

import numpy as np

from april import wire


@dataclass(slots=True)
class ActiveSample:
    """A leased sample that this worker generates or scores."""

    grant: wire.Grant
    task: wire.Task
    tokens: list[np.ndarray]
    """int32 arrays: the prompt, then the response's pieces in order."""
    length: int
    """Response tokens so far, observations included."""
    budget: int
    """Most response tokens the sample may have."""
    finished: bool
    """Whether the response is complete. Only its score is missing then; if `grant.hand_over`, a scorer computes it."""
    answered_turns: int
    """Turns that the environment has answered."""
    turn_start: int
    """Response tokens before the current turn."""
    environment_state: bytes
    """State of the environment after its last observation, MessagePack; empty before the first."""

    @property
    def remaining_tokens(self) -> int:
        """Response tokens left in the budget."""
        return self.budget - self.length

    @property
    def turn_tokens(self) -> np.ndarray:
        """int32 [T]: tokens that the policy has sampled in the current turn."""
        return np.concatenate(self.tokens)[len(self.tokens[0]) + self.turn_start :]

    def append(self, tokens: np.ndarray) -> None:
        self.tokens.append(tokens)
        self.length += len(tokens)

    def observe(self, tokens: np.ndarray, state: bytes) -> None:
        """Append the environment's observation of the current turn, int32 [T], and begin the next turn. `state`: the
        environment's, MessagePack."""
        self.append(tokens)
        self.answered_turns, self.turn_start, self.environment_state = self.answered_turns + 1, self.length, state

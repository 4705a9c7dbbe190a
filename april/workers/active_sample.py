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
    """Number of response tokens so far, observations of the environment included."""
    budget: int
    """Maximum number of tokens of the whole response, observations included."""
    finished: bool
    """Whether the response is complete. Only its score is missing then. This worker computes the score, or a scorer
    process if `grant.hand_over` is set."""
    answered_turns: int
    """Number of turns of the policy that the environment has answered."""
    turn_start: int
    """Number of response tokens before the first token of the current turn."""
    environment_state: bytes
    """State that the environment returned with its last observation, encoded as MessagePack; empty before the first
    one."""

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that the response may still get: `budget` - `length`."""
        return self.budget - self.length

    @property
    def turn_tokens(self) -> np.ndarray:
        """int32 [T]: tokens that the policy has sampled in the current turn."""
        return np.concatenate(self.tokens)[len(self.tokens[0]) + self.turn_start :]

    def append(self, tokens: np.ndarray) -> None:
        self.tokens.append(tokens)
        self.length += len(tokens)

    def observe(self, tokens: np.ndarray, state: bytes) -> None:
        """Append the environment's observation of the current turn, token ids int32 [T], and begin the next turn.
        `state`: the state that the environment returned with it, encoded as MessagePack."""
        self.append(tokens)
        self.answered_turns, self.turn_start, self.environment_state = self.answered_turns + 1, self.length, state

"""Turns of a worker's responses: detects the end of a turn, and has the environment answer it.

Without an environment, a response is a single turn.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from april.config import Config
from april.data.tokenizer import Tokenizer
from april.util.errors import refuse
from april.workers.environments.process import (
    NO_STATE,
    EnvironmentAnswer,
    EnvironmentCall,
    EnvironmentPool,
    EnvironmentRules,
)

HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""U+FFFD, as which the tokeniser decodes an incomplete character at the end of a cut turn."""


@dataclass(frozen=True, eq=False)
class TokenizedObservation:
    """An observation in tokens, or the error why there is none."""

    key: int
    tokens: np.ndarray
    """int32 [T]: token ids of the observation; empty only with an error."""
    state: bytes = b""
    done: bool = False
    failed: bool = False
    """Whether the environment did not answer; the tokens, if any, are `environment.failure_text`."""
    error: str = ""


class EnvironmentTurns:
    """Finds where a turn of the policy ends, and has processes of the environment answer it."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        """Starts the environment's processes. Raises ConfigError."""
        section = self.section = config.environment
        self.tokenizer = tokenizer
        self.turn_end_token_ids = turn_end_ids(section.turn_ends, tokenizer)
        """Token ids that end a turn; they may also be end-of-text tokens."""
        self.response_stops = frozenset(config.sampling.stop_token_ids)
        """Token ids, set in the configuration, that end the response in addition to the tokeniser's end-of-text
        tokens."""
        self.stop_token_ids = self.turn_end_token_ids | tokenizer.eos_token_ids | self.response_stops
        """Token ids that end a turn or the response."""
        self.max_tokens = section.max_turn_tokens or math.inf
        rules = EnvironmentRules(section.name, section.timeout_s, section.memory_mb)
        self.pool = EnvironmentPool(section.processes if section.name else 0, rules)
        self._states: dict[int, bytes] = {}
        """State that the environment had before each turn which waits for its answer, by the `key` of `submit`."""

    @property
    def pending(self) -> int:
        """Number of turns that wait for an answer."""
        return self.pool.pending

    @property
    def awaiting_answer(self) -> Collection[int]:
        """The `key` (see `submit`) of each turn that waits for the environment's answer."""
        return self._states.keys()

    def is_over(self, turn: np.ndarray) -> bool:
        """Whether a turn, int32 [T], has ended without ending the response, so that the environment answers next."""
        if not len(turn):
            return False
        last = int(turn[-1])
        return last in self.turn_end_token_ids or (len(turn) >= self.max_tokens and last not in self.stop_token_ids)

    def remaining_tokens(self, turn: np.ndarray) -> float:
        """Number of tokens that the turn may still get; infinite if turns have no limit of their own."""
        return self.max_tokens - len(turn)

    def submit(self, key: int, turn: np.ndarray, number: int, state: bytes, prompt: np.ndarray, label: str) -> None:
        """Have the environment answer a turn, the token ids int32 [T]; `poll` returns the answer with this `key`.
        `number`: turns before it. `state`: the environment's last state, MessagePack. `prompt`: the sample's token ids,
        int32 [P]. `label`: the row's reference answer."""
        self._states[key] = state
        text = self.tokenizer.response_text(turn, self.section.keep_special_tokens, self.response_stops)
        complete = int(turn[-1]) in self.turn_end_token_ids
        text = text if complete else text.rstrip(HALF_A_CHARACTER)
        self.pool.submit(EnvironmentCall(key, text, number, complete, state, self.tokenizer.decode(prompt), label))

    def poll(self) -> list[TokenizedObservation]:
        """Observations that have arrived since the last call."""
        return [self._observed(answer) for answer in self.pool.poll()]

    def _observed(self, answer: EnvironmentAnswer) -> TokenizedObservation:
        state = self._states.pop(answer.key, b"")
        if answer.error:
            error = f"environment {self.section.name!r}: {answer.error}"
            return TokenizedObservation(
                answer.key, self._encode(self.section.failure_text), state or NO_STATE, failed=True, error=error
            )
        tokens = self._encode(answer.text)
        if not len(tokens) and answer.done:
            tokens = np.array([self.tokenizer.end_of_text], np.int32)
        error = "" if len(tokens) else f"environment {self.section.name!r}: {answer.text!r} has no tokens"
        return TokenizedObservation(answer.key, tokens, answer.state, answer.done, failed=bool(error), error=error)

    def _encode(self, text: str) -> np.ndarray:
        return self.tokenizer.encode_prompt(text)[: self.section.max_observation_tokens]

    def close(self) -> None:
        self.pool.close()


def turn_end_ids(turn_ends: list[str], tokenizer: Tokenizer) -> frozenset[int]:
    """Token ids of texts that end a turn. Raises ConfigError unless each text is one token."""
    ids = set()
    for text in turn_ends:
        encoded = tokenizer.encode_prompt(text).tolist()
        if len(encoded) != 1:
            refuse(
                "environment.turn_ends",
                None,
                f"has {text!r}, which is {len(encoded)} tokens of {str(tokenizer.path)!r}",
                "a turn ends with one token: name a text that is one",
            )
        ids.update(encoded)
    return frozenset(ids)

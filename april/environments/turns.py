"""The turns of a worker's responses: where one is over, and having the environment answer it.

Without an environment a response is a single turn, which nothing but its own end is the end of.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from april.config import Config, ConfigError
from april.data.tokenizer import Tokenizer
from april.environments.messages import NO_STATE, Answer, Call, EnvironmentRules
from april.environments.pool import EnvironmentPool


@dataclass(frozen=True, eq=False)
class Observed:
    """What the environment has answered, in tokens, or why it has not."""

    key: int
    tokens: np.ndarray
    """int32 [T], at least one unless there is an error"""
    state: bytes = b""
    done: bool = False
    failed: bool = False
    """no answer came; the tokens, if any, say so to the policy"""
    error: str = ""


class Turns:
    def __init__(self, config: Config, tokenizer: Tokenizer):
        """Starts the environment's processes. Raises ConfigError."""
        section = self.section = config.environment
        self.tokenizer = tokenizer
        self.ends = turn_end_ids(section.turn_ends, tokenizer)
        """tokens that end a turn, though they may be ends of text, too"""
        self.stops = self.ends | tokenizer.eos_token_ids | frozenset(config.sampling.stop_token_ids)
        """tokens that end a turn or the response"""
        self.max_tokens = section.max_turn_tokens or math.inf
        rules = EnvironmentRules(section.name, section.timeout_s, section.memory_mb)
        self.pool = EnvironmentPool(section.processes if section.name else 0, rules)
        self._states: dict[int, bytes] = {}
        """as they were when the turns that wait for an answer ended"""

    @property
    def pending(self) -> int:
        """Turns that wait for an answer."""
        return self.pool.pending

    @property
    def asked(self) -> Collection[int]:
        """Keys of the turns that wait for an answer."""
        return self._states.keys()

    def is_over(self, turn: np.ndarray) -> bool:
        """Whether the environment is due: the turn, int32 [T], has come to an end that is not the response's."""
        if not len(turn):
            return False
        last = int(turn[-1])
        return last in self.ends or (len(turn) >= self.max_tokens and last not in self.stops)

    def room(self, turn: np.ndarray) -> float:
        """Tokens that it may still have; infinite where turns have no bound of their own."""
        return self.max_tokens - len(turn)

    def ask(self, key: int, turn: np.ndarray, number: int, state: bytes, prompt: np.ndarray, label: str) -> None:
        """Have a turn answered; `poll` brings the answer under the `key`."""
        self._states[key] = state
        decode = self.tokenizer.decode
        self.pool.submit(Call(key, decode(turn), number, int(turn[-1]) in self.ends, state, decode(prompt), label))

    def poll(self) -> list[Observed]:
        """Answers that have arrived since the last call, each once."""
        return [self._observed(answer) for answer in self.pool.poll()]

    def _observed(self, answer: Answer) -> Observed:
        state = self._states.pop(answer.key, b"")
        if answer.error:
            error = f"environment {self.section.name!r}: {answer.error}"
            return Observed(
                answer.key, self._encode(self.section.failure_text), state or NO_STATE, failed=True, error=error
            )
        tokens = self._encode(answer.text)
        if not len(tokens) and answer.done:
            tokens = np.array([self.tokenizer.end_of_text], np.int32)
        error = "" if len(tokens) else f"environment {self.section.name!r}: {answer.text!r} has no tokens"
        return Observed(answer.key, tokens, answer.state, answer.done, failed=bool(error), error=error)

    def _encode(self, text: str) -> np.ndarray:
        return self.tokenizer.encode_prompt(text)[: self.section.max_observation_tokens]

    def close(self) -> None:
        self.pool.close()


def turn_end_ids(turn_ends: list[str], tokenizer: Tokenizer) -> frozenset[int]:
    """Raises ConfigError unless each of the texts is one token."""
    ids = set()
    for text in turn_ends:
        encoded = tokenizer.encode_prompt(text).tolist()
        if len(encoded) != 1:
            raise ConfigError(
                f"key 'environment.turn_ends' has {text!r}, which is {len(encoded)} tokens of {str(tokenizer.path)!r}; "
                "a turn ends with one token: name a text that is one"
            )
        ids.update(encoded)
    return frozenset(ids)

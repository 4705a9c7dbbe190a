"""The interface of an environment: a function that answers a turn of the policy with an observation.

    prompt -> turn -> observation -> turn -> observation -> ... -> end

The policy samples a turn until one of `environment.turn_ends` or `environment.max_turn_tokens`. The environment's
observation follows in the same response; the policy reads its tokens, and they are never trained on. The response ends
when the policy ends its text, when the environment is done, or at `sampling.max_response_tokens`, which limits all
turns and observations together.

An environment keeps nothing between two calls but the `state` that it returns. The state travels with the sample, which
may be aborted between two turns or during one, and resumed much later in another process. **A call must be
idempotent**: after a crash, or an abort before its answer was journaled, it is repeated with the same turn.

A custom environment is named `package.module:function`. If it raises, the turn counts as unanswered.
"""

from collections.abc import Callable
from typing import Any

import msgspec


class EnvironmentTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the policy, which the environment answers."""

    text: str
    """Text sampled since the last observation, with the text that ended the turn, without special tokens."""
    number: int = 0
    """Number of turns before this one."""
    complete: bool = True
    """Whether the policy ended the turn; False if it was cut at `environment.max_turn_tokens`."""
    state: Any = None
    """State returned with the last observation; None in the first turn."""
    prompt: str = ""
    label: str = ""
    """The dataset row's reference answer."""


class Observation(msgspec.Struct, frozen=True):
    """The environment's answer to a turn."""

    text: str
    """Text that follows the turn in the response; may be empty only if `done`."""
    state: Any = None
    """State for the next turn and for verifiers: any value that MessagePack can encode, at most 64 KiB."""
    done: bool = False
    """Whether the response ends with this observation."""


Environment = Callable[[EnvironmentTurn], Observation | str]
"""Function of a turn that returns the environment's answer: an `Observation`, or a text, which is an observation
without state."""

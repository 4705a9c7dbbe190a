"""What an environment is: a function that answers a turn of the policy.

    prompt -> turn -> observation -> turn -> observation -> ... -> end

The policy samples a turn until one of `environment.turn_ends` or `environment.max_turn_tokens`. The environment then
says what follows in the same response; its tokens are read by the policy, and never trained. The response ends when the
policy ends its text, when the environment is done, or with `sampling.max_response_tokens`, which bounds all turns and
observations together.

An environment keeps nothing between two calls but the `state` that it returns. The state travels with the sample, which
may be aborted between two turns or in the midst of one, and go on much later in another process. **A call has to be
repeatable**: after a crash, or an abort before its answer was on disk, it is made again with the same turn. What it
does to the world outside must bear being done twice.

One of your own is named by where it lives, `package.module:function`. It may raise: then it has not answered.
"""

from collections.abc import Callable
from typing import Any

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy has said."""

    text: str
    """since the last observation, with the text that ended it; special tokens left out"""
    number: int = 0
    """turns before it"""
    complete: bool = True
    """ended by the policy; otherwise it was cut at `environment.max_turn_tokens`"""
    state: Any = None
    """as the last observation had it, None in the first turn"""
    prompt: str = ""
    label: str = ""
    """the row's reference answer"""


class Observation(msgspec.Struct, frozen=True):
    """What follows it."""

    text: str
    """may be empty only at the end"""
    state: Any = None
    """for the next turn and for verifiers; anything that MessagePack holds, at most 64 KiB"""
    done: bool = False
    """the response ends here"""


Environment = Callable[[Turn], Observation | str]
"""a text alone is an observation without state"""

"""An environment process, `python -m april.workers.environments.process LIMIT_S`, and a worker's pool of them.

A process gets its rules and calls over the channel that is its stdin and answers over it, framed as the messages of
verifier processes.
"""

import contextlib
import os
import signal
import sys

import msgspec

from april.util.logs import user_traceback
from april.util.pool import (
    LENGTH_BYTES,
    ORPHAN_MARGIN_S,
    READY,
    RETIRED,
    START_LIMIT_S,
    PoolProcess,
    ProcessPool,
    frame,
    private_channel,
    read_rules,
    write_frame,
)
from april.util.resources import limit_memory
from april.wire.limits import MAX_STATE_BYTES, MAX_TEXT_CHARACTERS
from april.workers.environments import ENVIRONMENTS
from april.workers.environments.base import Environment, EnvironmentTurn, Observation

# --- messages ---------------------------------------------------------------------------------------------------------

NO_STATE = msgspec.msgpack.encode(None)
"""The state None, encoded: that of an environment which has answered without a state."""


class EnvironmentRules(msgspec.Struct, frozen=True):
    """Settings that hold for all calls of a run; most are keys of [environment]."""

    name: str
    timeout_s: float
    memory_mb: int
    traced: bool = False
    """Whether the text of an error has the whole traceback, instead of the error's class and message."""


class EnvironmentCall(msgspec.Struct, array_like=True, frozen=True):
    """Request to an environment process: a turn to answer."""

    key: int
    text: str
    number: int
    complete: bool
    state: bytes
    """State that the environment returned with its last observation, as MessagePack; empty before the first one."""
    prompt: str
    label: str


class EnvironmentAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Reply of an environment process: an observation, or the error why there is none."""

    key: int
    text: str = ""
    state: bytes = b""
    done: bool = False
    error: str = ""


# --- the process ------------------------------------------------------------------------------------------------------

OBSERVATION_CHARACTERS = 1 << 18
"""Longest observation (characters); the rest is cut off."""


def main(limit_s: float) -> None:
    """Serve calls until the channel closes.

    The pool enforces the time limit of a call; `limit_s` is longer, and only matters if the pool has died.
    """
    channel, answers = private_channel()
    rules = read_rules(channel, EnvironmentRules)
    calls = os.fdopen(channel, "rb")
    limit_memory(rules.memory_mb)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_LIMIT_S + ORPHAN_MARGIN_S)
    with contextlib.suppress(Exception):
        ENVIRONMENTS.find(rules.name)
    signal.setitimer(signal.ITIMER_REAL, 0)
    write_frame(answers, READY)
    while length := int.from_bytes(calls.read(LENGTH_BYTES), "little"):
        call = msgspec.msgpack.decode(calls.read(length), type=EnvironmentCall)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            answer, out_of_memory = answer_call(rules.name, call, rules.traced), False
        except MemoryError:  # the memory may never be released: end, and let another process replace this one
            answer, out_of_memory = EnvironmentAnswer(call.key, error=f"it needs more than {rules.memory_mb} MiB"), True
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(answers, frame(answer))
        if out_of_memory:
            sys.exit(RETIRED)


def answer_call(name: str, call: EnvironmentCall, traced: bool = False) -> EnvironmentAnswer:
    try:
        return observe(ENVIRONMENTS.find(name), call)
    except MemoryError:
        raise
    except Exception as error:
        text = user_traceback(error) if traced else f"{type(error).__name__}: {error}"[:MAX_TEXT_CHARACTERS]
        return EnvironmentAnswer(call.key, error=text)


def observe(environment: Environment, call: EnvironmentCall) -> EnvironmentAnswer:
    """Call the environment; returns its observation, cut to OBSERVATION_CHARACTERS, and its state. Raises what the
    environment raises, and TypeError or ValueError for an invalid observation."""
    state = msgspec.msgpack.decode(call.state) if call.state else None
    observation = environment(
        EnvironmentTurn(
            text=call.text,
            number=call.number,
            complete=call.complete,
            state=state,
            prompt=call.prompt,
            label=call.label,
        )
    )
    if isinstance(observation, str):
        observation = Observation(observation)
    if not isinstance(observation, Observation) or not isinstance(observation.text, str):
        raise TypeError(f"returned {observation!r}, which is neither an Observation nor text")
    if not observation.text and not observation.done:
        raise ValueError("returned an empty observation though it is not done; say something to the policy")
    packed = msgspec.msgpack.encode(observation.state)
    if len(packed) > MAX_STATE_BYTES:
        raise ValueError(f"returned a state of {len(packed)} bytes, more than {MAX_STATE_BYTES}; keep less in it")
    return EnvironmentAnswer(call.key, observation.text[:OBSERVATION_CHARACTERS], packed, bool(observation.done))


# --- the pool ---------------------------------------------------------------------------------------------------------


class EnvironmentPool(ProcessPool[EnvironmentCall, EnvironmentAnswer]):
    """Pool of environment processes; every submitted call gets exactly one answer, an observation or an error."""

    def __init__(self, processes: int, rules: EnvironmentRules):
        self.rules = rules
        super().__init__(processes)

    def submit(self, call: EnvironmentCall) -> None:
        self.put(call)

    def start_process(self) -> PoolProcess:
        return PoolProcess("april.workers.environments.process", self.rules, self.rules.timeout_s, EnvironmentAnswer)

    def charge(self, item: EnvironmentCall, failure: str) -> EnvironmentAnswer:
        return EnvironmentAnswer(item.key, error=failure)


if __name__ == "__main__":
    main(float(sys.argv[1]))

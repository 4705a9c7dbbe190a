"""Environments in processes of their own: what hangs or crashes is killed, what is no answer is said, others go on."""

import time

import msgspec
import pytest

from april.environments.messages import Call, EnvironmentRules
from april.environments.pool import EnvironmentPool
from april.wire.limits import STATE_BYTES

PATIENCE_S = 120.0


@pytest.fixture
def pool():
    pools = []

    def make(name, timeout_s=30.0, processes=1, memory_mb=4096):
        pools.append(EnvironmentPool(processes, EnvironmentRules(name, timeout_s, memory_mb)))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def call(key=0, text="2+3=", state=None, number=0):
    packed = b"" if state is None else msgspec.msgpack.encode(state)
    return Call(key, text, number, True, packed, prompt="p", label="l")


def answers(pool, *calls):
    """By key; one that comes back twice fails."""
    for one in calls:
        pool.submit(one)
    found, deadline_s = {}, time.monotonic() + PATIENCE_S
    while len(found) < len(calls):
        for answer in pool.poll():
            assert answer.key not in found
            found[answer.key] = answer
        assert time.monotonic() < deadline_s, f"{len(calls) - len(found)} calls never came back"
        time.sleep(0.001)
    assert pool.pending == 0
    return found


def test_a_call_has_its_state_and_the_answer_has_the_next(pool):
    calculator = pool("calculator")
    first = answers(calculator, call(text="so 2+3="))[0]
    assert (first.text, first.done, first.error) == ("5", False, "")
    second = answers(calculator, call(state=msgspec.msgpack.decode(first.state), text="no sum"))[0]
    assert second.text == "error" and msgspec.msgpack.decode(second.state) == {"calls": 2, "errors": 1}


def test_a_call_that_hangs_is_killed_and_those_behind_it_are_tried_again(pool):
    hanging = pool("tests.environments.games:hang", timeout_s=0.5)
    found = answers(hanging, call(0), call(1), call(2))
    assert {answer.error for answer in found.values()} == {"no answer within 0.5 s"}


def test_a_process_that_runs_out_of_memory_says_so_once_and_another_takes_its_place(pool):
    filling = pool("tests.environments.games:fill", memory_mb=1024)
    found = [answers(filling, call(key))[key] for key in range(11)]
    failed = [answer.key for answer in found if answer.error]
    assert failed and {found[key].error for key in failed} == {"it needs more than 1024 MiB"}
    assert all(found[key + 1].text == "1" for key in failed), "the next process has all its memory"


@pytest.mark.parametrize(
    ("game", "error"),
    [
        ("crash", "its process ended (exit code 7)"),
        ("fail", "RuntimeError: no such tool"),
        ("silent", "ValueError: returned an empty observation though it is not done; say something to the policy"),
        ("wrong", "TypeError: returned 5, which is neither an Observation nor text"),
        ("hoard", f"more than {STATE_BYTES}; keep less in it"),
        ("missing", "has no 'missing'"),
    ],
)
def test_what_is_no_answer_is_an_error_with_its_reason(pool, game, error):
    found = answers(pool(f"tests.environments.games:{game}"), call(0), call(1))
    assert all(error in answer.error and not answer.text for answer in found.values()), found

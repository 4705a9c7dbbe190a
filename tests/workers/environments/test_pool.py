"""The pool of environment processes: a hanging or crashing call is killed, and an invalid answer is an error."""

import time

import msgspec
import pytest

from april.wire.limits import MAX_STATE_BYTES
from april.workers.environments.process import EnvironmentCall, EnvironmentPool, EnvironmentRules

PATIENCE_S = 120.0


@pytest.fixture
def pool():
    pools = []

    def make(name, timeout_s=30.0, processes=1, memory_mb=4096):
        pools.append(EnvironmentPool(processes, EnvironmentRules(name, timeout_s, memory_mb)))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def call(key=0, text="2+3=", state=None, number=0):
    packed = b"" if state is None else msgspec.msgpack.encode(state)
    return EnvironmentCall(key, text, number, True, packed, prompt="p", label="l")


def answers(pool, *calls):
    """Answers by key; asserts that each comes back once."""
    for submitted in calls:
        pool.submit(submitted)
    found, deadline_s = {}, time.monotonic() + PATIENCE_S
    while len(found) < len(calls):
        for answer in pool.poll():
            assert answer.key not in found
            found[answer.key] = answer
        assert time.monotonic() < deadline_s, f"{len(calls) - len(found)} calls never came back"
        time.sleep(0.001)
    assert pool.pending == 0
    return found


def test_state_is_passed_from_answer_to_call(pool):
    calculator = pool("calculator")
    first = answers(calculator, call(text="so 2+3="))[0]
    assert (first.text, first.done, first.error) == ("5", False, "")
    second = answers(calculator, call(state=msgspec.msgpack.decode(first.state), text="no sum"))[0]
    assert second.text == "error" and msgspec.msgpack.decode(second.state) == {"calls": 2, "errors": 1}


@pytest.mark.full
def test_a_hanging_call_is_killed_and_the_calls_after_it_are_retried(pool):
    hanging = pool("tests.support.environments:hang", timeout_s=0.5)
    found = answers(hanging, call(0), call(1), call(2))
    assert {answer.error for answer in found.values()} == {"no answer within 0.5 s"}


def test_a_process_out_of_memory_reports_one_error_and_is_replaced(pool):
    filling = pool("tests.support.environments:fill", memory_mb=1024)
    found = [answers(filling, call(key))[key] for key in range(11)]
    failed = [answer.key for answer in found if answer.error]
    assert failed and {found[key].error for key in failed} == {"it needs more than 1024 MiB"}
    assert all(found[key + 1].text == "1" for key in failed), "the next process has all its memory"


@pytest.mark.full
@pytest.mark.parametrize(
    ("game", "error"),
    [
        ("crash", "its process ended (exit code 7)"),
        ("fail", "RuntimeError: no such tool"),
        ("silent", "ValueError: returned an empty observation though it is not done; say something to the policy"),
        ("wrong", "TypeError: returned 5, which is neither an Observation nor text"),
        ("hoard", f"more than {MAX_STATE_BYTES}; keep less in it"),
        ("missing", "has no 'missing'"),
    ],
)
def test_an_invalid_answer_is_an_error_with_its_reason(pool, game, error):
    found = answers(pool(f"tests.support.environments:{game}"), call(0), call(1))
    assert all(error in answer.error and not answer.text for answer in found.values()), found

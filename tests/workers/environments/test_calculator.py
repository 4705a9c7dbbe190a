"""The built-in environments answer an expression with its value, and everything else with `error`."""

import pytest

from april.data.arithmetic import CLEAN, demonstration, draw_task
from april.workers.environments import EnvironmentTurn
from april.workers.environments.calculator import calculator, scratchpad


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3=", "5"), ("I think that 05*3+60=", "75"), ("(1 + 2) * -4=", "-12"), ("1/4=", "0.25"), ("3.05*2=", "6.1"),
        ("12345678901234567890*10=", "123456789012345678900"), ("10/5=", "2"), ("1/0=", "error"), ("2**9=", "error"),
        ("9//2=", "error"), ("(((=", "error"), ("=", "error"), ("two+2", "error"), ("((1))(2)=", "error"),
        ("(" * 90 + "1" + ")" * 90 + "=", "1"), ("9*" * 99 + "9=", str(9**100)),
    ],
)  # fmt: skip
def test_the_calculator(text, value):
    observation = calculator(EnvironmentTurn(text=text, state={"calls": 1, "errors": 0}))
    assert observation.text == value and not observation.done
    assert observation.state == {"calls": 2, "errors": int(value == "error")}


def test_the_scratchpad_ends_any_right_step_of_the_task_with_its_answer():
    import random

    chance = random.Random(0)
    for _ in range(50):
        task = draw_task(chance)
        *steps, _ = demonstration(task, CLEAN).split("=")
        for step in (task.prompt, *(f"{step}=" for step in steps)):
            assert scratchpad(EnvironmentTurn(text=step)).text == "#" + task.answer
    assert scratchpad(EnvironmentTurn(text="5+5=")).text == "error"

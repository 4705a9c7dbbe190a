"""The verifier of programs: the last Python block of a response, run against the label's tests.

The label is a JSON object, or the text of Python assertions that are put behind the program:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                                 what it reads, what it has to write
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}                     arguments and result of a function
    assert add(1, 2) == 3

A failed test ends the program's trial. What running into a limit is worth, `reward.over_limit` says.
"""

import json
import re
import secrets

from april.workers.rewards.answers import after_thinking
from april.workers.rewards.messages import Item, RewardRules, Score, Undecided, takes_items
from april.workers.rewards.sandbox import Limits, Outcome, run

BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
DETAIL_CHARACTERS = 200

CALL = """
import json as _json, sys as _sys
_arguments = _json.load(_sys.stdin)
_function = globals().get({name!r}) or getattr(Solution(), {name!r})
_result = _function(*_arguments)
_sys.stdout.flush()
print(); print({mark!r} + _json.dumps(_result))
"""


@takes_items
def code(items: list[Item], rules: RewardRules) -> list[Score]:
    [item] = items
    tests = read_tests(item.label)
    program = last_block(after_thinking(item.response))
    if program is None:
        return [Score(item.key, 0.0, None, {"program": 0.0, "passed": 0.0})]
    passed = 0
    for test in tests:
        if not passes(program, test, rules):
            break
        passed += 1
    details = {"program": 1.0, "passed": passed / len(tests)}
    return [Score(item.key, float(passed == len(tests)), None, details)]


def last_block(text: str) -> str | None:
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else None


def read_tests(label: str) -> list[tuple[str, str | None, object]]:
    """(function or "", input, wanted output) of each test; one with no input for assertions, which are its function.

    Raises ValueError.
    """
    try:
        tests = json.loads(label)
    except json.JSONDecodeError:
        if "assert" not in label:
            raise ValueError("the label has neither JSON tests nor assertions") from None
        return [(label, None, None)]
    if not isinstance(tests, dict) or not tests.get("inputs"):
        raise ValueError("the label's tests have no inputs")
    inputs, outputs = tests["inputs"], tests.get("outputs")
    if not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("the label's tests have not as many outputs as inputs")
    name = tests.get("fn_name") or ""
    if name:
        return [(name, json.dumps(given), wanted) for given, wanted in zip(inputs, outputs, strict=True)]
    return [("", str(given), str(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]


def passes(program: str, test: tuple[str, str | None, object], rules: RewardRules) -> bool:
    name, given, wanted = test
    mark = secrets.token_hex(8)
    if given is None:
        outcome = tried(f"{program}\n{name}\nprint({mark!r})\n", "", rules)
        return outcome.status == 0 and outcome.output.rstrip().endswith(mark.encode())
    if not name:
        outcome = tried(program, given, rules)
        return outcome.status == 0 and lines(outcome.output.decode(errors="replace")) == lines(str(wanted))
    outcome = tried(program + CALL.format(name=name, mark=mark), given, rules)
    _, found, result = outcome.output.rpartition(mark.encode())
    return outcome.status == 0 and bool(found) and json.loads(result) == wanted


def tried(program: str, given: str, rules: RewardRules) -> Outcome:
    seconds = rules.code_test_s
    limits = Limits(wall_s=seconds, cpu_s=int(seconds) + 1, memory_mb=rules.code_memory_mb)
    outcome = run(program, given.encode(), limits)
    if outcome.exceeded:
        raise Undecided(f"the program exceeded its limit of {outcome.exceeded}")
    return outcome


def lines(text: str) -> list[str]:
    """Without trailing space of lines and of the text."""
    return [line.rstrip() for line in text.strip().splitlines()]

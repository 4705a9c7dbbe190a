"""The verifier of programs: the last Python block of a response, run against the label's tests.

The label is a JSON object, or the text of Python assertions that are put behind the program:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                                 what it reads, what it has to write
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}                     arguments and result of a function
    assert add(1, 2) == 3

Assertions run in a process of their own, the judge, which asks the program for what they call. Its inputs and what they
have to give are never where the program is, and the program writes to nothing that a verdict is read from.

A failed test ends the program's trial. What running into a limit is worth, `reward.over_limit` says.
"""

import json
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from april.workers.rewards.answers import after_thinking
from april.workers.rewards.messages import Item, RewardRules, Score, Undecided, takes_items
from april.workers.rewards.sandbox import Limits, Outcome, run

BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
HERE = Path(__file__).parent
IMPORT = "from april.workers.rewards.plain_values import hear, packed, say, unpacked\n"


def standing_alone(file: str) -> str:
    """The text of a module beside this one, to run where April is not: what it imports stands in its import's place."""
    text = HERE.joinpath(file).read_text()
    assert IMPORT in text
    return text.replace(IMPORT, HERE.joinpath("plain_values.py").read_text())


PROGRAM_SIDE = standing_alone("program_side.py") + "serve(program, open(questions, 'rb'), open(answers, 'wb'))\n"
JUDGE = standing_alone("judge.py")

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
        compile(label, "label", "exec")
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
        return judged(program, name, mark, rules)
    if not name:
        outcome = tried(program, given, rules)
        return outcome.status == 0 and lines(outcome.output.decode(errors="replace")) == lines(str(wanted))
    outcome = tried(program + CALL.format(name=name, mark=mark), given, rules)
    _, found, result = outcome.output.rpartition(mark.encode())
    return outcome.status == 0 and bool(found) and says(result, wanted)


def says(result: bytes, wanted: object) -> bool:
    """Whether the JSON that a program wrote is the wanted value; what is no JSON, or too deep or long to read, is not.

    It is read here and not there, so the program never has the value that it is compared with.
    """
    try:
        return bool(json.loads(result) == wanted)
    except (ValueError, RecursionError):
        return False


def judged(program: str, assertions: str, mark: str, rules: RewardRules) -> bool:
    """Whether the assertions hold, as their judge says; `mark`: what it says then, and the program does not know."""
    questions, asking = os.pipe()
    answers, answering = os.pipe()
    served = f"exec({PROGRAM_SIDE!r}, dict(program=globals(), questions={questions}, answers={answering}))"
    judge = f"{JUDGE}judge({assertions!r}, open({asking}, 'wb'), open({answers}, 'rb'))\nprint({mark!r})\n"
    with ThreadPoolExecutor(1) as beside:
        program_end = beside.submit(run, f"{program}\n{served}\n", b"", limits_of(rules), (questions, answering))
        verdict = run(judge, b"", limits_of(rules), (asking, answers))
        ended = program_end.result()
    if verdict.status == 0 and verdict.output.rstrip().endswith(mark.encode()):
        return True
    if exceeded := ended.exceeded or verdict.exceeded:
        raise Undecided(f"the program exceeded its limit of {exceeded}")
    return False


def limits_of(rules: RewardRules) -> Limits:
    return Limits(wall_s=rules.code_test_s, cpu_s=int(rules.code_test_s) + 1, memory_mb=rules.code_memory_mb)


def tried(program: str, given: str, rules: RewardRules) -> Outcome:
    outcome = run(program, given.encode(), limits_of(rules))
    if outcome.exceeded:
        raise Undecided(f"the program exceeded its limit of {outcome.exceeded}")
    return outcome


def lines(text: str) -> list[str]:
    """Without trailing space of lines and of the text."""
    return [line.rstrip() for line in text.strip().splitlines()]

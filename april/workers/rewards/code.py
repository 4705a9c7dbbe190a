"""The verifier `code`: runs the last Python block of a response against the label's tests.

The label is a JSON object, or Python assertions about the program:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                                 standard input, expected standard output
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}                     arguments, expected result of a function
    assert add(1, 2) == 3

Assertions run in a separate process, the judge, which calls the program's functions remotely. They never enter the
program's process, and the program cannot write to anything that a verdict is read from.

The first failed test ends the trial. `reward.over_limit` decides the outcome of a program that exceeds a limit.
"""

import json
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from april.workers.rewards.messages import Item, RewardRules, Score, Undecided, takes_items
from april.workers.rewards.sandbox import SandboxLimits, SandboxResult, run
from april.workers.rewards.text import after_thinking

BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
HERE = Path(__file__).parent
IMPORT = "from april.workers.rewards.plain_values import pack, receive, send, unpack\n"


def inlined_source(file: str) -> str:
    """Source of a module of this folder, to run without April: its import of `plain_values` is inlined."""
    text = HERE.joinpath(file).read_text()
    assert IMPORT in text
    return text.replace(IMPORT, HERE.joinpath("plain_values.py").read_text())


PROGRAM_SIDE = inlined_source("program_side.py") + "serve(program, open(questions, 'rb'), open(answers, 'wb'))\n"
JUDGE = inlined_source("judge.py")

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
    """(function name or "", input, expected output) of each test; for assertions: (their text, None, None).

    Raises ValueError for an invalid label.
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
        return assertions_hold(program, name, mark, rules)
    if not name:
        result = run_limited(program, given, rules)
        return result.status == 0 and lines(result.output.decode(errors="replace")) == lines(str(wanted))
    result = run_limited(program + CALL.format(name=name, mark=mark), given, rules)
    _, found, value = result.output.rpartition(mark.encode())
    return result.status == 0 and bool(found) and is_wanted_value(value, wanted)


def is_wanted_value(value: bytes, wanted: object) -> bool:
    """Whether the JSON that a program wrote equals the wanted value; False if it is invalid, or too deep to parse.

    The comparison is made here, so the program never has the wanted value.
    """
    try:
        return bool(json.loads(value) == wanted)
    except (ValueError, RecursionError):
        return False


def assertions_hold(program: str, assertions: str, mark: str, rules: RewardRules) -> bool:
    """Whether the assertions hold; `mark`: random text that the judge prints if they do, unknown to the program."""
    questions, asking = os.pipe()
    answers, answering = os.pipe()
    serve_requests = f"exec({PROGRAM_SIDE!r}, dict(program=globals(), questions={questions}, answers={answering}))"
    judge = f"{JUDGE}judge({assertions!r}, open({asking}, 'wb'), open({answers}, 'rb'))\nprint({mark!r})\n"
    with ThreadPoolExecutor(1) as executor:
        program_end = executor.submit(
            run, f"{program}\n{serve_requests}\n", b"", limits_of(rules), (questions, answering)
        )
        verdict = run(judge, b"", limits_of(rules), (asking, answers))
        ended = program_end.result()
    if verdict.status == 0 and verdict.output.rstrip().endswith(mark.encode()):
        return True
    if exceeded := ended.exceeded or verdict.exceeded:
        raise Undecided(f"the program exceeded its limit of {exceeded}")
    return False


def limits_of(rules: RewardRules) -> SandboxLimits:
    return SandboxLimits(wall_s=rules.code_test_s, cpu_s=int(rules.code_test_s) + 1, memory_mb=rules.code_memory_mb)


def run_limited(program: str, given: str, rules: RewardRules) -> SandboxResult:
    result = run(program, given.encode(), limits_of(rules))
    if result.exceeded:
        raise Undecided(f"the program exceeded its limit of {result.exceeded}")
    return result


def lines(text: str) -> list[str]:
    """Lines of a text, without trailing spaces and surrounding blank lines."""
    return [line.rstrip() for line in text.strip().splitlines()]

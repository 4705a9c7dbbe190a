"""The verifier `code`: runs the last Python block of a response against the label's tests.

The label is a JSON object or list, or Python tests; `python_tests.py` reads the latter:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                                 standard input, expected standard output
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}                     arguments, expected result of a function
    assert add(1, 2) == 3

Python tests run in a separate process, the judge, which calls the program's functions remotely. They never enter the
program's process, and the program cannot write to anything that a verdict is read from.

The first failed test ends the trial. `reward.over_limit` decides the outcome of a program that exceeds a limit.
"""

import ast
import json
import marshal
import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from april.workers.rewards.messages import Item, RewardRules, Score, Undecided, right_or_wrong, takes_items
from april.workers.rewards.python_tests import PROGRAM_MODULES, LabelPlan, plan_of
from april.workers.rewards.sandbox import SandboxLimits, SandboxResult, run
from april.workers.rewards.text import after_thinking


class StreamTest(NamedTuple):
    """A test that runs the program with `given` as standard input, and expects `wanted` as standard output."""

    given: str
    wanted: str


class CallTest(NamedTuple):
    """A test that calls a function with `given`, its arguments as a JSON list, and expects the result `wanted`."""

    name: str
    given: str
    wanted: Any
    wrapped: bool = False
    """Whether a result also passes if it equals the only element of `wanted`, as in the data set APPS."""
    owner: str = "Solution"
    """Name of the class that may define the function as a method."""


Test = StreamTest | CallTest | LabelPlan

# --- labels -----------------------------------------------------------------------------------------------------------

COLUMNS = ("input_output", "public_tests", "private_tests", "generated_tests", "public_test_cases",
           "private_test_cases", "tests", "test_cases", "verification_info")  # fmt: skip
"""Columns in which data sets have their tests, in one of the label's forms."""
FUNCTION_KEYS = ("fn_name", "func_name", "entry_point")
FORMS = "JSON with 'inputs' and 'outputs', with 'test' and 'entry_point', or with 'test_list'; or Python tests"
METHOD = re.compile(r"^([A-Za-z_]\w*)(?:\(\))?\.")
"""Regular expression for a class before its method's name, as in `Solution().add` or `Calculator.add`."""
CHECK = re.compile(r"^def check\(", re.MULTILINE)
LONGEST_INT = 4000


@lru_cache(maxsize=256)
def read_label(label: str) -> tuple[Test, ...]:
    """The tests of a label. Raises ValueError for a label that has none, or that asserts nothing."""
    try:
        content = parsed(label)
    except json.JSONDecodeError:
        content = spelled(label)
    if isinstance(content, int | float | None):
        raise ValueError(f"the label is {content!r}; expected {FORMS}")
    tests = tuple(tests_in(content, {}))
    if not tests:
        raise ValueError(f"the label has no tests; expected {FORMS}")
    if not any(isinstance(test, LabelPlan) or str(test.wanted).strip() not in ("", "None", "[]") for test in tests):
        raise ValueError("the label asserts nothing: every expected output is empty")
    return tests


def spelled(text: str) -> Any:
    """The list or dictionary that a text writes in Python, as some data sets print their columns; else the text."""
    try:
        value = ast.literal_eval(text.strip()) if text.lstrip()[:1] in ("[", "{") else text
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, list | dict) else text


def parsed(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < LONGEST_INT else Decimal(digits))


def tests_in(content: Any, around: dict) -> Iterator[Test]:
    """The tests in a label's content, a decoded JSON value, or in a part of it. `around`: the JSON object that encloses
    the part, empty without one. Raises ValueError for content in no known form."""
    if isinstance(content, str):
        function = function_in(around)
        if owner := owner_in(around):
            called = f"\ncheck({owner}().{function})" if CHECK.search(content) else ""
            yield plan_of(content + called, around.get("prompt"), owner=owner)
        else:
            yield plan_of(content, around.get("prompt"), function)
    elif isinstance(content, list) and all(isinstance(each, str) for each in content):
        setup = "\n".join(as_list(around.get("test_setup_code")) + as_list(around.get("test_imports")))
        if content:
            yield plan_of("\n".join([setup, *content]), None, function_in(around))
    elif isinstance(content, list):
        for each in content:
            if not isinstance(each, dict):
                raise ValueError(f"the label is a list with {type(each).__name__} in it; expected {FORMS}")
            yield from tests_in({**around, **each}, {})
    elif isinstance(content, dict):
        yield from tests_of_object(content, around)
    else:
        raise ValueError(f"the label has {type(content).__name__} for tests; expected {FORMS}")


def tests_of_object(content: dict, around: dict) -> Iterator[Test]:
    for many, one in (("inputs", "input"), ("outputs", "output")):
        if one in content and many not in content:
            content = {**content, many: content[one] if isinstance(content[one], list) else [content[one]]}
    outer = {**around, **content}
    if content.get("type") == "function_call":
        raise ValueError(
            "the label's tests are of the type 'function_call', as PrimeIntellect's; give a function's tests as "
            "'fn_name', 'inputs' with a list of arguments for each call, and 'outputs'"
        )
    if "inputs" in content or "outputs" in content:
        yield from pairs_in(content, function_in(outer), owner_in(outer) or "Solution")
        return
    found = [name for name in (*COLUMNS, "test", "test_list", "assertions") if content.get(name)]
    if not found:
        raise ValueError(f"the label has the keys {', '.join(content) or 'of an empty object'}; expected {FORMS}")
    context = {key: value for key, value in outer.items() if key not in found}
    for name in found:
        value = content[name]
        if isinstance(value, str) and name in COLUMNS:
            try:
                value = parsed(value)
            except json.JSONDecodeError:
                if " " not in value.strip() and "\n" not in value.strip():
                    raise ValueError(f"the label's {name} is packed; unpack it into JSON first") from None
        elif isinstance(value, str) and value.lstrip().startswith("["):
            value = parsed(value)
        yield from tests_in(value, context)


def function_in(columns: dict) -> str:
    """Name of the function or method under test; empty if the columns name none. Raises ValueError for a text that is
    no name."""
    given = named_in(columns)
    name = METHOD.sub("", given)
    if name and not name.isidentifier():
        raise ValueError(f"the label names {given[:60]!r} as its function; expected a name, or CLASS().NAME")
    return name


def owner_in(columns: dict) -> str:
    """Name of the class whose method is under test, by a name such as `Solution().add` in the columns of a label; "" if
    a function is. `solution` in `solution.add` is a module, not a class."""
    owner = METHOD.match(named_in(columns))
    return owner[1] if owner and owner[1] not in PROGRAM_MODULES else ""


def named_in(columns: dict) -> str:
    """Name of the function under test, as the columns of a label (a JSON object) or their metadata give it; empty
    without one."""
    metadata = columns.get("metadata") or {}
    metadata = parsed(metadata) if isinstance(metadata, str) else metadata
    named = (str(place[key]) for place in (columns, metadata) for key in FUNCTION_KEYS if place.get(key))
    return next(named, "").strip()


def as_list(value: Any) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else [str(value)] if value else []


def pairs_in(content: dict, function: str, owner: str) -> Iterator[Test]:
    inputs, outputs = content.get("inputs"), content.get("outputs")
    inputs, outputs = ([each] if isinstance(each, str) else each for each in (inputs, outputs))
    if not isinstance(inputs, list):
        raise ValueError("the label's tests have no inputs")
    if not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("the label's tests have not as many outputs as inputs")
    if not function and content.get("testtype") == "functional":
        raise ValueError("the label calls a function and does not name it; give its metadata, or 'fn_name'")
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    for given, wanted in zip(inputs, outputs, strict=True):
        if function:
            as_lines = isinstance(given, str)
            arguments = [literal(line) for line in given.splitlines() if line.strip()] if as_lines else given
            if not isinstance(arguments, list):
                raise ValueError(f"the label gives {function} {type(arguments).__name__}; expected a list of arguments")
            if as_lines and isinstance(wanted, str):
                wanted = literal(wanted, or_text=True)
            try:
                yield CallTest(function, json.dumps(arguments), wanted, wrapped, owner)
            except TypeError as error:
                raise ValueError(f"the label's arguments are no JSON: {error}") from None
        else:
            yield StreamTest(lines_of(given), lines_of(wanted))


def literal(text: str, or_text: bool = False) -> Any:
    """The value of one line of JSON, or of a Python literal. Any other text is returned as it is if `or_text` is set,
    and otherwise raises ValueError."""
    try:
        return parsed(text)
    except json.JSONDecodeError:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            if or_text:
                return text
            raise ValueError(f"the label's argument {text[:40]!r} is no JSON") from None


def lines_of(value: Any) -> str:
    """Text of standard input or output, which may be given as a list of lines."""
    if not isinstance(value, list):
        return "" if value is None else str(value)
    if any(isinstance(line, list | dict) for line in value):
        raise ValueError("the label's lines are nested lists; a function's arguments need its 'fn_name'")
    return "\n".join(str(line).removesuffix("\n") for line in value) + "\n"


# --- running ----------------------------------------------------------------------------------------------------------

BLOCK = re.compile(r"```(python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
LINE_OF_LABEL = re.compile(r'File "label", line (\d+)')
"""Regular expression for a line number of the label's tests in the judge's traceback."""
NO_PROGRAM = "There is no block of Python in the response."
HERE = Path(__file__).parent
IMPORT = re.compile(r"^from april\.workers\.rewards\.plain_values import .*\n", re.MULTILINE)


def inlined(file: str) -> str:
    """A module of this folder, compiled, as source to run without April: its import of `plain_values` is inlined."""
    text, imports = IMPORT.subn("", HERE.joinpath(file).read_text())
    assert imports == 1
    code = compile(HERE.joinpath("plain_values.py").read_text() + text, file, "exec")
    return f"import marshal\nexec(marshal.loads({marshal.dumps(code)!r}))\n"


PROGRAM_SIDE = inlined("program_side.py")
JUDGE = inlined("judge.py")

SERVE = "\nimport program\nProgramSide(vars(program), open({}, 'rb'), open({}, 'wb')).serve()\n"
DECIDE = """
import json
plan = json.loads({plan!r})
Judge(plan, open({questions}, 'wb'), open({answers}, 'rb')).run()
print({mark!r})
"""
CALL = """
import json, sys
arguments = json.load(sys.stdin)
import program
def plain(value):
    return value.tolist() if hasattr(value, "tolist") else str(value) if hasattr(value, "as_tuple") else list(value)
function = vars(program).get({name!r}) or getattr(program.{owner}(), {name!r})
sys.set_int_max_str_digits(0)
result = json.dumps(function(*arguments), default=plain)
sys.stdout.flush()
print(); print({mark!r} + result)
"""


@right_or_wrong
@takes_items
def code(items: list[Item], rules: RewardRules) -> list[Score]:
    [item] = items
    tests = read_label(item.label)
    program = last_block(after_thinking(item.response))
    if program is None:
        return [Score(item.key, 0.0, None, {"program": 0.0, "passed": 0.0}, feedback=NO_PROGRAM)]
    passed, failed = 0, ""
    for test in tests:
        if failed := failure(program, test, rules):
            break
        passed += 1
    details = {"program": 1.0, "passed": passed / len(tests)}
    return [Score(item.key, float(passed == len(tests)), None, details, feedback=failed)]


def last_block(text: str) -> str | None:
    """The last code block of `text` that is marked as Python; if none is, the last one without a language. None without
    a block."""
    blocks = BLOCK.findall(text)
    named = [block for language, block in blocks if language]
    return named[-1] if named else blocks[-1][1] if blocks else None


def failure(program: str, test: Test, rules: RewardRules) -> str:
    """How a program fails a test: a text for the feedback, with input, expected and found output. "" if the program
    passes."""
    mark = secrets.token_hex(8)
    if isinstance(test, LabelPlan):
        return assertion_failure(program, test, mark, rules)
    if isinstance(test, StreamTest):
        result = run_limited(program, test.given, rules)
        output, asked = result.output.decode(errors="replace"), f"Input:\n{test.given}"
        passes = result.status == 0 and is_wanted_text(output, test.wanted)
    else:
        result = run_limited(program, test.given, rules, CALL.format(name=test.name, owner=test.owner, mark=mark))
        _, found, value = result.output.rpartition(mark.encode())
        output, asked = value.decode(errors="replace") if found else "", f"{test.name}, called with {test.given}"
        passes = result.status == 0 and bool(found) and is_wanted_result(value, test)
    errors = result.errors.decode(errors="replace")
    return "" if passes else f"{asked}\nExpected:\n{test.wanted}\nFound:\n{output}\n{errors}".strip()


def assertion_failure(program: str, plan: LabelPlan, mark: str, rules: RewardRules) -> str:
    """How the program fails the Python assertions of a label (`plan`): a text for the feedback, "" if they hold.
    `mark`: random text, unknown to the program, that the judge prints if they hold. Raises Undecided if the program
    exceeds a limit."""
    questions, asking = os.pipe()
    answers, answering = os.pipe()
    serve = PROGRAM_SIDE + SERVE.format(questions, answering)
    judge = JUDGE + DECIDE.format(
        plan=json.dumps(plan._asdict() | {"modules": PROGRAM_MODULES}), questions=asking, answers=answers, mark=mark
    )
    with ThreadPoolExecutor(1) as executor:
        program_end = executor.submit(
            run, with_prompt(program, plan), b"", limits_of(rules), (questions, answering), serve
        )
        verdict = run(plan.source, b"", limits_of(rules), (asking, answers), judge)
        ended = program_end.result()
    if verdict.status == 0 and verdict.output.rstrip().endswith(mark.encode()):
        return ""
    if exceeded := ended.exceeded or verdict.exceeded:
        raise Undecided(f"the program exceeded its limit of {exceeded}")
    raised = verdict.errors.decode(errors="replace")
    lines = [plan.source.splitlines()[int(number) - 1] for number in LINE_OF_LABEL.findall(raised)[-1:]]
    told = (ended.errors.decode(errors="replace"), *lines, raised.strip().rpartition("\n")[2])
    return "\n".join(filter(None, map(str.strip, told))) or "A test fails."


def with_prompt(program: str, plan: LabelPlan) -> str:
    """The program as it is run for Python tests: after the functions and imports of the label's prompt. A program with
    `from __future__` stands alone."""
    return f"{plan.prompt}\n{program}" if plan.prompt and "from __future__" not in program else program


def limits_of(rules: RewardRules) -> SandboxLimits:
    return SandboxLimits(wall_s=rules.code_test_s, cpu_s=int(rules.code_test_s) + 1, memory_mb=rules.code_memory_mb)


def run_limited(program: str, given: str, rules: RewardRules, entry: str = "") -> SandboxResult:
    result = run(program, given.encode(), limits_of(rules), entry=entry)
    if result.exceeded:
        raise Undecided(f"the program exceeded its limit of {result.exceeded}")
    return result


# --- comparison -------------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d+)?")
TOLERANCE = Decimal("1e-6")
"""How far a number may be from an expected one that has decimals. It may differ by this share of the expected number.
It may also differ by this much in absolute terms or by half a unit of the last decimal, whichever is less."""


def is_wanted_text(text: str, wanted: str) -> bool:
    """Whether a program's output is the wanted one, line by line, without trailing spaces and surrounding blank lines.

    Numbers are compared by value: integers exactly, others within `TOLERANCE`.
    """
    found, expected = lines(text), lines(wanted)
    return len(found) == len(expected) and all(map(is_wanted_line, found, expected))


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def is_wanted_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    words, expected = line.split(), wanted.split()
    indented = len(wanted) - len(wanted.lstrip()) == len(line) - len(line.lstrip())
    has_number = any(number_in(word) is not None for word in expected)
    return has_number and indented and len(words) == len(expected) and all(map(is_wanted_word, words, expected))


def is_wanted_word(word: str, wanted: str) -> bool:
    value, expected = number_in(word), number_in(wanted)
    return word == wanted or (value is not None and expected is not None and is_wanted_number(value, expected))


def number_in(word: str) -> Decimal | None:
    """A word as a decimal number; None if it is no number, or has leading zeros."""
    if NUMBER.fullmatch(word) and any(map(str.isdigit, word)):
        try:
            return Decimal(word)
        except ArithmeticError:
            return None
    return None


def is_wanted_number(value: Decimal, wanted: Decimal) -> bool:
    """Whether a number is the wanted one: exactly if `wanted` has no decimals, otherwise within `TOLERANCE`."""
    _, _, exponent = wanted.as_tuple()
    if value == wanted or not isinstance(exponent, int) or exponent >= 0:
        return value == wanted
    if value and value.adjusted() > wanted.adjusted() + 1:
        return False
    half_digit = Decimal(5).scaleb(exponent - 1)
    return abs(value - wanted) <= max(TOLERANCE * abs(wanted), min(half_digit, TOLERANCE))


def is_wanted_result(text: bytes, test: CallTest) -> bool:
    """Whether the JSON that a program wrote is the wanted value; False if it is invalid, or too deep to parse.

    The comparison is made in the verifier's process, so the program never has the wanted value.
    """
    try:
        value = json.loads(text, parse_int=Decimal, parse_float=Decimal)
        return is_same(value, test.wanted) or (test.wrapped and is_same(value, test.wanted[0]))
    except (ValueError, ArithmeticError, RecursionError):
        return False


def is_same(value: Any, wanted: Any) -> bool:
    """Whether two values, decoded from JSON, are equal; numbers are compared as in `is_wanted_text`."""
    if isinstance(wanted, list | tuple):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(is_same, value, wanted))
    if isinstance(wanted, dict):
        keys = {str(key): each for key, each in wanted.items()}
        return isinstance(value, dict) and value.keys() == keys.keys() and all(is_same(value[k], keys[k]) for k in keys)
    if isinstance(value, Decimal) and isinstance(wanted, int | float | Decimal) and not isinstance(wanted, bool):
        return is_wanted_number(value, Decimal(repr(wanted)) if isinstance(wanted, float) else Decimal(wanted))
    return bool(value == wanted)

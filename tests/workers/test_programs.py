"""Which programs are right for the verifier `code`: every form of tests, compared as its data set means it."""

import json

import pytest

from april.workers.rewards.code import code, is_wanted_text, last_block, read_label
from april.workers.rewards.messages import Item, RewardRules
from tests.support.marks import full

pytestmark = pytest.mark.xdist_group("programs")
ADD, WRONG = "def add(a, b):\n    return a + b", "def add(a, b):\n    return None"


def reward(program, label):
    label = label if isinstance(label, str) else json.dumps(label)
    [score] = code([Item(0, "code", f"```python\n{program}\n```", label, "stop")], RewardRules(code_test_s=20.0))
    return score.reward


# --- tests that are only defined ------------------------------------------------------------------------------

DEFINED = {
    "a test function": "def test_add():\n    assert add(1, 2) == 3",
    "one that a helper asserts for": "def equal(x, y):\n    assert x == y\ndef test_add():\n    equal(add(1, 2), 3)",
    "HumanEval's columns": {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
    "a class": "class TestAdd:\n    def test_it(self):\n        assert add(1, 2) == 3",
    "unittest": "import unittest\nclass A(unittest.TestCase):\n    def test_it(self):\n"
                "        self.assertEqual(add(1, 2), 3)\nif __name__ == '__main__':\n    unittest.main()",
    "an import of the program": "from solution import add\ndef test_add():\n    assert add(1, 2) == 3",
    "the program's module, not imported": "assert solution.add(1, 2) == 3",
    "a function of the program's module": '{"fn_name": "solution.add", "inputs": [[1, 2]], "outputs": [3]}',
    "pytest's parameters":
        "import pytest\n@pytest.mark.parametrize('a,b', [(1, 3), (2, 4)])\ndef test_add(a, b):\n"
        "    assert add(a, 2) == b",
    "a status": "import sys\nif add(1, 2) != 3:\n    sys.exit(1)",
    "a list of assertions": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "a parameter of the program's name": "def check(add):\n    assert add(1, 2) == 3\ncheck(add)",
}  # fmt: skip
FURTHER_DEFINED = {
    "an async one": "async def test_add():\n    assert add(1, 2) == 3",
    "a function of another name": "def run():\n    assert add(1, 2) == 3",
    "a star import of it": "from solution import *\ndef test_add():\n    assert add(1, 2) == 3",
    "the program's module": "import solution\ndef test_add():\n    assert solution.add(1, 2) == 3",
    "a list in Python's spelling": "['assert add(1, 2) == 3', 'assert add(0, 0) == 0']",
    "a flag": "right = False\nif add(1, 2) == 3:\n    right = True\nassert right",
}  # fmt: skip


@pytest.mark.parametrize("wrong", [WRONG, full("pass")], ids=["wrong", "nothing"])
@pytest.mark.parametrize("name", [*DEFINED, *map(full, FURTHER_DEFINED)])
def test_tests_that_are_only_defined_are_run(name, wrong):
    label = (DEFINED | FURTHER_DEFINED)[name]
    assert (reward(ADD, label), reward(wrong, label)) == (1.0, 0.0)


@pytest.mark.parametrize("named", ["Solution().pair", full("Solution.pair"), "Pairs().pair"])
@pytest.mark.parametrize(
    "tests",
    [
        {"test": "def check(candidate):\n    assert candidate(of=[2, 7]) == [7, 2]"},
        {"inputs": [[[2, 7]]], "outputs": [[7, 2]]},
        {"test": "assert Solution().pair([2, 7]) == [7, 2]"},
    ],
    ids=["check", "pairs", "assertions"],
)
def test_a_method_of_a_solution_is_called_by_the_name_that_data_sets_give_it(named, tests):
    owner = named.partition(".")[0].removesuffix("()")
    right = f"class {owner}:\n    def pair(self, of):\n        return of[::-1]"
    label = json.loads(json.dumps({**tests, "entry_point": named, "prompt": ""}).replace("Solution()", f"{owner}()"))
    assert (reward(right, label), reward(right.replace("[::-1]", ""), label)) == (1.0, 0.0)
    with pytest.raises(ValueError, match=r"'lambda of: of' .*function"):
        read_label(json.dumps(label | {"entry_point": "lambda of: of"}))


LINKED = """class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
def made(values):
    return Node(values[0], made(values[1:])) if values else None
def is_same(a, b):
    return a is b is None or (None not in (a, b) and a.val == b.val and is_same(a.next, b.next))
"""


def test_helpers_of_a_method_s_tests_are_the_prompt_s_own():
    """A program may use them, and does not replace them in the tests."""
    check = "def check(candidate):\n    assert is_same(candidate(head=made([1, 2])), made([2, 1]))"
    label = {"prompt": LINKED, "entry_point": "Solution().turn", "test": check}
    start = "class Solution:\n    def turn(self, head: Node): "
    assert reward(f"{start}return Node(head.next.val, Node(head.val))", label) == 1.0
    assert reward(f"def is_same(a, b): return True\n{start}return head", label) == 0.0


NOTHING = {
    "a check without its function": ("def check(candidate):\n    assert candidate(1) == 2", "only defines check"),
    "bare comparisons": ("add(1, 2) == 3", "no assert"),
    "what is printed": ("print(add(1, 2))", "no assert"),
    "constants": ("add(1, 2)\nassert True", "do not depend"),
    "nothing of the program": ("x = 3\nassert x == 3", "no name of a program"),
    "what is caught": ("try:\n    assert add(1, 2) == 3\nexcept Exception:\n    print('no')", "are caught"),
    "no cases": ("for a, b in []:\n    assert add(a, 1) == b", "not reached"),
    "no cases by name": ("cases = []\nfor a, b in cases:\n    assert add(a, 1) == b", "not reached"),
    "below a return": ("def test():\n    return\n    assert add(1, 2) == 3", "not reached"),
    "skipped": ("import unittest\n@unittest.skip('x')\nclass T(unittest.TestCase):\n    def test_it(self):\n"
                "        self.assertEqual(add(1, 2), 3)", "no assert"),
    "a fixture": ("def test_add(numbers):\n    assert add(*numbers) == 3", "takes numbers"),
    "the judge's output": ("def test_add(capsys):\n    assert add(1, 2) == 3", "capsys"),
    "a package that is away": ("import no_such_package\nassert add(1, 2) == 3", "no_such_package"),
    "another language": ("expect(add(1, 2)).toBe(3);\n}", "neither JSON nor Python"),
    "no tests": ([], "no tests"),
    "empty outputs": ({"inputs": ["1"], "outputs": [""]}, "every expected output is empty"),
    "another object": ({"question": "?"}, "has the keys question"),
    "packed tests": ({"private_test_cases": "eJxrYJmaxQABUz"}, "packed"),
    "PrimeIntellect's calls": ([{"type": "function_call", "fn_name": "f", "input": [1], "output": 2}], "function_call"),
    "a function without a name": ([{"input": "1", "output": "2", "testtype": "functional"}], "does not name it"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_a_label_that_asserts_nothing_or_cannot_be_run_is_refused_by_its_shape(name):
    label, words = NOTHING[name]
    with pytest.raises(ValueError, match=words):
        read_label(label if isinstance(label, str) else json.dumps(label))


# --- right programs --------------------------------------------------------------------------------------------

VECTOR = (
    "class Vector:\n"
    "    def __init__(self, x, y): self.x, self.y = x, y\n"
    "    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)\n"
    "    def __mul__(self, k): return Vector(self.x * k, self.y * k)\n"
    "    __rmul__ = __mul__\n"
    "    def __neg__(self): return Vector(-self.x, -self.y)\n"
    "    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n"
    "    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)\n"
    "    def __hash__(self): return hash((self.x, self.y))\n"
    "    def __contains__(self, n): return n in (self.x, self.y)\n"
    "    def __lt__(self, other): return abs(self) < abs(other)\n"
    "    def __str__(self): return f'<{self.x}, {self.y}>'\n"
)
PARENT = "class Bad(ValueError):\n    def __init__(self, code): self.code = code\n"
RIGHT = {
    "a function named like a built-in": ("def sum(n):\n    return n[0] + n[1]", "def sum(n): return 1",
                                         "assert sum([1, 2]) == 3\nassert sum([4, 2]) == 6"),
    "one named like a function of a module": ("def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)",
                                              "def gcd(a, b): return 1", "assert gcd(4, 6) == 2"),
    "typing without an import": ("def f(n: List[int]) -> Optional[int]:\n    return Counter(n).most_common(1)[0][0]",
                                 "def f(n): return 2", "assert f([1, 1, 2]) == 1"),
    "a helper of the standard library": ("def f(n):\n    return n / 3", "def f(n): return 1",
                                         "assert math.isclose(f(1), 1 / 3)\nassert isclose(f(1), 1 / 3)"),
    "a counter": ("from collections import Counter\ndef f(s):\n    return Counter(s)", "def f(s): return {}",
                  "assert f('aab') == Counter('aab')"),
    "a lambda": ("def f(g, n):\n    return [g(x) for x in n]", "def f(g, n): return n",
                 "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
    "a callback that calls back": ("def f(g, n):\n    return g(n)\ndef h(n):\n    return n + 1",
                                   "def f(g, n): return n",
                                   "assert f(lambda n: h(n), 1) == 2"),
    "a type": ("def f(n, kind):\n    return [x for x in n if isinstance(x, kind)]", "def f(n, kind): return n",
               "assert f([1, 'a'], int) == [1]\nassert f([1, 'a'], str) == ['a']"),
    "an iterator": ("def f(n):\n    return [x * 2 for x in n]", "def f(n): return []",
                    "assert f(iter([1, 2])) == [2, 4]"),
    "an attribute that is set": ("class Node:\n    def __init__(self, v): self.v, self.next = v, None\n"
                                 "def total(n):\n    return n.v + total(n.next) if n else 0",
                                 "class Node:\n    def __init__(self, v): pass\ndef total(n): return 1",
                                 "a = Node(1)\na.next = Node(2)\na.next.v += 1\nassert total(a) == 4"),
    "dates": ("import datetime\ndef f(d):\n    return d + datetime.timedelta(days=1)", "def f(d): return d",
              "import datetime\nassert f(datetime.datetime(2024, 2, 28)) == datetime.datetime(2024, 2, 29)\n"
              "assert f(datetime.date(2024, 2, 29)) == datetime.date(2024, 3, 1)"),
    "own operators": (VECTOR, VECTOR.replace("self.x + other.x", "self.x"),
                      "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)\nassert Vector(1, 2) * 2 == Vector(2, 4)\n"
                      "assert 2 * Vector(1, 2) == Vector(2, 4)\nassert -Vector(1, 2) == Vector(-1, -2)\n"
                      "assert abs(Vector(3, 4)) == 5\nassert str(Vector(1, 2)) == '<1, 2>'\n"
                      "assert Vector(1, 2) != Vector(2, 1)\nassert Vector(0, 1) < Vector(1, 1)\n"
                      "assert len({Vector(1, 2), Vector(1, 2)}) == 1"),
    "own operators with plain values": (VECTOR, VECTOR.replace("n in", "n not in"),
                                        "v = Vector(1, 2)\nassert v.x == 1\nassert 2 in v and 7 not in v\n"
                                        "w = v * 3\nassert w.y == 6\nassert abs(Vector(3, 4) * 2) == 10"),
    "a named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f():\n    return P(1, 2)",
                      "def f(): return (1, 2)", "assert f() == (1, 2)\nassert f().y == 2"),
    "own exceptions": (PARENT + "def f(n):\n    raise Bad(n)", "def f(n): raise ValueError(n)",
                       "try:\n    f(7)\n    assert False\nexcept Bad as e:\n    assert e.code == 7\n"
                       "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
                       "        with self.assertRaises(Bad): f(1)"),
    "an argument that is changed": ("def f(n): n.sort()", "def f(n): pass", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
    "a generator": ("def f(n):\n    yield 1\n    yield (2, {3})", "def f(n):\n    yield 1",
                    "assert list(f(1)) == [1, (2, {3})]"),
    "a context": ("class C:\n    def __enter__(self): self.n = 1; return self\n    def __exit__(self, *_): self.n = 2",
                  "class C:\n    def __enter__(self): self.n = 0; return self\n    def __exit__(self, *_): pass",
                  "c = C()\nwith c as d:\n    assert d.n == 1\nassert c.n == 2\nassert isinstance(c, C)"),
    "a coroutine": ("async def f(n):\n    return n + 1", "async def f(n): return n",
                    "import asyncio\nassert asyncio.run(f(1)) == 2\nasync def main():\n    return await f(2)\n"
                    "assert asyncio.run(main()) == 3"),
    "deep recursion": ("def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)", "def f(n): return 0",
                       "assert f(5000) == 5000"),
    "an array": ("import numpy as np\ndef f(m):\n    return np.array(m) + 1", "def f(m): return m",
                 "import numpy as np\nassert np.allclose(f([[1.0]]), np.array([[2.0]]))\n"
                 "assert f([1]).tolist() == [2]\n"
                 "assert np.array_equal(f(np.array([1, 2])), [2, 3])\nassert f([1])[0] == 2"),
    "a dataclass": ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\n"
                    "class P:\n    x: int", "class P:\n    def __init__(self, x): self.x = 0",
                    "assert P(1) == P(1) and P(1) != P(2)\nassert P(1).x == 1"),
    "a class with the methods of a list": (
        "class Bag(list):\n    __hash__ = None\n    def __eq__(self, o): return sorted(self) == sorted(o)",
        "class Bag(list):\n    def append(self, n): pass",
        "b = Bag()\nb.append(2)\nb.append(1)\nassert b == [1, 2] and 1 in b and len(b) == 2"),
}  # fmt: skip
FURTHER_RIGHT = {
    "one named like a module": ("def bisect(a, x):\n    return 1", "def bisect(a, x): return 0",
                                "assert bisect([1, 3], 2) == 1"),
    "a built-in's name given to a check": ("def sum(n):\n    return n[0] + n[1]", "x = 1",
                                           "def check(f):\n    assert f([1, 2]) == 3\ncheck(sum)"),
    "a module without an import": ("def f(n):\n    return math.gcd(n, 6) + inf * 0 if False else math.gcd(n, 6)",
                                   "def f(n): return 2", "assert f(9) == 3"),
    "a callback that collects": ("def f(g):\n    g(1)\n    g(b=2)", "def f(g): g(1)",
                                 "seen = []\ndef g(a=0, b=0):\n    seen.append((a, b))\nf(g)\n"
                                 "assert seen == [(1, 0), (0, 2)]"),
    "a built-in function": ("def f(g, n):\n    return g(n)", "def f(g, n): return n", "assert f(len, [1, 2]) == 2"),
    "an object of the label": ("def depth(node):\n    return 1 + max(map(depth, node.children), default=0)",
                               "def depth(node): return 1",
                               "class Node:\n    def __init__(self, *children):\n"
                               "        self.children = list(children)\n"
                               "assert depth(Node(Node(), Node(Node()))) == 3"),
    "dates without an import": ("from datetime import date\ndef f(n):\n    return date(2024, 1, n)",
                                "def f(n): return n",
                                "assert f(2) == date(2024, 1, 2)"),
    "an own list": ("class Stack(list):\n    def push(self, x): self.append(x)",
                    "class Stack(list):\n    def push(self, x): pass",
                    "s = Stack()\ns.push(1)\nassert s.pop() == 1\nassert len(s) == 0"),
    "a long integer": ("def f(n): return 10 ** n", "def f(n): return 10", "assert f(5000) == 10 ** 5000"),
    "an own iterator": ("class Count:\n    def __init__(self, n): self.n = n\n"
                        "    def __iter__(self): return iter(range(self.n))\n"
                        "    def __len__(self): return self.n\n    def __getitem__(self, i): return i",
                        "class Count:\n    def __init__(self, n): pass",
                        "assert list(Count(3)) == [0, 1, 2]\nassert len(Count(3)) == 3\nassert Count(3)[1] == 1"),
    "a singleton": ("class S:\n    one = None\n    def __new__(cls):\n"
                    "        S.one = S.one or object.__new__(cls)\n        return S.one",
                    "class S: pass", "assert S() is S()"),
    "a decorator": ("def twice(g):\n    return lambda *a: 2 * g(*a)", "def twice(g): return g",
                    "@twice\ndef h(n):\n    return n + 1\nassert h(2) == 6"),
    "a large value": ("def f(n):\n    return list(range(n))", "def f(n): return [0] * n",
                      "assert f(200_000) == list(range(200_000))"),
    "a named argument that is changed": ("def f(n):\n    n.append(1)", "def f(n): pass",
                                         "x = []\nf(n=x)\nassert x == [1]"),
    "a main block that reads": (ADD + "\nif __name__ == '__main__':\n    print(add(int(input()), 1))", WRONG,
                                "assert add(1, 2) == 3"),
    "a name of the library that has to raise, too": (
        "def permutations(n):\n    return sorted([[a, b] for a in n for b in n if a != b])\n"
        "def other(n):\n    return n + 1",
        "def permutations(n): return list(n)\ndef other(n): return n + 1",
        "import pytest\nassert permutations([1, 2]) == [[1, 2], [2, 1]]\n"
        "with pytest.raises(TypeError):\n    permutations(None)\nassert other(3) == 4"),
    "an exception of the end in a table": (
        "def f(n):\n    return n", "def f(n): return 1",
        "import pytest\n@pytest.mark.parametrize('n,kind', [(1, ValueError), (2, StopIteration)])\n"
        "def test_f(n, kind):\n    assert f(n) == n"),
    "a class of one letter": ("class M:\n    @staticmethod\n    def add(a, b): return a + b",
                              "class M:\n    @staticmethod\n    def add(a, b): return a", "assert M.add(1, 2) == 3"),
    "JSON that fails": ("import json\ndef f(s):\n    return json.loads(s)", "def f(s): return {}",
                        "import json\ntry:\n    f('{')\n    assert False\nexcept json.JSONDecodeError:\n    pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*RIGHT, *map(full, FURTHER_RIGHT)])
def test_a_right_program_passes_python_tests_and_a_wrong_one_does_not(name):
    right, wrong, label = (RIGHT | FURTHER_RIGHT)[name]
    assert (reward(right, label), reward(wrong, label)) == (1.0, 0.0)


MEAN = "class Solution:\n    def mean(self, n: List[int], k: int) -> float:\n        return sum(n) / k"
CALLS = {
    "arguments as lines of JSON": {"fn_name": "mean", "inputs": ["[1, 2]\n2"], "outputs": ["1.5"]},
    "a wrapped output": {"fn_name": "mean", "inputs": [[[1, 2], 2]], "outputs": [[1.5]]},
    "an integer": {"fn_name": "mean", "inputs": [[[2, 2], 2]], "outputs": [2]},
    "rounded": {"fn_name": "mean", "inputs": [[[1, 0], 3]], "outputs": [0.333333]},
    "LiveCodeBench's rows": [{"input": "[1, 2]\n2", "output": "1.5", "testtype": "functional", "fn_name": "mean"}],
    "LiveCodeBench's columns": {"public_test_cases": json.dumps([{"input": "[2]\n1", "output": "2.0"}]),
                                "metadata": json.dumps({"func_name": "mean"})},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_arguments_and_results_are_read_as_their_data_set_gives_them(name):
    assert (reward(MEAN, CALLS[name]), reward(MEAN.replace("/ k", "/ 7"), CALLS[name])) == (1.0, 0.0)


STREAMS = {
    "lines": {"inputs": [["1", "2"]], "outputs": [["3"]]},
    "one test": {"input": "1\n2\n", "output": "3"},
    "numbers": {"inputs": ["1\n2"], "outputs": [3]},
    "APPS's column": {"input_output": json.dumps({"inputs": ["1\n2\n"], "outputs": ["3\n"]})},
    "CodeContests": {"public_tests": {"input": ["1\n"
    "2"], "output": ["3"]}, "private_tests": {"input": [], "output": []}},
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_standard_input_is_read_as_its_data_set_gives_it(name):
    assert (reward("print(int(input()) + int(input()))", STREAMS[name]), reward("print(4)", STREAMS[name])) == (
        1.0,
        0.0,
    )


@pytest.mark.parametrize(
    ("text", "wanted", "right"),
    [
        ("0.3333333333", "0.333333", True), ("0.166666666", "0.166667", True), ("3", "3.0", True), ("3.0", "3", True),
        ("0.34", "0.33", False), ("100000000000000000001", "100000000000000000000", False), ("1e3", "1000", True),
        ("1e20", "100000000000000000001", False), ("007", "7", False), ("10", "010", False), ("-0.0", "0", True),
        ("1.38e-23", "6.63e-34", False), ("6.6300000001e-34", "6.63e-34", True), ("0.00000001", "0.0", True),
        ("1e999999999", "0.5", False), ("1e99999999999999999999", "0.5", False), ("1e5000", "1" + "0" * 5000, True),
        ("a 1.0", "a 1.00", True), ("b 1.0", "a 1.00", False), ("1  2 \n\n", "1 2", True), ("1 2 3", "1 2", False),
        ("x  y", "x y", False), ("nan", "0.5", False), ("inf", "0.5", False), ("yes", "YES", False), ("", "0", False),
    ],
)  # fmt: skip
def test_numbers_of_an_output_are_compared_by_value_and_integers_exactly(text, wanted, right):
    assert is_wanted_text(text, wanted) is right


def test_the_last_python_block_is_the_program():
    assert last_block("```python\nprint(1)\n```\nIt prints:\n```\n1\n```") == "print(1)\n"
    assert last_block("```\nprint(1)\n```") == "print(1)\n"


# --- what a program cannot forge --------------------------------------------------------------------------------

ANY = (
    "class E(Exception):\n"
    "    def __getattr__(self, name): return lambda *a: 0.0\n"
    + "".join(
        f"    def __{name}__(self, *a): return {value}\n"
        for name, value in [*((each, "True") for each in ("eq", "lt", "le", "gt", "ge", "contains")),
                            *((each, "0.0") for each in ("sub", "rsub", "abs", "float", "round")), ("int", "0")]
    )
    + "    def __hash__(self): return 0\n"
)  # fmt: skip
FORGED = {
    "a difference": ("def f(n): return E()", "assert abs(f(2) - 4.0) < 1e-6"),
    "a difference that stays": (
        "class D(E):\n    def __rsub__(self, o): return self\n    __sub__ = __rsub__\ndef f(n): return D()",
        "assert abs(f(2) - 4.0) < 1e-6",
    ),
    "an order": ("def f(n): return E()", "assert 3 <= f(2) and f(2) >= 4"),
    "what it contains": ("def f(n): return E()", "assert 4 in f(2)"),
    "a method that returns itself": (
        "class Solution(E):\n    def f(self, n): return self",
        "s = Solution()\nassert abs(s.f(2) - 4.0) < 1e-6",
    ),
    "a result with attributes": ("def f(n): return E()", "assert f(2).value is not None\nassert f(2) == 4"),
    "an array of such objects": ("import numpy as np\ndef f(n): return np.array([E()], dtype=object)",
                                 "import numpy as np\nassert np.allclose(f(2), [4.0])"),
    "unittest": ("def f(n): return E()", "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
                                         "        self.assertAlmostEqual(f(2), 4.0)"),
    "a skipped test": ("import unittest\ndef f(n): raise unittest.SkipTest",
                       "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
                       "        self.assertEqual(f(2), 4)"),
    "a helper": ("def isclose(a, b): return True\ndef f(n): return 1", "assert isclose(f(2), 4.0)"),
    "the label's world": (
        "def f(g):\n    try: g.__globals__['__builtins__']['abs'] = lambda x: 0\n    except Exception: pass\n"
        "    return 5.0",
        "def g(): return 1\nassert abs(f(g) - 4.0) < 1e-6",
    ),
    "a standard function's name": ("pass", "assert gcd(4, 6) == 2"),
    "an error's attributes": ("def f(n): raise E()",
                              "try:\n    x = f(2)\nexcept ValueError:\n    x = 4\nassert x == 4"),
    "the standard header": ("gcd", "assert gcd(4, 6) == 2"),
}  # fmt: skip
FURTHER_FORGED = {
    "a difference from the left": ("def f(n): return E()", "assert abs(4.0 - f(2)) < 1e-6"),
    "a capital": ("def Sum(n): return E()", "assert Sum(2) == 4"),
    "a skipped test of a name": ("class SkipTest(Exception): pass\ndef f(n): raise SkipTest",
                                 "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
                                 "        self.assertEqual(f(2), 4)"),
    "a helper's module": ("class math: isclose = lambda *a: True\ndef f(n): return 1",
                          "assert math.isclose(f(2), 4.0)"),
    "an expected date": ("def date(*a): return 1\ndef f(n): return 1", "assert f(2) == date(2024, 1, 2)"),
    "a standard function that a check gets": ("pass", "def check(f):\n    assert f(4, 6) == 2\ncheck(gcd)"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*FORGED, *map(full, FURTHER_FORGED)])
def test_no_object_of_a_program_stands_for_what_is_expected(name):
    program, label = (FORGED | FURTHER_FORGED)[name]
    assert reward(ANY + program, label) == 0.0


COUNT, ADDED = "from collections import Counter as C\ndef f(s): return C(s)", "def f(a, b): return a + b"
JUDGES = {
    "a library without an import": ("def f(n): return n + 2.0", "np", "assert np.allclose(f(2), [4.0])"),
    "pytest without an import": ("def f(n): raise ValueError", "pytest", "with pytest.raises(ValueError):\n    f(2)"),
    "a class of many cases": (COUNT, "Counter", "cases = [('aab', Counter('aab'))]\nfor a, b in cases:\n"
                                                "    assert f(a) == b"),
    "a function of a check": (ADDED, "gcd", {"test": "def check(g):\n    want = gcd(9, 6)\n    assert g(1, 2) == want",
                                             "entry_point": "f"}),
    "the entry point's name": ("from math import gcd", "gcd",
                               {"test": "def check(candidate):\n    assert candidate(9, 6) == gcd(9, 6)",
                                "entry_point": "gcd"}),
    "a function of the other operand": ("def lcm(a, b): return 12", "gcd", "assert lcm(4, 6) == 24 // gcd(4, 6)"),
    "a built-in's name": ("def f(n): return sum(n)", "sum", "want = sum([1, 2])\nassert f([1, 2]) == want"),
    "a function that is also tested": (ADDED, "gcd", "x = gcd(9, 6)\nassert x == 3\nassert f(1, 2) == x"),
}  # fmt: skip
FURTHER_JUDGES = {
    "a library of a check": ("def f(n): return n + 2.0", "np",
                             {"test": "def check(g):\n    assert np.isclose(g(2), 4.0)", "entry_point": "f"}),
    "a class that is also tested": (COUNT, "Counter", "assert Counter([1]) == {1: 1}\n"
                                                      "assert f('aab') == Counter('aab')"),
    "a class by a variable": (COUNT, "Counter", "want = Counter('aab')\nassert f('aab') == want"),
    "a function by a variable": (ADDED, "gcd", "want = gcd(9, 6)\nassert f(1, 2) == want"),
    "a module by a variable": ("import datetime\ndef f(n): return datetime.datetime(2024, 1, n)", "datetime",
                               "want = datetime(2024, 1, 2)\nassert f(2) == want"),
}  # fmt: skip
"""What a label takes from the judge: a right program, the name that a wrong one defines instead, the label."""


@pytest.mark.parametrize("given", ["5", full("E()")])
@pytest.mark.parametrize("name", [*JUDGES, *map(full, FURTHER_JUDGES)])
def test_what_an_assertion_uses_beside_the_function_under_test_is_never_the_program_s(name, given):
    right, shadowed, label = (JUDGES | FURTHER_JUDGES)[name]
    wrong = (
        f"{ANY}class Always(E):\n    def __call__(self, *a, **b): return {given}\n    __enter__ = __exit__ = __call__\n"
    )
    wrong += f"f = lcm = candidate = {shadowed} = Always()\n{shadowed}.allclose = {shadowed}.isclose = Always()"
    assert (reward(right, label), reward(wrong, label)) == (1.0, 0.0)


def test_a_module_that_a_label_does_not_import_is_refused_where_no_library_has_the_name():
    with pytest.raises(ValueError, match="sp like a module"):
        read_label("assert sp.simplify(f(2), 4)")
    assert reward("class sp: add = lambda a, b: a + b", "assert sp.add(1, 2) == 3") == 1.0


STOPS = {
    "every result": "assert all(map(f, [1, 2]))",
    "every item": "it = f(3)\nassert all(map(lambda x: next(it) == x, [1, 2]))",
    "no result": "assert not any(map(f, [1, 2]))",
    "a loop": "for found in map(f, [1, 2]):\n    assert found == 1",
    "a list": "assert [x for x in filter(f, [1, 2])] == []",
    "a pair": "assert dict(zip([1], map(f, [1]))) == {}",
    "a sentinel": "for found in iter(lambda: f(1), 7):\n    assert found == 1",
    "a name in it": "assert all(map(f, [1]))\ntry:\n    pass\nexcept StopIteration:\n    pass",
}
STOPPING = {
    "raises it": "def f(n): raise StopIteration",
    "raises the other": "def f(n): raise StopAsyncIteration",
    "raises one of its own": "class S(StopIteration): pass\ndef f(n): raise S",
    "raises one of its own of that name": "class StopIteration(StopIteration): pass\ndef f(n): raise StopIteration",
    "is empty": "def f(n): return iter(())",
    "closes": "def f(n): raise GeneratorExit",
    "interrupts": "def f(n): raise KeyboardInterrupt",
    "exits": "def f(n): raise SystemExit(0)",
    "ends": "import os\ndef f(n): os._exit(0)",
}


@pytest.mark.full
@pytest.mark.parametrize("how", STOPPING)
def test_an_exception_of_the_program_never_ends_a_loop_of_the_judge_as_if_all_were_well(how):
    for what, label in STOPS.items():
        if how != "is empty" or what == "every item":
            assert reward(STOPPING[how], label) == 0.0, what


CAUGHT = {
    "a stop": ("def f(n): return next(n)", "def f(n): return 1",
               "try:\n    f(iter([]))\n    assert False\nexcept StopIteration:\n    pass"),
    "one of several": ("def f(n): raise StopIteration(7)", "def f(n): return 1",
                       "import pytest\nwith pytest.raises((ValueError, StopIteration)):\n    f(iter([]))\n"
                       "try:\n    f(iter([]))\n    assert False\nexcept (KeyError, StopIteration) as e:\n"
                       "    assert isinstance(e, StopIteration) and e.value == 7"),
    "the end of a generator": ("def f(n):\n    yield n", "def f(n):\n    yield n\n    yield n",
                               "g = f(2)\nassert next(g) == 2\nassert next(g, 7) == 7\n"
                               "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
                               "        with self.assertRaises(StopIteration): next(g)"),
    "an exit": ("import sys\ndef f(n): sys.exit(n)", "def f(n): return 1",
                "try:\n    f(3)\n    assert False\nexcept SystemExit as e:\n    assert e.code == 3"),
    "no end of the process": ("def f(n): raise ValueError", "import os\ndef f(n): os._exit(0)",
                              "import pytest\nwith pytest.raises(Exception):\n    f(3)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUGHT)
def test_a_test_catches_what_a_right_program_raises(name):
    right, wrong, label = CAUGHT[name]
    assert (reward(right, label), reward(wrong, label)) == (1.0, 0.0)

"""Analysis of Python tests by their syntax tree, before a program runs.

It finds which tests there are, which names are the program's, and whether anything is asserted about the program. Tests
that cannot be used are a ValueError that names their shape.
"""

import ast
import builtins
import importlib.util
import string
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from april.workers.rewards.python_syntax import (
    PROGRAM_MODULES,
    Function,
    blocks_of,
    called_in,
    decorators_of,
    flow,
    free_names,
    header_of,
    is_assertion_call,
    is_skipped,
    is_test_class,
    loads,
    names_from_program,
    names_of,
    operands_of,
    statements_of,
    top_level,
)
from april.workers.rewards.sandbox_runner import header


class LabelPlan(NamedTuple):
    """The Python tests of a row's label, and what the process that judges a program by them needs to know."""

    source: str
    prompt: str
    """Python that the tests may use, such as the functions that HumanEval's prompt brings along."""
    entry_point: str
    """Name of the program's function that `check(candidate)` gets; empty without one."""
    names: list[str]
    """The program's names that the tests use."""
    needed: list[str]
    """Names among `names` that a built-in or the standard library has, too. If the program lacks one, the test fails,
    and the built-in does not take its place."""
    members: list[str]
    """Module names by which the tests mean the module's member of the same name, as in `datetime(2024, 1, 1)`."""
    libraries: dict[str, str]
    """Names in the tests that mean a module of LIBRARIES -> the module."""
    classes: list[str]
    """The program's classes whose instances the tests use as objects, so that operators are those of the class."""
    tests: dict[str, bool]
    """Functions and classes that the source defines and does not call -> whether they take `candidate`, the function
    under test, as their argument."""


BUILTINS = frozenset(dir(builtins))
VALUES = frozenset(name for kind in (str, list, dict, set, float, int, bytes, tuple) for name in dir(kind))
VALUES |= {"shape", "dtype", "ndim", "T", "tolist", "item"}
VALUES -= {
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popleft",
    "remove",
    "sort",
    "update",
}
"""Attributes of plain values that do not change them; others show that a value is an object of the program."""
WRAPPERS = {"list", "tuple", "set", "sorted", "len", "abs", "round", "isinstance", "next", "dict", "str", "repr",
            "bool"}  # fmt: skip
LIBRARIES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "nx": "networkx", "scipy": "scipy",
             "networkx": "networkx", "sympy": "sympy", "torch": "torch", "pytest": "pytest"}  # fmt: skip
"""Modules that tests may use without an import, by the names they use. These names are never the program's."""
SINGLE_LETTERS = frozenset(string.ascii_uppercase)
"""The capital letters A to Z. Some are names of flags in the module `re`, but in tests they often name the program's
class, so they do not count as names of the standard library."""
UNREACHABLE = {"capsys", "monkeypatch", "mocker", "tmp_path", "patch", "redirect_stdout", "redirect_stderr"}
"""Names that show that a test patches the program's process or reads its output, neither of which a judge can do."""


def plan_of(source: str, prompt: Any = None, entry_point: str = "", owner: str = "") -> LabelPlan:
    """The plan that tells a judge how to run the Python tests in `source`. `prompt`: the row's prompt, used if it is
    Python that defines `entry_point`. `entry_point`: name of the function under test, "" if not known. `owner`: name of
    the program's class if a method is tested, else "".

    Raises ValueError if they cannot be run, or assert nothing.
    """
    try:
        return LabelReader(source, usable_prompt(prompt, entry_point, owner), entry_point, owner).plan()
    except SyntaxError as error:
        raise ValueError(f"the label is neither JSON nor Python ({error.msg}, line {error.lineno})") from None


def usable_prompt(prompt: Any, entry_point: str, owner: str = "") -> str:
    """`prompt` itself if it is Python of definitions, imports and assignments alone that defines `entry_point`, as
    HumanEval's do; empty otherwise. `owner`: the class of which `entry_point` is a method, so that the prompt need not
    define it."""
    try:
        body = ast.parse(prompt).body if isinstance(prompt, str) else []
    except (SyntaxError, ValueError):
        return ""
    harmless = Function | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign
    is_code = all(isinstance(node, harmless) or isinstance(getattr(node, "value", None), ast.Constant) for node in body)
    is_usable = owner or entry_point in {getattr(node, "name", "") for node in body}
    return prompt if is_code and is_usable and body else ""


class LabelReader:
    """Reads the syntax tree of Python tests. `prompt`: Python that comes before them. Raises SyntaxError."""

    def __init__(self, source: str, prompt: str, entry_point: str, owner: str = ""):
        self.source, self.prompt, self.entry_point = source, prompt, entry_point
        self.tree = ast.parse(source)
        self.nodes = [node for node in ast.walk(self.tree) if not isinstance(node, ast.Constant | ast.expr_context)]
        self.names_within: dict[ast.AST, frozenset[str]] = {}
        self.defined = {node.name: node for node in self.tree.body if isinstance(node, Function | ast.ClassDef)}
        assigns = [node for node in self.nodes if isinstance(node, ast.Assign)]
        self.assigned = {each.id: node.value for node in assigns for each in node.targets if isinstance(each, ast.Name)}
        self.imported = {name for node in self.nodes for name in names_from_program(node)}
        free = free_names(source) - (free_names(prompt, bound=True) - {entry_point, owner}) - self.imported
        self.free = free - ({"candidate"} if entry_point else set())
        modules = self.free & sys.stdlib_module_names
        found = header(self.free - BUILTINS - modules - SINGLE_LETTERS)
        self.standard = modules | found.keys()
        self.names = {name for name in self.free if name not in BUILTINS and name not in self.standard}
        self.values = {name: names_of(value) for name, value in self.assigned.items()}
        bases = Counter(getattr(node.value, "id", "") for node in self.nodes if isinstance(node, ast.Attribute))
        uses = Counter(use.id for use in names_of(self.tree))
        self.modules = {name for name in self.names if bases[name] == uses[name]}
        self.libraries = {name: LIBRARIES[name] for name in self.modules & LIBRARIES.keys()}
        self.names -= self.libraries.keys()
        given, candidates = self.standard | BUILTINS, {"candidate"} if entry_point else set()
        candidates |= {entry_point} if entry_point and not self.is_expected(entry_point) else set()
        self.names |= candidates & self.free
        others = self.names | self.imported | candidates
        self.tainted = self.spread(others)
        called = called_in(self.tree) & self.standard
        subjects = self.subjects(set() if entry_point else self.standard if others else given & self.free)
        if not others and not subjects:
            subjects = {name for name in called if not isinstance(found.get(name), type)} - self.helpers()
            subjects |= self.tested & self.standard or self.tested & BUILTINS & self.free - subjects
        self.needed = subjects - candidates
        self.members = sorted(called & modules - subjects - candidates)
        self.names |= subjects
        self.tainted = self.spread(self.tainted | self.names)

    def plan(self) -> LabelPlan:
        self.refuse_what_cannot_run()
        tests, seen = self.tests(), set[str]()
        roots = [node for name in tests for node in statements_of(self.defined[name])]
        reached = self.asserts(self.tree.body, seen) | self.asserts(roots, seen)
        if not reached or not (self.names or self.imported or self.entry_point):
            raise ValueError(f"the label asserts nothing: {self.shape()}")
        names, needed, classes = sorted(self.names), sorted(self.needed), sorted(self.classes())
        first = (self.source, self.prompt, self.entry_point, names, needed)
        return LabelPlan(*first, self.members, self.libraries, classes, tests)

    # --- names --------------------------------------------------------------------------------------------------

    def spread(self, tainted: set[str]) -> set[str]:
        """All names of the tests whose values may depend on the program under test, found by the flow of data.
        `tainted`: the names for which this is known beforehand."""
        tainted = tainted | {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        size = -1
        while size < len(tainted):
            size = len(tainted)
            tainted |= {name for name, node in self.defined.items() if self.mentions(node, tainted)}
            for node in self.nodes:
                sources, targets = flow(node)
                if any(self.mentions(source, tainted) for source in sources):
                    names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
                    tainted |= names - self.free
        return tainted

    def mentions(self, node: ast.AST, names: set[str]) -> bool:
        return not names.isdisjoint(self.names_in(node))

    def names_in(self, node: ast.AST) -> frozenset[str]:
        if node not in self.names_within:
            own = frozenset({node.id} if isinstance(node, ast.Name) else ())
            self.names_within[node] = own.union(*map(self.names_in, ast.iter_child_nodes(node)))
        return self.names_within[node]

    def subjects(self, eligible: set[str]) -> set[str]:
        """Names in `eligible` that mean functions of the program under test. Each also names a built-in, or something
        in the standard library.

        The program's function replaces the other one only if the tests use it in no other way than these: as the
        outermost call of the tested operand, in an assertion that depends on nothing else of the program; as a call
        that is to raise; as an argument of a test function. So it never computes or sees an expected value.
        """
        of_cases = {arg.arg for node in self.defined.values() if "parametrize" in decorators_of(node)
                    for arg in ast.walk(node) if isinstance(arg, ast.arg)}  # fmt: skip
        self.tested, under_test, elsewhere = set[str](), set[int](), set[int]()
        for node in self.nodes:
            operands = operands_of(node)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in self.defined:
                operands = [ast.Call(each, [], []) if isinstance(each, ast.Name) else each for each in node.args]
            names = {id(each): self.outermost(each) for each in operands}
            depends = any(self.mentions(each, self.tainted - of_cases) for each in operands)
            self.tested |= set() if depends else set(names.values())
            first = next((each for each in operands if names[id(each)] and not depends), None)
            for each in operands:
                for use in self.uses_in(each):
                    (under_test if each is first and use.id == names[id(each)] else elsewhere).add(id(use))
            if isinstance(node, ast.With) and "aises" in ast.unparse(node.items[0]):
                calls = [each.value for each in node.body if isinstance(each, ast.Expr)]
                under_test |= {id(call.func) for call in calls if isinstance(call, ast.Call)}
        uses = [use for use in names_of(self.tree) if isinstance(use.ctx, ast.Load)]
        return self.tested & eligible - {use.id for use in uses if id(use) not in under_test - elsewhere}

    def uses_in(self, node: ast.AST) -> list[ast.Name]:
        """All uses of names in an expression, in the expressions that the tests assign to these names, and so on."""
        found, seen = names_of(node), set[str]()
        for each in found:
            if each.id not in seen:
                seen.add(each.id)
                found += self.values.get(each.id, [])
        return found

    def is_expected(self, name: str) -> bool:
        """Whether `name` is a built-in or in the standard library, and an assertion compares `candidate`, the function
        under test, with it. Such a built-in gives the expected result."""
        known = name in self.standard | BUILTINS
        return known and any({"candidate", name} <= self.compared(node) for node in self.nodes)

    def compared(self, node: ast.AST) -> set[str]:
        """Names in the operands that the assertion `node` compares, directly or by values assigned to variables; empty
        if `node` is no assertion."""
        return {use.id for each in operands_of(node) for use in self.uses_in(each)}

    def helpers(self) -> set[str]:
        """Functions of the standard library with which an assertion compares the program's result, or computes the
        expected one. The program's functions must not replace them, since they would see what is expected."""
        found = set()
        for node in self.nodes:
            operands = operands_of(node)
            depend = [operand for operand in operands if self.mentions(operand, self.tainted)]
            if len(operands) == len(depend) == 1 and isinstance(operands[0], ast.Call):
                found |= loads(operands[0].func)
            if depend:
                found |= {name for operand in operands if operand not in depend for name in called_in(operand)}
        return found & self.standard

    def outermost(self, node: ast.expr) -> str:
        """Name of the outermost function called in an operand, apart from mere conversions; empty without a call."""
        if isinstance(node, ast.Name) and node.id in self.assigned:
            value = self.assigned[node.id]
            return "" if node.id in loads(value) else self.outermost(value)
        if isinstance(node, ast.BinOp):
            return self.outermost(node.left) or self.outermost(node.right)
        if isinstance(node, ast.Attribute | ast.Subscript):
            return self.outermost(node.value)
        if not isinstance(node, ast.Call):
            return ""
        if not isinstance(node.func, ast.Name):
            return self.outermost(node.func)
        inner = self.outermost(node.args[0]) if node.func.id in WRAPPERS and node.args else ""
        return inner or node.func.id

    def classes(self) -> set[str]:
        """Classes of the program whose instances the tests use as objects. They are capitalised names that the tests
        call, if the tests then use an attribute of the result that no plain value has or that changes it, ask
        `isinstance`, or join two results by an operator."""
        candidates = {name for name in self.names | self.imported if name[0].isupper()}
        made: dict[str, set[str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    made.setdefault(ast.unparse(target), set()).update(called_in(node.value) & candidates)
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and node.attr not in VALUES:
                base = node.value
                while isinstance(base, ast.Subscript):
                    base = base.value
                found |= made.get(ast.unparse(base), set())
                if isinstance(base, ast.Call):
                    found |= called_in(base) & candidates
            if isinstance(node, ast.BinOp):
                left, right = (
                    called_in(side) & candidates or made.get(ast.unparse(side), set())
                    for side in (node.left, node.right)
                )
                found |= left & right
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and len(node.args) == 2:
                found |= loads(node.args[1]) & candidates
        return found

    # --- tests --------------------------------------------------------------------------------------------------

    def tests(self) -> dict[str, bool]:
        """Functions and classes that are run after the source: pytest's and unittest's tests, and functions with
        assertions that nothing uses -> whether they take `candidate`, the function under test."""
        called = {
            node.value.func.id
            for node in top_level(self.tree.body)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        }
        used, found = loads(self.tree), dict[str, bool]()
        for name, node in self.defined.items():
            if isinstance(node, ast.ClassDef):
                if is_test_class(node):
                    found[name] = False
                continue
            needed, decorators = len(node.args.args) - len(node.args.defaults), decorators_of(node)
            if name in called or "fixture" in decorators or is_skipped(node):
                continue
            if name.startswith("test") or (name not in used and self.asserts(node.body, set())):
                if needed == 0 or "parametrize" in decorators:
                    found[name] = False
                elif needed == 1 and self.entry_point:
                    found[name] = True
                elif name.startswith("test") and name not in used:
                    raise ValueError(f"the label's {name} takes {node.args.args[0].arg}, which nothing gives to it")
        return found

    def asserts(self, statements: Iterable[ast.stmt], seen: set[str]) -> bool:
        """Whether statements, when they are executed, assert something that depends on the program. `seen`: names of
        functions and classes already searched; those found are added."""
        found = False
        for node in statements:
            if isinstance(node, Function | ast.ClassDef):
                continue
            found |= self.asserts_itself(node)
            for name in loads(header_of(node)) & self.defined.keys() - seen:
                seen.add(name)
                found |= self.asserts(statements_of(self.defined[name], any_method=True), seen)
            for block in blocks_of(node, self.tree):
                found |= self.asserts(block, seen)
            if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
                break
        return found

    def asserts_itself(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Assert):
            fails = isinstance(node.test, ast.Constant) and not node.test.value
            return fails or self.mentions(node.test, self.tainted)
        if isinstance(node, ast.Raise):
            return node.exc is not None
        if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call) and call.args:
            status = call.args[0].value if isinstance(call.args[0], ast.Constant) else 1
            if status not in (0, None) and ast.unparse(call.func) in ("exit", "quit", "sys.exit", "os._exit"):
                return True
        return any(
            is_assertion_call(call) and (isinstance(node, ast.With) or any(self.mentions(arg, self.tainted) for arg in
                                         (*call.args, *(keyword.value for keyword in call.keywords))))
            for call in ast.walk(header_of(node)) if isinstance(call, ast.Call)
        )  # fmt: skip

    # --- refusals -----------------------------------------------------------------------------------------------

    def shape(self) -> str:
        """Why the tests assert nothing about a program, as a clause for the text of the error that refuses the
        label."""
        functions = [node for node in self.defined.values() if isinstance(node, Function)]
        waiting = [node for node in functions if node.args.args and self.asserts(node.body, set())]
        if waiting and not self.entry_point:
            first = waiting[0]
            parameters = ", ".join(argument.arg for argument in first.args.args)
            return (
                f"it only defines {first.name}({parameters}); name the function that it gets, as in "
                "data.label_key = 'test,entry_point'"
            )
        if not self.tainted & loads(self.tree):
            return "it uses no name of a program"
        if any(isinstance(node, ast.Assert) for node in self.nodes):
            return "its assertions are not reached, are caught, or do not depend on the program"
        return "it has no assert, no raise and no unittest assertion; what it only prints or compares is no verdict"

    def refuse_what_cannot_run(self) -> None:
        for module in self.libraries.values():
            refuse_module(module)
        for node in self.nodes:
            names = self.compared(node) & self.tainted
            for name in sorted(names & self.names & self.modules - {*PROGRAM_MODULES, *self.needed}):
                if name[0].islower() and names - {name} - self.assigned.keys():
                    raise ValueError(f"the label uses {name} like a module, and does not import it")
        for node in self.nodes:
            if isinstance(node, Function) and (wanted := {arg.arg for arg in node.args.args} & UNREACHABLE):
                raise ValueError(f"the label's {node.name} takes pytest's {min(wanted)}, which no program shares")
            if isinstance(node, ast.ClassDef) and any(loads(base) & self.names for base in node.bases):
                raise ValueError(f"the label's class {node.name} is derived from a class of the program")
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                refuse_module(module)
            replaced = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node)
            if replaced in ("sys.stdin", "sys.stdout", "builtins.input", "builtins.print"):
                raise ValueError(f"the label replaces {replaced} of the judge's process, and not the program's")
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            if wanted := names & UNREACHABLE:
                raise ValueError(f"the label uses {min(wanted)}, which acts on the judge's process alone")


def refuse_module(name: str) -> None:
    top = name.partition(".")[0]
    if name == "unittest.mock":
        raise ValueError("the label imports unittest.mock, which acts on the judge's process and not the program's")
    if top not in PROGRAM_MODULES and top not in sys.stdlib_module_names and importlib.util.find_spec(top) is None:
        known = ", ".join(PROGRAM_MODULES)
        raise ValueError(f"the label imports {top}, which is not installed; the program itself is one of {known}")

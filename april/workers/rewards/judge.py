"""The judge of a program under test: it runs the label's assertions, and calls the program's functions remotely.

It runs in its own sandboxed process, without April, and only it knows the expected results. The program's answers are
plain values, which are compared here. What a function returns as an object of the program equals no plain value, and
no operator of it with a plain value yields one: such an operator would see what is expected.
"""

import ast
import builtins
import importlib
import operator
import sys
from types import ModuleType
from typing import Any

from april.workers.rewards.plain_values import error_named, pack, receive, send, unpack

OWN, ANSWER, DERIVED = "own", "answer", "derived"
"""Origin of a handle's object: OWN, made by a class of the program that the tests use; ANSWER, returned by the program;
DERIVED, the value of an operator between an object of the program and a plain value."""
ERRORS = {"JSONDecodeError": "json", "InvalidOperation": "decimal", "FrozenInstanceError": "dataclasses",
          "Empty": "queue", "Full": "queue", "StatisticsError": "statistics"}  # fmt: skip
"""Exceptions outside of `builtins` that tests may expect of the program: name -> standard library module with it."""
BOTH_WAYS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
             "divmod")  # fmt: skip
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY = ("neg", "pos", "invert", "abs", "float", "int", "complex", "round", "index", "len", "hash", "format")
OPERATORS = {*COMPARISONS, *BOTH_WAYS, *(f"i{name}" for name in BOTH_WAYS), "and_", "or_", "neg", "pos", "invert"}


class HeldValue:
    """Handle of an object in the program's process. Tests use it like the object itself."""

    __slots__ = ("_judge_ask", "_judge_number", "_judge_origin")

    def __init__(self, ask, number, origin):
        for name, value in zip(HeldValue.__slots__, (ask, number, origin), strict=True):
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self):
        return self._judge_ask("getattr", self, "__class__")

    def __getattr__(self, name):
        return self._judge_ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._judge_ask("setattr", self, name, value)

    def __delattr__(self, name):
        self._judge_ask("delattr", self, name)

    def __call__(self, /, *arguments, **named):
        return self._judge_ask("call", self, *arguments, **named)

    def __getitem__(self, key):
        return self._judge_ask("getitem", self, key)

    def __setitem__(self, key, value):
        self._judge_ask("setitem", self, key, value)

    def __delitem__(self, key):
        self._judge_ask("delitem", self, key)

    def __contains__(self, item):
        if self._judge_origin == OWN or type(item) is HeldValue:
            return self._judge_ask("contains", self, item)
        return any(item == each for each in self)

    def __bool__(self):
        return self._judge_ask("bool", self) if self._judge_origin == OWN else True

    def __iter__(self):
        return iter(self._judge_ask("all", self))

    def __next__(self):
        return self._judge_ask("next", self)

    def __reversed__(self):
        return iter(self._judge_ask("all", self._judge_ask("reversed", self)))

    def __str__(self):
        return self._judge_ask("str", self)

    def __repr__(self):
        return self._judge_ask("repr", self)

    def __copy__(self):
        return self._judge_ask("copy", self)

    def __deepcopy__(self, memo):
        return self._judge_ask("deepcopy", self)

    def __enter__(self):
        return self._judge_ask("enter", self)

    def __exit__(self, *_):
        self._judge_ask("exit", self)

    def __instancecheck__(self, value):
        return type(value) is HeldValue and self._judge_ask("isinstance", value, self)

    def __subclasscheck__(self, kind):
        return type(kind) is HeldValue and self._judge_ask("issubclass", kind, self)

    def __await__(self):
        return self._judge_ask("await", self)
        yield


def operate(name, *operands):
    """The result of an operator, such as "eq" or "add" (`name`), at least one of whose operands is a handle
    (`HeldValue`)."""
    handles = [each for each in operands if type(each) is HeldValue]
    own = any(handle._judge_origin == OWN for handle in handles)
    if name in COMPARISONS and len(handles) == 1 and not own:
        return name == "ne" if name in ("eq", "ne") else NotImplemented
    result = handles[0]._judge_ask(name, *operands)
    if own or len(handles) == len(operands):
        return HeldValue(result._judge_ask, result._judge_number, OWN) if own and type(result) is HeldValue else result
    if type(result) is not HeldValue:
        raise TypeError(f"a test does not take the value of {name} between an object of the program and a plain value")
    return HeldValue(result._judge_ask, result._judge_number, DERIVED)


def add_operators():
    def binary(name, swapped=False):
        return lambda self, other: operate(name, other, self) if swapped else operate(name, self, other)

    def unary(name):
        return lambda self, *more: self._judge_ask(name, self, *more) if more else operate(name, self)

    for name in BOTH_WAYS:
        operation = f"{name}_" if name in ("and", "or") else name
        setattr(HeldValue, f"__{name}__", binary(operation))
        setattr(HeldValue, f"__r{name}__", binary(operation, swapped=True))
        if hasattr(operator, f"i{name}"):
            setattr(HeldValue, f"__i{name}__", binary(f"i{name}"))
    for name in COMPARISONS:
        setattr(HeldValue, f"__{name}__", binary(name))
    for name in UNARY:
        setattr(HeldValue, f"__{name}__", unary(name))


class OfTheProgram(Exception):
    """Base of the classes that stand for exceptions which the program defines."""

    def __str__(self):
        return vars(self).get("text", super().__str__())

    def __getattr__(self, name):
        if name == "handle":
            raise AttributeError(name)
        return getattr(self.handle, name)


class ProgramLost(BaseException):
    """The program's process has ended, or sent an invalid message. The test has failed, and cannot catch this."""


STOPPED: dict[Any, Any] = {
    kind: type(kind.__name__, (Exception,), {"value": property(lambda self: (*self.args, None)[0])})
    for kind in (StopIteration, StopAsyncIteration)
}
"""StopIteration and StopAsyncIteration -> the stand-in that is raised in a test if the program raises one of them. The
original would end a loop, or a built-in like `all`, as if all was well. Tests catch the stand-in under the original's
name, see `StopCatcher`."""
NAMES_OF_STOPS = {kind.__name__: f"_program_{kind.__name__}" for kind in STOPPED}
CATCHING = {"raises", "assertRaises", "assertRaisesRegex", "isinstance", "issubclass", "suppress"}
NEXT = next


class StopCatcher(ast.NodeTransformer):
    """Rewrites tests: what catches StopIteration or StopAsyncIteration by its name also catches the stand-in of that
    exception (STOPPED)."""

    def visit_Tuple(self, node):
        self.generic_visit(node)
        if all(is_exception(element) for element in node.elts):  # and no row of data
            node.elts = [each for element in node.elts for each in both(element)]
        return node

    def visit_ExceptHandler(self, node):
        self.generic_visit(node)
        if node.type:
            node.type = caught(node.type)
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if getattr(node.func, "attr", getattr(node.func, "id", "")) in CATCHING:
            node.args = list(map(caught, node.args))
        return node


def is_exception(node):
    """Whether a syntax tree (`node`) is the name of a built-in exception."""
    kind = getattr(builtins, getattr(node, "id", ""), None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def both(node):
    """List of syntax trees: `node`, an exception in a test, and if it is the name StopIteration or StopAsyncIteration
    also the name of its stand-in (STOPPED)."""
    name = NAMES_OF_STOPS.get(getattr(node, "id", ""))
    return [node, ast.Name(name, ast.Load())] if name else [node]


def caught(node):
    """Syntax tree of what a test catches, `node` (an exception or a tuple of exceptions), with the stand-ins (STOPPED)
    of StopIteration and StopAsyncIteration added where `node` names these."""
    kinds = [each for element in (node.elts if isinstance(node, ast.Tuple) else [node]) for each in both(element)]
    return kinds[0] if len(kinds) == 1 else ast.Tuple(kinds, ast.Load())


def compiled(source, name):
    """Compiled code of the tests in `source`, as StopCatcher has rewritten them. `name`: file name for tracebacks."""
    if not any(kind in source for kind in NAMES_OF_STOPS):
        return compile(source, name, "exec")
    return compile(ast.fix_missing_locations(StopCatcher().visit(ast.parse(source))), name, "exec")


def next_of(iterator, *default):
    """Stands in for the built-in `next` in tests: returns the `default`, if one is given, at the end of any iterator,
    also of one of the program, which ends with a stand-in (STOPPED) instead of StopIteration."""
    try:
        return NEXT(iterator, *default)
    except STOPPED[StopIteration]:
        if not default:
            raise
        return default[0]


class Judge:
    """Runs a label's assertions. `plan`: which of the label's names are the program's, and which tests are to be run;
    see `LabelPlan` of `python_tests.py`. `questions`, `answers`: streams to and from the program's process."""

    def __init__(self, plan, questions, answers):
        self.plan, self.questions, self.answers = plan, questions, answers
        self.given: list[Any] = []
        self.errors: dict[int, Any] = {}
        self.handles: dict[Any, HeldValue] = {}
        self.classes = set()
        self.ended = False

    # --- the program --------------------------------------------------------------------------------------------

    def name(self, name):
        """The object that the program's globals have under that name. Raises KeyError if there is none."""
        found = self.ask("name", name)
        if type(found) is HeldValue and name in self.plan["classes"]:
            self.classes.add(found._judge_number)
        return found

    def ask(self, operation, /, *arguments, **named):
        """Have the program's process do an operation of `program_side.OPERATIONS`, such as "call" or "getattr", with
        positional `arguments` and keyword arguments `named`; return its result, or raise the exception that the program
        raised."""
        handles = [each for each in (*arguments, *named.values()) if type(each) is HeldValue]
        if operation not in OPERATORS and any(handle._judge_origin == DERIVED for handle in handles):
            raise TypeError("a test takes nothing of what an operator with a plain value returned")
        packed = [list(map(self.pack, arguments)), {name: self.pack(value) for name, value in named.items()}]
        message = self.exchange([operation, *packed])
        while message[0] == "asks":
            message = self.exchange(self.answer(*message[1:]))
        if message[0] == "raised":
            raise self.error(*message[1:])
        _, result, changed = message
        given = dict(enumerate(arguments)) | named
        for key, after in changed:
            copy_back(given[key], self.unpack(after))
        is_class = operation == "call" and arguments[0]._judge_number in self.classes
        if is_class and isinstance(result, dict) and "derived" in result:
            result = {"held": result["derived"][0]}
        return self.unpack(result, OWN if is_class else ANSWER)

    def exchange(self, message):
        """Send a message to the program's process, and return the next message from that process. Raises
        ProgramLost."""
        try:
            send(self.questions, message)
            return receive(self.answers)
        except (OSError, EOFError, ValueError, RecursionError):
            self.ended = True
            raise ProgramLost from None

    def error(self, kind, text, arguments, number):
        """The exception to raise in a test for one that the program raised. `kind`, `arguments`: JSON of the class and
        of the arguments of the program's exception. `text`: its message. `number`: that of the exception object, held
        in the program's process."""
        kind, arguments = self.unpack(kind), tuple(map(self.unpack, arguments))
        if kind is SystemExit:
            return SystemExit(*arguments)
        kind = STOPPED.get(kind, kind) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError
        error = kind.__new__(kind)
        error.args = arguments
        if issubclass(kind, OfTheProgram):
            error.text, error.handle = text, HeldValue(self.ask, number, ANSWER)
        return error

    def answer(self, operation, number, arguments, named):
        """Let the program use the object of this `number`, which a test gave to it; returns the message with the
        result. `operation`: "call", "next", "getattr" or "setattr". `arguments`, `named`: those of the operation, as
        JSON."""
        try:
            value = self.given[number]
            arguments = list(map(self.unpack, arguments))
            named = {name: self.unpack(each) for name, each in named.items()}
            if operation == "call" and callable(value):
                result = value(*arguments, **named)
            elif operation == "next":
                result = next(value)
            elif type(value).__module__ != "__main__" or arguments[0].startswith("_"):
                raise AttributeError(arguments[0])
            else:
                result = (getattr if operation == "getattr" else setattr)(value, *arguments)
            return ["gives", self.pack(result)]
        except Exception as error:
            known = (base for base in type(error).__mro__ if base in (error_named(base.__name__), *STOPPED.values()))
            return ["raises", next(known).__name__, str(error)]

    # --- values -------------------------------------------------------------------------------------------------

    def pack(self, value):
        if type(value) is HeldValue:
            return {"held": value._judge_number}
        if handle := getattr(type(value), "handle_of_program", None):
            return {"held": handle(value)._judge_number}
        return pack(value, self.foreign)

    def foreign(self, value):
        for number, error in self.errors.items():
            if error is value:
                return {"held": number}
        if not callable(value) and not hasattr(type(value), "__next__") and type(value).__module__ != "__main__":
            raise TypeError(f"a test cannot give a program {type(value).__name__}")
        self.given.append(value)
        return {"given": [len(self.given) - 1, getattr(value, "__name__", type(value).__name__)]}

    def unpack(self, value, origin=ANSWER):
        return unpack(value, lambda kind, content: self.object_of(kind, content, origin))

    def object_of(self, kind, content, origin):
        if kind == "held":
            return self.handles.setdefault((content, origin), HeldValue(self.ask, content, origin))
        if kind == "given":
            return self.given[content]
        if kind == "derived":
            return with_attributes(self.unpack(content[1]), HeldValue(self.ask, content[0], ANSWER))
        number, name, bases = content
        if name in ERRORS and ERRORS[name] in sys.modules:
            return getattr(sys.modules[ERRORS[name]], name)
        if number not in self.errors:
            kinds = tuple(STOPPED.get(base, base) for base in map(self.unpack, bases) if issubclass(base, Exception))
            own = any(issubclass(kind, OfTheProgram) for kind in kinds)
            kinds = kinds if own else (OfTheProgram, *(kind for kind in kinds if kind is not Exception))
            self.errors[number] = type(name, kinds, {})
        return self.errors[number]

    # --- the tests ----------------------------------------------------------------------------------------------

    def run(self):
        """Run the label's tests; returns if all hold, and raises whatever one of them raises."""
        known: dict[str, Any] = {"__name__": "__main__"}
        known |= {NAMES_OF_STOPS[kind.__name__]: stopped for kind, stopped in STOPPED.items()}
        vars(builtins)["next"] = next_of
        for name in self.plan["modules"]:
            sys.modules[name] = self.module(name)
        if "unittest" in self.plan["source"]:
            unittest: Any = importlib.import_module("unittest")
            unittest.main = lambda *_, **__: None
        if "asyncio" in self.plan["source"]:
            asyncio: Any = importlib.import_module("asyncio")
            local = asyncio.run
            asyncio.run = lambda it, **more: self.ask("await", it) if type(it) is HeldValue else local(it, **more)
        exec(compiled(self.plan["prompt"], "prompt"), known)
        for name in self.plan["members"]:
            known[name] = getattr(importlib.import_module(name), name, None)
        for name, module in self.plan["libraries"].items():
            known[name] = importlib.import_module(module)
        entry_point = self.plan["entry_point"]
        for name in self.plan["names"]:
            try:
                known[name] = self.name(name)
            except KeyError:
                if name in self.plan["modules"]:
                    known[name] = sys.modules[name]
                elif name in self.plan["needed"]:
                    raise NameError(f"name {name!r} is not defined") from None
        known["candidate"] = candidate = self.name(entry_point) if entry_point else None
        exec(compiled(self.plan["source"], "label"), known)
        for name, takes_candidate in self.plan["tests"].items():
            if isinstance(known[name], type):
                run_class(known[name])
            else:
                for arguments in cases_of(known[name]):
                    finish(known[name](*([candidate] if takes_candidate else []), **arguments))
        if self.ended:
            raise ProgramLost

    def module(self, name):
        module = ModuleType(name)
        vars(module).update(__getattr__=self.attribute_of_module, __all__=[])
        return module

    def attribute_of_module(self, name):
        try:
            return self.name(name)
        except KeyError:
            raise AttributeError(name) from None


def cases_of(test):
    """Keyword arguments of each call of a test function: one empty dictionary, or several if pytest parametrizes the
    function."""
    cases: list[dict] = [{}]
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            rows = [
                row.values if type(row).__name__ == "ParameterSet" else row if names[1:] else [row] for row in values
            ]
            cases = [case | dict(zip(names, row, strict=True)) for case in cases for row in rows]
    return cases


def finish(result):
    """If a test has returned a coroutine, run it to its end; any other `result` is ignored."""
    if hasattr(result, "cr_frame"):
        importlib.import_module("asyncio").run(result)


def run_class(kind):
    unittest = sys.modules.get("unittest")
    if unittest and issubclass(kind, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        if not result.wasSuccessful():
            raise AssertionError((result.failures + result.errors or [("", "unexpected success")])[0][1])
        return
    for name in sorted(dir(kind)):
        if name.startswith("test"):
            instance = kind()
            getattr(instance, "setup_method", lambda *_: None)()
            for arguments in cases_of(getattr(instance, name)):
                finish(getattr(instance, name)(**arguments))


def with_attributes(plain, handle):
    """The plain value as an instance of a subclass of its class, for the tests to compare. Attributes that its class
    lacks are read from the program's object (`handle`). Unchanged if its class is no number, text or container."""
    base = type(plain)
    if base not in (int, float, str, tuple, list, dict, set, frozenset):
        return plain
    content = {"handle_of_program": lambda self: handle, "__getattr__": lambda self, name: getattr(handle, name)}
    return type(base.__name__, (base,), content)(plain)


def copy_back(before, after):
    """Change a mutable argument of a call, `before`, in place to what the program made of it, `after`."""
    if type(before) is not type(after):
        return
    if isinstance(before, (list, bytearray)):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)


add_operators()

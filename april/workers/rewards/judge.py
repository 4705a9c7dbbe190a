"""The judge of a program under test: it runs the label's assertions, and calls the program's functions remotely.

It runs in its own sandboxed process, without April, and only it knows the expected results. The program's answers are
plain values, which are compared here; an object that stays in the program equals nothing but itself.
"""

import ast
import builtins
import importlib
import sys
from typing import Any

from april.workers.rewards.plain_values import pack, receive, send, unpack


class HeldValue:
    """Handle of an object in the program's process: it can be called, read and iterated, and is never compared."""

    def __init__(self, request, number):
        vars(self).update(_request=request, _number=number)

    def __getattr__(self, name):
        return self._request("attribute", self._number, name)

    def __call__(self, *arguments, **named):
        return self._request("call", self._number, list(arguments), named)

    def __getitem__(self, key):
        return self._request("item", self._number, key)

    def __len__(self):
        return self._request("length", self._number)

    def __bool__(self):
        return True

    def __iter__(self):
        return iter(self._request("all", self._number))

    def __next__(self):
        return self._request("next", self._number)

    def __str__(self):
        return self._request("text", self._number)


def judge(assertions, questions, answers):
    """Run the assertions; returns if all hold, and raises whatever one of them raises."""

    def encode(value):
        return pack(value, number_of)

    def request(operation, target, *more):
        arguments = more[0] if operation == "call" else []
        send(questions, [operation, target, *([more[0]] if operation == "attribute" else map(encode, more))])
        kind, *content = receive(answers)
        if kind == "raised":
            known = getattr(builtins, content[0], None)
            raise (known if isinstance(known, type) and issubclass(known, Exception) else RuntimeError)(content[1])
        for before, after in zip(arguments, content[1], strict=True):
            copy_back(before, unpack(after, lambda number: HeldValue(request, number)))
        return unpack(content[0], lambda number: HeldValue(request, number))

    tree = ast.parse(assertions)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
    known: dict[str, Any] = {"__name__": "judge"}
    for name in sorted(names):
        try:
            known[name] = importlib.import_module(name) if name in sys.stdlib_module_names else request("name", name)
        except KeyError:
            continue
    exec(compile(tree, "label", "exec"), known)


def number_of(value):
    if isinstance(value, HeldValue):
        return value._number
    raise TypeError(f"a test cannot give a program {type(value).__name__}")


def copy_back(before, after):
    """Apply the program's changes to a mutable argument."""
    if type(before) is not type(after):
        return
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)

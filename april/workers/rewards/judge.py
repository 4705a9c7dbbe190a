"""The judge of a program under test: runs the label's assertions, and asks the program for what they call.

A process of its own, in a sandbox, where April is not. It alone holds what is expected. What the program
says are plain values, which are compared here; a thing that stays there is equal to nothing but itself.
"""

import ast
import builtins
import importlib
import sys
from typing import Any

from april.workers.rewards.plain_values import hear, packed, say, unpacked


class Held:
    """What is in the program's process: it can be called, read and iterated over, and takes part in no comparison."""

    def __init__(self, asked, number):
        vars(self).update(_asked=asked, _number=number)

    def __getattr__(self, name):
        return self._asked("attribute", self._number, name)

    def __call__(self, *arguments, **named):
        return self._asked("call", self._number, list(arguments), named)

    def __getitem__(self, key):
        return self._asked("item", self._number, key)

    def __len__(self):
        return self._asked("length", self._number)

    def __bool__(self):
        return True

    def __iter__(self):
        return iter(self._asked("all", self._number))

    def __next__(self):
        return self._asked("next", self._number)

    def __str__(self):
        return self._asked("text", self._number)


def judge(assertions, questions, answers):
    """Returns when all of them hold; raises whatever one of them does."""

    def pack(value):
        return packed(value, number_of)

    def asked(what, of, *more):
        given = more[0] if what == "call" else []
        say(questions, [what, of, *([more[0]] if what == "attribute" else map(pack, more))])
        kind, *said = hear(answers)
        if kind == "raised":
            known = getattr(builtins, said[0], None)
            raise (known if isinstance(known, type) and issubclass(known, Exception) else RuntimeError)(said[1])
        for before, after in zip(given, said[1], strict=True):
            copy_back(before, unpacked(after, lambda number: Held(asked, number)))
        return unpacked(said[0], lambda number: Held(asked, number))

    tree = ast.parse(assertions)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
    known: dict[str, Any] = {"__name__": "judge"}
    for name in sorted(names):
        try:
            known[name] = importlib.import_module(name) if name in sys.stdlib_module_names else asked("name", name)
        except KeyError:
            continue
    exec(compile(tree, "label", "exec"), known)


def number_of(value):
    if isinstance(value, Held):
        return value._number
    raise TypeError(f"a test cannot give a program {type(value).__name__}")


def copy_back(before, after):
    """What the program has done to an argument, where that can be changed."""
    if type(before) is not type(after):
        return
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)

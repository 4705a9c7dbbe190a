"""Serves a judge's requests inside the process of a program under test, which never learns the expected results.

It runs after the program, in its process, without April. The judge trusts nothing that is sent from here.
"""

import copy
import operator
from typing import Any

from april.workers.rewards.plain_values import error_named, pack, receive, send, unpack

OPERATIONS: dict[str, Any] = {
    **{name: getattr(operator, name) for name in operator.__all__ if not name.startswith("_")},
    **{f.__name__: f for f in (abs, float, format, hash, int, iter, len, next, repr, reversed, round, str, bool)},
    **{f.__name__: f for f in (complex, divmod, getattr, setattr, delattr, isinstance, issubclass)},
    **{f.__name__: f for f in (copy.copy, copy.deepcopy)},
    "enter": lambda context: context.__enter__(),
    "exit": lambda context, *_: context.__exit__(None, None, None),
    "all": list,
    "call": lambda function, /, *arguments, **named: function(*arguments, **named),
    "await": lambda awaitable: __import__("asyncio").run(awaited(awaitable)),
}
"""What a judge can have this process do with an object of the program: name of the operation -> function that does
it."""


async def awaited(awaitable):
    return await awaitable


class OfTheTest:
    """Stand-in, in the program's process, for a function, an iterator or an object that a test has passed to the
    program."""

    def __init__(self, ask, number, name):
        vars(self).update(_ask=ask, _number=number, __name__=name)

    def __call__(self, /, *arguments, **named):
        return self._ask("call", self._number, arguments, named)

    def __iter__(self):
        return self

    def __next__(self):
        return self._ask("next", self._number, (), {})

    def __getattr__(self, name):
        return self._ask("getattr", self._number, (name,), {})

    def __setattr__(self, name, value):
        self._ask("setattr", self._number, (name, value), {})


class ProgramSide:
    """Answers the judge's questions with objects of the program. `names`: the program's globals. `questions`,
    `answers`: streams from and to the judge."""

    def __init__(self, names, questions, answers):
        self.names, self.questions, self.answers = names, questions, answers
        self.held: list[Any] = []
        self.numbers: dict[int, int] = {}

    def serve(self):
        """Answer the judge's questions until the judge closes the channel."""
        while True:
            try:
                question = receive(self.questions)
            except EOFError:
                return
            self.answer(question)

    def answer(self, question):
        operation, arguments, named = question
        try:
            arguments = [self.unpack(argument) for argument in arguments]
            named = {name: self.unpack(argument) for name, argument in named.items()}
            function = self.names.__getitem__ if operation == "name" else OPERATIONS[operation]
            result = function(*arguments, **named)
            given = dict(enumerate(arguments)) | named
            changed = [[key, self.pack(it)] for key, it in given.items() if type(it) in (list, dict, set, bytearray)]
            send(self.answers, ["is", self.pack(result), changed if operation == "call" else []])
        except (Exception, SystemExit) as error:
            text, arguments = str(error)[:200], [self.pack(argument) for argument in error.args]
            send(self.answers, ["raised", self.pack(type(error)), text, arguments, self.hold(error)])

    def ask(self, operation, number, arguments, named):
        """Have the judge do an operation with an object that a test has passed to the program, and return the result;
        meanwhile the judge may ask questions. `operation`: "call", "next", "getattr" or "setattr". `number`: that of
        the object. `arguments`, `named`: arguments of the operation."""
        packed = [list(map(self.pack, arguments)), {name: self.pack(value) for name, value in named.items()}]
        send(self.answers, ["asks", operation, number, *packed])
        while (message := receive(self.questions))[0] not in ("gives", "raises"):
            self.answer(message)
        if message[0] == "raises":
            raise error_named(message[1])(message[2])
        return self.unpack(message[1])

    def pack(self, value):
        return pack(value, self.foreign, lambda value, plain: {"derived": [self.hold(value), plain]})

    def foreign(self, value):
        if isinstance(value, OfTheTest):
            return {"given": value._number}
        if isinstance(value, type) and issubclass(value, Exception):
            bases = [self.pack(base) for base in value.__bases__ if issubclass(base, Exception)]
            return {"error": [self.hold(value), value.__name__, bases]}
        return {"held": self.hold(value)}

    def hold(self, value):
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.held)
            self.held.append(value)
        return self.numbers[id(value)]

    def unpack(self, value):
        return unpack(value, self.object_of)

    def object_of(self, kind, content):
        return self.held[content] if kind == "held" else OfTheTest(self.ask, *content)

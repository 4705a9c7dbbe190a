"""Serves a judge's requests inside the process of a program under test, which never learns the expected results.

It runs after the program, in its process, without April. The judge trusts nothing that is sent from here.
"""

from typing import Any

from april.workers.rewards.plain_values import pack, receive, send, unpack

OPERATIONS: dict[str, Any] = {"length": len, "text": str, "all": list, "next": next}


def serve(names, questions, answers):
    """Answer requests until the judge ends. `names`: the program's globals."""
    held = []

    def hold(value):
        held.append(value)
        return len(held) - 1

    def decode(value):
        return unpack(value, held.__getitem__)

    while True:
        try:
            operation, target, *more = receive(questions)
        except EOFError:
            return
        arguments = []
        try:
            if operation == "name":
                result = names[target]
            elif operation == "attribute":
                result = getattr(held[target], more[0])
            elif operation == "call":
                arguments = decode(more[0])
                result = held[target](*arguments, **decode(more[1]))
            elif operation == "item":
                result = held[target][decode(more[0])]
            else:
                result = OPERATIONS[operation](held[target])
            send(answers, ["is", pack(result, hold), [pack(argument, hold) for argument in arguments]])
        except Exception as error:
            send(answers, ["raised", type(error).__name__, str(error)[:200]])

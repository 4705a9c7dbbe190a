"""The end of a program under test: it does what its judge asks of it, and never learns what was expected.

Runs behind the program in its process, where April is not. Nothing that is said here is believed.
"""

from typing import Any

from april.workers.rewards.plain_values import hear, packed, say, unpacked

DONE: dict[str, Any] = {"length": len, "text": str, "all": list, "next": next}


def serve(names, questions, answers):
    """Answer until the judge has ended. `names`: the program's globals."""
    held = []

    def hold(value):
        held.append(value)
        return len(held) - 1

    def open_up(value):
        return unpacked(value, held.__getitem__)

    while True:
        try:
            what, of, *more = hear(questions)
        except EOFError:
            return
        arguments = []
        try:
            if what == "name":
                result = names[of]
            elif what == "attribute":
                result = getattr(held[of], more[0])
            elif what == "call":
                arguments = open_up(more[0])
                result = held[of](*arguments, **open_up(more[1]))
            elif what == "item":
                result = held[of][open_up(more[0])]
            else:
                result = DONE[what](held[of])
            say(answers, ["is", packed(result, hold), [packed(one, hold) for one in arguments]])
        except Exception as error:
            say(answers, ["raised", type(error).__name__, str(error)[:200]])

"""A teacher's process, `python -m april.workers.teachers.process LIMIT_S`: its rules and items come over the channel
that is its stdin, and log-probabilities go back over it."""

import signal
import sys

import msgspec
import numpy as np

from april.util.pool import LENGTH_BYTES, READY, frame, private_channel, read_exactly, read_rules, write_frame
from april.workers.teachers import TEACHERS
from april.workers.teachers.messages import Teacher, TeacherAnswer, TeacherError, TeacherItem, TeacherRules

ERROR_CHARACTERS = 500
SMALLEST = -1e4
"""Least log-probability that is one; a lower one, such as that of a masked token, is refused."""
LARGEST = 1e-3
"""Largest log-probability that is one: 0, but for rounding."""


def main(limit_s: float) -> None:
    """Answer items until the channel closes. The pool enforces the time limit of an item; `limit_s` is longer."""
    incoming, outgoing = private_channel()
    rules = read_rules(incoming, TeacherRules)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    write_frame(outgoing, READY)
    teacher: Teacher | None = None
    while True:
        size = int.from_bytes(read_exactly(incoming, LENGTH_BYTES), "little")
        item = msgspec.msgpack.decode(read_exactly(incoming, size), type=TeacherItem)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            teacher = teacher or TEACHERS.find(rules.kind)(rules)
            answer = answer_of(teacher, item)
        except Exception as error:
            reason = f"teacher {rules.name!r}: {type(error).__name__}: {error}"
            answer = TeacherAnswer(item.key, error=reason[:ERROR_CHARACTERS])
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(outgoing, frame(answer))


def answer_of(teacher: Teacher, item: TeacherItem) -> TeacherAnswer:
    """Log-probabilities of an item's responses. Raises TeacherError for too many or too few, or for what is none."""
    prompt = np.frombuffer(item.prompt, "<i4")
    return TeacherAnswer(
        item.key,
        [
            checked(teacher(np.concatenate([prompt, response])), len(prompt), len(response)).tobytes()
            for response in (np.frombuffer(data, "<i4") for data in item.responses)
        ],
    )


def checked(logprobs: np.ndarray, prompt_tokens: int, response_tokens: int) -> np.ndarray:
    """Log-probabilities of a response, float32 [response_tokens], of those of the text, `logprobs`."""
    if len(logprobs) != prompt_tokens + response_tokens - 1:
        raise TeacherError(f"gave {len(logprobs)} log-probabilities for a text of {prompt_tokens + response_tokens}")
    found = np.asarray(logprobs[prompt_tokens - 1 :], "<f4")
    if not np.isfinite(found).all() or (len(found) and (found.max() > LARGEST or found.min() < SMALLEST)):
        raise TeacherError("gave a log-probability that is not finite, above 0 or below -10,000")
    return found


if __name__ == "__main__":
    main(float(sys.argv[1]))

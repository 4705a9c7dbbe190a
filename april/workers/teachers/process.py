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
"""Smallest valid log-probability; a lower one, such as that of a masked token, is refused."""
LARGEST = 1e-3
"""Largest valid log-probability: 0, with room for rounding."""
EXACT_IDS = 1 << 24
"""Number of ids, from 0 on, that float32 represents exactly: larger ids cannot be sent."""


def main(limit_s: float) -> None:
    """Answer items until the channel closes. The pool enforces the time limit of an item; `limit_s` is longer, and only
    matters if the pool has died."""
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
            answer = answer_of(teacher, item, rules)
        except Exception as error:
            reason = f"teacher {rules.name!r}: {type(error).__name__}: {error}"
            answer = TeacherAnswer(item.key, error=reason[:ERROR_CHARACTERS])
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(outgoing, frame(answer))


def answer_of(teacher: Teacher, item: TeacherItem, rules: TeacherRules) -> TeacherAnswer:
    """Ask a teacher for the log-probabilities of an item's responses, each after the item's prompt. Raises TeacherError
    if the teacher gives another number of values than was asked for, or invalid ones."""
    prompt = np.frombuffer(item.prompt, "<i4")
    texts = [np.concatenate([prompt, np.frombuffer(data, "<i4")]) for data in item.responses]
    begins = [len(prompt) + start for start in item.starts or [0] * len(texts)]
    found = [checked(teacher(text), begin, len(text) - begin, rules) for text, begin in zip(texts, begins, strict=True)]
    tops = [top.tobytes() for _, top in found] if rules.top_k else []
    return TeacherAnswer(item.key, [logprobs.tobytes() for logprobs, _ in found], tops=tops)


def checked(
    told: np.ndarray, prompt_tokens: int, response_tokens: int, rules: TeacherRules
) -> tuple[np.ndarray, np.ndarray]:
    """The checked part of what a teacher `told` about a text of prompt and response (see `messages.Teacher`): the
    log-probabilities of the response's R tokens, float32 [R], and k pairs (id, log-probability) of each token, float32
    [R, k, 2], which is exact for ids below 2^24. Raises TeacherError for invalid values."""
    if len(told) != prompt_tokens + response_tokens - 1:
        raise TeacherError(f"gave {len(told)} log-probabilities for a text of {prompt_tokens + response_tokens}")
    found, k = np.asarray(told[prompt_tokens - 1 :], np.float64), rules.top_k
    if found.shape[1:] != ((1 + 2 * k,) if k else ()):
        raise TeacherError(f"gave no {k} pairs of an id and a log-probability with each log-probability")
    found = found.reshape(response_tokens, 1 + 2 * k)
    logprobs, tops = found[:, 0], found[:, 1:].reshape(response_tokens, k, 2)
    if not all(np.isfinite(each).all() and (each <= LARGEST).all() and (each >= SMALLEST).all()
               for each in (logprobs, tops[..., 1])):  # fmt: skip
        raise TeacherError("gave a log-probability that is not finite, above 0 or below -10,000")
    ids, most = np.sort(tops[..., 0], 1), rules.vocabulary or EXACT_IDS
    if not ((ids >= 0) & (ids < most) & (ids == np.floor(ids))).all():
        raise TeacherError(f"named an id that is none of the policy's {most}")
    if (np.diff(ids, axis=1) == 0).any():
        raise TeacherError("named an id twice among the most likely of one token")
    return logprobs.astype("<f4"), tops.astype("<f4")


if __name__ == "__main__":
    main(float(sys.argv[1]))

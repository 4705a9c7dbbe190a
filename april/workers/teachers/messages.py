"""Messages between a teacher's pool and its processes."""

from collections.abc import Callable

import msgspec
import numpy as np


class TeacherRules(msgspec.Struct, frozen=True):
    """The keys of `[teacher.NAME]` that a process needs."""

    name: str
    kind: str
    path: str
    url: str
    url_key_variable: str
    model: str
    device: str
    timeout_s: float
    top_k: int = 0
    """Number of likeliest ids that the teacher gives for each token, with their log-probabilities; 0: none."""
    vocabulary: int = 0
    """Size of the policy's vocabulary; 0 if unknown."""


class TeacherItem(msgspec.Struct, array_like=True, frozen=True):
    """Responses to one prompt, to be scored by a teacher; token ids as int32 bytes."""

    key: int
    prompt: bytes
    responses: list[bytes]
    starts: list[int] = []
    """Number of tokens at the beginning of each response that are context and not scored; empty: 0 for all."""


class TeacherAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of the scored tokens of each response, float32 bytes, or the error why there are none."""

    key: int
    columns: list[bytes] = []
    error: str = ""
    tops: list[bytes] = []
    """The likeliest ids of each response: for each scored token k pairs (id, log-probability), as float32 bytes. Empty
    if `top_k` is 0."""


class TeacherError(RuntimeError):
    """The teacher gave no log-probabilities; the text says why."""


Teacher = Callable[[np.ndarray], np.ndarray]
"""Function (token ids of a text, int32 [T]) -> log-probabilities of ids 1 to T - 1, float [T - 1]. With `top_k` k > 0:
float [T - 1, 1 + 2k], where each log-probability is followed by k pairs (id, log-probability) of the ids most likely at
that position. Raises TeacherError, or what a model raises."""

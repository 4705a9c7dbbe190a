"""Failures of foreign code by kind, so that a thousand of one kind are a few lines: the first in full, then counts."""

import logging
import re
from collections import Counter

ERROR_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b")


class Failures:
    """failures = Failures(log)
    failures.note("scoring_failed", "verifier 'my:grade': KeyError: 'o'", sample=7)
    """

    def __init__(self, log: logging.Logger):
        self.by_cause: Counter[str] = Counter()
        self.last: dict[str, str] = {}
        """what the newest of each cause has said"""
        self._log = log
        self._by_kind: Counter[tuple[str, str]] = Counter()

    def note(self, cause: str, error: str, what: str, **ids: object) -> None:
        """Count one, and log it if it is the first of its kind, or the second, fourth, eighth ...; `what`: failed."""
        self.by_cause[cause] += 1
        self.last[cause] = error
        kind = cause, kind_of(error)
        self._by_kind[kind] += 1
        count = self._by_kind[kind]
        if count == 1:
            self._log.warning("%s, %s: %s", what, cause, error, extra=ids)
        elif count.bit_count() == 1:
            self._log.warning("%s: %d of this kind so far: %s", cause, count, error, extra=ids)


def kind_of(error: str) -> str:
    """What failures of one kind have in common: who has failed, and the name of the error, without its details."""
    name = ERROR_NAME.search(error)
    return error[: name.end()] if name else error.partition(":")[0]

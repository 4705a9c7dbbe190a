"""Logs failures of user code by kind: the first of a kind in full, then only counts."""

import logging
import re
from collections import Counter

ERROR_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b")


class Failures:
    """Counts failures by cause, and logs a few of each kind.

    failures = Failures(log)
    failures.note("scoring_failed", "verifier 'my:grade': KeyError: 'o'", "a verifier failed", sample=7)
    """

    def __init__(self, log: logging.Logger):
        self.by_cause: Counter[str] = Counter()
        self.last: dict[str, str] = {}
        """The latest error of each cause."""
        self._log = log
        self._by_kind: Counter[tuple[str, str]] = Counter()

    def note(self, cause: str, error: str, what: str, **ids: object) -> None:
        """Count a failure, and log it if it is the 1st, 2nd, 4th, 8th, ... of its kind.

        `what`: the subject of the log line; `ids`: fields of the log record.
        """
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
    """The part of an error that all failures of its kind share: what failed and the error's name, without details."""
    name = ERROR_NAME.search(error)
    return error[: name.end()] if name else error.partition(":")[0]

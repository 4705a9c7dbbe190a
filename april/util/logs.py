"""Logging of a run's processes to stderr, as text or as one JSON object per line; failures of user code by kind, and
their tracebacks without April's own frames."""

import faulthandler
import logging
import re
import sys
import traceback
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import orjson

IDS = ("run", "worker", "role", "group", "sample", "step")
"""Names of the id fields that a log record may have, given as log.info(..., extra={"worker": name})."""


MAX_RECORD_CHARACTERS = 16_384
"""Most characters of a log record's text; the middle of a longer text is left out, since it may quote a request or a
peer."""


def shortened(text: str, most: int = MAX_RECORD_CHARACTERS) -> str:
    """The text if it has at most `most` characters; otherwise its beginning and its end, and between them the number of
    characters that are left out."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {len(text) - most} characters … {text[-(most // 2) :]}"


class TextLines(logging.Formatter):
    """Formats records as text of at most `MAX_RECORD_CHARACTERS`."""

    def format(self, record: logging.LogRecord) -> str:
        return shortened(super().format(record))


class ToStderr(logging.StreamHandler[TextIO]):
    """Writes each line to the current `sys.stderr`."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)


class JsonLines(logging.Formatter):
    """Formats records as JSON: time, level, process, logger, message, the record's ids and the exception."""

    def __init__(self, process: str, ids: dict[str, Any]):
        """`ids`: fields, such as run and worker, of every line of this process."""
        super().__init__()
        self.process = process
        self.ids = ids

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": shortened(record.getMessage()),
        }
        line |= self.ids | {name: getattr(record, name) for name in IDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = shortened(self.formatException(record.exc_info))
        return orjson.dumps(line, default=str).decode()


def log_to_stderr(process: str, log_format: str = "text", **ids: Any) -> None:
    """Set up logging for a process of a run.

    `log_format`: text | json. With json every line has `ids`, and the exception that ends the process is a line, too. A
    crash in native code writes the Python stack of every thread to stderr.
    """
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    handler = ToStderr()
    if log_format == "json":
        handler.setFormatter(JsonLines(process, ids))
        sys.excepthook = log_exception
    else:
        handler.setFormatter(TextLines(f"%(asctime)s {process} %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("ended by %s", kind.__name__, exc_info=(kind, error, traceback))


# --- failures of user code --------------------------------------------------------------------------------------------


ERROR_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b")
"""Regular expression for the name of an exception class in the text of an error."""


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

        `cause`: name under which it is counted; `error`: text of the error; `what`: the subject of the log line; `ids`:
        fields of the log record.
        """
        self.by_cause[cause] += 1
        self.last[cause] = error
        kind = cause, failure_kind(error)
        self._by_kind[kind] += 1
        count = self._by_kind[kind]
        if count == 1:
            self._log.warning("%s, %s: %s", what, cause, error, extra=ids)
        elif count.bit_count() == 1:
            self._log.warning("%s: %d of this kind so far: %s", cause, count, error, extra=ids)


def failure_kind(error: str) -> str:
    """The part of an error that all failures of its kind share: what failed and the error's name, without details:
    "verifier 'my:grade': KeyError" for "verifier 'my:grade': KeyError: 'o'"."""
    name = ERROR_NAME.search(error)
    return error[: name.end()] if name else error.partition(":")[0]


RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")
TRACEBACK = "Traceback (most recent call last):"


def last_error(text: str) -> str:
    """The exception that ended a process, from what it has logged as text or JSON: the line under the last traceback.
    Without a traceback: the last line."""
    lines = []
    for line in filter(None, (RANK_PREFIX.sub("", line) for line in text.splitlines())):
        record = json_record(line)
        lines += f"{record['message']}\n{record.get('exception', '')}".splitlines() if record else [line]
    begins = max((index for index, line in enumerate(lines) if line == TRACEBACK), default=len(lines))
    unindented = (line for line in lines[begins + 1 :] if line and not line.startswith((" ", "+")))
    return next(unindented, lines[-1] if lines else "").strip()


def json_record(line: str) -> dict[str, Any]:
    """The JSON object in a log line, if the line is one with a field `message`; empty for any other line."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return record if isinstance(record, dict) and "message" in record else {}


APRIL_FOLDER = str(Path(__file__).parents[1])


def user_traceback(error: BaseException) -> str:
    """The formatted traceback of an error without April's frames; only the exception if no other frames are left."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(APRIL_FOLDER)
    ]
    trace = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*trace, *traceback.format_exception_only(error)]).rstrip()

"""Logging of a run's processes: to stderr, as text or as one JSON object per line."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

IDS = ("run", "worker", "role", "group", "sample", "step")
"""Fields of a log record that name what it is about: log.info(..., extra={"worker": name})."""


class ToStderr(logging.StreamHandler):
    """Writes each line to the current `sys.stderr`."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)


class JsonLines(logging.Formatter):
    """Formats records as JSON: time, level, process, logger, message, the record's ids and the exception."""

    def __init__(self, process: str, ids: dict[str, Any]):
        """`ids`: ids in every line of this process."""
        super().__init__()
        self.process = process
        self.ids = ids

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= self.ids | {name: getattr(record, name) for name in IDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_to_stderr(process: str, log_format: str = "text", **ids: Any) -> None:
    """Set up logging for a process of a run.

    `log_format`: text | json. With json every line has `ids`, and the exception that ends the process is a line, too.
    """
    handler = ToStderr()
    if log_format == "json":
        handler.setFormatter(JsonLines(process, ids))
        sys.excepthook = log_exception
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_exception(kind, error, traceback) -> None:
    logging.getLogger(__name__).critical("ended by %s", kind.__name__, exc_info=(kind, error, traceback))

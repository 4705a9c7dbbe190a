"""Tracebacks of user code, without April's own frames."""

import traceback
from pathlib import Path

OWN = str(Path(__file__).parents[1])


def raised(error: BaseException) -> str:
    """The formatted traceback of an error without April's frames; only the exception if no other frames are left."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OWN)]
    trace = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*trace, *traceback.format_exception_only(error)]).rstrip()

"""What foreign code has raised, for whoever wrote it: the exception and the way to it through their own files."""

import traceback
from pathlib import Path

OWN = str(Path(__file__).parents[1])


def raised(error: BaseException) -> str:
    """As Python prints it, without April's frames; the exception alone where there are no others."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OWN)]
    way = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*way, *traceback.format_exception_only(error)]).rstrip()

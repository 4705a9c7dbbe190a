"""Atomic replacement of files that others read meanwhile."""

from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write a file anew; readers see the old or the new content, never a part."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(data)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    temporary.replace(path)

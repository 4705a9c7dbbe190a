"""Files that are written anew, while others read them."""

from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Readers see the old or the new content, never half of one."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(data)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    temporary.replace(path)

"""Counts and sizes as text."""


def counted(count: int, singular: str, plural: str = "") -> str:
    """The count with its noun, such as `3 workers` or `1 worker`; the plural is the singular with an s unless given."""
    return f"{count} {singular}" if count == 1 else f"{count} {plural or singular + 's'}"


def format_bytes(count: float) -> str:
    """A number of bytes with a binary unit, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"

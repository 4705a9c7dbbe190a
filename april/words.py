"""Counted things in sentences."""


def counted(count: int, one: str, many: str = "") -> str:
    """`3 workers`, `1 worker`; `many` where the plural is more than an s."""
    return f"{count} {one}" if count == 1 else f"{count} {many or one + 's'}"


def size(count: float) -> str:
    """Of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"

"""Counted things in sentences."""


def counted(count: int, one: str, many: str = "") -> str:
    """`3 workers`, `1 worker`; `many` where the plural is more than an s."""
    return f"{count} {one}" if count == 1 else f"{count} {many or one + 's'}"

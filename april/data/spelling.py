"""JSON parser that keeps the digits of numbers and refuses objects with duplicate keys."""

import json
from typing import Any

import orjson

from april.data.rows import BadRow, excerpt

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LiteralNumber(float):
    """A float that prints as it is written in the file, such as 1.10."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def parse(text: bytes) -> Any:
    """Parse a JSON text. A record that contains an object with a duplicate key is returned as a BadRow.

    Raises BadRow for text that is not JSON by RFC 8259.
    """
    try:
        orjson.loads(text)  # refuses what the next line takes: NaN, half a surrogate pair, text that is not UTF-8
        return json.loads(text, parse_float=LiteralNumber, object_pairs_hook=checked_object)
    except orjson.JSONDecodeError as error:
        raise BadRow(f"{excerpt(text)} is not JSON ({error}); {fix_for(text, error)}") from None
    except RecursionError:
        raise BadRow(f"{excerpt(text)} is nested too deeply; write an object with prompt and label") from None


def checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRow:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        return BadRow(f"key {duplicate!r} occurs twice; leave one of them out")
    for value in record.values():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, BadRow):
                return part
    return record


def fix_for(text: bytes, error: orjson.JSONDecodeError) -> str:
    if "infinity" in str(error):
        return "write a number that large as text, in quotes"
    try:
        text.decode()
    except UnicodeDecodeError:
        return "write it as UTF-8"
    return "write one JSON object on each line"

"""JSON as a file spells it: numbers keep their digits, and no key of an object is lost behind its double."""

import json
from typing import Any

import orjson

from april.data.rows import BadRow, excerpt

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Spelled(float):
    """A number whose text is the one in the file, such as 1.10."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def parse(text: bytes) -> Any:
    """What a JSON text says; an object with a key twice is a BadRow, and so is whatever it is in, as far as the record.

    Raises BadRow for what is no JSON by RFC 8259.
    """
    try:
        orjson.loads(text)  # refuses what the next line takes: NaN, half a surrogate pair, text that is not UTF-8
        return json.loads(text, parse_float=Spelled, object_pairs_hook=object_of)
    except orjson.JSONDecodeError as error:
        raise BadRow(f"{excerpt(text)} is not JSON ({error}); {mend_of(text, error)}") from None
    except RecursionError:
        raise BadRow(f"{excerpt(text)} is nested too deeply; write an object with prompt and label") from None


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRow:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        return BadRow(f"key {twice!r} stands there twice; leave one of them out")
    for value in record.values():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, BadRow):
                return part
    return record


def mend_of(text: bytes, error: orjson.JSONDecodeError) -> str:
    if "infinity" in str(error):
        return "write a number that large as text, in quotes"
    try:
        text.decode()
    except UnicodeDecodeError:
        return "write it as UTF-8"
    return "write one JSON object on each line"

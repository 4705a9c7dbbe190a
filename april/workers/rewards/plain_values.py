"""Plain values as JSON between a program under test and its judge; its text stands in both.

What is no plain value stays where it is: the other side gets a handle, by number. Subclasses become what they derive
from, so that nothing which a program has defined takes part in a comparison.
"""

import json
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
SPELLED: dict[str, Any] = {"int": int, "complex": complex, "Decimal": Decimal, "Fraction": Fraction}
LONGEST_LINE = 1 << 20

sys.set_int_max_str_digits(0)


def packed(value, hold):
    """`hold` gives the number of what is no plain value."""
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    for name, kind in SPELLED.items():
        if isinstance(value, kind):
            return {name: (kind.__repr__ if kind in (int, complex) else kind.__str__)(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [packed(one, hold) for one in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[packed(key, hold), packed(dict.__getitem__(value, key), hold)] for key in dict.keys(value)]}
    return {"held": hold(value)}


def unpacked(value, held):
    """`held` gives what a number stands for."""
    if not isinstance(value, dict):
        return value
    [(name, content)] = value.items()
    if name in SPELLED:
        return SPELLED[name](content)
    if name == "bytes":
        return bytes.fromhex(content)
    if name in CONTAINERS:
        return CONTAINERS[name](unpacked(one, held) for one in content)
    if name == "dict":
        return {unpacked(key, held): unpacked(one, held) for key, one in content}
    return held(content)


def say(stream, message):
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def hear(stream):
    """The next message. Raises EOFError where there is none, ValueError for one that is too long or no JSON."""
    line = stream.readline(LONGEST_LINE)
    if not line:
        raise EOFError("the other side has ended")
    return json.loads(line)

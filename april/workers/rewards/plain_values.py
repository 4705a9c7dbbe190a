"""Plain values as JSON between a program under test and its judge; this module's source is inlined in both.

Any other value stays in its process, and the other side gets a numbered handle. Instances of subclasses become their
built-in base class, so that nothing defined by the program takes part in a comparison.
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


def pack(value, hold):
    """Encode a value for JSON. `hold(value)` returns the handle number of a value that is not plain."""
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
            return {name: [pack(item, hold) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[pack(key, hold), pack(dict.__getitem__(value, key), hold)] for key in dict.keys(value)]}
    return {"held": hold(value)}


def unpack(value, held):
    """Decode a value from JSON. `held(number)` returns the value of a handle."""
    if not isinstance(value, dict):
        return value
    [(name, content)] = value.items()
    if name in SPELLED:
        return SPELLED[name](content)
    if name == "bytes":
        return bytes.fromhex(content)
    if name in CONTAINERS:
        return CONTAINERS[name](unpack(item, held) for item in content)
    if name == "dict":
        return {unpack(key, held): unpack(item, held) for key, item in content}
    return held(content)


def send(stream, message):
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream):
    """The next message. Raises EOFError at the end of the stream, ValueError for a message too long or not JSON."""
    line = stream.readline(LONGEST_LINE)
    if not line:
        raise EOFError("the other side has ended")
    return json.loads(line)

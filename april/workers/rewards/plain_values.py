"""Plain values as JSON between a program under test and its judge; this module's source is inlined in both.

Any other value stays in its process, and the other side gets a numbered handle. A comparison only ever sees instances
of built-in classes, so that nothing defined by the program takes part in it.
"""

import builtins
import importlib
import json
import sys
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

SPELLED: dict[str, Any] = {
    "int": (int, int.__repr__, int),
    "float": (float, float.__repr__, float),
    "str": (str, str.__str__, str),
    "complex": (complex, complex.__repr__, complex),
    "Decimal": (Decimal, Decimal.__str__, Decimal),
    "Fraction": (Fraction, Fraction.__str__, Fraction),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (timedelta, lambda t: [t.days, t.seconds, t.microseconds], lambda parts: timedelta(*parts)),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    "slice": (slice, lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
}
"""Classes of plain values, with their encoding in JSON: name -> (class, function from a value to JSON, function from
JSON to a value). A class stands before its base class."""
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS: dict[str, Any] = {"Counter": Counter, "OrderedDict": OrderedDict, "dict": dict}
EXACT_INTEGER = 1 << 53
LONGEST_LINE = 1 << 26

sys.set_int_max_str_digits(0)


def pack(value, foreign, derived=lambda value, plain: plain):
    """Encode a value for JSON; returns what `json.dumps` takes.

    Two functions return the JSON of other values. `foreign(value)`: of a value of no plain class. `derived(value,
    plain)`: of an instance of a subclass of a plain class, where `plain` is the JSON of the same value in the plain
    class.
    """
    kind: Any = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and abs(value) < EXACT_INTEGER):
        return value
    if kind is type and vars(builtins).get(name := getattr(value, "__name__", "")) is value:
        return {"type": name}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return numpy_json(value, kind, lambda item: pack(item, foreign, derived), derived)
    encoded = encode(value, kind, lambda item: pack(item, foreign, derived))
    if encoded is None:
        return foreign(value)
    [name] = encoded
    return encoded if kind is plain_class(name) else derived(value, encoded)


def encode(value, kind, packed):
    """JSON of a value of a plain class, or of a subclass, whose instance is encoded as one of the plain class; None for
    any other value. `kind`: class of the value. `packed(item)`: returns the JSON of an item of a container."""
    for name, (plain, to_json, _) in SPELLED.items():
        if issubclass(kind, plain):
            return {name: to_json(value)}
    for name, container in CONTAINERS.items():
        if issubclass(kind, container):
            return {name: [packed(item) for item in container.__iter__(value)]}
    for name, mapping in MAPPINGS.items():
        if issubclass(kind, mapping):
            return {name: [[packed(key), packed(dict.__getitem__(value, key))] for key in dict.keys(value)]}
    return None


def numpy_json(value, kind, packed, derived):
    """JSON of a NumPy array; a NumPy scalar is encoded as a plain number. `kind`: class of the value. `packed(item)`:
    returns the JSON of a contained value. `derived`: as for `pack`."""
    if kind.__name__ != "ndarray":
        return derived(value, packed(value.item()))
    return {"array": [value.dtype.str, list(value.shape), packed(value.ravel().tolist())]}


def plain_class(name):
    return SPELLED[name][0] if name in SPELLED else {**CONTAINERS, **MAPPINGS}[name]


def unpack(value, foreign):
    """Decode a value from JSON. `foreign(kind, content)`: returns the value that the JSON object {kind: content} stands
    for, if it describes no plain value, such as a handle."""
    if not isinstance(value, dict):
        return value
    [(name, content)] = value.items()
    if name in SPELLED:
        return SPELLED[name][2](content)
    if name in CONTAINERS:
        return CONTAINERS[name](unpack(item, foreign) for item in content)
    if name in MAPPINGS:
        return MAPPINGS[name]({unpack(key, foreign): unpack(item, foreign) for key, item in content})
    if name == "array":
        kind, shape, items = content
        return importlib.import_module("numpy").array(unpack(items, foreign), dtype=kind).reshape(shape)
    if name == "type" and isinstance(found := getattr(builtins, content), type):
        return found
    return foreign(name, content)


def error_named(name):
    """The built-in exception class of that name; RuntimeError if there is none."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


def send(stream, message):
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream):
    """The next message in a stream of lines of JSON. Raises EOFError at the end of the stream, ValueError for a message
    that is too long or not JSON."""
    line = stream.readline(LONGEST_LINE)
    if not line:
        raise EOFError("the other side has ended")
    return json.loads(line)

"""Lets single calls to the system fail in a part of a run, as the chaos tests start it, and in the processes that it
starts (`startup/sitecustomize.py`).

A place is a call's name and the function of April that makes it, for example `fsync in journal.files:sync`. Each part
writes down the places that it comes to. Once the file `order` names one, the next call from there fails, and no other.
"""

import builtins
import errno
import importlib
import importlib.util
import io
import math
import mmap
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import msgpack
import zmq

FAILING = "APRIL_TEST_FAILING_CALLS"
"""In the environment: the folder of orders."""
FILE_CALLS = (
    "open", "read", "write", "link", "fsync", "fdatasync", "pread", "pwrite", "pwritev", "ftruncate", "truncate",
    "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "listdir", "scandir", "stat", "fstat", "posix_fadvise",
)  # fmt: skip
SHUTIL_CALLS = ("disk_usage", "copy", "copyfile")
STREAM_CALLS = ("send", "recv")
NATIVE_CALLS = (("pyarrow.parquet", "write_table"), ("pyarrow.parquet", "read_table"), ("safetensors", "safe_open"),
                ("safetensors.torch", "save_file"))  # fmt: skip
"""Functions of libraries that read or write files without Python."""
FILE_ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EACCES, errno.ENOMEM)
SOCKET_ERRORS = (errno.EAGAIN, errno.EHOSTUNREACH)
STREAM_ERRORS = (errno.ECONNRESET, errno.ETIMEDOUT)
TRANSPORT_ERRORS = (errno.ECONNRESET, errno.ETIMEDOUT)
HELPERS = ("util.files", "wire.sockets.base")
"""Modules whose callers name a place."""
AGAIN_S = 5.0
"""Age from which a place that is come to again does not belong to a part's start alone."""
PACKAGE, HARNESS = f"{os.sep}april{os.sep}", f"{os.sep}tests{os.sep}"


REAL = {name: getattr(os, name) for name in ("open", "read", "unlink", "write", "close")}


class Orders:
    """The folder of orders, as the driver and the parts see it.

    orders.give("broker", "fsync in broker.journal.journal:Journal._begin_file", errno.EIO)
    orders.was_followed
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.order, self.places_file = folder / "order", folder / "places"
        flag = os.open(folder / "flag", os.O_RDWR | os.O_CREAT)
        os.ftruncate(flag, 1)
        self.flag = mmap.mmap(flag, 1)
        self._places = os.open(self.places_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def give(self, role: str, place: str, number: int) -> None:
        self.order.with_suffix(".new").write_bytes(msgpack.packb([role, place, number]))
        self.order.with_suffix(".new").rename(self.order)
        self.flag[0] = 1

    def withdraw(self) -> bool:
        """Take the order back; whether there still was one."""
        self.flag[0] = 0
        was_there = self.order.exists()
        self.order.unlink(missing_ok=True)
        return was_there

    @property
    def was_followed(self) -> bool:
        return not self.flag[0]

    def note(self, *words: str) -> None:
        """Add a line to the file of places: role, place, and `again` if it is not of a start alone."""
        REAL["write"](self._places, "\t".join(words).encode() + b"\n")

    def places(self, again: bool) -> list[tuple[str, str]]:
        """(role, place) of the calls so far, oldest first. `again`: of those that are not of a part's start alone,
        otherwise the others."""
        lines = [tuple(line.split("\t")) for line in self.places_file.read_text().splitlines()]
        repeated = {line[:2]: None for line in lines if len(line) == 3}
        return list(repeated if again else {line: None for line in lines if line[:2] not in repeated})


class Injector:
    """Makes the calls of one part fail on order."""

    def __init__(self, role: str, folder: Path):
        self.role, self.orders = role, Orders(folder)
        self.seen: dict[str, float] = {}
        """Time at which each place was first come to; infinite once it has been come to again."""

    def install(self) -> None:
        for owner, names, kind in ((os, FILE_CALLS, OSError), (shutil, SHUTIL_CALLS, OSError)):
            for name in names:
                setattr(owner, name, self.watched(getattr(owner, name), name, kind))
        real_open = builtins.open
        builtins.open = io.open = lambda *arguments, **options: self.open(real_open, *arguments, **options)
        from april.wire.sockets import base

        send = staticmethod(self.watched(base.Backend.send, "zmq send", zmq.ZMQError))
        base.Backend = type("Backend", (base.Backend,), {"send": send})
        zmq.Socket.send_multipart = self.watched(zmq.Socket.send_multipart, "zmq send_multipart", zmq.ZMQError)
        for name in STREAM_CALLS:
            setattr(socket.socket, name, self.watched(getattr(socket.socket, name), f"stream {name}", OSError))
        if self.role in ("worker", "learner"):
            from april.weights import transports

            for name in ("send", "receive"):
                real = getattr(transports.GroupLink, name)
                setattr(transports.GroupLink, name, self.watched(real, f"transport {name}", RuntimeError))
            for module, name in NATIVE_CALLS:
                if importlib.util.find_spec(module.partition(".")[0]):
                    self.watch_native(importlib.import_module(module), name)

    def watch_native(self, module, name: str) -> None:
        """Watch a function of a library, also where April's modules have imported it by name."""
        real = getattr(module, name)
        watched = self.watched(real, name, OSError)
        for other in [
            module,
            *(found for found in list(sys.modules.values()) if PACKAGE in str(getattr(found, "__file__", ""))),
        ]:
            if getattr(other, name, None) is real:
                setattr(other, name, watched)

    def watched(self, real, name: str, kind: type[Exception]):
        def call(*arguments, **options):
            self.check(name, kind)
            return real(*arguments, **options)

        return call

    def open(self, real, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *rest, **options):
        """`open`, with a file whose reads and writes may fail."""
        place = self.check("open", OSError)
        if place is None or isinstance(file, int) or rest or options or "x" in mode:
            return real(file, mode, buffering, encoding, errors, newline, *rest, **options)
        raw = WatchedFile(self, file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter)(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

    def check(self, name: str, kind: type[Exception]) -> str | None:
        """Raise the error that is ordered for this place; otherwise return the place, None if it is not April's."""
        function = april_function(sys._getframe(2))
        if function is None:
            return None
        place = f"{name} in {function}"
        now = time.monotonic()
        if (first := self.seen.setdefault(place, now)) == now:
            self.orders.note(self.role, place)
        elif now - first > AGAIN_S:
            self.seen[place] = math.inf
            self.orders.note(self.role, place, "again")
        if self.orders.flag[0] and (number := self.claim(place)):
            print(f"FAILS: {place}: {os.strerror(number)}", file=sys.stderr, flush=True)
            if kind is zmq.ZMQError:
                raise zmq.Again if number == errno.EAGAIN else zmq.ZMQError(number)
            raise kind(number, os.strerror(number))
        return place

    def claim(self, place: str) -> int:
        """The error number that is ordered for this place; 0 if none is, or another thread or part has taken it."""
        try:
            descriptor = REAL["open"](self.orders.order, os.O_RDONLY)
            role, wanted, number = msgpack.unpackb(REAL["read"](descriptor, 4096))
            REAL["close"](descriptor)
            if (role, wanted) != (self.role, place):
                return 0
            REAL["unlink"](self.orders.order)
        except FileNotFoundError:
            return 0
        self.orders.flag[0] = 0
        return number


class WatchedFile(io.FileIO):
    def __init__(self, injector: Injector, file, mode: str):
        super().__init__(file, mode)
        self.injector = injector

    def write(self, data):
        self.injector.check("write", OSError)
        return super().write(data)

    def readinto(self, buffer):
        self.injector.check("read", OSError)
        return super().readinto(buffer)

    def readall(self):
        self.injector.check("read", OSError)
        return super().readall()


def april_function(frame) -> str | None:
    """`module:function` of the innermost frame of April, without the package's name; None for a call of the test's own
    or of nobody's."""
    place = None
    while frame:
        name = frame.f_code.co_filename
        if HARNESS in name and not name.endswith(("failing_calls.py",)):
            return None
        if PACKAGE in name and HARNESS not in name:
            module = name.rpartition(PACKAGE)[2].removesuffix(".py").replace(os.sep, ".")
            place = f"{module}:{frame.f_code.co_qualname}"
            if module not in HELPERS:
                return place
        frame = frame.f_back
    return place


def errors_of(place: str) -> tuple[int, ...]:
    """Error numbers with which the call of a place may fail."""
    if place.startswith("zmq"):
        return SOCKET_ERRORS
    if place.startswith("stream"):
        return STREAM_ERRORS
    return TRANSPORT_ERRORS if place.startswith("transport") else FILE_ERRORS


def install(role: str) -> None:
    """Let calls of this process fail on order, if the environment names the folder of orders."""
    if folder := os.environ.get(FAILING):
        Injector(role, Path(folder)).install()


def wait_for(condition, timeout_s: float) -> bool:
    """Wait until the condition holds; whether it came to that."""
    deadline = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds)

"""Files in an object store, or wherever else fsspec leads: each call has a deadline, what may succeed again is tried
again, and an error names the URL.

    store = ObjectStore("s3://bucket/runs/NAME")
    store.put(Path("file"), "step/file")             # whole, or not there
    store.names()                                    # {"step/file", ...}
    store.fetch("step/file", Path("copy"))

Credentials and the address of a server are left to the library that speaks the protocol, and so to the environment.
"""

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from april.files.disk import sync

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

TIMEOUT_S = 120.0
ASKED_S = 30.0
DELAYS_S = (1.0, 4.0, 16.0)
"""before each try after the first"""
LOCAL = {"file", "local"}
WITH_FOLDERS = LOCAL | {"memory", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs"}
"""protocols whose folders have to be made, and removed; elsewhere a name with slashes is a name"""
WITHOUT_USE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ImportError, ValueError)
"""what another try would end in again, as are errors of these names"""
CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "RefreshError"}
SECRET_VARIABLES = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|KEY", re.IGNORECASE)
SHORTEST_SECRET = 6
LONGEST_REASON = 300
DONE = {"write": "written", "read": "read", "list": "listed", "remove": "removed"}
"""what each call wants done"""


class StoreError(Exception):
    """A store has not answered, though it was asked again. The text names its URL."""


class StoreRefused(StoreError):
    """It would not the next time either."""


class StoreLacks(StoreRefused):
    """A file that is asked for is not there, or the bucket is not."""


class Late(Exception):
    """No answer, and nothing moved."""


class ObjectStore:
    """Whoever holds one is who waits for its calls; they may come from several threads."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, delays_s: Collection[float] = DELAYS_S):
        """`timeout_s`: longest wait in which nothing moves. Nobody is asked before the first call."""
        self.url, self.timeout_s, self.delays_s = url.rstrip("/"), timeout_s, tuple(delays_s)
        self.retries = 0
        """calls that were tried again"""
        self._files: Any = None

    @property
    def patience_s(self) -> float:
        """Longest time that a call takes in which nothing moves."""
        return self.timeout_s * (1 + len(self.delays_s)) + sum(self.delays_s)

    def tried_once(self) -> "ObjectStore":
        """The same for somebody who waits for an answer, whatever it is."""
        return ObjectStore(self.url, min(self.timeout_s, ASKED_S), ())

    def put(self, path: Path, name: str) -> None:
        """Have the store hold a file; it has it then."""
        path.stat()

        def send(files: Any, place: str, moved: Any) -> None:
            make_folder(files, place)
            files.put_file(str(path), place, callback=moved)
            settle(files, place)

        self._ask("write", name, send)

    def write(self, name: str, data: bytes) -> None:
        def send(files: Any, place: str, moved: Any) -> None:
            make_folder(files, place)
            files.pipe_file(place, data)
            settle(files, place)

        self._ask("write", name, send)

    def read(self, name: str) -> bytes:
        return bytes(self._ask("read", name, lambda files, place, moved: files.cat_file(place)))

    def fetch(self, name: str, path: Path) -> None:
        """Have the disk hold a file of the store, in the place of what is there."""

        def get(files: Any, place: str, moved: Any) -> None:
            partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
            try:
                files.get_file(place, str(partial), callback=moved)
                sync(partial)
                partial.rename(path)
                sync(path.parent)
            finally:
                partial.unlink(missing_ok=True)

        self._ask("read", name, get)

    def names(self, folder: str = "") -> set[str]:
        """Of all files below that folder, the whole store by default."""

        def find(files: Any, place: str, moved: Any) -> set[str]:
            files.invalidate_cache()
            return {str(found)[len(place) :].lstrip("/") for found in files.find(place)}

        try:
            return self._ask("list", folder, find)
        except StoreLacks:
            return set()

    def remove(self, folder: str, names: Collection[str]) -> None:
        """Remove a folder with those files, which may be gone already."""

        def drop(files: Any, place: str, moved: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                if has_folders(files):
                    files.rm(place, recursive=True)
                elif names:
                    files.rm([f"{place}/{name}" for name in sorted(names)])
            files.invalidate_cache()

        self._ask("remove", folder, drop)

    def remove_file(self, name: str) -> None:
        def drop(files: Any, place: str, moved: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(place)
            files.invalidate_cache()

        self._ask("remove", name, drop)

    def probe(self) -> None:
        """Make sure that files can be written, read, listed and removed. Raises StoreError."""
        folder = f".april-{secrets.token_hex(8)}"
        name = f"{folder}/probe"
        self.write(name, name.encode())
        seen = self.read(name) == name.encode() and self.names(folder) == {"probe"}
        self.remove(folder, {"probe"})
        if not seen:
            raise StoreRefused(f"{self.url} does not show what was written to it")

    def _ask(self, what: str, name: str, work: Callable[[Any, str, Any], Answer]) -> Answer:
        """What the work returns, given the file system, the full name there, and whom to tell of bytes that moved."""
        place = f"{self.url}/{name}" if name else self.url
        for delay_s in (*self.delays_s, None):
            try:
                return self._answer(name, work)
            except WITHOUT_USE as error:
                kind = StoreLacks if isinstance(error, FileNotFoundError) else StoreRefused
                raise kind(f"{place} cannot be {DONE[what]}: {reason(error)}") from None
            except Exception as error:
                said = f"{place} cannot be {DONE[what]}: {reason(error)}"
                if type(error).__name__ in CREDENTIALS:
                    raise StoreRefused(said) from None
                if delay_s is None:
                    raise StoreError(f"{said}; tried {1 + len(self.delays_s)} times") from None
                log.warning("%s; tried again in %g s", said, delay_s)
            self.retries += 1
            self._files = None
            time.sleep(delay_s)
        raise AssertionError

    def _answer(self, name: str, work: Callable[[Any, str, Any], Answer]) -> Answer:
        """In a thread, which is left alone where the store falls silent."""
        call = Call(lambda moved: work(*self._at(name), moved))
        threading.Thread(target=call.run, name="object-store", daemon=True).start()
        seen = -1
        while not call.ended.wait(self.timeout_s):
            if call.moved == seen:
                raise Late(f"no answer within {self.timeout_s:g} s")
            seen = call.moved
        if call.error is not None:
            raise call.error
        answer: Answer = call.answer
        return answer

    def _at(self, name: str) -> tuple[Any, str]:
        files = self._files
        if files is None:
            self._files = files = connect(self.url)
        root = files._strip_protocol(self.url)
        return files, f"{root}/{name}" if name else root


class Call:
    """One try, in a thread of its own."""

    def __init__(self, work: Callable[[Any], Any]):
        self.work, self.moved, self.ended = work, 0, threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        from fsspec.callbacks import Callback

        try:
            self.answer = self.work(Callback(hooks={"moved": self.saw}))
        except Exception as error:
            self.error = error
        self.ended.set()

    def saw(self, size: int | None, moved: int, **_: Any) -> None:
        """Is called as bytes move."""
        self.moved = moved


def connect(url: str) -> Any:
    """The file system of a URL. Raises ImportError, or ValueError, with what is to be installed."""
    import fsspec

    return fsspec.url_to_fs(url, skip_instance_cache=True)[0]


def protocols(files: Any) -> set[str]:
    return {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)


def has_folders(files: Any) -> bool:
    return bool(WITH_FOLDERS & protocols(files))


def make_folder(files: Any, place: str) -> None:
    """A bucket is never made: one that is not there is a mistake in its name."""
    if has_folders(files):
        files.makedirs(place.rpartition("/")[0], exist_ok=True)


def settle(files: Any, place: str) -> None:
    """What was written is on disk; a store has it then anyway."""
    if LOCAL & protocols(files):
        sync(Path(place))
        sync(Path(place).parent)


def reason(error: Exception) -> str:
    """One line of an error, without what somebody may have put into a URL or the environment to be let in."""
    text = " ".join(f"{error}".split()) or type(error).__name__
    text = re.sub(r"\?[^\s'\"]*=[^\s'\"]*", "?…", text)
    text = re.sub(r"//[^/\s@]*@", "//…@", text)
    for name, value in os.environ.items():
        if SECRET_VARIABLES.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "…")
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"

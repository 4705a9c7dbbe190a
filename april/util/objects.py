"""Files in an object store, or in any file system that fsspec supports. Each call has a timeout, temporary errors are
retried, and errors name the URL.

    store = ObjectStore("s3://bucket/runs/NAME")
    store.put(Path("file"), "step/file")             # complete, or not there
    store.names()                                    # {"step/file", ...}
    store.fetch("step/file", Path("copy"))

Credentials and server addresses come from the environment, through the library for the URL's protocol.
"""

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from april.util.files import sync

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

TIMEOUT_S = 120.0
"""Default time without any progress after which one try of a call is given up (s)."""
SINGLE_TRY_TIMEOUT_S = 30.0
"""Longest timeout, as time without progress, of a store whose calls are tried only once (s)."""
PIECE_BYTES = 2**24
"""Most bytes of a file that are read at a time."""
DELAYS_S = (1.0, 4.0, 16.0)
"""Delays before the first retry of a failed call, the second one, and so on (s)."""
LOCAL = {"file", "local"}
"""Names that fsspec has for the protocol of the local disk."""
WITH_FOLDERS = LOCAL | {"memory", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs"}
"""Protocols with real folders, which have to be created and removed; elsewhere slashes are part of a name."""
PERMANENT_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ImportError, ValueError)
"""Classes of permanent errors, after which a retry would fail again."""
CREDENTIAL_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "RefreshError"}
"""Names of error classes for missing or invalid credentials, which are permanent errors too."""
SECRET_VARIABLES = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|KEY", re.IGNORECASE)
SHORTEST_SECRET = 6
"""Shortest value (characters) of an environment variable like `API_KEY` that is masked in error texts."""
LONGEST_REASON = 300
"""Number of characters after which the text of an error is cut off."""
DONE = {"write": "written", "read": "read", "list": "listed", "remove": "removed"}
"""Name of an operation -> its past participle, for sentences such as "cannot be written"."""


class StoreError(Exception):
    """A call to the store has failed, retries included. The text names the URL."""


class StoreRefused(StoreError):
    """A call to the store has failed permanently: a retry would fail again."""


class StoreLacks(StoreRefused):
    """The file or the bucket does not exist."""


class Late(Exception):
    """One try of a call made no progress within the timeout."""


class ObjectStore:
    """The files below a URL. Calls block, and may come from several threads."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, delays_s: Collection[float] = DELAYS_S):
        """`timeout_s`: longest time of one try without progress; `delays_s`: delays before each retry. The store is not
        contacted before the first call."""
        self.url, self.timeout_s, self.delays_s = url.rstrip("/"), timeout_s, tuple(delays_s)
        self.retries = 0
        """Number of retries of this store's calls so far."""
        self._files: Any = None

    @property
    def patience_s(self) -> float:
        """Longest time that a call can take without any progress, retries included."""
        return self.timeout_s * (1 + len(self.delays_s)) + sum(self.delays_s)

    def tried_once(self) -> "ObjectStore":
        """A copy of this store whose calls are tried once, with a short timeout."""
        return ObjectStore(self.url, min(self.timeout_s, SINGLE_TRY_TIMEOUT_S), ())

    def put(self, path: Path, name: str) -> None:
        """Write the local file `path` to the store as `name`; it is durable there on return."""
        path.stat()

        def send(files: Any, full_name: str, moved: Any) -> None:
            make_folder(files, full_name)
            files.put_file(str(path), full_name, callback=moved)
            settle(files, full_name)

        self._call("write", name, send)

    def write(self, name: str, data: bytes) -> None:
        def send(files: Any, full_name: str, moved: Any) -> None:
            make_folder(files, full_name)
            files.pipe_file(full_name, data)
            settle(files, full_name)

        self._call("write", name, send)

    def read(self, name: str) -> bytes:
        return bytes(self._call("read", name, lambda files, full_name, moved: files.cat_file(full_name)))

    def fetch(self, name: str, path: Path) -> None:
        """Copy the file `name` of the store to `path`, atomically replacing what is there."""

        def get(files: Any, full_name: str, moved: Any) -> None:
            partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
            try:
                files.get_file(full_name, str(partial), callback=moved)
                sync(partial)
                partial.rename(path)
                sync(path.parent)
            finally:
                partial.unlink(missing_ok=True)

        self._call("read", name, get)

    def write_pieces(self, name: str, pieces: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Write the file `name` of the store piece by piece, without a copy of it in memory. `pieces` is called anew
        for each try."""

        def send(files: Any, full_name: str, moved: Any) -> None:
            make_folder(files, full_name)
            size = 0
            with files.open(full_name, "wb") as file:
                for piece in pieces():
                    size += file.write(piece)
                    moved.absolute_update(size)
            settle(files, full_name)

        self._call("write", name, send)

    def read_into(self, name: str, buffer: Callable[[int], memoryview], read: Callable[[memoryview], None]) -> None:
        """Read the file `name` of the store into memory, anew for each try: `buffer` gets its size in bytes and returns
        as much memory, `read` gets each part of it that has been filled, in order."""

        def get(files: Any, full_name: str, moved: Any) -> None:
            data, done = buffer(files.size(full_name)), 0
            with files.open(full_name, "rb") as file:
                while count := file.readinto(data[done : done + PIECE_BYTES]):
                    read(data[done : done + count])
                    done += count
                    moved.absolute_update(done)

        self._call("read", name, get)

    def names(self, folder: str = "") -> set[str]:
        """Names of all files below a folder, relative to that folder; by default of the whole store."""

        def find(files: Any, full_name: str, moved: Any) -> set[str]:
            files.invalidate_cache()
            return {str(path)[len(full_name) :].lstrip("/") for path in files.find(full_name)}

        try:
            return self._call("list", folder, find)
        except StoreLacks:
            return set()

    def remove(self, folder: str, names: Collection[str]) -> None:
        """Remove a folder and the files `names` in it; they may be gone already."""

        def drop(files: Any, full_name: str, moved: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                if has_folders(files):
                    files.rm(full_name, recursive=True)
                elif names:
                    files.rm([f"{full_name}/{name}" for name in sorted(names)])
            files.invalidate_cache()

        self._call("remove", folder, drop)

    def remove_file(self, name: str) -> None:
        def drop(files: Any, full_name: str, moved: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(full_name)
            files.invalidate_cache()

        self._call("remove", name, drop)

    def probe(self) -> None:
        """Check that files can be written, read, listed and removed. Raises StoreError."""
        folder = f".april-{secrets.token_hex(8)}"
        name = f"{folder}/probe"
        self.write(name, name.encode())
        is_shown = self.read(name) == name.encode() and self.names(folder) == {"probe"}
        self.remove(folder, {"probe"})
        if not is_shown:
            raise StoreRefused(f"{self.url} does not show what was written to it")

    def _call(self, operation: str, name: str, work: Callable[[Any, str, Any], Answer]) -> Answer:
        """The result of `work(file system, full name, progress callback)`, with retries. `operation`: what `work` does
        to the file `name`, as a key of `DONE`."""
        url = f"{self.url}/{name}" if name else self.url
        for delay_s in (*self.delays_s, None):
            try:
                return self._try(name, work)
            except StoreError:
                raise  # `work` has given up itself
            except PERMANENT_ERRORS as error:
                kind = StoreLacks if isinstance(error, FileNotFoundError) else StoreRefused
                raise kind(f"{url} cannot be {DONE[operation]}: {reason(error)}") from None
            except Exception as error:
                problem = f"{url} cannot be {DONE[operation]}: {reason(error)}"
                if type(error).__name__ in CREDENTIAL_ERRORS:
                    raise StoreRefused(problem) from None
                if delay_s is None:
                    raise StoreError(f"{problem}; tried {1 + len(self.delays_s)} times") from None
                log.warning("%s; tried again in %g s", problem, delay_s)
            self.retries += 1
            self._files = None
            time.sleep(delay_s)
        raise AssertionError

    def _try(self, name: str, work: Callable[[Any, str, Any], Answer]) -> Answer:
        """One try of a call: the result of `work(file system, full name, progress callback)`, run in a thread. Raises
        Late, and leaves the thread alone, after `timeout_s` without progress; passes on the errors of `work`."""
        call = Call(lambda moved: work(*self._resolve(name), moved))
        threading.Thread(target=call.run, name="object-store", daemon=True).start()
        moved_before = -1
        while not call.ended.wait(self.timeout_s):
            if call.moved == moved_before:
                raise Late(f"no answer within {self.timeout_s:g} s")
            moved_before = call.moved
        if call.error is not None:
            raise call.error
        answer: Answer = call.answer
        return answer

    def _resolve(self, name: str) -> tuple[Any, str]:
        """(file system of the store's URL, full name of the store's file `name` there)."""
        files = self._files
        if files is None:
            self._files = files = connect(self.url)
        root = files._strip_protocol(self.url)
        return files, f"{root}/{name}" if name else root


class Call:
    """One try of a call, run in a thread of its own."""

    def __init__(self, work: Callable[[Any], Any]):
        self.work, self.moved, self.ended = work, 0, threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            from fsspec.callbacks import Callback

            self.answer = self.work(Callback(hooks={"moved": self.note_progress}))
        except Exception as error:
            self.error = error
        self.ended.set()

    def note_progress(self, size: int | None, moved: int, **_: Any) -> None:
        """Called by fsspec as bytes move: `moved` bytes so far, of `size` (None: unknown)."""
        self.moved = moved


def connect(url: str) -> Any:
    """The file system of a URL. Raises ImportError or ValueError, which names the package to install."""
    import fsspec

    return fsspec.url_to_fs(url, skip_instance_cache=True)[0]


def protocols(files: Any) -> set[str]:
    return {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)


def has_folders(files: Any) -> bool:
    return bool(WITH_FOLDERS & protocols(files))


def make_folder(files: Any, full_name: str) -> None:
    """Create the parent folder of the file `full_name` if the file system `files` has folders. A missing bucket is an
    error, and is not created."""
    if has_folders(files):
        files.makedirs(full_name.rpartition("/")[0], exist_ok=True)


def settle(files: Any, full_name: str) -> None:
    """Sync the written file `full_name` if the file system `files` is the local disk; in an object store it is durable
    once written."""
    if LOCAL & protocols(files):
        sync(Path(full_name))
        sync(Path(full_name).parent)


def reason(error: Exception) -> str:
    """An error's text as one line, with secrets from URLs and the environment masked."""
    text = " ".join(f"{error}".split()) or type(error).__name__
    text = re.sub(r"\?[^\s'\"]*=[^\s'\"]*", "?…", text)
    text = re.sub(r"//[^/\s@]*@", "//…@", text)
    for name, value in os.environ.items():
        if SECRET_VARIABLES.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "…")
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"

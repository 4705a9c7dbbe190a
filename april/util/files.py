"""Durable and private writes: appending and syncing, through the page cache or with direct I/O past it, atomic
replacement, the removal of folders that somebody else has filled, and the files of a model's weights."""

import contextlib
import errno
import itertools
import logging
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

log = logging.getLogger(__name__)

BUFFERS_PER_WRITE = 1000
"""Buffers per vectored write; the kernel accepts at most 1024."""
BLOCK_BYTES = 4096
"""Direct I/O writes whole blocks of this size, from memory with this alignment."""
STAGE_BYTES = 4 << 20
"""Size of the aligned buffer (bytes) through which direct I/O copies what it writes."""

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the single file of a Hugging Face folder's weights, and of the index if there are several files."""

Buffer = bytes | memoryview


class Uncached:
    """Appends to a file with direct I/O: on a virtual machine a new page in the page cache may cost more than the
    write.

    Whole blocks are copied to aligned memory and written to the disk. Partial blocks at both ends go through the page
    cache.
    """

    def __init__(self, path: Path):
        """Open the existing file `path` for writing with direct I/O. Raises OSError, also if the file system has no
        direct I/O."""
        self._stage = mmap.mmap(-1, STAGE_BYTES)
        self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)

    def write(self, file: int, pieces: Iterable[Buffer], offset: int) -> None:
        """Write the pieces, concatenated, at `offset`. `file`: a descriptor of the same file without direct I/O."""
        with memoryview(self._stage) as stage:
            begin = end = offset % BLOCK_BYTES
            base = offset - begin
            for piece in pieces:
                unwritten = memoryview(piece)
                while unwritten:
                    count = min(len(unwritten), STAGE_BYTES - end)
                    stage[end : end + count], unwritten = unwritten[:count], unwritten[count:]
                    end += count
                    if end == STAGE_BYTES:
                        self._put(file, stage, begin, end, base)
                        base, begin, end = base + end, 0, 0
            self._put(file, stage, begin, end, base)

    def _put(self, file: int, stage: memoryview, begin: int, end: int, base: int) -> None:
        """Write bytes `begin` to `end` of the staging buffer, whose first byte belongs at offset `base` of the file."""
        first = min(end, -(-begin // BLOCK_BYTES) * BLOCK_BYTES)
        last = max(first, end // BLOCK_BYTES * BLOCK_BYTES)
        write_all(file, stage[begin:first], base + begin)
        written = self._put_blocks(stage[first:last], base + first)
        write_all(file, stage[first + written : end], base + first + written)

    def _put_blocks(self, blocks: memoryview, offset: int) -> int:
        """Write whole blocks with direct I/O; returns the bytes written. The caller writes the rest through the cache,
        which also reports a persistent error."""
        try:
            return os.pwritev(self._direct, [blocks], offset) if blocks else 0
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0

    def close(self) -> None:
        os.close(self._direct)
        self._stage.close()


def open_uncached(path: Path) -> Uncached | None:
    """An `Uncached` writer; None if the system or the file system has no direct I/O."""
    with contextlib.suppress(OSError, AttributeError):
        return Uncached(path)
    return None


def write_and_sync(
    file: int,
    pieces: list[Buffer],
    offset: int,
    unneeded_pages: Sequence[tuple[int, int, int]] = (),
    uncached: Uncached | None = None,
) -> float:
    """Write the pieces, concatenated, at `offset` of the file with the descriptor `file`, and sync; returns the seconds
    that the sync took.

    `unneeded_pages`: (descriptor, offset, number of bytes) of ranges to drop from the page cache. `uncached`: writes
    with direct I/O; None: through the page cache.
    """
    with contextlib.suppress(OSError):  # the pages stay in memory
        for page_range in unneeded_pages:
            os.posix_fadvise(*page_range, os.POSIX_FADV_DONTNEED)
    if uncached:
        uncached.write(file, pieces, offset)
    else:
        remaining = iter(pieces)
        while buffers := list(itertools.islice(remaining, BUFFERS_PER_WRITE)):
            count = os.pwritev(file, buffers, offset)
            if count < (size := sum(map(len, buffers))):
                write_all(file, memoryview(b"".join(buffers))[count:], offset + count)
            offset += size
    began = time.monotonic()
    os.fdatasync(file)
    return time.monotonic() - began


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of the file with the descriptor `file`, however many calls it takes."""
    while data:
        count = os.pwritev(file, [data], offset)
        data, offset = data[count:], offset + count


def sync(path: Path) -> None:
    """Sync to disk (fsync) a file's content or, of a folder, the list of its entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_pieces(path: Path, pieces: Callable[[], Iterable[Buffer]]) -> None:
    """Write the pieces that `pieces()` yields to a file, one by one, and sync it."""
    with path.open("wb") as file:
        file.writelines(pieces())
        file.flush()
        os.fsync(file.fileno())


AGAIN_S = (0.05, 1.0)
"""Pauses before each further try of a call that the system has refused, seconds."""
Result = TypeVar("Result")


def retried(call: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function, and call it again after each of the pauses `AGAIN_S` if it raises an OSError other than
    FileNotFoundError, which may be temporary; returns its result."""
    for pause_s in AGAIN_S:
        try:
            return call(*arguments)
        except FileNotFoundError:
            raise
        except OSError as error:
            log.warning("tried again in %g s: %s", pause_s, error)
            time.sleep(pause_s)
    return call(*arguments)


def read_whole(path: Path) -> bytes:
    """Content of a file; a failed read is `retried`. Raises OSError."""
    return retried(path.read_bytes)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content atomically: readers see the old or the new content, never a part."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(data)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    temporary.replace(path)


PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of files and folders of a run: prompts, responses and configurations are their owner's."""


def keep_private(run_dir: Path) -> None:
    """Make `run_dir`, if it exists, and all that this process and its children write private to their user."""
    os.umask(0o777 & ~PRIVATE_FOLDER)
    if run_dir.is_dir():
        make_private(run_dir)


def make_private(folder: Path) -> None:
    """Create a folder unless it exists; remove other users' access to it if this user owns it. Raises OSError if it
    cannot be created."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        folder.chmod(PRIVATE_FOLDER)


def open_lock(path: Path) -> int:
    """Open a lock file that only this user can open, since other users could hold the lock forever. Child processes do
    not inherit the descriptor. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, PRIVATE_FILE)
    return descriptor


OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
"""Flags of `os.open` that open a folder and refuse a symbolic link to one."""


def remove_folder(folder: str, deadline_s: float) -> None:
    """Remove a folder and all in it, as far as that can be done until `deadline_s` of the monotonic clock.

    Subfolders are moved up into `folder` before they are emptied, so that deep nesting needs no recursion, no further
    descriptors and no long paths.
    """
    with contextlib.suppress(OSError):
        make_accessible(folder)
        root, moved = os.open(folder, OPEN_FOLDER), itertools.count()
        prefix = os.urandom(8).hex()
        try:
            while names := delete_files(root, deadline_s):
                for name in names:
                    inner = os.open(name, OPEN_FOLDER, dir_fd=root)
                    try:
                        for each in delete_files(inner, deadline_s):
                            os.rename(each, f"{prefix}-{next(moved)}", src_dir_fd=inner, dst_dir_fd=root)
                    finally:
                        os.close(inner)
                    os.rmdir(name, dir_fd=root)
        finally:
            os.close(root)
        os.rmdir(folder)


def delete_files(folder: int, deadline_s: float) -> list[str]:
    """Delete the files in a folder, given by its descriptor; returns the names of its subfolders, which are left.
    Raises TimeoutError after `deadline_s` of the monotonic clock."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if time.monotonic() > deadline_s:
                raise TimeoutError
            if entry.is_dir(follow_symlinks=False):
                make_accessible(entry.name, folder)
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


def make_accessible(name: str, parent: int | None = None) -> None:
    """Give the owner of the folder `name` all access rights again, which the program that made the folder may have
    removed. `parent`: descriptor of the folder in which it is, if `name` is no path. Does not follow symbolic links."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IRWXU)
    finally:
        os.close(descriptor)


def weight_files(folder: Path) -> list[Path]:
    """Files of a Hugging Face folder's weights, there or missing: those that its index lists, or `model.safetensors`.
    Without either, all its safetensors files. Others beside them, such as a merged adapter, are not the model's."""
    if (index := folder / WEIGHTS_INDEX).is_file():
        return sorted({folder / name for name in orjson.loads(index.read_bytes()).get("weight_map", {}).values()})
    return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))


LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary position embedding (RoPE) whose frequencies depend on the longest sequence of a batch."""


def length_dependent_positions(config: Any) -> str:
    """The first type of LENGTH_DEPENDENT that a model's config.json names, at any depth; empty if it names none."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key in ("rope_type", "type") and value in LENGTH_DEPENDENT:
            return str(value)
        if found := length_dependent_positions(value):
            return found
    return ""


def has_weights(folder: Path) -> bool:
    """Whether a Hugging Face folder has all files of its weights."""
    files = weight_files(folder)
    return bool(files) and all(file.is_file() for file in files)

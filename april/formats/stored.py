"""Checkpoints in an object store: which are whole, and how one comes to be.

    URL/step_000010-1f3a9c2b5d7e/     a writing of step 10; SHA256SUMS, put last, makes it one
    URL/policy/                       what is exported, as a Hugging Face folder, whole with its SHA256SUMS

A writing is named after its list of checksums, so that files of two writings never lie in one folder, and whoever puts
files there again puts the same. It is removed list first. Nothing here asks another rank.
"""

import hashlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from april.config import Config, ConfigError
from april.files.objects import ObjectStore, StoreError, StoreLacks, StoreRefused

log = logging.getLogger(__name__)

CHECKSUMS_FILE = "SHA256SUMS"
WRITING = re.compile(r"(step_(\d{6,})-([0-9a-f]{12}))/(.+)")
KEY = "learner.checkpoint_store"

Sums = Mapping[str, str]
"""digests by name of the file"""


def listing(sums: Sums) -> str:
    """What `sha256sum -c` reads."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def listed(text: str) -> dict[str, str]:
    return {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}


def digest_of(path: Path) -> str:
    """SHA-256 in hexadecimal; nothing of a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


class StoredCheckpoints:
    def __init__(self, objects: ObjectStore):
        self.objects = objects

    @property
    def url(self) -> str:
        return self.objects.url

    def steps(self) -> set[int]:
        """Of the checkpoints that are whole."""
        return {step for _, step, names in self._folders() if CHECKSUMS_FILE in names}

    def writings(self, step: int) -> list[Sums]:
        """The lists of the whole ones of that step."""
        found: list[Sums] = []
        for folder, its, names in self._folders():
            if its == step and CHECKSUMS_FILE in names:
                text = self.objects.read(f"{folder}/{CHECKSUMS_FILE}").decode(errors="replace")
                sums = listed(text)
                if folder_of(step, sums) == folder:
                    found.append(sums)
                else:
                    log.error("%s/%s/%s is damaged", self.url, folder, CHECKSUMS_FILE, extra={"step": step})
        return found

    def put(self, step: int, sums: Sums, path: Path) -> None:
        """One of the files of a writing."""
        self.objects.put(path, f"{folder_of(step, sums)}/{path.name}")

    def complete(self, step: int, sums: Sums) -> None:
        """All others are there: now it is a checkpoint."""
        self.objects.write(f"{folder_of(step, sums)}/{CHECKSUMS_FILE}", listing(sums).encode())

    def fetch(self, step: int, sums: Sums, name: str, path: Path) -> bool:
        """Have the disk hold a file; whether it is what was written."""
        place = f"{folder_of(step, sums)}/{name}"
        for _ in range(2):
            try:
                self.objects.fetch(place, path)
            except StoreLacks as error:
                log.error("%s", error, extra={"step": step})
                return False
            if digest_of(path) == sums[name]:
                return True
        log.error("%s/%s is damaged", self.url, place, extra={"step": step})
        return False

    def set_aside(self, step: int, ending: str) -> list[str]:
        """Let it be no checkpoint any more, its files kept; which they are."""
        found = []
        for folder, its, names in self._folders():
            if its == step and CHECKSUMS_FILE in names:
                list_of = f"{folder}/{CHECKSUMS_FILE}"
                self.objects.write(f"{list_of}.{ending}", self.objects.read(list_of))
                self.objects.remove_file(list_of)
                found.append(f"{self.url}/{folder}")
        return found

    def prune(self, keep: int, besides: Collection[int]) -> None:
        """Remove all but the newest `keep` checkpoints and those `besides`, and what was never completed. What is set
        aside stays. Nothing may be on its way there."""
        folders = list(self._folders())
        whole = sorted({step for _, step, names in folders if CHECKSUMS_FILE in names})
        kept = {*whole[-keep:], *besides}
        for folder, step, names in folders:
            if CHECKSUMS_FILE in names:
                if step in kept:
                    continue
                self.objects.remove_file(f"{folder}/{CHECKSUMS_FILE}")
            elif any(name.startswith(f"{CHECKSUMS_FILE}.") for name in names):
                continue
            self.objects.remove(folder, names - {CHECKSUMS_FILE})

    def export(self, source: Path) -> None:
        """Have the store hold such a folder, in the place of what it has of that name."""
        there = {name.partition("/")[2] for name in self.objects.names() if name.startswith(f"{source.name}/")}
        if CHECKSUMS_FILE in there:
            self.objects.remove_file(f"{source.name}/{CHECKSUMS_FILE}")
        paths = sorted(path for path in source.rglob("*") if path.is_file())
        sums = {path.relative_to(source).as_posix(): digest_of(path) for path in paths}
        for name in sums:
            self.objects.put(source / name, f"{source.name}/{name}")
        for name in there - sums.keys() - {CHECKSUMS_FILE}:
            self.objects.remove_file(f"{source.name}/{name}")
        self.objects.write(f"{source.name}/{CHECKSUMS_FILE}", listing(sums).encode())

    def _folders(self) -> Iterator[tuple[str, int, set[str]]]:
        """(name, step, files) of each, whole or not."""
        folders: dict[str, tuple[int, set[str]]] = {}
        for found in map(WRITING.fullmatch, sorted(self.objects.names())):
            if found:
                folders.setdefault(found[1], (int(found[2]), set()))[1].add(found[4])
        for folder, (step, names) in folders.items():
            yield folder, step, names


def folder_of(step: int, sums: Sums) -> str:
    return f"step_{step:06d}-{hashlib.sha256(listing(sums).encode()).hexdigest()[:12]}"


def store_of(config: Config, name: str = "") -> ObjectStore:
    """What the configuration names, or what lies there under a name."""
    learner = config.learner
    url = f"{learner.checkpoint_store.rstrip('/')}/{quote(name, safe='')}"
    return ObjectStore(url, learner.checkpoint_store_timeout_s)


def stored_checkpoints(config: Config, once: bool = False) -> StoredCheckpoints | None:
    """Where the configuration has a run's in a store. Nobody is asked yet; `once`: nor twice, then."""
    if not config.learner.checkpoint_store:
        return None
    objects = store_of(config, config.run.name)
    return StoredCheckpoints(objects.tried_once() if once else objects)


def refused(error: StoreError) -> ConfigError:
    """The sentence for whoever has named the store."""
    mend = (
        "mend the key, or the rights and the environment that this part reaches it with"
        if isinstance(error, StoreRefused)
        else "see that this machine reaches it"
    )
    return ConfigError(f"key '{KEY}': {error}; {mend}")

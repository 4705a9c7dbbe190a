"""Formats of what a run stores for others to read: checkpoints in an object store, lines of metrics.jsonl, and the
folder of a trained adapter.

A run's checkpoints in an object store:

    URL/step_000010-1f3a9c2b5d7e/     a checkpoint of step 10, complete once it has SHA256SUMS, which is written last
    URL/policy/                       the exported Hugging Face folder, complete with its SHA256SUMS

A checkpoint's folder is named after the hash of its checksum list. So two attempts at the same step never share a
folder, and writing a file again writes the same content. Removal starts with the checksum list. No function here
communicates with other ranks.
"""

import hashlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from april.config import Config, ConfigError
from april.util.files import retried
from april.util.objects import ObjectStore, StoreError, StoreLacks, StoreRefused

log = logging.getLogger(__name__)

CHECKSUMS_FILE = "SHA256SUMS"
CHECKPOINT_FILE = re.compile(r"(step_(\d{6,})-([0-9a-f]{12}))/(.+)")
STORE_KEY = "learner.checkpoint_store"

Sums = Mapping[str, str]
"""Checksum list: SHA-256 digest (hexadecimal) by file name."""


def format_checksums(sums: Sums) -> str:
    """A checksum list in the form that `sha256sum -c` reads."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def parse_checksums(text: str) -> dict[str, str]:
    """The checksum list (file name -> digest) in a text that `format_checksums` has written."""
    return {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}


def digest_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal; "" if there is none. Raises OSError with its name."""

    def read() -> str:
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            error.filename = error.filename or str(path)
            raise

    try:
        return retried(read)
    except FileNotFoundError:
        return ""


class StoredCheckpoints:
    """The checkpoints of one run in an object store. Methods raise StoreError."""

    def __init__(self, objects: ObjectStore):
        self.objects = objects

    @property
    def url(self) -> str:
        return self.objects.url

    def steps(self) -> set[int]:
        """Policy steps of the complete checkpoints."""
        return {step for _, step, names in self._folders() if CHECKSUMS_FILE in names}

    def checkpoint_sums(self, step: int) -> list[Sums]:
        """Checksum lists of the complete checkpoints of a step; there may be several."""
        found: list[Sums] = []
        for folder, folder_step, names in self._folders():
            if folder_step == step and CHECKSUMS_FILE in names:
                text = self.objects.read(f"{folder}/{CHECKSUMS_FILE}").decode(errors="replace")
                sums = parse_checksums(text)
                if folder_of(step, sums) == folder:
                    found.append(sums)
                else:
                    log.error("%s/%s/%s is damaged", self.url, folder, CHECKSUMS_FILE, extra={"step": step})
        return found

    def put(self, step: int, sums: Sums, path: Path) -> None:
        """Write `path`, one file of the checkpoint of policy step `step` whose checksum list is `sums`."""
        self.objects.put(path, f"{folder_of(step, sums)}/{path.name}")

    def complete(self, step: int, sums: Sums) -> None:
        """Make a checkpoint complete by writing its checksum list. Call this only after all its files are stored."""
        self.objects.write(f"{folder_of(step, sums)}/{CHECKSUMS_FILE}", format_checksums(sums).encode())

    def fetch(self, step: int, sums: Sums, name: str, path: Path) -> bool:
        """Copy the file `name` of a checkpoint to `path`; returns whether its checksum is that in `sums`."""
        source = f"{folder_of(step, sums)}/{name}"
        for _ in range(2):
            try:
                self.objects.fetch(source, path)
            except StoreLacks as error:
                log.error("%s", error, extra={"step": step})
                return False
            if digest_of(path) == sums[name]:
                return True
        log.error("%s/%s is damaged", self.url, source, extra={"step": step})
        return False

    def set_aside(self, step: int, ending: str) -> list[str]:
        """Take a step's checkpoints out of use but keep their files: the checksum list gets the suffix `ending`.
        Returns the URLs of their folders."""
        found = []
        for folder, folder_step, names in self._folders():
            if folder_step == step and CHECKSUMS_FILE in names:
                checksums = f"{folder}/{CHECKSUMS_FILE}"
                self.objects.write(f"{checksums}.{ending}", self.objects.read(checksums))
                self.objects.remove_file(checksums)
                found.append(f"{self.url}/{folder}")
        return found

    def prune(self, keep: int, besides: Collection[int]) -> None:
        """Remove incomplete checkpoints, and complete ones except those of the newest `keep` steps and of the steps
        `besides`. Checkpoints that were set aside stay. Must not run while a checkpoint is being written."""
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
        """Replace the store's folder with the name of `source` by the content of `source`, a local folder."""
        stored = {name.partition("/")[2] for name in self.objects.names() if name.startswith(f"{source.name}/")}
        if CHECKSUMS_FILE in stored:
            self.objects.remove_file(f"{source.name}/{CHECKSUMS_FILE}")
        paths = sorted(path for path in source.rglob("*") if path.is_file())
        sums = {path.relative_to(source).as_posix(): digest_of(path) for path in paths}
        for name in sums:
            self.objects.put(source / name, f"{source.name}/{name}")
        for name in stored - sums.keys() - {CHECKSUMS_FILE}:
            self.objects.remove_file(f"{source.name}/{name}")
        self.objects.write(f"{source.name}/{CHECKSUMS_FILE}", format_checksums(sums).encode())

    def _folders(self) -> Iterator[tuple[str, int, set[str]]]:
        """(folder name, step, file names) of each checkpoint folder, complete or not."""
        folders: dict[str, tuple[int, set[str]]] = {}
        for match in map(CHECKPOINT_FILE.fullmatch, sorted(self.objects.names())):
            if match:
                folders.setdefault(match[1], (int(match[2]), set()))[1].add(match[4])
        for folder, (step, names) in folders.items():
            yield folder, step, names


def folder_of(step: int, sums: Sums) -> str:
    """Name of the folder of a checkpoint with these checksums."""
    return f"step_{step:06d}-{hashlib.sha256(format_checksums(sums).encode()).hexdigest()[:12]}"


def store_of(config: Config, name: str = "") -> ObjectStore:
    """The configured checkpoint store (`learner.checkpoint_store`), restricted to the folder `name` unless it is
    empty."""
    learner = config.learner
    url = f"{learner.checkpoint_store.rstrip('/')}/{quote(name, safe='')}"
    return ObjectStore(url, learner.checkpoint_store_timeout_s)


def stored_checkpoints(config: Config, once: bool = False) -> StoredCheckpoints | None:
    """The run's checkpoints in the configured store; None without one. Does not contact the store yet. `once`: later
    calls are not retried."""
    if not config.learner.checkpoint_store:
        return None
    objects = store_of(config, config.run.name)
    return StoredCheckpoints(objects.tried_once() if once else objects)


def store_refused(error: StoreError) -> ConfigError:
    """The ConfigError for an error of the checkpoint store, with the key and how to fix it."""
    fix = (
        "mend the key, or the rights and the environment that this part reaches it with"
        if isinstance(error, StoreRefused)
        else "see that this machine reaches it"
    )
    return ConfigError(f"key '{STORE_KEY}': {error}; {fix}")


# --- lines of metrics.jsonl -------------------------------------------------------------------------------------------


def evaluation_line(result: dict[str, Any]) -> dict[str, Any]:
    """The line of metrics.jsonl for an evaluation. `result`: `step`, `time` (Unix time, seconds) and the figures."""
    figures = {key: value for key, value in result.items() if key not in ("step", "time")}
    return {"step": result["step"], "time": result["time"], "evaluation": figures}


def is_step(line: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is a trained step, not an evaluation."""
    return "evaluation" not in line


# --- adapter folders --------------------------------------------------------------------------------------------------


ADAPTER_CONFIG_FILE, ADAPTER_TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""Prefix that peft puts before the model's tensor names."""


def adapter_config(rank: int, alpha: float, targets: list[str], base: Path | str) -> dict[str, Any]:
    """The content of `ADAPTER_CONFIG_FILE`, which peft, vLLM and SGLang read.

    `rank`, `alpha`: those of LoRA; `targets`: names of the adapted layers; `base`: folder of the model that the adapter
    belongs to.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }


def held_out_score(scored: Mapping[str, Any]) -> tuple[str, float | None]:
    """Measure and result of an evaluation of a set of held-out prompts: ("accuracy", value) if it is known which
    responses were correct, otherwise ("reward", mean reward); of a supervised run ("loss", mean loss of a token). The
    value is None if nothing could be scored."""
    for measure in ("accuracy", "loss"):
        if scored.get(measure) is not None:
            return measure, scored[measure]
    return "reward", scored.get("reward")

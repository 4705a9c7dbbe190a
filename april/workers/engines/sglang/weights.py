"""How tensors that a worker holds get into its SGLang server, between pause and continue.

`DiskSnapshot` writes a folder that the server reads, and keeps the old weights if it cannot; `LocalTensors` shares
memory with a server on the same machine. Weights that the learner broadcasts to the server itself go another way
(`broadcast.py`).
"""

import asyncio
import base64
import contextlib
import fcntl
import io
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from april.workers.engines.base import EngineError
from april.workers.engines.checks import check_tensors, folder_tensors
from april.workers.engines.sglang.client import ServerRefuses, SGLangClient

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
SNAPSHOT_PREFIX = "april-weights-"
IDLE_S = 60.0
"""for which a folder without a claim has not been touched before it counts as left"""
UPDATE_S = 3600.0
"""no limit of its own: the engine's update has one"""


class HalfLoaded(RuntimeError):
    """The server may hold tensors of two versions: it must not generate with them."""


class WeightPush(Protocol):
    @property
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the model's tensors by name."""

    @property
    def tied(self) -> bool:
        """Whether the output projection is the embedding."""

    def check(self, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """The tensors to load, before anything is interrupted for them. Raises EngineError."""

    async def load(self, client: SGLangClient, tensors: "Mapping[str, torch.Tensor]", change: dict, ranks: int) -> None:
        """Called while the server is paused, with what `check` has returned. `change`: `weight_version` and
        `flush_cache` as SGLang takes them; `ranks`: the server's tensor-parallel ones.

        Raises EngineError if it keeps the old weights, otherwise HalfLoaded.
        """

    def close(self) -> None: ...


class Checked:
    """What arrives is compared with the model's folder first: SGLang skips unknown names and misses none."""

    def __init__(self, model: Path):
        self.expected, self.tied = folder_tensors(model)

    def check(self, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Contiguous; a tied output projection is left out."""
        check_tensors(self.expected, self.tied, tensors)
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items() if name in self.expected}


class DiskSnapshot(Checked):
    """One safetensors file in a folder of its own, in shared memory where there is any; two servers may read it."""

    def __init__(self, model: Path, folder: Path | None = None):
        super().__init__(model)
        place = folder or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        for left in Path(place or tempfile.gettempdir()).glob(f"{SNAPSHOT_PREFIX}*"):
            remove_if_left(left)
        self._folder = Path(tempfile.mkdtemp(prefix=SNAPSHOT_PREFIX, dir=place))
        self._claim = claim(self._folder)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(model / "config.json", self._folder)

    async def load(self, client: SGLangClient, tensors: "Mapping[str, torch.Tensor]", change: dict, ranks: int) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        file = self._folder / "model.safetensors"
        try:
            await asyncio.to_thread(save_file, dict(tensors), file)
            await client.call("/update_weights_from_disk", {"model_path": str(self._folder)} | change, UPDATE_S)
        except EngineError as error:
            if "Weights were updated" in str(error):
                raise HalfLoaded(str(error)) from None
            raise
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the weights cannot be written to {file} ({error}); make room there") from None
        finally:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._claim)


def claim(folder: Path) -> int:
    """A lock that ends with this process, whichever way it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_if_left(folder: Path, idle_s: float = IDLE_S) -> None:
    """By a process that was killed: nobody has a claim to it any more, nor has just made it to claim it."""
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime >= idle_s:
            os.close(claim(folder))
            shutil.rmtree(folder)


class LocalTensors(Checked):
    """Handles of shared memory, pickled as SGLang expects them, one copy for each of its tensor-parallel ranks."""

    async def load(self, client: SGLangClient, tensors: "Mapping[str, torch.Tensor]", change: dict, ranks: int) -> None:
        payloads = [await asyncio.to_thread(share, tensors) for _ in range(ranks)]
        await within_session(client, self._send(client, payloads, change))

    async def _send(self, client: SGLangClient, payloads: list[str], change: dict) -> None:
        body = {"serialized_named_tensors": payloads} | change
        await client.call("/update_weights_from_tensor", body, UPDATE_S)

    def close(self) -> None: ...


async def within_session(client: SGLangClient, load) -> None:
    """Between begin and end, without which SGLang takes neither tensors nor broadcasts.

    Raises EngineError if it does not begin, HalfLoaded if anything fails after that.
    """
    try:
        await begin(client)
    except ServerRefuses:
        load.close()
        raise
    try:
        await load
        await client.call("/end_weight_update", {}, UPDATE_S)
    except EngineError as error:
        raise HalfLoaded(str(error)) from None


async def begin(client: SGLangClient) -> None:
    """A server that others keep may be within a change still that broke off, and takes no other before its end."""
    try:
        await client.call("/begin_weight_update", {}, UPDATE_S)
    except ServerRefuses:
        await client.call("/end_weight_update", {}, UPDATE_S)
        await client.call("/begin_weight_update", {}, UPDATE_S)


def share(tensors: "Mapping[str, torch.Tensor]") -> str:
    """base64 of pickled handles. Memory is shared by files: SGLang cannot receive another process's descriptors, and
    a failed attempt would end it."""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(list(tensors.items()))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(buffer.getvalue()).decode()

"""Transfers weights into a paused SGLang server, and has a server release and resume its accelerator memory.

`DiskSnapshot` writes a folder that the server reads; the server keeps its old weights if reading fails. `LocalTensors`
shares memory with a server on the same machine. Adapters, broadcasts of the learner, and weights that a process outside
April loads have functions of their own.
"""

import asyncio
import base64
import contextlib
import fcntl
import io
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import orjson

from april.config import stored
from april.weights.channel import ChannelManifest, link_name
from april.weights.snapshot import server_buckets
from april.workers.engines.base import EngineError
from april.workers.engines.entry import check_tensors, folder_tensors, is_finite
from april.workers.engines.sglang.client import ServerRefuses, SGLangClient

if TYPE_CHECKING:
    import torch

    from april.weights.channel import Adapter

log = logging.getLogger(__name__)

Meet: TypeAlias = Callable[[], Awaitable[None]]

SHARED_MEMORY = Path("/dev/shm")
SNAPSHOT_PREFIX = "april-weights-"
STALE_S = 60.0
"""Time without a change after which a snapshot folder without a lock counts as stale (s)."""
CALL_S = 3600.0
"""Deadline of one call (s): practically none, since the whole update, release or resumption has a deadline."""


class HalfLoaded(RuntimeError):
    """The server may hold tensors of two versions, and must not generate with them."""


class WeightPush:
    """A way to transfer tensors into a server. It validates them against the model's folder, since SGLang skips unknown
    names and does not notice missing ones."""

    def __init__(self, model: Path):
        self.expected, self.tied = folder_tensors(model)
        """Shapes of the model's tensors by name, and whether its output projection is tied to the embedding (has its
        weights)."""

    def check(self, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Validate tensors before generation is interrupted, and return those to load: made contiguous, without an
        output projection that is tied to the embedding. Raises EngineError."""
        check_tensors(self.expected, self.tied, tensors)
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items() if name in self.expected}

    async def load(self, client: SGLangClient, tensors: "Mapping[str, torch.Tensor]", change: dict, ranks: int) -> None:
        """Load tensors returned by `check` into the paused server.

        `change`: SGLang's fields `weight_version` and `flush_cache`. `ranks`: the server's tensor-parallel ranks.
        Raises EngineError if the server keeps its old weights, otherwise HalfLoaded.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free what the transfers have used."""


class DiskSnapshot(WeightPush):
    """Writes a safetensors file to a temporary folder, in shared memory if there is any, and has the server read it."""

    def __init__(self, model: Path, folder: Path | None = None):
        super().__init__(model)
        parent = folder or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        for leftover in Path(parent or tempfile.gettempdir()).glob(f"{SNAPSHOT_PREFIX}*"):
            remove_stale(leftover)
        self._folder = Path(tempfile.mkdtemp(prefix=SNAPSHOT_PREFIX, dir=parent))
        self._lock = lock_folder(self._folder)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(model / "config.json", self._folder)

    async def load(self, client: SGLangClient, tensors: "Mapping[str, torch.Tensor]", change: dict, ranks: int) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        file = self._folder / "model.safetensors"
        try:
            await asyncio.to_thread(save_file, dict(tensors), file)
            await client.call("/update_weights_from_disk", {"model_path": str(self._folder)} | change, CALL_S)
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
        os.close(self._lock)


def lock_folder(folder: Path) -> int:
    """Lock a folder; the lock ends with this process, however it ends. Returns the file descriptor."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_stale(folder: Path, idle_s: float = STALE_S) -> None:
    """Remove a snapshot folder of a killed process: one without a lock, and not modified for `idle_s`."""
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime >= idle_s:
            os.close(lock_folder(folder))
            shutil.rmtree(folder)


class LocalTensors(WeightPush):
    """Shares memory with the server: pickled handles as SGLang expects them, one for each tensor-parallel rank."""

    async def load(self, client: SGLangClient, tensors: "Mapping[str, torch.Tensor]", change: dict, ranks: int) -> None:
        payloads = [await asyncio.to_thread(shared_handles, tensors) for _ in range(ranks)]
        await within_update(client, self._send(client, payloads, change))

    async def _send(self, client: SGLangClient, payloads: list[str], change: dict) -> None:
        body = {"serialized_named_tensors": payloads} | change
        await client.call("/update_weights_from_tensor", body, CALL_S)


async def within_update(client: SGLangClient, load) -> None:
    """Await the coroutine `load`, which loads weights, between the calls that begin and end a weight update; SGLang
    requires these calls for tensors and broadcasts.

    Raises EngineError if the update does not begin, HalfLoaded if anything fails after that.
    """
    try:
        await begin_update(client)
    except ServerRefuses:
        load.close()
        raise
    try:
        await load
        await client.call("/end_weight_update", {}, CALL_S)
    except EngineError as error:
        raise HalfLoaded(str(error)) from None


async def begin_update(client: SGLangClient) -> None:
    """Begin a weight update. On an external server, a broken-off earlier update is ended first."""
    try:
        await client.call("/begin_weight_update", {}, CALL_S)
    except ServerRefuses:
        await client.call("/end_weight_update", {}, CALL_S)
        await client.call("/begin_weight_update", {}, CALL_S)


def shared_handles(tensors: "Mapping[str, torch.Tensor]") -> str:
    """Pickled shared-memory handles of tensors, in base64.

    Memory is shared through files, because SGLang cannot receive file descriptors of another process, and a failed
    attempt would end the server.
    """
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


# --- adapters ---------------------------------------------------------------------------------------------------------


async def load_adapter(
    client: SGLangClient, model: Path, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]", version: str
) -> None:
    """Load a LoRA adapter into a paused server. `model`: folder of the base model; `tensors`: the adapter's, by name;
    `version`: name of the weights that the server then reports. Raises EngineError; the server then keeps its previous
    weights."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    try:
        with tempfile.TemporaryDirectory(prefix=SNAPSHOT_PREFIX, dir=parent) as folder:
            await asyncio.to_thread(write_adapter, Path(folder), model, adapter, tensors)
            await client.call("/load_lora_adapter", {"lora_path": folder, "weight_version": version}, CALL_S)
            log.info("the server has the adapter of version %s beside its model's weights", version)
    except OSError as error:
        raise EngineError(f"the adapter cannot be written to {parent} ({error}); make room there") from None


def write_adapter(folder: Path, model: Path, adapter: "Adapter", tensors: "Mapping[str, torch.Tensor]") -> None:
    """Write an adapter to `folder` in PEFT's format, with `model`, the folder of its base model, named in it.
    `tensors`: the adapter's, by name. Raises EngineError for a tensor that is not finite, and OSError if the folder
    cannot be written."""
    from safetensors.torch import save_file

    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise EngineError(f"tensor {name!r} has values that are not finite; the learner must not publish it")
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    rank = min(tensors[f"{layers[0]}.lora_A"].shape)
    targets = sorted({layer.rpartition(".")[2] for layer in layers})
    peft_config = stored.adapter_config(rank, adapter.scaling * rank, targets, model)
    (folder / stored.ADAPTER_CONFIG_FILE).write_bytes(orjson.dumps(peft_config))
    prefixed = {f"{stored.PEFT_PREFIX}{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(prefixed, folder / stored.ADAPTER_TENSORS_FILE, metadata={"format": "pt"})


# --- broadcasts -------------------------------------------------------------------------------------------------------


async def receive_broadcast(
    client: SGLangClient, manifest: ChannelManifest, post: Callable[[], None], meet: Meet, change: dict
) -> None:
    """Have the paused server receive the weights that the learner broadcasts. `manifest`: which tensors come, in which
    order. `post` tells the learner to begin with the next part; `meet` waits for the other servers in the group.

    `change`: SGLang's fields `weight_version` and `flush_cache`. Raises EngineError if the server keeps its old
    weights, otherwise HalfLoaded.
    """
    await meet()  # while this server has its old weights
    await within_update(client, receive_buckets(client, manifest, post, meet, change))


async def receive_buckets(
    client: SGLangClient, manifest: ChannelManifest, post: Callable[[], None], meet: Meet, change: dict
) -> None:
    """Have the server receive the parts of `manifest`, one from each rank of the learner that sends, in order. Before
    each, `meet` waits for the other servers, and `post` tells the learner that this part's turn has come: a rank that
    began to broadcast earlier would wait on its accelerator, and hold up its training and the ranks before it.
    `change`: SGLang's fields `weight_version` and `flush_cache`, sent with the last tensors."""
    parts = [server_buckets(part.tensors, manifest.bucket_bytes) for part in manifest.parts]
    left = sum(map(len, parts))
    for sender, part in enumerate(parts):
        await meet()
        post()
        for heads in part:
            body = {
                "names": [head.name for head in heads],
                "dtypes": [head.dtype for head in heads],
                "shapes": [head.shape for head in heads],
                "group_name": link_name(manifest.channel, sender),
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            left -= 1
            await client.call("/update_weights_from_distributed", body | ({} if left else change), CALL_S)


# --- external weights -------------------------------------------------------------------------------------------------


async def adopt_external_weights(
    client: SGLangClient, post: Callable[[], None], loaded: Future[None], change: dict
) -> None:
    """Announce with `post` that the server is paused, wait until the future `loaded` ends, since a process outside
    April has then loaded the weights, and set their version name.

    `change`: SGLang's field `weight_version`, among others. The server's prefix cache is flushed in any case. Raises
    HalfLoaded if the weights were not loaded.
    """
    post()
    try:
        await asyncio.wrap_future(loaded)
    except RuntimeError as error:
        raise HalfLoaded(f"others have not loaded version {change['weight_version']}: {error}") from None
    await client.call("/flush_cache", {}, CALL_S)
    name = {"new_version": change["weight_version"], "abort_all_requests": False}
    await client.call("/update_weight_version", name, CALL_S)


# --- memory -----------------------------------------------------------------------------------------------------------

MEMORY_SAVER = "enable_memory_saver"
IDLE_POLL_S = 0.02
"""Interval between two checks whether a server has become idle (s)."""


async def release_memory(client: SGLangClient) -> None:
    """Have the server release its accelerator memory once it is idle; a busy SGLang would fail an assertion and end.

    Raises ServerGone and ServerRefuses.
    """
    while is_busy(await client.call("/v1/loads")):
        await asyncio.sleep(IDLE_POLL_S)
    await client.call("/release_memory_occupation", {}, CALL_S)


async def resume_memory(client: SGLangClient) -> None:
    """Have the server acquire its accelerator memory again. Raises ServerGone and ServerRefuses."""
    await client.call("/resume_memory_occupation", {}, CALL_S)


def is_busy(loads: dict) -> bool:
    return any(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads["loads"])

"""Where a worker's new weights come from: a source stages the newest version that has arrived, and the worker's main
loop takes it between two decode steps, so a forward pass never mixes two versions:

    if staged := source.take():
        engine.load_weights(staged.version, staged.tensors)
        source.loaded(staged.version)
"""

import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from april.weights.canary import Canary
from april.weights.channel import Adapter, ChannelManifest
from april.wire.message import Version
from april.wire.training import WeightFolder


async def alone() -> None:
    """Default of `StagedWeights.meet`, which returns at once: for an engine whose server is the only one in its process
    group."""


@dataclass(frozen=True)
class StagedWeights:
    """Weights that have arrived and wait to be loaded into the engine, or that an inference server will get
    directly."""

    version: Version
    tensors: dict[str, Tensor] | None
    """Tensors by name. None if the weights do not pass through the worker: after `post` is called, the learner
    broadcasts them to the inference server, or the trainer loads them there."""
    started_at: float
    """Time at which the worker learned of the version, Unix time in seconds."""
    manifest: ChannelManifest | None = None
    post: Callable[[], None] | None = None
    """Function that tells the learner that the engine has stopped and is ready to receive these weights; called again
    before each further part of them. None if the weights have arrived in the worker."""
    canary: Canary | None = None
    """Canary tokens with the learner's log-probabilities under these weights; None if the learner publishes none."""
    digest: str = ""
    """Checksum of the weights as a whole: the channel's joint checksum, or the SHA-256 of the snapshot's list of
    checksums."""
    adapter: Adapter | None = None
    """How to merge the tensors, if they are an adapter's for an engine that accepts adapters; None if they are complete
    weights."""
    externally_loaded: "Future[None] | None" = None
    """For weights that the trainer loads into the server: future that is done once the trainer has loaded them."""
    meet: Callable[[], Awaitable[None]] = alone
    """Function that waits until all servers that receive these weights in one process group are ready for them. It
    raises EngineError if one of them is lost."""


class WeightSource:
    """Stages new weights for one engine. A thread of its own fetches them; the other methods are the main loop's."""

    def __init__(self) -> None:
        self.held: Version | None = None
        """Version that the engine samples from."""
        self.refused: queue.SimpleQueue[tuple[Version, str]] = queue.SimpleQueue()
        """Weight folders that this worker could not use, each with the reason, which the main loop reports to the
        broker."""
        self._lock = threading.Lock()
        self._staged: StagedWeights | None = None

    # --- what the broker says -------------------------------------------------------------------------------

    def connect(self, address: str, key: str = "") -> None:
        """Set `address` and CURVE public `key` ("" without CURVE) of the learner's publisher; a change means a new
        learner."""

    def offer(self, folders: Sequence[WeightFolder]) -> None:
        """Set the folders with weights that the learner has written, the newest first."""

    # --- weights that have arrived --------------------------------------------------------------------------

    def stage(self, staged: StagedWeights) -> None:
        """Have the main loop take these weights, in place of earlier ones that it has not taken."""
        with self._lock:
            self._staged = staged

    def take(self) -> StagedWeights | None:
        """Take the weights that have arrived completely and were not taken yet; None if there are none."""
        with self._lock:
            staged, self._staged = self._staged, None
        return staged

    @property
    def staged_version(self) -> Version | None:
        """Version of the weights that `take` would return; None if there are none."""
        with self._lock:
            return self._staged.version if self._staged else None

    @property
    def has_staged(self) -> bool:
        """Whether `take` would return weights."""
        return self.staged_version is not None

    # --- what the engine has done ---------------------------------------------------------------------------

    def loaded(self, version: Version) -> None:
        """Note that the engine samples from `version` now."""
        self.held = version

    def put_off(self, puts_off: bool) -> None:
        """Note whether the engine puts off loading the weights that have arrived."""

    def refuse(self, why: str, wrong: bool = False) -> None:
        """Note that the engine does not accept the weights that were taken last, for the reason `why` or, with `wrong`,
        that it holds other weights than it was sent. The weights are fetched again after a while."""

    def released(self) -> None:
        """Note that the engine has released its weights (time sharing of a GPU) and waits for the next version."""
        self.held = None

    def forget(self) -> None:
        """Note that the engine has lost its weights: fetch the current ones again."""
        with self._lock:
            self._staged = self.held = None

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread, and wait for at most `timeout_s` until it has ended: it may be blocked in a transfer that has
        not timed out yet."""

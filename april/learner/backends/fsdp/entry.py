"""FSDP2: each rank keeps its rows of every weight, and has a part of the batch. It trains all models and adapters."""

from typing import TYPE_CHECKING

from april.config import Config
from april.learner.backends.entry import BackendEntry

if TYPE_CHECKING:
    import torch

    from april.learner.backends.backend import Backend


class FSDPEntry(BackendEntry):
    parks = True

    @classmethod
    def build(cls, config: Config, device: "torch.device") -> "Backend":
        from april.learner.backends.fsdp.backend import FSDPBackend

        return FSDPBackend(config, device)

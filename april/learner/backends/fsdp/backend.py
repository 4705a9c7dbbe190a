"""A Hugging Face model, sharded with FSDP2 (`april/learner/model.py`)."""

import logging
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from april.config import Config
from april.learner import flops, lora
from april.learner.backends.backend import Backend
from april.learner.checkpoint import Part
from april.learner.gradients import adamw, clip_gradients
from april.learner.losses.ranks import Ranks
from april.learner.model import gathered, load_sharded, outline, uses_bf16
from april.weights.base import Adapted, Base
from april.weights.lane_messages import Adapter

log = logging.getLogger(__name__)


class FSDPBackend(Backend):
    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        section, path = config.learner, config.model.path
        policy = outline(path, config.sampling.temperature, section.activation_checkpointing)
        if config.lora.is_set:
            lora.attach(policy.lm, config.lora, config.seed)
        self.adapter = lora.describe(policy.lm, config.lora)
        self.cost = flops.cost(policy.lm)
        self.bf16 = uses_bf16(section, device)
        self.computes_in = "bfloat16" if self.bf16 else "float32"
        self.policy = load_sharded(policy, path, device, self.bf16)
        self.lm, self.ranks, self.base = policy.lm, Ranks(), Base(path)
        self.files = lora.names_in_files(self.lm, dict(self.policy.trained)) if config.lora.is_set else None
        """by what names workers know what is trained, where that is an adapter that they can take"""
        if config.lora.is_set and self.files is None:
            log.warning("%s: its files have weights of adapted layers in another form; workers get all weights", path)
        self.part = Part("", self.policy, adamw([each for _, each in self.policy.trained], section.lr, section))

    def reference(self) -> nn.Module:
        """The policy at hand without its adapter, where that is all that is trained, or else the model once more."""
        if self.config.lora.keeps_start:
            return lora.WithoutAdapter(self.policy)
        path = self.config.model.path
        policy = outline(path, self.config.sampling.temperature).requires_grad_(False)
        return load_sharded(policy, path, self.device, self.bf16, trained=False)

    def clip(self, most: float) -> float:
        return clip_gradients(self.policy, most)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return lora.merged_weights(self.lm)

    def published(self, dtype: torch.dtype | None = None) -> Mapping[str, Tensor] | Adapted:
        """Of an adapter what is trained alone, never rounded: `dtype` is that of the weights that are made of it."""
        if self.files is None:
            return self.weights(dtype)
        trained = gathered(self.policy.trained)
        if dist.get_rank() != 0:
            return {}
        section, made_in = self.config.lora, str(dtype or torch.float32).removeprefix("torch.")
        scaling, tied = section.alpha / section.rank, list(self.lm.all_tied_weights_keys)
        adapter = Adapter(self.base.checksum, scaling, made_in, tied)
        return Adapted(lora.as_published(trained, self.files), adapter, self.base)

    def rest(self) -> None:
        self.policy.reshard()

"""A Hugging Face model, sharded with FSDP2 (`april/learner/model.py`)."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from april.config import Config
from april.config.training import check_base
from april.learner import checkpoint, frozen_base, lora, performance, weight_parts
from april.learner.backends.backend import Backend, clip_gradients
from april.learner.checkpoint import CheckpointPart
from april.learner.context import check_sharing, context_groups
from april.learner.loading import hold_inputs_on_host
from april.learner.model import empty_policy, gather_tensors, load_sharded, uses_bf16
from april.learner.vision import ImagePacker, freeze_tower
from april.weights.base import AdapterWeights, BaseWeights
from april.weights.channel import Adapter

log = logging.getLogger(__name__)


class FSDPBackend(Backend):
    """Back end that shards the model over all ranks with FSDP2; supports every model and adapter."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        section, path = config.learner, config.model.path
        policy = empty_policy(path, config.sampling.temperature, section.activation_checkpointing)
        if section.activations_on_host:
            hold_inputs_on_host(policy.lm, pinned=device.type == "cuda")
        self.images = ImagePacker.of(policy.lm, path)
        if section.freeze_vision:
            freeze_tower(policy.lm)
        if config.lora.is_set:
            check_base(config.lora, str(checkpoint.dtype_of_folder(path)).removeprefix("torch."))
            lora.attach(policy.lm, config.lora, config.seed)
        if section.master_weights == "bf16":
            frozen_base.in_bf16(policy.parameters())
        if section.compile:
            policy.compile_layers()
        self.adapter = lora.describe(policy.lm, config.lora)
        self.cost = performance.forward_cost(policy.lm)
        self.bf16 = uses_bf16(section, device)
        self.compute_dtype = "bfloat16" if self.bf16 else "float32"
        check_sharing(policy.lm, section.context_parallel)
        self.ranks, self.context = context_groups(section)
        self.policy = self.divide(load_sharded(policy, path, device, self.bf16))
        self.lm, self.base = policy.lm, BaseWeights(path)
        self.divisible = weight_parts.DivisibleWeights(self.lm)
        adapts = config.lora.is_set and config.lora.workers_have_base
        self.files = lora.names_in_folder(self.lm, dict(self.policy.trained)) if adapts else None
        """Name in Hugging Face files of each trained tensor, by its name in the model `lm`; None if workers receive all
        weights instead of an adapter."""
        if adapts and self.files is None:
            log.warning("%s: its files have weights of adapted layers in another form; workers get all weights", path)
        self.part = CheckpointPart.of("", self.policy, section.lr, section)
        self.is_new = True
        """Whether the first step is still to come, in which `clip` warns of adapters that get no gradient."""

    def reference(self) -> nn.Module:
        """The policy with its adapter disabled if only the adapter is trained, otherwise a second copy of the model."""
        if self.config.lora.base_is_frozen:
            return lora.WithoutAdapter(self.policy)
        form = self.config.lora.base if self.config.lora.is_set else self.config.learner.master_weights
        return self.frozen(self.config.model.path, self.config.sampling.temperature, form)

    def teacher(self, path: Path) -> nn.Module:
        """The model of the folder `path`, never updated, as a teacher; its weights are held in bfloat16 if its files
        have them so."""
        return self.frozen(path, 1.0, "bf16" if checkpoint.dtype_of_folder(path) == torch.bfloat16 else "fp32")

    def frozen(self, path: Path, temperature: float, form: str) -> nn.Module:
        """The model of a folder, never updated, that scores at `temperature`. `form`: the form in which its weights are
        held, a value of `lora.base` such as "bf16". Collective."""
        model = empty_policy(path, temperature).requires_grad_(False)
        check_sharing(model.lm, self.config.learner.context_parallel)
        frozen_base.hold_frozen(model.lm, form)
        return self.divide(load_sharded(model, path, self.device, self.bf16, trained=False))

    def divide(self, model: nn.Module) -> nn.Module:
        return self.context.divide(model) if self.context else model

    def clip(self, max_norm: float) -> float:
        if self.is_new and (idle := lora.idle_layers(self.lm)):
            log.warning(
                "%d adapters got no gradient from the first step's tokens, such as that of %s: the model reads these "
                "layers' weights itself, or passed them no token; give lora.targets to leave them out",
                len(idle), idle[0],
            )  # fmt: skip
        self.is_new = False
        return clip_gradients(self.policy, max_norm)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return lora.merged_weights(self.lm)

    def divisible_weights(self) -> list[weight_parts.WeightTensor] | None:
        return self.divisible.tensors(lora.held_weights(self.lm))

    @property
    def adapter_base(self) -> BaseWeights | None:
        return None if self.files is None else self.base

    def weights_to_publish(self, dtype: torch.dtype | None = None) -> Mapping[str, Tensor] | AdapterWeights:
        """All weights in `dtype`, or the adapter in fp32, from which workers make weights in `dtype`. Collective."""
        if self.files is None:
            return self.weights(dtype)
        trained = gather_tensors(self.policy.trained)
        if dist.get_rank() != 0:
            return {}
        section, merged_dtype = self.config.lora, str(dtype or torch.float32).removeprefix("torch.")
        scaling, tied = section.alpha / section.rank, list(self.lm.all_tied_weights_keys)
        adapter = Adapter(self.base.checksum, scaling, merged_dtype, tied)
        return AdapterWeights(lora.published_tensors(trained, self.files), adapter, self.base)

    def free_gathered(self) -> None:
        self.policy.reshard()

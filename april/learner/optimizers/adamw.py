"""AdamW ("Decoupled Weight Decay Regularization", arXiv 1711.05101), with moments in fp32 or in 8 bits."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from april.config import LearnerSection
from april.learner.optimizers.base import STEP, ShardOptimizer, local, sharded_like

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the decayed means of a parameter's gradient, and of the gradient's square."""
NUMBERS = dict(zip(MOMENTS, "12", strict=True))
"""Number by which bitsandbytes names each moment."""
BLOCK = 256
"""Number of consecutive values of an 8-bit moment that share a scale."""


def fused_adamw(parameters: Iterable[nn.Parameter], lr: float, section: LearnerSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=lr, betas=section.betas, weight_decay=section.weight_decay, fused=True)


class AdamW(ShardOptimizer):
    """AdamW with moments in fp32."""

    names = MOMENTS

    def build(self, shards: Iterable[nn.Parameter], lr: float, section: LearnerSection) -> torch.optim.Optimizer:
        return fused_adamw(shards, lr, section)


class AdamW8bit(ShardOptimizer):
    """AdamW of bitsandbytes with moments in 8 bits, in blocks of 256 values with a scale each ("8-bit Optimizers via
    Block-wise Quantization", arXiv 2110.02861); in fp32 for shards of fewer than 4,096 values.

    A checkpoint has the moments in fp32, which any number of ranks can load. When it is written, the moments in 8 bits
    are rounded again from those in fp32, so that a run that goes on has the same as one that is resumed from it.
    """

    names = MOMENTS

    def build(self, shards: Iterable[nn.Parameter], lr: float, section: LearnerSection) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit as BitsAndBytes

        self._to_load: dict[nn.Parameter, dict[str, Tensor]] = {}
        """Moments in fp32 by parameter, into which a checkpoint is loaded after `restore`; empty once `loaded` has
        taken them over."""
        return BitsAndBytes(shards, lr=lr, betas=section.betas, weight_decay=section.weight_decay)

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if self._to_load or not self.inner.state:
            return self._to_load.get(parameter, {})
        shape, state = local(parameter).shape, self.state_of(parameter)
        found = self.zeros(torch.empty(shape))
        for moment in found if state else ():
            found[moment] = self._read(state, moment)
            self._write(state, moment, found[moment])
        return {moment: sharded_like(parameter, values.reshape(shape).cpu()) for moment, values in found.items()}

    def restore(self, steps: int) -> None:
        self.inner.state.clear()
        self.steps = steps
        self._to_load = {
            parameter: {
                moment: sharded_like(parameter, zeros)
                for moment, zeros in self.zeros(torch.empty(local(parameter).shape)).items()
            }
            for parameter in (self.parameters if steps else ())
        }

    def loaded(self) -> None:
        for parameter, shard in self.shards.items() if self._to_load else ():
            shard.data = self._placed(parameter)
            self.inner.init_state(self.inner.param_groups[0], shard, 0, 0)
            state = self.inner.state[shard]
            state[STEP] = self.steps
            for moment, values in self._to_load[parameter].items():
                self._write(state, moment, local(values).to(shard.device))
        self._to_load = {}
        self._release()

    def _read(self, state: dict[str, Any], moment: str) -> Tensor:
        """The moment named `moment` of this rank's shard of a parameter, from its optimizer `state`; float32, in the
        shape in which bitsandbytes keeps it."""
        from bitsandbytes.functional import dequantize_blockwise

        number = NUMBERS[moment]
        kept = state[f"state{number}"]
        if kept.dtype == torch.float32:
            return kept
        scales, code = state[f"absmax{number}"], state[f"qmap{number}"]
        return dequantize_blockwise(kept, absmax=scales, code=code, blocksize=BLOCK)

    def _write(self, state: dict[str, Any], moment: str, values: Tensor) -> None:
        from bitsandbytes.functional import quantize_blockwise

        number = NUMBERS[moment]
        kept, values = state[f"state{number}"], values.reshape(state[f"state{number}"].shape).contiguous()
        if kept.dtype == torch.uint8:
            values, scales = quantize_blockwise(values, code=state[f"qmap{number}"], blocksize=BLOCK)
            state[f"absmax{number}"].copy_(scales.absmax)
        kept.copy_(values)

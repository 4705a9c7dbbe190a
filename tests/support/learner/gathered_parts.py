"""What the ranks of a learner gather in parts, together."""

import torch

from april.learner.process_group import all_gather_values
from april.learner.weight_parts import gather_part
from april.weights.channel import WeightPart
from april.weights.snapshot import unpack, verify
from april.wire.message import Version


def from_parts(trainer) -> dict[str, torch.Tensor] | None:
    """All weights on every rank, from the parts that the ranks gather; None if rank 0 has to gather them all."""
    tensors = trainer.backend.divisible_weights()
    if tensors is None:
        return None
    part = gather_part(Version(0, 0), tensors)
    sent = all_gather_values((part.hashed_part, part.data.numpy().tobytes()), tuple[WeightPart, bytes])
    found = {}
    for other, data in sent:
        verify(received := torch.frombuffer(bytearray(data), dtype=torch.uint8), other.digest)
        found |= unpack(other.tensors, received)
    return found

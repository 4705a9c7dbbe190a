"""Families of models: packed log-probabilities and gradients are those of transformers' own model, one sequence at a
time."""

import numpy as np
import pytest
import torch

from april.learner.batch import TrainSample
from april.learner.model import load
from april.learner.packing import pack
from april.wire.message import Version
from tests.support.learner.families import FAMILIES, SHAPE, family

LENGTHS = (23, 5, 31, 1)
"""Input tokens of the packed sequences: some longer than windows and chunks."""
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_family_has_the_log_probabilities_and_gradients_of_its_sequences(name, tmp_path):
    lm = family(name)
    lm.save_pretrained(tmp_path)
    sequences = [torch.randint(0, SHAPE["vocab_size"], (length + 1,)) for length in LENGTHS]
    weights = torch.randn(2, sum(LENGTHS))
    expected = []
    for sequence in sequences:
        log_p = torch.log_softmax(lm(input_ids=sequence[None, :-1], use_cache=False).logits[0], -1)
        expected.append(torch.stack([log_p.gather(1, sequence[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]))
    theirs = torch.cat(expected, 1)
    (weights * theirs).sum().backward()

    policy = load(tmp_path, temperature=1.0)
    ours = torch.stack(policy(pack([sample_of(sequence) for sequence in sequences], torch.device("cpu"))))
    (weights * ours).sum().backward()

    assert (ours - theirs).abs().max() <= TOLERANCE
    found = dict(policy.lm.named_parameters())
    assert found.keys() == dict(lm.named_parameters()).keys()
    for each, weight in lm.named_parameters():
        if weight.grad is None:
            assert found[each].grad is None or not found[each].grad.any(), each
        else:
            difference = (found[each].grad - weight.grad).abs().max()
            assert difference <= TOLERANCE * max(1.0, weight.grad.abs().max()), each


def sample_of(sequence):
    """A sample whose first token is its prompt."""
    length = len(sequence) - 1
    return TrainSample(
        sequence.numpy().astype(np.int32), 1, np.zeros(length, np.float32), 0.0, ((0, length, Version(0, 0)),)
    )

"""The chunked head gives the log-probabilities, entropies and gradients of unchunked logits."""

import numpy as np
import pytest
import torch

from april.data.support import Support
from april.learner import model
from april.learner.batch import TrainSample
from april.learner.packing import pack
from april.wire.message import Version

TEMPERATURE = 0.7


def written_out(hidden, weight, targets, drawable):
    distribution = torch.log_softmax((hidden @ weight.T / TEMPERATURE).masked_fill(~drawable, -torch.inf), -1)
    surprise = -distribution.masked_fill(~drawable, 0)
    return distribution[torch.arange(len(targets)), targets], (distribution.exp() * surprise).sum(-1)


def supports(targets):
    """Supports of 1 to 9 ids for each target, and of all ids for one of them."""
    chance = np.random.default_rng(0)
    others = [np.delete(np.arange(50), target) for target in targets]
    rows = [
        chance.permutation(np.append(chance.permutation(rest)[: i % 9], t))
        for i, (t, rest) in enumerate(zip(targets.tolist(), others, strict=True))
    ]
    rows[11] = chance.permutation(50)
    sample = TrainSample(
        tokens=np.append(0, targets).astype(np.int32), prompt_tokens=1, logprobs=np.zeros(len(targets), np.float32),
        reward=0.0, segments=((0, len(targets), Version(0, 0)),),
        support=Support.of([row.astype(np.int32) for row in rows]),
    )  # fmt: skip
    drawable = torch.tensor([[place in row for place in range(50)] for row in rows])
    return pack([sample], torch.device("cpu")).support, drawable


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("used", [("logprob",), ("entropy",), ("logprob", "entropy")], ids="+".join)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows_per_chunk", [7, 23], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "to compile"])
def test_chunks_equal_whole_logits(used, dtype, tolerance, rows_per_chunk, cut, compiled, monkeypatch):
    monkeypatch.setattr(model, "LOGITS_PER_CHUNK", rows_per_chunk * 50)
    monkeypatch.setattr(model, "fused", lambda function: function)
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16).to(dtype), torch.randn(50, 16).to(dtype)
    targets, factors = torch.randint(0, 50, (23,)), {"logprob": torch.randn(23), "entropy": torch.randn(23)}

    support, drawable = supports(targets) if cut else (None, torch.ones(23, 50, dtype=torch.bool))

    def gradients(score, *inputs):
        inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        scores = dict(zip(("logprob", "entropy"), score(*inputs), strict=True))
        sum((factors[name] * scores[name]).sum() for name in used).backward()
        return [score.detach() for score in scores.values()], [tensor.grad.float() for tensor in inputs]

    ours, our_gradients = gradients(
        lambda *inputs: model.score_tokens(*inputs, targets, TEMPERATURE, support, compiled), hidden, weight
    )
    theirs, their_gradients = gradients(
        lambda *inputs: written_out(*inputs, targets, drawable), hidden.float(), weight.float()
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()

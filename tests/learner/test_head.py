"""The chunked head gives the log-probabilities, entropies and gradients of logits that were written out whole."""

import pytest
import torch

from april.learner import model

TEMPERATURE = 0.7


def written_out(hidden, weight, targets):
    distribution = torch.log_softmax(hidden @ weight.T / TEMPERATURE, -1)
    return distribution[torch.arange(len(targets)), targets], -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("used", [("logprob",), ("entropy",), ("logprob", "entropy")], ids="+".join)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows_per_chunk", [7, 23], ids=["chunks", "one chunk"])
def test_chunks_equal_whole_logits(used, dtype, tolerance, rows_per_chunk, monkeypatch):
    monkeypatch.setattr(model, "LOGITS_PER_CHUNK", rows_per_chunk * 50)
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16).to(dtype), torch.randn(50, 16).to(dtype)
    targets, factors = torch.randint(0, 50, (23,)), {"logprob": torch.randn(23), "entropy": torch.randn(23)}

    def gradients(score, *inputs):
        inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        scores = dict(zip(("logprob", "entropy"), score(*inputs, targets), strict=True))
        sum((factors[name] * scores[name]).sum() for name in used).backward()
        return [score.detach() for score in scores.values()], [tensor.grad.float() for tensor in inputs]

    ours, our_gradients = gradients(lambda *inputs: model.score_tokens(*inputs, TEMPERATURE), hidden, weight)
    theirs, their_gradients = gradients(written_out, hidden.float(), weight.float())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()

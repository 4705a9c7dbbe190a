"""Comparison of named tensors, and of a canary with a plain forward pass."""

import torch
from transformers import AutoModelForCausalLM


def same(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    scale = max(value.abs().max().item() for value in theirs.values())
    for name, value in theirs.items():
        off = (ours[name] - value).abs().max().item()
        assert off <= tolerance * scale, f"{name}: off by {off} where gradients reach {scale}"


def equal(ours, theirs) -> bool:
    """Whether `theirs` has all tensors of `ours`, the same bit by bit."""
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def assert_said_by(weights, canary, folder):
    """The canary equals a plain forward pass at temperature 1, whatever the run's temperature."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([canary.tokens])).logits[0, :-1], dim=-1)
    expected = logprobs.gather(1, torch.tensor(canary.tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(canary.logprobs), expected, atol=2e-5, rtol=0)

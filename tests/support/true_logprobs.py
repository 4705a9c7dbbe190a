"""Compares the log-probabilities of a generated stream with those of the weights that sampled each token."""

import torch


def assert_true(models, request, stream, atol=1e-4):
    """Check that log-probabilities agree with those of each token's version within `atol`; returns the largest
    deviation."""
    context, start = [*request.tokens.tolist(), *stream.tokens], len(request.tokens)
    by_version = {version: model.logprobs(context, start) for version, model in models.items()}
    expected = torch.stack([by_version[version][i] for i, version in enumerate(stream.versions)])
    deviation = (torch.tensor(stream.logprobs) - expected).abs().max().item()
    assert deviation < atol
    return deviation

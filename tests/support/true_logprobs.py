"""Log-probabilities of a stream, compared with those of its tokens' versions."""

import torch


def assert_true(models, request, stream, atol=1e-4):
    """Largest deviation of a log-probability from that of its token's version."""
    context, start = [*request.tokens.tolist(), *stream.tokens], len(request.tokens)
    by_version = {version: model.logprobs(context, start) for version, model in models.items()}
    expected = torch.stack([by_version[version][i] for i, version in enumerate(stream.versions)])
    deviation = (torch.tensor(stream.logprobs) - expected).abs().max().item()
    assert deviation < atol
    return deviation

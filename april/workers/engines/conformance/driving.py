"""Drives an engine through its interface, and compares its output with references."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch

from april.processes import clock
from april.wire.version import Version
from april.workers.engines.base import Chunk, Request

VOCABULARY = 61
PATIENCE_S = 120.0
"""An engine counts as stuck if it has live requests and generates nothing for so long (s)."""
V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)


class Stream:
    """All chunks that an engine has returned for one request."""

    def __init__(self, chunks: list[Chunk]):
        self.chunks = chunks
        self.tokens = [int(token) for chunk in chunks for token in chunk.tokens]
        self.logprobs = [float(logprob) for chunk in chunks for logprob in chunk.logprobs]
        self.versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
        self.finish_reason = chunks[-1].finish_reason if chunks else None


def prompt(length: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def requests_of_many_shapes(count: int = 20, **options) -> list[Request]:
    """Prompts of 1 to 40 tokens, budgets of 1 to 60."""
    rng = np.random.default_rng(7)
    return [
        Request(i, prompt(int(rng.integers(1, 41)), seed=i), int(rng.integers(1, 61)), seed=i, **options)
        for i in range(count)
    ]


def drive(
    engine, requests=(), steps: int | None = None, tokens: int | None = None, begun: Iterable[int] = ()
) -> dict[int, Stream]:
    """Submit requests, then step until nothing is live, `steps` are done, or `tokens` more have been generated.

    It also waits for a first chunk of each request in `begun`. The result includes chunks of requests that ended
    earlier, while weights were loaded. Asserts that no request fails.
    """
    heard_at, generated = clock.now(), engine.generated_tokens
    for request in requests:
        engine.submit(request)
    chunks: defaultdict[int, list[Chunk]] = defaultdict(list)
    enough = float("inf") if tokens is None else engine.generated_tokens + tokens
    awaited = set(begun)
    while steps != 0 and (engine.generated_tokens < enough or awaited - chunks.keys()):
        for chunk in engine.step():
            chunks[chunk.id].append(chunk)
        assert engine.failures() == []
        if not engine.live:
            break
        if engine.generated_tokens > generated:
            heard_at, generated = clock.now(), engine.generated_tokens
        assert clock.now() < heard_at + PATIENCE_S, "the engine is stuck with live requests"
        steps = None if steps is None else steps - 1
    return defaultdict(lambda: Stream([]), {key: Stream(parts) for key, parts in chunks.items()})


def join(*parts: Stream) -> Stream:
    return Stream([chunk for part in parts for chunk in part.chunks])


def assert_true_logprobs(model, request: Request, stream: Stream) -> None:
    context = [*request.tokens.tolist(), *stream.tokens]
    expected = model.logprobs(context, len(request.tokens), request.temperature or 1.0)
    torch.testing.assert_close(torch.tensor(stream.logprobs), expected, atol=1e-4, rtol=0)


def assert_agree(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Assert that counts agree with probabilities by a chi-square test, at a one-in-a-million level, with rare tokens
    pooled (the cube root of chi-square is nearly normal: Wilson and Hilferty, 1931)."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    if expected[-1] < 1:
        assert observed[-1] <= 5
        observed, expected = observed[:-1], expected[:-1]
    degrees = max(len(expected) - 1, 1)
    variance = 2 / (9 * degrees)
    assert ((observed - expected) ** 2 / expected).sum() < degrees * (1 - variance + 4.75 * np.sqrt(variance)) ** 3


def assert_frequencies(engine, model, options: dict, seeds: int) -> None:
    """Assert that the first tokens of one prompt under many seeds have the distribution that `options` ask for.

    That is top-k, then top-p: the fewest likeliest tokens whose mass reaches it. Behaviour log-probabilities are those
    of the whole distribution.
    """
    logits = model.logits(prompt().tolist())[-1].double().numpy() / options.get("temperature", 1.0)
    full = np.exp(logits - logits.max())
    full /= full.sum()
    order = np.argsort(-full)[: options.get("top_k") or None]
    mass = full[order].cumsum() / full[order].sum()
    support = order[: np.searchsorted(mass, options.get("top_p", 1.0)) + 1]
    target = np.zeros(VOCABULARY)
    target[support] = full[support] / full[support].sum()
    requests = [Request(i, prompt(), 1, seed=i, **options) for i in range(seeds)]
    streams = drive(engine, requests)
    tokens = [streams[request.id].tokens[0] for request in requests]
    assert set(tokens) <= set(support.tolist())
    assert_agree(np.bincount(tokens, minlength=VOCABULARY), target)
    for request, token in zip(requests, tokens, strict=True):
        assert abs(streams[request.id].logprobs[0] - np.log(full[token])) < 1e-4

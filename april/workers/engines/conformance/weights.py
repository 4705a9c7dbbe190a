"""Checks that weights are replaced as a whole between two tokens, and only if they are valid."""

from collections.abc import Callable
from typing import Any

import torch

from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import (
    V0,
    V1,
    Bench,
    a_matrix,
    check,
    drive,
    join,
    prompt,
    refusal,
)

Weights = dict[str, torch.Tensor]


@check(interrupts=True)
def swapping_in_the_same_weights_changes_no_token(bench: Bench):
    request = Request(1, prompt(), 400, temperature=0.0)
    whole = drive(bench.make_engine(), [request])[1]
    engine = bench.make_engine()
    before = drive(engine, [request], tokens=25)
    engine.load_weights(V1, bench.models().weights())
    stream = join(before[1], drive(engine)[1])
    assert stream.tokens == whole.tokens and set(stream.versions) == {V0, V1}


@check(interrupts=True)
def what_was_drawn_before_new_weights_names_the_old_version(bench: Bench):
    engine = bench.make_engine(chunk_tokens=100)
    before = drive(engine, [Request(1, prompt(), 80)], tokens=30)[1]
    drawn = engine.generated_tokens
    engine.load_weights(V1, bench.models(seed=1).weights())
    drawn_by_now, stream = engine.generated_tokens, join(before, drive(engine)[1])
    of_old = stream.versions.count(V0)  # a server may have drawn under the new weights, too, by the time of the look
    assert len(stream.tokens) == 80 and drawn <= of_old <= drawn_by_now
    assert stream.versions == [V0] * of_old + [V1] * (80 - of_old)


@check()
def the_engine_keeps_its_own_copy_of_the_weights(bench: Bench):
    request = Request(1, prompt(), 30, temperature=0.0)
    whole = drive(bench.make_engine(), [request])[1]
    weights = {name: tensor.clone() for name, tensor in bench.models().weights().items()}
    engine = bench.make_engine(version=None)
    engine.load_weights(V0, weights)
    for tensor in weights.values():
        tensor.fill_(7)
    assert drive(engine, [request])[1].tokens == whole.tokens


def lacks_one(weights: Weights) -> list[str]:
    del weights[name := a_matrix(weights)]
    return [name]


def has_an_unknown_one(weights: Weights) -> list[str]:
    weights[name := a_matrix(weights).replace(".1.", ".2.")] = torch.zeros(1)
    return [name]


def has_another_shape(weights: Weights) -> list[str]:
    weights[name := last_norm(weights)] = torch.zeros(47)
    return [name, "(47,)", "(48,)"]


def is_not_finite(weights: Weights) -> list[str]:
    weights[name := last_norm(weights)] = torch.full((48,), torch.nan)
    return [name, "not finite"]


def last_norm(weights: Weights) -> str:
    return next(
        name
        for name, tensor in weights.items()
        if tensor.ndim == 1 and ".layers." not in name and ".visual." not in name
    )


BAD = {
    "one is missing": lacks_one,
    "one is unknown": has_an_unknown_one,
    "one has another shape": has_another_shape,
    "one is not finite": is_not_finite,
}


@check(cases={case: {"spoil": spoil} for case, spoil in BAD.items()})
def bad_weights_are_refused_and_the_old_ones_stay(bench: Bench, spoil: Callable[[Weights], list[str]]):
    """Checks that an engine refuses each kind of bad weights with an error that names the fault, and keeps generating
    with the old weights. `spoil(weights)`: makes weights bad, and returns texts that the error must have. An engine can
    refuse all of them by `april.workers.engines.entry.check_tensors`."""
    request = Request(1, prompt(), 30, temperature=0.0)
    whole = drive(bench.make_engine(), [request])[1]
    engine = bench.make_engine()
    before = drive(engine, [request], steps=10)
    weights = bench.models(seed=1).weights()
    named = spoil(weights)
    sentence = refusal(lambda: engine.load_weights(V1, weights))
    assert all(part in sentence for part in named), sentence
    stream = join(before[1], drive(engine)[1])
    assert engine.version == V0 and stream.tokens == whole.tokens and set(stream.versions) == {V0}


@check()
def nothing_is_generated_before_the_first_weights(bench: Bench):
    engine = bench.make_engine(version=None)
    engine.submit(Request(1, prompt(), 5))
    assert engine.version is None and [engine.step() for _ in range(5)] == [[]] * 5 and engine.live == 1
    engine.load_weights(V0, bench.models().weights())
    assert len(drive(engine)[1].tokens) == 5


@check()
def tied_embeddings_come_with_or_without_the_output_projection(bench: Bench):
    weights = bench.models().weights()
    weights.pop("lm_head.weight", None)
    engine = bench.make_engine(version=None)
    engine.load_weights(V0, weights)
    engine.load_weights(V1, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert engine.version == V1


@check()
def an_engine_that_releases_its_memory_has_no_weights_until_the_next_load(bench: Bench):
    if not bench.entry.shares_time:
        return
    engine: Any = bench.make_engine()
    request = Request(1, prompt(), 30, temperature=0.0)
    whole = drive(engine, [request])[1]
    engine.release()
    engine.submit(request)
    assert engine.version is None and [engine.step() for _ in range(5)] == [[]] * 5 and engine.live == 1
    engine.resume()
    assert engine.version is None
    engine.load_weights(V1, bench.models().weights())
    stream = drive(engine)[1]
    assert stream.tokens == whole.tokens and set(stream.versions) == {V1}

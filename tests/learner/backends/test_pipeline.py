"""Stages of a model, in threads of this process in the place of ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_setup import VOCAB, make_policy, make_sample
from torch import nn
from transformers import Qwen3MoeConfig

from april.learner.backends.megatron.layout import Layout
from april.learner.backends.megatron.names import check_stages, stages_with
from april.learner.backends.megatron.pipeline import Line, backward, scores
from april.learner.loading import ModelError
from april.learner.model import outline
from april.learner.packing import pack
from april.learner.phases import untimed

WIDTH, DEADLINE_S = 6, 20


class Threads(Line):
    """A place among threads. As where nothing lies between ranks, who sends waits until the other has it."""

    def __init__(self, place: int, count: int, ways: dict[tuple[int, int], Queue]):
        self.place, self.count, self.ways = place, count, ways

    def exchange(self, neighbour, sent, room):
        there = self.place + neighbour
        if not 0 <= there < self.count:
            return None
        has_it = Event()
        if sent is not None:
            self.ways[self.place, there].put((sent.detach(), has_it))
        if room is not None:
            found, taken = self.ways[there, self.place].get(timeout=DEADLINE_S)
            assert found.shape == room.shape
            room.data.copy_(found)
            taken.set()
        assert sent is None or has_it.wait(DEADLINE_S)
        return room

    def told(self, values):
        for there in range(self.count - 1) if self.is_last else ():
            self.ways["told", there].put(values)
        return values if self.is_last else self.ways["told", self.place].get(timeout=DEADLINE_S)


class Layer(nn.Module):
    """A stage, or the `Whole` of several; it notes how many micro-batches it keeps the activations of."""

    def __init__(self, place: int):
        super().__init__()
        generator = torch.Generator().manual_seed(place)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.embedding = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(99))
        self.kept = self.most_kept = 0

    def room(self, micro):
        return torch.empty(micro.ids.shape[1], WIDTH)

    def hidden(self, micro, given):
        made = torch.tanh((self.embedding[micro.ids[0]] if given is None else given) @ self.weight)
        if made.requires_grad:
            self.kept += 1
            self.most_kept = max(self.kept, self.most_kept)
            made.register_hook(self.let_go)
        return made

    def let_go(self, gradient):
        self.kept -= 1

    def score(self, hidden, micro, temperature):
        logits = hidden[micro.target_rows] @ self.embedding.T / (temperature or 0.5)
        log_p = logits.log_softmax(1)
        return log_p.gather(1, micro.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def on_stages(count: int, run: Callable) -> list:
    """What `run(line, layer)` gives on each."""
    places = range(count)
    ways = {(a, b): Queue() for a in [*places, "told"] for b in places}
    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(run, Threads(place, count, ways), Layer(place)) for place in places]
        return [each.result(2 * DEADLINE_S) for each in running]


def whole(count: int, micro):
    """What layers one after the other say of a micro-batch, and their weights."""
    layers, hidden = [Layer(place) for place in range(count)], None
    for layer in layers:
        hidden = layer.hidden(micro, hidden)
    return layers[-1].score(hidden, micro, None), [layer.weight for layer in layers]


@pytest.fixture(scope="module")
def micros():
    """Of different lengths, one of them a dummy."""
    rng = np.random.default_rng(0)
    samples = [[make_sample(rng, 2, length, 1.0)] for length in (3, 9, 1, 5, 7)]
    return [pack(each, torch.device("cpu")) for each in [*samples, []]]


def loss(place, logprobs, entropies):
    return (place + 1) * (logprobs.sum() + 0.3 * (logprobs * entropies).sum())


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("given", [0, 1, 2, 6])
def test_gradients_and_scores_are_those_of_the_model_whole_on_every_stage(count, given, micros):
    def train(line, layer):
        seen = []

        def noted(place, logprobs, entropies):
            seen.append((place, logprobs.detach(), entropies.detach()))
            return loss(place, logprobs, entropies)

        backward(line, layer, micros[:given], noted, untimed)
        return seen, layer.weight.grad, scores(line, layer, micros[:given], None)

    expected = [whole(count, micro) for micro in micros[:given]]
    of_weights = [torch.zeros(WIDTH, WIDTH) for _ in range(count)]
    for place, (scored, weights) in enumerate(expected):
        for total, gradient in zip(of_weights, torch.autograd.grad(loss(place, *scored), weights), strict=True):
            total += gradient
    for (seen, gradient, found), total in zip(on_stages(count, train), of_weights, strict=True):
        assert [place for place, *_ in seen] == list(range(given))
        for (_, *during), after, (scored, _) in zip(seen, found, expected, strict=True):
            torch.testing.assert_close(tuple(during), scored)
            torch.testing.assert_close(tuple(after), scored)
        torch.testing.assert_close(torch.zeros(WIDTH, WIDTH) if gradient is None else gradient, total)


@pytest.mark.parametrize("given", [1, 3, 6])
def test_a_stage_keeps_no_more_micro_batches_than_there_are_stages_from_it_on(given, micros):
    def train(line, layer):
        backward(line, layer, micros[:given], loss, untimed)
        return layer.most_kept, layer.kept

    assert on_stages(3, train) == [(min(stages, given), 0) for stages in (3, 2, 1)]


@pytest.mark.parametrize(("layers", "stages", "each"), [(4, 2, [2, 2]), (3, 2, [2, 1]), (5, 3, [2, 2, 1])])
def test_layers_lie_on_stages_evenly_and_the_last_is_the_last_to_have_one_more(layers, stages, each):
    layout = Layout(None, None, 1, 0, stages)
    spans = [layout.span(layers, stage) for stage in range(stages)]
    assert [len(span) for span in spans] == each
    assert [layer for span in spans for layer in span] == list(range(layers))


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_a_stage_and_an_embedding_that_is_the_head_has_two(tied, tmp_path):
    lm = outline(make_policy(tmp_path / "model", tied, Qwen3MoeConfig, layers=3), 1.0).lm
    layout = Layout(None, None, 1, 0, 2)
    where = {name: stages_with(name, lm, layout) for name, _ in lm.named_parameters()}
    assert where.pop("model.embed_tokens.weight") == ([0, 1] if tied else [0])
    assert where.pop("model.norm.weight") == where.pop("lm_head.weight", [1]) == [1]
    assert all(stages == [int(name.startswith("model.layers.2."))] for name, stages in where.items())


def test_more_stages_than_layers_are_refused(tmp_path):
    folder = make_policy(tmp_path / "model")
    with pytest.raises(ModelError, match="pipeline_parallel = 3 wants as many layers, and it has 2"):
        check_stages(outline(folder, 1.0).lm, folder, SimpleNamespace(stages=3))

"""Pipeline stages of a model, run in threads instead of ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig

from april.learner.backends.megatron.layout import ParallelLayout
from april.learner.backends.megatron.names import check_stages, stages_holding
from april.learner.backends.megatron.pipeline import PipelineRanks, backward, scores
from april.learner.loading import ModelError
from april.learner.model import empty_policy
from april.learner.packing import pack
from april.learner.performance import untimed
from tests.support.learner.small_learner import VOCAB, make_policy, make_sample

WIDTH, DEADLINE_S = 6, 20


class Threads(PipelineRanks):
    """A pipeline stage that runs in a thread. A send is synchronous: it waits until the neighbour has received."""

    def __init__(self, stage: int, count: int, queues: dict[tuple[int | str, int], Queue]):
        self.stage, self.count, self.queues = stage, count, queues

    def exchange(self, neighbour, sent, buffer):
        other = self.stage + neighbour
        if not 0 <= other < self.count:
            return None
        was_received = Event()
        if sent is not None:
            self.queues[self.stage, other].put((sent.detach(), was_received))
        if buffer is not None:
            received, acknowledge = self.queues[other, self.stage].get(timeout=DEADLINE_S)
            assert received.shape == buffer.shape
            buffer.data.copy_(received)
            acknowledge.set()
        assert sent is None or was_received.wait(DEADLINE_S)
        return buffer

    def broadcast_from_last(self, values):
        for stage in range(self.count - 1) if self.is_last else ():
            self.queues["broadcast", stage].put(values)
        return values if self.is_last else self.queues["broadcast", self.stage].get(timeout=DEADLINE_S)


class Layer(nn.Module):
    """A pipeline stage of one layer that counts the micro-batches whose activations it keeps."""

    def __init__(self, stage: int):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.embedding = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(99))
        self.kept = self.most_kept = 0

    def empty_activations(self, micro):
        return torch.empty(micro.ids.shape[1], WIDTH)

    def hidden(self, micro, inputs):
        output = torch.tanh((self.embedding[micro.ids[0]] if inputs is None else inputs) @ self.weight)
        if output.requires_grad:
            self.kept += 1
            self.most_kept = max(self.kept, self.most_kept)
            output.register_hook(self.free)
        return output

    def free(self, gradient):
        self.kept -= 1

    def score(self, hidden, micro, temperature):
        logits = hidden[micro.target_rows] @ self.embedding.T / (temperature or 0.5)
        log_p = logits.log_softmax(1)
        return log_p.gather(1, micro.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def on_stages(count: int, run: Callable) -> list:
    """Results of `run(ranks, layer)` on each of `count` stages."""
    stages = range(count)
    queues = {(sender, receiver): Queue() for sender in [*stages, "broadcast"] for receiver in stages}
    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(run, Threads(stage, count, queues), Layer(stage)) for stage in stages]
        return [future.result(2 * DEADLINE_S) for future in running]


def whole(count: int, micro):
    """Scores of a micro-batch by all layers in one process, and the layers' weights."""
    layers, hidden = [Layer(stage) for stage in range(count)], None
    for layer in layers:
        hidden = layer.hidden(micro, hidden)
    return layers[-1].score(hidden, micro, None), [layer.weight for layer in layers]


@pytest.fixture(scope="module")
def micros():
    """Micro-batches of different lengths, one of them a dummy."""
    rng = np.random.default_rng(0)
    samples = [[make_sample(rng, 2, length, 1.0)] for length in (3, 9, 1, 5, 7)]
    return [pack(each, torch.device("cpu")) for each in [*samples, []]]


def loss(index, logprobs, entropies):
    return (index + 1) * (logprobs.sum() + 0.3 * (logprobs * entropies).sum())


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 1, 2, 6])
def test_every_stage_gets_the_gradients_and_scores_of_the_unsplit_model(count, size, micros):
    def train(ranks, layer):
        calls = []

        def recording_loss(index, logprobs, entropies):
            calls.append((index, logprobs.detach(), entropies.detach()))
            return loss(index, logprobs, entropies)

        backward(ranks, layer, micros[:size], recording_loss, untimed)
        return calls, layer.weight.grad, scores(ranks, layer, micros[:size], None)

    expected = [whole(count, micro) for micro in micros[:size]]
    gradients = [torch.zeros(WIDTH, WIDTH) for _ in range(count)]
    for index, (scored, weights) in enumerate(expected):
        for total, gradient in zip(gradients, torch.autograd.grad(loss(index, *scored), weights), strict=True):
            total += gradient
    for (calls, gradient, found), total in zip(on_stages(count, train), gradients, strict=True):
        assert [index for index, *_ in calls] == list(range(size))
        for (_, *during), after, (scored, _) in zip(calls, found, expected, strict=True):
            torch.testing.assert_close(tuple(during), scored)
            torch.testing.assert_close(tuple(after), scored)
        torch.testing.assert_close(torch.zeros(WIDTH, WIDTH) if gradient is None else gradient, total)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_stage_keeps_activations_of_at_most_one_micro_batch_per_stage_from_it_on(size, micros):
    def train(ranks, layer):
        backward(ranks, layer, micros[:size], loss, untimed)
        return layer.most_kept, layer.kept

    assert on_stages(3, train) == [(min(stages, size), 0) for stages in (3, 2, 1)]


@pytest.mark.parametrize(("layers", "stages", "each"), [(4, 2, [2, 2]), (3, 2, [2, 1]), (5, 3, [2, 2, 1])])
def test_layers_are_divided_evenly_and_the_last_stage_is_the_last_to_get_an_extra_one(layers, stages, each):
    layout = ParallelLayout(None, None, 1, 0, stages)
    spans = [layout.stage_layers(layers, stage) for stage in range(stages)]
    assert [len(span) for span in spans] == each
    assert [layer for span in spans for layer in span] == list(range(layers))


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_one_stage_and_a_tied_embedding_two(tied, tmp_path):
    lm = empty_policy(make_policy(tmp_path / "model", tied, Qwen3MoeConfig, layers=3), 1.0).lm
    layout = ParallelLayout(None, None, 1, 0, 2)
    where = {name: stages_holding(name, lm, layout) for name, _ in lm.named_parameters()}
    assert where.pop("model.embed_tokens.weight") == ([0, 1] if tied else [0])
    assert where.pop("model.norm.weight") == where.pop("lm_head.weight", [1]) == [1]
    assert all(stages == [int(name.startswith("model.layers.2."))] for name, stages in where.items())


def test_more_stages_than_layers_are_refused(tmp_path):
    folder = make_policy(tmp_path / "model")
    with pytest.raises(ModelError, match=r"learner\.pipeline_parallel = 3 .*has 2"):
        check_stages(empty_policy(folder, 1.0).lm, folder, SimpleNamespace(stages=3))

"""The engine for any causal LM of transformers: what it computes is what a plain forward pass computes."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from april.config import ConfigError
from april.workers.engines import ENGINES
from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import (
    TINY_SHAPE,
    V0,
    V1,
    Stream,
    TinyModel,
    assert_true_logprobs,
    drive,
    join,
    prompt,
)
from april.workers.engines.conformance.suite import configured
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.embedded.transformers import CachedBatch

ENTRY = ENGINES.find("transformers")


def start(model, **options):
    engine = ENTRY.from_config(configured("transformers", model.folder, [], **options), "cpu", "test")
    engine.load_weights(V0, model.weights())
    return engine


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "falcon_h1", "qwen3_moe"])
def test_contexts_of_many_lengths_side_by_side_one_of_them_resumed(tiny_model, architecture):
    model = tiny_model(architecture)
    engine = start(model)
    requests = [
        Request(i, prompt(p, seed=i), r, seed=i) for i, (p, r) in enumerate([(3, 50), (40, 9), (1, 20), (3, 4)])
    ]
    before = drive(engine, requests, tokens=40)
    first = join(before[0], Stream(engine.cancel(0)))
    rest = Request(9, np.append(requests[0].tokens, first.tokens).astype(np.int32), 50 - len(first.tokens), seed=0)
    after = drive(engine, [rest])
    streams = {request.id: join(before[request.id], after[request.id]) for request in requests}
    streams[0] = join(first, after[9])
    for request in requests:
        assert len(streams[request.id].tokens) == request.max_new_tokens
        assert_true_logprobs(model, request, streams[request.id])
    alone = drive(start(model), [requests[0]])[0]
    assert alone.tokens == streams[0].tokens, "a sample is the same in any batch, and wherever it was interrupted"


def test_equal_seeds_give_the_tokens_of_the_torch_engine(tiny_model):
    model = tiny_model()
    torch_engine = TorchEngine(model.folder)
    torch_engine.load_weights(V0, model.weights())
    requests = [Request(i, prompt(seed=i), 40, seed=i, top_k=i, temperature=0.5 * i) for i in range(4)]
    here, there = drive(start(model), requests), drive(torch_engine, requests)
    assert all(here[i].tokens == there[i].tokens for i in range(4))


CUT = {
    "top_k": ({"top_k": 5}, 5),
    "top_p": ({"top_p": 0.8}, 60),
    "min_p": ({"min_p": 0.2, "temperature": 1.5}, 60),
    "all": ({"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7}, 9),
}


@pytest.mark.parametrize("case", CUT)
def test_supports_are_what_is_left_and_log_probabilities_are_over_them(case, tiny_model):
    (options, most), model = CUT[case], tiny_model()
    request = Request(1, prompt(), 25, seed=3, with_support=True, **options)
    engine = start(model)
    stream = drive(engine, [request])[1]
    context = [*request.tokens.tolist(), *stream.tokens]
    probabilities = (model.logits(context)[4:-1] / request.temperature).softmax(-1)
    at = 0
    for chunk in stream.chunks:
        ends = np.cumsum(chunk.support.counts)
        assert chunk.support.holds(chunk.tokens)
        for ids, token, logprob in zip(
            np.split(chunk.support.ids, ends[:-1]), chunk.tokens, chunk.logprobs, strict=True
        ):
            row, at = probabilities[at], at + 1
            left, out = row[ids.tolist()], np.delete(row.numpy(), ids)
            assert len(ids) <= most and left.min() >= out.max() and left.min() >= request.min_p * row.max()
            assert abs(logprob - float((row[token] / left.sum()).log())) < 1e-4
            if options == {"top_p": 0.8}:
                assert left.sum() - left.min() < 0.8 <= left.sum() + 1e-6
    evaluated = drive(engine, [replace(request, id=2, with_support=False)])[2]
    assert evaluated.tokens == stream.tokens
    assert_true_logprobs(model, request, evaluated)


def test_what_it_holds_is_compared_by_the_names_of_files(tiny_model):
    model = tiny_model("qwen3_moe")
    engine, weights = start(model), model.weights()
    assert engine.differing(weights) == [] and any(".experts.1.up_proj" in name for name in weights)
    with torch.no_grad():
        engine._lm.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[2, 0, 0] += 1
    assert engine.differing(weights) == ["model.layers.1.mlp.experts.2.gate_proj.weight"]


def test_a_cache_that_changes_what_is_computed_is_not_used(tmp_path, caplog):
    """RecurrentGemma keeps its states in its modules, of one batch at a time."""
    keys = {"attention_window_size": 16, "lru_width": 48, "num_key_value_heads": 1, "initializer_range": 0.15}
    torch.manual_seed(0)
    config = AutoConfig.for_model("recurrent_gemma", **TINY_SHAPE | keys | {"num_hidden_layers": 3})
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    model = TinyModel(tmp_path, reference)
    engine = start(model)
    assert "generation goes without" in caplog.text
    requests = [Request(i, prompt(2 + i % 2, seed=i), 6, seed=i) for i in range(3)]
    streams = drive(engine, requests)
    for request in requests:
        assert_true_logprobs(model, request, streams[request.id])


def test_a_sequence_without_finite_logits_fails_alone(tiny_model, monkeypatch):
    engine, logits = start(tiny_model()), CachedBatch.logits
    engine.submit(Request(1, prompt(), 30))
    engine.submit(Request(2, prompt(), 30))
    engine.step()

    def spoil_the_first_row(batch, lm):
        found = logits(batch, lm)
        found[0] = torch.nan
        return found

    with monkeypatch.context() as patched:
        patched.setattr(CachedBatch, "logits", spoil_the_first_row)
        (chunk,) = engine.step()
    assert (chunk.id, len(chunk.tokens)) == (1, 1)
    assert engine.failures() == [(1, f"weights {V0} give logits that are not finite")] and engine.failures() == []
    assert len(drive(engine)[2].tokens) == 30


UNFIT = {
    "code": ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "its class is code in the folder"),
    "no text": ({"model_type": "vit"}, "no causal LM of model_type 'vit'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its weights are quantised"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_it_cannot_run_is_refused_before_a_run(case, tiny_model, tmp_path):
    keys, said = UNFIT[case]
    folder = shutil.copytree(tiny_model().folder, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    config = configured("transformers", folder, [])
    for attempt in (lambda: ENTRY.check_model(config), lambda: ENTRY.from_config(config, "cpu", "test")):
        with pytest.raises(ConfigError, match=rf"'model\.path' = .*{said}.*; give "):
            attempt()


def test_new_weights_replace_every_cache(tiny_model):
    model, other = tiny_model("falcon_h1"), tiny_model("falcon_h1", seed=1)
    engine, request = start(model), Request(1, prompt(), 30, seed=4)
    before = drive(engine, [request], tokens=12)[1]
    engine.load_weights(V1, other.weights())
    stream = join(before, drive(engine)[1])
    old, new = stream.versions.count(V0), stream.versions.count(V1)
    assert old >= 12 and old + new == 30
    expected = other.logprobs([*request.tokens.tolist(), *stream.tokens], len(request.tokens) + old)
    torch.testing.assert_close(torch.tensor(stream.logprobs[old:]), expected, atol=1e-4, rtol=0)

"""Images in the engine of transformers' models: what it computes is what a plain forward pass of one request does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from april.data.pixels import PixelReader
from april.workers.engines import ENGINES
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.harness import V0, Stream, drive, join
from april.workers.engines.conformance.suite import configured
from april.workers.engines.embedded.transformers import TransformersEngine
from tests.support.learner.pictures import FAMILIES, IMAGE, VOCABULARY, prompt, vision_model


def start(folder, lm, **options):
    engine = TransformersEngine(configured("transformers", folder, [], **options), "cpu", "test")
    engine.load_weights(V0, revert_weight_conversion(lm, dict(lm.state_dict())))
    return engine


def request_of(number, text_tokens, sizes, new_tokens):
    ids, images = prompt(np.random.default_rng(number), text_tokens, sizes)
    return Request(number, np.array(ids, np.int32), new_tokens, seed=number, images=tuple(images))


@torch.inference_mode()
def logprobs_of(lm, reader, request, tokens):
    """Of `tokens`, which follow a request's, by the model's own forward pass. In place of a placeholder among them the
    id before it is passed, which has the same embedding."""
    ids = torch.tensor([[*request.tokens.tolist(), *(IMAGE - 1 if token == IMAGE else token for token in tokens)]])
    images = {}
    if read := [reader.read(png) for png in request.images]:
        images = {
            "pixel_values": torch.from_numpy(np.concatenate([rows for rows, _ in read])),
            "image_grid_thw": torch.tensor([grid for _, grid in read]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    logits = lm(input_ids=ids, use_cache=False, **images).logits[0, len(request.tokens) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_with_images_side_by_side_one_of_them_resumed(family, tmp_path):
    lm = vision_model(family, tmp_path).eval()
    with torch.no_grad():
        table = lm.get_input_embeddings().weight
        table[IMAGE - 1] = table[IMAGE]
        lm.lm_head.weight[IMAGE] += 0.2 * lm.lm_head.weight[IMAGE].sign()
    reader, engine = PixelReader.of(tmp_path), start(tmp_path, lm)
    shapes = [(3, [(2, 3), (1, 2)], 60), (20, [], 9), (1, [(3, 3)], 30), (9, [(1, 2)], 12)]
    requests = [request_of(number, *shape) for number, shape in enumerate(shapes)]
    requests.append(replace(requests[0], id=4, seed=4))
    before = drive(engine, requests, tokens=60)
    first = join(before[0], Stream(engine.cancel(0)))
    assert 0 < len(first.tokens) < 60
    rest = np.append(requests[0].tokens, first.tokens).astype(np.int32)
    after = drive(engine, [replace(requests[0], id=9, tokens=rest, max_new_tokens=60 - len(first.tokens))])
    streams = {request.id: join(before[request.id], after[request.id]) for request in requests}
    streams[0] = join(first, after[9])
    for request in requests:
        found = streams[request.id]
        expected = logprobs_of(lm, reader, request, found.tokens)
        assert len(found.tokens) == request.max_new_tokens
        assert (torch.tensor(found.logprobs) - expected).abs().max() < 1e-4
    assert any(IMAGE in stream.tokens for stream in streams.values()), "a placeholder that is sampled is text"
    alone = drive(start(tmp_path, lm), [requests[0]])[0]
    assert alone.tokens == streams[0].tokens, "a sample is the same in any batch, and wherever it was interrupted"


def test_images_that_do_not_fit_are_refused(tmp_path, tiny_model):
    lm = vision_model("qwen3_vl", tmp_path)
    engine, request = start(tmp_path, lm), request_of(0, 3, [(2, 2)], 4)
    with pytest.raises(EngineError, match=r"4 tokens.* 3 of"):
        engine.submit(replace(request, tokens=request.tokens[:-4]))
    with pytest.raises(EngineError, match="cannot be shown"):
        engine.submit(replace(request, images=(b"no picture",)))
    plain = TransformersEngine(configured("transformers", tiny_model().folder, []), "cpu", "test")
    with pytest.raises(EngineError, match="the model takes none"):
        plain.submit(replace(request, tokens=request.tokens % 64))
    assert ENGINES.find("transformers").takes_images and VOCABULARY > IMAGE

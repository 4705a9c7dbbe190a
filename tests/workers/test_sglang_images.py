"""Images on SGLang: it gets one placeholder for each, and reads the tokens that were meant, or the request fails."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from april.data.images import ImageRule, name_of
from april.data.pixels import PLACES, PixelReader, png_of, take_image_places
from april.learner.policy.counting import (
    END,
    EOS,
    IMAGE,
    PATCH,
    PROCESSOR,
    RECIPE,
    START,
    VIDEO,
    VOCABULARY,
    build_model,
    save_policy,
)
from april.workers.engines import ENGINES
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.harness import V0, V1, V2, drive, join
from april.workers.engines.sglang.client import ServerRefuses
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.images import LOOKS_BEHIND_START, ImageTokens, SentImages
from april.workers.engines.sglang.run import StreamedRequest
from april.workers.engines.sglang.server import ServerSettings
from tests.support.attached_servers import SGLANG_PYTHON, serve
from tests.support.learner import pictures as tiny

PAD, SIDE, CONTEXT = VOCABULARY[IMAGE], 2 * PATCH, 512
KNOWN = ImageTokens(ImageRule(PAD, PATCH, 2, 64, 4096), VOCABULARY[VIDEO], VOCABULARY[START])


def request_of(number, sizes, new_tokens=8, side=SIDE):
    """A request of text and images of noise; `sizes`: rows and columns of tokens; `side`: of a token (pixels)."""
    rng = np.random.default_rng(number)
    ids, images = rng.integers(6, len(VOCABULARY), 3).tolist(), []
    for rows, columns in sizes:
        ids += [
            VOCABULARY[START],
            *[PAD] * (rows * columns),
            VOCABULARY[END],
            *rng.integers(6, len(VOCABULARY), 2).tolist(),
        ]
        images.append(png_of(rng.integers(256, size=(rows * side, columns * side, 3), dtype=np.uint8)))
    return Request(number, np.array(ids, np.int32), new_tokens, seed=number, images=tuple(images))


def started(request):
    streamed = StreamedRequest(request, SentImages.of(request, KNOWN))
    streamed.start_attempt()
    return streamed


def event(ids, total, read):
    """An event with new tokens, of a server that has `read` these prompt ids."""
    meta = {"completion_tokens": total, "output_token_logprobs": [[-1.0, token, None] for token in ids]}
    return {"output_ids": ids, "prompt_token_ids": read, "meta_info": meta}


def test_each_image_is_sent_with_one_placeholder_in_its_place():
    request = request_of(0, [(2, 3), (1, 2)])
    body = started(request).body(V0, 5)
    ids, first = body["input_ids"], [VOCABULARY[START], PAD, VOCABULARY[END]]
    assert ids[3:6] == ids[8:11] == first and len(ids) == len(request.tokens) - 5 - 1
    assert all(url.startswith("data:image/png;base64,") for url in body["image_data"]) and len(body["image_data"]) == 2
    assert body["return_prompt_token_ids"]
    plain = StreamedRequest(request_of(1, []))
    assert not {"image_data", "return_prompt_token_ids"} & plain.body(V0, 5).keys()


def test_a_server_that_has_read_other_tokens_fails_the_request_and_none_of_its_tokens_is_taken():
    request = request_of(0, [(2, 3)])
    meant = request.tokens.tolist()
    for read in (meant[:-1], [*meant[:-1], 7], None):
        streamed = started(request)
        streamed.body(V0, 5)
        with pytest.raises(ServerRefuses, match=f"{len(meant)} tokens with images"):
            streamed.take_event(event([9, 8], 2, read), V0)
        assert streamed.generated == streamed.pending == []
    streamed = started(request)
    streamed.body(V0, 5)
    assert streamed.take_event(event([9, 8], 2, meant), V0) == 2
    streamed.start_attempt()
    assert streamed.body(V0, 5)["input_ids"][-2:] == [9, 8]
    with pytest.raises(ServerRefuses, match="has read"):
        streamed.take_event(event([7], 1, meant), V0)
    assert streamed.take_event(event([7], 1, [*meant, 9, 8]), V0) == 1, "a resumed one is read with what was sampled"


SAMPLED = {
    "1 placeholders were sampled, and SGLang takes each for an image": ([PAD, 7], [PAD]),
    "a placeholder of a video was sampled": ([VOCABULARY[VIDEO], 7], [VOCABULARY[VIDEO]]),
    "its last token begins an image": ([VOCABULARY[START]], [7, VOCABULARY[START]]),
}
"""Ids that cannot be sent again beside an image, by the reason."""


@pytest.mark.parametrize("why", SAMPLED)
def test_what_sglang_would_take_for_an_image_is_not_sent_again_beside_one(why):
    request = request_of(0, [(1, 2)])
    for sampled in SAMPLED[why]:
        streamed = started(request)
        streamed.body(V0, 5)
        streamed.take_event(event(sampled, len(sampled), request.tokens.tolist()), V0)
        streamed.start_attempt()
        with pytest.raises(EngineError, match=why):
            streamed.body(V0, 5)
        with pytest.raises(EngineError, match=why):
            started(replace(request, tokens=np.array([*request.tokens, *sampled], np.int32)))


def test_what_is_only_text_is_sent_again():
    start, more = VOCABULARY[START], [VOCABULARY[START], VOCABULARY[END]]
    with_image, plain = request_of(0, [(1, 2)]), StreamedRequest(request_of(1, []))
    resumed = started(replace(with_image, tokens=np.array([*with_image.tokens, *more], np.int32)))
    assert resumed.body(V0, 5)["input_ids"][-2:] == more
    plain.generated = [PAD, VOCABULARY[VIDEO], start]
    assert plain.body(V0, 5)["input_ids"][-3:] == [PAD, VOCABULARY[VIDEO], start]


def test_images_that_do_not_fit_are_refused():
    request = request_of(0, [(2, 2)])
    for wrong, why in (
        (replace(request, tokens=request.tokens[:-4]), "take 4 tokens, and the text has 3"),
        (replace(request, images=(b"no picture",)), "is no PNG file"),
    ):
        with pytest.raises(EngineError, match=why):
            SentImages.of(wrong, KNOWN)
    with pytest.raises(EngineError, match="the model takes none"):
        SentImages.of(request, None)
    assert ENGINES.find("sglang").takes_images and not ENGINES.find("vllm").takes_images


# --- the real server --------------------------------------------------------------------------------------------------


FAMILIES = {"qwen3_vl": PATCH, "qwen2_5_vl": 14, "qwen2_vl": 14}
"""Side of a patch in the tiny models (pixels); SGLang knows rows of pixels of Qwen2.5-VL by their length at 14."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.turn(name)) for name in FAMILIES])
def models(request, tmp_path_factory):
    """(folder, model of version 0, model of version 1): tiny models whose tokeniser and processor SGLang reads too."""
    folder = tmp_path_factory.mktemp("models") / request.param
    first, second = (random_model(request.param, seed) for seed in (0, 1))
    save_policy(first, folder)
    if request.param != "qwen3_vl":
        sizes = {"shortest_edge": 56 * 56, "longest_edge": 280 * 280}
        processor = PROCESSOR | {"patch_size": FAMILIES[request.param], "temporal_patch_size": 2, "size": sizes}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder, first, second


@torch.no_grad()
def random_model(family, seed):
    """A model of random weights that samples no placeholder, nor the token before one if SGLang cannot read it as the
    last one: the first number of the residual stream is always 1, and counts against them."""
    model = tiny_model(family, seed).eval()
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, weight in (*model.named_parameters(), ("lm_head.weight", head)):
        if weight.dim() > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "linear_fc2" in name or ".merger.mlp.2." in name:
            weight[0] = float(".merger." in name and name.endswith("bias"))
    embeddings[:, 0] = head[:, 0] = 1
    head[[PAD, VOCABULARY[VIDEO], *([VOCABULARY[START]] if family in LOOKS_BEHIND_START else [])], 0] = -50
    take_image_places(model.base_model)
    return model


def tiny_model(family, seed):
    if family == "qwen3_vl":
        return build_model(replace(RECIPE, hidden_size=64, layers=2), seed)
    text, vision = tiny.FAMILIES[family]
    text = text | {
        "vocab_size": len(VOCABULARY), "hidden_size": 64, "eos_token_id": VOCABULARY[EOS], "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    own = {"embed_dim": 32, "hidden_size": 64} if family == "qwen2_vl" else {"hidden_size": 32, "out_hidden_size": 64}
    vision = vision | own | {"patch_size": FAMILIES[family], "in_chans": 3, "window_size": 56}
    names = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    ids = {key: VOCABULARY[name] for key, name in names.items()}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    log = tmp_path_factory.mktemp("sglang") / "vision.log"
    yield from serve(ServerSettings(SGLANG_PYTHON, models[0], log, slots=16, context_tokens=CONTEXT))


@pytest.fixture
def engine(server, models):
    folder, first, _ = models
    engine = SGLangEngine(
        folder, len(VOCABULARY), CONTEXT, url=server.url, slots=8, chunk_tokens=50, stream_tokens=1, report_s=1e9
    )
    engine.load_weights(V0, weights_of(first))
    yield engine
    engine.cancel_all(range(100))
    engine.close()


def weights_of(model):
    return revert_weight_conversion(model, dict(model.named_parameters()))


def wait_for_failure(engine):
    while not (failed := engine.failures()):
        engine.step()
    return failed


@torch.inference_mode()
def logprobs_of(model, reader, request, tokens):
    """Of `tokens`, which follow a request's, by a plain forward pass of the model."""
    ids = torch.tensor([[*request.tokens.tolist(), *tokens]])
    places = ids == PAD
    places[0, len(request.tokens) :] = False
    images = {}
    if read := [reader.read(png) for png in request.images]:
        images = {
            "pixel_values": torch.from_numpy(np.concatenate([rows for rows, _ in read])),
            "image_grid_thw": torch.tensor([grid for _, grid in read]),
            "mm_token_type_ids": places.int(),
            PLACES: places,
        }
    logits = model(input_ids=ids, use_cache=False, **images).logits[0, len(request.tokens) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_tokens_after_images_have_the_log_probabilities_of_a_plain_forward_pass_also_when_resumed(engine, models):
    """The weights change while requests with images are generated: each goes on behind its images and its tokens."""
    folder, first, second = models
    reader = PixelReader.of(folder)
    shapes = ([(2, 3), (2, 2)], 440), ([], 9), ([(3, 3)], 120)
    side = reader.patch * reader.merge
    requests = [request_of(number, *shape, side) for number, shape in enumerate(shapes)]
    before = drive(engine, requests, tokens=60)
    engine.load_weights(V1, weights_of(second))
    after = drive(engine)
    streams = {request.id: join(before[request.id], after[request.id]) for request in requests}
    for request in requests:
        found = streams[request.id]
        by_version = {
            version: logprobs_of(model, reader, request, found.tokens) for version, model in ((V0, first), (V1, second))
        }
        expected = [by_version[version][place] for place, version in enumerate(found.versions)]
        assert np.abs(np.array(found.logprobs) - expected).max() < 1e-4
    assert {*streams[0].versions} == {V0, V1} and len(
        {name_of(png) for request in requests for png in request.images}
    ) == 3


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_a_response_whose_last_token_begins_an_image_goes_on_if_sglang_can_read_it_and_otherwise_fails_alone(
    engine, models
):
    """The first weights sample no other token."""
    folder, first, second = models
    reader, start, forced = PixelReader.of(folder), VOCABULARY[START], weights_of(first)
    name = next(name for name in ("lm_head.weight", "model.language_model.embed_tokens.weight") if name in forced)
    forced[name] = forced[name].detach().clone()
    forced[name][start, 0] = 50
    engine.load_weights(V1, forced)
    shown = request_of(0, [(2, 3)], 440, reader.patch * reader.merge)
    before = drive(engine, [shown], tokens=1, begun=[0])
    assert {*before[0].tokens} == {start}
    engine.load_weights(V2, weights_of(second))
    is_read = second.config.model_type not in LOOKS_BEHIND_START
    if not is_read:
        ((failed, why),) = wait_for_failure(engine)
        assert failed == 0 and "its last token begins an image" in why
    after = drive(engine, [request_of(1, [], 9)])
    assert after[1].finish_reason == "length" and engine.restarts == 0
    if is_read:
        found = join(before[0], after[0])
        resumed = found.versions.index(V2)
        expected = logprobs_of(second, reader, shown, found.tokens)[resumed:]
        assert found.tokens[resumed - 1] == start and np.abs(np.array(found.logprobs[resumed:]) - expected).max() < 1e-4

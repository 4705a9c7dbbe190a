"""An engine for any causal LM that transformers has a class for: transformers' model and caches, April's sampling.

Requests whose contexts are prefilled together form a batch, with one cache, and decode together until they end. It is
slow beside the other engines: a context is computed anew where its batch cannot go on, and few batches run at once.
"""

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)
from transformers.utils.logging import disable_progress_bar

from april.config import Config
from april.data.pixels import PLACES, PixelReader, places_of_images, take_image_places
from april.util.files import length_dependent_positions
from april.util.text import first_line
from april.workers.engines.base import EngineError, Request
from april.workers.engines.embedded.sampling import SamplingPlan, sample, sample_support, stream_of, uniforms
from april.workers.engines.entry import is_finite
from april.workers.engines.in_process import InProcessEngine, Next, RunningRequest
from april.workers.engines.weight_loading import type_rounding

log = logging.getLogger(__name__)

MAX_BATCHES = 8
"""Maximum number of batches that decode at a time; further requests wait until one of them has ended."""
PREFILL_TOKENS = 16384
"""Maximum number of tokens, padding included, prefilled in one batch, unless a single context is longer."""
TRIAL_LENGTH, TRIAL_STEPS = 9, 8
"""Longest context (tokens), and number of tokens decoded after it, in the test that compares decoding with a cache with
a whole forward pass."""
UNBOUNDED_CONTEXT = 1 << 20
"""Longest context of a model whose config.json names none, such as a state space model (tokens)."""


def read_config(folder: Path) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """transformers' configuration of a model folder, and its class for this model. Raises EngineError if transformers
    cannot read the configuration or has no class for it, or if this engine cannot run the model."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what transformers raises of a config.json has no bounds
        said = first_line(error)
        if "trust_remote_code" in str(error):
            said = "its class is code in the folder, which April does not run"
        raise EngineError(f"{said}; give a model that transformers has a class for") from error
    kinds = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    known = next((mapping for mapping in kinds if type(config) in mapping), None)
    if known is None:
        raise EngineError(
            f"transformers has no causal LM of model_type {config.model_type!r}; give a model that generates text"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise EngineError("its weights are quantised, and those of the learner are not; give the original")
    if kind := length_dependent_positions(config.to_dict()):
        raise EngineError(
            f"its rotary positions of type {kind!r} depend on the length of what is computed together, and requests "
            "are batched; give a model with another type"
        )
    return config, known[type(config)]


class TransformersEngine(InProcessEngine):
    """Implements `Engine` for the model that config.json in the folder `model.path` describes; takes weights by their
    Hugging Face names."""

    returns_supports = True
    takes_images = True

    def __init__(self, config: Config, device: str, name: str):
        disable_progress_bar()
        self._config, self._kind = read_config(config.model.path)
        super().__init__(config, device, name)
        self._device = torch.device(device)
        dtype = self._config.get_text_config().dtype or torch.float32
        self._dtype = torch.float32 if self._device.type == "cpu" else dtype
        takes = inspect.signature(self._kind.forward).parameters.keys()
        self._inputs = {"use_cache": True, "logits_to_keep": 1, "position_ids": None}
        self._inputs = {key: value for key, value in self._inputs.items() if key in takes}
        self._images = ImageInputs.of(config.model.path, self._config)
        self._pads = "position_ids" in takes and is_padded_exactly(self._config)
        self._lm: Any = None
        self._caches = True
        """Whether batches keep a cache; if not, every context is computed anew for each of its tokens."""
        self._batches: list[CachedBatch] = []

    def sizes(self, config: Config) -> tuple[int, int]:
        text = self._config.get_text_config()
        return text.vocab_size, getattr(text, "max_position_embeddings", None) or UNBOUNDED_CONTEXT

    def expected_tensors(self, config: Config) -> tuple[dict[str, tuple[int, ...]], bool]:
        """Returns ({}, False): no names and shapes are checked beforehand, since only transformers knows them, and the
        machine may have no weights."""
        return {}, False

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return str(self._dtype).removeprefix("torch.")

    # --- weights --------------------------------------------------------------------------------------------------

    def check_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise EngineError for values that are not finite. Names and shapes are checked by transformers, in
        `set_weights`."""
        for name, tensor in tensors.items():
            if not is_finite(tensor):
                raise EngineError(f"tensor {name!r} has values that are not finite; the learner must not publish it")

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Build a model from the tensors, as transformers does from files, and replace the former model by it."""
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        try:
            lm, found = self._kind.from_pretrained(
                None,
                config=deepcopy(self._config),
                state_dict=copies,
                dtype=self._dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"transformers does not load the weights: {error}") from error
        check_found(found)
        if self._device.type == "cpu":  # grouped products of experts ask for aligned sizes
            with suppress(ValueError):
                lm.set_experts_implementation("eager")
        if hasattr(lm.base_model, "get_placeholder_mask"):
            take_image_places(lm.base_model)
        self._batches, self._lm = [], lm.to(self._device).eval()
        caches, self._caches = self._caches, self._caches_exactly()
        if caches and not self._caches:
            log.warning(
                "%s with a cache does not compute what it computes without: generation goes without, and is very slow",
                self._kind.__name__,
            )

    def _caches_exactly(self) -> bool:
        """Whether decoding with a cache computes what a whole forward pass does, up to rounding."""
        try:
            return self._cache_error() <= type_rounding(self.dtype)
        except Exception as error:  # whatever a model's own cache raises where it lacks an operation
            log.warning("%s: %s", self._kind.__name__, error)
            return False

    @torch.inference_mode()
    def _cache_error(self) -> float:
        """Largest mean difference between log-probabilities of decoding with a cache and those of a whole forward pass
        (nats), over the tokens of short random texts in one batch. One text leaves the batch before the others end."""
        texts = np.random.default_rng(0).integers(self.vocabulary, size=(2, TRIAL_LENGTH + TRIAL_STEPS))
        ids = torch.from_numpy(texts).to(self._device)
        whole = [self._lm(input_ids=text[None], use_cache=False).logits[0].float().log_softmax(-1) for text in ids]
        contexts = [(0, TRIAL_LENGTH), (1, TRIAL_LENGTH // 2 if self._pads else TRIAL_LENGTH), (0, TRIAL_LENGTH)]
        trials = [RunningRequest(Request(row, texts[row], 1), texts[row, :length].tolist()) for row, length in contexts]
        batch, errors = CachedBatch(trials, dict(self._inputs)), []
        for step in range(TRIAL_STEPS):
            if step == TRIAL_STEPS // 2:
                batch.keep(set(trials[1:]))
            places = [(each.request.id, len(each.context) + step) for each in batch.running]
            expected = torch.stack([whole[row][place - 1] for row, place in places])
            errors.append((batch.logits(self._lm).log_softmax(-1) - expected).abs().mean())
            batch.append(torch.stack([ids[place] for place in places]))
            if batch.cache is None:
                return math.inf
        return float(torch.stack(errors).max())

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of the tensors that the engine holds with other values than `tensors` (implements
        `ComparingEngine`)."""
        held = revert_weight_conversion(self._lm, dict(self._lm.state_dict()))
        tied = self._lm.all_tied_weights_keys.keys()
        return [
            name
            for name, given in tensors.items()
            if name not in tied and not (name in held and torch.equal(held[name], given.to(held[name])))
        ]

    def discard_weights(self) -> None:
        super().discard_weights()
        self._batches, self._lm = [], None

    def release(self) -> None:
        """Implements `TimeSharingEngine`: drop weights and caches, and return their memory to the device."""
        self.discard_weights()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self) -> None:
        """Implements `TimeSharingEngine`; nothing is allocated before the next weights."""

    # --- tokens ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        if request.images and self._images is None:
            raise EngineError(f"request {request.id} has images, and the model takes none; use one that does")
        if request.images and self._images:
            self._images.check(request)
        super().submit(request)

    @torch.inference_mode()
    def score(self, tokens: np.ndarray) -> np.ndarray:
        if self._lm is None:
            raise EngineError("there are no weights to score with; load some")
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
        logits = self._lm(input_ids=ids[None, :-1], use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), -1).gather(1, ids[1:, None])[:, 0].cpu().numpy()

    @torch.inference_mode()
    def advance(self, running: Sequence[RunningRequest]) -> list[Next]:
        for batch in self._batches:
            batch.keep(set(running))
        self._batches = [batch for batch in self._batches if batch.running]
        placed = {each for batch in self._batches for each in batch.running}
        waiting = [each for each in running if each not in placed]
        for group in self._groups(waiting)[: MAX_BATCHES - len(self._batches)]:
            self._batches.append(CachedBatch(group, dict(self._inputs), self._images))
        sampled = [each for batch in self._batches for each in batch.sample(self._lm)]
        if not self._caches:
            self._batches = []
        return sampled

    def _groups(self, waiting: Sequence[RunningRequest]) -> list[list[RunningRequest]]:
        """Divide requests into those that are prefilled together, of equal length unless the model can be padded; the
        group of the request that has waited longest comes first."""
        groups: list[list[RunningRequest]] = []
        for each in sorted(waiting, key=lambda each: len(each.context)):
            length = len(each.context)
            fits = groups and (len(groups[-1]) + 1) * length <= PREFILL_TOKENS
            if fits and (self._pads or len(groups[-1][0].context) == length):
                groups[-1].append(each)
            else:
                groups.append([each])
        place = {each: index for index, each in enumerate(waiting)}
        return sorted(groups, key=lambda group: min(place[each] for each in group))

    def close(self) -> None:
        self.discard_weights()


def is_padded_exactly(config: PreTrainedConfig) -> bool:
    """Whether masked padding changes no result: every layer is attention, and none has a recurrent state."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in kinds for layer in DynamicCache(config=config).layers)


def check_found(found: Mapping[str, Any]) -> None:
    """Raise EngineError unless transformers has found exactly the tensors of the model. `found`: the loading info that
    its `from_pretrained` returns."""
    for kind, names in (("lack", found["missing_keys"]), ("have an unknown", found["unexpected_keys"])):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EngineError(
                f"the weights {kind} tensor {min(names)!r}{more}; send exactly the tensors that config.json describes"
            )
    for name, sent, described in found["mismatched_keys"]:
        raise EngineError(
            f"tensor {name!r} has shape {tuple(sent)} but config.json describes {tuple(described)}; "
            "send the weights of the same model"
        )


# --- images -----------------------------------------------------------------------------------------------------------


class Context(NamedTuple):
    """The context of a request, as it is prefilled: its token ids, and the images among them as in `Request`."""

    tokens: tuple[int, ...]
    images: tuple[bytes, ...] = ()
    image_starts: tuple[int, ...] = ()


class ImageInputs:
    """Makes the image arguments of a vision-language model, for contexts that are prefilled together."""

    def __init__(self, reader: PixelReader, token_id: int):
        self.reader, self.token_id = reader, token_id

    @classmethod
    def of(cls, folder: Path, config: PreTrainedConfig) -> "ImageInputs | None":
        """The maker of image inputs for the model of a folder; None if the model takes no images."""
        takes_any = hasattr(config, "image_token_id") and hasattr(config, "vision_config")
        reader = PixelReader.of(folder) if takes_any else None
        return cls(reader, config.image_token_id) if reader else None

    def check(self, request: Request) -> None:
        """Raises EngineError for a request that lacks placeholders of its images."""
        try:
            self.places(request.tokens, self.read(request.images), request.image_starts)
        except (ValueError, OSError) as error:
            raise EngineError(f"request {request.id} cannot be shown its images: {error}") from error

    def read(self, images: Sequence[bytes]) -> list[tuple[np.ndarray, tuple[int, int, int]]]:
        return [self.reader.read(png) for png in images]

    def places(self, tokens: Sequence[int] | np.ndarray, read: list, starts: Sequence[int]) -> np.ndarray:
        counts = [self.reader.tokens(grid) for _, grid in read]
        return places_of_images(np.asarray(tokens), self.token_id, counts, starts)

    def inputs(self, lm: Any, contexts: Sequence[Context], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Positions of padded contexts and the image arguments of their prefill, for the model `lm` of transformers.
        The positions, int64 [3, n, L], have three axes (time, height, width) by the model's own rule. `mask`: int64 [n,
        L], 0 for padding. At least one context has an image."""
        read = [self.read(context.images) for context in contexts]
        places = torch.zeros(mask.shape, dtype=torch.bool)
        for row, ((tokens, _, starts), images) in enumerate(zip(contexts, read, strict=True)):
            places[row, -len(tokens) :] = torch.from_numpy(self.places(tokens, images, starts))
        grids = torch.tensor([grid for images in read for _, grid in images])
        kinds, host = places.long(), mask.cpu()
        positions, _ = lm.base_model.get_rope_index(
            kinds, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=host
        )
        pixels = torch.from_numpy(np.concatenate([rows for images in read for rows, _ in images]))
        shown = {"pixel_values": pixels, "image_grid_thw": grids, PLACES: places}
        return positions.to(mask.device), {name: value.to(mask.device) for name, value in shown.items()}


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class CachedBatch:
    """Requests that decode together: their contexts, padded on the left to the same length, and one cache."""

    running: list[RunningRequest]
    inputs: dict[str, Any]
    """Keyword arguments of transformers' model, cache included."""
    images: ImageInputs | None = None
    """Reader of the requests' images; None for a model that takes none."""
    ids: Tensor | None = None
    """int64 [n, L]: contexts of the n requests, padded on the left to L tokens; None before the prefill."""

    @property
    def cache(self) -> Cache | None:
        """The batch's cache; None before the prefill, and for a model whose state is none of transformers' caches."""
        return next((value for value in self.inputs.values() if isinstance(value, Cache)), None)

    def keep(self, live: set[RunningRequest]) -> None:
        """Keep only the requests in `live`; the others are dropped from the batch and its cache."""
        rows = [row for row, each in enumerate(self.running) if each in live]
        if len(rows) < len(self.running):
            self.running = [self.running[row] for row in rows]
            self._select(rows)

    def sample(self, lm: Any) -> list[Next]:
        """Sample and append the next token of each request with `lm`, transformers' model; returns the tokens in the
        order of `running`."""
        logits, requests = self.logits(lm), [each.request for each in self.running]
        streams = np.array([stream_of(request.seed) for request in requests], np.uint64)
        positions = np.array([len(each.context) for each in self.running], np.int64)
        plan = SamplingPlan.of(
            np.array([float(request.temperature) for request in requests]),
            np.array([request.top_k for request in requests]),
            np.array([float(request.top_p) for request in requests]),
            logits.shape[-1],
            logits.device,
        )
        uniform = torch.from_numpy(uniforms(streams, positions)).to(logits.device)
        tokens, logprobs = sample(logits, uniform, plan)
        supports: list[np.ndarray | None] = [None] * len(requests)
        for row, request in enumerate(requests):
            if request.with_support or request.min_p:
                cut = request.temperature, request.top_k, request.top_p, request.min_p
                tokens[row], logprob, ids = sample_support(logits[row], uniform[row], *cut)
                full = (logits[row] / (request.temperature or 1.0)).log_softmax(-1)
                logprobs[row] = logprob if request.with_support else full[tokens[row]]
                supports[row] = ids.int().cpu().numpy() if request.with_support else None
        self.append(tokens)
        sampled = zip(self.running, tokens.tolist(), logprobs.tolist(), supports, strict=True)
        return [Next(*each) for each in sampled]

    def logits(self, lm: Any) -> Tensor:
        """Logits, float32 [n, vocabulary], of each request's next token. The first call prefills the contexts, each
        distinct one once."""
        if self.ids is not None:
            return self._forward(lm, self.ids, 1, {})
        row_of: dict[Context, int] = {}
        requests = [(each.context, each.request) for each in self.running]
        contexts = [Context(tuple(tokens), shown.images, shown.image_starts) for tokens, shown in requests]
        rows, shown = [row_of.setdefault(each, len(row_of)) for each in contexts], dict[str, Tensor]()
        distinct = [context.tokens for context in row_of]
        longest = max(map(len, distinct))
        self.ids = torch.tensor([[0] * (longest - len(c)) + list(c) for c in distinct], device=lm.device)
        mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in distinct], device=lm.device)
        if not mask.all():
            self.inputs["attention_mask"] = mask
        if "position_ids" in self.inputs:
            self.inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if self.images and any(context.images for context in row_of):
            self.inputs["position_ids"], shown = self.images.inputs(lm, list(row_of), mask)
        logits = self._forward(lm, self.ids, None, shown)[rows]
        self._select(rows)
        return logits

    def append(self, tokens: Tensor) -> None:
        """Append the sampled token of each request, int64 [n]; the next call of `logits` decodes these tokens."""
        if self.ids is not None:
            self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)

    def _forward(self, lm: Any, ids: Tensor, length: int | None, shown: dict[str, Tensor]) -> Tensor:
        """Run the model on the last `length` tokens of `ids`, or in a prefill (None) on all of them. Returns the logits
        after the last token, float32 [n, vocabulary]. `shown`: the image arguments of a prefill."""
        inputs = lm.prepare_inputs_for_generation(
            ids, next_sequence_length=length, is_first_iteration=length is None, **self.inputs
        )
        outputs = lm(**inputs, **shown, return_dict=True)
        self.inputs = lm._update_model_kwargs_for_generation(outputs, self.inputs)
        return outputs.logits[:, -1].float()

    def _select(self, rows: list[int]) -> None:
        """Keep only the rows of the batch with these indices, in this order: in `ids`, in the tensors of `inputs`, and
        in the cache."""
        if self.ids is None or rows == list(range(len(self.ids))):
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self.ids.device)
        self.ids = self.ids[index]
        tensors = {key: value for key, value in self.inputs.items() if isinstance(value, Tensor)}
        self.inputs |= {key: value.index_select(value.ndim - 2, index) for key, value in tensors.items()}
        if isinstance(self.cache, DynamicCache) and type(self.cache) is not DynamicCache:
            self.cache.batch_select_indices(index)
        elif self.cache is not None:
            self.cache.reorder_cache(index)

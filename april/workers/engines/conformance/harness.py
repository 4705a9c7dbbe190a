"""Helpers of the conformance checks: drivers of an engine, tiny reference models, and the decorator `check`."""

import contextlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from april.util import clock
from april.wire.message import Version
from april.workers.engines.base import Chunk, Engine, EngineError, Request
from april.workers.engines.entry import EngineEntry

VOCABULARY = 61
PATIENCE_S = 120.0
"""Time without a new token after which an engine with requests that run or are queued counts as stuck (s)."""
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
    """Requests with prompts of 1 to 40 tokens and budgets of 1 to 60 new tokens. `options`: further fields of
    `Request`."""
    rng = np.random.default_rng(7)
    return [
        Request(i, prompt(int(rng.integers(1, 41)), seed=i), int(rng.integers(1, 61)), seed=i, **options)
        for i in range(count)
    ]


def drive(
    engine, requests=(), steps: int | None = None, tokens: int | None = None, begun: Iterable[int] = ()
) -> dict[int, Stream]:
    """Submit requests, then step until none runs or is queued, `steps` are done, or `tokens` more have been generated;
    returns all chunks of each request by its id.

    Beyond `tokens`, waits for a first chunk of each request whose id is in `begun`. The result includes chunks of
    requests that ended earlier, while weights were loaded. Asserts that no request fails.
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
    """Assert by a chi-square test that observed counts agree with probabilities. Counts drawn from the probabilities
    fail it once in a million tests. `counts`, `probabilities`: one entry for each token id; rare tokens are pooled.
    (The cube root of chi-square is nearly normal: Wilson and Hilferty, 1931.)"""
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
    """Assert that the first tokens of one prompt, under the sampling seeds 0 to `seeds` - 1, have the distribution that
    `options` (sampling fields of `Request`) ask for. `model`: the `TinyModel` that the engine runs.

    The options cut by top-k, then by top-p to the fewest likeliest tokens whose mass reaches top-p. Behaviour
    log-probabilities are those of the uncut distribution.
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


# --- tiny models ------------------------------------------------------------------------------------------------------

TINY_CONTEXT = 640
TINY_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": TINY_CONTEXT, "initializer_range": 0.25, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "llama": {
        "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        "rope_parameters": LLAMA3_ROPE,
    },
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "initializer_range": 0.1},
    "gpt_oss": EXPERTS | {"num_local_experts": 4, "sliding_window": 24},
    "falcon_h1": {
        "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_chunk_size": 16, "tie_word_embeddings": True,
    },
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
    "qwen3_vl": {
        "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    },
}  # fmt: skip
"""Keys of config.json that each tiny model has in addition to `TINY_SHAPE`, by model_type: plain decoders, then one
model each with sliding windows, attention sinks, recurrent states, experts and images."""
TOWERS: Mapping[str, dict[str, Any]] = {
    "qwen3_vl": {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
        "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1],
    },
}  # fmt: skip
"""Keys of the vision tower in config.json, by model_type, for the tiny models that take images."""
PLACEHOLDERS = {"image_token_id": VOCABULARY - 1, "video_token_id": VOCABULARY - 2}
PLACEHOLDERS |= {"vision_start_token_id": VOCABULARY - 3, "vision_end_token_id": VOCABULARY - 4}
"""Ids of the tokens around and in place of images."""


@dataclass(frozen=True)
class TinyModel:
    """A tiny model: the folder that an engine under test reads, and its Hugging Face model as the reference.

    Its random weights give peaked distributions, so that a wrong mask, position or norm shows in the logits.
    """

    folder: Path
    reference: PreTrainedModel

    def weights(self) -> dict[str, torch.Tensor]:
        """Tensors by their names in Hugging Face files."""
        return dict(revert_weight_conversion(self.reference, self.reference.state_dict()))

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits, float32 [T, vocabulary], of a plain forward pass over T tokens: row i is for the token after
        `tokens[i]`."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0].float()

    def logprobs(self, tokens: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities at `temperature`, float32 [T - start], of `tokens[start:]`, each given all tokens before
        it, from a plain forward pass over the T tokens."""
        every = torch.log_softmax(self.logits(tokens)[start - 1 : -1] / temperature, dim=-1)
        return every.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]

    def logprobs_under(self, weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
        """Log-probabilities, float32 [T - 1], of `tokens[1:]`, each given the tokens before it, if the model had other
        `weights`: tensors by Hugging Face names. The output projection is tied to the embedding."""
        with without_progress_bars():
            model = self.reference.from_pretrained(None, config=self.reference.config, state_dict=dict(weights))
        return TinyModel(self.folder, model).logprobs(tokens, 1)

    def with_context(self, max_context: int) -> Path:
        """A copy of the model folder with `max_position_embeddings` = `max_context`."""
        folder = self.folder.with_name(f"{self.folder.name}-{max_context}")
        if not folder.exists():
            shutil.copytree(self.folder, folder)
            shape = json.loads((folder / "config.json").read_text())
            shape.get("text_config", shape)["max_position_embeddings"] = max_context
            (folder / "config.json").write_text(json.dumps(shape))
        return folder


def build_reference(architecture: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    keys, kind = TINY_SHAPE | ARCHITECTURES[architecture], AutoModelForCausalLM
    if tower := TOWERS.get(architecture):
        keys = {"text_config": keys, "vision_config": tower, "tie_word_embeddings": keys["tie_word_embeddings"]}
        keys, kind = keys | PLACEHOLDERS, AutoModelForImageTextToText
    model: PreTrainedModel = kind.from_config(AutoConfig.for_model(architecture, **keys), dtype=torch.float32)
    # Norms start at one and biases at zero, where leaving them out would go unseen.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def a_matrix(weights: Mapping[str, torch.Tensor]) -> str:
    """Name of a weight matrix of the second layer that does not belong to an expert."""
    found = [name for name, tensor in weights.items() if ".1." in name and "experts" not in name and tensor.ndim == 2]
    return next((name for name in found if name.endswith("up_proj.weight")), found[-1])


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Suppress transformers' progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class TinyModels:
    """Makes tiny models: models(architecture, seed) -> TinyModel, cached. Seeds differ only in the weights."""

    def __init__(self, folder: Path):
        torch.set_num_threads(1)
        self._folder = folder
        self._made: dict[tuple[str, int], TinyModel] = {}

    def __call__(self, architecture: str = "qwen3", seed: int = 0) -> TinyModel:
        if (architecture, seed) not in self._made:
            model, folder = build_reference(architecture, seed), self._folder / f"{architecture}-{seed}"
            with without_progress_bars():
                model.save_pretrained(folder)
            self._made[architecture, seed] = TinyModel(folder, model)
        return self._made[architecture, seed]


# --- checks -----------------------------------------------------------------------------------------------------------


class MakeEngine(Protocol):
    def __call__(self, version: Version | None = V0, **options: Any) -> Engine:
        """An engine with the weights of `models()` under `version`; without weights if that is None.

        Options, with defaults: `slots` = 8, `chunk_tokens` = 7, `max_context` = the model's. The engine's timer
        (`report_s`) is off: it returns a chunk only when the chunk is full or its request has ended.
        """


@dataclass(frozen=True)
class Bench:
    """Argument of every check: the engine's registry entry, and functions that make engines and models."""

    entry: type[EngineEntry]
    make_engine: MakeEngine
    models: Callable[..., TinyModel]
    """Function that returns a tiny reference model: models(architecture="qwen3", seed=0)."""

    def assert_true_logprobs(self, request: Request, stream: Stream, model: TinyModel | None = None) -> None:
        """Assert that the log-probabilities in `stream`, the chunks of `request`, are those of a plain forward pass of
        `model` (None: of `models()`). Does nothing if the engine's entry has `true_distribution` = False."""
        if self.entry.true_distribution:
            assert_true_logprobs(model or self.models(), request, stream)


@dataclass(frozen=True)
class Check:
    """One property of an engine, as a function of a bench."""

    name: str
    """The property that is checked, as a sentence."""
    function: Callable[..., None]
    arguments: Mapping[str, Any]
    of_true_distribution: bool
    """Whether the check applies only to engines with `true_distribution`."""
    interrupts: bool
    """Whether the check cancels requests, or changes weights while they run."""

    def __str__(self) -> str:
        return self.name

    def concerns(self, entry: type[EngineEntry]) -> bool:
        return entry.true_distribution or not self.of_true_distribution

    def run(self, bench: Bench) -> None:
        """Run the check. Raises AssertionError if the engine fails it, or whatever the engine raises."""
        self.function(bench, **self.arguments)


CHECKS: list[Check] = []
"""All checks, in the order in which their modules are imported."""


def check(
    *,
    of_true_distribution: bool = False,
    interrupts: bool = False,
    cases: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that registers a function `name_that_is_a_sentence(bench, ...)` as one or several checks in `CHECKS`.
    `of_true_distribution`, `interrupts`: as in `Check`.

    `cases`: name of a case -> further arguments of the function; each case is one check. None: the function is one
    check.
    """

    def enlist(function: Callable[..., None]) -> Callable[..., None]:
        sentence = function.__name__.replace("_", " ")
        for case, arguments in (cases or {"": {}}).items():
            name = f"{sentence}: {case}" if case else sentence
            CHECKS.append(Check(name, function, arguments, of_true_distribution, interrupts))
        return function

    return enlist


def refusal(action: Callable[[], Any]) -> str:
    """The text of the EngineError that `action` raises. Raises AssertionError if it raises none."""
    try:
        action()
    except EngineError as error:
        return str(error)
    raise AssertionError("it is not refused with an EngineError")

"""Tiny random models with peaked distributions, so that a wrong mask, position or norm shows in the logits."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from april.workers.engines.conformance.driving import VOCABULARY

CONTEXT = 640
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "initializer_range": 0.25, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """A saved model folder, and the Hugging Face model in it as the reference."""

    folder: Path
    reference: PreTrainedModel

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.reference.state_dict())

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits, float32 [T, vocabulary], of a plain forward pass."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0].float()

    def logprobs(self, tokens: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities, float32 [T - start], of tokens[start:], from a plain forward pass."""
        every = torch.log_softmax(self.logits(tokens)[start - 1 : -1] / temperature, dim=-1)
        return every.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]

    def logprobs_under(self, weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
        """Log-probabilities, float32 [T - 1], of tokens[1:] under other weights; the output projection is tied."""
        with torch.inference_mode():
            logits = torch.func.functional_call(self.reference, weights, (torch.tensor([tokens]),)).logits[0].float()
        return torch.log_softmax(logits[:-1], dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def with_context(self, max_context: int) -> Path:
        """A copy of the model folder with `max_position_embeddings` = `max_context`."""
        folder = self.folder.with_name(f"{self.folder.name}-{max_context}")
        if not folder.exists():
            shutil.copytree(self.folder, folder)
            shape = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": max_context}))
        return folder


def build(architecture: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True))
    elif architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**COMMON, num_key_value_heads=1, tie_word_embeddings=False))
    else:
        config = LlamaConfig(
            **COMMON, num_key_value_heads=4, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
            rope_parameters=LLAMA3_ROPE,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    # Norms start at one and biases at zero, where leaving them out would go unseen.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class TinyModels:
    """models(architecture, seed) -> TinyModel, each made once; seeds differ only in the weights."""

    def __init__(self, folder: Path):
        torch.set_num_threads(1)
        self._folder = folder
        self._made: dict[tuple[str, int], TinyModel] = {}

    def __call__(self, architecture: str = "qwen3", seed: int = 0) -> TinyModel:
        if (architecture, seed) not in self._made:
            model, folder = build(architecture, seed), self._folder / f"{architecture}-{seed}"
            with quiet():
                model.save_pretrained(folder)
            self._made[architecture, seed] = TinyModel(folder, model)
        return self._made[architecture, seed]

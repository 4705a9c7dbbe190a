"""Tiny random models whose distributions are peaky, so that a wrong mask, position or norm shows in the logits."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
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

from april.workers.engines.sglang_client import SGLangClient
from april.workers.engines.sglang_server import ServerSettings, SGLangServer
from april.workers.engines.vllm_server import VLLMSettings
from april.workers.rewards.messages import RewardRules
from april.workers.rewards.pool import RewardPool

SGLANG_PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
collect_ignore = [] if VLLM_PYTHON.exists() else ["test_vllm.py"]
"""an extra, see launch/install-vllm.sh"""
VOCABULARY = 61
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 640, "initializer_range": 0.25, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """A saved folder and, for reference, the Hugging Face model that is in it."""

    folder: Path
    reference: PreTrainedModel

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.reference.state_dict())

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [T, vocabulary] of a plain forward pass."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0].float()

    def logprobs(self, tokens: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
        """float32 [T - start]: behaviour log-probabilities of tokens[start:], from a plain forward pass."""
        every = torch.log_softmax(self.logits(tokens)[start - 1 : -1] / temperature, dim=-1)
        return every.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]


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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """tiny_model(architecture, seed=0) -> TinyModel; seeds differ in the weights alone."""
    torch.set_num_threads(1)
    made = {}

    def make(architecture: str = "qwen3", seed: int = 0) -> TinyModel:
        if (architecture, seed) not in made:
            model = build(architecture, seed)
            folder = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            model.save_pretrained(folder)
            made[architecture, seed] = TinyModel(folder, model)
        return made[architecture, seed]

    return make


@pytest.fixture
def make_pool():
    """Pools of verifier processes that are closed again."""
    pools = []

    def make(processes=1, timeout_s=30.0, **rules):
        pools.append(RewardPool(processes, RewardRules(timeout_s, **rules)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def sglang_server(tiny_model, tmp_path_factory):
    """One real SGLang server for all tests that only attach to it; it holds what the last of them has loaded."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    yield from serve(ServerSettings(SGLANG_PYTHON, tiny_model().folder, log, slots=64, context_tokens=640))


@pytest.fixture(scope="session")
def vllm_server(tiny_model, tmp_path_factory):
    """The same of vLLM."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    yield from serve(VLLMSettings(VLLM_PYTHON, tiny_model().folder, log, slots=64, context_tokens=640))


def serve(settings: ServerSettings):
    server = SGLangServer(settings)
    server.spawn()
    asyncio.run(wait_for(server))
    yield server
    server.kill()


async def wait_for(server: SGLangServer) -> None:
    client = SGLangClient(server.url)
    await server.wait(client)
    await client.close()

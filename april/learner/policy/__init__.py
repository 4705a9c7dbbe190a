"""Whether the learner computes a model's architecture: the model is built small with random weights, and what the
learner makes of packed sequences is compared with transformers' own forward pass of each sequence."""

import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from april.learner.attention import NAME, PackedAttentionError
from april.learner.batch import TrainSample
from april.learner.loading import ModelError, check_files
from april.learner.model import Policy, empty_policy, load
from april.learner.packing import pack
from april.util.errors import NotTried
from april.wire.message import Version

SMALL_PARAMETERS = 20_000_000
"""Parameters up to which a model is tried as it is."""
LENGTHS = (7, 3, 41, 12)
"""Lengths of the sequences that are packed, in tokens."""
TOLERANCE = 2e-3
"""Largest difference of a log-probability (nats) that rounding in float32 explains."""
TRIED_PARAMETERS = 150_000_000
"""Parameters up to which a model that cannot be made small is tried."""
NO_MEMORY = re.compile(r"(out of|not enough|(n't|not) allocate) memory", re.IGNORECASE)
"""Regular expression for what torch's allocators say when memory is short."""


def objection(folder: Path) -> str:
    """Why the learner cannot train the model in a folder, and what to do; empty if nothing is found. Raises NotTried
    for a model too large to be tried that no small one can be made of, and where memory or disk do not suffice."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        policy = empty_policy(folder, 1.0)
        check_files(policy.lm, folder)
        return compared(small_model(folder, policy))
    except NotTried:
        raise
    except (ModelError, PackedAttentionError) as error:
        return str(error).removeprefix(f"{folder}: ")
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):
            return "its attention is of its own, which packed attention cannot take the place of; use another model"
        said = f"{type(error).__name__}: {first_line(error)}"
        if is_of_machine(error):
            raise NotTried(f"whether {folder} can be trained could not be tried: {said}") from error
        return f"the learner cannot build or compute such a model ({said}); use another"


def is_of_machine(error: Exception) -> bool:
    """Whether the machine has failed, its memory or its disk, and not the model: with an `errno`, which transformers'
    own OSErrors lack, or as safetensors or an allocator says it."""
    if isinstance(error, OSError):
        return error.errno is not None
    return isinstance(error, MemoryError | SafetensorError) or bool(NO_MEMORY.search(str(error)))


def compared(model: PreTrainedModel) -> str:
    """The objection to an architecture, by a small model of it; empty if the learner computes what it does."""
    chance = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(3, model.get_input_embeddings().weight.shape[0], (n,), generator=chance) for n in LENGTHS
    ]
    expected = [logprobs_by_transformers(model, sequence) for sequence in sequences]
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        policy = load(Path(made), 1.0)
    together, again = logprobs_of(policy, sequences), logprobs_of(policy, sequences)
    alone = torch.cat([logprobs_of(policy, [sequence]) for sequence in sequences])
    name = f"the learner does not compute models of type {model.config.model_type!r}"
    for other, where in (
        (again, "changes from pass to pass"),
        (alone, "depends on the sequences that are packed with its own"),
        (torch.cat(expected), "is another than transformers computes"),
    ):
        difference = float((together - other).abs().max())
        if not difference <= TOLERANCE:
            return f"{name}: a token's log-probability {where}, by {difference:.2g} nats; use another model"
    return ""


def logprobs_by_transformers(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Log-probabilities, float32 [T - 1], of a sequence's tokens after the first."""
    with torch.no_grad():
        logits = model(sequence[None], use_cache=False).logits[0].float()
    return torch.log_softmax(logits[:-1], dim=-1).gather(1, sequence[1:, None])[:, 0]


def logprobs_of(policy: Policy, sequences: list[Tensor]) -> Tensor:
    """The same by the learner for packed sequences, one after the other; as in training, but without a gradient."""
    samples = [
        TrainSample(
            sequence.numpy().astype(np.int32), 1, np.zeros(len(sequence) - 1, np.float32), 0.0,
            ((0, len(sequence) - 1, Version(0, 0)),),
        )
        for sequence in sequences
    ]  # fmt: skip
    with torch.no_grad():
        return policy(pack(samples, torch.device("cpu")))[0]


# --- small models -----------------------------------------------------------------------------------------------------


def small_model(folder: Path, policy: Policy) -> PreTrainedModel:
    """A model like that of a folder, small if that is large, with random weights that make its layers matter."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if parameters_of(policy) <= SMALL_PARAMETERS:
        return random_model(config)
    for dimensions in (True, False):
        with suppress(Exception):
            model = random_model(reduced(AutoConfig.from_pretrained(folder, trust_remote_code=False), dimensions))
            logprobs_by_transformers(model, torch.arange(3, 8))
            return model
    raise NotTried(f"whether {folder} can be trained could not be tried: no small model like it can be made")


def parameters_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal LM of this configuration in fp32 with random weights: norms and biases as well, so that leaving one out
    shows. Raises NotTried."""
    with torch.device("meta"):
        size = parameters_of(AutoModelForCausalLM.from_config(config))
    if size > TRIED_PARAMETERS:
        raise NotTried(f"{size:,} parameters are more than a trial is worth")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter += 0.2 * torch.randn_like(parameter)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.eval()


LAYERS, VOCABULARY, HEADS, HEAD_SIZE, INNER, EXPERTS, WINDOW = 4, 256, 4, 16, 64, 8, 8
"""Sizes of a reduced model."""


def reduced(config: PreTrainedConfig, dimensions: bool) -> PreTrainedConfig:
    """A configuration with the same features and fewer layers, tokens and experts, and short windows; with
    `dimensions`, also with fewer and smaller heads."""
    layers = next((n for n in (value_of(config, "num_hidden_layers"), value_of(config, "n_layer")) if n), 0)
    kept = min(layers, max(LAYERS, layers_with_all_types(value_of(config, "layer_types"))))
    hidden, heads = value_of(config, "hidden_size"), value_of(config, "num_attention_heads")
    shared = value_of(config, "num_key_value_heads") or heads
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            reduced(value, dimensions)
        elif isinstance(value, list) and len(value) == layers:
            set_value(config, name, value[:kept])
        elif new := reduced_value(name, value, kept):
            set_value(config, name, new)
    if dimensions and hidden and heads:
        size = {"num_attention_heads": HEADS, "hidden_size": HEADS * HEAD_SIZE}
        size |= {} if value_of(config, "qk_rope_head_dim") else {"head_dim": HEAD_SIZE}
        size["num_key_value_heads"] = HEADS if shared == heads else min(shared, HEADS // 2)
        for name, value in size.items():
            if value_of(config, name):
                set_value(config, name, value)
    return config


def set_value(config: PreTrainedConfig, name: str, value: Any) -> None:
    with suppress(AttributeError):  # some have it as a property, of other keys
        setattr(config, name, value)


def value_of(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def layers_with_all_types(types: list[str] | None) -> int:
    """Number of first layers among which every type of layer occurs."""
    return max(types.index(kind) for kind in types) + 1 if types else 0


def reduced_value(name: str, value: Any, layers: int) -> Any:
    """A smaller value for a key of a configuration; None where it stays."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        return layers
    if name == "vocab_size":
        return min(value, VOCABULARY)
    if name.endswith("_token_id"):
        return value % VOCABULARY
    if name.endswith("intermediate_size"):
        return min(value, INNER)
    if name in ("num_experts", "num_local_experts", "n_routed_experts"):
        return min(value, EXPERTS)
    if name in ("n_group", "topk_group"):
        return 1
    if "window" in name or "chunk_size" in name:
        return min(value, WINDOW)
    return None


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]

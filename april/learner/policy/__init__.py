"""The proof of a model: its architecture, built small with random weights, is computed by the learner from packed
sequences, and compared with transformers' own forward and backward pass of each sequence."""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from april.learner import performance
from april.learner.attention import PackedAttentionError
from april.learner.batch import TrainSample
from april.learner.loading import ModelError, auto_class, check_files
from april.learner.model import Policy, choose_experts_implementation, empty_policy, load
from april.learner.packing import MicroBatch, pack
from april.learner.policy.pictures import images_of, inputs_of, packer_of, place_images
from april.learner.vision import text_model
from april.util.errors import NotTried
from april.util.text import first_line
from april.wire.message import Version

LENGTHS = (6, 72, 12)
"""Lengths of the sequences that are packed, in tokens; a model is passed all but the last one of each."""
PASSED = sum(LENGTHS) - len(LENGTHS)
TOLERANCE, ROUNDINGS = 1e-4, 4.0
"""Allowed differences of the learner's pass from transformers': of log-probabilities in nats, of gradients relative to
the largest value of their tensor. A difference is rounding if it is at most TOLERANCE, or at most ROUNDINGS times the
difference between transformers' pass and its own pass in float64. If the learner computes the same pass twice, the two
may differ by TOLERANCE at most."""
ROUNDED = 0.5
"""Largest mean difference, nats, that rounding to bfloat16 may make of log-probabilities."""
SMALL = 1e-3
"""A difference of gradients is divided by the largest value of their tensor, but by no less than this share of the
largest value of all gradients."""
ALIKE = (1e-3, 1e-5)
"""Relative tolerances, tried in turn: a module whose outputs in two passes differ by less is not named as the cause of
a difference between the passes."""
TRIED_PARAMETERS, DEEP_PARAMETERS = 100_000_000, 50_000_000
"""Limits of a tried model's number of parameters. A model is tried at its true width if that takes at most
TRIED_PARAMETERS, 5 s on a core. It then has at least LAYERS layers if that takes at most DEEP_PARAMETERS."""
NO_MEMORY = re.compile(r"(out of|not enough|(n't|not) allocate) memory", re.IGNORECASE)
"""Regular expression for what torch's allocators say when memory is short."""


def objection(folder: Path, recompute: bool = False, bf16: bool = True) -> str:
    """Why the learner cannot train the model in a folder, and what to do; empty if nothing is found. Raises NotTried
    where memory or disk do not suffice to find out. `recompute`: with recomputed activations; `bf16`: it may be
    computed in bfloat16."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        policy = empty_policy(folder, 1.0, recompute)
        performance.forward_cost(policy.lm)
        check_files(policy.lm, folder)
        model = small_model(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False), policy.lm)
        return compared(model, recompute, bf16)
    except (ModelError, PackedAttentionError) as error:
        return str(error).removeprefix(f"{folder}: ")
    except Exception as error:
        if is_of_machine(error):
            said = f"{type(error).__name__}: {first_line(error)}"
            raise NotTried(f"whether {folder} can be trained could not be tried: {said}") from error
        return f"the learner cannot build or compute such a model ({place_and_cause(error)}); use another"


def place_and_cause(error: Exception) -> str:
    """Message of an error, after the innermost of the model's modules in which it was raised."""
    layer = "".join(f"its {kind}: " for kind in layers_of(error)[-1:])
    return f"{layer}{type(error).__name__}: {first_line(error)}"


def layers_of(error: Exception) -> list[str]:
    """Classes of the model's modules in which an error was raised, the outermost first."""
    frame, found = error.__traceback__, []
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not isinstance(owner, Policy) and type(owner).__name__ not in found:
            found.append(type(owner).__name__)
        frame = frame.tb_next
    return found


def is_of_machine(error: Exception) -> bool:
    """Whether the machine has failed, its memory or its disk, and not the model: with an `errno`, which transformers'
    own OSErrors lack, or as safetensors or an allocator says it."""
    if isinstance(error, OSError):
        return error.errno is not None
    return isinstance(error, MemoryError | SafetensorError) or bool(NO_MEMORY.search(str(error)))


# --- the comparison ---------------------------------------------------------------------------------------------------


def compared(model: PreTrainedModel, recompute: bool = False, bf16: bool = True) -> str:
    """The objection to an architecture, found on a small model of it; empty if the learner's pass equals transformers'
    and, with `bf16`, comes near it in bfloat16."""
    chance = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(3, model.get_input_embeddings().weight.shape[0], (n,), generator=chance) for n in LENGTHS
    ]
    place_images(model, sequences)
    factors = torch.randn(PASSED, generator=chance)

    def by_transformers() -> Tensor:
        return torch.cat([logprobs_by_transformers(model, each) for each in sequences])

    theirs = Pass(model, by_transformers, factors)
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        policy = load(Path(made), 1.0, recompute)
    packed = Pass(policy.lm, lambda: logprobs_of(policy, sequences), factors)
    with torch.no_grad():
        again = Pass(policy.lm, lambda: logprobs_of(policy, sequences))
        alone = Pass(policy.lm, lambda: torch.cat([logprobs_of(policy, [each]) for each in sequences]))

    @cache
    def rounding() -> dict[str, float]:
        model.set_experts_implementation("eager")  # the others take no float64
        return theirs.distances(Pass(model.double(), by_transformers, factors))

    for other, what in (
        (again, "changes from pass to pass"),
        (alone, "depends on the sequences that are packed with its own"),
        (theirs, "is another than transformers computes"),
    ):
        for name, distance in packed.distances(other).items():
            if not distance <= TOLERANCE and (other is again or not distance <= ROUNDINGS * rounding()[name]):
                return f"{packed.culprit(name, other)} {what}, by {distance:.2g}; use another model"
    return rounded(policy, sequences) if bf16 else ""


def rounded(policy: Policy, sequences: list[Tensor]) -> str:
    """Why the policy cannot be computed in bfloat16; empty if its log-probabilities are near those in fp32. As under
    FSDP, its parameters and the inputs of its layers become bfloat16, in place, and buffers keep their dtype."""
    short = [each for each in sequences if len(each) < max(LENGTHS)]
    try:
        with torch.no_grad():
            exact = logprobs_of(policy, short)
        choose_experts_implementation(policy.lm, torch.bfloat16)
        policy.zero_grad()
        for parameter in policy.parameters():
            parameter.data = parameter.data.bfloat16()
        for layer in text_model(policy.lm).layers:
            layer.register_forward_pre_hook(in_bf16, with_kwargs=True)
        with torch.no_grad():
            distance = float((logprobs_of(policy, short) - exact).abs().mean())
        few = min(short, key=len)  # a processor without bfloat16 takes half a second for each token of a backward pass
        logprobs_of(policy, [few]).sum().backward()
        said = "" if distance <= ROUNDED else f"a log-probability is {distance:.2g} nats from that in fp32"
    except Exception as error:
        if is_of_machine(error):
            raise
        said = place_and_cause(error)
    why = "the learner cannot compute such a model in bfloat16, as on accelerators"
    return said and f'{why} ({said}); use another, or set learner.compute = "fp32"'


def in_bf16(layer: nn.Module, arguments: tuple, options: dict) -> Any:
    """Forward pre-hook of a layer, with keyword arguments: returns the layer's inputs (arguments, options) with their
    floating-point tensors converted to bfloat16."""
    return pytree.tree_map_only(
        Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, (arguments, options)
    )


class Pass:
    """A pass of a causal LM over all sequences, which records the inputs and outputs of each of its modules."""

    def __init__(self, lm: nn.Module, compute: Callable[[], Tensor], factors: Tensor | None = None):
        """Makes the pass. `compute`: passes sequences through `lm` and returns the log-probabilities of their K tokens,
        [K]. `factors`, [K]: weights of these in a sum, whose gradients by `lm`'s parameters become `gradients`; None:
        no backward pass."""
        self.lm, self.inputs, self.outputs = lm, dict[str, list[Tensor]](), dict[str, list[Tensor]]()
        lm.zero_grad()
        with self.recorded():
            self.logprobs = compute()
        self.gradients: dict[str, Tensor] = {}
        if factors is not None:
            (self.logprobs * factors).sum().backward()
            self.gradients = {name: each.grad for name, each in lm.named_parameters() if each.grad is not None}
        self.logprobs = self.logprobs.detach()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        def record(name: str) -> Callable:
            def hook(module: nn.Module, arguments: tuple, options: dict, output: Any) -> None:
                self.inputs.setdefault(name, []).extend(first_values([*arguments, *options.values()]))
                self.outputs.setdefault(name, []).extend(first_values(output))

            return hook

        hooks = [
            module.register_forward_hook(record(name), with_kwargs=True) for name, module in self.lm.named_modules()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def distances(self, other: "Pass") -> dict[str, float]:
        """Largest differences between two passes: of log-probabilities (nats) under the name "", and of each gradient,
        relative to its largest value, under its parameter's name."""
        found = {"": largest(self.logprobs - other.logprobs)}
        most = max(map(largest, other.gradients.values()), default=0.0)
        for name, theirs in reversed(other.gradients.items()):  # the first is nearest to its cause
            ours = self.gradients.get(name, torch.zeros(()))
            found[name] = largest(ours - theirs) / max(largest(theirs), SMALL * most)
        return found

    def culprit(self, name: str, other: "Pass") -> str:
        """Words for the module that causes a difference from another pass: for a gradient the module of its parameter
        `name`, otherwise the first module whose outputs differ although its inputs agree."""
        if name:
            return f"the gradient of {name}, of its {self.place(name.rpartition('.')[0])} or of what follows,"
        for tolerance, name in product(ALIKE, self.outputs):
            if not alike(self.outputs[name], other.outputs.get(name, []), tolerance):
                while name and not (name in self.inputs and alike(self.inputs[name], other.inputs[name], tolerance)):
                    name = name.rpartition(".")[0]
                return f"a token's log-probability, by its {self.place(name)},"
        return "a token's log-probability"

    def place(self, name: str) -> str:
        """Words for where the module `name` is in the model: its class, its name, and the class of the layer that it is
        in."""
        layer = re.match(r".*?\.\d+(?=\.)", name)
        inside = f", in a {self.kind_of(layer[0])}" if layer else ""
        return f"{self.kind_of(name)} ({name or 'the model'}{inside})"

    def kind_of(self, name: str) -> str:
        return type(self.lm.get_submodule(name)).__name__


def largest(values: Tensor) -> float:
    """The largest absolute value, NaN if there is one, in one pass without a copy."""
    low, high = values.aminmax()
    return max(-float(low), float(high))


def first_values(values: Any) -> list[Tensor]:
    """A list of one tensor, the first floating-point one among a module's inputs or outputs, detached, with a row for
    each token; [] if there is none."""
    values = values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else [values]
    floats = (each.detach() for each in values if isinstance(each, Tensor) and each.is_floating_point() and each.ndim)
    return [each[0] if each.shape[0] == 1 else each for each in floats][:1]


def alike(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> bool:
    """Whether two passes' values of a module agree up to a relative tolerance, however many calls they are from; True
    if they cannot be compared, since they do not have one row for each token."""
    try:
        one, other = torch.cat(ours), torch.cat(theirs)
    except RuntimeError:
        return True
    if len(one) != PASSED or one.shape != other.shape:
        return True
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def logprobs_by_transformers(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Log-probabilities, float32 [T - 1], of a sequence's tokens after the first."""
    logits = model(sequence[None, :-1], use_cache=False, **inputs_of(model, sequence)).logits[0].float()
    return torch.log_softmax(logits, dim=-1).gather(1, sequence[1:, None])[:, 0]


def logprobs_of(policy: Policy, sequences: list[Tensor]) -> Tensor:
    """Log-probabilities, float32 [K], of packed sequences' tokens after the first, as the learner computes them in
    training."""
    return policy(packed_sequences(policy.lm, sequences))[0]


def packed_sequences(lm: nn.Module, sequences: list[Tensor]) -> MicroBatch:
    """A micro-batch, on the CPU, that packs the sequences (token ids, int64 [T] each) into one row; the targets are all
    tokens of each sequence but its first."""
    samples = [
        TrainSample(
            sequence.numpy().astype(np.int32), 1, np.zeros(len(sequence) - 1, np.float32), 0.0,
            ((0, len(sequence) - 1, Version(0, 0)),), images=images_of(lm, sequence),
        )
        for sequence in sequences
    ]  # fmt: skip
    images = packer_of(lm) if any(sample.images for sample in samples) else None
    return pack(samples, torch.device("cpu"), images)


# --- small models -----------------------------------------------------------------------------------------------------

LAYERS, VOCABULARY, INNER, EXPERTS, CHOSEN, WINDOW = 2, 256, 64, 8, 2, 8
"""Sizes of a reduced model: least number of layers (with the exception in `small_model`), vocabulary, inner size of its
MLPs, experts of a layer, experts that compute a token, sliding window (tokens)."""
NARROWER = (2, 4, 8, 16, 32, 64)
"""Divisors by which a model's widths are divided for a reduced model; they are tried in this order."""
WINDOWS = re.compile(r"window(?!.*layers)|chunk_size|block_size|local_attention|index_topk|floor_scale|^original_max_")
"""Regular expression for names of configuration keys whose value is a number of tokens: that up to which a model sees,
or that from which on it computes something else."""
WIDTHS = re.compile(r"hidden_size$|_n?heads$|^n_head$|^n_embd$|embed_dim$|d_model$|d_ssm$|d_inner$|lru_width$")
"""Regular expression for names of configuration keys whose value is divided for a narrower model, which has fewer
heads, of their true size."""
ROUTED = re.compile(r"experts_per_tok|top_?k(_experts)?$|moe_topk|num_selected_experts")
"""Regular expression for names of configuration keys whose value is the number of experts that compute a token."""


def small_model(
    config: Callable[[], PreTrainedConfig], whole: nn.Module, most: int = TRIED_PARAMETERS
) -> PreTrainedModel:
    """A reduced model with the architecture of `whole` and random weights. It has the first layers, up to one of each
    kind, short windows, a small vocabulary and few experts. It has the true width if that takes at most `most`
    parameters, otherwise fewer heads of their true size, since kernels are chosen by that size alone. It has at least
    LAYERS layers, unless at its true width these exceed DEEP_PARAMETERS. `config` makes a new configuration of `whole`.
    Raises ModelError if none can be built."""
    kinds, said = depth_of(whole), f"all have more than {most:,} parameters"
    depth = max(kinds, LAYERS)
    forms = [(1, depth, min(most, DEEP_PARAMETERS)), (1, kinds, most), *((n, depth, most) for n in NARROWER)]
    for divisor, layers, room in forms:
        try:
            smaller = reduced(config(), layers, divisor)
            smaller.validate()
            if model := random_model(smaller, room):
                logprobs_by_transformers(model, torch.arange(3, 8))
                return model
        except Exception as error:
            if is_of_machine(error):
                raise
            said = f"{type(error).__name__}: {first_line(error)}"
    raise ModelError(
        f"no small model of type {config().model_type!r} can be built to prove what the learner computes ({said}); use "
        "another model"
    )


def depth_of(lm: nn.Module) -> int:
    """Least number of a model's first layers that contain a layer of every kind (`kind_of`) which the model has; 1 for
    a model without layers."""
    layers = list(getattr(text_model(lm), "layers", ()))
    kinds = [kind_of(layer) for layer in layers]
    return max([1, *(kinds.index(kind) + 1 for kind in kinds)])


def kind_of(layer: nn.Module) -> list:
    """A list that is equal for two layers of a model exactly if they are of the same kind: of each of their modules the
    name, the class, and the switches and sizes, but not the layer's index."""
    return [
        (name, type(module), key, value)
        for name, module in layer.named_modules()
        for key, value in (("", ""), *sorted(vars(module).items()))
        if value is None or (isinstance(value, bool | int | str) and not re.search(r"idx|index|layer_id", key))
    ]


@torch.no_grad()
def random_model(config: PreTrainedConfig, most: int = TRIED_PARAMETERS) -> PreTrainedModel | None:
    """A causal LM of this configuration in fp32 with random weights, norms and biases as well, so that leaving one out
    shows; None for more than `most` parameters. Norms are halved: attention over normalised queries and keys would
    otherwise choose single tokens, and rounding would decide which."""
    with torch.device("meta"):
        empty = auto_class(config).from_config(config)
    if sum(parameter.numel() for parameter in empty.parameters()) > most:
        return None
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.mul_(0.5).add_(torch.randn_like(parameter), alpha=0.2)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.eval()


def reduced(config: PreTrainedConfig, depth: int, divisor: int = 1) -> PreTrainedConfig:
    """A configuration with the same features, its first `depth` layers, a smaller vocabulary, fewer experts, short
    windows, and widths divided by `divisor`."""
    layers = next((n for key in DEPTHS if (n := getattr(config, key, None))), 0)
    is_tower = hasattr(config, "patch_size")
    depth = LAYERS if is_tower else depth
    for name, value in list(vars(config).items()):
        if is_tower and WINDOWS.search(name):
            continue  # pixels, which the images of the proof are more than
        if is_tower and name.endswith("_indexes"):
            set_value(config, name, sorted({index % depth for index in value}))
            continue
        if isinstance(value, PreTrainedConfig):
            reduced(value, depth, divisor)
        elif isinstance(value, dict):
            set_value(config, name, shortened(value, depth))
        elif isinstance(value, list) and len(value) == layers:
            set_value(config, name, value[:depth])
        elif (new := reduced_value(name, value, depth, divisor)) is not None:
            set_value(config, name, new)
    return config


def shortened(values: dict, depth: int) -> dict:
    """A copy of a dictionary in a model's configuration (such as the one about rotary positions) for a model of `depth`
    layers: values that are window lengths, also in nested dictionaries, become at most `WINDOW` tokens, and keys that
    are numbers of layers from `depth` on are left out."""
    return {
        key: shortened(value, depth) if isinstance(value, dict) else window_of(key, value) or value
        for key, value in values.items()
        if not str(key).isdigit() or int(key) < depth
    }


def set_value(config: PreTrainedConfig, name: str, value: Any) -> None:
    with suppress(AttributeError):  # some have it as a property, of other keys
        setattr(config, name, value)


DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")


def reduced_value(name: str, value: Any, depth: int, divisor: int) -> int | None:
    """A smaller value for the key `name` of a configuration; None if its value stays. `depth`: number of layers to
    keep. `divisor`: what widths are divided by."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name in DEPTHS:
        return min(value, depth)
    if name.startswith("vocab_size"):
        return min(value, VOCABULARY)
    if name.endswith("_token_id"):
        return value % VOCABULARY
    if name.endswith("intermediate_size"):
        return min(value, INNER)
    if name in ("num_experts", "num_local_experts", "n_routed_experts"):
        return min(value, EXPERTS)
    if ROUTED.search(name):
        return min(value, CHOSEN)
    if name in ("n_group", "topk_group"):
        return 1
    return max(1, value // divisor) if WIDTHS.search(name) else window_of(name, value)


def window_of(name: Any, value: Any) -> int | None:
    """The window of a reduced model, at most `WINDOW` tokens, for a key of a configuration whose value is a window's
    length in tokens; None for another key."""
    is_window = isinstance(name, str) and WINDOWS.search(name) and type(value) is int
    return min(value, WINDOW) if is_window else None

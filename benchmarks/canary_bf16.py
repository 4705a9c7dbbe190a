"""Proof of weights in bfloat16: what it misses, and when it cries wolf, on five models and on scores alone.

Four of the models are random, with logits and attention as sharp as those of trained ones; the fifth is the
quickstart's policy. Learner and engine compute in bfloat16. The embedded engine compares its tensors, too. It knows no
mixture of experts: there a forward pass of transformers stands in for a server, which only scores.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from common import Row
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from april.config import Config
from april.launch.sft.warm_start import make_policy
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.trainer import Trainer
from april.weights.canary import SUSPECT, Canary
from april.weights.receiver import StagedWeights
from april.wire.message import Version
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.weight_loading import WeightCheck, WrongWeights

Weights = dict[str, torch.Tensor]

VOCABULARY, WIDTH, LAYERS, CONTEXT = 1024, 128, 4, 640
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 384, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}  # fmt: skip
KINDS = {
    "qwen3": {}, "llama": {"tie_word_embeddings": False}, "qwen2": {}, "qwen3_moe": EXPERTS, "quickstart": None,
}  # fmt: skip
"""Models: the type of each, and what its configuration has beyond SHAPE; None: the quickstart's policy."""
HEAD_GAIN, ATTENTION_GAIN = 6.0, 4.0
"""Factors of a random model's last norm, and of its queries and keys where these have no norm."""
LR = 5e-4
VERSIONS = 10
"""Versions of the run in which faults are planted, with the first one."""
VERSIONS_RIGHT = 6
"""Versions of each other run, all of them right."""
LONG = 60
"""Versions of the run in which a head and a layer stay those of version 0."""
PATIENCE = 8
"""Versions within which a fault is to be found that moves the text by more than the band."""
SEEDS = 10
LAYER = f"model.layers.{LAYERS // 2}."


# --- models and engines ----------------------------------------------------------------------------------------------


def make_model(kind: str, folder: Path) -> Path:
    """Write a Hugging Face folder in bfloat16; returns it."""
    extra = KINDS[kind]
    if extra is None:
        return make_policy(folder, log=lambda line: None)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SHAPE | extra))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.fill_(HEAD_GAIN)
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(1 if "qwen3" in kind else ATTENTION_GAIN)
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder)
    return folder


class PlainEngine:
    """A forward pass of transformers in bfloat16, which scores as an engine does; its weights go through a folder."""

    dtype = "bfloat16"

    def __init__(self, folder: Path):
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "config.json").write_bytes((folder / "config.json").read_bytes())

    def load_weights(self, version: Version, tensors: Weights) -> None:
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, self.folder / "model.safetensors"
        )
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def score(self, tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens.astype(np.int64))
        logprobs = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, ids[1:, None])[:, 0].numpy()


def make_engine(kind: str, folder: Path) -> TorchEngine | PlainEngine:
    """The embedded engine, which on a CPU would compute in float32; transformers where that has no such model."""
    if kind == "qwen3_moe":
        return PlainEngine(folder)
    engine = TorchEngine(folder, 2, CONTEXT)
    engine.shape = replace(engine.shape, dtype=torch.bfloat16)
    return engine


# --- faults ----------------------------------------------------------------------------------------------------------


def with_change(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: change(weights[name])} if name in weights else weights


def exchanged(first: str, second: str) -> Callable[[Weights], Weights]:
    """Every tensor with one of two parts in its name is the other's."""

    def other(name: str) -> str:
        return name.replace(first, second) if first in name else name.replace(second, first)

    return lambda weights: {name: weights[other(name)] for name in weights}


def of_layer(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: {
        name: change(tensor) if name.startswith(LAYER) and part in name else tensor for name, tensor in weights.items()
    }


STRUCTURAL: dict[str, Callable[[Weights], Weights]] = {
    "a norm + 10 %": with_change(f"{LAYER}input_layernorm.weight", lambda t: 1.1 * t),
    "the other norm + 10 %": with_change(f"{LAYER}post_attention_layernorm.weight", lambda t: 1.1 * t),
    "the last norm + 10 %": with_change("model.norm.weight", lambda t: 1.1 * t),
    "two layers exchanged": exchanged("model.layers.0.", "model.layers.1."),
    "gate and up exchanged": exchanged(f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"),
    "no attention in a layer": of_layer("o_proj", torch.zeros_like),
    "an output projection transposed": of_layer("o_proj.weight", lambda t: t.t().contiguous().view(t.shape)),
    "heads of keys exchanged": of_layer("k_proj", lambda t: t.roll(t.shape[0] // 2, 0)),
    "heads of values exchanged": of_layer("v_proj", lambda t: t.roll(t.shape[0] // 2, 0)),
    "no biases in a layer": of_layer("bias", torch.zeros_like),
    "8 bits": lambda weights: {n: t.to(torch.float8_e4m3fn).to(t.dtype) for n, t in weights.items()},
    "embedding shifted by a row": with_change("model.embed_tokens.weight", lambda t: t.roll(1, 0)),
    "two experts exchanged": exchanged(f"{LAYER}mlp.experts.0.", f"{LAYER}mlp.experts.1."),
    "an expert zeroed": of_layer("experts.2.", torch.zeros_like),
    "routes exchanged": of_layer("mlp.gate.weight", lambda t: t.roll(1, 0)),
}
"""Faults of the weights that an engine may have from its first version on."""


def last_quarter(old: Weights, new: Weights) -> Weights:
    """The last quarter of the bytes is old."""
    total, seen, mixed = sum(tensor.numel() for tensor in new.values()), 0, {}
    for name, tensor in new.items():
        mixed[name] = tensor if seen < 0.75 * total else old[name]
        seen += tensor.numel()
    return mixed


def half_of_the_rows(old: Weights, new: Weights) -> Weights:
    return {name: torch.cat([old[name][: len(t) // 2], t[len(t) // 2 :]]) for name, t in new.items()}


def head(old: Weights, new: Weights) -> Weights:
    """An untied head is old; of tied ones the embedding, which is the head."""
    name = "lm_head.weight" if "lm_head.weight" in new else "model.embed_tokens.weight"
    return new | {name: old[name]}


def layer(old: Weights, new: Weights) -> Weights:
    return {name: old[name] if name.startswith(LAYER) else tensor for name, tensor in new.items()}


def one_tensor(old: Weights, new: Weights) -> Weights:
    name = f"{LAYER}self_attn.q_proj.weight"
    return new | {name: old[name]}


STALE: dict[str, Callable[[Weights, Weights], Weights]] = {
    "all": lambda old, new: old,
    "half of the rows": half_of_the_rows,
    "the last quarter of the bytes": last_quarter,
    "the head": head,
    "a layer": layer,
    "a tensor": one_tensor,
}
"""Parts that an engine may hold of another version: part(weights of that version, weights of this one)."""


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What the runs have shown, by row."""

    missed: list[float] = field(default_factory=list)
    """1 for each structural fault that passed with the version it came with, else 0."""
    by_scores: list[float] = field(default_factory=list)
    """The same where tensors are not compared."""
    late: list[float] = field(default_factory=list)
    """1 for each stale part that moved the text by more than the band for `PATIENCE` versions unseen, else 0."""
    uncompared: list[float] = field(default_factory=list)
    """1 for each fault in at least 1 % of a tensor's values that a comparison of tensors passed, else 0."""
    alarms: list[float] = field(default_factory=list)
    """False alarms of each run."""
    noise: list[float] = field(default_factory=list)
    """Mean difference of right weights, as a multiple of the measured rounding."""
    unseen: list[str] = field(default_factory=list)
    """Descriptions of all faults that no score has shown."""


@dataclass(frozen=True)
class Published:
    version: Version
    tensors: Weights
    canary: Canary

    def staged(self) -> StagedWeights:
        return StagedWeights(self.version, self.tensors, 0.0, canary=self.canary, digest=str(self.version))


def versions(folder: Path, seed: int, count: int) -> Iterator[Published]:
    """The versions of a run that trains on batches of random tokens and rewards."""
    trainer = Trainer(config_of(folder), torch.device("cpu"))
    vocabulary = trainer.backend.lm.get_input_embeddings().num_embeddings
    for step in range(count):
        canary = trainer.canary()
        tensors = {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in trainer.weights().items()}
        yield Published(Version(0, step), tensors, canary)
        if step < count - 1:
            trainer.step(random_batch(step, np.random.default_rng([seed, step]), vocabulary))


def config_of(folder: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": folder},
            "data": {"path": "none.jsonl", "max_prompt_tokens": 127},
            "sampling": {"max_response_tokens": 512},
            "run": {"dir": folder.parent},
            "learner": {"ranks": 1, "lr": LR, "compute": "bf16", "device": "cpu", "microbatch_tokens": 8192},
        }
    )


def random_batch(step: int, rng: np.random.Generator, vocabulary: int) -> TrainingBatch:
    def sample() -> TrainSample:
        tokens = rng.integers(0, vocabulary, 72).astype(np.int32)
        logprobs = np.full(64, -np.log(vocabulary), np.float32)
        return TrainSample(tokens, 8, logprobs, float(rng.integers(2)), ((0, 64, Version(0, step)),))

    return TrainingBatch(step, [[sample() for _ in range(8)] for _ in range(2)])


def passes(engine: TorchEngine | PlainEngine, check: WeightCheck, published: Published, held: Weights) -> bool:
    """Whether an engine that holds these tensors passes for one with the published version, by its scores."""
    engine.load_weights(published.version, held)
    try:
        check.judge(published.staged(), published.canary, engine.score(published.canary.text), engine.dtype)
    except WrongWeights:
        return False
    return True


def apart(engine: TorchEngine | PlainEngine, published: Published) -> float:
    """Mean difference between learner and engine as a multiple of the measured rounding."""
    differences = np.abs(engine.score(published.canary.text) - published.canary.logprobs)
    return float(differences.mean()) / published.canary.rounding


def differ_visibly(held: Weights, sent: Weights) -> bool:
    """Whether at least 1 % of the values of a tensor differ."""
    return any((held[name] != sent[name]).float().mean() >= 0.01 for name in sent)


def compares_equal(
    engine: TorchEngine | PlainEngine, published: Published, held: Weights, found: Found | None = None
) -> bool:
    """Whether a comparison of tensors, if the engine makes one, passes an engine that holds these."""
    if not isinstance(engine, TorchEngine):
        return True
    engine.load_weights(published.version, held)
    equal = not engine.differing(published.tensors)
    if found and differ_visibly(held, published.tensors):
        found.uncompared.append(float(equal))
    return equal


def plant_structural(kind: str, engine: TorchEngine | PlainEngine, published: Published, found: Found) -> None:
    """Each structural fault in a version that is the engine's first."""
    for name, fault in STRUCTURAL.items():
        held = fault(published.tensors)
        if all(torch.equal(held[each], tensor) for each, tensor in published.tensors.items()):
            continue  # this model has no such part
        passed = passes(engine, WeightCheck(), published, held)
        if passed:
            found.unseen.append(f"{kind}: {name}, {apart(engine, published):.2f} of rounding")
        found.by_scores.append(float(passed))
        found.missed.append(float(passed and compares_equal(engine, published, held, found)))


def plant_rope_base(kind: str, folder: Path, published: Published, found: Found) -> None:
    """A base of the rotary embedding that is half as large again, from the start; only scores can show it."""
    engine = make_engine(kind, folder)
    factors = 1.5 ** -(torch.arange(0, 1, 2 / SHAPE["head_dim"]))
    if isinstance(engine, PlainEngine):
        return
    angles = torch.outer(torch.arange(len(engine._rotations)).float(), engine.shape.inv_freq.float() * factors)
    engine._rotations.copy_(torch.polar(torch.ones_like(angles), angles))
    passed = passes(engine, WeightCheck(), published, published.tensors)
    found.by_scores.append(float(passed))
    found.missed.append(float(passed))
    if passed:
        found.unseen.append(f"{kind}: rope base x 1.5, {apart(engine, published):.2f} of rounding")


def plant_stale(
    kind: str, engine: TorchEngine | PlainEngine, run: list[Published], found: Found, of_start: bool
) -> None:
    """Each part stays that of version 0, or is always that of the version before. It counts once it has moved the text
    by more than the band in `PATIENCE` versions."""
    for name, part in STALE.items():
        check, moved, seen = WeightCheck(), 0, False
        for before, published in zip([run[0], *run], run, strict=False):
            held = part(run[0].tensors if of_start else before.tensors, published.tensors)
            if not passes(engine, check, published, held):
                seen = True
                break
            moved += apart(engine, published) > SUSPECT
            compares_equal(engine, published, held, found)
        found.late.append(float(not seen and moved >= PATIENCE))
        if not seen:
            kept = "of version 0" if of_start else "of the version before"
            found.unseen.append(
                f"{kind}: {name} {kept} in {len(run)} versions, {apart(engine, published):.2f} of rounding"
            )


def rows(folder: Path, quick: bool) -> Iterator[Row]:
    found = Found()
    for kind in KINDS:
        model = make_model(kind, folder / kind)
        engine = make_engine(kind, model)
        for seed in range(1 if quick else SEEDS):
            run = list(versions(model, seed, VERSIONS if seed == 0 else VERSIONS_RIGHT))
            check = WeightCheck()
            found.alarms.append(float(sum(not passes(engine, check, each, each.tensors) for each in run)))
            found.noise.append(apart(engine, run[-1]))
            if seed == 0:
                plant_structural(kind, engine, run[0], found)
                plant_structural(kind, engine, run[-1], found)
                plant_rope_base(kind, model, run[0], found)
                plant_stale(kind, engine, run, found, of_start=False)
        if not quick:
            plant_stale(kind, engine, list(versions(model, 99, LONG)), found, of_start=True)
    yield Row("canary_missed_bf16", found.missed, "faults", of=sum)
    yield Row("canary_missed_by_scores_bf16", found.by_scores, "faults", of=sum)
    yield Row("canary_late_bf16", found.late, "faults", of=sum)
    yield Row("canary_uncompared_bf16", found.uncompared, "faults", of=sum)
    yield Row("canary_false_alarms_bf16", found.alarms, "alarms", of=sum)
    yield Row("canary_noise_over_rounding_bf16", found.noise, "ratio", of=max)
    print("\n".join(["not seen by scores:", *found.unseen]), flush=True)

"""The quickstart policy: a small Qwen3, made once per recipe and seed by a warm start on arithmetic.

The warm start is supervised training on clean demonstrations, then on noisy ones. RL selects among the behaviours a
policy has and does not create skill, so the skill is trained first. The noisy demonstrations add the errors that RL
removes, and their rate sets the reward that RL starts from.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import orjson
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from april.config import ConfigError
from april.data.arithmetic import ALPHABET, CLEAN, Noise, demonstration, draw_task, draw_times

# --- architecture -----------------------------------------------------------------------------------------------------

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = {token: i for i, token in enumerate((PAD, EOS, *ALPHABET))}
CONTENTS_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that concatenates message contents without role tokens: the prompt then has the form of the
eight-character steps of which the response consists."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    characters = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CONTENTS_ONLY,
        clean_up_tokenization_spaces=False,
    )


def build_model(hidden_size: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random fp32 weights drawn from the seed; head dimension 32, half as many key-value heads."""
    heads = hidden_size // 32
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_policy(model: Qwen3ForCausalLM, out_dir: Path) -> None:
    """Write model and tokeniser as an ordinary Hugging Face folder."""
    model.save_pretrained(out_dir)
    build_tokenizer().save_pretrained(out_dir)


# --- Muon -------------------------------------------------------------------------------------------------------------

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, chosen for the steepest slope at zero (Jordan et al. 2024,
kellerjordan.github.io/posts/muon)."""


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with an orthogonalised update (Jordan et al. 2024); every parameter is a float32 matrix."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum=0.95, iterations=5):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "iterations": iterations})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[matrix]
                if not state:
                    state["average"] = torch.zeros_like(matrix)
                average = state["average"]
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalised(matrix.grad.lerp(average, group["momentum"]), group["iterations"])
                shape_scale = max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5
                matrix.sub_(update, alpha=group["lr"] * shape_scale)


def orthogonalised(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Approximately U V^T of the singular value decomposition U S V^T: all singular values become about 1."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.size(0) <= matrix.size(1) else wide.T


# --- warm start -------------------------------------------------------------------------------------------------------

PAD_ID, EOS_ID = VOCABULARY[PAD], VOCABULARY[EOS]
EASY_TIMES = (2, 3, 4)
HABITS = Noise(p_short=0.44, p_err=0.015, p_stop=0.012, p_skip=0.009)
"""Error probabilities of the noisy demonstrations, chosen so that RL starts at a reward of about 0.5 at temperature 1.
The trained policy makes three quarters of the shortcuts that the demonstrations contain."""


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of a warm start; recipe and seed determine the policy."""

    hidden_size: int = 128
    layers: int = 3
    easy_steps: int = 60
    """Optimizer steps on easy tasks, whose multiplier K (`ArithmeticTask.times`) is 2, 3 or 4."""
    clean_steps: int = 400
    """Optimizer steps on tasks of every multiplier K, with error-free demonstrations."""
    noisy_steps: int = 140
    """Optimizer steps on tasks of every multiplier K, with errors in the demonstrations (`noise`)."""
    noise: Noise = HABITS
    muon_lr: float = 0.02
    """Peak learning rate of the matrices inside the layers (Muon)."""
    adamw_lr: float = 3e-3
    """Peak learning rate of embeddings and norms (AdamW)."""
    warmup_steps: int = 30
    """Optimizer steps of linear learning-rate warm-up."""
    final_lr_share: float = 0.1
    """Final learning rate as a share of the peak, reached linearly at the last step."""
    average_decay: float = 0.98
    """Decay of the moving average of the weights over the noisy steps; the average is the policy."""
    batch_tokens: int = 1024
    """Tokens per batch, padding included."""
    revision: int = 2
    """Revision of the warm-start code, increased whenever the same recipe gives another policy."""

    @property
    def steps(self) -> int:
        return self.easy_steps + self.clean_steps + self.noisy_steps


def warm_start(model: Qwen3ForCausalLM, recipe: Recipe, seed: int, log: Callable[[str], None]) -> None:
    """Train the model in place for exactly `recipe.steps` steps. Reproducible on one CPU thread."""
    started = time.monotonic()
    optimizers = build_optimizers(model, recipe)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(recipe, step)) for optimizer in optimizers
    ]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.average_decay))
    for step, (tokens, targets) in enumerate(batches(recipe, seed), start=1):
        loss = token_loss(model, tokens, targets)
        (loss.sum() / recipe.batch_tokens).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step > recipe.steps - recipe.noisy_steps:
            average.update_parameters(model)
        if step % 60 == 0 or step == recipe.steps:
            mean_loss = loss.sum().item() / (targets != PAD_ID).sum().item()
            log(f"warm start: step {step}/{recipe.steps}, loss {mean_loss:.3f}, {time.monotonic() - started:.0f} s")
    if recipe.noisy_steps:
        model.load_state_dict(average.module.state_dict())


def build_optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, which learn in a fifth of AdamW's steps; AdamW for embeddings and
    norms."""
    inner = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    inner_ids = {id(parameter) for parameter in inner}
    outer = [parameter for parameter in model.parameters() if id(parameter) not in inner_ids]
    return [
        Muon(inner, lr=recipe.muon_lr),
        torch.optim.AdamW(outer, lr=recipe.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def token_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each token (nats), [B * T]; zero where there is no target."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD_ID, reduction="none")


def lr_share(recipe: Recipe, step: int) -> float:
    """Learning rate of a step as a share of the peak: linear warm-up, then linear decay."""
    decayed = 1.0 - (1.0 - recipe.final_lr_share) * step / recipe.steps
    return min((step + 1) / recipe.warmup_steps, decayed)


def batches(recipe: Recipe, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All batches of a warm start: (tokens, targets), int64 [B, T] each, padded right; prompt positions have no
    target."""
    random = Random(seed)
    phases = (
        (recipe.easy_steps, CLEAN, EASY_TIMES),
        (recipe.clean_steps, CLEAN, None),
        (recipe.noisy_steps, recipe.noise, None),
    )
    for steps, noise, allowed_times in phases:
        stream = phase_batches(recipe, random, noise, allowed_times)
        for _ in range(steps):
            yield padded(next(stream))


def phase_batches(
    recipe: Recipe, random: Random, noise: Noise, allowed_times: tuple[int, ...] | None
) -> Iterator[list[tuple[str, str]]]:
    """Endless stream of batches of similar length, in shuffled order, from pools of 256 demonstrations."""
    while True:
        pool = []
        for _ in range(256):
            times = random.choice(allowed_times) if allowed_times else draw_times(random)
            task = draw_task(random, "train", times)
            pool.append((task.prompt, demonstration(task, noise, random)))
        cut = batches_of_similar_length(pool, recipe.batch_tokens)
        random.shuffle(cut)
        yield from cut


def batches_of_similar_length(pool: list[tuple[str, str]], batch_tokens: int) -> list[list[tuple[str, str]]]:
    """Split (prompt, response) pairs, sorted by length, into batches of at most `batch_tokens` padded tokens."""
    cut: list[list[tuple[str, str]]] = [[]]
    for example in sorted(pool, key=text_tokens):
        if cut[-1] and text_tokens(example) * (len(cut[-1]) + 1) > batch_tokens:
            cut.append([])
        cut[-1].append(example)
    return cut


def text_tokens(example: tuple[str, str]) -> int:
    prompt, response = example
    return len(prompt) + len(response)


def padded(examples: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets) of (prompt, response) pairs, int64 [B, T] each; PAD_ID where there is no target."""
    width = max(map(text_tokens, examples))
    tokens = torch.full((len(examples), width), PAD_ID)
    targets = torch.full((len(examples), width), PAD_ID)
    for i, (prompt, response) in enumerate(examples):
        ids = torch.tensor([*map(VOCABULARY.__getitem__, prompt + response), EOS_ID])
        tokens[i, : len(ids) - 1] = ids[:-1]
        targets[i, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return tokens, targets


# --- policy folder ----------------------------------------------------------------------------------------------------

Model = TypeVar("Model", bound=PreTrainedModel)
RECORD = "warm_start.json"
"""Name of the JSON file in a finished policy folder with the recipe, the seed and the training time in seconds."""


def make_policy(
    out_dir: str | Path, seed: int = 0, recipe: Recipe | None = None, log: Callable[[str], None] = print
) -> Path:
    """Return the folder of the policy; creates it if it does not exist, in about a minute on one core.

    The seed determines initial weights and demonstrations. `out_dir` appears only once it is complete. Raises
    ConfigError if `out_dir` holds something else.
    """
    out_dir, recipe = Path(out_dir), recipe or Recipe()
    made_from = {"recipe": asdict(recipe), "seed": seed}

    def train() -> Qwen3ForCausalLM:
        model = build_model(recipe.hidden_size, recipe.layers, seed)
        warm_start(model, recipe, seed, log)
        return model

    return make_once(out_dir, made_from, train, save_policy, log)


def make_once(
    out_dir: Path,
    made_from: dict[str, Any],
    train: Callable[[], Model],
    save: Callable[[Model, Path], None],
    log: Callable[[str], None],
) -> Path:
    """Return the folder of a policy; if it does not exist, creates it by `train` and `save`, with a record of what it
    was made from. `out_dir` appears only once it is complete. Raises ConfigError if `out_dir` holds something else."""
    if holds(out_dir, made_from):
        return out_dir
    refuse_foreign(out_dir)
    started = time.monotonic()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        with one_thread():
            model = train()
        transformers.utils.logging.disable_progress_bar()
        save(model, draft)
        record = {**made_from, "parameters": model.num_parameters(), "seconds": round(time.monotonic() - started, 1)}
        (draft / RECORD).write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2))
        draft.chmod(0o755)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        draft.rename(out_dir)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    log(f"policy: {record['parameters']} parameters in {out_dir}, {record['seconds']:.0f} s")
    return out_dir


def holds(out_dir: Path, made_from: dict) -> bool:
    """Whether `out_dir` holds a finished policy made from this recipe and seed."""
    record = out_dir / RECORD
    if not record.is_file():
        return False
    found = orjson.loads(record.read_bytes())
    return {key: found.get(key) for key in made_from} == made_from


def refuse_foreign(out_dir: Path) -> None:
    """Raises ConfigError unless `out_dir` is missing, empty, or a folder that `make_policy` made."""
    if out_dir.exists() and not (out_dir / RECORD).is_file() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} holds something else than a quickstart policy; give an empty or a new folder")


@contextmanager
def one_thread():
    """Context manager under which torch uses one CPU thread, for reproducible floating-point sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

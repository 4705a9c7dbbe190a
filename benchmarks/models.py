"""Which families of transformers' causal models April trains, and whether it computes one wrongly without refusing it.

Every family of the installed transformers is built small, with random weights, and given to the check of the dry run.
What it passes is then computed by the learner from packed sequences, and log-probabilities and gradients are compared
with those of plain transformers, a sequence at a time. `--page` writes the families to `docs/reference/models.md`.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import transformers
from common import APRIL, ROOT, Row, execute, parser, python_path, report
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from april.config import Config
from april.launch.findings import Findings
from april.learner.backends import BACKENDS
from april.learner.loading import ModelError
from april.learner.model import load
from april.learner.policy import logprobs_by_transformers, logprobs_of, small_model
from april.learner.policy.arithmetic import EOS, PAD, VOCABULARY, build_tokenizer
from april.observe.report.run_folder import read_records

PAGE = ROOT / "docs" / "reference" / "models.md"
QUICK = ("llama", "gpt_oss", "qwen3_next", "xglm", "bert")
LENGTHS = (30, 5, 2, 71, 19)
"""Lengths of the compared sequences (tokens)."""
PARAMETERS = 5_000_000
"""Parameters that a family's small model may have, unless there is none of so few."""
EXACT, WRONG = 1e-5, 2e-3
"""Largest differences, of log-probabilities (nats) and of gradients relative to the largest of their tensor, up to
which a family is computed exactly, and from which on wrongly."""
KEYS: dict[str, dict] = {
    "deepseek_v2": {"num_experts_per_tok": 2}, "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128}, "ministral": {"head_dim": 128}, "nemotron": {"num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}  # fmt: skip
"""Keys of families whose default configuration cannot be built."""
TRAINS, REFUSED, OFF, UNBUILT = "trains", "is refused", "is computed wrongly", "cannot be built"


@dataclass(frozen=True)
class Outcome:
    kind: str
    said: str = ""
    """Why, in words."""
    apart: float = 0.0
    """Largest difference of what is trained from plain transformers."""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--families", help="only these, with commas between")
    arguments.add_argument("--page", action="store_true", help="write the page of the families")
    arguments.add_argument("--pictures", action="store_true", help="only the task in pictures, ten minutes")
    given = arguments.parse_args()
    if given.pictures:
        return report(pictures(given.quick), given.json)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    names = given.families.split(",") if given.families else QUICK if given.quick else families()
    outcomes = {}
    for name in names:
        outcomes[name] = outcome_of(name)
        print(f"{name:26} {outcomes[name].kind:20} {outcomes[name].apart:.1e} {outcomes[name].said}", flush=True)
    if given.page:
        PAGE.write_text(page(outcomes))
    rows = [*counts(outcomes), proof_s(repeats=1 if given.quick else 3)]
    if not given.families:
        rows.append(families_end_to_end(END_TO_END[:2] if given.quick else END_TO_END))
    report(rows, given.json, {name: vars(outcome) for name, outcome in outcomes.items()})


def families() -> tuple[str, ...]:
    """Types of causal models of the installed transformers."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def counts(outcomes: dict[str, Outcome]) -> list[Row]:
    kinds = [each.kind for each in outcomes.values()]
    named = f"of {len(kinds) - kinds.count(UNBUILT)} families"
    exact = sum(each.kind == TRAINS and each.apart <= EXACT for each in outcomes.values())
    return [
        Row("families_exact", [float(exact)], named),
        Row("families_trained", [float(kinds.count(TRAINS))], named),
        Row("families_wrong_and_not_refused", [float(kinds.count(OFF))], named),
    ]


# --- a family ---------------------------------------------------------------------------------------------------------


def outcome_of(name: str) -> Outcome:
    """What becomes of a family with the dry run and, if that passes it, with the learner."""
    with tempfile.TemporaryDirectory() as made:
        try:
            with torch.device("meta"):
                whole = AutoModelForCausalLM.from_config(config_of(name))
            try:
                small = small_model(lambda: config_of(name), whole, PARAMETERS)
            except ModelError:  # there is none of so few
                small = small_model(lambda: config_of(name), whole)
            small.save_pretrained(made)
        except Exception as error:
            return Outcome(UNBUILT, first_line(error))
        found = Findings()
        config = Config.model_validate({"model": {"path": made}, "data": {}})
        found.run_check(BACKENDS.find("fsdp").check_model, config)
        if said := found.errors + found.warnings:
            why = said[0].partition("cannot be trained: ")[2] or said[0]
            return Outcome(REFUSED, re.sub(r", by [-+.\de]+; use another model$", "", why))
        try:
            apart = difference(Path(made))
        except Exception as error:
            return Outcome(OFF, first_line(error), float("inf"))
        return Outcome(TRAINS if apart <= WRONG else OFF, "", apart)


def config_of(name: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[name](**KEYS.get(name, {}))


def difference(folder: Path) -> float:
    """Largest difference of packed sequences' log-probabilities and gradients from transformers' own of each alone; of
    one above `EXACT`, what it exceeds that of transformers' own pass in float64 by."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sequences = [torch.randint(3, vocabulary, (length,)) for length in LENGTHS]
    factors = torch.randn(sum(LENGTHS) - len(LENGTHS))

    def by_transformers() -> torch.Tensor:
        return torch.cat([logprobs_by_transformers(model, each) for each in sequences])

    theirs = learnt(model, by_transformers(), factors)
    policy = load(folder, 1.0)
    ours = learnt(policy.lm, logprobs_of(policy, sequences), factors)
    apart = largest(ours, theirs)
    if apart <= EXACT:
        return apart
    model.set_experts_implementation("eager")  # the others take no float64
    return max(EXACT, apart - largest(learnt(model.double(), by_transformers(), factors), theirs))


def learnt(lm: torch.nn.Module, logprobs: torch.Tensor, factors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Log-probabilities, and the gradients of a loss of them by name."""
    lm.zero_grad()
    (logprobs * factors).sum().backward()
    found = {name: each.grad for name, each in lm.named_parameters() if each.grad is not None}
    return {"": logprobs.detach(), **found}


def largest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference, that of gradients relative to the largest of their tensor or a thousandth of all."""
    most = max(float(each.abs().max()) for name, each in theirs.items() if name)
    return max(
        float((ours.get(name, torch.zeros(())) - each).abs().max())
        / (max(float(each.abs().max()), 1e-3 * most) if name else 1.0)
        for name, each in theirs.items()
    )


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


# --- runs of three steps ----------------------------------------------------------------------------------------------

END_TO_END = (
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "olmo3",
    "phi3", "smollm3", "deepseek_v3", "glm4", "glm4_moe", "granite", "lfm2", "nemotron_h", "falcon_h1", "minimax",
)  # fmt: skip
"""Families that are trained in whole runs, on the transformers engine."""
STEPS, GAP = 3, 1e-4
"""Steps of such a run, and the largest mean gap between engine and learner of one that counts (nats)."""
RUN_PARAMETERS = 5_000_000
REWARD = """
def parity(response, label):
    return float(sum(map(ord, response)) % 2)
"""
RUN = """
run = {{ name = "run", dir = "{folder}" }}
model = {{ path = "{folder}/model" }}
data = {{ path = "{folder}/prompts.jsonl" }}
schedule = {{ rollout_batch_size = 4, over_sampling_batch_size = 4, n_samples_per_prompt = 4, max_steps = {steps} }}
sampling = {{ max_response_tokens = 24 }}
reward = {{ name = "parity:parity" }}
worker = {{ engine = "transformers", count = 1, slots = 16, device = "cpu" }}
learner = {{ ranks = 1, device = "cpu", lr = 1e-3 }}
"""


def families_end_to_end(names: Iterable[str]) -> Row:
    """How many families train in a run, small and with random weights, while engine and learner agree."""
    gaps = {name: gap_of_run(name) for name in names}
    for name, (gap, said) in gaps.items():
        print(f"{name:26} gap {gap:.1e} {said}", flush=True)
    return Row("families_end_to_end", [float(sum(gap <= GAP for gap, _ in gaps.values()))], f"of {len(gaps)} families")


def gap_of_run(name: str) -> tuple[float, str]:
    """Largest mean gap between engine and learner in the steps of a run, infinite for one that fails, and why."""

    def config() -> PreTrainedConfig:
        keys = {"vocab_size": len(VOCABULARY), "eos_token_id": VOCABULARY[EOS], "pad_token_id": VOCABULARY[PAD]}
        return CONFIG_MAPPING[name](**KEYS.get(name, {}) | keys | {"bos_token_id": None})

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config())
        small_model(config, whole, RUN_PARAMETERS).save_pretrained(folder / "model")
        build_tokenizer().save_pretrained(folder / "model")
        (folder / "parity.py").write_text(REWARD)
        (folder / "prompts.jsonl").write_text('{"prompt": "05*3+60=", "label": "1"}\n' * 64)
        (folder / "run.toml").write_text(RUN.format(folder=folder, steps=STEPS))
        try:
            command = [sys.executable, "-m", "april.cli", "run", folder / "run.toml"]
            execute(command, folder / "log", 1, PYTHONPATH=f"{python_path()}{os.pathsep}{folder}")
        except SystemExit as error:
            return float("inf"), str(error).strip().splitlines()[-1]
        steps = read_records(folder / "run" / "metrics.jsonl")
        means = [gap["mean"] for step in steps for gap in (step.get("engine_gaps") or {}).values() if not gap["age"]]
        return (max(means), "") if len(means) >= STEPS else (float("inf"), f"{len(means)} steps have a gap")


# --- the task in pictures ---------------------------------------------------------------------------------------------


def pictures(quick: bool) -> list[Row]:
    """Held-out accuracy of `configs/pictures.toml` before its first step and after its last, and how long it takes with
    the making of pictures and policy."""
    keys = ["--schedule.max_steps", 1, "--evaluation.prompts", 16] if quick else []
    with tempfile.TemporaryDirectory() as made:
        folder, started = Path(made), time.monotonic()
        execute([*APRIL, "make-pictures", "--out", folder / "task"], folder / "make.log", 1)
        for key, file in (("model.path", "policy"), ("data.path", "train.jsonl"), ("data.eval_path", "heldout.jsonl")):
            keys += [f"--{key}", folder / "task" / file]
        command = [*APRIL, "run", ROOT / "configs" / "pictures.toml", "--run.dir", folder / "runs", *keys]
        execute(command, folder / "run.log", 1)
        minutes = (time.monotonic() - started) / 60
        summary = json.loads((folder / "runs" / "pictures" / "summary.json").read_bytes())
    accuracies = [evaluation["accuracy"] for evaluation in summary["evaluation"]]
    return [
        Row("pictures_heldout", [accuracies[-1]], "share"),
        Row("pictures_heldout_before", [accuracies[0]], "share"),
        Row("pictures_min", [minutes], "min"),
    ]


# --- how long the proof takes -----------------------------------------------------------------------------------------

PROVE = """
import sys
from pathlib import Path
from april.learner.policy import objection
sys.exit(objection(Path(sys.argv[1])) or None)
"""


def proof_s(repeats: int) -> Row:
    """Seconds of the proof of a model of 8 billion parameters, with the start of its process, on one core."""
    with tempfile.TemporaryDirectory() as made:
        folder, taken = Path(made) / "model", []
        Qwen3Config(
            hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            intermediate_size=12_288, vocab_size=151_936, max_position_embeddings=40_960, tie_word_embeddings=False,
        ).save_pretrained(folder)  # fmt: skip
        write_empty_weights(folder)
        for _ in range(repeats):
            started = time.monotonic()
            execute([sys.executable, "-c", PROVE, folder], Path(made) / "log", 1)
            taken.append(time.monotonic() - started)
    return Row("proof_s", taken, "s")


def write_empty_weights(folder: Path) -> None:
    """The weights that a folder's config.json wants, as a file of zeros that takes no room on the disk."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        size = 2 * prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(outcomes: dict[str, Outcome]) -> str:
    """The page that says which families train."""
    trained = [name for name, each in outcomes.items() if each.kind == TRAINS]
    refused = [(name, each.said) for name, each in outcomes.items() if each.kind == REFUSED]
    return "\n".join(
        [
            "# Models",
            "",
            *INTRODUCTION.format(version=transformers.__version__).splitlines(),
            "",
            f"## Families that train ({len(trained)})",
            "",
            ", ".join(f"`{name}`" for name in trained) + ".",
            "",
            f"## Families that are refused ({len(refused)})",
            "",
            *table(refused),
            "",
        ]
    )


INTRODUCTION = """\
The families of transformers {version}, by the `model_type` of their config.json, of which a small model with random
weights was tried. Of those that train, packed log-probabilities and gradients are those of transformers' own model.
A run and its dry run try the very model that they are given, so a family that is not named here may train as well.

    python benchmarks/models.py --page      # writes this page"""


def table(refused: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"| `{name}` | {said.replace('|', chr(92) + '|')} |" for name, said in refused]
    return ["| family | why |", "| --- | --- |", *lines]


if __name__ == "__main__":
    main()

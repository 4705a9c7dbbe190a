"""Dry runs: every shipped configuration resolves, says what it needs, and lists what is missing."""

import importlib.util
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from safetensors.numpy import save_file

from april import cli
from april import config as configuration
from april.config import ConfigError
from april.launch.dry_run import describe
from april.launch.memory import read_shape
from april.launch.preflight import examine
from april.learner.policy.arithmetic import build_tokenizer
from tests.support.dataset_records import RECORDS
from tests.support.marks import full
from tests.support.small_run import write_config

FOLDER = Path(__file__).parents[2] / "configs" / "published"
PARTS = [sorted((FOLDER / part).glob("*.toml")) for part in ("models", "data", "algorithms", "schedules")]
COMBINATIONS = list(itertools.product(*PARTS))
GSM8K = [FOLDER.parent / "gsm8k.toml", FOLDER.parent / "gsm8k-cpu.toml"]
"""The second file is read after the first, and overrides it."""
ONE_GPU = FOLDER.parent / "one-gpu-qwen3-0.6b.toml"
WARM_START = FOLDER.parent / "quickstart-sft.toml"  # for `april sft`
OTHERS = {*GSM8K, ONE_GPU, WARM_START, FOLDER.parent / "published.toml"}
SHIPPED = [path for path in sorted(FOLDER.parent.glob("*.toml")) if path not in OTHERS]
"""The other configurations that can be run, without the simulator's scenario."""

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
MODELS = {
    "Qwen3-4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen3-8B": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "Qwen3-0.6B": QWEN3 | {
        "num_hidden_layers": 28, "num_attention_heads": 16, "hidden_size": 1024, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-1.5B-Instruct": {
        "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes of the models, from their config.json."""
BILLIONS = {"Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "DeepSeek-R1-Distill-Qwen-1.5B": 1.78}
DATASETS = {
    "DAPO-Math-17k": "dapo_math", "DeepScaleR-Preview-Dataset": "deepscaler", "DeepMath-103K": "deepmath",
    "aime-2024": "aime", "gsm8k": "gsm8k",
}  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A workspace with the configurations, datasets of one row, and models without tensors."""
    root = tmp_path_factory.mktemp("workspace")
    for name, shape in MODELS.items():
        (root / "models" / name).mkdir(parents=True)
        (root / "models" / name / "config.json").write_text(json.dumps(shape))
        save_file({}, root / "models" / name / "model.safetensors")
        build_tokenizer().save_pretrained(root / "models" / name)
    for name, mapping in DATASETS.items():
        (root / "datasets" / name).mkdir(parents=True)
        table = pa.Table.from_pylist([RECORDS[mapping]])
        parquet.write_table(table, root / "datasets" / name / "train-00000-of-00001.parquet")
    shutil.copytree(FOLDER.parent, root / "configs")
    return root


@pytest.fixture(autouse=True)
def in_workspace(workspace, monkeypatch):
    """Work in the workspace, where the configurations find models and datasets."""
    monkeypatch.chdir(workspace)


def copy_of(path):
    """The copy of a shipped configuration in the workspace."""
    return Path("configs", *path.relative_to(FOLDER.parent).parts)


def load(combination, *overrides, inputs=("model", "data")):
    return configuration.load(list(map(copy_of, [FOLDER / "base.toml", *combination])), list(overrides), inputs=inputs)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda parts: "-".join(part.stem for part in parts))
def test_every_combination_resolves_and_says_what_it_needs(combination):
    config = load(combination)
    *_, algorithm, schedule = combination
    assert config.run.name == "-".join(part.stem for part in combination)
    assert config.schedule.kind == schedule.stem
    assert config.schedule.dynamic_sampling == (algorithm.stem == "dapo")
    assert config.schedule.most_in_flight == (256 if schedule.stem == "sync" else 512)
    text = describe(config, [])
    assert f"{BILLIONS[config.model.path.name]:.2f} billion parameters" in text
    assert "1 broker, 4 workers, 4 learner ranks, 16 verifier processes" in text
    assert "8 accelerators: 4 for workers, 4 for the learner" in text
    assert "channels   4: learner rank 0 to each worker over nccl" in text
    assert "ports      metrics 127.0.0.1 at a free port" in text
    assert "rewarded by deepscaler" in text and f"staleness at most {config.schedule.max_staleness}" in text


@pytest.mark.full
@pytest.mark.parametrize("combination", [COMBINATIONS[0], full(COMBINATIONS[40]), full(COMBINATIONS[80])], ids=str)
def test_a_published_combination_lacks_nothing_but_accelerators(combination, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    assert ["accelerators" in sentence for sentence in examine(load(combination), [], 0).errors] == [True]
    found = examine(load(combination), list(map(str, range(8))), 20)
    assert not found.errors
    assert "deepscaler: 2 of 2 reference answers are right" in found.facts["rewards"]


def test_a_preset_without_correction_of_stale_tokens_gets_a_warning():
    for combination in COMBINATIONS:
        *_, algorithm, schedule = combination
        remarked = "advice     algorithm.preset = 'gspo' corrects no stale token" in describe(load(combination), [])
        assert remarked == (algorithm.stem == "gspo" and schedule.stem != "sync")


@pytest.mark.full
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_other_shipped_configuration_resolves_and_lacks_nothing(
    path, policy_folder, data_folder, server_python, capsys
):
    """With a policy and prompts as `launch/quickstart.sh` makes them."""
    served = ["--engine.python", server_python] if "sglang" in path.stem else []
    prompts = ["--data.path", str(data_folder / "train.jsonl"), "--data.eval_path", str(data_folder / "heldout.jsonl")]
    assert (
        cli.main(["run", str(copy_of(path)), "--dry-run", "--model.path", str(policy_folder), *prompts, *served]) == 0
    )
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "nothing is missing" and f"{path.stem}, seed" in said
    engine = "sglang" if "sglang" in path.stem else "transformers" if path.stem == "pictures" else "torch"
    assert f"engines    {engine}, " in said
    graded = "1 of 1" if path.stem == "calculator" else "80 of 80"
    assert f"final_answer: {graded} reference answers are right; the first is worth 1" in said
    installed = f"SGLang 0.5.23 of {server_python}" if engine == "sglang" else f"{engine} "
    assert f"installed  {installed}" in said


@pytest.mark.full
def test_gsm8k_needs_only_its_files_and_a_model(server_python, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40))
    published = ["--data.path", "datasets/gsm8k/train-00000-of-00001.parquet", "--engine.python", server_python]
    assert cli.main(["run", str(copy_of(GSM8K[0])), "--dry-run", "--hardware", "2", *published]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "nothing is missing"
    assert "1.54 billion parameters" in said and "as gsm8k, rewarded by gsm8k" in said
    assert "engines    sglang, 512 slots" in said and "2 accelerators: 1 for workers, 1 for the learner" in said
    assert cli.main(["run", str(copy_of(GSM8K[0])), "--dry-run"]) == 2
    assert "datasets/gsm8k/train.jsonl is not there" in capsys.readouterr().out


@pytest.mark.parametrize("gib, fraction, cache", [(24, 0.194, 33196), (80, 0.685, 502658)])
def test_one_gpu_of_either_size_takes_learner_and_server(gib, fraction, cache, server_python, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40))
    here = ["--data.path", "datasets/gsm8k/train-00000-of-00001.parquet", "--engine.python", server_python]
    words = [str(copy_of(ONE_GPU)), "--dry-run", *here, "--devices.memory_gib", str(gib)]
    assert cli.main(["run", *words, "--hardware", "1"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "nothing is missing" and "596.05 million parameters" in said
    assert "1 accelerator: 1 for workers, 1 for the learner that share them" in said and "over gloo" in said
    assert "8.9 GiB of weights, gradients and moments, 1.1 GiB of activations" in said
    assert f"engine.server.mem_fraction_static = {fraction}: 1.1 GiB of weights and a cache of {cache} tokens" in said
    assert cli.main(["run", *words, "--learner.activation_checkpointing", "false"]) == (2 if gib == 24 else 0)
    assert ("does not suffice with 24.0 GiB an accelerator" in capsys.readouterr().out) == (gib == 24)


def test_the_cpu_version_of_gsm8k_differs_in_sizes_only(policy_folder, capsys):
    twin = [*map(str, map(copy_of, GSM8K)), "--data.path", "datasets/gsm8k", "--model.path", str(policy_folder)]
    assert cli.main(["run", *twin, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "nothing is missing"
    assert "gsm8k-cpu, seed" in said and "engines    torch, " in said and "no accelerator" in said
    small, whole = (configuration.load(files, inputs=()) for files in (GSM8K, GSM8K[:1]))
    assert small.algorithm == whole.algorithm and small.data.mapping == whole.data.mapping == "gsm8k"
    of_both = ("kind", "n_samples_per_prompt", "max_staleness", "partial_rollout", "dynamic_sampling")
    assert all(getattr(small.schedule, key) == getattr(whole.schedule, key) for key in of_both)


def test_a_dry_run_counts_scorers():
    text = describe(load(COMBINATIONS[0], "--reward.where", "scorer", "--scorer.count", "2"), [])
    assert "1 broker, 4 workers, 2 scorers, 4 learner ranks, 8 verifier processes" in text


def test_the_hyper_parameters_are_the_published_ones():
    config = load(COMBINATIONS[0])
    schedule, learner, sampling = config.schedule, config.learner, config.sampling
    assert (schedule.rollout_batch_size, schedule.n_samples_per_prompt) == (32, 8)
    assert (sampling.max_response_tokens, sampling.temperature, sampling.top_p) == (16384, 0.8, 1.0)
    assert (learner.lr, learner.weight_decay, learner.betas) == (1e-6, 0.1, (0.9, 0.98))
    assert (config.data.epochs, config.data.shuffle, config.evaluation.every) == (1, True, 10)
    [april] = [part for part in PARTS[3] if part.stem == "april"]
    assert load((*COMBINATIONS[0][:3], april)).schedule.over_sampling_batch_size == 64


def test_parameters_are_counted_from_the_shape(policy_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    assert read_shape(policy_folder).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_an_adapter_s_parameters_are_counted_before_anything_starts(config_file, capsys):
    model = ["--lora.rank", "2", "--lora.targets", '["q_proj", "down_proj"]']
    assert cli.main(["run", str(config_file), "--dry-run", *model]) == 0
    said = capsys.readouterr().out
    assert f"{2 * (64 + 64 + 160 + 64)} trained parameters, 1.5% of the model's" in said, said


def test_the_checkpoint_store_is_tried_before_anything_starts(config_file, tmp_path, capsys):
    store = f"file://{tmp_path}/store"
    for url, status, sentence in (
        (store, 0, f"store      checkpoints can be written to {store}"),
        ("none-such://bucket", 2, "missing: key 'learner.checkpoint_store': none-such://bucket/"),
        (f"file://{config_file}/in-a-file", 2, "cannot be written"),
        ("s3://key:secret@bucket/runs", 2, "key 'learner.checkpoint_store' = 's3://…' has credentials or options"),
        ("memory://runs", 2, "ends with its process"),
        ("bucket/runs", 2, "'bucket/runs' is no URL of a folder; give one as s3://bucket/folder"),
        ("file://relative/runs", 2, "is no URL of a folder"),
    ):
        assert cli.main(["run", str(config_file), "--dry-run", "--learner.checkpoint_store", url]) == status, url
        said = "".join(capsys.readouterr())
        assert sentence in said and "secret" not in said, said
    assert list((tmp_path / "store").iterdir()) == [], "nothing is left of the trial"


def test_a_dry_run_lists_everything_that_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = [str(FOLDER / "base.toml"), *map(str, COMBINATIONS[0])]
    assert cli.main(["run", *files, "--dry-run", "--data.reward", "no_such"]) == 2
    printed = capsys.readouterr().out
    for sentence in ("models/", "datasets/", "aime-2024 is not there", "'no_such' is no verifier", "accelerators"):
        assert f"{sentence}" in printed
    assert printed.count("missing: ") >= 5
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


USER_CODE = """
import os, time
def raises(response, label): return {}[label]
def text(response, label): return "yes"
def dies(response, label): os._exit(3)
def late(response, label): time.sleep(60)
def group(responses, label): return [1.0]
def half(response, label): return 1 / int(label)
def marked(response, label): return 2.0 * (response == f"<{label}>"), {"length": len(response)}
marked.example = "<{}>".format
def closed(response, label): return float(response == f"</think>{label}")
closed.example = "</think>{}".format
def turn(turn): return turn.state["reward"]
def keep(group): return group.rewards > 1
"""
FAILING = ("mine:raises", "mine:text", "mine:dies", "mine:late", "group:mine:group")


def user_dataset(folder, rows, monkeypatch):
    """Overrides for a dataset with `rows` of (label, verifier); the verifiers are beside the configuration."""
    (folder / "mine.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    rows = [{"prompt": f"{at:02d}*3+60=", "label": label, "reward": name} for at, (label, name) in enumerate(rows)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    allowed = json.dumps(sorted({row["reward"] for row in rows}))
    return ["--data.path", str(folder / "own.jsonl"), "--reward.allowed", allowed]


@pytest.mark.full
def test_user_defined_functions_are_called_once_before_anything_starts(config_file, tmp_path, monkeypatch, capsys):
    keys = user_dataset(tmp_path, [("1", name) for name in FAILING], monkeypatch)
    keys += ["--reward.timeout_s", "3", "--environment.name", "mine:turn", "--environment.turn_ends", '["="]']
    keys += ["--schedule.group_filter", "mine:keep"]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1000, 999, 1))
    command = ["run", str(config_file), *keys]
    assert cli.main([*command, "--dry-run"]) == 2
    said = capsys.readouterr().out
    for sentence in (
        f"'mine:raises' fails on {tmp_path}/own.jsonl, row 1: KeyError: '1'; fix it",
        f'File "{tmp_path}/mine.py", line 3, in raises',
        "row 2: returned 'yes', which is not a number; return a number",
        "row 3: its process ended (exit code 3)",
        "row 4: no answer within 3 s",
        "row 5: ValueError: returned 1 rewards for 2 responses",
        "environment 'mine:turn' fails on the turn '1=' of",
        "'schedule.group_filter': the filter keep failed: TypeError",
        "'run.dir' =",
        "1 B free",
    ):  # fmt: skip
        assert sentence in said, said
    assert said.count("Traceback") == 3, "each once, without a word of April's own files"
    assert "april/" not in said.partition("missing: ")[2]
    assert cli.main(command) == 2, "a run does the same before it starts"
    assert "1 B free" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_rewards_of_user_defined_functions_and_rows_whose_own_answer_is_not_right(
    config_file, tmp_path, monkeypatch, capsys
):
    rows = [("2", "mine:half"), ("0", "mine:half"), ("7", "mine:marked"), ("#1", "final_answer"), ("1", "choice")]
    keys = user_dataset(tmp_path, [*rows, ("Б", "final_answer"), ("9" * 30, "final_answer")], monkeypatch)
    assert cli.main(["run", str(config_file), *keys, "--data.eval_path", keys[1], "--dry-run"]) == 2
    said = capsys.readouterr().out
    file = f"{tmp_path}/own.jsonl"
    for sentence in (
        "prompts    7 rows and 7 held out; 8 tokens in the 14 looked at, 1,000 at most",
        "answers    1 to 30 tokens, 1 in the median, of a budget of 24",
        f"mine:half: a response that is the label, of {file}, row 1, is worth 0.5",
        "mine:marked: 2 of 2 reference answers are right; the first is worth 2 (length 3)",
        f"remark: verifier 'mine:half' fails on 2 of 4 reference answers, the first '0' of {file}, row 2, by "
        "ZeroDivisionError: division by zero",
        f"missing: verifier 'choice' fails on {file}, row 5 and all 2 that it was tried on: ValueError: label '1' is",
        f"remark: 2 of 14 reference answers have more tokens than sampling.max_response_tokens = 24, the first {file}",
        f"cannot express 'Б' of the reference answers, 'Б' first in {file}, row 6: the policy cannot write them",
    ):  # fmt: skip
        assert sentence in said, said
    assert "final_answer: 6 of 6 reference answers are right" in said


TOLD = """
def told(response, label, finish_reason):
    return (1.0, {}) if response == label else (0.0, {"feedback": "no"})
"""


def test_a_dry_run_says_that_a_hint_shows_feedback_which_a_verifier_never_gives(
    config_file, tmp_path, monkeypatch, capsys
):
    (tmp_path / "told_in_a_dry_run.py").write_text(TOLD)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("final_answer", "told_in_a_dry_run:told")
    rows = [{"prompt": "1+1=", "label": "1", "reward": name} for name in names]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["--data.path", str(tmp_path / "rows.jsonl"), "--reward.allowed", json.dumps(names)]
    keys += ["--data.eval_path", keys[1], "--algorithm.divergence", "forward_kl"]
    cli.main(["run", str(config_file), *keys, "--algorithm.hint", "{prompt}{feedback}", "--dry-run"])
    said = " ".join(capsys.readouterr().out.split())
    assert "key 'algorithm.hint' shows {feedback}, and verifier 'final_answer' says nothing of 3 responses" in said
    assert "told' says nothing" not in said, "it says something of a wrong response"


def test_a_dry_run_grades_a_response_with_the_special_tokens_that_a_run_keeps(
    config_file, policy_folder, tmp_path, monkeypatch, capsys
):
    policy = shutil.copytree(policy_folder, tmp_path / "policy")
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    tokenizer.save_pretrained(policy)
    keys = user_dataset(tmp_path, [("7", "mine:closed")], monkeypatch)
    command = ["run", str(config_file), *keys, "--model.path", str(policy), "--dry-run"]
    assert cli.main(command) == 0
    assert "mine:closed: 1 of 1 reference answers are right" in capsys.readouterr().out
    assert cli.main([*command, "--reward.without_special_tokens", '["mine:closed"]']) == 0
    assert "remark: verifier 'mine:closed' does not find 1 of 1" in capsys.readouterr().out


def cut(path, share=0.7):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


BROKEN = {
    "data that is cut off": (lambda root: cut(root / "train.jsonl", 0.99), "train.jsonl, line 64: .* is not JSON"),
    "data without rows": (lambda root: (root / "train.jsonl").write_text("\n"), "train.jsonl has no rows"),
    "weights that are cut off": (
        lambda root: cut(root / "policy/model.safetensors"),
        "is cut off at .* fetch it again",
    ),
    "no tokeniser": (lambda root: (root / "policy/tokenizer.json").unlink(), "has no tokeniser that"),
    "none at all": (lambda root: [file.unlink() for file in (root / "policy").glob("token*")], "vocabulary is empty"),
    "a folder that cannot be written": (lambda root: (root / "runs").touch(), "'run.dir' = .* cannot be written"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_dry_run_finds_missing_keeps_a_run_from_starting(case, tmp_path, policy_folder, data_folder, capsys):
    breaks, sentence = BROKEN[case]
    shutil.copytree(policy_folder, tmp_path / "policy")
    shutil.copytree(data_folder, tmp_path, dirs_exist_ok=True)
    path = write_config(tmp_path, tmp_path / "policy", tmp_path)
    breaks(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert [cli.main(["run", str(path), *words]) for words in (["--dry-run"], [])] == [2, 2]
    said = capsys.readouterr()
    assert re.search(f"missing: .*{sentence}", said.out) and re.search(f"april run: .*{sentence}", said.err)
    assert len(said.err.splitlines()) == 1 and sorted(tmp_path.iterdir()) == before


def test_later_files_win_and_overrides_win_over_all(config_file, tmp_path):
    (tmp_path / "more.toml").write_text("[schedule]\nmax_steps = 7\n[learner]\nlr = 0.5\n")
    config = configuration.load([config_file, tmp_path / "more.toml"], ["--learner.lr", "0.25"])
    assert (config.schedule.max_steps, config.learner.lr, config.schedule.rollout_batch_size) == (7, 0.25, 4)
    assert config.run.name == "small"
    with pytest.raises(ConfigError, match=r"nothing\.toml does not exist"):
        configuration.load([config_file, tmp_path / "nothing.toml"])

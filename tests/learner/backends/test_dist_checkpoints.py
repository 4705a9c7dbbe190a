"""Weights converted to Megatron's own checkpoints and back are bitwise the same."""

import pickle
import shutil
import subprocess
from pathlib import Path

import orjson
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from april import cli
from april.learner.trainer import Trainer
from tests.support.learner.small_learner import make_config, make_policy, run_of, uneven_batch
from tests.support.marks import full

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-megatron/bin/python"
COMMANDS = """
import sys, orjson
from contextlib import redirect_stderr
from io import StringIO
from april import cli
answers = []
for words in orjson.loads(sys.argv[1]):
    with redirect_stderr(StringIO()) as said:
        answers.append((cli.main(["convert-weights", *words]), said.getvalue()))
sys.stdout.buffer.write(b"\\n" + orjson.dumps(answers))
"""
EXPERTS = {"kind": Qwen3MoeConfig, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MODELS = {
    "untied": {"tied": False},
    "bf16": {"kind": Qwen2Config},
    "experts": EXPERTS | {"norm_topk_prob": True},
    "some experts": EXPERTS | {"tied": False, "mlp_only_layers": [0]},
}

pytestmark = [pytest.mark.xdist_group("backends"), pytest.mark.timeout(600)]


def convert(*commands):
    """Exit status and error of each command, in one process that has Megatron."""
    words = orjson.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run([PYTHON, "-c", COMMANDS, words], capture_output=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return orjson.loads(done.stdout.splitlines()[-1])


def refusals(commands):
    return [said for status, said in convert(*commands) if status]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Folder of a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    policy = make_policy(folder / "model", intermediate_size=34)
    config = make_config(policy, folder / "run", lr=1e-2)
    run_of(config)
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(config, torch.device("cpu"))
    trainer.step(uneven_batch(0, policy))
    trainer.save()
    dist.destroy_process_group()
    return config.run_dir


@pytest.fixture(scope="module")
def folders(tmp_path_factory, run_dir):
    """By name: `model`, `megatron` that is made of it, `back` that is made of that; and `saved` by Megatron itself, on
    two ranks, which is `read`. In `run` the model is a checkpoint's."""
    made = {name: tmp_path_factory.mktemp("of") / name for name in MODELS}
    for name, folder in made.items():
        make_policy(folder / "model", intermediate_size=34, **MODELS[name])
    bf16 = made["bf16"] / "model"
    AutoModelForCausalLM.from_pretrained(bf16).to(torch.bfloat16).save_pretrained(bf16)
    of_run = tmp_path_factory.mktemp("of") / "run"
    to = [[folder / "model", "--to", "megatron", "--out", folder / "megatron"] for folder in made.values()]
    to += [[run_dir, "--to", "megatron", "--out", of_run / "megatron"], [run_dir, "--out", of_run / "model"]]
    assert not refusals(to)
    ranks = [PYTHON, "-m", "april.learner.launch", "--nproc-per-node=2"]
    script = Path(__file__).with_name("run_dist_checkpoints.py")
    with (of_run / "output").open("wb") as output:
        done = subprocess.run([*ranks, script, *made.values()], stderr=output, timeout=200, cwd=ROOT)
    assert done.returncode == 0, (of_run / "output").read_text()[-4000:]
    made["run"] = of_run
    back = [[folder / "megatron", "--model", folder / "model", "--out", folder / "back"] for folder in made.values()]
    back += [[made[name] / "saved", "--model", made[name] / "model", "--out", made[name] / "read"] for name in MODELS]
    assert not refusals(back)
    return made


@pytest.mark.megatron
@pytest.mark.turn("folders")
@pytest.mark.parametrize("name", [*MODELS, "run"])
def test_a_model_comes_back_from_megatron_as_it_was(folders, name):
    assert files_of(folders[name] / "back") == files_of(folders[name] / "model")
    assert {path.name for path in (folders[name] / "megatron").iterdir()} == {
        ".metadata", "__0_0.distcp", "common.pt", "metadata.json"
    }  # fmt: skip


@pytest.mark.megatron
@pytest.mark.turn("folders")
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_that_megatron_saved_on_two_ranks_can_be_read(folders, name):
    assert files_of(folders[name] / "read") == files_of(folders[name] / "model")


class Runs:
    """An object whose pickle calls a function."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.megatron
@pytest.mark.turn("folders")
def test_incomplete_or_foreign_checkpoints_are_refused_and_no_code_in_them_is_run(folders, tmp_path):
    def with_file(folder, name, content, of="untied"):
        shutil.copytree(folders[of] / "megatron", tmp_path / folder)
        (tmp_path / folder / name).write_bytes(content)
        return tmp_path / folder

    run = tmp_path / "ran"
    (tmp_path / "trained").mkdir()
    out = tmp_path / "out"
    (tmp_path / "trained/latest_checkpointed_iteration.txt").write_text("100")
    refused = {
        with_file("zarr", "metadata.json", b'{"sharded_backend": "zarr"}'): "its format is 'zarr'",
        with_file("other", "metadata.json", b"[]"): "is not one of a checkpoint of Megatron's",
        with_file("cut", ".metadata", b""): ".metadata cannot be read",
        with_file("short", "__0_0.distcp", b"", "run"): "cannot be read whole",
        with_file("runs", ".metadata", pickle.dumps(Runs(run))): "it wants pathlib.Path.touch, which no checkpoint has",
        tmp_path / "trained": "has checkpoints in folders; give one of them, such as",
        folders["bf16"] / "megatron": "it lacks decoder.layers.self_attention.q_layernorm.weight; give",
        folders["untied"] / "megatron": "its output_layer.weight has no place in the model; give the model",
    }  # fmt: skip
    tied = make_policy(tmp_path / "tied", intermediate_size=34)
    answers = convert(*([source, "--model", tied, "--out", out] for source in refused))
    for (status, said), why in zip(answers, refused.values(), strict=True):
        assert (status, why in said) == (cli.REFUSED, True), said
    assert not out.exists() and not run.exists()


@pytest.mark.parametrize("to", ["huggingface", full("megatron")])
def test_options_that_do_not_fit_are_refused(to, tmp_path, capsys):
    other = {"huggingface": "megatron", "megatron": "huggingface"}[to]
    name = {"huggingface": "config.json", "megatron": "metadata.json"}
    sources = {}
    for form, file in name.items():
        sources[form] = tmp_path / form
        sources[form].mkdir()
        (sources[form] / file).write_text("{}")
    out = ["--out", str(tmp_path / "out"), "--to", to]
    wanted = {
        (str(sources[to]),): f"cannot become {to!r}; give --to {other}",
        (str(sources[other]), "--step", "3"): "option '--step' = 3 is of a run",
        (str(sources["megatron"]), "--to", "fsdp"): "has no checkpoints of its own; give one of megatron",
        (str(sources["megatron"]), "--to", "huggingface"): "option '--model' is wanted",
        (str(sources["huggingface"]), "--to", "megatron", "--model", "m"): "is of a back end's own checkpoint",
    }
    for words, why in wanted.items():
        assert cli.main(["convert-weights", *out, *words]) == cli.REFUSED
        assert why in capsys.readouterr().err


def test_without_megatron_the_command_says_how_to_install_it(policy_folder, tmp_path, capsys):
    words = [str(policy_folder), "--to", "megatron", "--out", str(tmp_path / "out")]
    assert cli.main(["convert-weights", *words]) == cli.REFUSED
    assert "is not installed; call launch/install-megatron.sh" in capsys.readouterr().err

"""Configurations refused before a vLLM server is started, and the server's options."""

import argparse
import json
import runpy
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest

from april.config import ConfigError, load
from april.util.errors import NotTried
from april.workers.engines import ENGINES
from april.workers.engines.sglang.factory import server_settings
from april.workers.engines.sglang.server import OPTIONS_VARIABLE, server_python
from april.workers.engines.vllm.engine import PROGRAM, VLLMSettings

VLLM = ["--worker.engine", "vllm"]
REFUSED = {
    "servers of others": (["--engine.url", "http://a:1,http://b:1"], "'engine.url'"),
    "another pause": (["--engine.pause", "retract", "--engine.stream_tokens", "1"], "use 'abort'"),
    "another way for weights": (["--engine.weights", "broadcast"], "use 'disk'"),
    "replicas": (["--engine.server.data_parallel_size", "2"], "one worker for each replica"),
    "heads that cannot be split": (["--engine.server.tensor_parallel_size", "3"], "2 heads and 1 key-value heads"),
    "too hot": (["--sampling.temperature", "2.5"], "'sampling.temperature' = 2.5"),
    "too hot an evaluation": (["--evaluation.temperature", "3"], "'evaluation.temperature' = 3"),
    "cut distribution": (["--sampling.top_p", "0.9"], "top_p = 1.0"),
    "cut distribution with a bound": (["--sampling.top_k", "20"], "'vllm' does not say what is left"),
    "min_p": (["--sampling.min_p", "0.1"], "min_p = 0.0"),
    "cut evaluation": (["--evaluation.top_k", "5"], "'evaluation.top_k' = 5"),
    "evaluation by mass": (["--evaluation.top_p", "0.9"], "'evaluation.top_p' = 0.9"),
    "several servers": (["--engine.servers", "2"], "start a worker for each"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_configuration_is_refused(config_file, case):
    overrides, mend = REFUSED[case]
    with pytest.raises(ConfigError, match=mend):
        load(config_file, [*VLLM, *overrides])


def test_options_become_the_server_s_command_line_and_override_april_s(config_file, tmp_path):
    config = load(config_file, [*VLLM, "--engine.server.dtype", "bfloat16", "--engine.server.seed", "3"])
    assert server_python(config, VLLMSettings.name).parts[-3] == ".venv-vllm"
    settings = VLLMSettings(tmp_path, tmp_path, tmp_path / "log", slots=7, options=config.engine.server)
    line = " ".join([*settings.program(), *settings.arguments(1234)])
    for part in (str(PROGRAM), "--dtype bfloat16", "--seed 3", "--port 1234", "--max-num-seqs 7"):
        assert part in line
    assert "float32" not in line and "--enable-lora" not in line


VLLM_NAMES = {
    "vllm": "SamplingParams", "vllm.inputs.engine": "tokens_input", "vllm.lora.request": "LoRARequest",
    "vllm.model_executor.layers.vocab_parallel_embedding": "ParallelLMHead", "vllm.outputs": "CompletionOutput",
    "vllm.sampling_params": "RequestOutputKind", "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.v1.engine.exceptions": "EngineDeadError", "vllm.v1.metrics.loggers": "StatLoggerBase",
}  # fmt: skip
"""Modules that the program imports, and the class that it takes from each."""


@pytest.mark.parametrize("started", ["by hand", "by a worker"])
def test_the_program_gets_its_options_on_the_command_line_or_from_the_worker_that_starts_it(monkeypatch, started):
    class Read(Exception): ...

    def from_cli_args(options):
        raise Read(options)

    engine_args = SimpleNamespace(add_cli_args=lambda parser: parser, from_cli_args=from_cli_args)
    names = {(module, name): type(name, (), {}) for module, name in VLLM_NAMES.items()}
    names["vllm.engine.arg_utils", "AsyncEngineArgs"] = engine_args
    names["vllm.utils.argparse_utils", "FlexibleArgumentParser"] = argparse.ArgumentParser
    for (module, name), value in names.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        setattr(sys.modules[module], name, value)
    words = ["--host", "127.0.0.1", "--port", "8000", "--allowed-hosts", "gpu-7"]
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *(words if started == "by hand" else [])])
    monkeypatch.delenv(OPTIONS_VARIABLE, raising=False)
    if started == "by a worker":
        monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps(words))
    with pytest.raises(Read) as read:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    options = read.value.args[0]
    assert (options.host, options.port, options.allowed_hosts) == ("127.0.0.1", 8000, ["gpu-7"])


@pytest.mark.parametrize(
    ("lora", "room"),
    [
        ({"rank": 9}, "16"),
        ({"rank": 8}, "8"),
        ({"rank": 8, "embedding": True}, None),
        ({"rank": 600}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_server_gets_adapters_if_only_adapters_are_trained(config_file, lora, room):
    """Otherwise its worker merges them into whole weights."""
    keys = [word for key, value in lora.items() for word in (f"--lora.{key}", str(value).lower())]
    (settings,) = server_settings(load(config_file, [*VLLM, *keys]), "cpu", "worker-0", VLLMSettings)
    words = settings.arguments(1234)
    assert ("--enable-lora" in words) == (room is not None)
    assert room is None or words[words.index("--max-lora-rank") + 1] == room


NAMED = {
    "sglang": ("sglang/srt/models/qwen3.py", "class Qwen3ForCausalLM(nn.Module): ..."),
    "vllm": ("vllm/model_executor/models/registry.py", "MODELS = {'Qwen3ForCausalLM': ('qwen3', 'Qwen3ForCausalLM')}"),
}


@pytest.mark.parametrize("engine", NAMED)
def test_the_server_s_package_is_asked_for_the_model_without_an_import(engine, config_file, tmp_path, monkeypatch):
    path, text = NAMED[engine]
    packages, model = tmp_path / "packages", tmp_path / "model"
    (packages / path).parent.mkdir(parents=True)
    (packages / path.partition("/")[0] / "__init__.py").write_text("raise SystemExit('it was imported')")
    (packages / path).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    shutil.copytree(load(config_file).model.path, model)
    own = ["--worker.engine", engine, "--engine.python", sys.executable, "--model.path", str(model)]
    config, check = load(config_file, own), ENGINES.find(engine).check_model
    shape = config.model.path / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}))
    check(config)
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"architectures": ["Qwen3For"]}))
    with pytest.raises(NotTried, match=r"'model\.path' = .*class .*Qwen3For;"):
        check(config)
    with pytest.raises(NotTried, match=r"'engine\.url'"):
        check(load(config_file, ["--worker.engine", engine, "--engine.url", "http://a:1"]))

"""Learner and engine on the same accelerators: how the memory is divided, and which configurations are refused."""

import json

import pytest

from april.config import ConfigError, load
from april.launch import devices
from april.launch.clusters.launcher import check_launch
from april.launch.memory import (
    activations_bytes,
    handed_over_bytes,
    plan_memory,
    read_shape,
    states_bytes,
    with_memory_limits,
)
from april.weights.transports import weights_towards
from april.workers.engines.sglang.factory import server_settings
from tests.support.small_run import SHARED

OWN = ["--engine.server.mem_fraction_static"]
GIB = 1 << 30


def with_memory(config_file, gib, *words):
    return load(config_file, [*SHARED, "--devices.memory_gib", str(gib), *words])


REFUSED = {
    "two ranks of NCCL": (["--weights.backend", "nccl"], r"'weights\.backend' = 'nccl' .* takes one rank"),
    "an engine without a bound": (
        ["--worker.engine", "vllm"],
        r"'vllm' takes what it finds; use 'torch' or 'transformers' or 'sglang'",
    ),
    "servers of others": (["--engine.url", "http://a:1"], r"engine\.url names those of others"),
    "a server in the weight channel": (["--engine.weights", "broadcast"], r"'engine\.weights' = 'broadcast' cannot be"),
    "nothing to divide": (["--devices.share", "false", "--devices.memory_gib", "24"], r"devices\.share = false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_cannot_share_are_refused_with_a_sentence(config_file, case):
    words, why = REFUSED[case]
    with pytest.raises(ConfigError, match=why):
        load(config_file, [*SHARED, *words])


ON_DEVICE = [
    "--worker.engine", "torch", "--learner.ranks", "1", "--worker.count", "1", "--weights.transport", "cuda_ipc",
]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--devices.share", "false"],
        ["--devices.turns", "true"],
        ["--learner.ranks", "2"],
        ["--worker.count", "2"],
        ["--worker.engine", "sglang"],
        ["--weights.delta", "auto"],
        ["--lora.rank", "2"],
    ],
)
def test_weights_stay_on_an_accelerator_only_where_one_rank_and_one_engine_use_it_at_the_same_time(config_file, words):
    load(config_file, [*SHARED, *ON_DEVICE])
    key = words[0].removeprefix("--")
    with pytest.raises(ConfigError, match=rf"'{key}' = .*'cuda_ipc' .*'shared_memory'"):
        load(config_file, [*SHARED, *ON_DEVICE, *words])


def test_weights_that_stay_on_an_accelerator_are_in_its_plan(config_file):
    through_host, on_device = (
        with_memory(config_file, 24, *ON_DEVICE, "--weights.transport", transport)
        for transport in ("shared_memory", "cuda_ipc")
    )
    shape = read_shape(on_device.model.path)
    assert (handed_over_bytes(through_host, shape), handed_over_bytes(on_device, shape)) == (0, 4 * shape.parameters)
    assert "of published weights" in plan_memory(on_device, ["0"]).description


def test_sharing_is_refused_for_a_launched_run(config_file):
    with pytest.raises(ConfigError, match=r"'devices.share' = true"):
        check_launch(load(config_file, SHARED), needs_keys=False)


def test_the_server_gets_the_memory_that_the_learner_does_not_need(config_file):
    config = with_memory_limits(with_memory(config_file, 24), ["0"])
    fraction = config.engine.server["mem_fraction_static"]
    shape = read_shape(config.model.path)
    learner = states_bytes(config, shape) + activations_bytes(config, shape)
    assert 0.5 < fraction < 1 - learner / (24 * GIB)
    [settings] = server_settings(config, "cuda", "worker-0")
    words = settings.arguments(1)
    assert words[words.index("--mem-fraction-static") + 1] == str(fraction)
    assert with_memory_limits(with_memory(config_file, 48), ["0"]).engine.server["mem_fraction_static"] > fraction
    assert weights_towards(config, "tcp://127.0.0.1:1").backend == "gloo"


def test_the_embedded_engine_may_allocate_what_the_learner_does_not_need(config_file):
    torch_engine = ["--worker.engine", "torch"]
    divided = with_memory_limits(with_memory(config_file, 24, *torch_engine), ["0"])
    in_turns = with_memory_limits(with_memory(config_file, 24, *torch_engine, "--devices.turns", "true"), ["0"])
    less, more = (each.engine.server["memory_fraction"] for each in (divided, in_turns))
    assert 0.5 < less < more < 1
    own = with_memory(config_file, 24, *torch_engine, "--engine.server.memory_fraction", "0.5")
    assert with_memory_limits(own, ["0"]) == own
    with pytest.raises(ConfigError, match=r"'devices\.share' = true .*2\.0 GiB"):
        with_memory_limits(with_memory(config_file, 2, *torch_engine), ["0"])


def test_a_configured_fraction_is_kept_and_nothing_is_limited_without_accelerators(config_file):
    own = with_memory(config_file, 24, *OWN, "0.5")
    assert with_memory_limits(own, ["0"]) == own and "mem_fraction_static = 0.5: " in plan_memory(own, []).description
    assert with_memory_limits(with_memory(config_file, 24), []).engine.server == {}
    assert plan_memory(load(config_file, SHARED), []).description.startswith("divided once accelerators are here")
    assert plan_memory(load(config_file), ["0"]) is None


def test_too_little_memory_is_refused_with_what_takes_it(config_file):
    with pytest.raises(ConfigError, match=r"2\.0 GiB .*learner .*activations"):
        with_memory_limits(with_memory(config_file, 2), ["0"])


@pytest.mark.parametrize("asked", ["raise SystemExit('no driver')", "pass"])
def test_memory_that_torch_does_not_report_is_refused(config_file, monkeypatch, asked):
    monkeypatch.setattr(devices, "ASK_MEMORY", asked)
    with pytest.raises(ConfigError, match=r"\((no driver|it sees none)\) .*devices\.memory_gib"):
        with_memory_limits(load(config_file, SHARED), ["0"])


def test_the_learner_s_memory_follows_its_configuration(config_file):
    def taken(*words):
        config = load(config_file, ["--learner.ranks", "1", *words])
        shape = read_shape(config.model.path)
        return states_bytes(config, shape) / shape.parameters, activations_bytes(config, shape)

    whole, activations = taken()
    assert whole == 16
    assert taken("--learner.ranks", "2")[0] == 8
    assert taken("--algorithm.kl_coef", "0.1")[0] == 20, "a reference policy"
    assert taken("--algorithm.advantage", "gae")[0] == 32, "a critic"
    assert 4 < taken("--lora.rank", "2", "--lora.targets", json.dumps(["q_proj"]))[0] < 5
    beside = taken("--lora.rank", "2", "--lora.embedding", "true")[0]
    assert taken("--lora.rank", "2", "--lora.embedding", "true", "--algorithm.kl_coef", "0.1")[0] == beside + 4
    assert taken("--learner.compute", "fp32")[1] == 2 * activations
    shape = read_shape(load(config_file).model.path)
    assert activations == 8192 * shape.layers * shape.kept_bytes
    again = taken("--learner.activation_checkpointing", "true")[1]
    assert again == 8192 * (shape.layers * 2 * shape.hidden + shape.kept_bytes)
    assert taken("--learner.microbatch_tokens", "16384")[1] == 2 * activations

"""Configurations refused before a server is started, and the capacity rule."""

import asyncio
from types import SimpleNamespace

import pytest

from april.cli import main
from april.config import BrokerSection, ConfigError, WeightsSection, load
from april.util import clock
from april.workers.engines.base import CapacityRule
from april.workers.engines.embedded.entry import TorchEntry
from april.workers.engines.sglang.channel import ServerWeightChannel
from april.workers.engines.sglang.client import ServerGone, ServerSilent
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.entry import SGLangEntry
from april.workers.engines.sglang.factory import make_sglang_engine, server_settings
from april.workers.engines.sglang.requests import ABORT_S, CANCEL_S
from april.workers.engines.sglang.server import (
    ServerFailed,
    ServerSettings,
    check_ranks,
    check_server,
    check_speculation,
)

SGLANG = ["--worker.engine", "sglang"]
REFUSED = {
    "versions unknown": (["--engine.pause", "retract"], "engine.stream_tokens = 1"),
    "pipeline parallel": (["--engine.server.pp_size", "2"], "tensor-parallel"),
    "replicas": (["--engine.server.data_parallel_size", "2"], "one worker for each replica"),
    "no address": (["--engine.url", "somewhere"], "http://HOST:PORT"),
    "one of them none": (["--engine.url", "http://a:1,somewhere"], "'somewhere' is no address"),
    "the same twice": (["--engine.url", "http://a:1,http://a:1/"], "name each once"),
    "servers of others to start": (["--engine.url", "http://a:1", "--engine.servers", "2"], "leave one of them out"),
    "no ports left": (["--engine.port", "65535", "--engine.servers", "2"], "lower it, or use 0"),
    "options for a server of others": (
        ["--engine.url", "http://127.0.0.1:1", "--engine.server.tp_size", "2"],
        "not started here",
    ),
    "towers that servers of others keep": (
        ["--engine.url", "http://127.0.0.1:1", "--learner.freeze_vision", "false"],
        "that may keep images as seen by earlier weights",
    ),
    "heads that cannot be split": (["--engine.server.tp_size", "3"], "2 heads and 1 key-value heads"),
    "deltas to servers": (["--engine.weights", "broadcast", "--weights.delta", "auto"], "'tensor'"),
    "unknown way": (["--engine.weights", "post"], "'disk', 'tensor' or 'broadcast'"),
    "supports without a bound": (["--sampling.top_p", "0.9"], "'sampling.top_p' = 0.9"),
    "min_p alone": (["--sampling.min_p", "0.1"], "'sampling.min_p' = 0.1"),
    "greedy training": (["--sampling.top_k", "1"], "sampling.top_k"),
    "supports too large": (["--sampling.top_k", "1025"], "less than or equal to 1024"),
    "supports of a draft": (["--sampling.top_k", "20", "--engine.server.speculative_algorithm", "NGRAM"], "'NGRAM'"),
    "min_p by a seed": (
        ["--sampling.top_k", "20", "--sampling.min_p", "0.1", "--engine.server.enable_deterministic_inference"],
        "use sampling.top_p",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_configuration_is_refused(config_file, case):
    overrides, mend = REFUSED[case]
    with pytest.raises(ConfigError, match=mend):
        load(config_file, [*SGLANG, *overrides])


def test_server_addresses_are_refused_with_the_embedded_engine(config_file):
    with pytest.raises(ConfigError, match=r"engine\.url.*worker\.engine"):
        load(config_file, ["--engine.url", "http://a:1"])


def test_a_truncated_distribution_is_accepted_if_the_engine_returns_supports(config_file, server_python, capsys):
    cut = [*SGLANG, "--sampling.top_k", "9", "--sampling.top_p", "0.9"]
    assert load(config_file, cut).sampling.is_cut and not load(config_file, SGLANG).sampling.is_cut
    assert main(["run", str(config_file), "--dry-run", *cut, "--engine.python", server_python]) == 0
    assert "up to 9 KiB a step" in capsys.readouterr().out, "8 samples of 24 tokens, 8 + 4 + 9 * 4 bytes each"


def test_options_become_the_server_s_command_line_and_override_april_s(config_file, tmp_path):
    words = ["--engine.server.tp-size", "2", "--engine.server.dtype", "bfloat16", "--engine.server.enable_metrics"]
    config = load(config_file, [*SGLANG, *words, "--engine.server.sleep_on_idle", "false"])
    settings = ServerSettings(tmp_path, tmp_path, tmp_path / "log", slots=7, options=config.engine.server)
    line = " ".join(settings.arguments(1234))
    for part in ("--tp-size 2", "--dtype bfloat16", "--enable-metrics", "--port 1234", "--max-running-requests 7"):
        assert part in line
    assert "float32" not in line and "--sleep-on-idle" not in line and "--skip-tokenizer-init" in line


def test_a_key_of_the_environment_is_demanded_by_servers_that_are_started(tmp_path, monkeypatch):
    settings = ServerSettings(tmp_path, tmp_path, tmp_path / "log")
    assert "--api-key" not in settings.arguments(1)
    monkeypatch.setenv("APRIL_SGLANG_API_KEY", "sesame")
    assert "--api-key sesame" in " ".join(settings.arguments(1))


def test_speculation_without_verification_by_sampling_is_refused(config_file):
    config = load(config_file, [*SGLANG, "--engine.server.speculative_algorithm", "NGRAM"])
    with pytest.raises(ConfigError, match=r"'NGRAM'.*'cpu'"):
        make_sglang_engine(config, "cpu", "w")


def test_speculation_is_allowed_if_it_samples_from_the_policy():
    ngram = {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 1.0}
    check_server(ngram | {"device": "cuda"})
    check_speculation({"speculative_algorithm": None}, "cpu", rocm=True)
    check_speculation(ngram | {"speculative_use_rejection_sampling": True}, "cuda", rocm=True)
    with pytest.raises(ServerFailed, match="speculative_use_rejection_sampling"):
        check_speculation(ngram, "cuda", rocm=True)
    with pytest.raises(ServerFailed, match="speculative_accept_threshold_acc"):
        check_server(ngram | {"speculative_accept_threshold_acc": 0.9})


def test_a_dry_run_shows_the_ranks_of_each_weight_channel(config_file, server_python, capsys):
    words = ["--engine.weights", "broadcast", "--engine.server.tp_size", "2", "--worker.count", "2"]
    assert main(["run", str(config_file), "--dry-run", *SGLANG, *words, "--engine.python", server_python]) == 0
    said = capsys.readouterr().out
    assert "worker-1: 3 ranks: 0 the learner, 1-2 its server's tensor-parallel ranks" in said
    assert not (config_file.parent / "runs").exists()


def test_a_weight_channel_has_the_ranks_and_device_that_the_server_reports():
    """Whatever spelling its options have, and also if the server is external."""
    large = SimpleNamespace(ready=True, info={"tp_size": 4, "device": "cuda"})
    lane = ServerWeightChannel(large, SimpleNamespace(ready=True, info={}), SimpleNamespace(ready=False, info={}))
    assert (lane.ranks, lane.device) == (5, "cuda"), "of those that are up"
    lane = ServerWeightChannel(SimpleNamespace(ready=True, info={}))
    assert (lane.ranks, lane.device) == (1, "cpu")


def test_a_server_with_unexpected_ranks_is_refused():
    check_ranks({"tp_size": 2}, 2)
    with pytest.raises(ServerFailed, match=r"engine\.server\.tp_size"):
        check_ranks({"tp_size": 2}, 1)


def test_a_dry_run_leaves_the_ranks_of_external_servers_open(config_file, capsys):
    words = ["--engine.url", "http://a:1,http://b:1", "--engine.weights", "broadcast", "--worker.count", "1"]
    assert main(["run", str(config_file), "--dry-run", *SGLANG, *words]) == 0
    said = capsys.readouterr().out
    assert "worker-0: 0 the learner, from 1 on the tensor-parallel ranks" in said
    assert "1: learner rank 0 to each worker over what its device takes" in said


def test_each_server_of_a_worker_has_its_own_log_port_and_devices_and_all_have_one_channel(
    config_file, server_python, capsys
):
    words = ["--engine.servers", "2", "--engine.port", "30000", "--engine.server.tp_size", "2", "--worker.count", "1"]
    config = load(config_file, [*SGLANG, *words])
    assert SGLangEntry.engine_names(config, "w") == ["w-server-0", "w-server-1"]
    assert SGLangEntry.weight_channels(config, "w") == ["w"]
    external = config.model_copy(update={"weights": WeightsSection(transport="external")})
    assert SGLangEntry.weight_channels(external, "w") == ["w-server-0", "w-server-1"], "each stops by itself"
    first, second = server_settings(config, "cuda", "w")
    assert (first.port, second.port) == (30000, 30001)
    assert second.log.name == "w-server-1-sglang.log" and second.options["base_gpu_id"] == 2
    words += ["--engine.weights", "broadcast", "--engine.python", server_python]
    assert main(["run", str(config_file), "--dry-run", *SGLANG, *words]) == 0
    assert "worker-0: 5 ranks: 0 the learner, 1-4 its 2 servers' tensor-parallel ranks" in capsys.readouterr().out
    config = load(config_file, [*SGLANG, "--engine.url", "http://a:1, http://b:2"])
    assert config.engine.url == ["http://a:1", "http://b:2"] and len(SGLangEntry.engine_names(config, "w")) == 2
    embedded = load(config_file, ["--engine.servers", "2"])
    assert TorchEntry.engine_names(embedded, "w") == ["w"], "it has no servers"


def test_the_configuration_with_server_options_reads_back_unchanged(config_file, tmp_path):
    config = load(config_file, [*SGLANG, "--engine.server.tp_size", "2", "--engine.server.list", "[1, 2]"])
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load(tmp_path / "again.toml") == config


def test_capacity_shrinks_to_what_runs_when_memory_is_full_and_grows_back():
    rule = CapacityRule(64)
    assert observed(rule, running=64, waiting=20, usage=0.95) == 64, "slots, not memory, hold the waiting ones back"
    assert observed(rule, running=40, waiting=3, usage=0.97) == 40
    assert observed(rule, running=41, waiting=0, usage=0.95) == 40
    assert observed(rule, running=30, waiting=0, usage=0.5) == 50
    for _ in range(3):
        observed(rule, running=30, waiting=0, usage=0.5)
    assert rule.requests == 64


def test_capacity_never_exceeds_the_server_s_own_maximum():
    """A server may run fewer requests than configured, because of its memory."""
    rule = CapacityRule(64)
    assert observed(rule, running=24, waiting=20, usage=0.4, most=24) == 24
    assert observed(rule, running=10, waiting=0, usage=0.2, most=24) == 24
    assert observed(rule, running=10, waiting=0, usage=0.2, most=0) == 30, "it has not said so yet"
    assert observed(CapacityRule(8), running=8, waiting=9, usage=0.4, most=24) == 8


def observed(rule, running, waiting, usage, most=64):
    rule.observe(num_running_reqs=running, num_waiting_reqs=waiting, token_usage=usage, max_running_requests=most)
    return rule.requests


def test_a_frozen_server_delays_an_abort_no_longer_than_the_broker_waits(monkeypatch):
    """The server answers the first abort late, and the next one never."""
    now, asked = [0.0], []
    monkeypatch.setattr(clock, "now", lambda: now[0])

    class Client:
        async def call(self, path, body, deadline_s):
            asked.append(deadline_s)
            if len(asked) > 1:
                now[0] += deadline_s
                raise ServerSilent("no answer")
            now[0] += CANCEL_S - 0.1

    async def abort():
        engine = SGLangEngine.__new__(SGLangEngine)
        engine._client, engine._alarm, engine._unverified = Client(), asyncio.Event(), None
        run = SimpleNamespace(task=asyncio.create_task(asyncio.sleep(60)), rid="r", interrupted=False)
        engine._streaming = {0: run}
        try:
            await engine._abort([run])
        finally:
            run.task.cancel()

    with pytest.raises(ServerGone):
        asyncio.run(abort())
    assert len(asked) == 2 and now[0] <= ABORT_S < BrokerSection().abort_deadline_s

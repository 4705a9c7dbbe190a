"""Tiny models, verifier processes, and the servers that engines attach to."""

import os

import pytest

from april.workers.engines.conformance.harness import VOCABULARY, TinyModels
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.server import ServerSettings
from april.workers.engines.vllm.engine import VLLMSettings
from april.workers.rewards.messages import RewardRules
from april.workers.rewards.pool import RewardPool
from tests.support.attached_servers import SGLANG_PYTHON, VLLM_PYTHON, serve
from tests.support.server_faults import bring_back

CORES = os.sched_getaffinity(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """vLLM's server shares the core of the test that reads from it: on one of its own it ends long responses while the
    reader waits to be scheduled, so that there is nothing left to interrupt. Whole runs have all cores."""
    if item.get_closest_marker("vllm") and "config_file" not in item.fixturenames:
        os.sched_setaffinity(0, {max(CORES)})
    try:
        return (yield)
    finally:
        os.sched_setaffinity(0, CORES)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """tiny_model(architecture, seed=0) -> TinyModel; seeds differ in the weights alone."""
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make_pool():
    """Pools of verifier processes that are closed again."""
    pools = []

    def make(processes=1, timeout_s=30.0, **rules):
        pools.append(RewardPool(processes, RewardRules(timeout_s, **rules)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def sglang_server(tiny_model, tmp_path_factory):
    """One real SGLang server for all tests that only attach to it; it holds what the last of them has loaded."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    yield from serve(ServerSettings(SGLANG_PYTHON, tiny_model().folder, log, slots=64, context_tokens=640))


@pytest.fixture(scope="session")
def vllm_server(tiny_model, tmp_path_factory):
    """The same of vLLM."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    yield from serve(VLLMSettings(VLLM_PYTHON, tiny_model().folder, log, slots=64, context_tokens=640))


@pytest.fixture
def attach_engine(sglang_server, tiny_model):
    """attach_engine(**options) -> an engine on the SGLang server of all tests."""
    made = []

    def make(**options):
        options = {"slots": 8, "chunk_tokens": 50, "stream_tokens": 5, "report_s": 1e9} | options
        made.append(SGLangEngine(tiny_model().folder, VOCABULARY, 640, url=sglang_server.url, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.cancel_all(range(100))
        engine.close()


@pytest.fixture
def held(engine, tiny_model):
    """The module's engine, which its tests harm, with weights loaded."""
    bring_back(engine, tiny_model())
    yield engine
    engine.cancel_all(range(100))

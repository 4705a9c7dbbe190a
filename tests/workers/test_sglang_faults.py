"""A real SGLang server that dies, hangs, or never comes up: no token is lost that was handed over, every end has a
sentence."""

import shutil
import signal
import socket
import time
from dataclasses import replace

import pytest

from april.workers.engines.base import EngineError
from april.workers.engines.sglang import SGLangEngine
from april.workers.engines.sglang_client import ServerGone
from april.workers.engines.sglang_server import ServerFailed, ServerSettings, SGLangServer
from tests.workers.conftest import SGLANG_PYTHON
from tests.workers.engine_driving import V0, VOCABULARY
from tests.workers.server_faults import PATIENCE_S, assert_samples_survive, kill_all, send

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    """On a server of its own, which the tests do harm to."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    settings = ServerSettings(SGLANG_PYTHON, tiny_model().folder, log, slots=16, context_tokens=640)
    options = {"slots": 16, "chunk_tokens": 16, "stream_tokens": 4, "stall_s": 4.0}
    engine = SGLangEngine(tiny_model().folder, VOCABULARY, 640, server=SGLangServer(settings), **options)
    yield engine
    engine.close()


def kill_scheduler(engine):
    send(engine, "scheduler", signal.SIGKILL)


def stop_scheduler(engine):
    send(engine, "scheduler", signal.SIGSTOP)


@pytest.mark.parametrize("harm", [kill_all, kill_scheduler, stop_scheduler])
def test_a_server_that_dies_or_hangs_is_started_again_and_samples_go_on(engine, tiny_model, harm):
    assert_samples_survive(engine, tiny_model(), lambda: harm(engine), "SGLang server")


def test_a_server_that_keeps_dying_is_given_up_with_a_sentence(engine, tiny_model):
    engine.max_restarts = engine.restarts
    engine.load_weights(V0, tiny_model().weights())
    kill_all(engine)
    deadline = time.monotonic() + PATIENCE_S
    with pytest.raises(EngineError, match="finished nothing in"):
        while time.monotonic() < deadline:
            engine.step()


# --- a server that never comes up ---


@pytest.fixture
def settings(tiny_model, tmp_path):
    return ServerSettings(SGLANG_PYTHON, tiny_model().folder, tmp_path / "server.log", slots=4, context_tokens=640)


def start(settings):
    SGLangEngine(settings.model, VOCABULARY, 640, server=SGLangServer(settings))


def test_a_port_that_is_taken_is_named(settings):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerFailed, match=f"'engine.port' = {port} is taken"):
            start(replace(settings, port=port))


def test_a_missing_installation_is_named_with_the_script_that_makes_it(settings, tmp_path):
    with pytest.raises(ServerFailed, match=r"launch/install-sglang\.sh"):
        start(replace(settings, python=tmp_path / "python"))


def test_a_model_that_sglang_cannot_run_is_refused_with_the_server_s_own_words(settings, tmp_path):
    shutil.copytree(settings.model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense", "architectures": ["NonsenseForCausalLM"]}')
    with pytest.raises(ServerFailed, match=r"ended at its start with status (.|\n)*nonsense"):
        start(replace(settings, model=tmp_path))


def test_a_start_that_takes_too_long_ends_at_its_deadline_and_leaves_nobody_behind(settings):
    server = SGLangServer(replace(settings, start_s=2.0))
    with pytest.raises(ServerFailed, match=r"does not serve after 2 s; raise engine\.start_s"):
        SGLangEngine(settings.model, VOCABULARY, 640, server=server)
    assert not server.alive


def test_an_unknown_option_is_refused_with_the_server_s_own_words(settings):
    with pytest.raises(ServerFailed, match=r"unrecognized arguments: --no-such-option"):
        start(replace(settings, options={"no_such_option": 1}))


def test_a_server_that_is_kept_by_others_must_be_there(tiny_model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerGone, match="cannot be reached"):
        SGLangEngine(tiny_model().folder, VOCABULARY, 640, url=f"http://127.0.0.1:{port}")

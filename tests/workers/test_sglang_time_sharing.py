"""A real SGLang server that does not let go of its memory, or does not come back: it is ended, and started again in the
next turn."""

import asyncio
import re
import signal

import pytest

from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import V0, VOCABULARY, drive, prompt
from april.workers.engines.sglang.client import ServerRefuses
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.server import ServerSettings, SGLangServer
from tests.support.attached_servers import SGLANG_PYTHON
from tests.support.server_faults import bring_back, run_until, send

pytestmark = [pytest.mark.timeout(1200), pytest.mark.sglang]
PATHS = ("/release_memory_occupation", "/resume_memory_occupation")
REQUEST = Request(1, prompt(), 40, temperature=0.0)


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    options = {"log_level_http": "info"}
    settings = ServerSettings(SGLANG_PYTHON, tiny_model().folder, log, slots=8, context_tokens=640, options=options)
    engine = SGLangEngine(tiny_model().folder, VOCABULARY, 640, slots=8, server=SGLangServer(settings))
    yield engine
    engine.close()


def calls(engine, path):
    return engine._server.settings.log.read_text().count(f"POST {path}")


def test_a_released_and_resumed_server_generates_the_same_tokens(held, tiny_model):
    whole, counts = drive(held, [REQUEST])[1], [calls(held, path) for path in PATHS]
    for turn in range(1, 3):
        held.submit(Request(2, prompt(), 500))
        run_until(lambda: held.generated_tokens > len(whole.tokens), held)
        held.cancel(2)
        held.release()
        assert held.version is None and held.ready and held.live == 0
        held.resume()
        held.load_weights(V0, tiny_model().weights())
        assert drive(held, [REQUEST])[1].tokens == whole.tokens
        assert [calls(held, path) for path in PATHS] == [count + turn for count in counts]


async def refuses(path, wanted, call, *arguments, **deadline):
    if path == wanted:
        raise ServerRefuses(f"no {path}")
    return await call(path, *arguments, **deadline)


async def hangs(path, wanted, call, *arguments, **deadline):
    if path == wanted:
        await asyncio.Event().wait()
    return await call(path, *arguments, **deadline)


FAULTS = {
    "release hangs": (hangs, PATHS[0], r"did not release its accelerator: .* within engine\.update_s = 2 s"),
    "release refused": (refuses, PATHS[0], "did not release its accelerator: no /release"),
    "resume refused": (refuses, PATHS[1], "did not acquire its accelerator again: no /resume"),
    "resume hangs": (hangs, PATHS[1], "did not acquire its accelerator again: it has not answered"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_server_that_fails_to_release_or_resume_is_killed_and_restarted_in_its_time_slice(
    held, tiny_model, monkeypatch, caplog, case
):
    fault, path, why = FAULTS[case]
    call, restarts = held._client.call, held.restarts
    if path == PATHS[1]:
        held.release()
    monkeypatch.setattr(held, "update_s", 2.0)
    monkeypatch.setattr(held._client, "call", lambda asked, *rest, **last: fault(asked, path, call, *rest, **last))
    if path == PATHS[0]:
        held.release()
        assert not held.ready and not held._server.alive, "so its memory is free"
        assert [held.step() for _ in range(5)] == [[]] * 5 and not held._server.alive, "it waits for its turn"
    held.resume()
    assert not held.ready and re.search(why, caplog.text), caplog.text
    monkeypatch.setattr(held, "update_s", 120.0)
    bring_back(held, tiny_model())
    assert held.restarts == restarts + 1 and len(drive(held, [REQUEST])[1].tokens) == 40


def test_a_server_that_dies_after_releasing_is_restarted_in_its_time_slice(held, tiny_model):
    held.release()
    send(held, "scheduler", signal.SIGKILL)
    run_until(lambda: not held.ready, held)
    assert not held._server.alive
    held.resume()
    bring_back(held, tiny_model())
    assert len(drive(held, [REQUEST])[1].tokens) == 40

"""What every generation engine keeps to, whichever it is: the checks of `april check engine`.

SGLang's server is the real one, and so is vLLM's; where two runs are compared, they are greedy,
since engines differ in how they draw. SGLang pauses by `abort` here, its default; by `retract`, with stream_tokens = 1,
where requests are interrupted: by changes of weights, by the cancel of many, to be resumed.
"""

import re

import pytest

from april.wire.message import Version
from april.workers.engines import ENGINES
from april.workers.engines.conformance.harness import TINY_CONTEXT, V0, VOCABULARY, Bench
from april.workers.engines.conformance.suite import CHECKS
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.timeout(900)
"""the first test on SGLang or vLLM starts its server"""


def start_torch(model, request, **options):
    return TorchEngine(model.folder, **options)


def attach_sglang(model, request, **options):
    url = request.getfixturevalue("sglang_server").url
    return SGLangEngine(
        model.folder, VOCABULARY, **{"max_context": TINY_CONTEXT, "stream_tokens": 5} | options, url=url
    )


def attach_retracting(model, request, **options):
    return attach_sglang(model, request, pause="retract", stream_tokens=1, **options)


def attach_vllm(model, request, **options):
    url = request.getfixturevalue("vllm_server").url
    return VLLMEngine(model.folder, VOCABULARY, **{"max_context": TINY_CONTEXT, "stream_tokens": 5} | options, url=url)


def start_flat(model, request, **options):
    return TorchEngine(model.folder, flat=True, **options)


STARTS = {"torch": start_torch, "torch-flat": start_flat, "sglang": attach_sglang, "vllm": attach_vllm}
MARKS = {"sglang": pytest.mark.sglang, "vllm": pytest.mark.vllm}
RETRACT = "sglang-retract"


@pytest.fixture
def bench(request, tiny_model):
    """Makes engines of the kind that is the parameter; engines on servers attach to a running one."""
    start = attach_retracting if request.param == RETRACT else STARTS[request.param]
    made = []

    def make(version: Version | None = V0, **options):
        options = {"slots": 8, "chunk_tokens": 7, "report_s": 1e9} | options
        engine = start(tiny_model(), request, **options)
        made.append(engine)
        if version is not None:
            engine.load_weights(version, tiny_model().weights())
        return engine

    yield Bench(ENGINES.find(request.param.partition("-")[0]), make, tiny_model)
    for engine in made:
        engine.cancel_all(range(3000))
        engine.close()


PAIRS = [
    pytest.param(check, engine, marks=MARKS.get(engine.removesuffix("-retract"), ()))
    for check in CHECKS
    for engine in (*STARTS, *([RETRACT] if check.interrupts else ()))
]


@pytest.mark.parametrize(
    ("check", "bench"), PAIRS, ids=lambda part: re.sub(r"[^\w.-]+", "_", str(part)), indirect=["bench"]
)
def test_every_engine_passes_the_check(check, bench):
    check.run(bench)

"""What every generation engine keeps to, whichever it is: the checks of `april check engine`.

SGLang's server is the real one, and so is vLLM's; where two runs are compared, they are greedy,
since engines differ in how they draw. SGLang pauses by `abort` here, its default; by `retract`, with stream_tokens = 1,
where requests are interrupted: by changes of weights, by the cancel of many, to be resumed. The transformers engine
also runs a model of each kind that the others lack.
"""

import re
from functools import partial

import pytest

from april.wire.message import Version
from april.workers.engines import ENGINES
from april.workers.engines.conformance.harness import TINY_CONTEXT, V0, VOCABULARY, Bench
from april.workers.engines.conformance.suite import CHECKS, configured
from april.workers.engines.conformance.weights import bad_weights_are_refused_and_the_old_ones_stay
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.embedded.transformers import TransformersEngine
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


def start_transformers(model, request, max_context=TINY_CONTEXT, **options):
    folder = model.folder if max_context == TINY_CONTEXT else model.with_context(max_context)
    return TransformersEngine(configured("transformers", folder, [], **options), "cpu", "check")


STARTS = {
    "torch": start_torch, "torch-flat": start_flat, "transformers": start_transformers, "sglang": attach_sglang,
    "vllm": attach_vllm,
}  # fmt: skip
MARKS = {
    "sglang": [pytest.mark.sglang, pytest.mark.always],
    "vllm": [pytest.mark.vllm, pytest.mark.always],
    "transformers": [pytest.mark.full],
    "torch-flat": [pytest.mark.full],
}
RETRACT = "sglang-retract"
KINDS = {"window": "gemma3_text", "sink": "gpt_oss", "state": "falcon_h1", "experts": "qwen3_moe"}
KINDS |= {"images": "qwen3_vl"}
"""Architectures that only the transformers engine has, by what is special about them."""


@pytest.fixture
def bench(request, tiny_model):
    """Makes engines of the kind that is the parameter; engines on servers attach to a running one."""
    name, _, kind = request.param.partition("-")
    start = attach_retracting if request.param == RETRACT else STARTS[name if kind in KINDS else request.param]
    models = partial(tiny_model, KINDS[kind]) if kind in KINDS else tiny_model
    made = []

    def make(version: Version | None = V0, **options):
        options = {"slots": 8, "chunk_tokens": 7, "report_s": 1e9} | options
        engine = start(models(), request, **options)
        made.append(engine)
        if version is not None:
            engine.load_weights(version, models().weights())
        return engine

    yield Bench(ENGINES.find(name), make, models)
    for engine in made:
        engine.cancel_all(range(3000))
        engine.close()


FIRST = {check.function: check for check in reversed(CHECKS)}
"""The first of the checks that differ in their values alone."""
FURTHER = ("after 1 tokens", "after 100 tokens", "cut once", "at temperature 1", "at temperature 1.7")
"""Ends of the names of checks that differ in a value alone from one which the short test suite has."""


def marks_of(check, engine):
    further = [pytest.mark.full] if engine == "torch" and check.name.endswith(FURTHER) else []
    return MARKS.get(engine.removesuffix("-retract"), further)


PAIRS = [
    pytest.param(check, engine, marks=marks_of(check, engine))
    for check in CHECKS
    for engine in (*STARTS, *([RETRACT] if check.interrupts else ()))
    if engine != "vllm" or check in FIRST.values()
] + [
    pytest.param(check, f"transformers-{kind}", marks=pytest.mark.full)
    for check in FIRST.values()
    for kind in KINDS
    if check.interrupts or check.of_true_distribution or check.function is bad_weights_are_refused_and_the_old_ones_stay
]


@pytest.mark.parametrize(
    ("check", "bench"), PAIRS, ids=lambda part: re.sub(r"[^\w.-]+", "_", str(part)), indirect=["bench"]
)
def test_every_engine_passes_the_check(check, bench):
    check.run(bench)

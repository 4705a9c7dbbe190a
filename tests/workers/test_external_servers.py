"""A real server that April did not start, whose weights others load: every token has the name of those that
sampled it, and a server that others gave something else gets no name."""

import asyncio
import copy
import json
import shutil
import threading
import urllib.request

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import april
from april.config import WeightsSection
from april.weights.canary import Canary
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import V0, V1, V2, VOCABULARY, Stream, drive, join, prompt
from april.workers.engines.sglang.channel import ServerWeightLoader
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.server import ServerSettings
from april.workers.engines.vllm.engine import VLLMEngine
from april.workers.engines.weight_loading import WeightCheck
from tests.support.attached_servers import SGLANG_PYTHON, serve
from tests.support.true_logprobs import assert_true

pytestmark = pytest.mark.timeout(900)
SERVERS = [
    pytest.param((SGLangEngine, "sglang_server"), marks=pytest.mark.sglang, id="sglang"),
    pytest.param((VLLMEngine, "vllm_server"), marks=pytest.mark.vllm, id="vllm"),
]
PATIENCE_S = 120.0
TEXT = list(range(1, 40))


class Framework:
    """An external trainer: it loads weights into the server by the server's own API, and reports to April."""

    def __init__(self, server, folder, publisher):
        self.server, self.folder, self.publisher = server, folder, publisher

    def updates(self, version, of_trainer, loaded=None):
        """`loaded`: weights that reach the server, if they differ from the trainer's."""
        logprobs = of_trainer.logprobs(TEXT, 1).tolist()
        self.publisher.announce(version, Canary(TEXT, logprobs, "float32"))
        asyncio.run(self.load(loaded or of_trainer))
        self.publisher.externally_loaded()

    async def load(self, model):
        shutil.copy(model.folder / "config.json", self.folder)
        tensors = {name: one.contiguous() for name, one in model.weights().items() if name != "lm_head.weight"}
        save_file(tensors, self.folder / "model.safetensors")
        client = self.server.make_client()
        await client.call("/update_weights_from_disk", {"model_path": str(self.folder)}, PATIENCE_S)
        await client.close()


@pytest.fixture(params=SERVERS)
def parts(request, tiny_model, tmp_path):
    """(engine, loader, framework)"""
    engine_class, server = request.param
    section = WeightsSection(transport="external", publish_deadline_s=PATIENCE_S, transfer_deadline_s=PATIENCE_S)
    options = {"slots": 8, "chunk_tokens": 50, "stream_tokens": 5, "report_s": 1e9}
    url = request.getfixturevalue(server).url
    engine = engine_class(tiny_model().folder, VOCABULARY, 640, url=url, **options)
    publisher = WeightPublisher(section, "test", "cpu")
    receiver = WeightReceiver(section, "uid", "w0", "cpu", up=lambda: engine.ready)
    receiver.connect(publisher.address)
    yield engine, ServerWeightLoader(engine, receiver, WeightCheck()), Framework(engine, tmp_path, publisher)
    engine.cancel_all(range(100))
    receiver.close()
    publisher.close()
    engine.close()


def stepped(engine, loader, work, version, *arguments):
    """Chunks of the engine while `work` runs, and until it has loaded or refused `version`."""
    failed, refused_before = [], loader.weight_check.failures

    def guarded():
        try:
            work(version, *arguments)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    chunks = []
    while thread.is_alive() or (
        not failed and engine.version != version and loader.weight_check.failures == refused_before
    ):
        loader.load()
        chunks += engine.step()
    assert not failed, failed
    return chunks


def test_every_token_has_the_version_of_the_externally_loaded_weights(parts, tiny_model):
    engine, loader, framework = parts
    models = {V0: tiny_model(seed=0), V1: tiny_model(seed=1), V2: tiny_model(seed=2)}
    stepped(engine, loader, framework.updates, V0, models[V0])
    assert engine.version == V0
    request = Request(1, prompt(), 600, seed=1)
    streams = [drive(engine, [request], tokens=50)[1]]
    for version in (V1, V2):
        streams.append(Stream(stepped(engine, loader, framework.updates, version, models[version])))
        assert engine.version == version
        streams.append(drive(engine, tokens=50)[1])
    stream = join(*streams, drive(engine)[1])
    assert len(stream.tokens) == 600 and set(stream.versions) == {V0, V1, V2}
    assert stream.versions == sorted(stream.versions)
    assert_true(models, request, stream)


def test_the_weight_check_detects_wrong_externally_loaded_weights(parts, tiny_model):
    engine, loader, framework = parts
    stepped(engine, loader, framework.updates, V0, tiny_model(seed=0))
    stepped(engine, loader, framework.updates, V1, tiny_model(seed=1), tiny_model(seed=2))
    assert loader.weight_check.failures == 1 and engine.ready
    assert engine.version is None, "it has no name, and gets no lease"


# --- a whole run -------------------------------------------------------------------------------------------------


@pytest.fixture
def server_of_the_policy(policy_folder, tmp_path):
    settings = ServerSettings(SGLANG_PYTHON, policy_folder, tmp_path / "server.log", slots=16, context_tokens=512)
    yield from serve(settings)


def logprobs_under(model, tokens):
    ids = torch.as_tensor(tokens).to(torch.int64)
    with torch.inference_mode():
        every = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
    return every.gather(-1, ids[1:, None])[:, 0]


@pytest.mark.sglang
def test_a_whole_run_with_externally_loaded_weights_labels_every_token(
    server_of_the_policy, config_file, policy_folder, tmp_path
):
    """A trainer with random steps, under a schedule that generates during weight updates."""
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    held, apart, named, generator = {}, [], set(), torch.Generator().manual_seed(0)

    def load_into_the_server():
        folder = tmp_path / "weights"
        model.save_pretrained(folder)
        body = json.dumps({"model_path": str(folder)}).encode()
        address = f"{server_of_the_policy.url}/update_weights_from_disk"
        asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["success"]

    def update(run):
        held[run.step] = copy.deepcopy(model)
        with run.updating(lambda tokens: logprobs_under(model, tokens).tolist()) as due:
            assert due
            load_into_the_server()

    keys = {
        "weights.transport": "external", "worker.engine": "sglang", "engine.url": server_of_the_policy.url,
        "worker.count": 1, "schedule.kind": "continuous", "schedule.max_staleness": 1, "schedule.max_steps": 4,
        "data.epochs": 4,
        "weights.publish_deadline_s": PATIENCE_S, "weights.transfer_deadline_s": PATIENCE_S,
    }  # fmt: skip
    with april.connect(config_file, overrides=keys) as run:
        update(run)
        for batch in run.batches():
            for ids, mask, said, versions in zip(
                batch.input_ids, batch.response_mask, batch.logprobs, batch.versions, strict=True
            ):
                named |= (steps := set(versions[mask].tolist()))
                for step in steps:
                    chosen = mask & (versions == step)
                    right = torch.cat([torch.zeros(1), logprobs_under(held[step], ids)])
                    apart.append((said - right)[chosen].abs().max().item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
            run.consumed(batch)
            update(run)
    assert run.step == 4 and len(named) > 1
    assert max(apart) < 1e-3, "each has the log-probability of the version that it names"

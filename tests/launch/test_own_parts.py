"""Parts of the user's own are called before a run, with what they will get: what cannot work is a sentence."""

import sys

import pytest

from april import config as configuration
from april.launch import check
from april.launch.check import check_run
from april.launch.findings import Findings

MODULE = """
import os

import torch

from april.broker.schedules.rounds import RoundSchedule
from april.workers.engines.in_process import InProcessEngine


def scalar(logprobs, proximal_logprobs, advantages, spans, clip):
    return -(logprobs * advantages).mean(), advantages > 9


class Class:
    def __call__(self, logprobs, proximal_logprobs, advantages, spans, clip):
        return -(logprobs * advantages), advantages > 9


def few(logprobs, advantages):
    return -(logprobs * advantages), advantages > 9


def alone(logprobs, proximal_logprobs, advantages, spans, clip):
    return -(logprobs * advantages)


def constant(logprobs, proximal_logprobs, advantages, spans, clip):
    return -advantages, advantages > 9


def infinite(logprobs, proximal_logprobs, advantages, spans, clip):
    return logprobs / 0.0, advantages > 9


def of_a_rank(logprobs, proximal, advantages, spans, clip):
    return (logprobs * int(os.environ["RANK"]), advantages > 9)


def collective(logprobs, proximal, advantages, spans, clip):
    return (logprobs * torch.distributed.get_rank(), advantages > 9)


def kernel(logprobs, proximal_logprobs, advantages, spans, clip):
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


def good(logprobs, proximal_logprobs, advantages, spans, clip):
    return -(logprobs * advantages), advantages > 9


def mean_age(tokens, section):
    return tokens.ages.float().mean()


def means(rewards, lengths):
    return [group.mean() for group in rewards]


def nothing(figures):
    pass


class Stuck(RoundSchedule):
    def hands_out(self, ledger, step):
        return False


class Outside(InProcessEngine):
    true_distribution, truncates_sampling = False, False

    def set_weights(self, tensors): ...

    def sample(self, running):
        return self.vocabulary, 0.0


class Tabled(Outside):
    reads = ("server",)

    def __init__(self, config, device, name):
        super().__init__(config, device, name)
        self.token = config.engine.server["deep"]["tokens"][0]

    def sample(self, running):
        return self.token, 0.0


class Kernel(Outside):
    def sample(self, running):
        raise RuntimeError("CUDA error: no device")


class OtherFiles(Outside):
    def __init__(self, config, device, name):
        raise FileNotFoundError("no model.gguf")


class Positive(Outside):
    def sample(self, running):
        return 1, 0.7


class Raises(Outside):
    def sample(self, running):
        return running.tokens[-1], 0.0
"""


@pytest.fixture
def errors(tmp_path, monkeypatch, config_file):
    """errors(key, part, *words): what the checks of a start say of a run with that part and those overrides."""
    (tmp_path / "own_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def found(key, part, *words):
        value = f'["own_parts:{part}"]' if key.endswith("s") and key != "algorithm.loss" else f"own_parts:{part}"
        findings = Findings()
        check_run(configuration.load(config_file, [f"--{key}", value, *words]), [], 0, findings)
        found.remarks = "\n".join(findings.warnings)
        return "\n".join(findings.errors)

    yield found
    sys.modules.pop("own_parts", None)


@pytest.mark.parametrize(
    ("key", "part", "said"),
    [
        ("algorithm.loss", "scalar", "returned a tensor of shape [], and has to return a tensor of shape ["),
        ("algorithm.loss", "Class", "raised TypeError: Class() takes no arguments"),
        ("algorithm.loss", "few", "raised TypeError: few() takes 2 positional arguments but 5 were given"),
        ("algorithm.loss", "alone", "has to return a tuple: the loss of each token, and whether it was clipped"),
        ("algorithm.loss", "constant", "returned losses without a gradient"),
        ("algorithm.loss", "infinite", "on a small batch; mend it"),
        ("algorithm.corrections", "mean_age", "returned a tensor of shape [], and has to return a tensor of shape ["),
        ("algorithm.advantage", "means", "returned a tensor of shape [], and has to return a tensor of shape ["),
        ("algorithm.step_scale", "nothing", "returned None, which is no factor"),
        ("schedule.kind", "Stuck", "fails in a run on small batches: the run stands still before batch 0"),
        ("worker.engine", "Outside", "is outside of the vocabulary, 0 to "),
        ("worker.engine", "Positive", "a log-probability is 0.7; mend it, and try it with `april check engine"),
        ("worker.engine", "Raises", "fails on a tiny model: 'RunningRequest' object has no attribute 'tokens'"),
    ],
)
def test_a_part_that_cannot_work_is_a_sentence_before_the_run(errors, key, part, said):
    text = errors(key, part)
    assert text.startswith(f"key {key!r} = 'own_parts:{part}' ") and said in text and text.count("key '") <= 2


def test_a_good_part_passes(errors):
    assert errors("algorithm.loss", "good") == ""


def test_a_loss_of_a_source_that_cannot_work_is_refused_with_the_source(errors, config_file):
    source = f'{{path = "{configuration.load(config_file).data.path}", algorithm = {{loss = "own_parts:scalar"}}}}'
    text = errors("algorithm.loss", "good", "--data.path", "none", "--data.sources", f"[{source}]")
    assert text.startswith("[algorithm] of data.sources.0: key 'algorithm.loss' = 'own_parts:scalar' returned")


def test_an_engine_is_tried_with_the_tables_of_its_section(errors):
    words = "--engine.server", '{mem = 0.5, deep = {tokens = [7], "a b" = "x"}}'
    assert errors("worker.engine", "Tabled", *words) == ""


@pytest.mark.parametrize(
    ("key", "part", "said"),
    [
        ("algorithm.loss", "of_a_rank", "section [algorithm] could not be tried outside of a run: 'RANK'"),
        ("algorithm.loss", "collective", "section [algorithm] could not be tried outside of a run: Default"),
        ("algorithm.loss", "kernel", "section [algorithm] could not be tried without an accelerator: Poi"),
        ("worker.engine", "Kernel", "could not be tried without an accelerator: CUDA error"),
        ("worker.engine", "OtherFiles", "could not be tried on a tiny model: FileNotFoundError: no model.gguf"),
    ],
)
def test_a_part_that_may_need_another_machine_or_model_is_a_remark(errors, key, part, said):
    devices = "--learner.device=auto", "--worker.device=auto"
    assert errors(key, part, *devices) == "" and said in errors.remarks


@pytest.mark.full
@pytest.mark.parametrize(("key", "part"), [("algorithm.loss", "scalar"), ("worker.engine", "Positive")])
def test_with_an_accelerator_a_part_is_tried_there_in_a_process_of_its_own(
    errors, monkeypatch, config_file, tmp_path, key, part
):
    monkeypatch.chdir(tmp_path)
    on_cpu = "from april.launch import check; check.DEVICE = 'cpu'; check.tell_objections()"
    monkeypatch.setattr(check, "TRIAL", on_cpu)
    config = configuration.load(config_file, [f"--{key}", f"own_parts:{part}"])
    trial = check.try_objective if key == "algorithm.loss" else check.check_own_engine
    check.try_part(trial, config, found := Findings(), True)
    assert found.errors[0].startswith(f"key {key!r} = 'own_parts:{part}' ") and not found.warnings

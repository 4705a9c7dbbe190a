"""Activations that are recomputed in the backward pass, with the inputs of layers on the host."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from transformers import AutoConfig

from april.config import ConfigError
from april.config.checks import check
from april.learner.trainer import Trainer
from tests.support.learner.comparison import equal
from tests.support.learner.small_learner import make_config, uneven_batch


@pytest.fixture
def moved(monkeypatch):
    """Sizes of the tensors that were moved to the host."""
    sizes = []

    class Recorded(save_on_cpu):
        def __init__(self, pin_memory=False):
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: sizes.append(tuple(tensor.shape)) or pack(tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Recorded)
    return sizes


@pytest.mark.parametrize("algorithm", [{}, {"advantage": "gae"}], ids=["policy", "critic"])
def test_inputs_of_layers_are_moved_to_the_host_and_the_step_is_the_same(
    algorithm, policy_folder, tmp_path, one_rank, moved
):
    model, batch = AutoConfig.from_pretrained(policy_folder), uneven_batch(0, policy_folder)
    weights = []
    for on_host in (False, True):
        keys = {"activation_checkpointing": True, "activations_on_host": on_host, "microbatch_tokens": 100_000}
        config = make_config(policy_folder, tmp_path / str(on_host), algorithm=algorithm, **keys)
        trainer = Trainer(config, torch.device("cpu"))
        assert moved == []
        trainer.step(batch)
        weights.append(trainer.weights())
    widths = [size[-1] for size in moved if len(size) == 3]
    assert widths.count(model.hidden_size) >= model.num_hidden_layers * (2 if algorithm else 1)
    assert set(widths) <= {model.hidden_size, 1} and max(map(len, moved)) == 3, "nothing from inside a layer is moved"
    assert equal(*weights)


def test_nothing_can_be_moved_where_nothing_is_recomputed(policy_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"learner\.activations_on_host.*set learner\.activation_checkpointing"):
        check(make_config(policy_folder, tmp_path, activations_on_host=True))

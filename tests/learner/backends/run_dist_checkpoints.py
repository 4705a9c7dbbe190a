"""Run under torchrun, where Megatron-core is: its own `load` and `save` on ranks that share the layers of each model.

Of each folder: what April has written (`megatron`) is loaded, and compared with what the ranks read of the Hugging Face
folder (`model`). Then Megatron's own writer saves it (`saved`), in one after the other of its forms. Every second model
has Transformer Engine's name of the norm before experts.
"""

import queue
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from april.config import LearnerSection
from april.learner import process_group
from april.learner.backends.megatron.dist_checkpoints import FORMS, expert_norms, other_name
from april.learner.backends.megatron.groups import initialise_megatron
from april.learner.backends.megatron.layout import ParallelLayout
from april.learner.backends.megatron.model import MegatronPolicy
from april.learner.model import empty_policy
from april.util.lifetime import exit_at_once


def main(folders: list[Path]) -> None:
    section = LearnerSection(backend="megatron", ranks=2, tensor_parallel=2)
    device = process_group.join(section)
    initialise_megatron(section, device)
    write_without_accelerator()
    for number, folder in enumerate(folders):
        lm = empty_policy(folder / "model", 1.0).lm
        model = MegatronPolicy(lm, folder / "model", 1.0, ParallelLayout.from_section(section, device)).model
        model.post_process = True  # its head is named as Megatron has it
        expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        found = dist_checkpointing.load({"model": state_of(model, lm, number, {})}, str(folder / "megatron"))
        assert found["checkpoint_version"] == 3.0
        model.load_state_dict(found["model"])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), f"{folder}: {name}"
        if dist.get_rank() == 0:
            (folder / "saved").mkdir()
        dist.barrier()
        state = state_of(model, lm, number, FORMS[number % len(FORMS)])
        dist_checkpointing.save({"model": state, "args": Path()}, str(folder / "saved"))
    process_group.leave()
    exit_at_once(0)


def state_of(model, lm, number: int, form: dict[str, bool]) -> dict:
    state = model.sharded_state_dict(metadata=form)
    for _, norm in expert_norms(lm, state) if number % 2 else ():
        norm.key = other_name(norm.key)
    return state


def write_without_accelerator() -> None:
    """Megatron's writer waits for CUDA, its processes ask psutil, which it does not require, for their memory, and the
    one that keeps what they say outlives this."""
    torch.cuda.synchronize = lambda: None
    filesystem_async._process_memory = lambda: 0
    filesystem_async._results_queue = queue.Queue()


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])

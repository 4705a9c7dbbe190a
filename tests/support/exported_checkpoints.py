"""Loads weights of a run's checkpoints, and compares them with the exported Hugging Face folder."""

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM


def model_of_checkpoint(run_dir, step, policy_folder):
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    state = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    dcp.load(state, checkpoint_id=run_dir / "checkpoints" / f"step_{step:06d}", no_dist=True)
    return model


def assert_exported(run_dir, name, step, policy_folder):
    """Check that transformers loads the exported folder `name`, and that its weights are those of checkpoint `step`."""
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / name, dtype=torch.float32)
    for parameter, value in model_of_checkpoint(run_dir, step, policy_folder).named_parameters():
        assert torch.equal(value, exported.get_parameter(parameter)), parameter

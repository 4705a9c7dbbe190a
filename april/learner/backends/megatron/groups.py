"""Megatron's process-wide state: process groups, random number tracker, and replacements for CUDA calls on a CPU."""

import math
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from april.config import LearnerSection


def initialise_megatron(section: LearnerSection, device: torch.device) -> None:
    """Set up Megatron's global state for the parallelism of `section` over the default process group. Collective."""
    if device.type == "cpu":
        run_without_cuda()
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # nothing is drawn at random
    make_groups(section)


def make_groups(section: LearnerSection) -> None:
    shares, stages, expert_parallel = section.tensor_parallel, section.pipeline_parallel, section.expert_parallel
    expert_tensor_parallel = shares if expert_parallel == 1 else 1
    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        if found == (shares, stages, expert_parallel, expert_tensor_parallel):
            return
        parallel_state.destroy_model_parallel()
    minutes = timedelta(seconds=section.collective_timeout_s) / timedelta(minutes=1)
    parallel_state.initialize_model_parallel(
        shares,
        stages,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
        distributed_timeout_minutes=max(1, math.ceil(minutes)),
    )


def run_without_cuda() -> None:
    """Replace the CUDA calls that Megatron makes for sequence parallelism: the device of its buffers, and the stream on
    which token counts are copied to the host. On a CPU the counts are already on the host."""

    def read_counts(dispatcher, point, tokens_per_expert=None):
        if point == "before_ep_alltoall" and torch.is_tensor(dispatcher.input_splits):
            dispatcher.input_splits = dispatcher.input_splits.tolist()
            dispatcher.output_splits = dispatcher.output_splits.tolist()
        return tokens_per_expert

    torch.cuda.current_device = lambda: torch.device("cpu")
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = read_counts

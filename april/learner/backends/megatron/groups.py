"""What Megatron has once in a process: groups of ranks, a source of random numbers, and CUDA or what stands for it."""

import math
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from april.config import LearnerSection


def make_ready(section: LearnerSection, device: torch.device) -> None:
    """For a model that is divided as `section` says, among the ranks of the default process group. Collective."""
    if device.type == "cpu":
        do_without_cuda()
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # nothing is drawn at random
    make_groups(section)


def make_groups(section: LearnerSection) -> None:
    shares, stages, expert_parallel = section.tensor_parallel, section.pipeline_parallel, section.expert_parallel
    of_each_expert = shares if expert_parallel == 1 else 1
    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        if found == (shares, stages, expert_parallel, of_each_expert):
            return
        parallel_state.destroy_model_parallel()
    minutes = timedelta(seconds=section.collective_timeout_s) / timedelta(minutes=1)
    parallel_state.initialize_model_parallel(
        shares,
        stages,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=of_each_expert,
        distributed_timeout_minutes=max(1, math.ceil(minutes)),
    )


def do_without_cuda() -> None:
    """Where ranks divide tokens, Megatron asks CUDA for the device of its buffers, and for a stream that counts are
    copied on. In a process that computes on a CPU the device is that, and counts are there already."""

    def counts_are_here(dispatcher, point, tokens_per_expert=None):
        if point == "before_ep_alltoall" and torch.is_tensor(dispatcher.input_splits):
            dispatcher.input_splits = dispatcher.input_splits.tolist()
            dispatcher.output_splits = dispatcher.output_splits.tolist()
        return tokens_per_expert

    torch.cuda.current_device = lambda: torch.device("cpu")
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts_are_here

"""Stand-in for OpenRLHF's side of the adapter: how it asks for samples and reads them. The real one imports vLLM and
flash-attention, which need accelerators.

OpenRLHF 0.11.2 on PyPI: `SamplesGenerator._process_response_into_experience` of
openrlhf/trainer/ppo_utils/samples_generator.py, `BasePPOTrainer.train_step` of openrlhf/trainer/ppo_trainer.py, and
`broadcast_to_vllm` of openrlhf/trainer/ray/ppo_actor.py.
"""

import asyncio

import torch

FIELDS = {
    "prompt", "label", "images", "mm_train_inputs", "reward", "scores", "observation_tokens", "action_ranges",
    "rollout_log_probs", "truncated", "extra_logs",
}  # fmt: skip
"""Fields of a response dictionary, as OpenRLHF's own agent executors fill them in."""


def experience(response, max_len=64):
    """OpenRLHF's experience of a response: masks and log-probabilities are one column to the left of their tokens."""
    assert response.keys() == FIELDS
    tokens = torch.tensor(response["observation_tokens"].copy())
    mask = torch.zeros_like(tokens)
    for start, end in response["action_ranges"]:
        mask[start:end] = 1
    return {
        "sequences": tokens[:max_len],
        "action_mask": mask[1:max_len],
        "rollout_log_probs": torch.tensor(response["rollout_log_probs"][1:max_len]),
        "rewards": torch.tensor([response["reward"]]),
        "truncated": torch.tensor([response["truncated"]]),
    }


async def generate(engine, prompts, tokenizer, size):
    """Generate responses to the prompts of one step as OpenRLHF does: one call for each prompt, all at once."""
    calls = [
        engine.generate_responses(
            prompt=prompt, label=label, sampling_params=None, max_length=64, hf_tokenizer=tokenizer, num_samples=size,
            images=None,
        )
        for prompt, label in prompts
    ]  # fmt: skip
    return await asyncio.gather(*calls)


async def broadcast(engine, tensors, sent):
    """Send rank 0's weights to the engine tensor by tensor; `sent`: queue that stands for the collective broadcast."""
    for count, (name, tensor) in enumerate(tensors.items(), 1):
        sent.append(tensor)
        await engine.update_weight(name, dtype=tensor.dtype, shape=tensor.shape, empty_cache=count == len(tensors))

"""TRL's GRPOTrainer on April's workers: it learns the quickstart's task, and goes on where it was killed.

april make-policy && april make-data                # once: the policy and the prompts
python examples/trl_grpo.py configs/quickstart.toml --run.name trl --output trl-checkpoints
"""

import argparse
import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from april import config as configuration
from april.config import LearnerSection
from april.trainers.adapters import trl as adapter

ROWS = 32
"""of a micro-batch, at most"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("--output", default="trl-checkpoints", help="folder [default trl-checkpoints]")
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints [default 4]")
    options, rest = parser.parse_known_args()
    overrides = {key.removeprefix("--"): value for key, value in zip(rest[::2], rest[1::2], strict=True)}
    config = configuration.load(options.config, rest)

    samples = config.schedule.rollout_batch_size * config.schedule.n_samples_per_prompt
    arguments = GRPOConfig(
        output_dir=options.output,
        per_device_train_batch_size=min(ROWS, samples),
        gradient_accumulation_steps=max(1, samples // ROWS),
        num_generations=config.schedule.n_samples_per_prompt,
        max_completion_length=config.sampling.max_response_tokens,
        max_steps=config.schedule.max_steps,
        max_grad_norm=config.learner.grad_clip,
        temperature=config.sampling.temperature,
        beta=0.0,
        epsilon_high=0.28,
        loss_type="dapo",
        vllm_importance_sampling_mode="token_truncate",
        gradient_checkpointing=False,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    with adapter.connect(options.config, arguments, overrides=overrides) as rollouts:
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(config.model.path),
            args=arguments,
            train_dataset=rollouts.dataset,
            reward_funcs=rollouts.reward,
            rollout_func=rollouts.generate,
            optimizers=optimizer_and_schedule(model, config.learner),
        )
        rollouts.train(trainer)


def optimizer_and_schedule(model: torch.nn.Module, section: LearnerSection) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """As April's learner has them. The warm-ups of transformers begin at 0: the first batch would teach nothing."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=section.lr, betas=section.betas, weight_decay=section.weight_decay
    )
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, section.warmup_steps)))


if __name__ == "__main__":
    main()

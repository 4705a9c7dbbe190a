"""AReaL's trainer on April's workers: it trains the quickstart's policy, and goes on where it was killed.

april make-policy && april make-data                # once: the policy and the prompts
python examples/areal_grpo.py configs/quickstart.toml --config examples/areal.yaml [KEY=VALUE ...]
"""

import sys

from areal.api.cli_args import GRPOConfig, load_expr_config

from april.trainers.adapters.areal import ArealTrainer


def main() -> None:
    run, *words = sys.argv[1:]
    config, _ = load_expr_config(words, GRPOConfig)
    with ArealTrainer(run, config) as trainer:
        trainer.train()


if __name__ == "__main__":
    main()

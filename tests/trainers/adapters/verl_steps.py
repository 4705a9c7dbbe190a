"""Run in verl's environment: steps of verl's trainer, its own functions in their order, on April's rollouts.

verl's Ray workers need accelerators: the actor here is a model in this process.

    python verl_steps.py CONFIG FOLDER KILLED_AT      # 0: not; checkpoints go to FOLDER; what came of it is printed
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import AdvantageEstimator, compute_policy_loss_vanilla
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.reward import extract_reward
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.config import ActorConfig, CheckpointEngineConfig

N, SIZE, STEPS = 4, 2, 3
CORRECTION = {"rollout_is": "token", "rollout_is_threshold": 2.0, "bypass_mode": False}


class Actor:
    """In the place of verl's group of Ray workers."""

    def __init__(self, path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.engine = CheckpointEngineRegistry.new("april", is_master=True, bucket_size=1 << 20, folder=FOLDER)

    def update_actor(self, loss):
        """Train on the loss; returns metrics as verl's engine does."""
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        metrics = {"loss": loss.item(), "grad_norm": norm, "actor/pg_clipfrac": [0.0, 0.5]}
        return tensordict_utils.get_tensordict({}, {"metrics": metrics})

    def update_weights(self, global_steps, mode):
        asyncio.run(self.engine.send_weights(iter(self.model.state_dict().items()), global_steps=global_steps))

    def save(self, folder, step):
        """As verl names it."""
        place = folder / f"global_step_{step}"
        place.mkdir(parents=True)
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], place / "actor.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))

    def load(self, folder):
        newest = folder / "latest_checkpointed_iteration.txt"
        if not newest.exists():
            return 0
        model, optimizer = torch.load(folder / f"global_step_{newest.read_text()}" / "actor.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return int(newest.read_text())

    def logprobs(self, batch):
        ids, length = batch.batch["input_ids"], batch.batch["responses"].shape[1]
        output = self.model(
            input_ids=ids, attention_mask=batch.batch["attention_mask"], position_ids=batch.batch["position_ids"]
        )
        logits = output.logits[:, -length - 1 : -1].float()
        return logits.log_softmax(-1).gather(-1, batch.batch["responses"][..., None])[..., 0]


def rows(step):
    """As verl's data loader gives them."""
    numbers = [(N * step + place) % 64 for place in range(N)]
    return {
        "dummy_tensor": torch.zeros(N, 1, dtype=torch.uint8),
        "raw_prompt": np.array([f"{number:02d}*3+60=" for number in numbers], dtype=object),
        "reward_model": np.array([{"ground_truth": str(number % 2)} for number in numbers], dtype=object),
        "data_source": np.array(["small"] * N, dtype=object),
        "index": np.array(numbers),
    }


def step_of(trainer, manager, actor, step, config):
    batch = DataProto.from_single_dict(rows(step))
    batch.non_tensor_batch["uid"] = np.array([f"{step}-{place}" for place in range(N)], dtype=object)
    asked = RayPPOTrainer._get_gen_batch(trainer, batch)
    asked.meta_info["global_steps"] = step + 1
    output = manager.generate_sequences(asked.repeat(repeat_times=SIZE, interleave=True))
    output.meta_info.pop("timing")
    batch = batch.repeat(repeat_times=SIZE, interleave=True).union(output)
    reward, _ = extract_reward(batch)
    with torch.no_grad():
        batch.batch["old_log_probs"] = actor.logprobs(batch)
    seen = {name: float(value) for name, value in calculate_debug_metrics(batch).items()}
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = reward
    batch, corrected = compute_rollout_correction_and_add_to_batch(batch, OmegaConf.create(CORRECTION))
    batch = compute_advantage(batch, AdvantageEstimator.GRPO, num_repeat=SIZE, config=AlgoConfig())
    loss, figures = compute_policy_loss_vanilla(
        batch.batch["old_log_probs"], actor.logprobs(batch), batch.batch["advantages"], batch.batch["response_mask"],
        config=config, rollout_is_weights=batch.batch["rollout_is_weights"],
    )  # fmt: skip
    actor.update_actor(loss)
    labels = [row["ground_truth"] for row in batch.non_tensor_batch["reward_model"]]
    apart = (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).abs() * batch.batch["response_mask"]
    return {
        "rewards": reward.sum(1).tolist(),
        "prompts": [
            row[mask[: row.shape[0]] > 0].tolist()
            for row, mask in zip(batch.batch["prompts"], batch.batch["attention_mask"], strict=True)
        ],
        "labels": labels,
        "advantages": batch.batch["advantages"].abs().max().item(),
        "apart": apart.max().item(),
        "oldest": [int(one) for one in batch.non_tensor_batch["min_global_steps"]],
        "metrics": sorted(seen) + sorted(corrected) + sorted(figures),
        "loss": loss.item(),
    }


def main(file, killed_at):
    folder = Path(FOLDER, "checkpoints")
    theirs = OmegaConf.create({
        "data": {"train_batch_size": N},
        "trainer": {"default_local_dir": str(folder), "resume_mode": "auto"},
        "actor_rollout_ref": {"rollout": {
            "n": SIZE, "temperature": 1.0, "prompt_length": 16, "response_length": 24,
            "agent": {"agent_loop_manager_class": "april.trainers.adapters.verl.AgentLoopManager"},
            "custom": {"april": {"config": file}},
        }},
    })  # fmt: skip
    ray.get = lambda done: done
    kind = load_class_from_fqn(theirs.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager")
    manager = kind.create(config=theirs, llm_client=None, teacher_client=None, reward_loop_worker_handles=None)
    from april.trainers.adapters.verl import CheckpointManager

    actor = Actor(manager.run.config.model.path)
    engine = CheckpointEngineConfig(backend="april", engine_kwargs={"april": {"folder": FOLDER}})
    weights = CheckpointManager(config=engine, actor_wg=actor, replicas=[])
    weights.sleep_replicas()
    saved = actor.load(folder)
    weights.update_weights(saved)
    config = ActorConfig(strategy="fsdp", rollout_n=SIZE, ppo_micro_batch_size_per_gpu=4)
    steps = []
    for step in range(saved, STEPS):
        steps.append(step_of(None, manager, actor, step, config))
        if step == 0:
            actor.save(folder, step + 1)
        if step + 1 == killed_at:
            print(json.dumps(steps), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        weights.update_weights(step + 1)
    print(json.dumps(steps))


if __name__ == "__main__":
    FOLDER = sys.argv[2]
    main(sys.argv[1], int(sys.argv[3]))

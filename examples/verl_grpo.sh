#!/usr/bin/env bash
# verl's GRPO on April's rollouts: the prompts, N' and rewards are the run's, training is verl's.
#
#   examples/verl_grpo.sh my-run.toml ROWS.parquet [OPTION OF VERL ...]
#
# ROWS.parquet: any prompts in verl's form, as many as its steps train; they only count them.
set -euo pipefail

run=${1:?the TOML file of the run}
rows=${2:?a Parquet file in the form of verl}
shift 2
key() { python -c "import operator, sys; from april import config; c = config.load(sys.argv[1]); print(operator.attrgetter(sys.argv[2])(c))" "$run" "$1"; }

rollout=actor_rollout_ref.rollout
exec python -m verl.trainer.main_ppo trainer.use_v1=False \
    algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=token \
    data.train_files="$rows" data.val_files="$rows" data.train_batch_size="$(key schedule.rollout_batch_size)" \
    data.max_response_length="$(key sampling.max_response_tokens)" \
    actor_rollout_ref.model.path="$(key model.path)" \
    $rollout.name=sglang $rollout.n="$(key schedule.n_samples_per_prompt)" \
    $rollout.temperature="$(key sampling.temperature)" $rollout.calculate_log_probs=True \
    $rollout.agent.agent_loop_manager_class=april.trainers.adapters.verl.AgentLoopManager \
    $rollout.checkpoint_manager_class=april.trainers.adapters.verl.CheckpointManager \
    $rollout.checkpoint_engine.backend=april \
    $rollout.checkpoint_engine.custom_backend_module=april.trainers.adapters.verl \
    +$rollout.custom.april.config="$run" \
    trainer.test_freq=-1 trainer.val_before_train=False \
    trainer.total_training_steps="$(key schedule.max_steps)" "$@"

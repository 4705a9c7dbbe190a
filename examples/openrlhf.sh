#!/usr/bin/env bash
# OpenRLHF's trainer on April's rollouts: the options that have to say the same come from the run, all others are yours.
#
#   examples/openrlhf.sh my-run.toml --data.prompt_dataset ROWS [OPTION OF OPENRLHF ...]
#
# Through Ray's job submission: ray job submit -- examples/openrlhf.sh my-run.toml ...
set -euo pipefail

run=${1:?the TOML file of the run}
shift
key() { python -c "import operator, sys; from april import config; c = config.load(sys.argv[1]); print(operator.attrgetter(sys.argv[2])(c))" "$run" "$1"; }

exec python -m april.trainers.adapters.openrlhf --april.config "$run" \
    --actor.model_name_or_path "$(key model.path)" \
    --rollout.batch_size "$(key schedule.rollout_batch_size)" \
    --rollout.n_samples_per_prompt "$(key schedule.n_samples_per_prompt)" \
    --rollout.temperature "$(key sampling.temperature)" \
    --rollout.max_new_tokens "$(key sampling.max_response_tokens)" \
    --vllm.num_engines 1 --algo.advantage.estimator group_norm \
    --algo.advantage.is_correction_level token "$@"

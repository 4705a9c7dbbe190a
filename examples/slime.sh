#!/usr/bin/env bash
# Options that put April's rollouts under a script of slime's; the others stay as they are.
#
#   MODEL_ARGS=(...) ROLLOUT_ARGS=(...)  and so on, as in slime's own scripts
#   source examples/slime.sh my-run.toml /shared/weights
#   python3 train.py "${APRIL_ARGS[@]}" "${MODEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" ...
#
# my-run.toml has data.source = "submitted", and says the same as ROLLOUT_ARGS.
april_run=${1:?the TOML file of the run}
april_weights=${2:?a folder that the trainer and the rollout manager see}
april_options=$(mktemp --suffix .yaml)
echo "run_config: $(realpath "$april_run")" >"$april_options"

APRIL_ARGS=(
    --rollout-function-path april.trainers.adapters.slime.generate_rollout
    --update-weight-transport disk
    --update-weight-disk-dir "$april_weights"
    --update-weight-disk-keep-files
    --custom-config-path "$april_options"
)

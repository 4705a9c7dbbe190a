"""Published scripts of other frameworks, their settings restated: what April says for them, and what it cannot say."""

import pytest

from april.trainers.convert.openrlhf import OpenRLHF
from april.trainers.convert.slime import Slime
from april.trainers.convert.trl import TRL
from april.trainers.convert.verl import Verl
from tests.support.converted_scripts import assert_says, converted, flags, python_script
from tests.trainers.convert import published_scripts as published

DIRECTORIES = 'MODEL_DIR="/root"\nexport MODEL_DIR=$MODEL_DIR\nDATA_DIR=${DATA_DIR:-/root}\n'


@pytest.mark.parametrize("which", published.APRIL, ids=lambda which: "-".join(map(str, which)))
def test_a_script_of_the_published_experiments_is_translated(which, tmp_path):
    arrays = published.april_arrays(*which)
    given = [name.replace("GEPO", "GRPO") for name in arrays]
    translation, config = converted(
        Slime(),
        f"{DIRECTORIES}source models/own.sh\n"
        + "\n".join(f"{name}=(\n{flags(options)}\n)" for name, options in arrays.items())
        + "\nray job submit --address=http://127.0.0.1:8265 -- python3 train.py \\\n"
        + " \\\n".join(["--actor-num-nodes 1", "--actor-num-gpus-per-node 8", "--colocate", "${MODEL_ARGS[@]}"])
        + " "
        + " ".join(f"${{{name}[@]}}" for name in given),
        tmp_path,
    )
    expected = published.april_says(*which)
    assert_says(config, expected | {"algorithm.clip_high": 0.2 if which == published.MISSPELT else 0.28})
    assert not translation.unsupported
    misspelt = {"${GRPO_ARGS[@]}", "GEPO_ARGS"} if which == published.MISSPELT else set()
    assert translation.undecided.keys() == {"learner.ranks, worker.count"} | misspelt


@pytest.mark.parametrize("name", published.TRL)
def test_an_example_of_trl_is_translated(name, tmp_path):
    trainer, options, keys = published.TRL[name]
    translation, config = converted(TRL(), python_script(trainer, options), tmp_path, "mine.py")
    assert_says(config, keys | {"model.path": options["model"]})
    assert {"train_dataset", "data.path, data.label_key", "learner.ranks, worker.count"} <= translation.undecided.keys()
    assert config.learner.lr_schedule == ("constant" if trainer == "AsyncGRPO" else "linear")


def test_trl_s_command_line_is_translated(tmp_path):
    translation, config = converted(
        TRL(), f"accelerate launch \\\n gspo.py {flags(published.TRL_GSPO)}".replace("\n", " \\\n"), tmp_path
    )
    assert_says(config, published.TRL_GSPO_SAYS | {"learner.minibatches": 4})
    assert "default of lora_dropout = 0.05" in translation.unsupported


def test_a_default_replaces_no_option_that_is_given_under_another_name(tmp_path):
    optimizer = f"{published.ACTOR}optim."
    given = f"{published.ACTOR}grad_clip=0.3 {optimizer}lr_decay_style=WSD {optimizer}min_lr_ratio=0.1"
    options, _ = next(iter(published.VERL.values()))
    words = " ".join(f"{key}={value}" for key, value in options.items())
    _, config = converted(Verl(), f"python3 -m verl.trainer.main_ppo {words} {given}", tmp_path)
    learner = config.learner
    assert (learner.grad_clip, learner.lr_schedule, learner.lr_floor) == (0.3, "wsd", 0.1)


@pytest.mark.parametrize("name", published.VERL)
def test_an_example_of_verl_is_translated(name, tmp_path):
    options, keys = published.VERL[name]
    lines = "\n".join(f"    {key}={value}" for key, value in options.items())
    translation, config = converted(
        Verl(),
        f'DATA=(\n{lines}\n)\nLAUNCH=(python3)\n"${{LAUNCH[@]}}" -m verl.trainer.main_ppo "${{DATA[@]}}" "$@"\n',
        tmp_path,
    )
    minibatches = options["data.train_batch_size"] // options[f"{published.ACTOR}ppo_mini_batch_size"]
    assert_says(config, keys | {"learner.minibatches": minibatches})
    in_reward = options["algorithm.use_kl_in_reward"]
    assert ("algorithm.use_kl_in_reward = True" in translation.unsupported) == in_reward
    assert "data.reward" in translation.undecided and not [
        key for key in translation.undecided if key.startswith("actor_rollout_ref.")
    ]


@pytest.mark.parametrize("name", published.ORLHF)
def test_an_example_of_openrlhf_is_translated(name, tmp_path):
    options, keys = published.ORLHF[name]
    script = f"set -x\npython3 -m openrlhf.cli.train_ppo_ray {flags(options)}".replace("\n   ", " \\\n   ")
    translation, config = converted(OpenRLHF(), script, tmp_path)
    responses = options["rollout.batch_size"] * options["rollout.n_samples_per_prompt"]
    assert_says(config, keys | {"learner.minibatches": responses // options["train.batch_size"]})
    assert (config.learner.lr_schedule, config.learner.lr_floor) == ("cosine", 0.1)
    assert "data.reward" in translation.undecided

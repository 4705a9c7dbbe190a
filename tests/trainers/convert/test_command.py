"""`april convert`: its output, its refusals, and its lists of untranslated options."""

import os
from typing import ClassVar

import pytest

from april import cli
from april.cli.convert import DIFFERS
from april.config import load
from april.trainers.convert import FRAMEWORKS
from april.trainers.convert.framework import Framework
from april.trainers.convert.translation import Ignored, MapTo, Options, Unsupported, scalar

SCRIPT = """
ARGS=(--hf-checkpoint ${MODELS}/Policy --prompt-data prompts.jsonl --rm-type math
      --num-rollout 100 --rollout-batch-size 32 --n-samples-per-prompt 8 --lr-decay-style constant)
python3 train.py --actor-num-gpus-per-node 4 --rollout-num-gpus 4 ${ARGS[@]} """


@pytest.fixture
def script(tmp_path):
    def write(further="", text=SCRIPT, name="run.sh"):
        path = tmp_path / name
        path.write_text(text + further)
        return str(path)

    return write


def convert(*arguments):
    return cli.main(["convert", *arguments])


def test_a_fully_translated_script_is_written_and_loads(script, tmp_path, capsys):
    out = tmp_path / "run.toml"
    assert convert("slime", script(), "--set", "MODELS=/models", "--out", str(out)) == 0
    config = load(out, inputs=())
    assert str(config.model.path) == "/models/Policy" and config.learner.ranks == config.worker.count == 4
    assert config.data.path == tmp_path / "prompts.jsonl" and config.data.reward == "math"
    assert 'path = "/models/Policy"                     # hf-checkpoint' in out.read_text()
    assert "0 cannot be said, 0 are open" in capsys.readouterr().err


def test_untranslatable_and_unreadable_options_are_listed_and_set_the_exit_status(script, capsys):
    further = "--kl-coef 0.1 --hidden-dropout 0.0 --attention-dropout 0.1 --no-such-option 3 --eps-clip $(choose)"
    assert convert("slime", script(further), "--set", "MODELS=/models") == DIFFERS
    translation = capsys.readouterr().out
    differs, _, rest = translation.partition("# What April cannot say")[2].partition("# What was not understood")
    unknown, _, apart = rest.partition("# What there is nothing to say of")
    assert "kl-coef = 0.1: April's KL stands in the loss" in differs and "attention-dropout = 0.1" in differs
    assert "no-such-option: it is not in April's table" in unknown and "eps-clip: a command would say it" in unknown
    assert "hidden-dropout" not in translation and "clip_low" not in translation and apart == ""


def test_an_array_that_may_grow_keeps_its_known_options(script, capsys):
    further = "\nARGS+=(--eps-clip 0.3)\nif [ -f x ]; then ARGS+=(--eps-clip 0.4); fi\n"
    text = SCRIPT.replace("\npython3", f"{further}python3")
    assert convert("slime", script(text=text), "--set", "MODELS=/m") == DIFFERS
    translation = capsys.readouterr().out
    assert "clip_low = 0.3 " in translation
    assert "${ARGS[@]}: ARGS: line 5 has a condition that cannot be decided" in translation


def test_a_value_of_the_wrong_type_is_undecided(script, capsys):
    text = SCRIPT.replace("--rollout-batch-size 32", "--rollout-batch-size many --rollout-top-k few")
    assert convert("slime", script(text=text), "--set", "MODELS=/m", "--schedule.rollout_batch_size", "32") == DIFFERS
    translation = capsys.readouterr().out
    assert "rollout-batch-size: 'many' is no number" in translation
    assert "rollout-top-k: 'few' is not of the kind" in translation


def test_a_chosen_key_is_set_and_no_longer_undecided(script, capsys):
    text = SCRIPT.replace("--rollout-num-gpus 4", "--colocate")
    assert convert("slime", script(text=text), "--set", "MODELS=/m") == DIFFERS
    chosen = ["--learner.ranks", "2", "--worker.count", "6"]
    assert convert("slime", script(text=text), "--set", "MODELS=/m", *chosen) == 0
    assert "count = 6                                   # chosen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("further", "refusal"),
    {
        "--rollout-top-p 0.9": "'sampling.top_p' = 0.9 does not bound what travels",
        "--over-sampling-batch-size 640": "'schedule.over_sampling_batch_size' = 640 exceeds 192",
    }.items(),
)
def test_a_translation_that_april_refuses_is_an_error(script, further, refusal, capsys):
    assert convert("slime", script(further), "--set", "MODELS=/models") == 2
    assert refusal in capsys.readouterr().err


TWO = "if [ -f x ]; then\n train.py --a\nelse\n train.py --b\nfi"
REFUSED = {
    ("slime", "run.sh", "python3 other.py"): "the script calls no program like train(_async)?.py",
    ("slime", "run.sh", TWO): "lines 2 and 4 of the script may both",
    ("trl", "run.py", "parser = TrlParser((GRPOConfig,))"): "takes its options from the command line",
    (
        "trl",
        "run.py",
        "GRPOConfig(beta=0)\nGRPOConfig(beta=1)",
    ): "lines 1 and 2 of the script make a configuration",
    ("trl", "run.py", "print("): "is not Python",
    ("verl", "run.yaml", "- a\n- b"): "holds no options",
    ("slim", "run.sh", ""): "is no framework whose scripts are read; did you mean 'slime'?",
}


@pytest.mark.parametrize("which", REFUSED, ids=lambda which: REFUSED[which][:30])
def test_a_script_without_readable_options_is_refused_with_a_sentence(which, script, capsys):
    framework, name, text = which
    assert convert(framework, script(text=text, name=name)) == 2
    assert REFUSED[which] in capsys.readouterr().err


def test_a_script_that_is_not_there_and_a_setting_without_a_value_are_refused(tmp_path, script, capsys):
    assert convert("slime", str(tmp_path / "none.sh")) == 2 and convert("slime", script(), "--set", "MODELS") == 2
    translation = capsys.readouterr().err
    assert "argument 'SCRIPT' =" in translation and "option '--set' = 'MODELS' is no NAME=VALUE" in translation


def test_yaml_of_trl_and_of_verl_is_read(script, capsys):
    trl = "model_name_or_path: Qwen/Qwen3-0.6B\nlearning_rate: 1e-5\nnum_generations: 4\nbf16: true\n"
    assert convert("trl", script(text=trl, name="trl.yaml"), "--data.path", "rows.jsonl") == DIFFERS
    assert "lr = 1e-05                                  # learning_rate" in (translation := capsys.readouterr().out)
    assert "n_samples_per_prompt = 4" in translation
    assert 'path = "rows.jsonl"                         # chosen' in translation
    verl = "actor_rollout_ref:\n  model: {path: /m}\n  rollout: {name: sglang, n: 4, prompt_length: '${data.x}'}\n"
    assert convert("verl", script(text=verl, name="verl.yaml"), "--data.path", "rows.jsonl") == DIFFERS
    assert "tp_size = 2" in (translation := capsys.readouterr().out) and 'engine = "sglang"' in translation


def test_names_of_a_hub_pass_through(script, capsys):
    trl = "model_name_or_path: Qwen/Qwen3-0.6B\nmodel_revision: v1\ndataset_name: openai/gsm8k\ndataset_config: main\n"
    assert convert("trl", script(text=trl, name="trl.yaml")) == DIFFERS
    said = [line.partition(" #")[0].strip() for line in capsys.readouterr().out.splitlines()]
    for line in (
        'path = "Qwen/Qwen3-0.6B"', 'revision = "v1"', 'path = "openai/gsm8k"', 'configuration = "main"'
    ):  # fmt: skip
        assert line in said


class Own(Framework):
    """A user's framework in one class."""

    source = "here"
    table: ClassVar = {
        "policy": MapTo("model.path"),
        "rows": MapTo("data.path"),
        "dice": Unsupported("April plays no dice", default=0),
        "log": Ignored("logs"),
    }

    def read(self, path, text, environment):
        return Options(dict(line.split("=") for line in text.split()))

    def translate_joint(self, translation):
        translation.set_key("schedule.kind", "sync")


def test_a_framework_of_ones_own_is_one_class(script, capsys):
    text = "policy=/m\nrows=r.jsonl\nlog=x"
    assert convert("tests.trainers.convert.test_command:Own", script(text=text)) == 0
    assert 'kind = "sync"' in capsys.readouterr().out
    assert convert("tests.trainers.convert.test_command:Own", script(text=f"{text}\ndice=6")) == DIFFERS
    assert "dice = '6': April plays no dice" in capsys.readouterr().out


@pytest.mark.parametrize("name", FRAMEWORKS.shipped)
def test_what_a_framework_s_table_names_are_keys_of_april_s(name):
    from april.config import known_keys

    rules = [rule for rule in FRAMEWORKS.find(name).table.values() if isinstance(rule, MapTo)]
    keys = {rule.key for rule in rules if not rule.key.startswith(("engine.server.", "data.template_options."))}
    assert rules and keys <= known_keys().keys()


def test_nothing_of_a_script_is_run(script, tmp_path, capsys):
    shell = f"touch {tmp_path}/ran\nX=$(touch {tmp_path}/ran)\n{SCRIPT}"
    convert("slime", script(text=shell), "--set", "MODELS=/m")
    convert("trl", script(text=f"import os\nos.mknod('{tmp_path}/ran')\nGRPOConfig(beta=os.mknod('x'))", name="x.py"))
    assert "ran" not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("['/d/*.parquet']", ["/d/*.parquet"]),
        ("[/d/*.parquet, /e/a*b]", ["/d/*.parquet", "/e/a*b"]),
        ('["*.parquet"]', ["*.parquet"]),
        ("[*.parquet]", "[*.parquet]"),
        ("[&a [1], *a]", "[&a [1], *a]"),
    ],
)
def test_a_list_may_have_patterns_of_files_and_has_no_aliases(text, value):
    assert scalar(text) == value


def doubled(start, line):
    """A text whose last line stands for 2^60 of its first."""
    return start + "".join(line.format(n, n + 1) for n in range(60))


HOSTILE = {
    "a power": ("slime", "run.sh", f"N=$((9**9**9**9))\n{SCRIPT} --num-steps-per-rollout $N"),
    "powers of powers": ("slime", "run.sh", "N=2\n" + "N=$((N**62))\n" * 60 + SCRIPT + " --num-steps-per-rollout $N"),
    "a negative power": ("slime", "run.sh", f"{SCRIPT} --num-steps-per-rollout $((2**-1))"),
    "digits": ("slime", "run.sh", f"{SCRIPT} --num-steps-per-rollout {'9' * 5000} --eps-clip {'1' * 400}"),
    "arithmetic of many digits": ("slime", "run.sh", f"{SCRIPT} --eps-clip $(({'9' * 5000}))"),
    "signs": ("slime", "run.sh", f"{SCRIPT} --eps-clip $(({'-' * 90_000}1))"),
    "doublings of a text": ("slime", "run.sh", "A=xxxx\n" + "A=$A$A\n" * 60 + SCRIPT),
    "doublings by appending": ("slime", "run.sh", "A=xxxx\n" + "A+=$A\n" * 60 + SCRIPT),
    "doublings of an array": ("slime", "run.sh", "A=(a b)\n" + 'A+=("${A[@]}")\n' * 60 + SCRIPT),
    "many wide commands": ("slime", "run.sh", f"A=({'a ' * 20_000})\n" + "run ${A[@]}\n" * 10_000 + SCRIPT),
    "substitutions": ("slime", "run.sh", f"{SCRIPT} --eps-clip {'$(' * 50_000}"),
    "defaults": ("slime", "run.sh", f"{SCRIPT} --eps-clip {'${A:-' * 20_000}1{'}' * 20_000}"),
    "conditions": ("slime", "run.sh", "if true; then\n" * 10_000 + SCRIPT + "\nfi" * 10_000),
    "groups": ("slime", "run.sh", "{ " * 50_000 + SCRIPT + "; }" * 50_000),
    "lists on the command line": ("verl", "run.sh", f"python3 -m verl.trainer.main_ppo a={'[' * 50_000}"),
    "aliases in a list on the command line": (
        "verl", "run.sh", f"python3 -m verl.trainer.main_ppo 'a=[{doubled('&a0 [1]', ', &a{1} [*a{0}, *a{0}]')}]'",
    ),
    "size": ("slime", "run.sh", SCRIPT + "# x\n" * 1_000_000),
    "YAML lists": ("trl", "run.yaml", f"a: {'[' * 50_000}"),
    "YAML aliases": ("trl", "run.yaml", doubled("a0: &a0 [1]\n", "a{1}: &a{1} [*a{0}, *a{0}]\n")),
    "YAML merges": ("trl", "run.yaml", doubled("a0: &a0 {x: 1}\n", "a{1}: &a{1} {{<<: [*a{0}, *a{0}]}}\n")),
    "YAML blocks": ("trl", "run.yaml", f"a:\n  {'- ' * 50_000}1"),
    "a YAML circle": ("trl", "run.yaml", "a: &a {b: *a}"),
    "YAML digits": ("trl", "run.yaml", f"num_generations: {'9' * 5000}\nbeta: .inf"),
    "Python lists": ("trl", "run.py", f"GRPOConfig(a={'[' * 50_000}"),
    "Python doublings": ("trl", "run.py", doubled("a0 = [1]\n", "a{1} = [a{0}, a{0}]\n") + "GRPOConfig(beta=a60)"),
    "a Python circle": ("trl", "run.py", "a = [b]\nb = [a]\nGRPOConfig(beta=a)"),
    "Python signs": ("trl", "run.py", f"GRPOConfig(beta={'-' * 3000}1)"),
}  # fmt: skip


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_script_that_grows_without_end_costs_a_sentence(attack, script, capsys):
    framework, name, text = HOSTILE[attack]
    assert convert(framework, script(text=text, name=name), "--set", "MODELS=/m") in (2, DIFFERS)
    printed = capsys.readouterr()
    assert len(printed.out + printed.err) < 20_000 and "Traceback" not in printed.err

"""Secrets in a configuration are masked wherever it is shown, whatever form they have."""

import json

import pytest

from april import config as configuration
from april.cli import main
from april.config import Config, ConfigError
from april.config.section import Section
from april.launch.preflight import differences
from april.observe.report.run_folder import shown_config
from april.util.errors import refuse
from april.util.text import HARMLESS_NAMES, SECRET_NAME, masked
from april.wire.security import keygen

SECRET = "s3cr3t-of-the-test"
FORMS = {
    "engine.server": {"api_key": SECRET, "hf_token": SECRET, "ssl_keyfile_password": SECRET},
    "agent.options": {"openai": {"OPENAI_API_KEY": SECRET}, "headers": {"Authorization": f"Bearer {SECRET}"}},
    "agent.command": ["python", "agent.py", "--api-key", SECRET, f"--judge-token={SECRET}", f"http://u:{SECRET}@h/v1"],
    "reward.url": f"https://user:{SECRET}@models.example:8000/score?key={SECRET}&v=1",
    "engine.url": [f"http://{SECRET}@models.example:8000"],
    "launch.environment": {"WANDB_API_KEY": SECRET, "DB": f"postgres://me:{SECRET}@db/x"},
    "launch.setup": [
        f"export HF_TOKEN={SECRET}",
        f"curl -H 'Authorization: Bearer {SECRET}' https://h",
        f"login --password '{SECRET}' me",
    ],
    "learner.checkpoint_store": f"s3://{SECRET}@bucket/runs",
}


@pytest.mark.parametrize("key", FORMS)
def test_a_secret_is_shown_nowhere(key):
    value, (section, name) = FORMS[key], key.split(".")
    shown = [shown_config({section: {name: value}}), differences({}, {section: {name: value}})]
    with pytest.raises(ConfigError) as refused:
        refuse(key, value, "is refused", "give another")
    with pytest.raises(ConfigError) as unknown:
        configuration.loading.validate({"model": {"path": "m"}, "data": {"path": "d"}, section: {f"{name}_": value}})
    for text in (*map(str, shown), str(refused.value), str(unknown.value)):
        assert "…" in text and SECRET not in text


def test_what_is_no_secret_is_shown_as_it_is(config_file):
    config = configuration.load(config_file, ["--reward.url", "http://127.0.0.1:8000/score"])
    assert config.without_secrets() == config
    assert masked({"max_tokens": "512", "prompt_key": "prompt"}) == {"max_tokens": "512", "prompt_key": "prompt"}


def test_no_key_of_april_s_own_is_taken_for_a_secret_by_its_name():
    def names(kind):
        return set(kind.model_fields).union(*map(names, kind.__subclasses__()))

    assert Config in Section.__subclasses__()
    assert {name for name in names(Section) if SECRET_NAME.search(name)} == HARMLESS_NAMES


@pytest.mark.parametrize("on", ["slurm", "kubernetes", "helm", "ray"])
def test_a_dry_run_of_a_launch_prints_no_secret(config_file, tmp_path, capsys, on):
    keygen.make_folder(tmp_path / "keys")
    options = [f"{key} = {json.dumps(value)}" for key, value in FORMS["engine.server"].items()]
    text = config_file.read_text() + "\n[engine.server]\n" + "\n".join(options)
    text += f'\n[launch]\non = "{on}"\nimage = "i"\nvolume = "v"\n'
    text += f'setup = {json.dumps(FORMS["launch.setup"])}\n[launch.environment]\nWANDB_API_KEY = "{SECRET}"\n'
    config_file.write_text(text)
    status = main(["launch", str(config_file), "--dry-run", "--security.keys", str(tmp_path / "keys")])
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert status == 0, printed.err


@pytest.mark.parametrize(
    "text",
    [
        f"python a.py --url http://h:1 --api-key={SECRET}",
        f"note: run with token={SECRET}",
        f"keys: those of the run, password: {SECRET}",
        f"run --verbose --api-key {SECRET}",
        f"run --verbose --api-key '{SECRET} {SECRET}",
        f'token: "{SECRET}"',
        f"non-default args: {{'api_key': ['{SECRET}'], 'port': 1}}",
        f'{{"model": "m", "client_secret": "{SECRET}"}}',
        f'hf_token = "{SECRET}"',
        f"see http://h/x?v=1 with TOKEN={SECRET}",
    ],
)
def test_what_stands_before_a_secret_in_a_text_does_not_show_it(text):
    assert "…" in masked(text) and SECRET not in masked(text)


def test_a_long_text_without_secrets_is_looked_through_once():
    """Patterns that begin anew at each character of a word would take many minutes."""
    for text in (200_000 * "a", 200_000 * "_", 100_000 * "api", 100_000 * "-a"):
        assert masked(text) == text


@pytest.mark.parametrize("text", [r"(?=.*\d)abc", r"(?<=x=)y", "/data/a?b=c.jsonl", "a: max_tokens=5 security.keys=/k"])
def test_a_question_mark_alone_hides_nothing(text):
    assert masked(text) == text


def test_a_url_with_user_and_query_hides_both():
    assert masked("http://u:p@h/x?token=1#y") == "http://…@h/x?…#y"

"""The command `april`: its help, and its time to start."""

import subprocess
import sys

import pytest

from april.cli import build_parser
from april.cli.command import COMMANDS

build_parser()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_and_its_options_have_help_in_sentences(command):
    texts = [command.function.__doc__, *(option.settings["help"] for option in command.options)]
    for text in texts:
        assert text[0].isupper() or text.startswith("lengths: "), text
        assert text.endswith("."), text


def test_building_the_parser_imports_nothing_heavy():
    """Each start of a part builds it; the listing of keys imports the configuration only when help is printed."""
    program = "import sys; from april.cli import build_parser; build_parser(); print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"april.config", "numpy", "pydantic", "torch", "zmq"} & set(done.stdout.splitlines())

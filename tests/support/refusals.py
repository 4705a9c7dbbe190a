"""Commands of `april` that are refused before they do anything."""

from april.cli import main


def refusal(capsys, *arguments):
    """The one sentence with which a command is refused."""
    assert main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    return error

"""Shell scripts read without being run: what a word stands for, and what is not known of it."""

import os
import subprocess

import pytest

from april.trainers.convert.shell import Script

GIVEN = {"GIVEN": "given"}
"""environment"""

READ = {
    "a plain word": ("run a b", ["run", "a", "b"]),
    "quotes": ("""run 'a b' "c d" e\\ f""", ["run", "a b", "c d", "e f"]),
    "a comment": ("run a # --b\n# run c", ["run", "a"]),
    "a line that goes on": ("run a \\\n  b", ["run", "a", "b"]),
    "a variable": ("X=1\nrun $X ${X}2 \"$X\" '$X'", ["run", "1", "12", "1", "$X"]),
    "a variable of several words": ('X="a b"\nrun $X "$X"', ["run", "a", "b", "a b"]),
    "a default": ("run ${X:-a} ${Y:-${Z:-b}} ${GIVEN:-c}", ["run", "a", "b", "given"]),
    "another where there is one": ("run a${X:+b} a${GIVEN:+b}", ["run", "a", "ab"]),
    "export": ("export X=a Y=b\nrun $X $Y", ["run", "a", "b"]),
    "an array": (
        'A=(--a 1\n  # --b 2\n  --c "x y")\nrun "${A[@]}" ${A[@]}',
        ["run", *["--a", "1", "--c"], "x y", *["--a", "1", "--c", "x", "y"]],
    ),
    "an array that grows": ("A=(a)\nA+=(b)\nrun ${A[@]}", ["run", "a", "b"]),
    "an empty array": ('A=()\nrun "${A[@]}" b', ["run", "b"]),
    "no arguments": ('run "$@" b', ["run", "b"]),
    "arithmetic": ("X=3\nrun $((X * 2 + 1)) $(( (1 + $X) / 2 ))", ["run", "7", "2"]),
    "a redirection": ("run a 2>&1 b 2>err | tee log", ["run", "a", "b"]),
    "a document": ("cat > f <<EOF\nrun x\nEOF\nrun a", ["run", "a"]),
    "a case": ("D=gpu\ncase $D in\n cpu) X=1 ;;\n gpu|npu) X=2 ;;\n *) X=3\nesac\nrun $X", ["run", "2"]),
    "a condition": (
        'X=b; if [ $X = a ]; then Y=1\nelif [ -z "$X" ]; then Y=2\nelif [[ $X == b* ]]; then Y=3; else Y=4\nfi\nrun $Y',
        ["run", "3"],
    ),
    "a condition of two": ('X=a\nif [ $X = a ] && { [ 1 -eq 2 ] || [ -n "$X" ]; }; then Y=1; fi\nrun $Y', ["run", "1"]),
    "settings of one command": ("X=1 run a", ["run", "a"]),
}  # fmt: skip


def read(text):
    script = Script.read(text, GIVEN)
    (called,) = [called for called in script.invocations if called.words[0].text == "run"]
    return called.words


@pytest.mark.parametrize("name", READ)
def test_a_word_is_read_as_the_shell_would(name):
    text, expected = READ[name]
    words = read(text)
    assert [word.text for word in words] == expected and not any(word.unreadable for word in words)


UNREAD = {
    "a command's output": ("X=$(nvidia-smi | wc -l)\nrun a $X", "a command would say it"),
    "a variable that nobody set": ("run a $X", "X is not set in the script; give it with --set X=VALUE"),
    "an array that nobody set": ("run a ${A[@]}", "A is not set in the script, maybe in one that it sources"),
    "what a condition decides": ("if which nvcc; then X=1; else X=2; fi\nrun a $X", "X: line 1 has a condition that"),
    "what a condition adds": ('A=()\nif [ -f x ]; then A+=(b); fi\nrun a "${A[@]}"', "A: line 2 has a condition that"),
    "what a loop sets": ("for X in a b; do Y=$X; done\nrun a $Y", "line 1 sets it under a condition or in a loop"),
    "what a function sets": ("f() {\n X=1\n}\nrun a $X", "line 2 sets it under a condition or in a loop"),
    "what another command decides": ("true_or_not && X=1\nrun a $X", "line 1 sets it under a condition or in a loop"),
    "an expansion": ("X=abc\nrun a ${X%c}", "an expansion that is not read"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_an_unknown_word_says_why(name):
    text, why = UNREAD[name]
    unread = [word.unreadable for word in read(text) if word.unreadable]
    assert len(unread) == 1 and why in unread[0]


def test_bash_expands_the_words_alike(tmp_path):
    """All that is said to be read, given to bash."""
    for text, expected in READ.values():
        script = 'run() { printf "%s\\0" run "$@"; }\n' + text.replace("| tee log", "")
        environment = GIVEN | {"PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.split("\0")[:-1] == expected, text

"""Reads the files in which agent programs record the answers they read, one file per sample, to compare repeated
executions of a program."""

from itertools import groupby
from operator import itemgetter

import orjson


def executions(folder):
    """Yield (sample, answers read by each execution of its program, in order) for each sample with a recorded answer. A
    program that is killed between opening its file and writing to it leaves an empty file."""
    for file in sorted(folder.iterdir()):
        lines = map(orjson.loads, file.read_bytes().splitlines())
        if runs := [[line["said"] for line in of_one] for _, of_one in groupby(lines, itemgetter("execution"))]:
            yield file.name, runs


def agree(runs):
    """Whether each execution read the same answers as the earlier ones, as far as both got; a killed execution may be
    shorter."""
    longest = []
    for run in runs:
        both = min(len(longest), len(run))
        if run[:both] != longest[:both]:
            return False
        longest = max(longest, run, key=len)
    return True

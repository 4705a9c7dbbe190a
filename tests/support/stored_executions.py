"""What programs have written down of what they read, a file a sample: a program that is run again reads the same."""

from itertools import groupby
from operator import itemgetter

import orjson


def executions(folder):
    """Of each sample, what its executions read, in their order."""
    for file in sorted(folder.iterdir()):
        lines = map(orjson.loads, file.read_bytes().splitlines())
        yield file.name, [[line["said"] for line in of_one] for _, of_one in groupby(lines, itemgetter("execution"))]


def agree(runs):
    """Whether each was answered as those before it, as far as it got; one that is killed may get less far."""
    longest = []
    for run in runs:
        both = min(len(longest), len(run))
        if run[:both] != longest[:both]:
            return False
        longest = max(longest, run, key=len)
    return True

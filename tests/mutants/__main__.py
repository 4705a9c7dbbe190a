"""`python -m tests.mutants [NAME ...] [--blind]`: says of each planted fault whether a test has caught it."""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import orjson

from tests.mutants import in_place, runner
from tests.mutants.catalogue import BadMutant, Mutant, load
from tests.mutants.runner import Choice, Tree


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition(": ")[2])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of them; all if none is named")
    parser.add_argument("--blind", action="store_true", help="any test of the short form, not just its own")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time; one a processor")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the verdicts are written")
    parser.add_argument("--log", action="store_true", help="print what pytest said of each")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        mutants = choose(given.names)
    except BadMutant as error:
        print(error, file=sys.stderr)
        return 2
    verdicts = judge(mutants, given.blind, given.jobs, given.log)
    caught = sum(verdict == "caught" for verdict in verdicts.values())
    print(f"{caught} of {len(mutants)} caught")
    if given.json:
        given.json.write_bytes(orjson.dumps({"verdicts": verdicts}, option=orjson.OPT_INDENT_2))
    return 0 if caught == len(mutants) else 1


def choose(names: list[str]) -> list[Mutant]:
    mutants = load()
    if unknown := [name for name in names if name not in mutants]:
        raise BadMutant(f"there is no mutant {unknown[0]}; there are {', '.join(mutants)}")
    return [mutants[name] for name in names or mutants]


def judge(mutants: list[Mutant], blind: bool, jobs: int, with_log: bool) -> dict[str, str]:
    """What became of each: caught, survived, or not judged, since its test does not pass without it either.

    Blind, one that its own test does not catch in the short form is held against all that is there: whichever test
    catches a fault first, the short form has caught it.
    """
    runner.import_heavy()
    with tempfile.TemporaryDirectory(prefix="april-mutants-") as folder:
        trees = [Tree.of_source(Path(folder) / "0")]
        trees += [trees[0].copy(Path(folder) / str(number)) for number in range(1, min(jobs, len(mutants)))]
        verdicts = {} if blind or with_log else caught_in_place(mutants, trees)
        own = {
            mutant: Choice(frozenset([mutant.caught_by]), short=blind)
            for mutant in mutants
            if mutant.name not in verdicts
        }
        verdicts |= hold_against(own, trees, with_log) if own else {}
        if blind and (left := [mutant for mutant in mutants if verdicts[mutant.name] != "caught"]):
            print(f"{len(left)} against the whole short form", flush=True)
            verdicts |= hold_against(dict.fromkeys(left, Choice(short=True)), trees, with_log)
    return verdicts


def caught_in_place(mutants: list[Mutant], trees: list[Tree]) -> dict[str, str]:
    verdicts = {}
    for mutant, test, seconds in in_place.caught(mutants, trees):
        verdicts[mutant.name] = "caught"
        print(f"{'CAUGHT':<10} {mutant.name} by {test} in {seconds:.1f} s", flush=True)
    return verdicts


def hold_against(choices: dict[Mutant, Choice], trees: list[Tree], with_log: bool) -> dict[str, str]:
    """Each mutant against its tests, if these pass without it, one at a time in each tree."""
    unmutated = runner.run_unmutated(Choice.all_of(choices.values()), trees)
    print(f"without a fault: {len(unmutated.outcomes)} tests, {unmutated.seconds:.0f} s", flush=True)
    if with_log or unmutated.failed:
        print(unmutated.log)
    fit = [mutant for mutant, choice in choices.items() if unmutated.has_passed(choice)]
    verdicts = {mutant.name: "not judged" for mutant in choices if mutant not in fit}
    for name in verdicts:
        print(f"NOT JUDGED {name}: its tests do not pass without it")
    for mutant, result in runner.run_all(fit, choices, trees):
        verdicts[mutant.name] = result.verdict
        by = result.failed[0] if result.failed else "no test"
        print(f"{result.verdict.upper():<10} {mutant.name} by {by} in {result.seconds:.1f} s", flush=True)
        if with_log:
            print(result.log)
    return verdicts


if __name__ == "__main__":
    sys.exit(main())

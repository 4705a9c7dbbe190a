"""`python -m tests.mutants [NAME ...] [--blind]`: says of each planted fault whether a test has caught it."""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import orjson

from tests.mutants import runner
from tests.mutants.catalogue import BadMutant, Mutant, load


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition(": ")[2])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of them; all if none is named")
    parser.add_argument("--blind", action="store_true", help="the whole short form against each, not its own test")
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
    """What became of each: caught, survived, or not judged, since its test does not pass without it either."""
    runner.import_heavy()
    limit_s = runner.BLIND_LIMIT_S if blind else runner.LIMIT_S
    tests = None if blind else {mutant.caught_by for mutant in mutants}
    verdicts: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="april-mutants-") as folder:
        trees = [runner.Tree(Path(folder) / str(number)) for number in range(max(1, min(jobs, len(mutants))))]
        unmutated = runner.run_unmutated(tests, limit_s * (1 if blind else 2), trees[0])
        print(f"without a fault: {len(unmutated.outcomes)} tests, {unmutated.seconds:.0f} s", flush=True)
        if with_log or unmutated.verdict != "survived":
            print(unmutated.log)
        if blind:
            fit = mutants if unmutated.verdict == "survived" else []
        else:
            fit = [mutant for mutant in mutants if unmutated.has_passed(mutant.caught_by)]
        for mutant in mutants:
            if mutant not in fit:
                verdicts[mutant.name] = "not judged"
                print(
                    f"NOT JUDGED {mutant.name}: {'the suite' if blind else mutant.caught_by} does not pass without it"
                )
        for mutant, result in runner.run_all(fit, blind, limit_s, trees):
            verdicts[mutant.name] = result.verdict
            by = result.failed[0] if result.failed else "no test" if blind else mutant.caught_by
            print(f"{verdicts[mutant.name].upper():<10} {mutant.name} by {by} in {result.seconds:.1f} s", flush=True)
            if with_log:
                print(result.log)
    return verdicts


if __name__ == "__main__":
    sys.exit(main())

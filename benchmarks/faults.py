"""Single calls that fail: every call of a run's processes to the file system and the network, one at a time.

A run of a tiny policy trains meanwhile, and a reader of its journal judges it (`tests/chaos/single_failures.py`). Each
part of the sweep is a run of its own: calls of the broker and its snapshots, the learner, workers, scorers and their
verifiers, agents and their programs. `--part` makes one of them alone, as for a machine that is quiet for a while; the
figures of all parts add up. The table says which calls failed, with which error. `lost` counts what the judge found
wrong, `discarded` the tokens of discarded groups, and `stuck` the calls after which no further step came within 90 s.
"""

import os
import sys
import tempfile
from pathlib import Path

import orjson
from common import Row, execute, parser, report

MINUTES = {"broker": 10.0, "learner": 8.0, "worker": 6.0, "scorer": 5.0, "agents": 6.0}
"""Parts of the sweep, and how long calls fail in each."""
QUICK_CALLS, QUICK_MINUTES = 4, 2.0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--part", action="append", choices=MINUTES, help="of the sweep; may be repeated [default all]"
    )
    arguments.add_argument("--calls", type=int, default=150, help="that fail in a part at most [default 150]")
    arguments.add_argument("--minutes", type=float, help="of each part at most [default by part, 35 in all]")
    given = arguments.parse_args()
    parts = given.part or (["broker", "agents"] if given.quick else list(MINUTES))
    results = []
    for part in parts:
        calls = QUICK_CALLS if given.quick else given.calls
        minutes = QUICK_MINUTES if given.quick else given.minutes or MINUTES[part]
        results.append(sweep(part, calls, minutes))
    failed, stuck, lost, not_reached = (
        [each for result in results for each in result[name]] for name in ("failed", "stuck", "lost", "not_reached")
    )
    for sentence in (*stuck, *lost):
        print(sentence, file=sys.stderr)
    rows = [
        Row("calls_failed", [len(failed)], "calls"),
        Row("lost", [len(lost)], "findings"),
        Row("discarded", [sum(result["discarded"] for result in results)], "tokens"),
        Row("stuck", [len(stuck)], "calls"),
        Row("places_failed", [len({(role, place) for role, place, _ in failed})], "places"),
        Row("brokers_restarted_by_hand", [sum(result["by_hand"] for result in results)], "restarts"),
    ]
    calls = [{"part": role, "place": place, "error": os.strerror(number)} for role, place, number in failed]
    report(rows, given.json, {"parts": parts, "calls": calls, "not_reached": not_reached})


def sweep(part: str, calls: int, minutes: float) -> dict:
    """What came of one part of the sweep, as `tests.chaos.single_failures` writes it."""
    with tempfile.TemporaryDirectory(prefix="april-faults-") as made:
        folder = Path(made)
        words = ["--calls", calls, "--minutes", minutes, "--folder", folder / "run", "--json", folder / "result.json"]
        execute([sys.executable, "-m", "tests.chaos.single_failures", part, *words], folder / "log", threads=1)
        return orjson.loads((folder / "result.json").read_bytes())


if __name__ == "__main__":
    main()

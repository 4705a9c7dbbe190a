"""Single calls that fail: every call of broker, learner and worker to the file system and the network, one at a time.

A run of a tiny policy trains meanwhile, and a reader of its journal judges it (`tests/chaos/single_failures.py`). The
table says which calls failed, with which error. `lost` counts what the judge found wrong, `discarded` the tokens of
discarded groups, and `stuck` the calls after which no further step came within 90 s.
"""

import os
import sys
import tempfile
from pathlib import Path

import orjson
from common import Row, execute, parser, report

CALLS, MINUTES = 300, 28.0
QUICK_CALLS, QUICK_MINUTES = 10, 4.0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=int, default=CALLS, help=f"that fail [default {CALLS}]")
    arguments.add_argument("--minutes", type=float, default=MINUTES, help=f"at most [default {MINUTES:g}]")
    given = arguments.parse_args()
    calls, minutes = (QUICK_CALLS, QUICK_MINUTES) if given.quick else (given.calls, given.minutes)
    with tempfile.TemporaryDirectory(prefix="april-faults-") as made:
        folder = Path(made)
        words = ["--calls", calls, "--minutes", minutes, "--folder", folder / "run", "--json", folder / "result.json"]
        command = [sys.executable, "-m", "tests.chaos.single_failures", *words]
        execute(command, folder / "log", threads=1)
        result = orjson.loads((folder / "result.json").read_bytes())
    for sentence in (*result["stuck"], *result["lost"]):
        print(sentence, file=sys.stderr)
    rows = [
        Row("calls_failed", [len(result["failed"])], "calls"),
        Row("lost", [len(result["lost"])], "findings"),
        Row("discarded", [result["discarded"]], "tokens"),
        Row("stuck", [len(result["stuck"])], "calls"),
        Row("places_failed", [len({(role, place) for role, place, _ in result["failed"]})], "places"),
        Row("brokers_restarted_by_hand", [result["by_hand"]], "restarts"),
    ]
    calls = [{"part": role, "place": place, "error": os.strerror(number)} for role, place, number in result["failed"]]
    report(rows, given.json, {"calls": calls, "not_reached": result["not_reached"]})


if __name__ == "__main__":
    main()

"""The long form of the chaos test: hundreds of kills, a thousand acknowledged tokens between any two of them.

    python -m tests.chaos.long --kills 200 --folder FOLDER

Half an hour on two cores. Prints the kills by process and by the phase of the run they fell into, and what the judge
found; fails as well if no kill fell into an abort or a delivery, or if no power loss took anything. A quarter of the
kills each is for broker, worker and learner, the rest for any; every tenth time the connections of the learner and of
one worker go dead, or a process sleeps, as well.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.chaos import VICTIMS, Chaos
from tests.chaos.history import History
from tests.conftest import PROMPTS, make_policy, make_prompts

TOKENS_BETWEEN = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="[default 200]")
    parser.add_argument("--folder", type=Path, help="of the run, kept [default a temporary one]")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when [default 0]")
    options = parser.parse_args()
    random.seed(options.seed)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="april-chaos-"))
    for name in ("policy", "data"):
        (folder / name).mkdir(parents=True)
    make_policy(folder / "policy")
    make_prompts(folder / "data")
    began = time.monotonic()
    run = Chaos(folder, folder / "policy", folder / "data", tokens_between=TOKENS_BETWEEN)
    try:
        run.go_on(TOKENS_BETWEEN)
        for number, victim in enumerate(victims(options.kills), start=1):
            run.kill(victim, run.aim(victim))
            if number % 20 == 0:
                run.half_open()
            elif number % 20 == 10:
                run.pause(random.choice(list(VICTIMS)), random.uniform(1.0, 6.0))
            print(f"{time.monotonic() - began:6.0f} s  {number} kills  {run.state.now()[1]} tokens", flush=True)
        run.finish()
    finally:
        run.end()
    wrongs = History(run.run_dir, PROMPTS).judge() + run.untried()
    print(run.table())
    print(f"power losses that took bytes from the journal: {run.cuts()}")
    print(f"fewest acknowledged tokens between two kills: {min(run.tokens_before)}")
    print("\n".join(wrongs) or "nothing that was acknowledged is missing, nothing was trained twice")
    return 1 if wrongs else 0


def victims(kills: int) -> list[str]:
    """In random order, a quarter for each kind of process and the rest for any."""
    sure = [victim for victim in VICTIMS for _ in range(-(-kills // 4))]
    rest = random.choices(list(VICTIMS), k=max(0, kills - len(sure)))
    return random.sample(sure + rest, len(sure + rest))


if __name__ == "__main__":
    sys.exit(main())

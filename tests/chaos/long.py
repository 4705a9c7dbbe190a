"""The long form of the chaos test: hundreds of kills, a thousand acknowledged tokens between any two of them.

    python -m tests.chaos.long --kills 200 --folder FOLDER

Half an hour on two cores. With `--agents` samples are sessions of programs with tools, and agents processes and the
processes of programs are killed, too. Prints the kills by process and by the phase of the run they fell into, and what
the judge found; fails as well if no kill fell into an abort or a delivery, or if no power loss took anything. Each kind
of process has its part of the kills, and a part is for any; every tenth time the connections of the learner and of one
worker go dead, or a process sleeps, as well.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.chaos_run import Chaos
from tests.chaos.journal_history import History
from tests.chaos.session_history import SessionHistory
from tests.support.small_run import PROMPTS, make_policy, make_prompts

TOKENS_BETWEEN = 1000
OF_AGENTS = 150
"""the same, of a run with agents, whose turns are short"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="[default 200]")
    parser.add_argument("--agents", action="store_true", help="a run with agents")
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
    between = OF_AGENTS if options.agents else TOKENS_BETWEEN
    run = Chaos(folder, folder / "policy", folder / "data", tokens_between=between, agents=options.agents)
    try:
        run.go_on(between)
        for number, victim in enumerate(victims(list(run.victims), options.kills), start=1):
            run.kill(victim, run.aim(victim))
            if number % 20 == 0:
                run.half_open()
            elif number % 20 == 10:
                run.pause(random.choice(list(run.victims)), random.uniform(1.0, 6.0))
            print(f"{time.monotonic() - began:6.0f} s  {number} kills  {run.state.now()[1]} tokens", flush=True)
        run.finish()
    finally:
        run.end()
    history = (SessionHistory if options.agents else History)(run.run_dir, PROMPTS)
    history.judge()
    if options.agents:
        history.judge_agents(run.read)
        print(history.sessions_table())
    wrongs = history.wrongs + run.untried()
    print(run.table())
    print(f"power losses that took bytes from the journal: {run.cuts()}")
    print(f"fewest acknowledged tokens between two kills: {min(run.tokens_before)}")
    print("\n".join(wrongs) or "nothing that was acknowledged is missing, nothing was trained twice")
    return 1 if wrongs else 0


def victims(kinds: list[str], kills: int) -> list[str]:
    """In random order, a part for each kind of process and one for any."""
    sure = [kind for kind in kinds for _ in range(kills // (len(kinds) + 1))]
    rest = random.choices(kinds, k=kills - len(sure))
    return random.sample(sure + rest, len(sure + rest))


if __name__ == "__main__":
    sys.exit(main())

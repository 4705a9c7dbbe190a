"""What the keys that make a learner smaller cost in held-out accuracy, on the quickstart's task.

Each arm trains as many samples as the learner in fp32, under the schedule `sync`, from the same policy, prompts and
seeds; the runs of a seed are compared. Accuracy is that of the last weights on the same held-out prompts. Training does
not depend on how fast it goes, so other work beside it changes nothing. `--runs FILE` keeps runs for a later sitting.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import shutil
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from common import Row, parser, quickstart_policy, read_runs, report, write_run
from learning import AS_IT_IS, HELD_OUT, gap_rows, train
from transformers import AutoModelForCausalLM

from april.data.arithmetic import make_data

STEPS, SEEDS = 24, 5
LORA = {"lora.rank": 2, "lora.embedding": True, "learner.lr": 2e-3}
ARMS = {
    "fp32": {},
    "adamw_8bit": {"learner.optimizer": "adamw_8bit"},
    "host_states": {"learner.optimizer_on_host": True},
    "bf16_weights": {"learner.master_weights": "bf16"},
    "muon": {"learner.optimizer": "muon"},
    "lora_bf16": LORA | {"lora.base": "bf16"},
    "lora_nf4": LORA | {"lora.base": "nf4"},
}
"""Keys of each arm."""
BESIDE = {"adamw_8bit": "fp32", "host_states": "fp32", "bf16_weights": "fp32", "muon": "fp32", "lora_nf4": "lora_bf16"}
"""Each arm that is compared, and the arm beside it."""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=STEPS, help="batches of a run [default 24]")
    arguments.add_argument("--seeds", type=int, default=SEEDS, help="at least 2, for the spread between them")
    arguments.add_argument("--arm", action="append", choices=BESIDE, help="compare only this one; may be repeated")
    arguments.add_argument("--runs", type=Path, metavar="FILE", help="JSONL file of runs, which are not run again")
    given = arguments.parse_args()
    if given.seeds < 2:
        arguments.error(f"--seeds {given.seeds} says nothing of the spread between them; give at least 2")
    compared = given.arm or list(BESIDE)
    arms = [arm for arm in ARMS if arm in compared or arm in {BESIDE[each] for each in compared}]
    steps, seeds, held_out = (1, 2, 64) if given.quick else (given.steps, given.seeds, HELD_OUT)
    torch.set_num_threads(1)
    known = {(run["arm"], run["seed"]): run["held_out"] for run in read_runs(given.runs) if run["steps"] == steps}
    with tempfile.TemporaryDirectory(prefix="april-small-cards-") as made:
        folder = Path(made)
        policy = quickstart_policy(folder, given.quick)
        in_bf16 = save_in_bf16(policy, folder / "bf16")
        prompts, _ = make_data(folder / "data")
        for seed in range(seeds):
            for arm in arms:
                if (arm, seed) not in known:
                    keys = {"schedule.max_steps": steps} | ARMS[arm]
                    start = in_bf16 if arm.startswith("lora") else policy  # whose base a bf16 one does not round
                    reached = train(folder, start, prompts, AS_IT_IS, "sync", seed, keys, held_out).held_out
                    known[arm, seed] = reached
                    write_run(given.runs, {"arm": arm, "seed": seed, "steps": steps, "held_out": reached})
                    print(f"{arm}, seed {seed}: held out {reached:.4f}", flush=True)
    of_arm = {arm: [known[arm, seed] for seed in range(seeds)] for arm in arms}
    rows = [Row(f"heldout_{arm}", reached, "accuracy", of=fmean) for arm, reached in of_arm.items()]
    for arm in compared:
        differences = [ours - theirs for ours, theirs in zip(of_arm[arm], of_arm[BESIDE[arm]], strict=True)]
        rows += gap_rows(f"heldout_gap_{arm}", differences, "accuracy", two_sided=True)
    report(rows, given.json)


def save_in_bf16(policy: Path, folder: Path) -> Path:
    """A copy of a policy with weights in bfloat16."""
    shutil.copytree(policy, folder)
    AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()

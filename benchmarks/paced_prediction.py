"""What the simulator says of the paced runs of `learning.py`, beside what they measured.

Each arm is simulated with the lengths of its own runs, from the first lease to the last batch, for many seeds.
"""

from pathlib import Path
from statistics import fmean

from common import Row

from april.simulate.recording import record_trace
from april.simulate.scenario import load_scenario
from april.simulate.trace import write_trace
from april.simulate.variants import evaluate

SEEDS = 40
TRANSFER_S = 0.005
"""of the accelerator's: what publishing took beside the engines' own pause"""


def rows(arm: str, keys: dict, folders: list[Path], pace: Path, speeds: list[float], staleness: list[float]):
    """Rows of one arm. `keys`: of a scenario; `folders`: its runs, whose journals have the lengths; `speeds`: tokens/s
    of the accelerator's seconds, and `staleness`, mean of the trained tokens, both as measured."""
    trace = folders[0].parent / f"{arm}-lengths.jsonl"
    write_trace(trace, [group for folder in folders for group in record_trace(folder).groups])
    keys = keys | {
        "warmup_steps": 0,
        "lengths.family": "trace",
        "lengths.path": str(trace),
        "engines.prefix_cache": False,
        "engines.latency_s": 0.0,
        "weights.transfer_s": TRANSFER_S,
        "weights.keep_kv": False,
    }
    scenario = load_scenario(pace, list(keys.items()))
    told = [evaluate(arm, scenario.with_keys(seed=seed)) for seed in range(SEEDS)]
    limit = fmean(one.limit for one in told)
    found = [
        Row(f"limit_share_paced_{arm}", [one / limit for one in speeds], "share", of=fmean),
        Row(f"limit_share_simulated_{arm}", [one.limit_share for one in told], "share", of=fmean),
        Row(f"prediction_error_speed_{arm}", [fmean(one.consumed_per_s for one in told) / fmean(speeds) - 1], "ratio"),
    ]
    if measured := fmean(staleness):
        simulated = fmean(one.measures.staleness_mean for one in told)
        found.append(Row(f"prediction_error_staleness_{arm}", [simulated / measured - 1], "ratio"))
    return found

"""What the simulator says of the paced runs of `learning.py`, beside what they measured.

Each run is simulated with its own lengths, from the first lease to the last batch, beyond which neither begins
anything: group by group in the order in which they were opened, so that neither the draw of lengths nor their change
with what is learned is part of the error. What was unfinished at the end of a run gets the length of another, later one
of the run that is longer: many draws of that.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from common import Row

from april.broker.ledger.events import GroupOpened, Leased, RowsAccepted
from april.config import ConfigError
from april.config.costs import HARDWARE, shipped_costs
from april.report.run_folder import Run, read_run
from april.simulate.pipeline import simulate
from april.simulate.recording import read_events
from april.simulate.scenario import Scenario, load_scenario
from april.simulate.trace import TracedGroup, write_trace
from april.simulate.variants import evaluate

DRAWS = 8
"""of what is not known of a run; seeds of the limit"""
NEAR = 48
"""groups before and behind an unfinished one, of which it gets a length"""
MORE_GROUPS = 64
"""drawn behind the last of a run, should the simulated one open more"""
TRANSFER_S, HANDOVER_S = 0.015, 0.01
"""of the accelerator's, what the host took in rounds at factor 6: 0.09 s from a trained batch to the first step with
its weights, beside the engines' own pause, and 0.06 s from the last token of a batch to the start of its training"""


@dataclass(frozen=True)
class Measured:
    """One run."""

    folder: Path
    seed: int
    tokens_per_s: float
    """of the accelerator's seconds"""
    staleness: float
    """mean of the trained tokens (steps)"""


def rows(name: str, keys: dict, runs: list[Measured], pace: str, forced: dict | None = None) -> list[Row]:
    """Rows of one arm. `keys`: of a scenario; `forced`: the lengths section of runs whose lengths are forced, of which
    only the prompts have to be read from their journals."""
    told, limits = [], []
    for run in runs:
        for draw in range(1 if forced else DRAWS):
            lengths = forced | prompts_of(run) if forced else own_lengths(run, draw)
            scenario = scenario_of(pace, keys, lengths).with_keys(seed=run.seed)
            told.append(simulate(scenario))
        limits.append(evaluate(name, scenario).limit)
    limit, speed = fmean(limits), fmean(run.tokens_per_s for run in runs)
    found = [
        Row(f"limit_share_{name}", [run.tokens_per_s / limit for run in runs], "share", of=fmean),
        Row(f"limit_share_simulated_{name}", [one.consumed_per_s / limit for one in told], "share", of=fmean),
        Row(f"prediction_error_speed_{name}", [fmean(one.consumed_per_s for one in told) / speed - 1], "ratio"),
    ]
    busy = fmean(busy_share(read_run(run.folder)) for run in runs)
    found.append(Row(f"prediction_error_busy_{name}", [fmean(one.leased_share for one in told) / busy - 1], "ratio"))
    if measured := fmean(run.staleness for run in runs):
        simulated = fmean(one.staleness_mean for one in told)
        found.append(Row(f"prediction_error_staleness_{name}", [simulated / measured - 1], "ratio"))
    return found


def busy_share(run: Run) -> float:
    """Of the slots, those with a lease whose response has not ended, mean over a run's time: all that a broker sees of
    them. What a sample waits for under its lease (weights, the end of a decode step) is left in, as in `leased_share`.
    """
    times = [
        min(lane["start"] for lane in run.lanes if lane["kind"] == "generate"),
        *(step["time"] for step in run.steps),
    ]
    return float(np.average([step["slots"]["busy"] for step in run.steps], weights=np.diff(times)))


def scenario_of(pace: str, keys: dict, lengths: dict) -> Scenario:
    of_run = {
        "warmup_steps": 0,
        "ends": True,
        "engines.prefix_cache": False,
        "engines.latency_s": 0.0,
        "learner.step_s": HANDOVER_S,
        "weights.transfer_s": TRANSFER_S,
        "weights.keep_kv": False,
    }
    named = pace in shipped_costs()
    path = HARDWARE if named else Path(pace)
    chosen = of_run | keys | {f"lengths.{key}": value for key, value in lengths.items()}
    return load_scenario(path, list(chosen.items()), pace if named else None)


def prompts_of(run: Measured) -> dict:
    opened, _, _ = groups_of(run.folder / "journal")
    return {"prompt_tokens": round(fmean(event.prompt_tokens for event in opened.values()))}


def own_lengths(run: Measured, draw: int) -> dict:
    """The lengths section of a run's own lengths; the trace that it names is written beside the run."""
    trace = run.folder.with_name(f"{run.folder.name}-lengths-{draw}.jsonl")
    write_trace(trace, completed(run.folder / "journal", np.random.default_rng([run.seed, draw])))
    return {"family": "trace", "path": str(trace), "in_order": True}


def completed(journal: Path, rng: np.random.Generator) -> list[TracedGroup]:
    """All groups of a run in their order, what was unfinished at its end drawn to an end, and some more."""
    opened, lengths, ended = groups_of(journal)
    groups = []
    for group, event in opened.items():
        around = [near for near in range(group - NEAR, group + NEAR + 1) if near in opened]
        known = [length for near in around for length, done in zip(lengths[near], ended[near], strict=True) if done]
        drawn = [
            length if done else int(rng.choice([one for one in known if one > length] or [length + 1]))
            for length, done in zip(lengths[group], ended[group], strict=True)
        ]
        groups.append(TracedGroup(event.prompt_tokens, drawn))
    return groups + [groups[-at] for at in rng.integers(1, 1 + min(MORE_GROUPS, len(groups)), MORE_GROUPS)]


def groups_of(journal: Path) -> tuple[dict[int, GroupOpened], dict[int, list[int]], dict[int, list[bool]]]:
    """By group, as they were opened: its event, the response tokens of its samples by now, and which have ended."""
    opened: dict[int, GroupOpened] = {}
    lengths: dict[int, list[int]] = {}
    ended: dict[int, list[bool]] = {}
    sample_of: dict[int, tuple[int, int]] = {}
    for event in training_events(journal):
        match event:
            case GroupOpened():
                opened[event.group] = event
                lengths[event.group], ended[event.group] = [0] * event.size, [False] * event.size
            case Leased():
                sample_of[event.lease_id] = event.group, event.index
            case RowsAccepted():
                for row in event.rows:
                    group, index = sample_of[row.lease_id]
                    lengths[group][index] = row.end
                    ended[group][index] |= bool(row.finish)
    if not opened or min(opened) != 0:
        raise ConfigError(f"the journal {journal} lacks the beginning of its run; keep all of its files")
    return opened, lengths, ended


def training_events(journal: Path) -> Iterable[GroupOpened | Leased | RowsAccepted]:
    """Of a run without evaluation."""
    return (event for event in read_events(journal, 0) if isinstance(event, GroupOpened | Leased | RowsAccepted))

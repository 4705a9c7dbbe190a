"""How large a cluster the simulator takes: 1,000 engines of 512 slots, or more behind several brokers, in one process;
times are of the processor."""

import resource
import sys
import time
from pathlib import Path
from statistics import fmean

from common import Row, parser, report

from april.simulate.scenario import load_scenario
from april.simulate.shards import ShardedSimulation
from april.simulate.variants import with_schedule

PUBLISHED = Path(__file__).parent.parent / "configs" / "published.toml"
ENGINES, SLOTS = 1000, 512
BATCHES_IN_FLIGHT = 2
"""As in the published setting."""
QUICK_ENGINES = 20


def main() -> int:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--steps", type=int, default=10, help="batches behind the first two [default 10]")
    arguments.add_argument("--engines", type=int, default=ENGINES, help=f"[default {ENGINES}]")
    arguments.add_argument("--slots", type=int, default=SLOTS, help=f"of an engine [default {SLOTS}]")
    arguments.add_argument("--brokers", type=int, default=1, help="that share engines and batches [default 1]")
    options = arguments.parse_args()
    engines = QUICK_ENGINES if options.quick else options.engines
    in_flight = engines * options.slots
    base = load_scenario(PUBLISHED, cost="mi300x")
    groups = in_flight // (BATCHES_IN_FLIGHT * base.schedule.n_samples_per_prompt)
    keys = {
        "engines__count": engines,
        "engines__slots": options.slots,
        "schedule__rollout_batch_size": groups,
        "schedule__over_sampling_batch_size": None,
        "learner__token_s": base.learner.token_s * base.schedule.rollout_batch_size / groups,
        "warmup_steps": BATCHES_IN_FLIGHT,
        "steps": options.steps,
    }
    scenario = with_schedule(base.with_keys(**keys), "continuous", in_flight=in_flight)
    shards = ShardedSimulation(scenario, options.brokers)
    started_s, instants_s = time.process_time(), []
    last = shards.pipelines[-1].measures
    note = last.record_step

    def trained(step, consumed):
        note(step, consumed)
        instants_s.append(time.process_time())

    last.record_step = trained
    found = shards.run()
    step_s = (instants_s[-1] - instants_s[BATCHES_IN_FLIGHT - 1]) / options.steps
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    took_s = instants_s[-1] - started_s
    print(
        f"{engines} engines of {options.slots} slots, {options.brokers} brokers, {groups} groups in a batch, "
        f"{took_s:.0f} s of processor time in all"
    )
    responses = in_flight / BATCHES_IN_FLIGHT
    rows = [
        Row("simulated_steps_per_s", [1 / step_s], "steps/s"),
        Row("simulated_responses_per_s", [responses / step_s], "responses/s"),
        Row("simulated_us_per_response", [1e6 * step_s / responses], "us"),
        Row("simulated_100_steps_min", [100 * step_s / 60], "min"),
        Row("simulated_peak_mib", [peak_bytes / 2**20], "MiB"),
        Row("simulated_occupancy", [fmean(measures.occupancy for measures in found.shards)], "fraction"),
        Row("simulated_step_s", [last.measured.time_s / options.steps], "s"),
        Row("simulated_wait_for_last_broker", [found.waited_s / last.measured.time_s], "fraction"),
    ]
    report(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

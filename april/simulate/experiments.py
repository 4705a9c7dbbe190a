"""The three experiments of `april simulate --experiment`: each returns its table and the data of its picture.

`kind`: the schedule named on the command line, empty if none was.
"""

from collections import Counter

import numpy as np

from april.broker.telemetry.lengths import describe
from april.simulate.scenario import Scenario
from april.simulate.sweep import admitted
from april.simulate.variants import SimulationResult, counts_groups, evaluate, kind_with_dial, table, with_dial

GROUPS = 4096
"""Groups whose response lengths make the histogram."""
COMPARED_FACTORS = (1.5, 2.0, 3.0)


def lengths(scenario: Scenario, kind: str = "") -> tuple[str, np.ndarray]:
    """(table, int [samples]) of the response lengths, independent of any schedule."""
    drawn = scenario.make_lengths().sample(GROUPS)
    found = describe(Counter(drawn.ravel().tolist())) or {}
    longest_of_group = drawn.max(axis=1)
    longest = scenario.lengths.longest_tokens
    rows = [
        ["responses", f"{drawn.size:,}"],
        *([name, f"{value:,.0f}"] for name, value in found.items()),
        ["cut at the budget", f"{(drawn == longest).mean():.2%}"],
        ["groups with one that is cut", f"{(longest_of_group == longest).mean():.1%}"],
        ["mean of the longest in a group", f"{longest_of_group.mean():,.0f}"],
        ["p99 over median", f"{found['p99'] / found['p50']:.2f}"],
    ]
    return table(rows, ("response lengths", "tokens")), drawn.ravel()


def buffers(scenario: Scenario, kind: str = "") -> tuple[str, list[tuple[float, SimulationResult]]]:
    """Throughput and largest buffer for N' = 1.5, 2 and 3 N: (table, [(N' / N, result)]). Raises ConfigError."""
    groups, kind = scenario.schedule.rollout_batch_size, kind_with_dial(kind, counts_groups)
    points = [
        (factor, evaluate(f"{factor:g} N", with_dial(scenario, kind, round(factor * groups))))
        for factor in admitted(scenario, COMPARED_FACTORS)
    ]
    lines = [
        [
            result.name, f"{result.consumed_per_s:,.0f}", f"{result.measures.buffer_peak_tokens:,}",
            f"{result.measures.buffer_peak_bytes:,}", f"{result.measures.staleness_mean:.2f}",
        ]
        for _, result in points
    ]  # fmt: skip
    return table(lines, ("N'", "consumed/s", "buffer_peak_tokens", "buffer_peak_bytes", "stale mean")), points


def versions(scenario: Scenario, kind: str = "") -> tuple[str, SimulationResult]:
    """(table, result) with the share of the trained tokens by their age in policy steps."""
    result = evaluate(scenario.schedule.kind, scenario)
    ages = result.measures.tokens_by_age
    lines = [[f"{age}", f"{ages[age]:,}", f"{ages[age] / ages.total():.1%}"] for age in sorted(ages)]
    return table(lines, ("age (policy steps)", "trained tokens", "share")), result

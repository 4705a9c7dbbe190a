"""The three experiments that readers of the method ask for first, on a scenario; each a table and a picture.

`kind`: of the schedule that was asked for, if any was.
"""

from collections import Counter

import numpy as np

from april.broker.telemetry.lengths import describe
from april.simulate.scenario import Scenario
from april.simulate.sweep import admitted
from april.simulate.variants import Outcome, counts_groups, dialled, evaluate, table, turned

GROUPS = 4096
"""whose lengths make the histogram"""
FACTORS = (1.5, 2.0, 3.0)


def lengths(scenario: Scenario, kind: str = "") -> tuple[str, np.ndarray]:
    """Response lengths of pure rollouts, no schedule involved: (table, int [samples])."""
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


def buffers(scenario: Scenario, kind: str = "") -> tuple[str, list[tuple[float, Outcome]]]:
    """N' = 1.5, 2, 3 x N: throughput against the largest buffer. Raises ConfigError."""
    groups, kind = scenario.schedule.rollout_batch_size, dialled(kind, counts_groups)
    points = [
        (factor, evaluate(f"{factor:g} N", turned(scenario, kind, round(factor * groups))))
        for factor in admitted(scenario, FACTORS)
    ]
    lines = [
        [
            outcome.name, f"{outcome.consumed_per_s:,.0f}", f"{outcome.measures.buffer_peak_tokens:,}",
            f"{outcome.measures.buffer_peak_bytes:,}", f"{outcome.measures.staleness_mean:.2f}",
        ]
        for _, outcome in points
    ]  # fmt: skip
    return table(lines, ("N'", "consumed/s", "buffer_peak_tokens", "buffer_peak_bytes", "stale mean")), points


def versions(scenario: Scenario, kind: str = "") -> tuple[str, Outcome]:
    """Share of the trained tokens by the age of the policy that generated them."""
    outcome = evaluate(scenario.schedule.kind, scenario)
    ages = outcome.measures.tokens_by_age
    lines = [[f"{age}", f"{ages[age]:,}", f"{ages[age] / ages.total():.1%}"] for age in sorted(ages)]
    return table(lines, ("age (policy steps)", "trained tokens", "share")), outcome

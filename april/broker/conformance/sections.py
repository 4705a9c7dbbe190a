"""Random configurations of a schedule for property tests: keys that it reads, with values it accepts."""

from typing import Any

from hypothesis import strategies as st

from april.broker.ledger.rules import Rules
from april.broker.schedules import SCHEDULES
from april.config import ConfigError, ScheduleSection


@st.composite
def sections(draw, rules: Rules, name: str) -> ScheduleSection:
    """A [schedule] section of the kind `name` for a ledger with these rules."""
    batch, n, staleness = rules.batch_groups, rules.group_size, rules.max_staleness
    common = {
        "kind": name,
        "rollout_batch_size": batch,
        "n_samples_per_prompt": n,
        "max_staleness": staleness,
        "max_steps": draw(st.sampled_from([2, 6, 1000])),
        "last_batch": draw(st.sampled_from(["train", "drop"])),
    }
    kind = SCHEDULES.find(name)
    own: dict[str, Any] = {}
    if "in_flight" in kind.reads:
        own["in_flight"] = draw(st.none() | st.integers(1, (staleness + 1) * batch * n))
    elif "over_sampling_batch_size" in kind.reads:
        own["over_sampling_batch_size"] = max(1, round(draw(st.floats(0.3, 6)) * batch))
    if "partial_rollout" in kind.reads:
        own["partial_rollout"] = draw(st.booleans())
    if "overlap" in kind.reads:
        own["overlap"] = staleness > 0 and draw(st.booleans())
    section = ScheduleSection(**common, **own)
    try:
        kind.check(section)
    except ConfigError:
        return ScheduleSection(**common)
    return section

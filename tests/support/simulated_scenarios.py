"""Small scenarios for the simulator."""

from april.config.costs import EngineCost
from april.simulate.scenario import Scenario

MILLISECOND = 1e-3
PLAIN = EngineCost(decode_base_s=10 * MILLISECOND, decode_running_s=0.0, decode_kv_s=0.0, prefill_s=0.0)
GROWING = EngineCost(decode_base_s=5e-3, decode_running_s=4e-5, decode_kv_s=3e-8, prefill_s=1e-5, kv_tokens=60_000)


def scenario(cost=PLAIN, **keys) -> Scenario:
    small = {
        "schedule__rollout_batch_size": 4, "schedule__n_samples_per_prompt": 2, "engines__count": 2,
        "engines__slots": 16, "lengths__median_tokens": 300, "lengths__longest_tokens": 2000,
        "lengths__prompt_tokens": 20, "steps": 12,
    }  # fmt: skip
    return Scenario(cost=cost).with_keys(**small | keys)


HARD = {
    "engines__failure_every_s": 8.0, "engines__restart_s": 2.0, "engines__chunk_tokens": 64,
    "engines__speed_spread": 0.3, "learner__token_s": 1e-4, "weights__transfer_s": 0.5, "weights__pause_s": 0.1,
}  # fmt: skip
SCHEDULES = {
    "sync": {"schedule__kind": "sync"},
    "april": {"schedule__kind": "april", "schedule__over_sampling_batch_size": 8},
    "in steps": {"schedule__kind": "april", "schedule__over_sampling_batch_size": 2},
    "dropped": {
        "schedule__kind": "april", "schedule__over_sampling_batch_size": 8, "schedule__partial_rollout": False,
    },
    "overlap": {"schedule__kind": "april", "schedule__over_sampling_batch_size": 8, "schedule__overlap": True},
    "continuous": {"schedule__kind": "continuous", "schedule__in_flight": 16},
    "bounded": {"schedule__kind": "continuous", "schedule__in_flight": 16, "schedule__max_staleness": 1},
    "recomputed": {"schedule__kind": "continuous", "schedule__in_flight": 16, "weights__keep_kv": False},
    "moving": {"schedule__kind": "sync", "schedule__migrate": True},
}  # fmt: skip

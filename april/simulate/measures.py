"""What a simulated run is judged by, over the batches after the warm-up."""

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from april.broker.ledger.samples import Group, SampleState
from april.broker.telemetry.recorder import BYTES_PER_TOKEN, describe_ages, tokens_by_age
from april.config import ConfigError
from april.simulate.state import SimulationState

IDLE_CAUSES = ("admission", "barrier", "update", "pipeline", "kv", "failure")
LENGTHS_KEPT = 256
"""of a batch, so that memory does not grow with its samples"""


@dataclass
class Totals:
    """Sums since the start; a difference of two is an interval."""

    time_s: float = 0.0
    rollout_s: float = 0.0
    """time in which something was leased"""
    training_s: float = 0.0
    consumed: int = 0
    generated: int = 0
    """tokens that engines generated"""
    discarded: int = 0
    lost: int = 0
    prefilled: int = 0
    recomputed: int = 0
    reused: int = 0
    retractions: int = 0
    leased_slot_s: float = 0.0
    idle_slot_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(IDLE_CAUSES, 0.0))

    def __sub__(self, earlier: "Totals") -> "Totals":
        return Totals(**{name: _minus(value, getattr(earlier, name)) for name, value in vars(self).items()})


def _minus(value, earlier):
    return {key: value[key] - earlier[key] for key in value} if isinstance(value, dict) else value - earlier


@dataclass(frozen=True)
class TrainedStep:
    """One batch of the measured ones."""

    step: int
    time_s: float
    samples: int
    tokens: int
    tokens_by_age: dict[int, int]
    lengths: array
    """uint32, of each sample; of larger batches LENGTHS_KEPT evenly spaced quantiles"""


class Measures:
    def __init__(self, state: SimulationState):
        self.scenario, self.state = state.scenario, state
        self.steps: list[TrainedStep] = []
        self.training_s = 0.0
        self.buffer_peak_tokens = 0
        """most tokens of open and ready groups at a time, as the broker's `Recorder` has it, over the whole run"""
        self._leased_slot_s = self._rollout_s = 0.0
        self._unleased_slot_s: defaultdict[str, float] = defaultdict(float)
        self._slots_wanted = self.scenario.slots_wanted
        self._before = self._after = Totals()
        self._kv_peaks: list[int] = []

    # --- while it runs --------------------------------------------------------------------------------------

    def passed(self, seconds: float) -> None:
        """Nothing has changed for so long."""
        ledger, wanted = self.state.ledger, self._slots_wanted
        leased = ledger.generating
        self._leased_slot_s += leased * seconds
        if leased:
            self._rollout_s += seconds
        if leased < wanted:
            failed = max(0, wanted - max(leased, self.state.slots_up))
            self._unleased_slot_s["failure"] += failed * seconds
            self._unleased_slot_s[self._cause()] += (wanted - leased - failed) * seconds

    def _cause(self) -> str:
        """Why a slot has no sample now."""
        if not self.state.schedule.by_rounds:
            return "admission"
        ledger, floor = self.state.ledger, self.state.schedule.floor(self.state.ledger)
        waits_for_weights = ledger.round_open and ledger.consumed >= floor
        waits_for_weights = waits_for_weights and all(engine.version.step < floor for engine in self.state.engines)
        return "update" if waits_for_weights else "barrier"

    def delivered(self, tokens: int) -> None:
        """A batch of so many tokens has just left the ready groups; only such an instant ends a rise of what is held.

        What engines have generated counts as acknowledged, up to the last event of each.
        """
        ledger, totals = self.state.ledger, self._totals()
        left = ledger.tokens["trained"] + ledger.tokens["delivered"] + totals.discarded
        self.buffer_peak_tokens = max(self.buffer_peak_tokens, totals.generated - totals.lost - left + tokens)

    def trained(self, step: int, groups: list[Group]) -> None:
        if step >= self.scenario.first_measured:
            lengths = [
                sample.length for group in groups for sample in group.samples if sample.state is SampleState.DONE
            ]
            ages, kept = dict(tokens_by_age(groups, step)), representatives(lengths)
            self.steps.append(TrainedStep(step, self.state.now_s, len(lengths), sum(ages.values()), ages, kept))
        if step == self.scenario.first_measured - 1:
            self._before = self._totals()

    def finish(self) -> None:
        """Let go of the run."""
        self._after = self._totals()
        self._kv_peaks = [engine.kv_peak for engine in self.state.engines]
        self.measured = self._after - self._before
        if not self.measured.time_s:
            raise ConfigError(f"key 'steps' = {self.scenario.steps}: so few batches take no time here; measure more")
        del self.state

    def _totals(self) -> Totals:
        state, engines, ledger = self.state, self.state.engines, self.state.ledger
        latency_s = self.scenario.engines.latency_s
        idle_slot_s = {cause: self._unleased_slot_s[cause] for cause in IDLE_CAUSES}
        idle_slot_s["update"] += sum(engine.pause_slot_s for engine in engines)
        idle_slot_s["kv"] += sum(engine.kv_wait_slot_s for engine in engines)
        idle_slot_s["pipeline"] += latency_s * state.handed_out + sum(engine.transit_slot_s for engine in engines)
        return Totals(
            time_s=state.now_s,
            rollout_s=self._rollout_s,
            training_s=self.training_s,
            consumed=ledger.tokens["trained"],
            generated=sum(engine.generated for engine in engines),
            discarded=sum(ledger.discarded.values()),
            lost=state.lost_tokens,
            prefilled=sum(engine.prefilled_tokens for engine in engines),
            recomputed=sum(engine.recomputed_tokens for engine in engines),
            reused=sum(engine.reused_tokens for engine in engines),
            retractions=sum(engine.retractions for engine in engines),
            leased_slot_s=self._leased_slot_s,
            idle_slot_s=idle_slot_s,
        )

    # --- results --------------------------------------------------------------------------------------------

    @property
    def consumed_per_s(self) -> float:
        """Tokens consumed by the learner a second of wall time."""
        return self.measured.consumed / self.measured.time_s

    @property
    def consumed_per_rollout_s(self) -> float:
        """The same over the time in which something was leased."""
        return self.measured.consumed / self.measured.rollout_s

    @property
    def generated_per_s(self) -> float:
        return self.measured.generated / self.measured.time_s

    @property
    def generated_per_rollout_s(self) -> float:
        return self.measured.generated / self.measured.rollout_s

    @property
    def wasted_share(self) -> float:
        """Generated tokens that were discarded or lost."""
        return (self.measured.discarded + self.measured.lost) / self.measured.generated

    @property
    def recomputed_share(self) -> float:
        """Response tokens whose context was computed again, over generated tokens."""
        return self.measured.recomputed / self.measured.generated

    @property
    def reused_share(self) -> float:
        """Of the context that arriving samples needed, what their engine had in its cache."""
        return self.measured.reused / (self.measured.reused + self.measured.prefilled)

    @property
    def slot_s(self) -> float:
        """Slot-seconds of the slots that the schedule wants to fill."""
        return self.scenario.slots_wanted * self.measured.time_s

    @property
    def idle_share(self) -> dict[str, float]:
        return {cause: seconds / self.slot_s for cause, seconds in self.measured.idle_slot_s.items()}

    @property
    def occupancy(self) -> float:
        return 1 - sum(self.idle_share.values())

    @property
    def leased_share(self) -> float:
        """Of the slots that the schedule wants to fill, those that had a lease, whatever its sample waited for: what
        a run's broker calls busy."""
        return self.measured.leased_slot_s / self.slot_s

    @property
    def learner_share(self) -> float:
        return self.measured.training_s / self.measured.time_s

    @property
    def tokens_by_age(self) -> Counter[int]:
        ages: Counter[int] = Counter()
        for step in self.steps:
            ages.update(step.tokens_by_age)
        return ages

    @property
    def staleness_mean(self) -> float:
        return describe_ages(self.tokens_by_age)["mean"]

    @property
    def staleness_max(self) -> int:
        return max(self.tokens_by_age)

    @property
    def off_policy_share(self) -> float:
        ages = self.tokens_by_age
        return 1 - ages[0] / ages.total()

    @property
    def step_s(self) -> tuple[float, float]:
        """Median and 95th percentile of the time between two batches."""
        times = [self._before.time_s, *(step.time_s for step in self.steps)]
        p50, p95 = np.percentile(np.diff(times), [50, 95])
        return float(p50), float(p95)

    @property
    def kv_peak_share(self) -> float:
        """Of the engine that held most, at any time."""
        return max(self._kv_peaks) / self.scenario.cost.kv_tokens

    @property
    def buffer_peak_bytes(self) -> int:
        return self.buffer_peak_tokens * BYTES_PER_TOKEN

    @property
    def mean_length(self) -> float:
        return sum(step.tokens for step in self.steps) / sum(step.samples for step in self.steps)


def representatives(lengths: list[int]) -> array:
    """All of them, or LENGTHS_KEPT that stand for as many each."""
    if len(lengths) > LENGTHS_KEPT:
        centres = (np.arange(LENGTHS_KEPT) + 0.5) / LENGTHS_KEPT
        lengths = np.quantile(lengths, centres, method="inverted_cdf").tolist()
    return array("I", lengths)

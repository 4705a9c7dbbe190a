"""State of a simulated run that its pipeline and its measures share."""

from dataclasses import dataclass, field

from april.broker.ledger.ledger import Ledger
from april.broker.schedules.schedule import Schedule
from april.simulate.engine import SimulatedEngine
from april.simulate.scenario import Scenario


@dataclass
class SimulationState:
    scenario: Scenario
    ledger: Ledger
    schedule: Schedule
    engines: list[SimulatedEngine]
    now_s: float = 0.0
    lost_tokens: int = 0
    """Tokens generated, and lost with an engine before the broker acknowledged them."""
    granted: int = 0
    """Leases granted."""
    migrated: int = 0
    """Stragglers moved to another engine."""
    down: set[int] = field(default_factory=set)
    """Indices of the engines that have failed and are not yet back."""

    @property
    def slots_up(self) -> int:
        """Slots of the engines that have not failed."""
        return self.scenario.engines.slots * (len(self.engines) - len(self.down))

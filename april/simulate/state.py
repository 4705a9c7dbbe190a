"""One simulated run as it stands."""

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
    """generated, and lost with an engine before they were acknowledged"""
    handed_out: int = 0
    """leases"""
    moved: int = 0
    """stragglers that went on in another engine"""
    down: set[int] = field(default_factory=set)
    """places of the engines that have failed and are not back"""

    @property
    def slots_up(self) -> int:
        """Of the engines that have not failed."""
        return self.scenario.engines.slots * (len(self.engines) - len(self.down))

"""Rounds and drains: leases granted before a round ended or a drain began, up to the watermark, are handed back."""

from typing import Any

from april.broker.ledger import events


class Rounds:
    def __init__(self) -> None:
        self.round = -1
        """Number of the current or last round; -1 before the first."""
        self.round_open = False
        self.draining = False
        """Whether nothing is handed out and workers hand back what they generate for training."""
        self.watermark = 0
        """Largest lease id that is to be handed back."""

    def _on_RoundStarted(self, event: events.RoundStarted, reference: Any) -> None:
        self.round, self.round_open = event.round, True

    def _on_RoundEnded(self, event: events.RoundEnded, reference: Any) -> None:
        self.round_open, self.watermark = False, event.watermark

    def _on_DrainStarted(self, event: events.DrainStarted, reference: Any) -> None:
        self.draining, self.watermark = True, event.watermark

    def _on_DrainEnded(self, event: events.DrainEnded, reference: Any) -> None:
        self.draining = False

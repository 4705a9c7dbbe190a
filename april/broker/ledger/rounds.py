"""Rounds and drains: grants from before a round ends or a drain begins, up to the watermark, are to be handed back."""

from typing import Any

from april.broker.ledger import events


class Rounds:
    def __init__(self) -> None:
        self.round = -1
        self.round_open = False
        self.draining = False
        """nothing is handed out; workers hand back what they generate"""
        self.watermark = 0

    def _on_RoundStarted(self, event: events.RoundStarted, reference: Any) -> None:
        self.round, self.round_open = event.round, True

    def _on_RoundEnded(self, event: events.RoundEnded, reference: Any) -> None:
        self.round_open, self.watermark = False, event.watermark

    def _on_DrainStarted(self, event: events.DrainStarted, reference: Any) -> None:
        self.draining, self.watermark = True, event.watermark

    def _on_DrainEnded(self, event: events.DrainEnded, reference: Any) -> None:
        self.draining = False

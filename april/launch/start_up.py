"""Notes the milestones between the start of a run and its first step, one line each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.util import clock


class StartUp:
    """Notes each milestone between the start of a run and its first step once, with the time since the start.

    start_up = StartUp(print)                            # gets each milestone as a line of text
    start_up.parts_started(["broker", "learner", "worker-0"], Path("runs/my-run/logs"))
    start_up.observe(status)                             # repeatedly, until `is_over`
    """

    def __init__(self, note: Callable[[str], None]):
        self.is_over = False
        """Whether a step has been trained since the start."""
        self._first_step: int | None = None
        """Policy step at which this start of the run began, above 0 after a resume; None before the broker's first
        status."""
        self._note = note
        self._began_at = clock.now()
        self._noted: set[str] = set()

    def parts_started(self, parts: list[str], logs: Path) -> None:
        self.note_once(
            f"starting {', '.join(parts)}; each has a log in {logs}, what rewards print is in rewards.log there"
        )

    def observe(self, status: dict[str, Any]) -> None:
        """Note the milestones visible in the broker's status."""
        if self._first_step is None:
            self._first_step = status["step"]
        self.is_over |= status["step"] > self._first_step
        if self.is_over:
            return
        if status["learner_silent_s"] is not None:
            self.note_once("the learner is connected")
        for worker in status["workers"]:
            self.note_once(f"{worker['name']} is connected, with its engine loaded")
            if worker["version"] != "loading":
                self.note_once(f"{worker['name']} has the weights {worker['version']}")
        for holder in (*status["scorers"], *status["agents"]):
            self.note_once(f"{holder['name']} is connected")
        if status["phase"] in ("evaluating", "generating", "training"):
            self.note_once(f"{status['phase']}: the first step is under way")

    def note_once(self, fact: str) -> None:
        """Note a fact with its time, unless it was noted before."""
        if fact not in self._noted:
            self._noted.add(fact)
            self._note(f"{clock.now() - self._began_at:6.1f} s  {fact}")

"""What the seconds before the first step are spent on, a line for each thing that has come about."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.processes import clock


class StartUp:
    """start_up = StartUp(view.note)
    start_up.began(["broker", "learner", "worker-0"], logs)
    start_up.look(status)                                # again and again, until `over`
    """

    def __init__(self, note: Callable[[str], None]):
        self.over = False
        """a step was trained"""
        self._first_step: int | None = None
        """of this start, where a run was resumed"""
        self._note = note
        self._began_at = clock.now()
        self._said: set[str] = set()

    def began(self, parts: list[str], logs: Path) -> None:
        self.say(f"starting {', '.join(parts)}; each has a log in {logs}, what rewards print is in rewards.log there")

    def look(self, status: dict[str, Any]) -> None:
        """At what the broker says of the run."""
        if self._first_step is None:
            self._first_step = status["step"]
        self.over |= status["step"] > self._first_step
        if self.over:
            return
        if status["learner_silent_s"] is not None:
            self.say("the learner is there")
        for worker in status["workers"]:
            self.say(f"{worker['name']} is there, with its engine")
            if worker["version"] != "loading":
                self.say(f"{worker['name']} has the weights {worker['version']}")
        for holder in (*status["scorers"], *status["agents"]):
            self.say(f"{holder['name']} is there")
        if status["phase"] in ("evaluating", "generating", "training"):
            self.say(f"{status['phase']}: the first step is under way")

    def say(self, fact: str) -> None:
        """Once."""
        if fact not in self._said:
            self._said.add(fact)
            self._note(f"{clock.now() - self._began_at:6.1f} s  {fact}")

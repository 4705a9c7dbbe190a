"""What a live broker says of itself, asked as a monitor; once a second at most, however many look."""

import threading
import time
from typing import Any

from april.config import ConfigError
from april.connections.broker import AccessDenied, BrokerRefused, BrokerUnreachable
from april.launch.operate import Target
from april.report.waiting import waiting_for

FRESH_S = 1.0


class Live:
    def __init__(self, target: Target):
        self._target = target
        self._lock = threading.Lock()
        self._said: dict[str, Any] = {}
        self._asked_at = float("-inf")

    def look(self) -> dict[str, Any]:
        """{"status": …, "sentence": what the run waits for}, or {"away": why no broker answers}."""
        with self._lock:
            if time.monotonic() - self._asked_at >= FRESH_S:
                self._said = self._ask()
                self._asked_at = time.monotonic()
            return self._said

    def _ask(self) -> dict[str, Any]:
        try:
            status = self._target.status()
        except (AccessDenied, BrokerRefused, BrokerUnreachable, ConfigError) as error:
            return {"away": str(error)}
        return {"status": status, "sentence": waiting_for(status), "at": time.time()}

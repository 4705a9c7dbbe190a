"""The status of a live broker, requested at most once a second for all viewers together."""

import threading
import time
from typing import Any

from april.config import ConfigError
from april.connections.broker import AccessDenied, BrokerRefused, BrokerUnreachable
from april.launch.operate import RunAddress
from april.report.waiting import waiting_for

MAX_AGE_S = 1.0
"""Age up to which the last answer is reused."""


class LiveStatus:
    def __init__(self, target: RunAddress):
        self._target = target
        self._lock = threading.Lock()
        self._answer: dict[str, Any] = {}
        self._asked_at = float("-inf")

    def get(self) -> dict[str, Any]:
        """{"status": broker status, "sentence": what the run waits for, "at": time}, or {"away": why no broker
        answers}."""
        with self._lock:
            if time.monotonic() - self._asked_at >= MAX_AGE_S:
                self._answer = self._ask()
                self._asked_at = time.monotonic()
            return self._answer

    def _ask(self) -> dict[str, Any]:
        try:
            status = self._target.status()
        except (AccessDenied, BrokerRefused, BrokerUnreachable, ConfigError) as error:
            return {"away": str(error)}
        return {"status": status, "sentence": waiting_for(status), "at": time.time()}

"""What looks at a run from a thread of its own, as long as it is entered."""

import threading
from abc import ABC, abstractmethod
from typing import Self

LOOK_S = 0.1
"""between two looks"""


class Watcher(ABC):
    def __init__(self):
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """Look until `_over`."""

    def _over(self) -> bool:
        """Wait for the next look; whether there is to be none."""
        return self._ended.wait(LOOK_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        self._thread.join()

"""Work that goes on beside the training step, in a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_background(work: Callable, *arguments: Any) -> Future:
    """What `work` returns or raises, once it has. Its thread never keeps the process from ending."""
    future = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"background-{work.__name__}", daemon=True).start()
    return future

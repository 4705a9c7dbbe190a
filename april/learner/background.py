"""Work that goes on beside the training step, in a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def in_background(work: Callable[..., Answer], *arguments: Any) -> Future[Answer]:
    """What `work` returns or raises, once it has. Its thread never keeps the process from ending."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"background-{work.__name__}", daemon=True).start()
    return future

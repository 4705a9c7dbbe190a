"""Work in a thread while the training step runs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def in_background(work: Callable[..., Answer], *arguments: Any) -> Future[Answer]:
    """Run `work(*arguments)` in a daemon thread; the future has its result or exception."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"background-{work.__name__}", daemon=True).start()
    return future

"""A broker with real sockets that runs in a thread of the test."""

import contextlib
import threading

from april.broker.server import Server


@contextlib.contextmanager
def serving(config):
    """Context manager with a broker's server that runs in a thread; an exception in the thread is raised at the end."""
    server, over, failures = Server(config), threading.Event(), []
    server.write_address()

    def run():
        try:
            while not over.is_set():
                server.serve_once()
        except Exception as error:
            failures.append(error)
        finally:
            server.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]

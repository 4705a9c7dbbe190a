"""`april dashboard`: runs in a browser."""

import os
import secrets
import socket
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

from april.cli.command import MONITOR_KEYS, command, option
from april.util import resources
from april.util.errors import ConfigError

PORT = 8642
CLOSE_S = 2
"""Longest wait for open connections to finish when the dashboard ends (seconds)."""


@command(
    option("run", help="Run folder, folder of runs, or a broker's address as tcp://HOST:PORT."),
    option(
        "--host",
        default="127.0.0.1",
        help="Address to listen on; beyond loopback the printed token is needed [default: 127.0.0.1].",
    ),
    option("--port", type=int, default=PORT, help=f"Port to listen on; 0: any free one [default: {PORT}]."),
    option("--token", help="Secret that a browser has to send [default: a new one beyond loopback, otherwise none]."),
    MONITOR_KEYS,
)
def dashboard(run: str, host: str, port: int, token: str | None, keys: Path | None) -> int:
    """Serve a web page about one run or several, until interrupted."""
    try:
        import uvicorn

        from april.observe.dashboard.app import make_app
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs the package {error.name}, which is not installed; "
            "run `pip install 'april-rl[dashboard]'`"
        ) from None
    from april.config import is_loopback
    from april.observe.dashboard.folder import Runs

    configure_heap()
    token = token or ("" if is_loopback(host) else secrets.token_urlsafe(24))
    listener = listen(host, port)
    app = make_app(Runs(run, keys), token)
    print(f"dashboard: {url_of(listener, host)}/{f'?token={token}' if token else ''}", flush=True)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSE_S)
    uvicorn.Server(settings).run(sockets=[listener])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError if the address or port cannot be listened on."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"options '--host' = {host!r} and '--port' = {port} cannot be listened on ({error}); give others, such as "
            "--port 0"
        ) from None


def url_of(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


# --- memory -----------------------------------------------------------------------------------------------------------

LARGE_BLOCK_BYTES = 256 << 10
"""Size from which malloc maps blocks separately, so that a freed block returns to the operating system (bytes)."""


def configure_heap() -> None:
    """Use one heap for all threads; call before threads start and before pyarrow is imported.

    By default each thread has its own heap, which keeps freed memory. With one heap, large blocks go back to the
    system, and Arrow allocates from it, too.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    sys.meta_path.insert(0, BlockPandas())
    resources.tune_allocator(LARGE_BLOCK_BYTES, LARGE_BLOCK_BYTES, arenas=1)


class BlockPandas(MetaPathFinder):
    """Import hook that hides pandas, which pyarrow would import for type checks, at a cost of 35 MB."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)

"""`april dashboard`: runs in a browser."""

import secrets
import socket
from pathlib import Path

from april.cli.command import MONITOR_KEYS, command, option
from april.errors import ConfigError

PORT = 8642
CLOSE_S = 2
"""Time that open connections get to finish when the dashboard ends (seconds)."""


@command(
    option("run", help="Run folder, folder of runs, or a broker's address as tcp://HOST:PORT."),
    option(
        "--host",
        default="127.0.0.1",
        help="Address to listen on; beyond loopback the printed token is needed [default: 127.0.0.1].",
    ),
    option("--port", type=int, default=PORT, help=f"Port to listen on; 0: any free one [default: {PORT}]."),
    option("--token", help="Token that a browser has to show [default: a new one beyond loopback, otherwise none]."),
    MONITOR_KEYS,
)
def dashboard(run: str, host: str, port: int, token: str | None, keys: Path | None) -> int:
    """Serve a web page about one run or several, until interrupted."""
    try:
        import uvicorn

        from april.dashboard.app import make_app
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs the package {error.name}, which is not installed; "
            "run `pip install 'april-rl[dashboard]'`"
        ) from None
    from april.config import is_loopback
    from april.dashboard import memory
    from april.dashboard.folder import Runs

    memory.configure_heap()
    token = token or ("" if is_loopback(host) else secrets.token_urlsafe(24))
    listener = listen(host, port)
    app = make_app(Runs(run, keys), token)
    print(f"dashboard: {url_of(listener, host)}/{f'?token={token}' if token else ''}", flush=True)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSE_S)
    uvicorn.Server(settings).run(sockets=[listener])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if there can be none."""
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

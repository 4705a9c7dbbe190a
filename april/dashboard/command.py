"""`april dashboard`: its options, its socket, and the address that it prints."""

import argparse
import secrets
import socket
from pathlib import Path

from april.config import ConfigError, is_loopback

PORT = 8642
CLOSE_S = 2
"""given to open connections at the end"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder, a folder of runs, or a broker as tcp://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on; any but loopback needs the token that is "
                        "printed [default 127.0.0.1]")  # fmt: skip
    parser.add_argument("--port", type=int, default=PORT, help=f"0: any that is free [default {PORT}]")
    parser.add_argument("--token", help="to be let in with [default a new one where the host is not loopback]")
    parser.add_argument(
        "--security.keys", dest="keys", type=Path, metavar="KEYS", help="of a monitor [default the run's own]"
    )


def serve(options: argparse.Namespace) -> int:
    """Until it is interrupted."""
    try:
        import uvicorn

        from april.dashboard.app import make_app
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs the package {error.name}, which is not installed; "
            "run `pip install 'april-rl[dashboard]'`"
        ) from None
    from april.dashboard import memory
    from april.dashboard.folder import Runs

    memory.settle()
    token = options.token or ("" if is_loopback(options.host) else secrets.token_urlsafe(24))
    listener = listen(options.host, options.port)
    app = make_app(Runs(options.run, options.keys), token)
    print(f"dashboard: {address(listener, options.host)}/{f'?token={token}' if token else ''}", flush=True)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSE_S)
    uvicorn.Server(settings).run(sockets=[listener])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"options '--host' = {host!r} and '--port' = {port} cannot be listened on ({error}); give others, such as "
            "--port 0"
        ) from None


def address(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"

"""Sockets of the gateway: plain HTTP for clients on this machine, TLS for all others."""

import hmac
import logging
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from april.config import AgentSection, Config, is_loopback
from april.config.section import OFF
from april.util.errors import refuse
from april.wire.security.keygen import make_secret_once
from april.wire.security.web_requests import names_of

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

LOOPBACK, ANY_ADDRESS = "127.0.0.1", "0.0.0.0"
ATTACH_KEY = "attach.key"
"""File in the run folder with the attach key that April generates (`AttachKey`)."""
MIN_KEY_CHARACTERS = 32
"""Least number of characters of an attach key: that of 16 random bytes as `openssl rand -hex` prints them."""


@dataclass(frozen=True)
class Addresses:
    """Base URLs of the API, with /v1."""

    local: str
    """Base URL for programs that April starts: without TLS, so that they need no certificate settings."""
    public: str
    """Base URL for clients on other machines."""
    peer: str
    """Base URL for other agents processes: the address of exactly this process."""


class AttachKey:
    """The key that authorizes a harness to take sessions; without a key file anybody may."""

    def __init__(self, file: Path | None):
        """Read the key from `file`; None for no key. Raises ConfigError for a file that cannot be used."""
        self._secret = read_secret(file) if file else ""

    def accepts(self, shown: str) -> bool:
        return not self._secret or self.is_shown(shown)

    def is_shown(self, shown: str) -> bool:
        """Whether a key is set and equals the key `shown` by a client; compared in constant time."""
        return self._secret != "" and hmac.compare_digest(self._secret.encode(), shown.encode(errors="replace"))


def attach_keyfile(config: Config) -> Path | None:
    """File of the attach key: agent.attach_keyfile, or a file that this function creates in the run folder; None if no
    external harness takes sessions, or `security.keys` is "off". Raises ConfigError."""
    file = config.agent.attach_keyfile
    if file or not config.agent.attach:
        return file
    if config.security.keys == OFF:
        log.warning("security.keys = 'off': every user of this machine can take the sessions of agents")
        return None
    file = config.run_dir / ATTACH_KEY
    config.run_dir.mkdir(parents=True, exist_ok=True)
    make_secret_once(file)
    log.info("a harness that takes sessions shows the key in %s", file)
    return file


def read_secret(file: Path) -> str:
    try:
        text = file.read_text().strip()
        readable_by_others = file.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        refuse("agent.attach_keyfile", file, f"cannot be read ({why})", f"`openssl rand -hex 32 > {file}`")
    if readable_by_others:
        fix = f"run `chmod 600 {file}`; if that does nothing, give a file elsewhere, where modes are kept"
        refuse("agent.attach_keyfile", file, "can be read by others", fix)
    if len(text) < MIN_KEY_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        problem = f"holds no key of {MIN_KEY_CHARACTERS} characters or more in one line"
        refuse("agent.attach_keyfile", file, problem, f"`openssl rand -hex 32 > {file}`")
    return text


def server_tls(section: AgentSection) -> ssl.SSLContext | None:
    """TLS of the server; None where no certificate is configured. Raises ConfigError."""
    certificate, key = section.ssl_certfile, section.ssl_keyfile
    if certificate is None or key is None:
        return None
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        try:
            file.read_bytes()
        except OSError as error:
            refuse(f"agent.{name}", file, f"cannot be read ({error.strerror})", "give a PEM file that is there")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without an explicit password OpenSSL would ask for that of an encrypted key at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        problem = f"is no certificate of the key in {str(key)!r} ({getattr(error, 'reason', None) or error})"
        fix = "give PEM files of a certificate and of its key without a passphrase"
        refuse("agent.ssl_certfile", certificate, problem, fix)
    return context


async def listen(http: "web.AppRunner", section: AgentSection, tls: ssl.SSLContext | None) -> Addresses:
    """Open the sockets of the application `http`, and return their base URLs. `tls`: for the main port; None: plain
    HTTP. If the main port uses TLS or is public, programs that April starts get a loopback port of their own. Raises
    OSError."""
    from aiohttp import web

    host, _, port = section.listen.rpartition(":")
    await web.TCPSite(http, host, int(port), ssl_context=tls).start()
    base_url = f"{'https' if tls else 'http'}://{reachable_name(host)}:{http.addresses[0][1]}"
    public = f"{section.public_url.rstrip('/') or base_url}/v1"
    if section.attach or (tls is None and is_loopback(host)):
        return Addresses(f"{base_url}/v1", public, f"{base_url}/v1")
    await web.TCPSite(http, LOOPBACK, 0).start()
    return Addresses(f"http://{LOOPBACK}:{http.addresses[-1][1]}/v1", public, f"{base_url}/v1")


def served_names(section: AgentSection) -> frozenset[str]:
    """Host names by which clients address the gateway."""
    return names_of(section.listen.rpartition(":")[0], urlsplit(section.public_url).hostname or "")


def reachable_name(host: str) -> str:
    """The host under which other machines reach the gateway: this machine's name instead of 0.0.0.0."""
    return socket.gethostname() if host == ANY_ADDRESS else host

"""Where the gateway listens: plain HTTP for what runs on this machine, TLS for all others."""

import hmac
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from april.config import AgentSection, ConfigError, is_loopback

if TYPE_CHECKING:
    from aiohttp import web

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
LEAST_KEY_CHARACTERS = 32
"""of the key that a harness shows; sixteen random bytes as `openssl rand -hex` writes them"""


@dataclass(frozen=True)
class Addresses:
    """Base URLs of the API, with /v1."""

    near: str
    """for programs that April starts; their own connections elsewhere need no other certificates"""
    public: str
    """for all others"""
    own: str
    """for other agents processes: of this one alone"""


class AttachKey:
    """What a harness shows when it comes for sessions; none where only this machine can come."""

    def __init__(self, file: Path | None):
        """Raises ConfigError."""
        self._secret = read_secret(file) if file else ""

    def opens(self, shown: str) -> bool:
        return not self._secret or hmac.compare_digest(self._secret.encode(), shown.encode(errors="replace"))


def read_secret(file: Path) -> str:
    try:
        text = file.read_text().strip()
        open_to_others = file.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise refusal("attach_keyfile", file, f"cannot be read ({why})", f"`openssl rand -hex 32 > {file}`") from None
    if open_to_others:
        raise refusal("attach_keyfile", file, "can be read by others", f"run `chmod 600 {file}`")
    if len(text) < LEAST_KEY_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        what = f"holds no key of {LEAST_KEY_CHARACTERS} characters or more in one line"
        raise refusal("attach_keyfile", file, what, f"`openssl rand -hex 32 > {file}`")
    return text


def tls_of(section: AgentSection) -> ssl.SSLContext | None:
    """None where no certificate is given. Raises ConfigError."""
    certificate, key = section.ssl_certfile, section.ssl_keyfile
    if certificate is None or key is None:
        return None
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        try:
            file.read_bytes()
        except OSError as error:
            raise refusal(name, file, f"cannot be read ({error.strerror})", "give a PEM file that is there") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password given OpenSSL would ask at the terminal for that of a key that has one.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        what = f"is no certificate of the key in {str(key)!r} ({getattr(error, 'reason', None) or error})"
        mend = "give PEM files of a certificate and of its key without a passphrase"
        raise refusal("ssl_certfile", certificate, what, mend) from None
    return context


def refusal(key: str, file: Path, what: str, mend: str) -> ConfigError:
    return ConfigError(f"key 'agent.{key}' = {str(file)!r} {what}; {mend}")


async def listen(http: "web.AppRunner", section: AgentSection, tls: ssl.SSLContext | None) -> Addresses:
    """Programs and commands of this machine get a port of their own where others listen in. Raises OSError."""
    from aiohttp import web

    host, _, port = section.listen.rpartition(":")
    await web.TCPSite(http, host, int(port), ssl_context=tls).start()
    own = f"{'https' if tls else 'http'}://{named(host)}:{http.addresses[0][1]}"
    public = f"{section.public_url.rstrip('/') or own}/v1"
    if section.attach or (tls is None and is_loopback(host)):
        return Addresses(f"{own}/v1", public, f"{own}/v1")
    await web.TCPSite(http, LOOPBACK, 0).start()
    return Addresses(f"http://{LOOPBACK}:{http.addresses[-1][1]}/v1", public, f"{own}/v1")


def named(host: str) -> str:
    """An address that can be told to others."""
    return socket.gethostname() if host == EVERYWHERE else host

"""Checks of the addresses in a configuration: where parts listen and connect, and the checkpoint store."""

import ipaddress
import re
from pathlib import Path

from april.config.broker import IPC
from april.config.section import AUTO
from april.config.sections import Config
from april.config.workers import AgentSection
from april.util.errors import refuse
from april.wire.security.keys import RUN_KEYS

LARGEST_PORT = 65535


def check_addresses(config: Config) -> None:
    """Refuse malformed addresses, and addresses beyond loopback without keys."""
    bind, keys = config.broker.bind, config.security.keys
    port = re.fullmatch(r"tcp://([^:/\s]+):(\*|\d+)", bind)
    if bind != IPC and (not port or (port[2] != "*" and not 0 < int(port[2]) <= LARGEST_PORT)):
        refuse("broker.bind", bind, wrong_address(bind), "use ipc, or tcp://INTERFACE:PORT, * for a free port")
    if ":" in config.weights.host:
        refuse(
            "weights.host", config.weights.host, wrong_address(config.weights.host), "give an address without a port"
        )
    for key, value, host in (
        ("broker.bind", bind, port[1] if port else AUTO),
        ("weights.host", config.weights.host, config.weights.host),
    ):
        if config.keys is None and host != AUTO and not is_loopback(host):
            refuse(
                key,
                value,
                "would let anybody on the network in without keys",
                "leave security.keys out and give broker.bind a tcp:// address, so that the run makes keys, name a "
                "folder of `april keygen` as security.keys, or keep to 127.0.0.1",
            )
    if ":" in config.weights.host:
        refuse(
            "weights.host", config.weights.host, wrong_address(config.weights.host), "give an address without a port"
        )
    if isinstance(keys, Path) and not keys.exists():
        refuse("security.keys", keys, "does not exist", f"make it with `april keygen {keys}`, or leave it out")
    port = re.fullmatch(r"[^:/\s]+:(\d+)", config.operations.http)
    if config.operations.http != "none" and not (port and int(port[1]) <= LARGEST_PORT):
        refuse(
            "operations.http",
            config.operations.http,
            wrong_address(config.operations.http),
            "use HOST:PORT, port 0 for a free one, or none",
        )


def wrong_address(text: str) -> str:
    """Why `text` is refused as an address: the end of a sentence whose subject is the text."""
    host = re.sub(r"^\w+://", "", text)
    host = host.rpartition("]")[0].removeprefix("[") if "]" in host else host
    for candidate in (host, host.rpartition(":")[0]):
        try:
            ipaddress.IPv6Address(candidate)
        except ValueError:
            continue
        return "is an address of IPv6, which April does not speak; a name or an address of IPv4 is taken"
    return "is no address"


def with_run_keys(config: Config, connect: str) -> Config:
    """The configuration of a process that joins a run, with the keys that April has made in the run's folder.
    `connect`: the broker's address, or that folder, in which the broker writes its address once the keys exist. Waits
    for the address; raises TimeoutError after `broker.patience_s`."""
    from april.wire.sockets.base import address_at

    if config.security.keys != AUTO:
        return config
    folder = (config.run_dir if "://" in connect else Path(connect)) / RUN_KEYS
    is_tcp = address_at(connect, config.broker.patience_s).startswith("tcp://")
    return config.with_keys(folder) if is_tcp or folder.exists() else config


def check_listening(agent: AgentSection) -> None:
    """Refuse an agents' HTTP API that would be reachable beyond loopback without TLS, or without a key for harnesses
    that attach to it."""
    address = re.fullmatch(r"([^:/\s]+):(\d+)", agent.listen)
    if not address or int(address[2]) > LARGEST_PORT:
        refuse("agent.listen", agent.listen, wrong_address(agent.listen), "use HOST:PORT, port 0 for a free one")
    if bool(agent.ssl_certfile) != bool(agent.ssl_keyfile):
        given, missing = ("certfile", "keyfile") if agent.ssl_certfile else ("keyfile", "certfile")
        refuse(
            f"agent.ssl_{given}",
            str(getattr(agent, f"ssl_{given}")),
            f"needs agent.ssl_{missing} beside it",
            "give both, or neither",
        )
    url = re.fullmatch(r"(https?)://([^/\s?#@:]+)(:\d+)?(/[^\s?#]*)?", agent.public_url)
    loopback_only = is_loopback(address[1])
    if agent.public_url:
        if not url or (url[1] == "http" and not is_loopback(url[2])):
            refuse(
                "agent.public_url",
                agent.public_url,
                "is no address of TLS",
                "give https://HOST:PORT, as others reach the API",
            )
        if address[2] == "0":
            refuse("agent.listen", agent.listen, "takes any port, and agent.public_url is that of one", "give a port")
        loopback_only = loopback_only and is_loopback(url[2])
    if not (loopback_only or agent.ssl_certfile or agent.public_url.startswith("https:")):
        refuse(
            "agent.listen",
            agent.listen,
            "would carry keys over the network unencrypted",
            "give agent.ssl_certfile and agent.ssl_keyfile, or the https address of a proxy that ends TLS "
            "as agent.public_url, or keep to 127.0.0.1",
        )
    if agent.attach and not loopback_only and not agent.attach_keyfile:
        refuse(
            "agent.attach",
            True,
            f"with agent.listen = {agent.listen!r} would give sessions to anybody on the network",
            "name a file with a random text as agent.attach_keyfile, such as that of `openssl rand -hex 32`",
        )


def check_store_url(key: str, url: str) -> None:
    """Refuse the URL of an object store, given as `key`, that names no durable folder, or that has credentials in it,
    which the run's files would show."""
    scheme, colon, rest = url.partition("://")
    credentials, at, _ = rest.partition("/")[0].rpartition("@")
    if not url:
        return
    if (at and ":" in credentials) or "?" in rest:
        refuse(
            key,
            f"{scheme}://…",
            "has credentials or options in it, which the run's files would show",
            "leave them to the environment of each part",
        )
    if not (colon and scheme and rest.strip("/")) or "::" in url or (scheme in ("file", "local") and rest[0] != "/"):
        refuse(
            key,
            url,
            "is no URL of a folder",
            "give one as s3://bucket/folder or file:///folder, or leave it out",
        )
    if scheme == "memory":
        refuse(
            key,
            f"{scheme}://…",
            "ends with its process",
            "give a store that outlives the run's machines",
        )


def check_address(address: str) -> str:
    """Return `address` if it is tcp://HOST:PORT, ipc://PATH or a run folder on this machine. Raises ConfigError."""
    if (Path(address) / "config.toml").is_file() or address.startswith("ipc:///"):
        return address
    found = re.fullmatch(r"tcp://[^:/\s]+:(\d+)", address)
    if not found or not 0 < int(found[1]) <= LARGEST_PORT:
        refuse("--connect", address, wrong_address(address), "give the broker's as tcp://HOST:PORT, or its run folder")
    return address


def is_loopback(host: str) -> bool:
    """Whether `host` (IP address or name) is reachable from this machine only. Among names, only localhost and lo
    count."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")

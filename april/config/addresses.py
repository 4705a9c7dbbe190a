"""Addresses that a configuration names: where parts are reached, and by whom, and where checkpoints are stored."""

import ipaddress
import re
from pathlib import Path

from april.config.sections import AUTO, Config
from april.config.workers import AgentSection
from april.errors import ConfigError

LARGEST_PORT = 65535


def check_addresses(config: Config) -> None:
    """Addresses are well-formed, and nobody outside this machine gets in without keys."""
    port = re.fullmatch(r"tcp://[^:/\s]+:(\*|\d+)", config.broker.bind)
    if not port or (port[1] != "*" and not 0 < int(port[1]) <= LARGEST_PORT):
        raise ConfigError(
            f"key 'broker.bind' = {config.broker.bind!r} is no address; use tcp://INTERFACE:PORT, * for a free port"
        )
    hosts = {"broker.bind": config.broker.bind[len("tcp://") : -len(port[1]) - 1], "weights.host": config.weights.host}
    for key, host in hosts.items():
        if config.security.keys is None and host != AUTO and not is_loopback(host):
            value = config.broker.bind if key == "broker.bind" else host
            raise ConfigError(
                f"key {key!r} = {value!r} would let anybody on the network in; make keys with `april keygen KEYS` and "
                "set security.keys = 'KEYS', or keep to 127.0.0.1"
            )
    if config.security.keys is not None and not config.security.keys.exists():
        raise ConfigError(
            f"key 'security.keys' = {str(config.security.keys)!r} does not exist; make it with "
            f"`april keygen {config.security.keys}`"
        )
    port = re.fullmatch(r"[^:/\s]+:(\d+)", config.operations.http)
    if config.operations.http != "none" and not (port and int(port[1]) <= LARGEST_PORT):
        raise ConfigError(
            f"key 'operations.http' = {config.operations.http!r} is no address; use HOST:PORT, port 0 for a free one, "
            "or none"
        )


def check_listening(agent: AgentSection) -> None:
    """What agents send and are sent is read by nobody else, and nobody else comes for their sessions."""
    address = re.fullmatch(r"([^:/\s]+):(\d+)", agent.listen)
    if not address or int(address[2]) > LARGEST_PORT:
        raise ConfigError(f"key 'agent.listen' = {agent.listen!r} is no address; use HOST:PORT, port 0 for a free one")
    if bool(agent.ssl_certfile) != bool(agent.ssl_keyfile):
        here, other = ("certfile", "keyfile") if agent.ssl_certfile else ("keyfile", "certfile")
        raise ConfigError(
            f"key 'agent.ssl_{here}' = {str(getattr(agent, f'ssl_{here}'))!r} needs agent.ssl_{other} beside it; give "
            "both, or neither"
        )
    url = re.fullmatch(r"(https?)://([^/\s?#@:]+)(:\d+)?(/[^\s?#]*)?", agent.public_url)
    near = is_loopback(address[1])
    if agent.public_url:
        if not url or (url[1] == "http" and not is_loopback(url[2])):
            raise ConfigError(
                f"key 'agent.public_url' = {agent.public_url!r} is no address of TLS; give https://HOST:PORT, as "
                "others reach the API"
            )
        if address[2] == "0":
            raise ConfigError(
                f"key 'agent.listen' = {agent.listen!r} takes any port, and agent.public_url is that of one; give "
                "a port"
            )
        near = near and is_loopback(url[2])
    if not (near or agent.ssl_certfile or agent.public_url.startswith("https:")):
        raise ConfigError(
            f"key 'agent.listen' = {agent.listen!r} would carry keys over the network unencrypted; give "
            "agent.ssl_certfile and agent.ssl_keyfile, or the https address of a proxy that ends TLS as "
            "agent.public_url, or keep to 127.0.0.1"
        )
    if agent.attach and not near and not agent.attach_keyfile:
        raise ConfigError(
            f"key 'agent.attach' = true with agent.listen = {agent.listen!r} would give sessions to anybody on the "
            "network; name a file with a random text as agent.attach_keyfile, such as that of `openssl rand -hex 32`"
        )


def check_checkpoint_store(url: str) -> None:
    """Refuse what leads nowhere, or to no disk, and what a run's files must not show."""
    scheme, colon, rest = url.partition("://")
    own, at, _ = rest.partition("/")[0].rpartition("@")
    key = f"key 'learner.checkpoint_store' = '{scheme}://…'"
    if not url:
        return
    if (at and ":" in own) or "?" in rest:
        raise ConfigError(
            f"{key} has credentials or options in it, which the run's files would show; leave them to the environment "
            "of each part"
        )
    if not (colon and scheme and rest.strip("/")) or "::" in url or (scheme in ("file", "local") and rest[0] != "/"):
        raise ConfigError(
            f"key 'learner.checkpoint_store' = {url!r} is no URL of a folder; give one as s3://bucket/folder or "
            "file:///folder, or leave it out"
        )
    if scheme == "memory":
        raise ConfigError(f"{key} ends with its process; give a store that outlives the run's machines")


def check_address(address: str) -> str:
    """A broker's address as peers connect to it: tcp://HOST:PORT, or the folder of its run on this machine."""
    if (Path(address) / "config.toml").is_file():
        return address
    found = re.fullmatch(r"tcp://[^:/\s]+:(\d+)", address)
    if not found or not 0 < int(found[1]) <= LARGEST_PORT:
        raise ConfigError(
            f"option '--connect' = {address!r} is no address; give the broker's as tcp://HOST:PORT, or its run folder"
        )
    return address


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; of names only localhost is known to be so."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")

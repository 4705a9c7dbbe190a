"""The check of requests in all of April's HTTP servers: it refuses requests from web pages of other sites, and requests
to a host name that is not the server's.

A browser lets any page send requests to any address, this machine's loopback included, and says in `Origin` where the
page comes from. A page whose own name has been pointed at this machine (DNS rebinding) counts as the server's own for a
browser; it is known by that name in `Host`. An IP address cannot be pointed elsewhere.

This module imports nothing of April: a server in another environment loads it by its path.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web

OTHER_NAME = "ask for this server by its IP address, its machine's name, or a name that it is configured with"
OTHER_SITE = "pages of other sites get no answers here"


def names_of(listen: str, *others: str) -> frozenset[str]:
    """Host names, besides localhost, by which clients address a server that listens at the host `listen`. `others`:
    further host names, such as that of a proxy before the server."""
    machine = () if is_loopback(listen) else (socket.gethostname(), socket.getfqdn())
    return frozenset(name.lower().rstrip(".") for name in (listen, *machine, *others) if name)


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def objection(hosts: Sequence[str], origins: Sequence[str], names: Collection[str] | None) -> str:
    """Reason to refuse a request; "" if it is allowed. `hosts`, `origins`: values of its headers Host and Origin.
    `names`: the server's host names; None: any name, for a request with a secret that no web page knows."""
    for host in hosts:
        name = re.sub(r":\d*$", "", host).lower().rstrip(".")
        if names is not None and name not in names and name != "localhost" and not is_address(name):
            return OTHER_NAME
    sites = {origin.lower().partition("://")[2] for origin in origins}
    return OTHER_SITE if len(set(hosts)) > 1 or sites - {host.lower() for host in hosts} else ""


def is_address(host: str) -> bool:
    """Whether a host is an IP address; one of version 6 may have brackets, as in URLs."""
    try:
        ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    except ValueError:
        return False
    return True


class CheckedRequestHandler(BaseHTTPRequestHandler):
    """A request handler of the standard library's HTTP server that answers 403 to a request from a web page of another
    site, or to another host name than the server's."""

    names: frozenset[str] = frozenset()
    """Host names of the server, from `names_of`."""

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        if why := objection(hosts, origins, self.names):
            self.send_error(403, why)
        return not why


def check_requests(names: Collection[str], has_secret: "Callable[[web.Request], bool]" = lambda request: False) -> Any:
    """Create the aiohttp middleware that answers 403 to a request from a web page of another site, or to a host name
    that is not in `names`, the server's (`names_of`). `has_secret`: whether a request carries a secret that no web page
    knows; such a request may have any Host, since a proxy may set its own."""
    from aiohttp import web

    @web.middleware
    async def check(
        request: "web.Request", handler: Callable[["web.Request"], Awaitable["web.StreamResponse"]]
    ) -> "web.StreamResponse":
        hosts, origins = (request.headers.getall(name, []) for name in ("Host", "Origin"))
        if why := objection(hosts, origins, None if has_secret(request) else names):
            return web.Response(status=403, text=f"{why}\n")
        return await handler(request)

    return check

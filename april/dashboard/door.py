"""Access control of the dashboard: local browsers under a loopback host name, or anyone with the token."""

import secrets
from http.cookies import SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "april_dashboard"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every response: pages load nothing from other origins, and cannot be framed."""


class HttpGuard:
    """ASGI middleware. Without a token the Host header must be a loopback name, which prevents DNS rebinding: another
    site cannot reach the server under a name of its own."""

    def __init__(self, app: ASGIApp, token: str):
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                defaults = {"cache-control": "no-cache"} | HEADERS
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in defaults.items()
                        if name.encode() not in present
                    ),
                ]
            await send(message)

        answer = self._reject(scope)
        await (answer or self.app)(scope, receive, send_with_headers)

    def _reject(self, scope: Scope) -> PlainTextResponse | RedirectResponse | None:
        """The response to a request without access, or a redirect that stores the token in a cookie; None: allowed."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.token:
            if host_of(headers.get("host", "")) in LOOPBACK:
                return None
            return PlainTextResponse("ask for this dashboard as localhost\n", 403)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if self._is_token(query.pop("token", "")):
            target = scope["path"] + (f"?{urlencode(query)}" if query else "")
            answer = RedirectResponse("/" + target.lstrip("/"), 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(cookie.value if cookie else "") or self._is_token(bearer):
            return None
        return PlainTextResponse("open the address that `april dashboard` has printed, with its token\n", 401)

    def _is_token(self, shown: str) -> bool:
        return secrets.compare_digest(shown.encode(), self.token.encode())


def host_of(header: str) -> str:
    """The host of a Host header without its port, such as `127.0.0.1:8642` or `[::1]:8642`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]

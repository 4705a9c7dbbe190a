"""Who may look: this machine's own browser by its own name for this machine, or whoever has the token."""

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
"""of every answer: no page may load from elsewhere, nor be shown inside another"""


class Door:
    """Around the application. Without a token the host that is asked for must be one of loopback's names, so that
    another site cannot reach it by a name of its own (DNS rebinding)."""

    def __init__(self, app: ASGIApp, token: str):
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name for name, _ in message["headers"]}
                more = {"cache-control": "no-cache"} | HEADERS
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in more.items() if name.encode() not in named),
                ]
            await send(message)

        answer = self._answer(scope)
        await (answer or self.app)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> PlainTextResponse | RedirectResponse | None:
        """What is said instead of the page; None for whoever may see it."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.token:
            if host_of(headers.get("host", "")) in LOOPBACK:
                return None
            return PlainTextResponse("ask for this dashboard as localhost\n", 403)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if self._is_token(query.pop("token", "")):
            where = scope["path"] + (f"?{urlencode(query)}" if query else "")
            answer = RedirectResponse("/" + where.lstrip("/"), 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(cookie.value if cookie else "") or self._is_token(bearer):
            return None
        return PlainTextResponse("open the address that `april dashboard` has printed, with its token\n", 401)

    def _is_token(self, said: str) -> bool:
        return secrets.compare_digest(said.encode(), self.token.encode())


def host_of(header: str) -> str:
    """`127.0.0.1:8642` and `[::1]:8642` without their ports."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]

"""Client of SGLang's HTTP API: one coroutine per request, a deadline for every call, a sentence for every error."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import orjson

from april.workers.engines.base import EngineError

API_KEY = "APRIL_SGLANG_API_KEY"
"""Environment variable with the API key of a server that requires one."""
CALL_S = 10.0
"""Default time limit of a call (s): enough for one that the server answers at once, without generating or loading."""
LONGEST_EVENT_BYTES = 64 << 20


class ServerRefuses(EngineError):
    """The server refuses a call; the text has the server's own reason."""


class ApiKeyRefused(ServerRefuses):
    """The server requires an API key, or a different one."""


class ServerGone(RuntimeError):
    """The server does not answer, or broke off during an answer."""


class ServerSilent(ServerGone):
    """The server has accepted a call, and did not answer it before the deadline."""


class SGLangClient:
    """Client of one server. Every method must run in the event loop that drives the engine."""

    def __init__(self, url: str, api_key: str = "", name: str = "SGLang"):
        """`name`: name of the server in error texts."""
        self.url, self._server = url.rstrip("/"), f"the {name} server"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        """The HTTP session, without keep-alive: a server may close an idle connection at any moment.

        Raises ServerGone after `close`.
        """
        if self._session is not None and self._session.closed:
            raise ServerGone(f"{self._server} at {self.url} has been given up")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=self._headers, read_bufsize=1 << 18, trust_env=False
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, path: str, body: dict | None = None, deadline_s: float = CALL_S) -> Any:
        """POST `body` as JSON, or GET if it is None; returns the answer's JSON, or None if the answer is empty.

        Raises ApiKeyRefused on status 401 and 403, ServerRefuses on any other status than 200 and on `success: false`,
        ServerSilent at the deadline, ServerGone without a connection.
        """
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(deadline_s):
                async with self._open().request(method, self.url + path, **self._body(body)) as response:
                    content = await response.read()
        except TimeoutError:
            raise ServerSilent(f"{self._server} at {self.url} does not answer {path} within {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{self._server} at {self.url} cannot be reached ({describe(error)})") from None
        answer = decode(content)
        if response.status in (401, 403):
            raise ApiKeyRefused(
                f"{self._server} at {self.url} wants {'another' if self._headers else 'an'} API key for {path}; set "
                f"{API_KEY} in the worker's environment, or engine.server.api_key for a server that is started here"
            )
        if response.status != 200:
            raise ServerRefuses(f"{self._server} at {self.url} refuses {path}: {reason(answer, content)}")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerRefuses(f"{self._server} at {self.url} refuses {path}: {reason(answer, content)}")
        return answer

    async def generate(self, body: dict) -> AsyncGenerator[dict, None]:
        """Yield the events of one streamed POST /generate with `body` until its end. Raises ServerRefuses and
        ServerGone."""
        try:
            async with self._open().post(self.url + "/generate", **self._body(body)) as response:
                if response.status != 200:
                    content = await response.read()
                    raise ServerRefuses(f"{self._server} refuses a request: {reason(decode(content), content)}")
                rest = b""
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line == b"data: [DONE]":
                            return
                        if line.startswith(b"data: "):
                            event = orjson.loads(line[6:])
                            if "error" in event:
                                raise ServerRefuses(f"{self._server} refuses a request: {reason(event, line)}")
                            yield event
                    if len(rest) > LONGEST_EVENT_BYTES:
                        raise ServerGone(f"{self._server} sends an event without an end")
        except (aiohttp.ClientError, OSError, orjson.JSONDecodeError) as error:
            raise ServerGone(f"{self._server} broke off in the middle of an answer ({describe(error)})") from None
        raise ServerGone(f"{self._server} ended an answer before it was complete")

    @staticmethod
    def _body(body: dict | None) -> dict[str, Any]:
        if body is None:
            return {}
        return {"data": orjson.dumps(body), "headers": {"Content-Type": "application/json"}}


def decode(content: bytes) -> Any:
    try:
        return orjson.loads(content) if content else None
    except orjson.JSONDecodeError:
        return None


def reason(answer: Any, content: bytes) -> str:
    """Reason of a refusal, from wherever SGLang puts it in the answer (JSON, or its bytes `content`): error,
    error.message, message, detail, or plain text."""
    if isinstance(answer, dict):
        text = answer.get("error") or answer.get("message") or answer.get("detail") or answer
        return str(text.get("message", text) if isinstance(text, dict) else text)
    return content.decode(errors="replace")[:500]


def describe(error: Exception) -> str:
    return str(error) or type(error).__name__

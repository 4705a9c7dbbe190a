"""The dashboard's HTTP server: static pages, and their data as JSON. It answers GET requests only."""

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import orjson
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from april.config import ConfigError
from april.observe.dashboard import query, run_page, sample_reader
from april.observe.dashboard.folder import Runs, WatchedRun
from april.observe.dashboard.index import SampleIndex
from april.observe.dashboard.sample_reader import TokenTexts
from april.observe.dashboard.steps import Steps, shared_prompts
from april.observe.report.run_folder import RunFolder, read_summary
from april.observe.report.samples import example_samples
from april.observe.report.timeline import whole_timeline
from april.wire.security.web_requests import objection

# --- access control ---------------------------------------------------------------------------------------------------

COOKIE = "april_dashboard"
SECURITY_HEADERS = {
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
    """ASGI middleware that admits only requests with the dashboard's access token, which no other site knows. If the
    dashboard has no token, it refuses requests that a page of another site has sent."""

    def __init__(self, app: ASGIApp, token: str):
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                defaults = {"cache-control": "no-cache"} | SECURITY_HEADERS
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
        """Response to a request that the middleware answers itself: an error (403 or 401) if the request is not
        allowed, or a redirect that stores the token of the URL's query in a cookie. None if the request is allowed."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.token:
            hosts, origins = (
                [text.decode("latin-1") for name, text in scope["headers"] if name == wanted]
                for wanted in (b"host", b"origin")
            )
            why = objection(hosts, origins, ())
            return PlainTextResponse(f"{why}\n", 403) if why else None
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


# --- server -----------------------------------------------------------------------------------------------------------

STATIC = Path(__file__).parent / "static"
POLL_S = 0.5
"""Interval at which a stream of server-sent events checks for changes, seconds."""
MAX_EXCERPTS = 200
WINDOW = ("from", "to", "workers")
"""Names of a timeline's query parameters: begin and end in Unix seconds, and the maximum number of workers shown."""


def make_app(runs: Runs, token: str = "") -> Starlette:
    api = RunApi(runs)
    routes = [
        Route("/api/runs", json_endpoint(lambda request: runs.describe())),
        Route("/api/compare", json_endpoint(api.compare)),
        Route("/api/runs/{run}", json_endpoint(api.run)),
        Route("/api/runs/{run}/steps", json_endpoint(api.steps)),
        Route("/api/runs/{run}/timeline", json_endpoint(api.timeline)),
        Route("/api/runs/{run}/lanes", json_endpoint(api.lanes)),
        Route("/api/runs/{run}/examples", json_endpoint(api.examples)),
        Route("/api/runs/{run}/logs", json_endpoint(api.logs)),
        Route("/api/runs/{run}/now", json_endpoint(api.now)),
        Route("/api/runs/{run}/samples", json_endpoint(api.samples)),
        Route("/api/runs/{run}/search", api.search),
        Route("/api/runs/{run}/excerpts", json_endpoint(api.excerpts)),
        Route("/api/runs/{run}/groups/{step}/{group}", json_endpoint(api.group)),
        Route("/api/runs/{run}/samples/{step}/{group}/{index}", json_endpoint(api.sample)),
        Route("/api/runs/{run}/images/{name}", api.image),
        Route("/events/{run}", api.events),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        runs.close()

    return Starlette(routes=routes, middleware=[Middleware(HttpGuard, token=token)], lifespan=lifespan)


def json_endpoint(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """An endpoint that runs `handler` in a thread and answers JSON; LookupError and ConfigError become 404 and 400."""

    async def answer(request: Request) -> Response:
        try:
            return to_json(await run_in_threadpool(handler, request))
        except LookupError as error:
            return to_json({"error": str(error.args[0])}, 404)
        except ConfigError as error:
            return to_json({"error": str(error)}, 400)

    return answer


def to_json(content: Any, status: int = 200) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, media_type="application/json")


def path_numbers(request: Request, *names: str) -> list[int]:
    """The parts of the request's path with these `names`, as whole numbers. Raises ConfigError if one is not a
    number."""
    return [query.integer(name, request.path_params[name]) for name in names]


class RunApi:
    """Handlers of the JSON endpoints; each reads the run that the URL names."""

    def __init__(self, runs: Runs):
        self.runs = runs
        self.token_texts = TokenTexts()

    def _run(self, request: Request) -> WatchedRun:
        return self.runs.find(request.path_params["run"])

    def _folder(self, request: Request) -> tuple[WatchedRun, Path]:
        run = self._run(request)
        if run.path is None:
            raise ConfigError("only a broker's address was given; give the run's folder to see its files")
        return run, run.path

    def _index(self, name: str) -> SampleIndex:
        index = self.runs.find(name, samples=True).index
        if index is None:
            raise ConfigError("only a broker's address was given; give the run's folder to see its samples")
        return index

    def _steps(self, request: Request) -> Steps:
        run, path = self._folder(request)
        return Steps(path) if run.steps is None else run.steps

    def run(self, request: Request) -> dict[str, Any]:
        """The run's summary, facts, configuration, token ledger, evaluations and alarms."""
        run, path = self._folder(request)
        steps = self._steps(request)
        summary, text = read_summary(path / "summary.json"), run_page.read_config_text(path)
        return run_page.describe(RunFolder(path, text, run.config, steps.records(), summary), steps) | run.progress()

    def steps(self, request: Request) -> dict[str, Any]:
        params = request.query_params
        after = query.integer("after", params.get("after", "0"))
        return run_page.table(self._steps(request), params.get("columns"), after)

    def timeline(self, request: Request) -> dict[str, Any]:
        params = request.query_params
        begin_s, end_s, workers = (query.number(name, params[name]) if params.get(name) else None for name in WINDOW)
        return run_page.timeline_window(self._steps(request), begin_s, end_s, None if workers is None else int(workers))

    def lanes(self, request: Request) -> dict[str, Any]:
        """Timeline of the whole run, as `whole_timeline` makes it; {} if the run has more steps than
        `run_page.MAX_LINES`."""
        _, path = self._folder(request)
        steps = self._steps(request)
        if len(steps) > run_page.MAX_LINES:
            return {}
        lines = list(steps.between(0.0, math.inf, run_page.MAX_LINES))
        return whole_timeline(RunFolder(path, "", {}, lines, {}))

    def examples(self, request: Request) -> list[dict[str, Any]]:
        _, path = self._folder(request)
        return example_samples(path)

    def logs(self, request: Request) -> dict[str, Any]:
        """Names of the run's logs; with `?file=NAME` also the end of that one as `text`."""
        _, path = self._folder(request)
        return run_page.logs(path, request.query_params.get("file", ""))

    def now(self, request: Request) -> dict[str, Any]:
        return self._run(request).live.get()

    def samples(self, request: Request) -> dict[str, Any]:
        index = self._index(request.path_params["run"])
        filters = query.Query.from_params(request.query_params)
        # Before the query: files read during it may be missing in the answer, so the page asks again.
        read = index.steps_read
        rows = query.matching_rows(index, filters)
        return {
            "total": len(rows),
            "rows": query.page(index, rows, filters),
            "page": query.PAGE,
            "read": read,
            "kept": index.steps_kept,
            "words": {name: sorted(texts) for name, texts in index.texts_by_column.items()},
            "further": index.extra_columns,
            "unreadable": list(index.unreadable.values())[:5],
        }

    def excerpts(self, request: Request) -> list[dict[str, str] | None]:
        """Short excerpts of samples' texts, None for a sample that is gone. The URL's query names the samples by step
        and row in the step's file: `?of=STEP.POSITION,STEP.POSITION`."""
        _, path = self._folder(request)
        keys = [key.partition(".") for key in request.query_params.get("of", "").split(",") if key][:MAX_EXCERPTS]
        return sample_reader.excerpts(path, [(query.integer("of", a), query.integer("of", b)) for a, _, b in keys])

    def group(self, request: Request) -> list[dict[str, Any]]:
        _, path = self._folder(request)
        return sample_reader.read_group(path, *path_numbers(request, "step", "group"))

    def sample(self, request: Request) -> dict[str, Any]:
        run, path = self._folder(request)
        step, group, index = path_numbers(request, "step", "group", "index")
        fork = query.integer("fork", request.query_params.get("fork", "0"))
        discarded = request.query_params.get("discarded", "")
        positions = sample_reader.positions_of(path, step, group, index, fork, discarded)
        return sample_reader.read_sample(path, step, positions[0], run.model, self.token_texts)

    async def image(self, request: Request) -> Response:
        """The file of an image that a sample contains; the URL ends in the image's name."""
        try:
            _, path = await run_in_threadpool(self._folder, request)
        except (LookupError, ConfigError) as error:
            return to_json({"error": str(error.args[0])}, 404)
        file = sample_reader.image_file(path, request.path_params["name"])
        return FileResponse(file, media_type="image/png") if file else to_json({"error": "no such image"}, 404)

    def compare(self, request: Request) -> dict[str, Any]:
        params = request.query_params
        offset = query.integer("offset", params.get("offset", "0"))
        return shared_prompts(self._index(params.get("a", "")), self._index(params.get("b", "")), offset)

    async def search(self, request: Request) -> Response:
        """Search the samples' text; streams one JSON line per hit as soon as it is found."""

        def start_search() -> Iterator[dict[str, Any]]:
            index = self._index(request.path_params["run"])
            return query.search(index, query.Query.from_params(request.query_params))

        def lines(hits: Iterator[dict[str, Any]]) -> Iterator[bytes]:
            for line in hits:
                yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)

        try:
            hits = await run_in_threadpool(start_search)
        except LookupError as error:
            return to_json({"error": str(error.args[0])}, 404)
        except ConfigError as error:
            return to_json({"error": str(error)}, 400)
        return StreamingResponse(lines(hits), media_type="application/x-ndjson")

    async def events(self, request: Request) -> Response:
        """Server-sent events with the run's progress whenever it changes, and with `?now=1` the broker's status."""
        name, with_now = request.path_params["run"], "now" in request.query_params
        try:
            await run_in_threadpool(self.runs.find, name)
        except (LookupError, ConfigError) as error:
            return to_json({"error": str(error.args[0])}, 404)

        async def changes() -> AsyncIterator[dict[str, str]]:
            sent: dict[str, bytes] = {}
            while True:
                run = await run_in_threadpool(self.runs.find, name)
                topics = {"news": run.progress} | ({"now": run.live.get} if with_now else {})
                for topic, read in topics.items():
                    data = orjson.dumps(await run_in_threadpool(read), option=orjson.OPT_NON_STR_KEYS)
                    if data != sent.get(topic):
                        sent[topic] = data
                        yield {"event": topic, "data": data.decode()}
                await asyncio.sleep(POLL_S)

        return EventSourceResponse(changes())

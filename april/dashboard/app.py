"""What the browser asks for: the pages as they are, and what they show as JSON. All is GET: nothing is changed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from april.config import ConfigError
from april.dashboard import one, query
from april.dashboard.compare import shared_prompts
from april.dashboard.door import Door
from april.dashboard.folder import Runs, WatchedRun
from april.dashboard.index import SampleIndex
from april.dashboard.pieces import Pieces
from april.dashboard.steps import evaluations, short
from april.dashboard.timeline import timeline
from april.report.facts import ledger_of
from april.report.run_folder import Run, read_summary

STATIC = Path(__file__).parent / "static"
EVENT_S = 0.5
"""between two looks for news"""
MOST_EXCERPTS = 200


def make_app(runs: Runs, token: str = "") -> Starlette:
    desk = Desk(runs)
    routes = [
        Route("/api/runs", answering(lambda request: runs.describe())),
        Route("/api/compare", answering(desk.compare)),
        Route("/api/runs/{run}", answering(desk.run)),
        Route("/api/runs/{run}/steps", answering(desk.steps)),
        Route("/api/runs/{run}/timeline", answering(desk.timeline)),
        Route("/api/runs/{run}/now", answering(desk.now)),
        Route("/api/runs/{run}/samples", answering(desk.samples)),
        Route("/api/runs/{run}/search", desk.search),
        Route("/api/runs/{run}/excerpts", answering(desk.excerpts)),
        Route("/api/runs/{run}/groups/{step:int}/{group:int}", answering(desk.group)),
        Route("/api/runs/{run}/samples/{step:int}/{group:int}/{index:int}", answering(desk.sample)),
        Route("/events/{run}", desk.events),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        runs.close()

    return Starlette(routes=routes, middleware=[Middleware(Door, token=token)], lifespan=lifespan)


def answering(ask: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """JSON of what `ask` returns, in a thread; what is refused, as its sentence."""

    async def answer(request: Request) -> Response:
        try:
            return to_json(await run_in_threadpool(ask, request))
        except LookupError as error:
            return to_json({"error": str(error.args[0])}, 404)
        except ConfigError as error:
            return to_json({"error": str(error)}, 400)

    return answer


def to_json(content: Any, status: int = 200) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, media_type="application/json")


class Desk:
    """Answers, each from the run that an address names."""

    def __init__(self, runs: Runs):
        self.runs = runs
        self.pieces = Pieces()

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

    def run(self, request: Request) -> dict[str, Any]:
        """What a run is, and where its tokens are."""
        run, path = self._folder(request)
        summary = read_summary(path / "summary.json")
        return {
            "name": run.name,
            "summary": summary,
            "config": run.config,
            "ledger": ledger_of(Run(path, "", run.config, [], summary)),
            "evaluation": evaluations(path),
            "alarms": run.steps.alarms if run.steps else {},
            "columns": list(run.steps.columns) if run.steps else [],
        } | run.news()

    def steps(self, request: Request) -> dict[str, Any]:
        run, _ = self._folder(request)
        asked = request.query_params
        names = ["step", *asked["columns"].split(",")] if "columns" in asked else None
        after = int(query.number("after", asked.get("after", "0")))
        if not run.steps:
            return {"step": []}
        return {name: short(column) for name, column in run.steps.table(names, after).items()}

    def timeline(self, request: Request) -> dict[str, Any]:
        run, _ = self._folder(request)
        ends = [query.number(name, text) if (text := request.query_params.get(name)) else None for name in ENDS]
        return timeline(run.steps, *ends) if run.steps else {}

    def now(self, request: Request) -> dict[str, Any]:
        return self._run(request).live.look()

    def samples(self, request: Request) -> dict[str, Any]:
        index = self._index(request.path_params["run"])
        asked = query.Query.of(request.query_params)
        read = index.steps_read  # by now: what is read meanwhile may be lacking in the answer, and is asked for again
        rows = query.matching(index, asked)
        return {
            "total": len(rows),
            "rows": query.page(index, rows, asked),
            "page": query.PAGE,
            "read": read,
            "kept": index.steps_kept,
            "words": {name: sorted(words) for name, words in index.words.items()},
            "further": index.further,
            "unreadable": list(index.unreadable.values())[:5],
        }

    def excerpts(self, request: Request) -> list[dict[str, str] | None]:
        """Of `?of=STEP.PLACE,STEP.PLACE`."""
        _, path = self._folder(request)
        wanted = [key.partition(".") for key in request.query_params.get("of", "").split(",") if key][:MOST_EXCERPTS]
        return one.excerpts(path, [(int(query.number("of", a)), int(query.number("of", b))) for a, _, b in wanted])

    def group(self, request: Request) -> list[dict[str, Any]]:
        _, path = self._folder(request)
        return one.group_of(path, request.path_params["step"], request.path_params["group"])

    def sample(self, request: Request) -> dict[str, Any]:
        run, path = self._folder(request)
        where = request.path_params
        branch = int(query.number("branch", request.query_params.get("branch", "0")))
        discarded = request.query_params.get("discarded", "")
        places = one.places_of(path, where["step"], where["group"], where["index"], branch, discarded)
        return one.whole(path, where["step"], places[0], run.model, self.pieces)

    def compare(self, request: Request) -> dict[str, Any]:
        asked = request.query_params
        offset = int(query.number("offset", asked.get("offset", "0")))
        return shared_prompts(self._index(asked.get("a", "")), self._index(asked.get("b", "")), offset)

    async def search(self, request: Request) -> Response:
        """A line of JSON for each that is found, as it is found."""

        def ask() -> Iterator[dict[str, Any]]:
            return query.search(self._index(request.path_params["run"]), query.Query.of(request.query_params))

        def lines(found: Iterator[dict[str, Any]]) -> Iterator[bytes]:
            for line in found:
                yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)

        try:
            found = await run_in_threadpool(ask)
        except LookupError as error:
            return to_json({"error": str(error.args[0])}, 404)
        except ConfigError as error:
            return to_json({"error": str(error)}, 400)
        return StreamingResponse(lines(found), media_type="application/x-ndjson")

    async def events(self, request: Request) -> Response:
        """News of a run as they come, and what its broker says where `?now=1` asks for it."""
        name, with_now = request.path_params["run"], "now" in request.query_params
        try:
            await run_in_threadpool(self.runs.find, name)
        except (LookupError, ConfigError) as error:
            return to_json({"error": str(error.args[0])}, 404)

        async def news() -> AsyncIterator[dict[str, str]]:
            said: dict[str, bytes] = {}
            while True:
                run = await run_in_threadpool(self.runs.find, name)
                topics = {"news": run.news} | ({"now": run.live.look} if with_now else {})
                for topic, ask in topics.items():
                    data = orjson.dumps(await run_in_threadpool(ask), option=orjson.OPT_NON_STR_KEYS)
                    if data != said.get(topic):
                        said[topic] = data
                        yield {"event": topic, "data": data.decode()}
                await asyncio.sleep(EVENT_S)

        return EventSourceResponse(news())


ENDS = ("from", "to")
"""of a stretch of time, Unix seconds"""

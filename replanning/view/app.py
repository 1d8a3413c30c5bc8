"""The web application: pages about runs, live updates of them, and answers to questions.

Pages are made by the server. A page that is open follows an event stream, which sends the parts
that have changed; a script of a few lines puts them in their places. Without the script, pages and
forms work, and show what is new when they are loaded again.
"""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote

import anyio
import anyio.to_thread
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from replanning.changes import parse_changes
from replanning.engine.again import (
    ComparedRun,
    RecordedDecisions,
    parse_overrides,
    with_overrides,
)
from replanning.engine.engine import ReplanningEngine
from replanning.engine.generator import AlternativeGenerator
from replanning.environment import Clock, SystemClock
from replanning.errors import (
    ChangeRejected,
    NotRunning,
    ReplanningError,
    StaleAnswer,
    UnknownQuestion,
    UnknownRun,
    UnknownTask,
)
from replanning.history.events import ReplanEvent
from replanning.history.history import ReplanHistory
from replanning.journal.records import QuestionVerdict
from replanning.journal.store import InboxMessage, RunInfo, RunStore, open_store, parse_place
from replanning.plan.types import JsonObject, ReplanId, RunId, TaskId
from replanning.run.opening import redactor_for
from replanning.settings import Settings
from replanning.version import __version__
from replanning.view import pages
from replanning.view.reader import RunReader
from replanning.view.security import NameGate, SecurityHeaders, TokenGate

POLL_SECONDS: Final = 0.2
"""Seconds between two looks at the store while a page is open."""

CLOCK_SECONDS: Final = 2.0
"""Seconds after which the times of running tasks are shown anew, although nothing was recorded."""

_PATIENCE: Final = 0.6
"""Seconds that a page waits for a journal to be read, before it is shown without its content."""

_MAX_READERS: Final = 8
"""Runs that are kept in memory: those whose pages were looked at last."""

_MAX_FORM_BYTES: Final = 1_000_000

_VERDICTS: Final[Mapping[str, QuestionVerdict]] = {
    "approve": "approve",
    "reject": "reject",
    "modify": "modify",
}

_HERE: Final = Path(__file__).parent


@dataclass(slots=True)
class _Rendered:
    """The parts of the page of a run, as they were made last, and when the store was looked at."""

    seq: int = -1
    looked: float = 0.0
    at: float = 0.0
    seconds: float = 0.0
    parts: Mapping[str, str] = field(default_factory=dict)


class _Views:
    """What the pages are made from: the runs of a store, each read once.

    Its state are the readers of the runs that were looked at last.

    Args:
        store: the store.
        identify: returns who a request comes from, where the host application knows.
        read_only: whether nobody may answer from the pages.
        secret: what forms carry.
        settings: say what is masked, and where traces are.
        place: of the store, for commands to copy; empty where no command could open it.
    """

    def __init__(
        self,
        store: RunStore,
        identify: Callable[[Request], str] | None,
        *,
        read_only: bool,
        secret: str,
        settings: Settings,
        place: str,
    ) -> None:
        self.store = store
        self.clock = SystemClock()
        self.read_only = read_only
        self.secret = secret
        self._identify = identify
        self._engine = ReplanningEngine([], settings=settings, store=store)
        self._redactor = redactor_for(settings)
        self._place = self._redactor.text(place)
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="replanning-view")
        self._readers: OrderedDict[RunId, Future[RunReader]] = OrderedDict()
        self._rendered: dict[RunId, _Rendered] = {}
        self._infos: tuple[float, list[RunInfo]] = (0.0, [])
        self._templates = Environment(
            loader=PackageLoader("replanning.view"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        self._templates.globals.update(
            version=__version__,
            trace_url=settings.trace_url,
            has_commands=place != "",
            free_providers=pages.FREE_PROVIDERS,
            command_line=self._command_line,
        )

    # Reading

    def infos(self) -> list[RunInfo]:
        """Return the runs of the store, newest first; many open pages cause one look."""
        at, infos = self._infos
        now = time.monotonic()
        if now - at >= POLL_SECONDS / 2:
            infos = list(self.store.runs())
            self._infos = (now, infos)
        return infos

    def info(self, run: str) -> RunInfo:
        """Return a run as the store lists it.

        Raises:
            UnknownRun: the store has no such run.
        """
        for info in self.infos():
            if info.run == run:
                return info
        raise UnknownRun(run, "it is not in this store")

    def reader(self, run: RunId) -> Future[RunReader]:
        """Return the reader of a run, which may still be reading."""
        future = self._readers.get(run)
        # A journal that could not be read may have been repaired since.
        if future is None or (future.done() and future.exception() is not None):
            future = self._pool.submit(RunReader, self.store, run)
            self._readers[run] = future
        self._readers.move_to_end(run)
        while len(self._readers) > _MAX_READERS:
            old, _ = self._readers.popitem(last=False)
            self._rendered.pop(old, None)
        return future

    def parts(self, run: RunId, base: str) -> tuple[int, Mapping[str, str]]:
        """Return the parts of the page of a run, and the number of the record that they are of.

        Args:
            run: the run.
            base: where the host has mounted the application; empty for the root.
        """
        info = self.info(run)
        reader = self.reader(run).result()
        reader.update()
        with reader.lock:
            made = self._rendered.setdefault(run, _Rendered())
            made.looked = time.monotonic()
            now = self.clock.now()
            is_old = now - made.at >= CLOCK_SECONDS and info.status == "running"
            if made.seq != reader.seq or is_old:
                began = time.perf_counter()
                content = pages.run_content(reader, info, now, base)
                made.parts = {}
                for name in pages.RUN_PARTS:
                    made.parts[name] = self.part(name, content, base)
                made.seconds = time.perf_counter() - began
                made.seq = reader.seq
                made.at = now
            return made.seq, made.parts

    def recent_parts(self, run: RunId) -> Mapping[str, str] | None:
        """Return the parts as another open page has just found them; None if it is time to look."""
        made = self._rendered.get(run)
        if made is None or time.monotonic() - made.looked >= POLL_SECONDS / 2:
            return None
        return made.parts

    def seconds_of(self, run: RunId) -> float:
        """Return how long it took to make the parts of the page of a run."""
        made = self._rendered.get(run)
        if made is None:
            return 0.0
        return made.seconds

    # Deciding again

    def what_if(
        self, run: RunId, replan: ReplanId, setting: str, provider: str
    ) -> Mapping[str, Any]:
        """Return what a decision would have been, beside what it was; nothing is executed.

        Args:
            run: the run.
            replan: the replan that was decided.
            setting: a setting to decide with, as KEY=VALUE; empty for those of the run.
            provider: a provider to ask, which costs nothing; empty for the alternatives on record.
        """
        providers = [name for name in pages.FREE_PROVIDERS if name == provider]

        async def decide() -> ComparedRun:
            texts = [setting] if setting else []
            overrides = parse_overrides(texts, "setting")
            generator = AlternativeGenerator(providers, settings=self._engine.settings)
            generator.use_redactor(self._redactor)
            asking = RecordedDecisions(
                generator,
                lambda recorded: with_overrides(recorded, overrides),
                self._redactor,
                self.store,
                self.clock,
                replies_on_record=not providers,
            )
            try:
                return await asking.decide(ReplanHistory.of(self.store, run), replan)
            finally:
                await generator.aclose()

        try:
            return pages.comparison_content(anyio.run(decide))
        except ReplanningError as error:
            return {"problem": str(error)}

    # Making pages

    def part(self, name: str, content: Mapping[str, Any], base: str) -> str:
        """Return one part of a page as HTML."""
        return self._templates.get_template(f"parts/{name}.html").render(
            content,
            csrf=self.secret,
            read_only=self.read_only,
            asks_for_name=self.asks_for_name,
            base=base,
        )

    def page(
        self, name: str, request: Request, content: Mapping[str, Any], status: int = 200
    ) -> HTMLResponse:
        """Return a whole page."""
        html = self._templates.get_template(f"{name}.html").render(
            content,
            base=request.scope["root_path"],
            csrf=self.secret,
            read_only=self.read_only,
        )
        return HTMLResponse(html, status)

    def who(self, request: Request) -> str:
        """Return who a request comes from, where the host application knows."""
        assert self._identify is not None
        return self._identify(request)

    @property
    def asks_for_name(self) -> bool:
        """Whether whoever answers has to give a name."""
        return self._identify is None

    def _command_line(self, words: Sequence[str]) -> str:
        return shlex.join(["replanning", *words, "--store", self._place])

    # Acting

    def answer(self, question: str, form: Mapping[str, str], by: str) -> None:
        """Answer a question as a form says.

        Raises:
            ChangeRejected, NotRunning, StaleAnswer, UnknownQuestion: it was not taken.
        """
        verdict = _VERDICTS.get(form.get("verdict", ""))
        if verdict is None:
            raise HTTPException(400, "a question is approved, rejected or modified")
        choice = form.get("choice", "0")
        if not choice.isdecimal():
            raise HTTPException(400, "`choice` is the number of a candidate")
        changes: Any = ()
        if verdict == "modify":
            try:
                changes = json.loads(form.get("changes", ""))
            except ValueError as error:
                raise HTTPException(422, f"the changes are not JSON: {error}") from None
            changes = parse_changes(changes)
        comment = form.get("comment", "")
        self._engine.answer(
            question,
            verdict,
            by=by,
            choice=int(choice),
            changes=changes,
            comment=comment,
        )

    def pause(self, run: str, reason: str, by: str) -> None:
        """Ask the process that carries out a run to pause it, for a reason that a person gives.

        Raises:
            NotRunning: nobody carries it out.
        """
        info = self.info(run)
        if info.status != "running":
            raise NotRunning(f"run {run!r} is {info.status}; there is nothing to pause")
        # As from any command, a secret must not reach the store.
        reason = self._redactor.text(reason.strip())
        if not reason:
            reason = f"{by or 'somebody'} asked for it in the browser"
        payload: JsonObject = {"reason": reason}
        self.store.post(info.run, InboxMessage("pause", self.clock.now(), by, payload))


def create_app(
    store: RunStore | str | PathLike[str],
    *,
    token: str | None = None,
    auth_header: str | None = None,
    read_only: bool = False,
    identify: Callable[[Request], str] | None = None,
    secret: str | None = None,
    settings: Settings | None = None,
    place: str | None = None,
) -> ASGIApp:
    """Return an ASGI application with the pages, to be served or mounted into another one.

    Whoever can reach it can read the runs and answer their questions: give it a `token`, or mount
    it behind the authentication of the host.

    Args:
        store: the store of the runs, or its place, as the engine takes it.
        token: who has it may come in; None if the host decides.
        auth_header: the header in which a proxy names whoever sends a request; requests without it
            are refused, and the name is that of the journal.
        read_only: show the runs, and let nobody answer or pause.
        identify: returns the name of whoever sends a request, for the journal; without it, people
            give their names when they answer.
        secret: what forms carry so that pages of others cannot send them; the same for all
            processes that serve one address. Made up by default.
        settings: say what is masked in texts that people write, and where traces are shown.
        place: the place of the store for commands that are shown to be copied; by default that of
            `store`, and no commands for a store that is given as an object.

    Raises:
        StoreError: the store cannot be opened.
    """
    if auth_header is not None:
        header = auth_header

        def identify(request: Request) -> str:
            return request.headers[header]

    opened = open_store(store)
    if place is None and not isinstance(store, RunStore):
        place = fspath(store)
    views = _Views(
        opened,
        identify,
        read_only=read_only,
        secret=secret or secrets.token_urlsafe(),
        settings=settings or Settings(),
        place=_place_for_commands(place, opened),
    )
    handlers = _Handlers(views)
    routes = [
        Route("/", handlers.runs),
        Route("/events", handlers.runs_events),
        Route("/runs/{run}", handlers.run),
        Route("/runs/{run}/events", handlers.run_events),
        Route("/runs/{run}/revisions/{number:int}", handlers.revision),
        Route("/runs/{run}/decisions/{name}", handlers.decision),
        Route("/runs/{run}/tasks/{task:path}", handlers.task),
        Route("/runs/{run}/journal", handlers.journal),
        Mount("/static", StaticFiles(directory=_HERE / "static")),
    ]
    if not read_only:
        routes += [
            Route("/runs/{run}/questions/{number:int}", handlers.answer, methods=["POST"]),
            Route("/runs/{run}/questions/{number:int}", handlers.question),
            Route("/runs/{run}/pause", handlers.pause, methods=["POST"]),
        ]
    app: ASGIApp = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: handlers.http_error,
            ReplanningError: handlers.error,
        },
    )
    if token is not None:
        app = TokenGate(app, token)
    if auth_header is not None:
        app = NameGate(app, auth_header)
    return SecurityHeaders(app)


def _place_for_commands(place: str | None, store: RunStore) -> str:
    """Return the place of a store such that commands find it from any folder, if they can."""
    if not place or not store.durable:
        return ""
    name, path = parse_place(place)
    if name == "sqlite":
        return str(Path(path).absolute())
    return place


class _Handlers:
    """Answers to requests."""

    def __init__(self, views: _Views) -> None:
        self._views = views

    # Pages

    async def runs(self, request: Request) -> Response:
        """Return the page with all runs, those that a search and a status leave."""
        content = await _in_thread(self._runs_content, request)
        return self._views.page("runs", request, content)

    def _runs_content(self, request: Request) -> Mapping[str, Any]:
        query = request.query_params
        return pages.runs_content(
            self._views.infos(),
            self._views.clock.now(),
            search=query.get("search", ""),
            status=query.get("status", ""),
        )

    async def run(self, request: Request) -> Response:
        """Return the page of a run; while its journal is being read, without content."""
        info = await self._info(request)
        revision = request.query_params.get("revision", "")
        content: dict[str, Any] = {"info": info, "seq": 0, "parts": {}, "pinned": False}
        if await self._is_read(info.run):
            base = request.scope["root_path"]
            seq, parts = await _in_thread(self._views.parts, info.run, base)
            content.update(seq=seq, parts=dict(parts))
            if revision.isdecimal():
                content["parts"]["plan"] = await self._plan_at(info, int(revision), base)
                content["pinned"] = True
        return self._views.page("run", request, content)

    async def revision(self, request: Request) -> Response:
        """Return the part of a page with the plan at a revision."""
        info = await self._info(request)
        number = request.path_params["number"]
        return HTMLResponse(await self._plan_at(info, number, request.scope["root_path"]))

    async def _plan_at(self, info: RunInfo, number: int, base: str) -> str:
        def make() -> str:
            reader = self._views.reader(info.run).result()
            reader.update()
            with reader.lock:
                if not 0 <= number <= reader.history.revision:
                    raise HTTPException(404, f"the run has no revision {number}")
                now = self._views.clock.now()
                content = pages.plan_at(reader, number, info, now, base)
                return self._views.part("plan", content, base)

        html: str = await _in_thread(make)
        return html

    async def decision(self, request: Request) -> Response:
        """Return the page of a replan, or of an edit by its revision."""
        info = await self._info(request)
        name = request.path_params["name"]

        def make() -> Mapping[str, Any]:
            reader = self._views.reader(info.run).result()
            reader.update()
            with reader.lock:
                entry = reader.decision(name)
                if entry is None:
                    raise HTTPException(404, f"run {info.run} has no decision {name}")
                content = pages.decision_content(reader, entry, info)
            setting = request.query_params.get("setting", "").strip()
            provider = request.query_params.get("provider", "")
            asked: Mapping[str, Any] = {"setting": setting, "provider": provider}
            compared: Mapping[str, Any] = {}
            if isinstance(entry, ReplanEvent) and (setting or provider):
                compared = self._views.what_if(info.run, entry.replan, setting, provider)
            return {**content, "asked": asked, "what_if": compared}

        content = await _in_thread(make)
        return self._views.page("decision", request, content)

    async def task(self, request: Request) -> Response:
        """Return the page of a task."""
        info = await self._info(request)
        task = TaskId(request.path_params["task"])

        def make() -> Mapping[str, Any]:
            reader = self._views.reader(info.run).result()
            reader.update()
            with reader.lock:
                try:
                    return pages.task_content(reader, task, info, self._views.clock.now())
                except UnknownTask as error:
                    raise HTTPException(404, str(error)) from None

        content = await _in_thread(make)
        return self._views.page("task", request, content)

    async def journal(self, request: Request) -> Response:
        """Return a page of the journal, the newest records first."""
        info = await self._info(request)
        before = request.query_params.get("before", "")
        last = info.records
        if before.isdecimal():
            last = int(before) - 1

        def make() -> Mapping[str, Any]:
            return pages.journal_content(self._views.store, info, last)

        content = await _in_thread(make)
        return self._views.page("journal", request, content)

    # Event streams

    async def runs_events(self, request: Request) -> Response:
        """Send the list of runs whenever it changes."""
        views = self._views

        def make() -> Mapping[str, str]:
            content = self._runs_content(request)
            return {"runs": views.part("runs", content, request.scope["root_path"])}

        async def look() -> Mapping[str, str]:
            parts: Mapping[str, str] = await _in_thread(make)
            return parts

        return _stream(_changed_parts(views.clock, look, {}, lambda: 0.0))

    async def run_events(self, request: Request) -> Response:
        """Send the parts of the page of a run that change."""
        info = await self._info(request)
        views = self._views

        async def look() -> Mapping[str, str]:
            # What a run costs does not depend on how many look at it.
            recent = views.recent_parts(info.run)
            if recent is None:
                _, recent = await _in_thread(views.parts, info.run, request.scope["root_path"])
            return recent

        seen = request.query_params.get("seq", "")
        shown: dict[str, str] = {}
        if await self._is_read(info.run):
            seq, parts = await _in_thread(views.parts, info.run, request.scope["root_path"])
            if seen == str(seq):
                shown = dict(parts)

        def seconds() -> float:
            return views.seconds_of(info.run)

        return _stream(_changed_parts(views.clock, look, shown, seconds))

    # Actions

    async def question(self, request: Request) -> Response:
        """Lead to a question on the page of its run: after an answer, this is the address there."""
        run = quote(request.path_params["run"])
        number = request.path_params["number"]
        return RedirectResponse(f"{request.scope['root_path']}/runs/{run}#question-{number}", 303)

    async def answer(self, request: Request) -> Response:
        """Answer a question, and go back to the run."""
        # All buttons of a question are of one form; each says the rest by its address.
        form = {**await self._form(request), **request.query_params}
        run = request.path_params["run"]
        question = f"{run}.q{request.path_params['number']}"
        by = self._author(request, form)
        try:
            await _in_thread(self._views.answer, question, form, by)
        except (StaleAnswer, UnknownQuestion, NotRunning) as error:
            return self._refusal(request, 409, "The answer was not taken", str(error))
        except ChangeRejected as error:
            return self._refusal(request, 422, "These changes were not taken", str(error))
        return self._back_to(request, run, by)

    async def pause(self, request: Request) -> Response:
        """Ask for a run to be paused, and go back to it."""
        form = await self._form(request)
        run = request.path_params["run"]
        by = self._author(request, form)
        await _in_thread(self._views.pause, run, form.get("reason", ""), by)
        return self._back_to(request, run, by)

    async def _form(self, request: Request) -> Mapping[str, str]:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_FORM_BYTES:
                raise HTTPException(413, "the form is too large")
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        form: dict[str, str] = {}
        for name, values in fields.items():
            form[name] = values[-1]
        if not secrets.compare_digest(form.get("csrf", "").encode(), self._views.secret.encode()):
            raise HTTPException(
                403, "the form is not from a page of this server; load the page again"
            )
        return form

    def _author(self, request: Request, form: Mapping[str, str]) -> str:
        if self._views.asks_for_name:
            by = form.get("by", "").strip()
            if not by:
                raise HTTPException(422, "give your name: the journal records who has answered")
            return by
        return self._views.who(request)

    def _back_to(self, request: Request, run: str, by: str) -> Response:
        response = RedirectResponse(f"{request.scope['root_path']}/runs/{quote(run)}", 303)
        if self._views.asks_for_name:
            response.set_cookie("replanning-name", quote(by), samesite="strict")
        return response

    # Errors

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Return the page of an error that a request has caused."""
        assert isinstance(error, HTTPException)
        return self._refusal(request, error.status_code, "This did not work", error.detail)

    async def error(self, request: Request, error: Exception) -> Response:
        """Return the page of an error of the store or of a run."""
        status = 500
        if isinstance(error, UnknownRun):
            status = 404
            request.path_params.pop("run", None)  # nothing to go back to
        elif isinstance(error, NotRunning):
            status = 409
        return self._refusal(request, status, "This did not work", str(error))

    def _refusal(self, request: Request, status: int, title: str, text: str) -> Response:
        content = {"title": title, "text": text, "run": request.path_params.get("run", "")}
        return self._views.page("error", request, content, status)

    # Common

    async def _info(self, request: Request) -> RunInfo:
        info: RunInfo = await _in_thread(self._views.info, request.path_params["run"])
        return info

    async def _is_read(self, run: RunId) -> bool:
        """Wait a moment for a journal to be read, and return whether it is.

        Raises:
            JournalCorrupt: it cannot be read.
        """
        future = self._views.reader(run)
        try:
            await _in_thread(future.result, _PATIENCE)
        except TimeoutError:
            return False
        return True


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await anyio.to_thread.run_sync(function, *args)


async def _changed_parts(
    clock: Clock,
    look: Callable[[], Awaitable[Mapping[str, str]]],
    shown: dict[str, str],
    seconds: Callable[[], float],
) -> AsyncIterator[str]:
    """Yield an event for each part that is another than the page shows.

    Args:
        clock: paces the looks.
        look: returns the parts as they are now.
        shown: the parts that the page shows, which is kept up to date.
        seconds: returns how long it takes to make them.
    """
    yield "retry: 2000\n\n"
    silent = 0.0
    while True:
        try:
            parts = await look()
        except ReplanningError as error:
            yield _event("problem", {"text": str(error)})
            return
        changed: dict[str, str] = {}
        for name, html in parts.items():
            if shown.get(name) != html:
                changed[name] = html
        if changed:
            shown.update(changed)
            yield _event("parts", changed)
            silent = 0.0
        # A large page takes long to make: no more than a quarter of the time goes into it.
        pause = max(POLL_SECONDS, 3 * seconds())
        await clock.sleep(pause)
        silent += pause
        if silent >= 15:
            # A browser that is gone is noticed by what cannot be sent to it.
            yield ": nothing new\n\n"
            silent = 0.0


def _event(name: str, data: Mapping[str, str]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )

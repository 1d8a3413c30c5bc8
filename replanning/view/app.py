"""The web application: pages about runs with live updates, and answers to questions.

The server renders the pages. An open page follows an event stream of changed parts, which a short
script puts into the page. Without the script, pages and forms work, and show changes when they are
reloaded.
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
from pydantic_core import from_json
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
from replanning.plan.messages import pluralise
from replanning.plan.types import JsonObject, ReplanId, RunId, TaskId
from replanning.run.opening import redactor_for
from replanning.settings import Settings
from replanning.version import __version__
from replanning.view import pages
from replanning.view.reader import RunReader
from replanning.view.security import NameGate, SecurityHeaders, TokenGate

POLL_SECONDS: Final = 0.2
"""Seconds between reads of the store while a page is open."""

CLOCK_SECONDS: Final = 2.0
"""Seconds between updates of the times of running tasks without a new record."""

_PATIENCE: Final = 0.6
"""Seconds that a page waits for its journal to be read before it is shown without content."""

_MAX_READERS: Final = 8
"""Maximum number of runs in memory: the most recently viewed ones."""

_MAX_FORM_BYTES: Final = 1_000_000

_VERDICTS: Final[Mapping[str, QuestionVerdict]] = {
    "approve": "approve",
    "reject": "reject",
    "modify": "modify",
}

_HERE: Final = Path(__file__).parent


@dataclass(slots=True)
class _Rendered:
    """The parts of the page of a run as last rendered, and the time when the store was read."""

    seq: int = -1
    looked: float = 0.0
    at: float = 0.0
    seconds: float = 0.0
    parts: Mapping[str, str] = field(default_factory=dict)


class _Views:
    """Renders pages about the runs of a store, and sends people's answers to the runs.

    Its state is the readers and rendered parts of the most recently viewed runs.

    Args:
        store: the store.
        identify: returns the author of a request, if the host application knows.
        read_only: whether nobody may answer on the pages.
        secret: the secret that forms must carry.
        settings: rules for masking, and the address of traces.
        place: of the store, for commands to copy; empty if no command can open it.
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
        self._templates.filters["counted"] = pluralise

    # Reading

    def infos(self) -> list[RunInfo]:
        """Return the runs of the store, newest first; open pages share a read of the store."""
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
        """Return the parts of the page of a run, and the number of their last record.

        Args:
            run: the run.
            base: the path where the host has mounted the application; empty for the root.
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
        """Return the parts that another open page has just read; None if they may be old."""
        made = self._rendered.get(run)
        if made is None or time.monotonic() - made.looked >= POLL_SECONDS / 2:
            return None
        return made.parts

    def seconds_of(self, run: RunId) -> float:
        """Return the seconds that rendering the page of a run took last."""
        made = self._rendered.get(run)
        if made is None:
            return 0.0
        return made.seconds

    # Deciding again

    def what_if(
        self, run: RunId, replan: ReplanId, setting: str, provider: str
    ) -> Mapping[str, Any]:
        """Make a decision again, and return it beside the recorded one; nothing is executed.

        Args:
            run: the run.
            replan: the replan that was decided.
            setting: a setting to decide with, as KEY=VALUE; empty for those of the run.
            provider: a free provider to ask; empty for the recorded alternatives.
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

    # Rendering

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
        """Return the author of a request, from the host application."""
        assert self._identify is not None
        return self._identify(request)

    @property
    def asks_for_name(self) -> bool:
        """Whether people must give their name with an answer."""
        return self._identify is None

    def _command_line(self, words: Sequence[str]) -> str:
        return shlex.join(["replanning", *words, "--store", self._place])

    # Acting

    def answer(self, question: str, form: Mapping[str, str], by: str) -> None:
        """Answer a question with the fields of a form.

        Raises:
            ChangeRejected, NotRunning, StaleAnswer, UnknownQuestion: the answer was refused.
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
                changes = from_json(form.get("changes", ""))
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
        """Ask the process that executes a run to pause it, with a person's reason.

        Raises:
            NotRunning: no process executes it.
        """
        info = self.info(run)
        if info.status != "running":
            raise NotRunning(f"run {run!r} is {info.status}; there is nothing to pause")
        # As with commands, no secret may reach the store.
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
    """Return an ASGI application with the pages, to serve or to mount into another application.

    Anybody who can reach it can read the runs and answer their questions: give it a `token`, or
    mount it behind the authentication of the host.

    Args:
        store: the store of the runs, or its place, as the engine takes it.
        token: the access token; None if the host controls access.
        auth_header: header that a proxy sets to the name of the person, for the journal; requests
            without it are refused.
        read_only: show the runs, but let nobody answer or pause.
        identify: returns the name of the person behind a request, for the journal; without it,
            people give their names when they answer.
        secret: value in forms that keeps other sites from sending them; equal for all processes
            that serve one address. Random by default.
        settings: rules for masking texts of people, and the address of traces.
        place: place of the store in the commands that pages show; by default that of `store`. For
            a store object there is no default, and no commands are shown.

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
    """Return the place of a store for commands in any folder; empty if they cannot open it."""
    if not place or not store.durable:
        return ""
    name, path = parse_place(place)
    if name == "sqlite":
        return str(Path(path).absolute())
    return place


class _Handlers:
    """Request handlers of the application."""

    def __init__(self, views: _Views) -> None:
        self._views = views

    # Pages

    async def runs(self, request: Request) -> Response:
        """Return the page with the runs that match a search and a status."""
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
        """Return the page of a run, without content while its journal is being read."""
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
        """Return the plan at a revision, as a part of a page."""
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
        """Return a page of the journal, newest records first."""
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
            # The cost of a run does not depend on the number of its viewers.
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
        """Redirect to a question on the page of its run: a refused answer leaves this address."""
        run = quote(request.path_params["run"])
        number = request.path_params["number"]
        return RedirectResponse(f"{request.scope['root_path']}/runs/{run}#question-{number}", 303)

    async def answer(self, request: Request) -> Response:
        """Answer a question, and redirect to the run."""
        # All buttons of a question share a form; the address of each adds further fields.
        form = {**await self._form(request), **request.query_params}
        run = request.path_params["run"]
        question = f"{run}.q{request.path_params['number']}"
        by = self._author(request, form)
        try:
            await _in_thread(self._views.answer, question, form, by)
        except (StaleAnswer, UnknownQuestion, NotRunning) as error:
            return self._refusal(request, 409, "The answer was refused", str(error))
        except ChangeRejected as error:
            return self._refusal(request, 422, "These changes were refused", str(error))
        return self._back_to(request, run, by)

    async def pause(self, request: Request) -> Response:
        """Ask for a run to be paused, and redirect to it."""
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
            raise HTTPException(403, "the form is not from a page of this server; reload the page")
        return form

    def _author(self, request: Request, form: Mapping[str, str]) -> str:
        if self._views.asks_for_name:
            by = form.get("by", "").strip()
            if not by:
                raise HTTPException(
                    422, "give your name: the journal records the author of an answer"
                )
            return by
        return self._views.who(request)

    def _back_to(self, request: Request, run: str, by: str) -> Response:
        response = RedirectResponse(f"{request.scope['root_path']}/runs/{quote(run)}", 303)
        if self._views.asks_for_name:
            response.set_cookie("replanning-name", quote(by), samesite="strict")
        return response

    # Errors

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Return the page of an error in a request."""
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
        """Wait briefly for a journal to be read, and return whether it was.

        Raises:
            JournalCorrupt: the journal cannot be read.
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
    """Yield events with the parts that differ from those on the page.

    Args:
        clock: paces the reads.
        look: returns the current parts.
        shown: the parts on the page; every event updates it.
        seconds: returns the time that rendering the parts takes, in seconds.
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
        # A large page takes long to render: it gets a quarter of the time at most.
        pause = max(POLL_SECONDS, 3 * seconds())
        await clock.sleep(pause)
        silent += pause
        if silent >= 15:
            # Only a failed send shows that the browser is gone.
            yield ": nothing new\n\n"
            silent = 0.0


def _event(name: str, data: Mapping[str, str]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )

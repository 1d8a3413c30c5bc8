"""The pages about runs: what they show, who may see them, and what becomes of answers."""

import re
from collections.abc import AsyncIterator, Sequence
from html import unescape
from pathlib import Path

import httpx
import pytest

from replanning import (
    Alternative,
    Environment,
    Plan,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
)
from replanning.history import ReplanHistory
from replanning.journal import MemoryStore, Usage
from replanning.testing import VirtualClock
from replanning.tools import ToolExecutor
from tests.support.tracing import Spans
from tests.view.runs import ASKING, HOSTILE, PLAN, asking_run, repaired_run, work

pytest.importorskip("starlette", reason="the extra `view` is not installed")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import ASGIApp

from replanning.view import create_app

ADDRESS = "http://runs.test"
SECRET = "from a page of this server"


def browser(app: ASGIApp, **options: str) -> httpx.AsyncClient:
    """A browser that looks at the pages of an application."""
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url=ADDRESS, headers=options)


@pytest.fixture
async def store() -> MemoryStore:
    """A store with a run that was repaired, and one that waits for a person."""
    store = MemoryStore()
    await repaired_run(store)
    await asking_run(store)
    return store


@pytest.fixture
async def pages(store: MemoryStore) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that may come in."""
    async with browser(create_app(store, secret=SECRET)) as client:
        yield client


def text_of(page: httpx.Response) -> str:
    """The text of a page that was found, without its tags."""
    assert page.status_code == 200, page.text
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page.text)).split())


async def test_list_of_runs(pages: httpx.AsyncClient) -> None:
    """The first page lists the runs with their status, and a search leaves those that match."""
    everything = text_of(await pages.get("/"))
    assert f"repaired Read a page {HOSTILE} succeeded" in everything
    assert f"asking Read a page {HOSTILE} needs human" in everything
    found = await pages.get("/", params={"search": "REPAIRED page"})
    assert "/runs/repaired" in found.text
    assert "/runs/asking" not in found.text
    by_status = await pages.get("/", params={"status": "needs_human"})
    assert "/runs/asking" in by_status.text
    assert "/runs/repaired" not in by_status.text
    assert "No run matches" in text_of(await pages.get("/", params={"search": "nothing"}))


async def test_empty_store() -> None:
    """A store without runs says that there are none yet."""
    async with browser(create_app(MemoryStore())) as client:
        assert "no runs yet" in text_of(await client.get("/"))


async def test_page_of_a_run(pages: httpx.AsyncClient) -> None:
    """The page of a run draws its plan, lists its tasks, and tells why the plan changed."""
    page = await pages.get("/runs/repaired")
    text = text_of(page)
    assert "2 of 2 tasks done" in text
    assert "⟳ replaced scan" in text
    assert "✓ done photograph" in text
    assert "replan 1 → revision 1 success" in text
    assert "do 'read' with 'photograph'" in text
    assert '<svg class="plan"' in page.text
    assert '<svg class="timeline"' in page.text


async def test_revisions(pages: httpx.AsyncClient) -> None:
    """An earlier revision shows the plan as it was then, and a later one what it has changed."""
    before = text_of(await pages.get("/runs/repaired/revisions/0"))
    assert "Plan at revision 0 of 1" in before
    assert "read~2" not in before
    after = text_of(await pages.get("/runs/repaired/revisions/1"))
    assert "+ read~2" in after
    whole = text_of(await pages.get("/runs/repaired?revision=0"))
    assert "Plan at revision 0 of 1" in whole
    assert (await pages.get("/runs/repaired/revisions/2")).status_code == 404


async def test_decision(pages: httpx.AsyncClient) -> None:
    """The page of a decision has its cause, candidates with the parts of their scores, rule and diff."""
    page = await pages.get("/runs/repaired/decisions/replan-1")
    text = text_of(page)
    assert "the scanner is broken" in text
    assert "do 'read' with 'photograph', of the same capability 'read' by repair applied" in text
    assert "Rule confident" in text
    for part in ("confidence", "self-assessment", "past success", "availability", "simplicity"):
        assert part in text
    assert page.text.count("<meter") >= 5
    assert "+ read~2" in text
    assert text == text_of(await pages.get("/runs/repaired/decisions/1"))
    assert (await pages.get("/runs/repaired/decisions/7")).status_code == 404


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("setting=alternatives.human_approval_threshold%3D0.99", "Different: decision, rule"),
        ("provider=repair", "No difference"),
        ("setting=alternatives.max_count%3D0", "alternatives.max_count"),
        ("setting=nonsense", "expected KEY=VALUE, got 'nonsense'"),
        ("setting=cooldown.x%3D1", "cooldown"),
    ],
)
async def test_what_if(pages: httpx.AsyncClient, query: str, shown: str) -> None:
    """A decision is made again with another setting or provider, and mistakes are named."""
    page = await pages.get(f"/runs/repaired/decisions/replan-1?{query}")
    assert page.status_code == 200
    assert shown in text_of(page)


async def test_task(pages: httpx.AsyncClient) -> None:
    """The page of a task has its attempts with errors, tracebacks and outputs."""
    failed = text_of(await pages.get("/runs/repaired/tasks/read"))
    assert "Attempt 1: failed" in failed
    assert "Traceback" in failed
    assert "Replaced by read~2" in failed
    done = text_of(await pages.get("/runs/repaired/tasks/read~2"))
    assert "Attempt 1: done" in done
    assert "Replaces read" in done
    assert f'"text": "{HOSTILE}"' in done
    assert (await pages.get("/runs/repaired/tasks/nothing")).status_code == 404


async def test_journal(pages: httpx.AsyncClient) -> None:
    """The journal lists its records, the newest first, and goes on from any number."""
    text = text_of(await pages.get("/runs/repaired/journal"))
    assert text.index("run-ended") < text.index("revised") < text.index("run-opened")
    first = text_of(await pages.get("/runs/repaired/journal?before=2"))
    assert "run-opened" in first
    assert "run-ended" not in first


async def test_hostile_texts(pages: httpx.AsyncClient) -> None:
    """Texts of plans, tools and people are never markup."""
    paths = ["/", "/runs/repaired", "/runs/repaired/decisions/1", "/runs/repaired/tasks/read"]
    paths += ["/runs/repaired/tasks/words", "/runs/repaired/journal", "/runs/asking"]
    paths += ["/runs/<b>alert(1)", f"/?search={HOSTILE}"]
    for path in paths:
        page = await pages.get(path)
        assert HOSTILE not in page.text, path
        assert "<b>" not in page.text, path
        assert "alert(1)" in page.text, path


async def test_headers(pages: httpx.AsyncClient) -> None:
    """Every response allows scripts and styles of this server alone, and no frame around it."""
    for path in ("/", "/runs/repaired", "/runs/nothing", "/static/view.js"):
        headers = (await pages.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
    page = (await pages.get("/runs/repaired")).text
    assert not re.search(r"<style|style=|onclick=|<script(?! src=)", page)


async def test_token(store: MemoryStore) -> None:
    """Nobody comes in without the token, which the address carries once, and a cookie from then on."""
    async with browser(create_app(store, token="let-me-in")) as client:
        for path in ("/", "/runs/repaired", "/static/view.js", "/?token=wrong"):
            refused = await client.get(path)
            assert refused.status_code == 401
            assert "repaired" not in refused.text
        moved = await client.get("/runs/repaired?token=let-me-in&revision=0")
        assert moved.status_code == 303
        assert moved.headers["location"] == "/runs/repaired?revision=0"
        cookie = moved.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert (await client.get("/runs/repaired")).status_code == 200
    headers = {"authorization": "Bearer let-me-in"}
    async with browser(create_app(store, token="let-me-in"), **headers) as client:
        assert (await client.get("/")).status_code == 200


async def test_tokens_of_two_servers(store: MemoryStore) -> None:
    """Who has come in at one port of an address and then at another still has both."""
    jar = httpx.Cookies()
    for name in ("first", "second", "first", "second"):
        app = create_app(store, token=name)
        port = {"first": 8001, "second": 8002}[name]
        transport = httpx.ASGITransport(app=app)
        address = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(transport=transport, base_url=address, cookies=jar) as client:
            if len(jar) < 2:
                await client.get("/", params={"token": name})
            assert (await client.get("/")).status_code == 200
            jar = client.cookies


async def test_proxy_names_people(store: MemoryStore) -> None:
    """Behind a proxy, nobody comes in without a name, and answers have the name that it gives."""
    app = create_app(store, auth_header="X-Forwarded-User", secret=SECRET)
    async with browser(app) as client:
        assert (await client.get("/runs/asking")).status_code == 401
    async with browser(app, **{"x-forwarded-user": "Grace"}) as client:
        assert "Your name" not in text_of(await client.get("/runs/asking"))
        await client.post("/runs/asking/questions/1", data=answer("approve", by="somebody else"))
    (message,) = store.inbox("asking")  # type: ignore[arg-type]
    assert message.by == "Grace"


def answer(verdict: str, **fields: str) -> dict[str, str]:
    """The form with which somebody answers a question."""
    return {"csrf": SECRET, "by": "Ada", "choice": "0", "comment": "", "verdict": verdict, **fields}


async def test_question(pages: httpx.AsyncClient) -> None:
    """A run that waits shows its question, with each candidate's scores, diff and a button."""
    page = await pages.get("/runs/asking")
    text = text_of(page)
    assert "1 question waits for an answer" in text
    assert "do 'read' with 'photograph'" in text
    assert "+ read~2" in text
    assert 'value="approve"' in page.text


async def test_buttons_of_a_question(pages: httpx.AsyncClient) -> None:
    """A question has one form, whose buttons each say what they mean for the tasks."""
    page = await pages.get("/runs/asking")
    text = text_of(page)
    assert page.text.count('name="by"') == 1
    assert page.text.count('name="comment"') == 1
    assert "Your name (required)" in text
    assert "replace read by read~2 (photograph)" in text
    assert "Reject: keep the plan 'read' stays failed; 'words' cannot run." in text


async def test_which_candidate(store: MemoryStore, pages: httpx.AsyncClient) -> None:
    """The button of a candidate approves that one, and no other."""
    page = await pages.get("/runs/asking")
    (button,) = re.findall(r'value="approve" formaction="([^"]+)"', page.text)
    fields = {name: value for name, value in answer("approve").items() if name != "choice"}
    assert (await pages.post(unescape(button), data=fields)).status_code == 303
    (message,) = store.inbox("asking")  # type: ignore[arg-type]
    assert message.payload["choice"] == 0
    missing = button.replace("choice=0", "choice=7")
    assert (await pages.post(unescape(missing), data=fields)).status_code in (409, 422)


async def test_links_to_a_question(pages: httpx.AsyncClient) -> None:
    """Tasks and decisions that wait for an answer lead to the question, also by its own address."""
    run = await pages.get("/runs/asking")
    assert 'id="question-1"' in run.text
    link = 'href="/runs/asking#question-1"'
    assert link in run.text
    assert link in (await pages.get("/runs/asking/tasks/read")).text
    decision = await pages.get("/runs/asking/decisions/replan-1")
    assert link in decision.text
    text = text_of(decision)
    assert "Nothing has changed yet: the decision waits for the answer to question 1 ." in text
    assert "The plan was kept as it was" not in text
    moved = await pages.get("/runs/asking/questions/1")
    assert moved.status_code == 303
    assert moved.headers["location"] == "/runs/asking#question-1"


async def test_way_back_from_an_error(pages: httpx.AsyncClient) -> None:
    """The page of something that a run does not have leads back to the run."""
    missing = await pages.get("/runs/repaired/tasks/nothing")
    assert 'href="/runs/repaired"' in missing.text
    assert 'href="/runs/nothing"' not in (await pages.get("/runs/nothing")).text


async def test_spent() -> None:
    """Each thing that was spent is told once, and the time in a field of its own."""

    class Paid:
        name = "paid"

        async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
            request.charge(Usage(calls=1, tokens=2295, money=0.008337))
            return ()

    store = MemoryStore()
    await ReplanningEngine([Paid(), "repair"], store=store).execute(PLAN, work, run_id="paid")
    async with browser(create_app(store)) as client:
        run = text_of(await client.get("/runs/paid"))
        decision = text_of(await client.get("/runs/paid/decisions/1"))
    assert "Spent 1 call, 2295 tokens, 0.008337 money Time" in run
    assert "1 call, 2295 tokens, 0.008337 money" in decision


async def test_time_in_which_a_person_was_waited_for() -> None:
    """A wait takes the same room in the drawing however long it was; an open one has no end yet."""
    store = MemoryStore()
    clock = VirtualClock()

    async def slow_work(task: Task, context: object) -> object:
        clock.advance(2)
        return await work(task, context)

    async def carry_out() -> None:
        engine = ReplanningEngine(
            ["repair"], store=store, settings=ASKING, environment=Environment(clock=clock)
        )
        await engine.execute(PLAN, slow_work, run_id="slow")

    await carry_out()
    async with browser(create_app(store, secret=SECRET)) as client:
        page = (await client.get("/runs/slow")).text
        assert ">waits for a person</text>" in page
        assert ">2 s</text>" in page
        await client.post("/runs/slow/questions/1", data=answer("approve"))
        clock.advance(220)
        await carry_out()
        page = (await client.get("/runs/slow")).text
    assert ">waited 3 min 40 s</text>" in page
    drawing = page[page.index('class="timeline"') :]
    widths = re.findall(r'class="bar [a-z]+" x="[0-9.]+" y="[0-9]+" width="([0-9.]+)"', drawing)
    # Three attempts share what the wait leaves.
    assert widths == ["190.0", "190.0", "190.0"]


async def test_records_of_the_journal(pages: httpx.AsyncClient) -> None:
    """A record has its time in milliseconds, and its text is cut between words."""
    page = await pages.get("/runs/repaired/journal")
    assert re.search(r"[0-9]:[0-9]{2}\.[0-9]{3} UTC", page.text)
    assert not re.search(r"[^ ]…</code>", page.text)


async def test_approve(store: MemoryStore, pages: httpx.AsyncClient) -> None:
    """An approval is carried out by the run, with the name of whoever gave it; a second one is refused."""
    sent = await pages.post("/runs/asking/questions/1", data=answer("approve", comment="go on"))
    assert (sent.status_code, sent.headers["location"]) == (303, "/runs/asking")
    again = await pages.post("/runs/asking/questions/1", data=answer("reject"))
    assert again.status_code == 409
    assert "answer" in again.text
    result = await asking_run(store)
    assert result.status == "succeeded"
    (event,) = ReplanHistory.of(store, "asking").events
    assert event.question is not None
    assert (event.question.verdict, event.question.by) == ("approve", "Ada")
    late = await pages.post("/runs/asking/questions/1", data=answer("approve"))
    assert late.status_code == 409


async def test_reject(store: MemoryStore, pages: httpx.AsyncClient) -> None:
    """A rejection keeps the plan as it is."""
    await pages.post("/runs/asking/questions/1", data=answer("reject"))
    result = await asking_run(store)
    assert result.status == "failed"
    assert ReplanHistory.of(store, "asking").revision == 0


async def test_a_call_in_doubt() -> None:
    """A question about a call in doubt has a button to go on without it, since it took effect."""

    async def pay(task: Task, context: object) -> None:
        raise TimeoutError("no answer")

    store = MemoryStore()
    plan = Plan.parse("""
        goal: {objective: Pay}
        tools: [{name: pay}]
        tasks: [{id: pay, tool: pay}]
    """)
    engine = ReplanningEngine([], store=store)
    await engine.execute(plan, pay, run_id="paid")
    async with browser(create_app(store, secret=SECRET)) as client:
        page = await client.get("/runs/paid")
        assert "It took effect: continue without it" in text_of(page)
        form = re.search(r'formaction="([^"]+changes=[^"]+)"', page.text)
        assert form is not None
        fields = answer("modify", changes="what was not sent")
        sent = await client.post(unescape(form.group(1)), data=fields)
    assert sent.status_code == 303
    result = await engine.execute(plan, pay, run_id="paid")
    assert result.status == "succeeded"
    assert [effect.in_doubt for effect in engine.history("paid").effects()] == [False]


async def test_modify(store: MemoryStore, pages: httpx.AsyncClient) -> None:
    """Changes of one's own are applied; changes that are wrong are refused with every reason."""
    wrong = '[{"kind": "skip", "task_id": "nothing"}, {"kind": "jump"}]'
    endless = "[" * 100_000
    for changes in ("no JSON", endless, wrong, '[{"kind": "skip", "task_id": "nothing"}]'):
        sent = await pages.post("/runs/asking/questions/1", data=answer("modify", changes=changes))
        assert sent.status_code == 422, sent.text
    changes = '[{"kind": "skip", "task_id": "read"}]'
    sent = await pages.post("/runs/asking/questions/1", data=answer("modify", changes=changes))
    assert sent.status_code == 303
    assert (await asking_run(store)).status == "succeeded"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"csrf": ""}, 403),
        ({"csrf": "of another page"}, 403),
        ({"by": " "}, 422),
        ({"verdict": "perhaps"}, 400),
        ({"choice": "first"}, 400),
        ({"choice": "7"}, 422),
    ],
)
async def test_refused_forms(
    store: MemoryStore, pages: httpx.AsyncClient, fields: dict[str, str], status: int
) -> None:
    """A form from elsewhere, or one that lacks something, changes nothing."""
    sent = await pages.post("/runs/asking/questions/1", data={**answer("approve"), **fields})
    assert sent.status_code == status
    assert not store.inbox("asking")  # type: ignore[arg-type]


async def test_read_only(store: MemoryStore) -> None:
    """Pages for reading have no buttons, and take no answers."""
    async with browser(create_app(store, read_only=True, secret=SECRET)) as client:
        page = await client.get("/runs/asking")
        assert "<button" not in page.text.replace("<button>Show</button>", "")
        sent = await client.post("/runs/asking/questions/1", data=answer("approve"))
        assert sent.status_code == 404
        assert not store.inbox("asking")  # type: ignore[arg-type]


async def test_pause_of_a_run_that_is_over(pages: httpx.AsyncClient) -> None:
    """Nothing is paused that nobody carries out."""
    sent = await pages.post("/runs/repaired/pause", data=answer(""))
    assert sent.status_code == 409
    assert "nothing to pause" in sent.text


async def test_pause(tmp_path: Path) -> None:
    """A run is paused for the reason that somebody types, without the secrets in it."""
    store = MemoryStore()
    engine = ReplanningEngine(store=store)
    settings = Settings.model_validate({"redaction": {"patterns": ["card-[0-9]+"]}})
    async with (
        engine.open(PLAN, run_id="running") as run,
        browser(create_app(store, secret=SECRET, settings=settings)) as client,
    ):
        assert 'name="reason"' in (await client.get("/runs/running")).text
        for reason in ("card-42 and sk-abcdefghijklmnopqrstuvwx are blocked", " "):
            form = {"csrf": SECRET, "by": "Ada", "reason": reason}
            assert (await client.post("/runs/running/pause", data=form)).status_code == 303
        first, second = store.inbox(run.id)
    assert first.kind == "pause"
    assert first.by == "Ada"
    assert first.payload["reason"] == "[redacted] and [redacted] are blocked"
    assert second.payload["reason"] == "Ada asked for it in the browser"


def commands(page: httpx.Response) -> list[str]:
    """The commands that a page has to be copied."""
    return [unescape(found) for found in re.findall(r'data-copy="([^"]+)"', page.text)]


async def test_commands(tmp_path: Path) -> None:
    """What needs the tools is a command to copy, beside what it is about, that finds the store from any folder."""
    plan = Plan.parse("""
    goal: {objective: try it}
    tools:
      - {name: fail, kind: shell, command: "exit 1", effect: reversible}
      - {name: good, kind: shell, command: "echo fine"}
    tasks:
      - {id: first, tool: good}
      - {id: it breaks, tool: fail, depends_on: [first]}
    """)
    place = tmp_path / "runs.db"
    engine = ReplanningEngine([], store=place)
    async with ToolExecutor(plan) as execute:
        await engine.execute(plan, execute, run_id="failed")
    on_store = f"--store {place}"
    async with browser(create_app(place)) as client:
        of_run = commands(await client.get("/runs/failed"))
        of_task = commands(await client.get("/runs/failed/tasks/it%20breaks"))
    assert of_run == [
        f"replanning resume failed --retry {on_store}",
        f"replanning undo failed {on_store}",
    ]
    assert of_task[0] == f"replanning rerun failed 'it breaks' {on_store}"


async def test_no_commands(pages: httpx.AsyncClient) -> None:
    """Only its program can go on with a run of functions, and no command opens a store in memory."""
    for path in ("/runs/asking", "/runs/repaired", "/runs/repaired/tasks/read"):
        assert commands(await pages.get(path)) == []
    text = text_of(await pages.get("/runs/asking"))
    assert "the program that started this run must resume it, with run_id=asking" in text
    assert "Nothing runs before that." in text


async def test_trace(store: MemoryStore) -> None:
    """A run that was traced, and its decisions, link to the trace where the settings say where it is shown."""
    spans = Spans()
    await repaired_run(store, "traced", tracer_provider=spans.provider)
    (trace,) = spans.traces
    settings = Settings(trace_url="http://traces.test/{trace_id}?view")
    async with browser(create_app(store, settings=settings)) as client:
        for path in ("/runs/traced", "/runs/traced/decisions/1"):
            assert f'href="http://traces.test/{trace:032x}?view"' in (await client.get(path)).text
        assert "traces.test" not in (await client.get("/runs/repaired")).text
    async with browser(create_app(store)) as client:
        assert f"{trace:032x}" not in (await client.get("/runs/traced")).text


async def test_within_another_application(store: MemoryStore) -> None:
    """Mounted into an application, links lead there, and it says who answers."""

    def identify(request: Request) -> str:
        return request.headers["x-user"]

    runs = create_app(store, identify=identify, secret=SECRET)
    host = Starlette(routes=[Mount("/runs-of-ours", runs)])
    async with browser(host, **{"x-user": "Grace"}) as client:
        page = await client.get("/runs-of-ours/runs/asking")
        links = re.findall(r'(?:href|src|action|data-events)="(/[^"]*)"', page.text)
        assert len(links) > 5
        for link in links:
            assert link.startswith("/runs-of-ours/")
        fields = {name: value for name, value in answer("approve").items() if name != "by"}
        sent = await client.post("/runs-of-ours/runs/asking/questions/1", data=fields)
        assert sent.headers["location"] == "/runs-of-ours/runs/asking"
    (message,) = store.inbox("asking")  # type: ignore[arg-type]
    assert message.by == "Grace"


async def test_page_follows_the_journal(tmp_path: Path) -> None:
    """A page that was looked at before shows what another process has recorded since."""
    place = tmp_path / "runs.db"
    await asking_run(place)
    async with browser(create_app(place, secret=SECRET)) as client:
        assert "1 question waits" in text_of(await client.get("/runs/asking"))
        await client.post("/runs/asking/questions/1", data=answer("approve"))
        await asking_run(place)
        text = text_of(await client.get("/runs/asking"))
        assert "question waits" not in text
        assert "2 of 2 tasks done" in text

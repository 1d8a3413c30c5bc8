"""Language models fail in every way, by the thousands of calls: no run is lost, late, over its budget, or leaks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from random import Random
from typing import Any

import anyio
import httpx
import pytest

from replanning import Answer, Plan, Question, ReplanningEngine, Settings
from replanning.environment import Clock, move_on_after
from replanning.errors import LLMError
from replanning.journal import (
    AlternativesConsidered,
    ErrorContained,
    PlanRevised,
    QuestionAnswered,
    Record,
    TriggerFired,
)
from replanning.llm import (
    Completion,
    LLMOptions,
    LLMProvider,
    Price,
    PriceTable,
    create_llm_provider,
)
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.plugins import load_plugin
from replanning.providers.llm import ProposalReply
from replanning.testing import (
    FaultSchedule,
    ScriptedExecutor,
    ScriptedGate,
    ScriptStep,
    VirtualClock,
    hangs,
    returns,
    virtual_environment,
)
from tests.support.invariants import invariant_violations
from tests.support.llm_server import (
    ROUTES,
    LLMRequest,
    LLMServerReply,
    ScriptedLLMServer,
    ServerReply,
    response_body,
)

# On trio, httpx's own generators complain where an answer is not read to its end; endless ones must not be.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'httpx.:ResourceWarning")

NAMES = ("openai", "anthropic", "github-copilot", "ollama")
KEYS = {"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k", "GITHUB_COPILOT_TOKEN": "k"}
PRICES = PriceTable({"m": Price(3, 15)})
CALLS = 250
RUNS = 60
SOCKETS = 200
LIMIT = 30.0
SLACK = 1.05
MOST = 32_000_000
ENDS = {"answered", "LLMUnavailable", "LLMTimeout", "LLMRequestRejected", "LLMResponseInvalid"}

TOOLS = "".join(
    f"  - {{name: {kind}-{maker}, kind: shell, capability: {kind}, command: 'true'}}\n"
    for kind in ("fetch", "build", "post")
    for maker in "xyz"
)
PLAN = Plan.parse(f"""
goal: {{objective: deliver}}
tools:
{TOOLS}
tasks:
  - {{id: a, tool: fetch-x, retry: {{max_attempts: 2}}}}
  - {{id: b, tool: build-x, depends_on: [a], timeout: 5}}
  - {{id: c, tool: build-y, depends_on: [a], optional: true}}
  - {{id: d, tool: post-x, depends_on: [b, c]}}
""")


Pieces = Iterable[tuple[float, bytes | Exception]]
"""A body: after how many seconds comes what, or which error."""

FAULTS = (
    *(
        "answers",
        "hangs",
        "loses the connection",
        "refuses",
        "refuses",
        "trickles",
        "floods",
        "is cut",
        "is garbled",
    ),
    "crashes",
)
MEGABYTE = 1_000_000
STATUSES = (301, 400, 401, 403, 404, 408, 409, 413, 418, 422, 429, 500, 502, 503, 504, 529)
RETRY_AFTER = (
    None,
    "0",
    "2",
    "20",
    "3600",
    "-5",
    "soon",
    "nan",
    "inf",
    "Wed, 21 Oct 2099 07:28:00 GMT",
)
SHAPES = (
    *(
        "",
        "null",
        "[]",
        "{}",
        "0",
        '"text"',
        "[" * 100_000,
        '{"error": null}',
        '{"error": [1]}',
        '{"message": 3}',
    ),
    *(
        '{"choices": []}',
        '{"choices": [{"message": null}]}',
        '{"content": null}',
        '{"content": [{"type": "text"}]}',
    ),
)
LIES: tuple[object, ...] = (-1, -(10**9), True, None, "12", 1.5, math.inf, [], {})
LOST = (
    *(
        httpx.ConnectError,
        httpx.ConnectTimeout,
        httpx.ReadError,
        httpx.ReadTimeout,
        httpx.RemoteProtocolError,
    ),
    *(
        httpx.PoolTimeout,
        httpx.WriteError,
        httpx.ProxyError,
        httpx.UnsupportedProtocol,
        httpx.DecodingError,
    ),
)
CRASHES = (RuntimeError, ValueError, KeyError, OSError, AttributeError)


class FaultyService(httpx.AsyncBaseTransport):
    """Answers requests of every API, or fails at them in a way that is drawn anew for each; a liar makes up usage."""

    def __init__(
        self,
        seed: object,
        clock: Clock,
        says: Callable[[Random, LLMRequest], str | None],
        *,
        wrong=0.75,
        liar=False,
    ) -> None:
        self.seed, self.clock, self.says, self.wrong, self.liar = seed, clock, says, wrong, liar
        self.drawn: list[str] = []
        self.open = self.longest = 0
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        random = Random(f"{self.seed}/{len(self.drawn)}")
        fault = random.choice(FAULTS) if random.random() < self.wrong else "answers"
        self.drawn.append(fault)
        api, kind = ROUTES[request.method, request.url.path]
        body = json.loads(request.content) if request.content else {}
        headers = {name.lower(): value for name, value in request.headers.items()}
        read = LLMRequest(len(self.drawn), 1, api, kind, request.url.path, headers, body)
        whole = self.whole(random, read)
        match fault:
            case "answers":
                await self.clock.sleep(random.choice((0, 0.5, 3, 12, 29, 31, 90)))
                return self.sent(whole)
            case "hangs":
                await self.clock.sleep(math.inf)
            case "loses the connection":
                await self.clock.sleep(random.choice((0, 0.1, 4, 40)))
                raise random.choice(LOST)("made to fail")
            case "refuses":
                status, after = random.choice(STATUSES), random.choice(RETRY_AFTER)
                error = response_body(read, ServerReply.error(status))
                told = random.choice((error, b"<html>Bad gateway</html>", b"", b"\xff{"))
                return self.sent(
                    told, status=status, **({} if after is None else {"retry_after": after})
                )
            case "trickles":  # fast enough for every single time-out
                seconds = random.choice((0.3, 0.9))
                return self.sent([(seconds, whole[i : i + 1]) for i in range(len(whole))])
            case "floods":
                seconds, size = random.choice(((0.5, 10), (0.0, MEGABYTE)))
                return self.sent((seconds, b" " * size) for _ in range(100))
            case "is cut":  # noticed or not
                half = whole[: random.randrange(len(whole))]
                lost = httpx.RemoteProtocolError(
                    "peer closed connection without sending complete message body"
                )
                return self.sent([(0.0, half), (1.0, lost)] if random.random() < 0.5 else half)
            case "is garbled":
                garbled: tuple[tuple[bytes, dict[str, Any]], ...] = (
                    (b"no gzip", {"content_encoding": "gzip"}),
                    (random.randbytes(200), {}),
                    (b"<html>Log in</html>", {"content_type": "text/html"}),
                    (random.choice(SHAPES).encode(), {}),
                )
                data, more = random.choice(garbled)
                return self.sent(data, **more)
        raise random.choice(CRASHES)("nobody thought of this")

    async def aclose(self) -> None:
        self.closed = True

    def whole(self, random: Random, request: LLMRequest) -> bytes:
        """The body of an answer, of which the counts of tokens may be nonsense."""
        data = response_body(request, ServerReply(self.says(random, request)))
        if not self.liar or random.random() < 0.5:
            return data
        answer = json.loads(data)
        usage: dict[str, Any] = answer.get("usage", answer)
        for name in [name for name in usage if "token" in name or name.endswith("eval_count")]:
            usage[name] = random.choice(LIES)
        if random.random() < 0.2 and "usage" in answer:
            answer["usage"] = random.choice(LIES)
        return json.dumps(answer).encode()

    def sent(self, data: bytes | Pieces, *, status: int = 200, **headers: Any) -> httpx.Response:
        """An answer on its way."""
        pieces = [(0.0, data)] if isinstance(data, bytes) else data
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.Response(
            status,
            headers={"content-type": "application/json", **named},
            stream=_Stream(self, pieces),
        )


class _Stream(httpx.AsyncByteStream):
    """A body that comes in pieces, in its time, and may break off."""

    def __init__(self, service: FaultyService, pieces: Pieces) -> None:
        self._service, self._pieces, self._closed = service, iter(pieces), False
        self._size = 0
        service.open += 1

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._closed:
            raise httpx.ReadError("this was closed")
        seconds, piece = next(self._pieces, (0.0, None))
        if seconds:
            await self._service.clock.sleep(seconds)
        if piece is None:
            raise StopAsyncIteration
        if isinstance(piece, Exception):
            raise piece
        self._size += len(piece)
        self._service.longest = max(self._service.longest, self._size)
        return piece

    async def aclose(self) -> None:
        self._service.open -= not self._closed
        self._closed = True


def client(name: str, service: FaultyService, clock: Clock, **settings: object) -> LLMProvider:
    """One of our clients, which reaches nothing but a faulty service."""
    made: LLMProvider = load_plugin("providers", name)(
        "key",
        model="m",
        prices=PRICES,
        environment=virtual_environment(clock=clock),
        transport=service,
        **settings,
    )
    return made


def candidate(random: Random) -> JsonObject:
    """A way on: one that helps if the task is the right one, or what a weak model takes for one."""
    task = random.choice("abcd")
    fit = {"a": "fetch-y", "b": "build-z", "c": "build-z", "d": "post-y"}[task]
    new: JsonObject = {"id": f"n{random.randrange(10**6)}", "tool": fit}
    wrong: JsonObject = {"id": "a", "tool": random.choice(("rm -rf", None)), "depends_on": ["d"]}
    changes: list[JsonObject] = [
        {"kind": "replace", "task_id": task, "tasks": [wrong]},
        {"kind": "skip", "task_id": task},
        {"kind": "retry", "task_id": task, "delay": random.choice((0, 5, -1))},
        {"kind": "abort"},
        {"kind": "modify", "task_id": task, "depends_on": ["d"]},
        {"kind": "approve", "task_id": task},
    ]
    changed: list[JsonValue] = [{"kind": "replace", "task_id": task, "tasks": [new]}]
    if random.random() < 0.4:
        changed = [*random.sample(changes, random.choice((1, 1, 2)))]
    return {
        "reason": "because",
        "changes": changed,
        "confidence": random.choice((0.2, 0.6, 0.95, 0.95, 7)),
    }


def says(random: Random, request: LLMRequest) -> str | None:
    """Answer of a model: alternatives, with prose around them, cut short, or useless."""
    if request.kind == "embeddings":
        return None
    reply = json.dumps({"candidates": [candidate(random) for _ in range(random.randrange(4))]})
    fenced = f"<think>hm {{</think>Here:\n```json\n{reply}\n```"
    return random.choice((reply, reply, fenced, reply[: len(reply) // 2], "I do not know."))


def person(question: Question) -> ScriptStep:
    """Take what is offered, where something is."""
    return returns(Answer("approve" if question.candidates else "reject"), after=60)


async def one_call(model: LLMProvider, random: Random) -> str:
    """Ask for something; how it ended."""
    options = LLMOptions(system="Be brief.")
    try:
        match random.randrange(4):
            case 0:
                assert isinstance(
                    await model.complete_json("What now?", ProposalReply, options), ProposalReply
                )
            case 1:
                assert all(isinstance(value, float) for value in await model.embed("some words"))
            case 2:
                await model.is_available()
            case _:
                assert isinstance(await model.complete_detailed("What now?", options), Completion)
    except LLMError as error:
        named = str(error).startswith(f"{model.name}: ")
        return type(error).__name__ if named else f"an error that does not say whose it is: {error}"
    return "answered"


@pytest.mark.parametrize(
    "name", ["openai", *(pytest.param(name, marks=pytest.mark.deep) for name in NAMES[1:])]
)
async def test_every_call_ends_in_time(name: str) -> None:
    """A call ends with an answer or an error of its kind, before its deadline or when it is cancelled, and leaves nothing."""
    ends, drawn, cancelled = set(), set(), 0
    async with VirtualClock() as clock:
        tasks = len(anyio.get_running_tasks())
        for seed in range(CALLS):
            random = Random(seed)
            service = FaultyService(f"{name}/{seed}", clock, says, liar=True)
            model = client(name, service, clock)
            began, patience = clock.elapsed, random.choice((math.inf, math.inf, 0, 0.7, 5, 20))
            async with move_on_after(patience, clock):
                ends.add(await one_call(model, random))
            cancelled += clock.elapsed - began == pytest.approx(patience)
            assert clock.elapsed - began <= min(patience, LIMIT) * SLACK, (seed, service.drawn)
            assert (service.open, service.longest <= MOST) == (0, True), (seed, service.drawn)
            await model.aclose()
            assert service.closed or not service.drawn
            drawn.update(service.drawn)
        assert repr(clock).endswith("sleepers=0>")
        assert len(anyio.get_running_tasks()) == tasks
    assert drawn == set(FAULTS)
    assert ends >= ENDS
    assert cancelled


@pytest.mark.deep
async def test_real_connections_do_not_leak() -> None:
    """The same through real connections, many at once: every call ends, and nothing stays open."""
    ends: Counter[str] = Counter()

    def answer(request: LLMRequest) -> LLMServerReply:
        random = Random(request.number)
        said, status = says(random, request), random.choice((400, 401, 429, 500, 503, 529))
        error = ServerReply.error(status, retry_after=random.choice((0, 0.1, 60)))
        broken = (
            ServerReply("not read", keep=9),
            ServerReply.cut(),
            ServerReply.cut(keep=30),
            ServerReply(body=b"<html>"),
        )
        fine = (said, returns(said, after=0.05), returns(said, after=2))
        return random.choice((*fine, error, error, *broken, hangs()))

    async def call(model: LLMProvider, number: int) -> None:
        async with places:
            ends[await one_call(model, Random(number))] += 1

    places = anyio.CapacityLimiter(40)
    with ScriptedLLMServer(answer) as server:
        fields = {"environ": server.environ(), "model": "m", "timeout": 0.7, "prices": PRICES}
        models = [load_plugin("providers", name)(**fields) for name in NAMES]
        async with anyio.create_task_group() as group:
            for number in range(SOCKETS):
                group.start_soon(call, models[number % len(models)], number)
        for model in models:
            await model.aclose()
        await server.until(lambda server: not server.connections)
    assert ends.total() == SOCKETS
    assert ends.keys() >= ENDS
    assert (
        len(server.requests) > SOCKETS / 4
    )  # on a busy machine the time of many calls ends before they are sent


@pytest.mark.deep
@pytest.mark.parametrize("door", ["all at once", "one after another"])
async def test_no_run_is_lost(door: str) -> None:
    """Runs whose models fail at random come to their end, keep every promise, and stay within budget and deadline."""
    seen: Counter[str] = Counter()
    for seed in range(RUNS):
        seen.update(await one_run(door, seed))
    assert seen["succeeded"]
    assert seen["failed"]
    assert seen["asked"] > 3 * RUNS
    assert seen.total() > seen["succeeded"] + seen["failed"] + seen["asked"] + seen["repair"], (
        "no model had its way"
    )


async def one_run(door: str, seed: int) -> Counter[str]:
    """Run the plan with every provider failing, and check all that was promised; what happened, and how often."""
    random = Random(seed)
    choices = {
        "calls": (None, None, 3, 12),
        "tokens": (None, 60_000, 200_000),
        "money": (None, None, 0.2, 1.0),
    }
    limits: dict[str, float | None] = {
        name: random.choice(values) for name, values in choices.items()
    }
    settings = Settings.model_validate(
        {
            "budget": limits,
            "cooldown": 0,
            "alternatives": {"human_approval_threshold": 0.5},
            "llm": {"model": "m", "prices": {"": {"input": 3, "output": 15}}},
        }
    )
    async with VirtualClock() as clock:
        tasks = len(anyio.get_running_tasks())
        parts = virtual_environment(seed, clock=clock)
        wrong = random.choice((0.3, 0.7, 0.9, 1.0))
        in_order = door == "one after another"
        services = [
            FaultyService(f"{seed}/{name}", clock, says, wrong=wrong)
            for name in NAMES[: 1 if in_order else 4]
        ]
        if in_order:
            shared: dict[str, Any] = {
                "settings": settings,
                "environ": KEYS,
                "environment": parts,
                "transport": services[0],
            }
            models = [create_llm_provider(NAMES, **shared)]
        else:
            models = [
                client(name, service, clock) for name, service in zip(NAMES, services, strict=True)
            ]
        faults = FaultSchedule(
            fail={"*": 0.45}, flaky={"*": 0.2}, hang={"b": 0.2}, durations={"*": (0, 9)}
        )
        engine = ReplanningEngine(
            [*models, *(["repair"] if random.random() < 0.3 else [])],
            settings=settings,
            gate=ScriptedGate(person, clock=clock),
            environment=parts,
        )
        result = await engine.execute(
            PLAN, ScriptedExecutor(faults.draw(PLAN, seed, clock).attempt_step, clock=clock)
        )
        await engine.aclose()
        for model in models:
            await model.aclose()
        assert repr(clock).endswith("sleepers=0>"), seed
        assert len(anyio.get_running_tasks()) == tasks, seed
    assert all(
        service.open == 0 and service.closed == bool(service.drawn) for service in services
    ), seed
    records = list(engine.store.read(result.run))
    assert invariant_violations(records) == [], seed
    contained = {r.body.error for r in records if isinstance(r.body, ErrorContained)}
    assert contained <= {"it did not answer in time"}, seed
    over = [
        name
        for name, most in limits.items()
        if most is not None and getattr(result.spent, name) > most
    ]
    assert over == [], (seed, limits, result.spent)
    check_deadlines(records, seed)
    drawn = sum(len(service.drawn) for service in services)
    return Counter({result.status: 1, "asked": drawn, **Counter(chosen(records))})


def chosen(records: list[Record]) -> Iterator[str]:
    """Whose alternatives were carried out."""
    candidates = {
        r.body.replan: r.body.candidates
        for r in records
        if isinstance(r.body, AlternativesConsidered)
    }
    for record in records:
        if (
            isinstance(record.body, PlanRevised)
            and record.body.replan
            and record.body.chosen is not None
        ):
            yield candidates[record.body.replan][record.body.chosen].alternative.source


def check_deadlines(records: list[Record], seed: int) -> None:
    """Between the moment when a replan could begin and the answers stand no more than the deadline of a request."""
    free, fired = 0.0, {}
    for record in records:
        match record.body:
            case TriggerFired(trigger=trigger):
                fired[trigger.id] = record.at
            case AlternativesConsidered(triggers=triggers):
                began = max(free, *(fired[trigger] for trigger in triggers))
                assert record.at - began <= LIMIT * SLACK, (seed, record.seq, record.body.notes)
                free = record.at
            case QuestionAnswered():  # what waited for the answer is looked at again
                free = record.at

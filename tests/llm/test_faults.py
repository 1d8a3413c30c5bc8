"""Language models fail in every way, by the thousands of calls: no run is lost, late, over its budget, or leaks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import anyio
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
from replanning.llm import Completion, LLMOptions, LLMProvider, Price, PriceTable, create_llm_provider
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
from tests.support.llm_chaos import FAULTS, FaultyService
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer, ServerReply

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


def client(name: str, service: FaultyService, clock: Clock, **settings: object) -> LLMProvider:
    """One of our clients, which reaches nothing but a faulty service."""
    made: LLMProvider = load_plugin("providers", name)(
        "key", model="m", prices=PRICES, environment=virtual_environment(clock=clock), transport=service, **settings
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
    return {"reason": "because", "changes": changed, "confidence": random.choice((0.2, 0.6, 0.95, 0.95, 7))}


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
                assert isinstance(await model.complete_json("What now?", ProposalReply, options), ProposalReply)
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


@pytest.mark.parametrize("name", ["openai", *(pytest.param(name, marks=pytest.mark.deep) for name in NAMES[1:])])
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
        broken = (ServerReply.truncated(), ServerReply.cut(), ServerReply.cut(keep=30), ServerReply.raw("<html>"))
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
    assert len(server.requests) > SOCKETS / 2


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
    assert seen.total() > seen["succeeded"] + seen["failed"] + seen["asked"] + seen["repair"], "no model had its way"


async def one_run(door: str, seed: int) -> Counter[str]:
    """Run the plan with every provider failing, and check all that was promised; what happened, and how often."""
    random = Random(seed)
    choices = {"calls": (None, None, 3, 12), "tokens": (None, 60_000, 200_000), "money": (None, None, 0.2, 1.0)}
    limits: dict[str, float | None] = {name: random.choice(values) for name, values in choices.items()}
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
        services = [FaultyService(f"{seed}/{name}", clock, says, wrong=wrong) for name in NAMES[: 1 if in_order else 4]]
        if in_order:
            shared: dict[str, Any] = {
                "settings": settings,
                "environ": KEYS,
                "environment": parts,
                "transport": services[0],
            }
            models = [create_llm_provider(NAMES, **shared)]
        else:
            models = [client(name, service, clock) for name, service in zip(NAMES, services, strict=True)]
        faults = FaultSchedule(fail={"*": 0.45}, flaky={"*": 0.2}, hang={"b": 0.2}, durations={"*": (0, 9)})
        engine = ReplanningEngine(
            [*models, *(["repair"] if random.random() < 0.3 else [])],
            settings=settings,
            gate=ScriptedGate(person, clock=clock),
            environment=parts,
        )
        result = await engine.execute(PLAN, ScriptedExecutor(faults.draw(PLAN, seed, clock).attempt_step, clock=clock))
        await engine.aclose()
        for model in models:
            await model.aclose()
        assert repr(clock).endswith("sleepers=0>"), seed
        assert len(anyio.get_running_tasks()) == tasks, seed
    assert all(service.open == 0 and service.closed == bool(service.drawn) for service in services), seed
    records = list(engine.store.read(result.run))
    assert invariant_violations(records) == [], seed
    assert [record.body for record in records if isinstance(record.body, ErrorContained)] == [], seed
    over = [name for name, most in limits.items() if most is not None and getattr(result.spent, name) > most]
    assert over == [], (seed, limits, result.spent)
    check_deadlines(records, seed)
    drawn = sum(len(service.drawn) for service in services)
    return Counter({result.status: 1, "asked": drawn, **Counter(chosen(records))})


def chosen(records: list[Record]) -> Iterator[str]:
    """Whose alternatives were carried out."""
    candidates = {r.body.replan: r.body.candidates for r in records if isinstance(r.body, AlternativesConsidered)}
    for record in records:
        if isinstance(record.body, PlanRevised) and record.body.replan and record.body.chosen is not None:
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

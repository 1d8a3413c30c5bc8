"""Calls in doubt: whose statements allow a repetition, when a person is asked, and what the question says."""

import asyncio  # noqa: TID251 # trio has no such cancellations
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from replanning import (
    Alternative,
    Answer,
    Plan,
    ReplanningEngine,
    ReplanRequest,
    Retry,
    RunResult,
    Task,
    TaskContext,
    tool,
)
from replanning.changes import ModifyTask, ReplaceTask, RetryTask, SkipTask
from replanning.engine.functions import FunctionTool
from replanning.journal import MemoryStore
from replanning.plan import TaskId
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.runs import alternative, make_engine, perform, plan

THRICE = Retry(max_attempts=3)


class Shop:
    """Tools that take effect and then lose their connection; it counts their executions."""

    def __init__(self) -> None:
        self.executions: Counter[str] = Counter()

    def tool(
        self, name: str, error: type[BaseException] = ConnectionResetError, **stated: Any
    ) -> FunctionTool[..., Any]:
        """Return a tool that raises an error after its effect."""

        async def work() -> None:
            self.executions[name] += 1
            raise error("it went wrong")

        return tool(name=name, capability="pay", **stated)(work)


async def run(
    engine: ReplanningEngine, *tools: FunctionTool[..., Any], uses: str = "pay", **stated: Any
) -> RunResult:
    """Return the result of a plan with one task."""
    task = {"id": "a", "tool": uses, **stated}
    return await engine.execute(
        Plan.model_validate({"goal": {"objective": "pay"}, "tasks": [task]}), tools=tools
    )


# Statements are those of one tool


@pytest.mark.parametrize(
    "stated",
    [{"retry": THRICE}, {"idempotent": True}, {"effect": "none"}],
    ids=lambda stated: next(iter(stated)),
)
@pytest.mark.parametrize("by", ["the tool", "the task", "the tool, in a session"])
async def test_a_stand_in_inherits_no_permission(
    by: str, stated: Mapping[str, Any], clock: VirtualClock
) -> None:
    """What a tool or its task states about repetitions does not hold for the tool that stands in for it."""
    shop = Shop()
    engine = make_engine("repair", clock=clock)
    other = shop.tool("other")
    if by == "the task":
        await run(engine, shop.tool("pay", ValueError), other, **stated)
    else:
        pay = shop.tool("pay", ValueError, **stated)
        if by == "the tool":
            await run(engine, pay, other)
        else:
            async with engine.session("pay", tools=[pay, other]) as session:
                with pytest.raises(ValueError, match="it went wrong"):
                    await session.call(pay)
    # Retries that were stated apply to every failure of the tool itself.
    assert shop.executions["other"] == 1


async def test_a_stand_in_has_its_own_statements(clock: VirtualClock) -> None:
    """A tool that stands in for another is repeated as it states itself."""
    shop = Shop()
    once = Retry(max_attempts=1)
    tools = [shop.tool("pay", ValueError, retry=once), shop.tool("other", retry=THRICE)]
    await run(make_engine("repair", clock=clock), *tools)
    assert shop.executions == {"pay": 1, "other": 3}


async def test_a_stand_in_has_its_own_time(clock: VirtualClock) -> None:
    """The time limit of a tool is no limit of the tool that stands in for it."""
    shop = Shop()

    @tool(capability="pay")
    async def slow() -> str:
        await clock.sleep(60)
        return "paid"

    result = await run(
        make_engine("repair", clock=clock), shop.tool("pay", ValueError, timeout=5), slow
    )
    assert (result.status, result.outputs) == ("succeeded", {"a": "paid"})


async def test_retries_as_a_mapping(clock: VirtualClock) -> None:
    """A function states `retry` as a plan file does; one error names a field that is wrong."""
    shop = Shop()
    await run(make_engine("repair", clock=clock), shop.tool("pay", retry={"max_attempts": 2}))
    assert shop.executions == {"pay": 2}
    with pytest.raises(ValueError, match=r"^tool 'pay': retry\.max_attempts: must be at least 1"):
        shop.tool("pay", retry={"max_attempts": 0})


async def test_tools_of_a_plan_state_retries(clock: VirtualClock) -> None:
    """A tool that a plan file describes states `retry` for its tasks; what a task states itself takes precedence."""
    document = Plan.parse(
        "{goal: {objective: pay}, tools: [{name: pay, retry: {max_attempts: 2}}],"
        " tasks: [{id: a, tool: pay}, {id: b, tool: pay, retry: {max_attempts: 4}}]}"
    )
    executions: Counter[str] = Counter()

    async def work(task: Any, context: object) -> None:
        executions[task.id] += 1
        raise ConnectionResetError("it went wrong")

    await make_engine(clock=clock).execute(document, work)
    assert executions == {"a": 2, "b": 4}


async def test_a_modification_to_another_tool_keeps_no_permission(clock: VirtualClock) -> None:
    """A task that gets another tool loses its `effect`, `idempotent` and `retry`, unless the change states them."""

    def propose(request: ReplanRequest) -> list[Alternative]:
        skip = SkipTask(task_id=TaskId("first"))
        swap = ModifyTask(task_id=TaskId("a"), fields={"tool": "other"})
        again = ModifyTask(task_id=TaskId("b"), fields={"tool": "another", "idempotent": True})
        return [alternative(skip, swap, again)]

    shop = Shop()
    names = ("pay", "other", "another")
    tools = [shop.tool("fail", ValueError), *map(shop.tool, names)]
    stated = "tool: pay, effect: none, idempotent: true, retry: {max_attempts: 3}"
    document = Plan.parse(
        "{goal: {objective: pay}, tasks: [{id: first, tool: fail, optional: true},"
        f" {{id: a, depends_on: [first], {stated}}}, {{id: b, depends_on: [first], {stated}}}]}}"
    )
    await make_engine(propose, clock=clock).execute(document, tools=tools)
    assert shop.executions == {"fail": 1, "other": 1, "another": 3}


async def test_a_changed_call_has_its_own_key(clock: VirtualClock) -> None:
    """A service that knows the key of a call does not take the changed call for its repetition."""
    keys: list[tuple[int, str]] = []

    @tool(idempotent=True)
    def pay(amount: int, context: TaskContext) -> None:
        keys.append((amount, context.idempotency_key))
        if len(keys) < 3:
            raise ConnectionRefusedError("the shop is closed")

    def propose(request: ReplanRequest) -> list[Alternative]:
        less = ModifyTask(task_id=TaskId("a"), fields={"arguments": {"amount": 2}})
        return [alternative(less, RetryTask(task_id=TaskId("a")))]

    engine = make_engine(propose, clock=clock, gate=ScriptedGate([Answer("approve")]))
    result = await run(engine, pay, retry=Retry(max_attempts=2), arguments={"amount": 5})
    assert result.status == "succeeded"
    first = f"{result.run}/a"
    assert keys == [(5, first), (5, first), (2, f"{first}#changed-1")]


# When a person is asked


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"retry": {"delay": 0.01}},
        {"retry": {"max_attempts": 1}},
        {"retry": {"max_attempts": 3, "on": ["KeyError"]}},
        {"retry": {"max_attempts": 3}, "idempotent": False},
        {"retry": {"max_attempts": 3, "on": ["KeyError"]}, "idempotent": False},
    ],
)
@pytest.mark.parametrize("by_tool", [False, True])
async def test_a_person_is_asked_about_what_is_not_repeated(
    by_tool: bool, stated: dict[str, Any], clock: VirtualClock
) -> None:
    """A call in doubt that nothing allows to repeat is a question, whatever retries are stated for other failures."""
    shop = Shop()
    engine = make_engine("repair", clock=clock)
    if by_tool:
        result = await run(engine, shop.tool("pay", **stated))
    else:
        result = await run(engine, shop.tool("pay"), **stated)
    assert (result.status, shop.executions) == ("needs_human", {"pay": 1})
    (question,) = engine.pending(result.run)
    (candidate,) = question.candidates
    assert [change.kind for change in candidate.alternative.changes] == ["retry"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_within_the_work_is_in_doubt(clock: VirtualClock) -> None:
    """A tool that is cut off by a cancellation of its own is executed once, and no other tool in its place."""
    shop = Shop()
    tools = [shop.tool("pay", asyncio.CancelledError), shop.tool("other")]
    result = await run(make_engine("repair", clock=clock), *tools)
    assert (result.status, shop.executions) == ("needs_human", {"pay": 1})


def knows_nothing(request: ReplanRequest) -> list[Alternative]:
    """A provider that never finds anything."""
    return []


@pytest.mark.parametrize("providers", [(), (knows_nothing,), ("repair",)])
async def test_a_person_is_asked_whatever_the_providers_are(
    providers: tuple[Any, ...], clock: VirtualClock
) -> None:
    """The same question is asked where providers know no way on, or there are none; an approval repeats the call."""
    shop = Shop()
    engine = make_engine(*providers, clock=clock)
    result = await run(engine, shop.tool("pay"))
    assert (result.status, shop.executions) == ("needs_human", {"pay": 1})
    (question,) = engine.pending(result.run)
    assert "it is unknown whether 'a' took effect: look first. If so, skip" in question.text
    assert "If not, approve another run of 'a'." in question.text
    (candidate,) = question.candidates
    assert candidate.alternative.reason.endswith("; it may then have its effect twice")
    assert [change.kind for change in candidate.alternative.changes] == ["retry"]

    engine.answer(question.id, "approve", by="eve")
    async with engine.resume(result.run) as resumed:
        done = await perform(resumed)
    assert (resumed.result.status, done) == ("succeeded", ["a"])


@pytest.mark.parametrize("providers", [(), (knows_nothing,), ("repair",)])
async def test_a_rejection_gives_the_call_up(
    providers: tuple[Any, ...], clock: VirtualClock
) -> None:
    """Whoever declines to repeat a call is not asked again, and the run fails, whatever the providers are."""
    shop = Shop()
    gate = ScriptedGate([Answer("reject")])
    result = await run(make_engine(*providers, clock=clock, gate=gate), shop.tool("pay"))
    assert (result.status, len(gate.questions), shop.executions) == ("failed", 1, {"pay": 1})


async def test_a_declined_stand_in_gives_the_call_up(clock: VirtualClock) -> None:
    """After a person has declined what a provider proposes for a call in doubt, nothing else is asked about it."""

    def stand_in(request: ReplanRequest) -> list[Alternative]:
        other = Task(id="b", tool="other")
        return [alternative(ReplaceTask(task_id=TaskId("a"), tasks=(other,)))]

    shop = Shop()
    gate = ScriptedGate([Answer("reject")])
    engine = make_engine(stand_in, clock=clock, gate=gate)
    result = await run(engine, shop.tool("pay"), shop.tool("other"))
    assert (result.status, len(gate.questions), shop.executions) == ("failed", 1, {"pay": 1})
    (candidate,) = gate.questions[0].candidates
    assert candidate.alternative.source == "scripted"


async def test_a_person_is_asked_about_what_providers_leave_out(clock: VirtualClock) -> None:
    """A call in doubt is asked about although the provider has repaired another task that failed with it."""

    def skip_b(request: ReplanRequest) -> list[Alternative]:
        if request.view.task("b").state == "FAILED":
            return [alternative(SkipTask(task_id=TaskId("b")))]
        return []

    shop = Shop()
    engine = make_engine(skip_b, clock=clock)
    whole = plan(Task(id="a", tool="pay"), Task(id="b", tool="sell"))
    tools = [shop.tool("pay"), shop.tool("sell", ValueError)]
    result = await engine.execute(whole, tools=tools)
    assert result.status == "needs_human"
    (question,) = engine.pending(result.run)
    assert question.holds == ("a",)


async def test_calls_in_doubt_are_asked_about_together(clock: VirtualClock) -> None:
    """Calls that fail for one cause are one question, of which each can be approved alone."""
    shop = Shop()
    engine = make_engine(knows_nothing, clock=clock)
    whole = plan(Task(id="a", tool="pay"), Task(id="b", tool="pay"))
    result = await engine.execute(whole, tools=[shop.tool("pay")])
    (question,) = engine.pending(result.run)
    reasons = [candidate.alternative.reason for candidate in question.candidates]
    assert reasons == [
        "try 'a', 'b' again; they may then have their effects twice",
        "try 'a' again; it may then have its effect twice",
        "try 'b' again; it may then have its effect twice",
    ]


async def test_a_call_that_was_cut_off_is_asked_about(clock: VirtualClock) -> None:
    """A call during which its process ended is asked about by the process that resumes the run."""
    engine = make_engine(knows_nothing, clock=clock)
    async with engine.open(plan(Task(id="a")), run_id="run-1") as opened:
        opened.started((await anext(opened.ready())).id)
    async with engine.resume("run-1") as resumed:
        assert await perform(resumed) == []
    assert resumed.result.status == "needs_human"


@pytest.mark.parametrize(
    ("stated", "executed"),
    [({}, ["other"]), ({"idempotent": True}, ["pay"]), ({"retry": THRICE}, ["pay"])],
)
async def test_a_call_that_was_cut_off_has_its_fallback_taken(
    stated: dict[str, Any], executed: list[str], clock: VirtualClock
) -> None:
    """A call during which its process ended is repeated where that is stated; otherwise its fallback is taken without asking."""
    task = {"id": "a", "tool": "pay", "fallbacks": [{"tool": "other"}], **stated}
    engine = make_engine("repair", clock=clock)
    async with engine.open(plan(Task.model_validate(task)), run_id="run-1") as opened:
        opened.started((await anext(opened.ready())).id)
    tools: list[str | None] = []

    async def work(task: Task, context: TaskContext) -> None:
        tools.append(task.tool)

    async with engine.resume("run-1") as resumed:
        await perform(resumed, work)
    assert (resumed.result.status, tools) == ("succeeded", executed)


async def test_a_call_that_failed_without_replanning_is_asked_about(clock: VirtualClock) -> None:
    """An engine that goes on with a run in which nobody was asked asks about its calls in doubt."""
    shop = Shop()
    store = MemoryStore()
    result = await run(make_engine(clock=clock, store=store, enabled=False), shop.tool("pay"))
    assert result.status == "failed"
    async with make_engine(clock=clock, store=store).resume(result.run) as resumed:
        assert await perform(resumed) == []
    assert resumed.result.status == "needs_human"


async def test_a_request_asks_again(clock: VirtualClock) -> None:
    """Whoever asks for replanning of a run is asked again about a call that somebody has given up."""
    shop = Shop()
    gate = ScriptedGate([Answer("reject"), Answer("approve")])
    engine = make_engine(knows_nothing, clock=clock, gate=gate)
    result = await run(engine, shop.tool("pay"))
    assert result.status == "failed"
    async with engine.resume(result.run) as resumed:
        resumed.request_replan("the shop has looked", by="eve")
        done = await perform(resumed)
    assert (resumed.result.status, done) == ("succeeded", ["a"])


@pytest.mark.parametrize(
    ("stated", "status"),
    [
        ({"optional": True}, "succeeded"),
        ({"retry": {"max_attempts": 3}}, "failed"),
        ({"idempotent": True}, "failed"),
        ({"effect": "none"}, "failed"),
    ],
)
async def test_nobody_is_asked_in_vain(
    stated: dict[str, Any], status: str, clock: VirtualClock
) -> None:
    """Without a way on, nobody is asked about an optional task, and about calls that were repeated as stated."""
    result = await run(make_engine(clock=clock), Shop().tool("pay"), **stated)
    assert result.status == status


async def test_retries_that_were_stated_are_used_up(clock: VirtualClock) -> None:
    """A task that was tried as often as it states has failed without a question, and the run says what is unknown."""
    shop = Shop()
    engine = make_engine("repair", clock=clock)
    result = await run(engine, shop.tool("pay"), retry={"max_attempts": 3})
    assert (result.status, shop.executions) == ("failed", {"pay": 3})
    assert result.reason == "'a' failed (it went wrong), and it is unknown whether it took effect"


async def test_an_optional_call_in_doubt_is_told(clock: VirtualClock) -> None:
    """A run that succeeds without an optional task says that it is unknown whether that took effect."""
    shop = Shop()
    result = await run(make_engine("repair", clock=clock), shop.tool("pay"), optional=True)
    reason = "every required task is done: it is unknown whether 'a' took effect"
    assert (result.status, result.reason) == ("succeeded", reason)


# What people read


READS = "`effect: none` if it only reads"
HARMLESS = "`idempotent: true` if a second call does no harm"
CONFIRMED = "`confirm` if another tool can tell whether it was done"
REPEATED = "`retry: {max_attempts: 3}` to have it repeated anyway"
FALLBACKS = "or `fallbacks` to have another call take its place."


@pytest.mark.parametrize(
    ("stated", "advice"),
    [
        ({}, f"{READS}, {HARMLESS}, {CONFIRMED}, {REPEATED}, {FALLBACKS}"),
        # A retry is not repeated where it is said to do harm.
        ({"idempotent": False}, f"{READS}, {HARMLESS}, {CONFIRMED}, {FALLBACKS}"),
        (
            {"retry": Retry(max_attempts=1)},
            f"{READS}, {HARMLESS}, {CONFIRMED}, {REPEATED}, {FALLBACKS}",
        ),
    ],
)
async def test_a_question_names_what_helps(
    stated: Mapping[str, Any], advice: str, clock: VirtualClock
) -> None:
    """A question about the same call says that its effect is unknown, what to do, and what to state next time."""
    shop = Shop()
    engine = make_engine("repair", clock=clock)
    result = await run(engine, shop.tool("pay", **stated))
    (question,) = engine.pending(result.run)
    assert question.text.endswith(
        "it is unknown whether 'a' took effect: look first. If so, skip the task."
        f" If not, approve another run of 'a'. Not to be asked next time, state {advice}"
    )
    (candidate,) = question.candidates
    assert candidate.alternative.reason.endswith("it may then have its effect twice")
    assert result.reason.endswith("it is unknown whether 'a' took effect")


@pytest.mark.parametrize("stated", [{}, {"idempotent": True}, {"retry": THRICE}])
async def test_a_question_about_another_tool_names_what_helps(
    stated: Mapping[str, Any], clock: VirtualClock
) -> None:
    """A question about a stand-in names it, and neither `idempotent` nor `retry`, which do not allow one."""
    shop = Shop()
    engine = make_engine("repair", clock=clock)
    result = await run(engine, shop.tool("pay", **stated), shop.tool("other"))
    (question,) = engine.pending(result.run)
    assert question.text.endswith(
        "If not, approve 'other' in place of 'a'. Not to be asked next time,"
        f" state {READS}, {CONFIRMED}, {FALLBACKS}"
    )
    reasons = [candidate.alternative.reason for candidate in question.candidates]
    assert "may pass" not in str(reasons)


@pytest.mark.parametrize(
    "advised", [{"effect": "none"}, {"idempotent": True}, {"retry": THRICE}, {"fallbacks": "other"}]
)
async def test_nobody_is_asked_where_the_advice_was_taken(
    advised: dict[str, Any], clock: VirtualClock
) -> None:
    """Whatever a question names to state has the call repeated, or replaced, without asking."""
    shop = Shop()
    other = shop.tool("other", ValueError)
    if "fallbacks" in advised:
        await run(
            make_engine("repair", clock=clock),
            shop.tool("pay"),
            other,
            fallbacks=[{"tool": "other"}],
        )
        assert shop.executions == {"pay": 1, "other": 1}
    else:
        await run(make_engine("repair", clock=clock), shop.tool("pay", **advised))
        assert shop.executions == {"pay": 3}


async def test_a_call_about_which_nobody_is_asked_tells_what_is_unknown(
    clock: VirtualClock,
) -> None:
    """The error of an agent's call in doubt says how often it was executed, and what to state of its tool."""
    shop = Shop()
    tools = [shop.tool("pay"), shop.tool("sell", retry=THRICE)]
    async with make_engine("repair", clock=clock).session("shop", tools=tools) as session:
        with pytest.raises(ConnectionResetError) as once:
            await session.call(tools[0])
        with pytest.raises(ConnectionResetError) as thrice:
            await session.call(tools[1])
    unknown = "took effect is unknown (executed"
    next_time = "; to have it repeated next time, state for its tool"
    assert once.value.__notes__ == [
        f"whether 'pay' {unknown} once){next_time} {READS}, {HARMLESS}, {CONFIRMED}, or {REPEATED}"
    ]
    assert thrice.value.__notes__ == [
        f"whether 'sell' {unknown} 3 times){next_time} {READS}, {HARMLESS}, or {CONFIRMED}"
    ]

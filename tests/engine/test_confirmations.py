"""Calls that ended without an answer: it is asked whether they were done, before anything else is decided."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from replanning import Plan, PlanRun, Task, TaskContext, tool
from replanning.errors import IllegalTransition, PlanError, StoreError, TransientError
from replanning.history.overview import read_overview
from replanning.journal import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    Lease,
    MemoryStore,
    Record,
    TriggerFired,
)
from replanning.live import TaskState
from replanning.plan import AttemptId, TaskId
from replanning.run.outputs import WithheldOutput
from replanning.testing import VirtualClock
from tests.support.runs import make_engine, perform
from tests.support.tracing import Spans

Answer = Callable[[], object]


class Bank:
    """Applies payments by key, and may lose the answers; it counts what is executed.

    Args:
        lost: how many answers to payments are lost, after the payment was made or before.
        applies: whether the payments of which the answer is lost are made.
        error: what a lost answer raises.
    """

    def __init__(
        self,
        lost: int = 1,
        *,
        applies: bool = True,
        error: Callable[[], BaseException] = lambda: ConnectionResetError("lost"),
    ) -> None:
        self.payments: dict[str, list[object]] = {}
        self.executions: Counter[str] = Counter()
        self.lost = lost
        self.applies = applies
        self.error = error
        self.refuses: list[BaseException] = []
        self.order: list[str] = []

    def pay(self, key: str, amount: object) -> dict[str, object]:
        """Pay, or lose the answer."""
        self.executions["pay"] += 1
        self.order.append("pay")
        is_lost = self.executions["pay"] <= self.lost
        if self.applies or not is_lost:
            self.payments.setdefault(key, []).append(amount)
        if is_lost:
            raise self.error()
        return {"key": key, "amount": amount}

    def find(self, key: str) -> dict[str, object]:
        """Look a payment up, or refuse to."""
        self.executions["find"] += 1
        self.order.append("find")
        if self.refuses:
            raise self.refuses.pop(0)
        found = self.payments.get(key, [])
        return {"found": len(found), "payment": {"key": key, "by": "find"}}

    async def work(self, task: Task, context: TaskContext) -> object:
        """Execute a task by its tool."""
        arguments = context.arguments
        if task.tool == "find":
            return self.find(str(arguments["key"]))
        if task.tool == "pay":
            return self.pay(context.idempotency_key, arguments.get("amount"))
        self.executions[str(task.tool)] += 1
        self.order.append(str(task.tool))
        return f"done by {task.tool}"


CONFIRM = {
    "tool": "find",
    "arguments": {"key": "${idempotency_key}"},
    "when": "output.found > 0",
    "output": "${output.payment}",
}


def payment(
    *,
    pay: Mapping[str, object] = MappingProxyType({}),
    find: Mapping[str, object] = MappingProxyType({}),
    task: Mapping[str, object] = MappingProxyType({}),
    **fields: object,
) -> Plan:
    """A plan that pays, with a tool that looks payments up, and one that could stand in; with these fields of each."""
    tools = [
        {"name": "pay", "capability": "pay", "confirm": CONFIRM, **pay},
        {"name": "find", "effect": "none", **find},
        {"name": "other", "capability": "pay"},
    ]
    tasks = [{"id": "a", "tool": "pay", "arguments": {"amount": 5}, **task}]
    document = {"goal": {"objective": "pay"}, "tools": tools, "tasks": tasks, **fields}
    return Plan.model_validate(document)


def kinds(store: MemoryStore, *wanted: type[Any]) -> list[Any]:
    """The bodies of these kinds on record."""
    (run,) = store.runs()
    return [record.body for record in store.read(run.run) if isinstance(record.body, wanted)]


async def test_what_was_done_is_not_done_again(clock: VirtualClock) -> None:
    """A payment whose acknowledgement was lost has succeeded, with the confirmed output."""
    bank = Bank()
    expected = {"expect": {"where": ["output.found <= 1"]}}
    store = MemoryStore()
    engine = make_engine("repair", clock=clock, store=store)
    result = await engine.execute(payment(find=expected), bank.work)
    assert (result.status, result.outputs, result.revisions) == (
        "succeeded",
        {"a": {"key": "run-1/a", "by": "find"}},
        (),
    )
    assert bank.payments == {"run-1/a": [5]}
    assert bank.executions == {"pay": 1, "find": 1}
    first, second = kinds(store, AttemptStarted)
    assert (first.attempt, first.confirms) == ("a#1", None)
    assert (second.attempt, second.confirms, second.number) == ("a#1-confirm1", "a#1", 1)
    assert kinds(store, TriggerFired) == []


async def test_what_was_not_done_is_done_again(clock: VirtualClock) -> None:
    """A payment that was not made is tried again like any call that had no effect."""
    bank = Bank(applies=False)
    store = MemoryStore()
    engine = make_engine("repair", clock=clock, store=store)
    result = await engine.execute(payment(), bank.work)
    assert result.status == "succeeded"
    assert result.outputs == {"a": {"key": "run-1/a", "amount": 5}}
    assert bank.order == ["pay", "find", "pay"]
    lost, not_done = (body.failure for body in kinds(store, AttemptFailed))
    assert (lost.in_doubt, not_done.in_doubt, not_done.not_done) == (True, False, True)
    assert not_done.message == "lost; a confirmation showed that it was not done"


async def test_a_stand_in_comes_after_the_confirmation(clock: VirtualClock) -> None:
    """Once the payment is known not to be made, and its own attempts are used up, another tool pays."""
    bank = Bank(lost=9, applies=False)
    engine = make_engine("repair", clock=clock)
    result = await engine.execute(payment(task={"retry": {"max_attempts": 1}}), bank.work)
    assert result.status == "succeeded"
    assert bank.order == ["pay", "find", "other"]


async def test_no_stand_in_where_it_was_done(clock: VirtualClock) -> None:
    """Whatever was declared for failures, a payment that was made is not made by another tool."""
    bank = Bank()
    plan = payment(task={"retry": {"max_attempts": 3}, "fallbacks": [{"tool": "other"}]})
    result = await make_engine("repair", clock=clock).execute(plan, bank.work)
    assert result.status == "succeeded"
    assert bank.order == ["pay", "find"]


async def test_what_nobody_can_tell_is_put_to_a_person(clock: VirtualClock) -> None:
    """If the confirmation fails, the payment is in doubt as without it, and it is told what was asked."""
    bank = Bank()
    bank.refuses = [ValueError("no access")]
    store = MemoryStore()
    engine = make_engine("repair", clock=clock, store=store, approval={"on_timeout": "pause"})
    result = await engine.execute(payment(), bank.work)
    assert result.status in ("needs_human", "failed")
    assert bank.order == ["pay", "find"]
    (fired,) = kinds(store, TriggerFired)
    assert fired.trigger.reason == (
        "task 'a' with 'pay' failed: ConnectionResetError: lost; it could not be confirmed: ValueError: no access"
        " (asked 'find' with {'key': 'run-1/a'} whether it was done)"
    )
    assert result.revisions == ()


async def test_a_confirmation_that_may_pass_is_repeated(clock: VirtualClock) -> None:
    """The tool that is asked is tried again as its own retries say, which count for nothing else."""
    bank = Bank()
    bank.refuses = [TransientError("busy"), TimeoutError("slow")]
    result = await make_engine("repair", clock=clock).execute(payment(), bank.work)
    assert result.status == "succeeded"
    assert bank.order == ["pay", "find", "find", "find"]


async def test_confirmations_have_a_limit(clock: VirtualClock) -> None:
    """After its last attempt the tool is asked no more."""
    bank = Bank()
    bank.refuses = [TransientError("busy") for _ in range(9)]
    plan = payment(find={"retry": {"max_attempts": 4, "delay": 10.0}})
    began = clock.now()
    result = await make_engine("repair", clock=clock).execute(plan, bank.work)
    assert result.status != "succeeded"
    assert bank.executions == {"pay": 1, "find": 4}
    assert clock.now() - began > 60


async def test_a_stated_retry_waits_for_the_confirmation(clock: VirtualClock) -> None:
    """Retries that are stated for calls in doubt follow only where nobody could tell."""
    bank = Bank()
    bank.refuses = [ValueError("no access")]
    plan = payment(task={"retry": {"max_attempts": 3}})
    result = await make_engine("repair", clock=clock).execute(plan, bank.work)
    assert result.status == "succeeded"
    assert bank.order == ["pay", "find", "pay"]


async def test_a_timeout_is_confirmed(clock: VirtualClock) -> None:
    """A call that ran into its deadline is in doubt; meanwhile its task runs, and keeps its resources."""
    bank = Bank(lost=0)
    seen: list[tuple[str, float, bool]] = []

    async def work(task: Task, context: TaskContext) -> object:
        if task.tool == "find":
            live = runs[0].live
            entry = live.entry(TaskId("a"))
            seen.append((entry.state, live.scheduler.pool.used["till"], entry.log.in_doubt))
        output = await bank.work(task, context)
        if task.tool == "pay":
            await clock.sleep(60)
        return output

    runs: list[PlanRun] = []
    plan = payment(task={"timeout": 5, "resources": {"till": 1}}, resources={"till": 1})
    engine = make_engine("repair", clock=clock)
    async with engine.open(plan) as run:
        runs.append(run)
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await work(task, attempt.context)
    assert run.result.status == "succeeded"
    assert bank.order == ["pay", "find"]
    assert seen == [(TaskState.RUNNING, 1.0, True)]
    assert run.live.scheduler.pool.used == {"till": 0.0}


async def test_a_confirmation_times_out(clock: VirtualClock) -> None:
    """The tool that is asked has its own time, after which nobody knows."""
    bank = Bank()

    async def work(task: Task, context: TaskContext) -> object:
        output = await bank.work(task, context)
        if task.tool == "find":
            await clock.sleep(60)
        return output

    plan = payment(find={"timeout": 3, "retry": {"max_attempts": 2}})
    store = MemoryStore()
    result = await make_engine("repair", clock=clock, store=store).execute(plan, work)
    assert result.status != "succeeded"
    assert bank.executions == {"pay": 1, "find": 2}
    (fired,) = kinds(store, TriggerFired)
    assert (
        "it could not be confirmed: TimedOut: ran into its deadline after 3 s"
        in fired.trigger.reason
    )


async def test_an_unexpected_output_is_confirmed(clock: VirtualClock) -> None:
    """An answer of a changing call that makes no sense leaves open whether it was done."""
    for applies in (True, False):
        bank = Bank(lost=0)

        async def work(
            task: Task, context: TaskContext, bank: Bank = bank, applies: bool = applies
        ) -> object:
            if task.tool != "pay":
                return await bank.work(task, context)
            bank.order.append("pay")
            if applies:
                bank.payments[context.idempotency_key] = [5]
            return {"oops": True}

        plan = payment(pay={"expect": {"where": ['"key" in arguments or output.key != ""']}})
        result = await make_engine("repair", clock=clock).execute(plan, work)
        if applies:
            assert result.outputs == {"a": {"key": "run-1/a", "by": "find"}}
            assert bank.order == ["pay", "find"]
        else:
            assert bank.order == ["pay", "find"] * 3 + ["other"]


async def test_a_confirmed_output_must_be_as_expected(clock: VirtualClock) -> None:
    """What was confirmed is held to what the tool expects of its output, like any output."""
    bank = Bank()
    plan = payment(pay={"expect": {"where": ["output.amount == 5"]}})
    result = await make_engine("repair", clock=clock).execute(plan, bank.work)
    assert result.status != "succeeded"
    assert bank.executions == {"pay": 1, "find": 1}


async def test_what_the_asked_tool_expects_is_about_its_own_call(clock: VirtualClock) -> None:
    """Conditions of the tool that is asked see the arguments with which it is asked."""
    bank = Bank()
    expect = {"where": ["output.payment.key == arguments.key"]}

    async def work(task: Task, context: TaskContext) -> object:
        output = await bank.work(task, context)
        if task.tool == "find":
            return {"found": 1, "payment": {"key": context.arguments["key"]}}
        return output

    result = await make_engine("repair", clock=clock).execute(
        payment(find={"expect": expect}), work
    )
    assert (result.status, bank.order) == ("succeeded", ["pay", "find"])


async def test_a_cancelled_caller(clock: VirtualClock) -> None:
    """A call whose caller is cancelled is in doubt; the next call with its key finds out what became of it."""
    bank = Bank(lost=0)

    @tool(name="find", effect="none")
    async def find(idempotency_key: str) -> object:
        return bank.find(idempotency_key)["payment"]

    @tool(confirm=find)
    async def pay(amount: int, context: TaskContext) -> object:
        output = bank.pay(context.idempotency_key, amount)
        await anyio.sleep_forever()
        return output

    async with make_engine("repair", clock=clock).session("pay", tools=[pay]) as session:
        with anyio.move_on_after(0):
            await session.invoke("pay", {"amount": 5}, key="one")
        output = await session.invoke("pay", {"amount": 5}, key="one")
    assert output == {"key": "run-1/pay-1", "by": "find"}
    assert bank.executions == {"pay": 1, "find": 1}


async def test_a_thread_that_goes_on(clock: VirtualClock) -> None:
    """A call is not repeated while its thread may still do what it was not seen to have done."""
    payments: list[int] = []
    release, ended = threading.Event(), threading.Event()
    asked: list[int] = []

    async def find(amount: int) -> str | None:
        found = len(payments)
        asked.append(found)
        release.set()
        # What the thread does now is not in the answer.
        await anyio.to_thread.run_sync(ended.wait)
        return "paid" if found else None

    @tool(confirm=find)
    def pay(amount: int) -> str:
        anyio.from_thread.run_sync(scope.cancel)
        release.wait()
        payments.append(amount)
        ended.set()
        return "too late"

    async with make_engine("repair", clock=clock).session("pay", tools=[pay]) as session:
        with anyio.CancelScope() as scope:
            await session.invoke("pay", {"amount": 5}, key="one")
        output = await session.invoke("pay", {"amount": 5}, key="one")
    assert (output, payments, asked) == ("paid", [5], [0, 1])


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("applies", [True, False])
async def test_functions(clock: VirtualClock, is_async: bool, applies: bool) -> None:
    """In Python a function confirms: it returns the output of the call, or None if it was not done."""
    bank = Bank(applies=applies)
    asked: list[tuple[int, str]] = []

    def find_payment(
        amount: int, idempotency_key: str, currency: str = "EUR"
    ) -> dict[str, str] | None:
        asked.append((amount, currency))
        if idempotency_key not in bank.payments:
            return None
        return {"by": "find_payment"}

    async def find_later(amount: int, idempotency_key: str) -> dict[str, str] | None:
        return find_payment(amount, idempotency_key)

    confirm: Callable[..., object] = find_later if is_async else find_payment

    @tool(confirm=confirm)
    async def pay(amount: int, context: TaskContext) -> object:
        return bank.pay(context.idempotency_key, amount)

    plan = Plan.model_validate(
        {
            "goal": {"objective": "pay"},
            "tasks": [{"id": "a", "tool": "pay", "arguments": {"amount": 5}}],
        }
    )
    result = await make_engine("repair", clock=clock).execute(plan, tools=[pay])
    assert result.status == "succeeded"
    if applies:
        assert result.outputs == {"a": {"by": "find_payment"}}
    assert asked == [(5, "EUR")]
    assert bank.payments == {"run-1/a": [5]}


@pytest.mark.parametrize("described", [True, False])
async def test_calls_of_a_session(clock: VirtualClock, described: bool) -> None:
    """A call of an agent gets the confirmed output, as it would have got that of its tool."""
    bank = Bank()

    def find_payment(idempotency_key: str) -> object:
        return {"paid": bank.payments[idempotency_key]}

    @tool(confirm=find_payment)
    async def pay(amount: int, context: TaskContext) -> object:
        return bank.pay(context.idempotency_key, amount)

    tools = [pay] if described else []
    async with make_engine("repair", clock=clock).session("pay", tools=tools) as session:
        assert await session.call(pay, 5) == {"paid": [5]}
    assert bank.executions["pay"] == 1


async def test_a_call_that_nobody_can_confirm_fails_with_its_own_error(clock: VirtualClock) -> None:
    """Where the confirmation raises, the call raises the error of its own tool, which says what is unknown, and why."""
    bank = Bank()

    def find_payment(idempotency_key: str) -> object:
        raise KeyError(idempotency_key)

    @tool(confirm=find_payment)
    async def pay(amount: int, context: TaskContext) -> object:
        return bank.pay(context.idempotency_key, amount)

    async with make_engine("repair", clock=clock).session("pay", tools=[pay]) as session:
        with pytest.raises(ConnectionResetError) as raised:
            await session.call(pay, 5)
    (note,) = raised.value.__notes__
    assert note.startswith(
        "whether 'pay' took effect is unknown (executed once), and it could not be confirmed: KeyError: 'run-1/pay-1'"
        " (asked 'find_payment' with {'idempotency_key': 'run-1/pay-1'} whether it was done); to have it repeated"
    )
    assert bank.executions["pay"] == 1


@pytest.mark.parametrize("answer", [True, False])
async def test_a_boolean_does_not_tell(clock: VirtualClock, answer: bool) -> None:
    """A function that returns whether the call was done, and not its output, leaves it in doubt and is told what to return."""
    bank = Bank()

    def was_paid(idempotency_key: str) -> object:
        return answer

    @tool(confirm=was_paid)
    async def pay(amount: int, context: TaskContext) -> object:
        return bank.pay(context.idempotency_key, amount)

    async with make_engine("repair", clock=clock).session("pay", tools=[pay]) as session:
        with pytest.raises(ConnectionResetError) as raised:
            await session.call(pay, 5)
    (note,) = raised.value.__notes__
    advice = (
        "return the output of the call, None if it was not done, and raise if that cannot be told"
    )
    assert f"{answer} does not say whether it was done; {advice} (asked 'was_paid'" in note
    assert bank.executions["pay"] == 1


async def test_a_condition_on_a_boolean(clock: VirtualClock) -> None:
    """A plan that states what a boolean means is understood."""
    bank = Bank(applies=False)

    async def work(task: Task, context: TaskContext) -> object:
        output = await bank.work(task, context)
        return bool(bank.payments) if task.tool == "find" else output

    plan = payment(pay={"confirm": {**CONFIRM, "when": "output == true"}})
    result = await make_engine("repair", clock=clock).execute(plan, work)
    assert (result.status, bank.order) == ("succeeded", ["pay", "find", "pay"])


def test_a_function_that_returns_a_boolean_is_refused() -> None:
    """A function that is annotated to return a boolean cannot confirm a call, as a function or as a tool."""

    def was_paid(idempotency_key: str) -> bool:
        return True

    for confirm in (was_paid, tool(effect="none")(was_paid)):
        with pytest.raises(
            ValueError,
            match=r"^tool 'pay': confirm: 'was_paid' returns a boolean, which is ambiguous; return the output of",
        ):

            @tool(confirm=confirm)
            async def pay(amount: int) -> None: ...


# Leaving, pausing and resuming


async def test_a_run_that_is_left_is_confirmed_when_it_is_resumed(clock: VirtualClock) -> None:
    """A resumed run asks first what became of the calls that were running."""
    bank = Bank(lost=0)
    store = MemoryStore()
    plan = payment()

    async def stuck(task: Task, context: TaskContext) -> object:
        await bank.work(task, context)
        scope.cancel()
        await anyio.sleep_forever()
        return None

    engine = make_engine("repair", clock=clock, store=store)
    with anyio.CancelScope() as scope:
        async with engine.open(plan, run_id="r") as run:
            await perform(run, stuck)
    (cut_off,) = kinds(store, AttemptInterrupted)
    assert (cut_off.retry_at is None, cut_off.confirm_at is None) == (True, False)
    async with engine.resume("r") as resumed:
        await perform(resumed, bank.work)
    assert resumed.result.status == "succeeded"
    assert bank.order == ["pay", "find"]


async def test_a_pause_leaves_the_question_for_the_resume(clock: VirtualClock) -> None:
    """A run that is to pause does not wait for the next confirmation; the resumed run asks first."""
    bank = Bank()
    bank.refuses = [TransientError("busy")]
    store = MemoryStore()
    engine = make_engine("repair", clock=clock, store=store)
    plan = payment(find={"retry": {"max_attempts": 3, "delay": 1000.0, "jitter": False}})
    async with engine.open(plan, run_id="r") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                if task.tool == "find":
                    run.pause("later")
                attempt.output = await bank.work(task, attempt.context)
    assert run.result.status == "paused"
    assert bank.order == ["pay", "find"]
    (info,) = store.runs()
    (row,) = read_overview(store, info, clock.now()).tasks
    assert row.note == "ConnectionResetError: lost; asking again in 16 min 40 s whether it was done"
    async with engine.resume("r") as resumed:
        await perform(resumed, bank.work)
    assert resumed.result.status == "succeeded"
    assert bank.order == ["pay", "find", "find"]


async def test_a_cancelled_task_is_not_asked_about(clock: VirtualClock) -> None:
    """A person may cancel a task whose effect is in doubt, and the end of the run says that it is."""
    bank = Bank()
    bank.refuses = [TransientError("busy")]
    plan = payment(task={"optional": True, "resources": {"till": 1}}, resources={"till": 1})
    async with make_engine("repair", clock=clock).open(plan) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await bank.work(task, attempt.context)
            if task.tool == "find":
                run.cancel_task("a", reason="never mind")
    assert run.live.entry(TaskId("a")).state is TaskState.CANCELLED
    assert run.live.scheduler.pool.used == {"till": 0.0}
    assert bank.order == ["pay", "find"]
    assert "it is unknown whether 'a' took effect" in run.result.reason


# Plans


@pytest.mark.parametrize(
    ("confirm", "place", "problem"),
    [
        ({"tool": "fnd"}, "tools[0].confirm.tool", "there is no tool 'fnd'; did you mean 'find'?"),
        (
            {"tool": "other"},
            "tools[0].confirm.tool",
            "'other' may change something; state `effect: none`",
        ),
        ({"arguments": {"id": 1}}, "tools[0].confirm.arguments.id", "has no parameter 'id'"),
        (
            {"arguments": {"key": "${a.output}"}},
            "tools[0].confirm.arguments",
            "is not a reference here: write",
        ),
        (
            {"output": "${outputs.x}"},
            "tools[0].confirm.output",
            "is not a reference here: write ${output}",
        ),
        ({"output": "paid ${"}, "tools[0].confirm.output", "'${' is not a reference here"),
        ({"when": "outputs > 0"}, "tools[0].confirm.when", "cannot read 'outputs'"),
    ],
)
def test_a_plan_is_checked(confirm: dict[str, Any], place: str, problem: str) -> None:
    """What cannot be asked is refused with the plan, and the error says where."""
    with pytest.raises(PlanError) as refused:
        payment(pay={"confirm": {**CONFIRM, **confirm}}, find={"parameters": {"key": "string"}})
    found = "\n".join(map(str, refused.value.problems))
    assert place in found
    assert problem in found


def test_the_confirmation_of_a_task_is_checked() -> None:
    """What a task itself states is checked like what its tool does."""
    with pytest.raises(PlanError, match=r"tasks\[0\]\.confirm\.tool: .*there is no tool 'fnd'"):
        payment(task={"confirm": {**CONFIRM, "tool": "fnd"}})


def test_what_is_asked_is_not_refused_without_need() -> None:
    """A tool that a server may have is left to the server, and a plan that describes no tool may name any."""
    server = {"shop": {"url": "http://shop.example"}}
    payment(pay={"confirm": {**CONFIRM, "tool": "shop.find"}}, mcp=server)
    task = {"id": "a", "tool": "pay", "confirm": CONFIRM}
    Plan.model_validate({"goal": {"objective": "pay"}, "tasks": [task]})


def test_a_dangerous_tool_is_not_asked() -> None:
    """A tool that may do harm is not used without a question, not even to ask it something."""
    with pytest.raises(PlanError, match="'find' is `dangerous`, and would be used without asking"):
        payment(find={"dangerous": True})


async def test_tools_that_are_not_described(clock: VirtualClock) -> None:
    """A plan made in Python states the confirmation of a task, whatever its tools are to the work."""
    bank = Bank()
    task = {"id": "a", "tool": "pay", "confirm": CONFIRM, "timeout": 9}
    plan = Plan.model_validate({"goal": {"objective": "pay"}, "tasks": [task]})
    result = await make_engine("repair", clock=clock).execute(plan, bank.work)
    assert (result.status, bank.order) == ("succeeded", ["pay", "find"])


async def test_a_fallback_has_its_own_confirmation(clock: VirtualClock) -> None:
    """What a task says about its own tool says nothing about the tool that stands in for it."""
    bank = Bank(lost=9, applies=False)
    asked: list[str] = []

    async def work(task: Task, context: TaskContext) -> object:
        if task.tool == "other":
            asked.append(context.tool.name if context.tool is not None else "")
            raise ConnectionResetError("lost as well")
        return await bank.work(task, context)

    plan = payment(pay={"confirm": None}, task={"confirm": CONFIRM, "retry": {"max_attempts": 1}})
    result = await make_engine("repair", clock=clock).execute(plan, work)
    assert result.status != "succeeded"
    assert (bank.order, asked) == (["pay", "find"], ["other"])


@pytest.mark.parametrize(
    ("confirm", "find", "problem"),
    [
        ({}, {"available": False}, "'find' is unavailable"),
        ({"arguments": {"key": "${context.nothing}"}}, {}, "'nothing' does not exist"),
        ({"when": "output.nothing > 0"}, {}, "output.nothing does not exist"),
        ({"output": {"id": "payment ${output.nothing}"}}, {}, "'nothing' does not exist"),
        ({}, {"expect": {"where": ["output.found > 7"]}}, "expected output.found > 7"),
    ],
)
async def test_why_nobody_can_tell(
    confirm: Mapping[str, object], find: Mapping[str, object], problem: str, clock: VirtualClock
) -> None:
    """The reason says why there is no answer, and the call is in doubt as without a confirmation."""
    bank = Bank()
    store = MemoryStore()
    plan = payment(pay={"confirm": {**CONFIRM, **confirm}}, find=find)
    result = await make_engine("repair", clock=clock, store=store).execute(plan, bank.work)
    assert result.status != "succeeded"
    reasons = [fired.trigger.reason for fired in kinds(store, TriggerFired)]
    assert any("could not be confirmed: " in each and problem in each for each in reasons), reasons
    assert bank.executions["pay"] == 1


async def test_parts_of_texts(clock: VirtualClock) -> None:
    """References stand in longer texts, and a doubled dollar sign for itself."""
    bank = Bank()
    arguments = {"key": "${idempotency_key}", "note": "$${5} of ${arguments.amount}"}
    seen: list[object] = []

    async def work(task: Task, context: TaskContext) -> object:
        if task.tool == "find":
            seen.append(dict(context.arguments))
        return await bank.work(task, context)

    confirm = {
        **CONFIRM,
        "arguments": arguments,
        "output": ["${output.found}", "paid: ${output.found}"],
    }
    plan = payment(pay={"confirm": confirm})
    result = await make_engine("repair", clock=clock).execute(plan, work)
    assert seen == [{"key": "run-1/a", "note": "${5} of 5"}]
    assert result.outputs == {"a": [1, "paid: 1"]}


async def test_a_secret_that_a_resumed_run_lacks(clock: VirtualClock) -> None:
    """What the journal has a mask for is not sent to the tool that is asked."""
    secret = "sk-" + "a1b2c3d4" * 6
    bank = Bank()
    bank.refuses = [TransientError("busy")]
    store = MemoryStore()
    engine = make_engine("repair", clock=clock, store=store)
    confirm = {**CONFIRM, "arguments": {"key": "${context.password}"}}
    plan = payment(pay={"confirm": confirm}, context={"password": secret})
    async with engine.open(plan, run_id="r") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                if task.tool == "find":
                    run.pause("later")
                attempt.output = await bank.work(task, attempt.context)
    async with engine.resume("r") as resumed:
        await perform(resumed, bank.work)
    assert bank.order == ["pay", "find"]
    assert resumed.result.status != "succeeded"


async def test_an_output_that_is_too_large_is_confirmed(clock: VirtualClock) -> None:
    """A call whose output cannot be kept was done; the confirmation has an output that can be."""
    bank = Bank(lost=0)

    async def work(task: Task, context: TaskContext) -> object:
        output = await bank.work(task, context)
        return "x" * 5_000 if task.tool == "pay" else output

    engine = make_engine("repair", clock=clock, max_output=1_000)
    result = await engine.execute(payment(), work)
    assert result.outputs == {"a": {"key": "run-1/a", "by": "find"}}
    assert bank.order == ["pay", "find"]


async def test_a_lineage_that_somebody_performs(clock: VirtualClock) -> None:
    """Whoever executes a task alone confirms it; left halfway, the workers of the run do."""
    bank = Bank()
    bank.refuses = [TransientError("busy")]
    async with make_engine("repair", clock=clock).open(payment()) as run:
        with anyio.CancelScope() as scope:

            async def work(task: Task, context: TaskContext) -> object:
                if task.tool == "find":
                    scope.cancel()
                    await anyio.sleep_forever()
                return await bank.work(task, context)

            await run.perform("a", work)
        assert run.live.entry(TaskId("a")).awaits_confirmation
        await perform(run, bank.work)
    assert run.result.status == "succeeded"
    assert bank.order == ["pay", "find", "find"]


async def test_what_is_shown(clock: VirtualClock) -> None:
    """Status, tasks and spans tell of a call in doubt."""
    bank = Bank()
    spans = Spans()
    store = MemoryStore()
    engine = make_engine("repair", clock=clock, store=store, tracer_provider=spans.provider)
    shown: list[object] = []

    async def work(task: Task, context: TaskContext) -> object:
        if task.tool == "find":
            (info,) = store.runs()
            overview = read_overview(store, info, clock.now())
            (row,) = overview.tasks
            shown.append((overview.status.tasks.running[0].in_doubt, row.look.word, row.note))
        return await bank.work(task, context)

    await engine.execute(payment(), work)
    note = "ConnectionResetError: lost; asking whether it was done"
    assert shown == [(True, "in doubt", note)]
    first, second = [dict(span.attributes or {}) for span in spans.named("replanning.attempt")]
    assert first["replanning.attempt.in_doubt"] is True
    assert (first["replanning.task.tool"], first["replanning.attempt.outcome"]) == ("pay", "failed")
    assert second["replanning.attempt.confirms"] == "a#1"
    assert (second["replanning.task.tool"], second["replanning.attempt.outcome"]) == (
        "find",
        "succeeded",
    )


async def test_an_answer_of_an_agents_tool_that_makes_no_sense(clock: VirtualClock) -> None:
    """An agent gets the confirmed output in the place of one that was not as expected."""
    keys: list[str] = []

    def find_payment(idempotency_key: str) -> dict[str, list[str]]:
        return {"paid": keys}

    @tool(confirm=find_payment, expect={"where": ["len(output.paid) == 1"]})
    async def pay(context: TaskContext) -> dict[str, str]:
        keys.append(context.idempotency_key)
        return {"oops": "it makes no sense"}

    async with make_engine("repair", clock=clock).session(
        "pay", tools=[pay], run_id="r"
    ) as session:
        assert await session.call(pay) == {"paid": ["r/pay-1"]}


@pytest.mark.parametrize("answer", [object(), WithheldOutput("it holds a secret")])
async def test_an_answer_that_cannot_be_read(answer: object, clock: VirtualClock) -> None:
    """An answer without a JSON form, or that must stay elsewhere, tells nothing."""
    bank = Bank()

    async def work(task: Task, context: TaskContext) -> object:
        return answer if task.tool == "find" else await bank.work(task, context)

    result = await make_engine("repair", clock=clock).execute(payment(), work)
    assert result.status != "succeeded"
    assert bank.executions == {"pay": 1}


async def test_an_object_that_an_argument_refers_to(clock: VirtualClock) -> None:
    """A result without a JSON form cannot be part of a question."""
    bank = Bank()

    async def work(task: Task, context: TaskContext) -> object:
        return object() if task.id == "before" else await bank.work(task, context)

    arguments = {"key": "${results.before}"}
    tasks = [{"id": "before"}, {"id": "a", "tool": "pay", "depends_on": ["before"]}]
    plan = payment(pay={"confirm": {**CONFIRM, "arguments": arguments}}, tasks=tasks)
    result = await make_engine("repair", clock=clock).execute(plan, work)
    assert "object" in str(result.failures["a"])
    assert bank.order == ["pay"]


class FailingStore(MemoryStore):
    """A store that fails for a time when a confirmation is to begin."""

    failures = 2

    def append(self, lease: Lease, record: Record) -> None:
        """Write a record, or fail."""
        body = record.body
        if isinstance(body, AttemptStarted) and body.confirms is not None and self.failures:
            self.failures -= 1
            raise StoreError("it is full")
        super().append(lease, record)


@pytest.mark.parametrize("arguments", [CONFIRM["arguments"], {"key": "${context.nothing}"}])
async def test_a_store_that_fails(arguments: object, clock: VirtualClock) -> None:
    """While the store fails nobody is asked, and afterwards somebody is."""
    bank = Bank()
    store = FailingStore()
    plan = payment(pay={"confirm": {**CONFIRM, "arguments": arguments}})
    result = await make_engine("repair", clock=clock, store=store).execute(plan, bank.work)
    assert store.failures == 0
    if arguments == CONFIRM["arguments"]:
        assert (result.status, bank.order) == ("succeeded", ["pay", "find"])
    else:
        assert "could not be confirmed" in str(result.failures["a"])


async def test_a_lineage_in_doubt_that_is_taken_over(clock: VirtualClock) -> None:
    """A task in doubt belongs to whoever executes its lineage alone."""
    bank = Bank()
    async with make_engine("repair", clock=clock).open(payment()) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await bank.work(task, attempt.context)
            break
        life = run._lifecycle
        life.reserve(life.live.entry(TaskId("a")))
        assert life.live.scheduler.claim_next() is None
        life.unreserve(life.live.entry(TaskId("a")))
        await perform(run, bank.work)
    assert (run.result.status, bank.order) == ("succeeded", ["pay", "find"])


async def test_a_journal_that_confirms_what_is_not_in_doubt(clock: VirtualClock) -> None:
    """A record of a confirmation fits a task in doubt alone, and changes nothing otherwise."""
    async with make_engine("repair", clock=clock).open(payment()) as run:
        started = AttemptStarted(
            AttemptId("a#1-confirm1"), TaskId("a"), 1, confirms=AttemptId("a#1")
        )
        with pytest.raises(IllegalTransition, match="not in doubt"):
            run.live.fold(Record(99, 0.0, started))
        assert run.live.entry(TaskId("a")).state is TaskState.READY


async def test_arguments_that_change_meanwhile(clock: VirtualClock) -> None:
    """What is asked about is the call that was made, whatever its arguments refer to by then."""
    confirm = {"tool": "find", "arguments": {"key": "${arguments.order}"}, "when": "output.found"}
    task = {"arguments": {"order": "${context.order}"}}
    document = payment(pay={"confirm": confirm}, task=task, context={"order": "A"})
    asked: list[object] = []

    async def work(task: Task, context: TaskContext) -> object:
        if task.tool == "find":
            asked.append(context.arguments["key"])
            return {"found": True}
        context.change_context({"order": "B"})
        raise ConnectionResetError("lost")

    result = await make_engine("repair", clock=clock).execute(document, work)
    assert (result.status, asked) == ("succeeded", ["A"])


async def test_a_call_whose_arguments_cannot_be_filled_in_again(clock: VirtualClock) -> None:
    """A resumed run whose call refers to an output that was not stored cannot ask about it."""
    store = MemoryStore()
    confirm = {"tool": "find", "arguments": {"key": "${arguments.order}"}, "when": "output.found"}
    made = {"id": "made", "tool": "other"}
    arguments = {"order": "${made.output.number}"}
    paid = {"id": "a", "tool": "pay", "depends_on": ["made"], "arguments": arguments}
    plan = payment(pay={"confirm": confirm}, tasks=[made, paid])
    order: list[str | None] = []

    async def work(task: Task, context: TaskContext) -> object:
        order.append(task.tool)
        if task.tool == "pay":
            scope.cancel()
            await anyio.sleep_forever()
        return {"number": 7, "connection": object()}

    engine = make_engine("repair", clock=clock, store=store)
    with anyio.CancelScope() as scope:
        await engine.execute(plan, work, run_id="r")
    async with engine.resume("r") as resumed:
        await perform(resumed, work)
    assert order == ["other", "pay"]
    assert resumed.result.status == "needs_human"
    (failed,) = [body for body in kinds(store, AttemptFailed) if body.attempt == "a#1-confirm1"]
    assert "was not stored" in failed.failure.message
    assert failed.failure.message.endswith("('find' was not asked whether it was done)")


async def test_a_second_tool_is_not_asked_about_a_confirmation(clock: VirtualClock) -> None:
    """What confirms a call is not held against the tool that must say the same as the call."""
    bank = Bank()
    pay = {"expect": {"agrees_with": "find"}}
    document = payment(pay=pay, find={"capability": "pay"})
    result = await make_engine(clock=clock).execute(document, bank.work)
    assert (result.status, bank.order) == ("succeeded", ["pay", "find"])

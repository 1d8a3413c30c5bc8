"""What a run has changed is taken back, by tasks that one revision adds to it."""

from collections.abc import Callable
from typing import Any

import pytest

from replanning import (
    Alternative,
    Budget,
    Plan,
    ReplanningEngine,
    ReplanRequest,
    Task,
    TaskContext,
)
from replanning.changes import AbortRun, AddTask, ModifyTask, PlanChange, SkipTask
from replanning.errors import ChangeRejected, NotRunning, UnknownTask
from replanning.history.effects import effects_so_far
from replanning.journal import (
    AlternativesConsidered,
    AttemptStarted,
    AttemptSucceeded,
    DecisionMade,
    InboxMessage,
    MemoryStore,
    PlanRevised,
    RunStore,
)
from replanning.plan import JsonObject, TaskId
from replanning.plan.tasks import Confirmation
from tests.support.live import journaled, task, tool
from tests.support.resume import RUN, cut
from tests.support.runs import alternative, bodies, make_engine, perform

TRIP = Plan.parse("""
goal: {objective: Book a trip}
tools:
  - {name: search, effect: none}
  - {name: book, effect: reversible, undo: {tool: cancel, arguments: {id: "${output.id}", what: "${arguments.what}"}}}
  - {name: cancel, parameters: {id: string, what: string}, idempotent: true}
  - {name: mail, effect: irreversible}
tasks:
  - {id: find, tool: search}
  - {id: car, tool: book, arguments: {what: car}, depends_on: [find]}
  - {id: hotel, tool: book, arguments: {what: hotel}, depends_on: [find]}
  - {id: flight, tool: book, arguments: {what: "${find.output}"}, depends_on: [car, hotel]}
  - {id: tell, tool: mail, depends_on: [flight], optional: true}
""")


class Desk:
    """Work that books and cancels; it remembers what it was asked to do, and fails where it is told to."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, task: Task, context: TaskContext) -> Any:
        """Do what a task asks for."""
        if task.id in self.fails:
            raise ValueError(f"{task.id} is sold out")
        self.calls.append((task.id, dict(task.arguments)))
        return "flight" if task.tool == "search" else {"id": f"{task.id}-1"}

    @property
    def cancelled(self) -> list[tuple[str, str]]:
        """What was cancelled, in order."""
        return [(given["what"], given["id"]) for _, given in self.calls if "id" in given]


async def played(desk: Desk, store: RunStore | None = None, plan: Plan = TRIP) -> ReplanningEngine:
    """An engine whose run has come to its end."""
    engine = make_engine(store=store or MemoryStore())
    await engine.execute(plan, desk, run_id=RUN, max_concurrency=1)
    return engine


async def resumed(engine: ReplanningEngine, desk: Desk) -> Any:
    """The result of the run, which is resumed."""
    async with engine.resume(RUN) as run:
        await perform(run, desk)
    return run.result


async def test_a_failed_run_is_taken_back() -> None:
    """What was done is taken back in reverse order, what had failed is given up, and the run ends as aborted."""
    desk = Desk("flight")
    engine = await played(desk)
    plan = engine.undo(RUN, by="ada", reason="sold out")
    assert list(plan.compensations) == ["undo-hotel", "undo-car"]
    assert plan.cancelled == ("flight", "tell")
    result = await resumed(engine, desk)
    assert (result.status, result.reason) == ("aborted", "sold out")
    assert sorted(desk.cancelled) == [("car", "car-1"), ("hotel", "hotel-1")]
    (revised,) = bodies(engine.store, RUN, PlanRevised)
    assert (revised.by, revised.reason, revised.takes_back) == ("ada", "sold out", True)
    assert [effect.undone for effect in engine.history(RUN).effects()] == [True, True]


async def test_a_run_that_has_succeeded_is_taken_back() -> None:
    """It is reopened; a person decides about what no task can take back, and nothing happens before."""
    desk = Desk()
    engine = await played(desk)
    (undecided,) = engine.compare_undo(RUN).undecided
    assert (undecided.effect.task, undecided.why) == ("tell", "its effect is irreversible")
    preview = engine.compare_undo(RUN, by_hand=["tell"])
    assert "+ undo-tell: undoes: tell#1 [SKIPPED]" in preview.diff
    assert preview.changes[-1] == SkipTask(task_id="undo-tell", reason="it was taken back by hand")
    with pytest.raises(ChangeRejected, match="'tell' cannot be taken back by a task: its effect"):
        engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "succeeded"

    plan = engine.undo(RUN, by_hand=["tell"], by="ada")
    assert list(plan.compensations) == ["undo-tell", "undo-flight", "undo-hotel", "undo-car"]
    result = await resumed(engine, desk)
    assert (result.status, result.reason) == ("aborted", "what the run had changed is taken back")
    assert desk.cancelled[0] == ("flight", "flight-1")
    assert sorted(desk.cancelled[1:]) == [("car", "car-1"), ("hotel", "hotel-1")]
    *others, told = engine.history(RUN).effects()
    assert [str(effect.compensation_state) for effect in others] == ["DONE"] * 3
    assert (told.compensation_state, told.undone) == ("SKIPPED", True)
    live = engine.history(RUN).replay()
    assert live.entry(TaskId("undo-tell")).reason == "it was taken back by hand, says ada"


async def test_undoing_twice_does_nothing() -> None:
    """What was taken back, or is being taken back, is not taken back again; what a person left is asked about again."""
    desk = Desk()
    engine = await played(desk)
    engine.undo(RUN, leave=["tell"])
    engine.undo(RUN, leave=["tell"])
    assert (await resumed(engine, desk)).status == "aborted"
    assert len(desk.cancelled) == 3

    assert not engine.undo(RUN, leave=["tell"]).changes
    assert (await resumed(engine, desk)).status == "aborted"
    assert len(desk.cancelled) == 3
    assert [one.effect.task for one in engine.compare_undo(RUN).undecided] == ["tell"]


async def test_a_part_is_taken_back() -> None:
    """Only named tasks, or only what follows a task, is taken back."""
    desk = Desk()
    engine = await played(desk)
    engine.undo(RUN, only=["hotel"])
    result = await resumed(engine, desk)
    assert (result.status, desk.cancelled) == ("succeeded", [("hotel", "hotel-1")])

    plan = engine.undo(RUN, to="car", leave=["tell"])
    assert list(plan.compensations) == ["undo-flight"]
    result = await resumed(engine, desk)
    assert (result.status, desk.cancelled[1:]) == ("aborted", [("flight", "flight-1")])


async def test_what_follows_is_stopped_first() -> None:
    """In a run that is paused, only what depends on what is taken back is given up, or all."""
    for only, states in ((["car"], "READY CANCELLED"), ([], "CANCELLED CANCELLED")):
        desk = Desk()
        engine = make_engine(store=MemoryStore())
        async with engine.open(TRIP, run_id=RUN) as run:
            ready = run.ready()
            for _ in "fc":
                task = await anext(ready)
                async with run.attempt(task) as attempt:
                    attempt.output = await desk(task, attempt.context)
            assert run.undo(only=only) == 1
            found = " ".join(
                str(run.live.entry(TaskId(name)).state) for name in ("hotel", "flight")
            )
            assert found == states
            assert run.live.entry(TaskId("undo-car")).state == "READY"


async def test_a_running_task_is_cut_off() -> None:
    """What runs is stopped, and because nobody knows whether it took effect, a person decides about it."""
    engine = make_engine(store=MemoryStore())
    async with engine.open(TRIP, run_id=RUN) as run:
        find = run.started("find")
        run.succeeded(find, "flight")
        car = run.started("car")
        with pytest.raises(ChangeRejected, match=r"'car' .* unknown whether it took effect"):
            run.undo()
        assert run.live.entry(TaskId("car")).state == "RUNNING"
        # Nothing else was changed, so that leaving it means that there is nothing to take back.
        assert run.undo(leave=["car"]) == 0
        assert run.undo(by_hand=["car"], by="ada") == 1
        assert run.live.entry(TaskId("car")).state == "CANCELLED"
        assert car in [effect.attempt for effect in run.history.effects()]
    assert (run.result.status, run.result.reason) == (
        "aborted",
        "what the run had changed is taken back",
    )


async def test_a_compensation_that_fails() -> None:
    """It is replanned as any task; if nothing helps the run has failed, and undoing again tries it again."""
    desk = Desk("flight", "undo-car")
    engine = await played(desk)
    engine.undo(RUN)
    result = await resumed(engine, desk)
    assert result.status == "failed"
    assert "undo-car is sold out" in result.reason
    assert [effect.compensation_state for effect in engine.history(RUN).effects()] == [
        "FAILED",
        "DONE",
    ]
    desk.fails = ()
    assert list(engine.undo(RUN).compensations) == ["undo-car"]
    assert (await resumed(engine, desk)).status == "aborted"
    assert sorted(desk.cancelled) == [("car", "car-1"), ("hotel", "hotel-1")]


async def test_a_compensation_in_doubt() -> None:
    """Of a compensation that may have had its effect, a person says whether it has."""
    plan = Plan.parse(TRIP.to_yaml().replace("idempotent: true", "idempotent: false"))

    class Slow(Desk):
        async def __call__(self, task: Task, context: TaskContext) -> Any:
            if task.id == "undo-car":
                raise TimeoutError("no answer")
            return await super().__call__(task, context)

    desk = Slow("flight")
    engine = await played(desk, plan=plan)
    engine.undo(RUN)
    result = await resumed(engine, desk)
    assert result.status == "needs_human"
    assert result.reason.endswith(": it is unknown whether 'undo-car' took effect")
    (undecided,) = engine.compare_undo(RUN).undecided
    assert undecided.why == "it is unknown whether 'undo-car' has taken it back"
    engine.undo(RUN, by_hand=["car"])
    assert (await resumed(engine, desk)).status == "aborted"
    assert desk.cancelled == [("hotel", "hotel-1")]


CHAIN = Plan.parse("""
goal: {objective: Book}
tools:
  - {name: book, undo: {tool: cancel, arguments: {id: "${output.id}", what: "${arguments.what}"}}}
  - {name: cancel, idempotent: true}
tasks:
  - {id: car, tool: book, arguments: {what: car}}
  - {id: hotel, tool: book, arguments: {what: hotel}, depends_on: [car]}
  - {id: flight, tool: book, arguments: {what: flight}, depends_on: [hotel]}
""")


async def test_a_compensation_that_is_given_up() -> None:
    """An effect may be left after all where its compensation fails, waits or runs; the others are taken back."""
    desk = Desk("undo-hotel")
    engine = await played(desk, plan=CHAIN)
    engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "failed"
    assert desk.cancelled == [("flight", "flight-1")]

    engine.undo(RUN, leave=["hotel"])
    assert not engine.compare_undo(RUN, leave=["hotel"]).undecided
    result = await resumed(engine, desk)
    reason = "what the run had changed is taken back, but 'undo-hotel' was cancelled"
    assert (result.status, result.reason) == ("aborted", reason)
    assert desk.cancelled == [("flight", "flight-1"), ("car", "car-1")]
    assert not engine.compare_undo(RUN, leave=["hotel"]).changes

    desk.fails = ()
    assert list(engine.undo(RUN).compensations) == ["undo-hotel"]
    assert (await resumed(engine, desk)).reason == "what the run had changed is taken back"
    assert desk.cancelled[2:] == [("hotel", "hotel-1")]


async def test_compensations_that_are_given_up_together() -> None:
    """What waits for several of them, or for one that waits itself, is freed of all; what is skipped is not changed before."""
    desk = Desk("undo-flight")
    engine = await played(desk, plan=CHAIN)
    engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "failed"
    plan = engine.undo(RUN, leave=["flight", "hotel"])
    assert ModifyTask(task_id="undo-car", fields={"depends_on": []}) in plan.changes
    assert (await resumed(engine, desk)).status == "aborted"
    assert desk.cancelled == [("car", "car-1")]

    desk = Desk("undo-flight")
    engine = await played(desk, plan=CHAIN)
    engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "failed"
    engine.undo(RUN, leave=["flight", "hotel"], by_hand=["car"])
    assert (await resumed(engine, desk)).status == "aborted"
    assert desk.cancelled == []


async def test_a_compensation_in_doubt_that_is_given_up() -> None:
    """If it may have taken the effect back, the run says so at its end."""

    class Slow(Desk):
        async def __call__(self, task: Task, context: TaskContext) -> Any:
            if task.id == "undo-hotel":
                raise TimeoutError("no answer")
            return await super().__call__(task, context)

    desk = Slow()
    plan = Plan.parse(CHAIN.to_yaml().replace("idempotent: true", "idempotent: false"))
    engine = await played(desk, plan=plan)
    engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "needs_human"
    engine.undo(RUN, leave=["hotel"])
    result = await resumed(engine, desk)
    assert result.status == "aborted"
    assert result.reason.endswith(": it is unknown whether 'undo-hotel' took effect")
    assert desk.cancelled == [("flight", "flight-1"), ("car", "car-1")]


@pytest.mark.parametrize("state", ["waiting", "running"])
async def test_a_compensation_that_a_person_has_done(state: str) -> None:
    """What a person has taken back by hand is not taken back by the task that was to do so."""
    desk = Desk()
    engine = await played(desk, plan=CHAIN)
    engine.undo(RUN)
    async with engine.resume(RUN) as run:
        if state == "running":
            run.started("undo-flight")
        run.undo(by_hand=["flight"], by="ada")
        await perform(run, desk)
    assert run.result.status == "aborted"
    assert desk.cancelled == [("hotel", "hotel-1"), ("car", "car-1")]
    (*_, flight) = engine.history(RUN).effects()
    assert (flight.undone, flight.skip_reason) == (True, "it was taken back by hand, says ada")


async def test_a_cancelled_compensation_that_a_person_has_done() -> None:
    """Where somebody has cancelled a compensation, others still wait for it, until its effect is taken back by hand."""
    desk = Desk()
    engine = await played(desk, plan=CHAIN)
    engine.undo(RUN)
    async with engine.resume(RUN) as run:
        run.cancel_task("undo-flight")
    assert run.result.status == "failed"
    assert "'undo-flight', 'undo-hotel', 'undo-car' still must" in run.result.reason
    engine.undo(RUN, by_hand=["flight"])
    assert (await resumed(engine, desk)).status == "aborted"
    assert desk.cancelled == [("hotel", "hotel-1"), ("car", "car-1")]


async def test_a_run_that_is_called_off_twice() -> None:
    """What is being taken back is not stopped half-way by whoever calls the run off once more."""
    desk = Desk()
    engine = await played(desk, plan=CHAIN)
    engine.undo(RUN)
    async with engine.resume(RUN) as run:
        with pytest.raises(ChangeRejected, match="is being taken back already"):
            run.apply([AbortRun(undo=True)])
        await perform(run, desk)
    assert len(desk.cancelled) == 3


async def test_a_run_that_is_called_off_while_a_part_is_taken_back() -> None:
    """Then the rest of the run does not go on, and the run ends once that part is taken back."""
    desk = Desk()
    engine = make_engine(store=MemoryStore())
    async with engine.open(TRIP, run_id=RUN) as run:
        ready = run.ready()
        for _ in ("find", "car"):
            task = await anext(ready)
            async with run.attempt(task) as attempt:
                attempt.output = await desk(task, attempt.context)
        run.undo(only=["car"])
        run.apply([AbortRun(undo=True, reason="called off")])
        assert await perform(run, desk) == ["undo-car"]
    assert (run.result.status, run.result.reason) == ("aborted", "called off")


async def test_a_compensation_in_doubt_whose_fallback_fails() -> None:
    """A person is asked about the call that may have taken the effect back, not about its fallback that failed."""
    plan = Plan.parse("""
    goal: {objective: Book}
    tools: [{name: book}, {name: off}, {name: call}]
    tasks: [{id: room, tool: book, undo: {tool: off, fallbacks: [{tool: call}]}}]
    """)

    async def work(task: Task, context: TaskContext) -> None:
        if task.tool == "off":
            raise TimeoutError("no answer")
        if task.tool == "call":
            raise ValueError("closed")

    engine = make_engine("repair", store=MemoryStore())
    await engine.execute(plan, work, run_id=RUN)
    engine.undo(RUN)
    async with engine.resume(RUN) as run:
        await perform(run, work)
    assert run.result.reason.endswith("it is unknown whether 'undo-room' took effect")
    (undecided,) = engine.compare_undo(RUN).undecided
    assert undecided.why == "it is unknown whether 'undo-room' has taken it back"


async def test_tasks_that_say_how_they_are_taken_back() -> None:
    """A task's own `undo` beats its tool's, may have fallbacks and refers to the output of whatever stands for the task."""
    plan = Plan.parse("""
    goal: {objective: Book}
    tools: [{name: a, capability: book}, {name: b, capability: book}, {name: off}, {name: call}]
    tasks:
      - id: room
        tool: a
        undo: {tool: off, arguments: {id: "${room.output.id}"}, fallbacks: [{tool: call, arguments: {id: "${room.output.id}"}}]}
    """)

    class Retreat(Desk):
        async def __call__(self, task: Task, context: TaskContext) -> Any:
            if task.tool == "off":
                raise ValueError("closed")
            return await super().__call__(task, context)

    desk = Retreat()
    engine = make_engine("repair", store=MemoryStore())
    await engine.execute(plan, desk, run_id=RUN)
    engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "aborted"
    assert desk.calls[1:] == [("undo-room~2", {"id": "room-1"})]
    (effect,) = engine.history(RUN).effects()
    assert (effect.compensation, effect.compensation_state) == ("undo-room", "DONE")

    class Closed(Desk):
        async def __call__(self, task: Task, context: TaskContext) -> Any:
            if task.tool != "a":
                raise ValueError("closed")
            return await super().__call__(task, context)

    taken = plan.model_copy(update={"tasks": (*plan.tasks, Task(id="undo-room", tool="a"))})
    engine = make_engine("repair", store=MemoryStore())
    await engine.execute(taken, Closed(), run_id=RUN)
    engine.undo(RUN, leave=["undo-room"])
    assert (await resumed(engine, Closed())).status in ("failed", "needs_human")
    (effect, _) = engine.history(RUN).effects()
    assert (effect.compensation, effect.undone) == ("undo-room~2", False)
    assert effect.compensation_state == "PENDING"
    engine.undo(RUN, leave=["undo-room"], by_hand=["room"], by="ada")
    assert (await resumed(engine, Closed())).status == "aborted"
    (effect, _) = engine.history(RUN).effects()
    assert (effect.undone, effect.skip_reason) == (True, "it was taken back by hand, says ada")


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ({"only": ["cat"]}, UnknownTask, "did you mean 'car'"),
        ({"leave": ["cat"]}, UnknownTask, "did you mean 'car'"),
        ({"to": "flight"}, ChangeRejected, "task 'flight' is FAILED: only what follows a finished"),
    ],
)
async def test_what_cannot_be_asked_for(
    names: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A task that does not exist, or has not been done, is refused by its name."""
    engine = await played(Desk("flight"))
    with pytest.raises(error, match=message):
        engine.undo(RUN, **names)


async def test_calls_of_programs_are_theirs() -> None:
    """What an agent has called in a session is not taken back by tasks, which nobody would execute."""
    engine = make_engine(store=MemoryStore())
    async with engine.session("Book", run_id=RUN) as session:
        with pytest.raises(NotRunning, match="nothing of the session of a program"):
            session.run.undo()
    with pytest.raises(NotRunning, match="it is the session of a program"):
        engine.undo(RUN)


async def test_a_call_that_another_one_stands_for() -> None:
    """Where a task was done again, its first output is out of reach, so that a person takes the first effect back."""
    desk = Desk()
    engine = make_engine(store=MemoryStore())
    async with engine.open(TRIP, run_id=RUN) as run:
        tasks = run.ready()
        for _ in range(4):
            task = await anext(tasks)
            async with run.attempt(task) as attempt:
                attempt.output = await desk(task, attempt.context)
        other = [*TRIP.tasks]
        other[1] = other[1].model_copy(update={"arguments": {"what": "cab"}})
        run.adopt(TRIP.model_copy(update={"tasks": tuple(other)}), rerun="changed")
        await perform(run, desk)
    undecided = engine.compare_undo(RUN).undecided
    assert [one.effect.attempt for one in undecided] == ["car#1", "flight#1", "tell#1"]
    assert undecided[0].why == "its `undo` needs its output, and another call has taken its place"
    plan = engine.undo(RUN, leave=["tell"], by_hand=["car#1", "flight#1"])
    assert list(plan.compensations)[:2] == ["undo-flight~2", "undo-car~2"]
    result = await resumed(engine, desk)
    assert result.status == "aborted"
    assert desk.cancelled[0] == ("flight", "flight~2-1")
    assert sorted(desk.cancelled[1:]) == [("cab", "car~2-1"), ("hotel", "hotel-1")]
    added = engine.history(RUN).replay().entry(TaskId("undo-car")).task
    assert set(added.depends_on) == {"undo-car~2", "undo-flight", "undo-flight~2"}


async def test_a_copy_takes_its_own_effects_back() -> None:
    """What a run has changed is taken back there, and not a second time in a run that began as its copy."""
    desk = Desk()
    engine = await played(desk)
    copy = engine.rerun(RUN, "car", only=True)
    async with engine.resume(copy) as run:
        await perform(run, desk)
    effects = engine.history(copy).effects()
    assert [effect.run for effect in effects] == [RUN] * 4 + [copy]
    assert [effect.key for effect in effects][3:] == [f"{RUN}/tell", f"{copy}/car~2"]
    whys = {one.effect.task: one.why for one in engine.compare_undo(copy).undecided}
    assert whys == dict.fromkeys(
        ["car", "hotel", "flight", "tell"], f"it took effect in run {RUN!r}, which can undo it"
    )
    plan = engine.undo(copy, leave=["car#1", "hotel", "flight", "tell"])
    assert list(plan.compensations) == ["undo-car~2"]
    async with engine.resume(copy) as run:
        await perform(run, desk)
    assert (run.result.status, desk.cancelled) == ("aborted", [("car", "car~2-1")])

    anew = engine.fork(RUN, 0)
    async with engine.resume(anew) as run:
        await perform(run, desk)
    assert {effect.run for effect in engine.history(anew).effects()} == {anew}


async def test_a_run_that_was_taken_back_is_run_again() -> None:
    """A new run in which tasks are run again is one whose goal is wanted."""
    desk = Desk()
    engine = await played(desk)
    engine.undo(RUN, leave=["tell"])
    await resumed(engine, desk)
    copy = engine.rerun(RUN, "car")
    async with engine.resume(copy) as run:
        await perform(run, desk)
    assert run.result.status == "succeeded"
    assert [task_id for task_id, _ in desk.calls[-3:]] == ["car~2", "flight~2", "tell~2"]


async def test_an_aborted_run_is_taken_back() -> None:
    """What was done before the abort is taken back, and nothing else goes on, also where only a part is named."""
    for names in ([], ["car"]):
        desk = Desk()
        engine = make_engine(store=MemoryStore())
        async with engine.open(TRIP, run_id=RUN) as run:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    attempt.output = await desk(task, attempt.context)
                if task.id == "car":
                    run.apply([AbortRun(reason="enough")])
        assert run.result.status == "aborted"
        engine.undo(RUN, only=names)
        assert (await resumed(engine, desk)).status == "aborted"
        assert desk.cancelled == [("car", "car-1")]


def calling_off(*others: PlanChange) -> Callable[[ReplanRequest], list[Alternative]]:
    """A provider that proposes to end the run and to take back what it has changed."""

    def propose(request: ReplanRequest) -> list[Alternative]:
        return [alternative(*others, AbortRun(reason="sold out", undo=True))]

    return propose


async def test_an_alternative_that_takes_the_run_back() -> None:
    """A provider may propose to end the run once what it has changed is taken back."""
    desk = Desk("flight")
    engine = make_engine(calling_off(), store=MemoryStore())
    result = await engine.execute(TRIP, desk, run_id=RUN)
    assert (result.status, result.reason) == ("aborted", "sold out")
    assert sorted(desk.cancelled) == [("car", "car-1"), ("hotel", "hotel-1")]
    (revised,) = bodies(engine.store, RUN, PlanRevised)
    assert (revised.by, revised.takes_back) == ("policy", True)
    (decided,) = bodies(engine.store, RUN, DecisionMade)
    assert (decided.decision, decided.rule) == ("abort", "confident")


async def test_a_run_without_effects_just_ends() -> None:
    """Where nothing was changed, nothing is taken back."""
    desk = Desk("find")
    engine = make_engine(calling_off(), store=MemoryStore())
    result = await engine.execute(TRIP, desk, run_id=RUN)
    assert (result.status, result.reason, desk.calls) == ("aborted", "sold out", [])


@pytest.mark.parametrize(
    ("plan", "others", "problem"),
    [
        (
            "tools: [{name: mail, effect: irreversible}]\ntasks: [{id: tell, tool: mail}, {id: fail}]",
            (),
            "the effect of 'tell' cannot be taken back by a task: its effect is irreversible",
        ),
        (
            "tasks: [{id: fail}]",
            (SkipTask(task_id=TaskId("fail")),),
            "an abort with `undo` must be the only change",
        ),
    ],
)
async def test_an_alternative_that_cannot_take_the_run_back(
    plan: str, others: tuple[PlanChange, ...], problem: str
) -> None:
    """It is refused with the reason, and nothing is changed."""
    desk = Desk("fail")
    engine = make_engine(calling_off(*others), store=MemoryStore())
    document = Plan.parse(f"goal: {{objective: Tell}}\nsequential: true\n{plan}")
    result = await engine.execute(document, desk, run_id=RUN)
    assert result.status == "failed"
    assert not bodies(engine.store, RUN, PlanRevised)
    (decided,) = bodies(engine.store, RUN, DecisionMade)
    assert decided.decision == "keep"
    (considered,) = bodies(engine.store, RUN, AlternativesConsidered)
    assert problem in f"{decided.reason} {considered.candidates[0].rejected}"


async def test_tools_that_take_back_and_need_agreement() -> None:
    """Nothing dangerous is called without a person, also to take something back."""
    document = TRIP.model_dump(exclude_unset=True)
    for described in document["tools"]:
        if described["name"] == "cancel":
            described["dangerous"] = True
    desk = Desk("flight")
    engine = make_engine(calling_off(), store=MemoryStore())
    result = await engine.execute(Plan.model_validate(document), desk, run_id=RUN)
    assert result.status == "needs_human"
    (question,) = engine.pending(RUN)
    assert "'cancel', which takes effects back, needs a person's agreement" in question.text
    assert question.effects == "2 effects so far, 2 can be taken back"
    (diff,) = question.diffs
    assert "the effects of the run are taken back, and the run is aborted: sold out" in diff
    engine.answer(question.id, "approve")
    assert (await resumed(engine, desk)).status == "aborted"
    assert len(desk.cancelled) == 2


async def test_a_question_counts_effects() -> None:
    """Whoever is asked reads what has happened: not what only reads, and what is in doubt as well."""
    skip = SkipTask(task_id=TaskId("tell"))
    asked = Alternative(changes=(skip,), reason="do without", ask="is that all right?")
    engine = make_engine(lambda request: [asked], store=MemoryStore())
    desk = Desk("tell")

    async def work(task: Task, context: TaskContext) -> Any:
        output = await desk(task, context)
        if task.id == "flight":
            raise ConnectionResetError("lost")
        return output

    document = TRIP.model_dump(exclude_unset=True)
    document["tasks"][-1]["depends_on"] = ["car"]
    async with engine.open(Plan.model_validate(document), run_id=RUN) as run:
        await perform(run, work)
    texts = {question.effects for question in engine.pending(RUN)}
    assert texts == {"3 effects so far, 2 can be taken back, 1 in doubt"}


def test_effects_that_were_taken_back() -> None:
    """What was taken back is counted as such, and where nothing is stated, nothing is counted."""
    book = tool("book", effect="reversible", undo={"tool": "cancel"})
    run = journaled(task("a", tool="book"), task("b", tool="book"), tools=[book, tool("cancel")])
    run.run("a", "b")
    assert effects_so_far(run.live) == "2 effects so far, 2 can be taken back"
    run.apply(AddTask(task=task("undo-a", tool="cancel", undoes="a#1")))
    run.run("undo-a")
    assert effects_so_far(run.live) == "2 effects so far, 1 can be taken back, 1 taken back"
    unstated = journaled("a")
    unstated.run("a")
    assert effects_so_far(unstated.live) == ""


async def test_what_only_a_program_can_take_back() -> None:
    """The calls of a program are its own, so no answer has them taken back."""
    engine = make_engine(store=MemoryStore())
    async with engine.session("trip") as session:
        with pytest.raises(ChangeRejected, match="which alone can call its tools"):
            session.run.apply([AbortRun(undo=True)])


async def test_a_task_that_says_how_it_is_taken_back_with_agreement() -> None:
    """The tool that a task itself names under `undo` needs the same agreement."""
    document = """
    goal: {objective: Book a trip}
    sequential: true
    tools: [{name: book, effect: reversible}, {name: cancel, dangerous: true}]
    tasks:
      - {id: car, tool: book, undo: {tool: cancel, arguments: {id: "${car.output.id}"}}}
      - {id: flight}
    """
    engine = make_engine(calling_off(), store=MemoryStore())
    await engine.execute(Plan.parse(document), Desk("flight"), run_id=RUN)
    (question,) = engine.pending(RUN)
    assert "'cancel', which takes effects back, needs a person's agreement" in question.text


async def test_a_person_calls_the_run_off() -> None:
    """The answer to a question may be to take back what the run has changed; it is refused where that cannot be."""
    desk = Desk("flight")
    skip = SkipTask(task_id=TaskId("flight"))
    asked = Alternative(changes=(skip,), reason="do without", ask="is that all right?")
    engine = make_engine(lambda request: [asked], store=MemoryStore())
    await engine.execute(TRIP, desk, run_id=RUN)
    (question,) = engine.pending(RUN)
    abort = AbortRun(undo=True, reason="the trip is off")
    engine.answer(question.id, "modify", changes=[abort], by="ada")
    result = await resumed(engine, desk)
    assert (result.status, result.reason) == ("aborted", "the trip is off")
    assert sorted(desk.cancelled) == [("car", "car-1"), ("hotel", "hotel-1")]


async def test_a_goal_that_was_reached_early() -> None:
    """Facts of the goal that hold do not end the run before its effects are taken back."""
    plan = Plan.parse("""
    goal: {objective: Book, facts: [booked], stop_when_reached: true}
    facts: [empty]
    tools:
      - {name: book, adds: [booked], undo: {tool: cancel, arguments: {id: "${output.id}", what: x}}}
      - {name: cancel}
    tasks: [{id: car, tool: book}]
    """)
    desk = Desk()
    engine = await played(desk, plan=plan)
    engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "aborted"
    assert desk.cancelled == [("x", "car-1")]


async def test_what_cleans_up_still_runs() -> None:
    """A task that runs in any case is not given up when the run is taken back."""
    document = (
        TRIP.to_yaml()
        + """
- {id: bill, tool: search, depends_on: [flight]}
- {id: tidy, tool: search, depends_on: [bill], run_if: always}
"""
    )
    desk = Desk()
    engine = make_engine(store=MemoryStore())
    async with engine.open(Plan.parse(document), run_id=RUN) as run:
        task = await anext(run.ready())
        async with run.attempt(task) as attempt:
            attempt.output = await desk(task, attempt.context)
        car = run.started("car")
        run.succeeded(car, {"id": "car-1"})
        run.undo()
        assert sorted(await perform(run, desk)) == ["tidy", "undo-car"]
    assert run.result.status == "aborted"


async def test_an_undo_that_cannot_be_filled_in() -> None:
    """Where the call lacks an argument that its `undo` names, a person decides; an escaped reference stays as it is."""
    plan = Plan.parse("""
    goal: {objective: Book}
    tools:
      - {name: book, undo: {tool: cancel, arguments: {id: "${arguments.ref.id}", note: "$${x} in ${context.town}"}}}
      - {name: cancel}
    context: {town: Rome}
    tasks: [{id: one, tool: book}, {id: two, tool: book, arguments: {ref: {id: 7}}}]
    """)
    desk = Desk()
    engine = await played(desk, plan=plan)
    (undecided,) = engine.compare_undo(RUN).undecided
    assert undecided.why.startswith(
        "its `undo` cannot be filled in: ${arguments.ref.id}: 'ref' does not"
    )
    engine.undo(RUN, leave=["one"])
    await resumed(engine, desk)
    assert desk.calls[-1] == ("undo-two", {"id": 7, "note": "${x} in Rome"})


async def test_an_undo_that_comes_too_late() -> None:
    """A message about what nobody has decided is recorded with the reason, and the run goes on as it was."""
    engine = await played(Desk("flight"))
    payload: JsonObject = {"to": "car", "only": "car", "leave": ["nobody"], "reason": None}
    engine.store.post(RUN, InboxMessage("undo", 1.0, "ada", payload))
    result = await resumed(engine, Desk("flight"))
    assert result.status == "failed"
    (problem,) = [one for one in result.problems if one.where == "the undo of ada"]
    assert "there is no task 'nobody'" in problem.error


async def test_a_used_up_budget() -> None:
    """Of a run that may do nothing more, nothing can be taken back before it has a larger budget."""
    plan = TRIP.model_copy(update={"budget": Budget(calls=1)})

    async def work(task: Task, context: TaskContext) -> object:
        context.charge(calls=1)
        return {"id": task.id}

    engine = make_engine(store=MemoryStore())
    await engine.execute(plan, work, run_id=RUN)
    with pytest.raises(NotRunning, match="have it adopt a plan with a larger budget first"):
        engine.undo(RUN)


async def test_planning_mode_is_refused() -> None:
    """In planning mode a model calls the tools, so that tasks of a plan cannot take anything back."""
    phase = Task(id="think", metadata={"planning": {"phase": "reflection"}})
    engine = await played(Desk(), plan=TRIP.model_copy(update={"tasks": (phase,)}))
    with pytest.raises(NotRunning, match="it is one of planning mode"):
        engine.undo(RUN)


async def test_a_run_that_is_open_here() -> None:
    """An engine takes back what an open run of its own has changed at once."""
    engine = make_engine(store=MemoryStore())
    async with engine.open(TRIP, run_id=RUN) as run:
        run.succeeded(run.started("find"), "flight")
        run.succeeded(run.started("car"), {"id": "car-1"})
        engine.undo(RUN)
        assert run.live.entry(TaskId("undo-car")).state == "READY"
        await perform(run)
        # It has ended here, so that the next process is told.
        assert not engine.undo(RUN).changes
    assert run.result.status == "aborted"


async def test_another_tool_has_its_own_undo() -> None:
    """What a task states of taking its call back is not true of another tool: that one's own `undo` counts."""
    plan = Plan.parse("""
    goal: {objective: Book}
    tools:
      - {name: a, capability: book}
      - {name: b, capability: book, undo: {tool: off, arguments: {id: "${output.id}", n: "no. ${arguments.n}"}}}
      - {name: off}
    tasks: [{id: room, tool: a, arguments: {n: 1}, undo: {tool: a, arguments: {n: 0}}}]
    """)

    class Full(Desk):
        async def __call__(self, task: Task, context: TaskContext) -> Any:
            if task.tool == "a":
                raise ValueError("full")
            return await super().__call__(task, context)

    desk = Full()
    engine = make_engine("repair", store=MemoryStore())
    await engine.execute(plan, desk, run_id=RUN)
    engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "aborted"
    assert desk.calls[1:] == [("undo-room~2", {"id": "room~2-1", "n": "no. 1"})]


async def test_what_no_tool_takes_back() -> None:
    """An effect without an `undo` is put to a person, and so is every one in doubt."""
    plan = Plan.parse("""
    goal: {objective: Pay}
    tools: [{name: pay, effect: reversible}]
    tasks: [{id: one, tool: pay}, {id: two, tool: pay}]
    """)

    async def work(task: Task, context: TaskContext) -> None:
        if task.id == "two":
            raise TimeoutError("no answer")

    engine = make_engine(store=MemoryStore())
    await engine.execute(plan, work, run_id=RUN)
    assert [one.why for one in engine.compare_undo(RUN).undecided] == [
        "no `undo` is stated",
        "it is unknown whether it took effect",
    ]
    plan_of_one = engine.undo(RUN, leave=["two"], by_hand=["one"])
    assert list(plan_of_one.compensations) == ["undo-one"]
    result = await resumed(engine, Desk())
    assert result.reason.endswith(": it is unknown whether 'two' took effect")


@pytest.mark.parametrize("undo", ["arguments.what", "output.id"])
async def test_a_call_that_a_person_says_is_done(undo: str) -> None:
    """A call in doubt that a person says is done is taken back like any other, unless that needs its output."""
    plan = Plan.parse(f"""
    goal: {{objective: Book a trip}}
    tools:
      - {{name: book, effect: reversible, undo: {{tool: cancel, arguments: {{what: "${{{undo}}}"}}}}}}
      - {{name: cancel, idempotent: true}}
    tasks: [{{id: car, tool: book, arguments: {{what: car}}}}]
    """)

    async def work(task: Task, context: TaskContext) -> None:
        raise TimeoutError("no answer")

    engine = make_engine(store=MemoryStore())
    await engine.execute(plan, work, run_id=RUN)
    engine.answer(f"{RUN}.q1", "modify", changes=[SkipTask(task_id="car", done=True)], by="ada")
    assert (await resumed(engine, Desk())).ok
    planned = engine.compare_undo(RUN)
    if undo == "arguments.what":
        assert (list(planned.compensations), planned.undecided) == (["undo-car"], ())
    else:
        assert [one.why for one in planned.undecided] == [
            "its `undo` needs its output, which is not known"
        ]


async def test_a_secret_output() -> None:
    """An output that the journal has masked takes nothing back in another process, and says so."""
    token = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"

    class Secretive(Desk):
        async def __call__(self, task: Task, context: TaskContext) -> Any:
            await super().__call__(task, context)
            return {"id": token}

    desk = Secretive("flight")
    engine = await played(desk)
    engine.undo(RUN)
    result = await resumed(engine, desk)
    assert (result.status, desk.cancelled) == ("failed", [])
    assert "'undo-car' failed" in result.reason
    assert token not in result.reason


@pytest.mark.parametrize("harmless", [True, False])
async def test_killed_after_any_record(harmless: bool) -> None:
    """A process that is killed in an undo is followed by one that takes the rest back: all once, or a person is asked."""
    text = TRIP.to_yaml().replace("idempotent: true", f"idempotent: {str(harmless).lower()}")
    desk = Desk()
    engine = await played(desk, plan=Plan.parse(text))
    done = len(list(engine.store.read(RUN)))
    engine.undo(RUN, by_hand=["tell"])
    await resumed(engine, desk)
    records = list(engine.store.read(RUN))
    expected = {"undo-flight", "undo-hotel", "undo-car"}

    for length in range(done, len(records) + 1):
        kept = [record.body for record in records[:length]]
        begun = {body.task for body in kept if isinstance(body, AttemptStarted)} & expected
        ended = {body.task for body in kept if isinstance(body, AttemptSucceeded)} & expected
        later = make_engine(store=cut(records[:length]))
        # The message is still there: the process was killed before it could discard it.
        payload: JsonObject = {"by_hand": ["tell"]}
        later.store.post(RUN, InboxMessage("undo", records[length - 1].at, "ada", payload))
        heir = Desk()
        result = await resumed(later, heir)
        called = [task_id for task_id, _ in heir.calls]
        in_doubt = begun - ended
        if harmless or not in_doubt:
            assert result.status == "aborted"
            assert sorted(called) == sorted(expected - ended)
            assert all(effect.undone for effect in later.history(RUN).effects())
        else:
            assert result.status == "needs_human"
            assert set(called) <= expected - begun
            (undecided,) = later.compare_undo(RUN).undecided
            assert {undecided.effect.compensation} == in_doubt


async def test_arguments_that_have_changed_since() -> None:
    """What was done is taken back, not what its arguments would refer to now; a text that looks like a reference is none."""
    plan = Plan.parse("""
goal: {objective: Book}
context: {what: A, note: "${results.x}"}
tools:
  - {name: book, undo: {tool: cancel, arguments: {id: "${output.id}", what: "${arguments.what}", note: "${arguments.note}"}}}
  - {name: cancel, idempotent: true}
tasks:
  - {id: hotel, tool: book, arguments: {what: "${context.what}", note: "${context.note}"}}
""")
    desk = Desk()

    async def work(task: Task, context: TaskContext) -> Any:
        context.change_context({"what": "B", "note": ""})
        return await desk(task, context)

    engine = make_engine(store=MemoryStore())
    await engine.execute(plan, work, run_id=RUN)
    engine.undo(RUN)
    assert (await resumed(engine, desk)).status == "aborted"
    assert desk.calls[1] == (
        "undo-hotel",
        {"id": "hotel-1", "what": "A", "note": "${results.x}"},
    )


async def test_a_call_that_is_being_confirmed() -> None:
    """A call in doubt is put to a person before anything is taken back, also while it is asked whether it was done."""
    confirm = Confirmation(tool="search", when="output")
    tools = [
        each.model_copy(update={"confirm": confirm}) if each.name == "book" else each
        for each in TRIP.tools
    ]
    plan = TRIP.model_copy(update={"tools": tuple(tools)})
    desk = Desk()
    engine = make_engine(store=MemoryStore())
    async with engine.open(plan, run_id=RUN) as run:

        async def work(task: Task, context: TaskContext) -> Any:
            if task.id == "car":
                run.pause("later")
                raise TimeoutError("no answer")
            return await desk(task, context)

        await perform(run, work)
    assert run.result.status == "paused"
    (undecided,) = engine.compare_undo(RUN).undecided
    assert (undecided.effect.task, undecided.why) == ("car", "it is unknown whether it took effect")


async def test_an_attempt_that_was_not_done_after_all() -> None:
    """A decision about an attempt in doubt holds no undo up once it is known to have had no effect."""
    confirm = Confirmation(tool="search", when='output == "found"')
    tools = [
        each.model_copy(update={"confirm": confirm}) if each.name == "book" else each
        for each in TRIP.tools
    ]
    plan = TRIP.model_copy(update={"tools": tuple(tools)})
    desk = Desk("tell")
    engine = make_engine(store=MemoryStore())
    async with engine.open(plan, run_id=RUN) as run:

        async def work(task: Task, context: TaskContext) -> Any:
            if context.attempt_id == "car#1":
                run.pause("later")
                raise TimeoutError("no answer")
            return await desk(task, context)

        await perform(run, work)
    (undecided,) = engine.compare_undo(RUN).undecided
    assert undecided.effect.attempt == "car#1"
    await resumed(engine, desk)
    assert "car#1" not in [effect.attempt for effect in engine.history(RUN).effects()]
    plan_of_all = engine.undo(RUN, leave=["car#1"])
    assert set(plan_of_all.compensations) == {"undo-flight", "undo-hotel", "undo-car"}
    assert (await resumed(engine, desk)).status == "aborted"
    for name in ("car#9", "car#x", "cat#1"):
        with pytest.raises(UnknownTask, match=f"there is no task '{name}'"):
            engine.undo(RUN, leave=[name])

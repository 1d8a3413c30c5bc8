"""An effect that must not coexist with its replacement is taken back before that starts."""

import pytest

from replanning import Alternative, Plan, ReplanRequest, Task, TaskContext
from replanning.changes import ModifyTask, ReplaceTask, RetryTask
from replanning.errors import ChangeRejected, NotAccepted, PlanError
from replanning.journal import AttemptStarted, AttemptSucceeded, MemoryStore, PlanRevised
from tests.run.test_undo import Desk, played, resumed
from tests.support.live import task
from tests.support.resume import RUN, cut
from tests.support.runs import alternative, make_engine, perform

TRIP = """
goal: {objective: Book a trip}
tools:
  - name: book
    undo: {tool: cancel, arguments: {id: "${output.id}", what: "${arguments.what}"}}
    undo_on_replace: true
  - {name: cancel, idempotent: true}
tasks:
  - {id: car, tool: book, arguments: {what: car}}
  - {id: hotel, tool: book, arguments: {what: "${car.output.id}"}, depends_on: [car]}
  - {id: tell, effect: irreversible, depends_on: [hotel]}
"""


async def test_a_corrected_plan() -> None:
    """What is done again is taken back before, the last first, and its replacement waits for that."""
    desk = Desk("tell")
    engine = await played(desk, plan=Plan.parse(TRIP))
    corrected = Plan.parse(TRIP.replace("{what: car}", "{what: van}"))
    heir = Desk()
    async with engine.resume(RUN) as run:
        run.adopt(corrected, rerun="changed")
        await perform(run, heir)
    assert run.result.status == "succeeded"
    assert heir.calls == [
        ("undo-hotel", {"id": "hotel-1", "what": "car-1"}),
        ("undo-car", {"id": "car-1", "what": "car"}),
        ("car~2", {"what": "van"}),
        ("hotel~2", {"what": "car~2-1"}),
        ("tell", {}),
    ]
    assert [effect.undone for effect in engine.history(RUN).effects()] == [
        True,
        True,
        False,
        False,
        False,
    ]
    async with engine.resume(RUN) as run:
        assert not run.compare(corrected)


async def test_done_again_twice() -> None:
    """Each redo takes back what the one before has changed, and nothing that was taken back."""
    engine = make_engine(store=MemoryStore(), enabled=False)
    await engine.execute(Plan.parse(TRIP), Desk("tell"), run_id=RUN)
    heir = Desk("tell")
    for what in ("van", "bus"):
        corrected = Plan.parse(TRIP.replace("{what: car}", f"{{what: {what}}}"))
        async with engine.resume(RUN) as run:
            run.adopt(corrected, rerun="changed")
            await perform(run, heir)
    assert heir.cancelled[2:] == [("car~2-1", "hotel~2-1"), ("van", "car~2-1")]
    engine.undo(RUN)
    await resumed(engine, heir)
    assert heir.cancelled[4:] == [("car~3-1", "hotel~3-1"), ("bus", "car~3-1")]


async def test_without_an_effect() -> None:
    """A task that has changed nothing, or whose effect may stay, is replaced as ever."""
    for text in (
        TRIP.replace("undo_on_replace: true", ""),
        TRIP.replace("{id: car,", "{id: car, undo_on_replace: false,"),
    ):
        engine = await played(Desk("hotel"), plan=Plan.parse(text))
        async with engine.resume(RUN) as run:
            run.adopt(Plan.parse(text.replace("{what: car}", "{what: van}")), rerun="changed")
            assert not any(entry.task.undoes for entry in run.view.tasks())
            await perform(run, Desk())
        assert run.result.status == "succeeded"


DOUBTFUL = """
goal: {objective: Pay}
tools:
  - {name: card, undo: {tool: refund, arguments: {what: "${arguments.what}"}}, undo_on_replace: true}
  - {name: refund, idempotent: true}
  - {name: transfer}
tasks:
  - {id: pay, tool: card, arguments: {what: rent}}
"""


def by_transfer(request: ReplanRequest) -> list[Alternative]:
    """Pay in another way."""
    return [alternative(ReplaceTask(task_id="pay", tasks=(task("again", tool="transfer"),)))]


async def unanswered(task: Task, context: TaskContext) -> str:
    """Lose the answer of the card."""
    if task.tool == "card":
        raise TimeoutError("no answer")
    return "done"


async def rejected(task: Task, context: TaskContext) -> str:
    """Pay from the wrong account."""
    if task.tool == "card":
        raise NotAccepted("it was the wrong account", "rejected")
    return "done"


async def test_a_proposal_that_leaves_an_effect() -> None:
    """A person is asked before a call takes the place of one in doubt; whoever agrees leaves the effect."""
    engine = make_engine(by_transfer, store=MemoryStore())
    result = await engine.execute(Plan.parse(DOUBTFUL), unanswered, run_id=RUN)
    assert result.status == "needs_human"
    (question,) = engine.pending(RUN)
    assert "the effect of 'pay' stays although the task is replaced" in question.text
    engine.answer(question.id, "approve")
    async with engine.resume(RUN) as run:
        assert await perform(run, unanswered) == ["again"]
    assert run.result.status == "succeeded"


async def test_a_proposal_that_lifts_the_rule() -> None:
    """A person must agree before a proposal says that an effect may stay."""

    def lifted(request: ReplanRequest) -> list[Alternative]:
        change = ModifyTask(task_id="pay", fields={"undo_on_replace": False})
        return [alternative(change, *by_transfer(request)[0].changes)]

    engine = make_engine(lifted, store=MemoryStore())
    await engine.execute(Plan.parse(DOUBTFUL), rejected, run_id=RUN)
    (question,) = engine.pending(RUN)
    assert "'pay' states anew whether its effect is taken back" in question.text


async def test_a_proposal_after_a_stale_result() -> None:
    """A redo that the engine decides on takes the effect back as well."""
    plan = Plan.parse(
        TRIP.replace("undo_on_replace: true", "undo_on_replace: true\n    idempotent: true")
        .replace("tools:", "context: {what: car}\non_stale: redo\ntools:")
        .replace("{what: car}}", '{what: "${context.what}"}}')
    )
    desk = Desk()

    async def work(work: Task, context: TaskContext) -> object:
        if work.id == "tell":
            context.change_context({"what": "van"})
        return await desk(work, context)

    engine = make_engine("repair", store=MemoryStore())
    await engine.execute(plan, work, run_id=RUN)
    assert desk.cancelled == [("car-1", "hotel-1"), ("car", "car-1")]
    assert [task_id for task_id, _ in desk.calls][-2:] == ["car~2", "hotel~2"]


async def test_an_edit_that_leaves_an_effect() -> None:
    """It is refused with the reason until a person has taken the effect back, or has said that it stays."""
    engine = make_engine(store=MemoryStore())
    await engine.execute(Plan.parse(DOUBTFUL), unanswered, run_id=RUN)
    change = ReplaceTask(task_id="pay", tasks=(task("again", tool="transfer"),))
    other = ModifyTask(task_id="pay", fields={"tool": "transfer"})
    async with engine.resume(RUN) as run:
        for refused in (change, other):
            with pytest.raises(
                ChangeRejected, match=r"'pay' must be taken back .* unknown whether"
            ):
                run.apply([refused])
        assert run.view.revision == 0
        run.undo(only=["pay"], by_hand=["pay"])
        run.apply([change])
        assert await perform(run, unanswered) == ["again"]

    await engine.execute(Plan.parse(DOUBTFUL), unanswered, run_id="left")
    async with engine.resume("left") as run:
        run.modify_task("pay", undo_on_replace=False)
        run.apply([change])
        assert await perform(run, unanswered) == ["again"]


async def test_a_rejected_call_that_another_tool_takes_over() -> None:
    """A call that was done, and not accepted, is taken back before the task is given to another tool."""
    engine = make_engine(store=MemoryStore())
    await engine.execute(Plan.parse(DOUBTFUL), rejected, run_id=RUN)
    async with engine.resume(RUN) as run:
        run.apply(
            [
                ModifyTask(task_id="pay", fields={"tool": "transfer"}),
                RetryTask(task_id="pay"),
            ]
        )
        assert await perform(run, unanswered) == ["undo-pay", "pay"]
    assert run.result.status == "succeeded"


async def test_a_compensation_that_fails() -> None:
    """Nothing takes the place of an effect that could not be taken back, until it is."""
    engine = await played(Desk("tell"), plan=Plan.parse(TRIP))
    corrected = Plan.parse(TRIP.replace("{what: car}", "{what: van}"))
    heir = Desk("undo-car")
    async with engine.resume(RUN) as run:
        run.adopt(corrected, rerun="changed")
        await perform(run, heir)
    assert run.result.status == "failed"
    assert [task_id for task_id, _ in heir.calls] == ["undo-hotel"]

    heir.fails = ()
    async with engine.resume(RUN) as run:
        run.apply([RetryTask(task_id="undo-car")])
        await perform(run, heir)
    assert [task_id for task_id, _ in heir.calls[1:]] == ["undo-car", "car~2", "hotel~2", "tell"]


async def test_killed_after_any_record() -> None:
    """A process that follows one that was killed takes back what is left, and starts the replacement after that."""
    engine = await played(Desk("tell"), plan=Plan.parse(TRIP))
    before = len(list(engine.store.read(RUN)))
    corrected = Plan.parse(TRIP.replace("{what: car}", "{what: van}"))
    async with engine.resume(RUN) as run:
        run.adopt(corrected, rerun="changed")
        await perform(run, Desk())
    records = list(engine.store.read(RUN))
    order = ["undo-hotel", "undo-car", "car~2", "hotel~2", "tell"]
    revised = [n for n, record in enumerate(records) if isinstance(record.body, PlanRevised)]
    assert revised[0] > before

    for length in range(revised[0] + 1, len(records) + 1):
        kept = [record.body for record in records[:length]]
        begun = [body.task for body in kept if isinstance(body, AttemptStarted)][3:]
        ended = [body.task for body in kept if isinstance(body, AttemptSucceeded)][2:]
        heir = Desk()
        later = make_engine(store=cut(records[:length]))
        await resumed(later, heir)
        called = [task_id for task_id, _ in heir.calls]
        if begun == ended or begun[-1].startswith("undo"):
            assert called == order[len(ended) :]
            assert [effect.undone for effect in later.history(RUN).effects()][:2] == [True, True]
        else:
            # What books may have booked: a person decides.
            assert called == []


async def test_run_again_in_a_copy() -> None:
    """A copy of a run cannot take back what that run has changed, which is undone there before."""
    engine = await played(Desk(), plan=Plan.parse(TRIP))
    with pytest.raises(ChangeRejected, match=f"run '{RUN}' had it, and a new run cannot"):
        engine.rerun(RUN, "hotel")
    desk = Desk()
    engine.undo(RUN, only=["hotel"])
    async with engine.resume(RUN) as run:
        await perform(run, desk)
    copy = engine.rerun(RUN, "hotel")
    async with engine.resume(copy) as run:
        await perform(run, desk)
    assert [task_id for task_id, _ in desk.calls] == ["undo-hotel", "hotel~2", "tell~2"]


async def test_a_tool_that_needs_agreement() -> None:
    """A person must agree before a dangerous tool takes back what a proposal replaces."""
    text = DOUBTFUL.replace("refund, idem", "refund, dangerous: true, idem")
    engine = make_engine(by_transfer, store=MemoryStore())
    await engine.execute(Plan.parse(text), rejected, run_id=RUN)
    (question,) = engine.pending(RUN)
    assert "'refund', which takes effects back, needs a person's agreement" in question.text
    engine.answer(question.id, "approve")
    async with engine.resume(RUN) as run:
        assert await perform(run) == ["undo-pay", "again"]


@pytest.mark.parametrize(
    ("tool", "fields", "problem"),
    [
        ("name: a, undo_on_replace: true", "", "tools[0].undo_on_replace: tool 'a'"),
        ("name: a", ", undo_on_replace: true", "tasks[0].undo_on_replace: task 't'"),
    ],
)
def test_nothing_says_how(tool: str, fields: str, problem: str) -> None:
    """What is to be taken back needs an `undo`."""
    with pytest.raises(PlanError, match="`undo_on_replace` needs an `undo`") as caught:
        Plan.parse(
            f"goal: {{objective: x}}\ntools: [{{{tool}}}]\ntasks: [{{id: t, tool: a{fields}}}]"
        )
    assert problem in str(caught.value)

"""Elements of a list that fail: those with one cause are one request and one question, whose text says so."""

from functools import partial

import anyio

from replanning import Answer, Task
from replanning.changes import ReplaceTask
from replanning.engine.engine import run_workers
from replanning.testing import ScriptedGate, returns
from tests.support.questions import asking
from tests.support.runs import alternative, make_engine, perform, plan

LIST = Task(id="convert", for_each=list(range(40)), on_item_failure="fail")
REPORT = Task(id="report", depends_on=("convert",))
BROKEN = {f"convert[{n}]" for n in range(0, 36, 3)}


async def without_license(task, context):
    """Twelve elements need a license."""
    if task.id in BROKEN:
        raise RuntimeError(f"no license for {task.scope['item']} hours")


async def fail_together(run):
    """All elements run at the same time, and then twelve fail of one cause."""
    attempts: dict[str, str] = {}
    ready = run.ready()
    while len(attempts) < 40:
        task = await anext(ready)
        attempts[task.id] = run.started(task.id)
    for task_id, attempt in attempts.items():
        if task_id in BROKEN:
            run.failed(attempt, RuntimeError("no license for 12 hours"))
        else:
            run.succeeded(attempt)


def elsewhere(request):
    """Something else in the place of every element that failed."""
    changes = []
    for trigger in request.triggers:
        for task_id in trigger.tasks:
            changes.append(ReplaceTask(task_id=task_id, tasks=(Task(id=f"{task_id}~2"),)))
    return [alternative(*changes, confidence=0.4)]


async def test_equal_causes_are_one_question(clock):
    """Twelve elements that fail of one cause are one request, and one question that counts them."""
    gate = ScriptedGate([returns(Answer("approve", by="ada"))], clock=clock)
    engine = asking(clock, elsewhere, gate=gate)
    async with engine.open(plan(LIST, REPORT)) as run:
        await fail_together(run)
        await perform(run, without_license)
    assert run.result.status == "succeeded"
    (question,) = gate.questions
    assert len(question.triggers) == 12
    first = "12 of 40 elements of 'convert' ('convert[0]', 'convert[3]', 'convert[6]', …) failed"
    assert question.text.startswith(f"{first}: RuntimeError: no license for 12 hours; ")
    assert question.text.count("convert") == 4


async def test_later_elements_wait_for_the_same_answer(clock):
    """Elements that fail later of the cause that a person is asked about are one further question, once that is answered."""
    answer = Answer("approve", by="ada")
    gate = ScriptedGate([returns(answer, after=60), returns(answer)], clock=clock)
    engine = asking(clock, elsewhere, gate=gate)

    async def one_by_one(task, context):
        if task.id in BROKEN:
            await clock.sleep(float(task.scope["item"]))
            raise RuntimeError(f"no license for {task.scope['item']} hours")

    async with engine.open(plan(LIST, REPORT)) as run, anyio.create_task_group() as workers:
        work = partial(run_workers, run, one_by_one, 40)
        workers.start_soon(work)
    assert run.result.status == "succeeded"
    assert [len(question.triggers) for question in gate.questions] == [1, 11]
    assert gate.questions[1].text.startswith("11 of 40 elements of 'convert' (")


async def test_end_of_a_run_counts_elements():
    """Where nobody knows a way on, the run fails, and its reason counts the elements."""
    async with make_engine("repair").open(plan(LIST, REPORT)) as run:
        await perform(run, without_license)
    assert run.result.status == "failed"
    assert run.result.reason == (
        "12 of 40 elements of 'convert' ('convert[0]', 'convert[3]', 'convert[6]', …) failed "
        "(no license for 0 hours)"
    )

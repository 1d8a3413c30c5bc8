"""Questions while other things happen: tasks that fail at once, and seeded runs checked from their journals."""

import pytest

from replanning import Alternative, Answer, ReplanRequest, RunResult, Task
from replanning.changes import ModifyTask, ReplaceTask, SkipTask
from replanning.testing import (
    ScriptedGate,
    VirtualClock,
    returns,
)
from tests.support.questions import DOUBT, asked, asking, dialogue
from tests.support.runs import Propose, alternative, failing, plan

SHARED = (Task(id="a"), Task(id="b"), Task(id="c", depends_on=("a", "b")))
"""Two tasks for which one and the same waits."""


def another(request: ReplanRequest, task_id: str) -> ReplaceTask:
    """The same task under another id."""
    new = {"id": request.view.unused_id(task_id), "depends_on": ()}
    return ReplaceTask(
        task_id=task_id, tasks=(request.view.task(task_id).task.model_copy(update=new),)
    )


def stuck(request: ReplanRequest) -> list[str]:
    """The tasks concerned that have failed."""
    ids = [task_id for trigger in request.triggers for task_id in trigger.tasks]
    return [task_id for task_id in ids if request.view.task(task_id).state == "FAILED"]


def one_by_one(request: ReplanRequest) -> list[Alternative]:
    """A doubtful way on for the first of the tasks that have failed."""
    return [alternative(another(request, stuck(request)[0]), confidence=DOUBT)]


def each(request: ReplanRequest) -> list[Alternative]:
    """A doubtful way on for each of the tasks that have failed."""
    return [alternative(another(request, task_id), confidence=DOUBT) for task_id in stuck(request)]


async def two_fail(
    propose: Propose, *answers: Answer, apart: bool = False
) -> tuple[RunResult, list[str], list[tuple[str, ...]], float]:
    """Run a plan in which two tasks fail at once; return result, dialogue, triggers of the questions and seconds."""
    steps = [returns(answer, after=10) for answer in answers]
    async with VirtualClock() as clock:
        gate = ScriptedGate(
            (lambda question: steps["ab".index(question.holds[0])]) if apart else steps, clock=clock
        )
        engine = asking(clock, propose, gate=gate)
        result = await engine.execute(plan(*SHARED), failing("a", "b"))
        return (
            result,
            dialogue(engine, result.run),
            [one.triggers for one in asked(engine, result.run)],
            clock.elapsed,
        )


APPROVE, REJECT = Answer("approve"), Answer("reject")


@pytest.mark.parametrize(
    ("answers", "status", "outputs"),
    [
        ((APPROVE, APPROVE), "succeeded", {"a": "a~2", "b": "b~2", "c": "c"}),
        ((APPROVE, REJECT), "failed", {"a": "a~2"}),
        ((REJECT, APPROVE), "failed", {"b": "b~2"}),
        ((REJECT, REJECT), "failed", {}),
    ],
    ids=["both", "first", "second", "none"],
)
async def test_asked_apart(answers, status, outputs):
    """Of tasks for which nothing is proposed together, each has its own question, at once, and its own answer."""
    result, said, triggers, elapsed = await two_fail(one_by_one, *answers, apart=True)
    assert (result.status, result.outputs, elapsed) == (status, outputs, 10)
    assert triggers == [("t1",), ("t2",)]
    assert said[:4] == ["asked q1", "ask low-confidence", "asked q2", "ask low-confidence"]


async def test_one_of_two_is_approved():
    """A person who approves of one of two candidates for different tasks is asked about the other task at once."""
    result, said, triggers, elapsed = await two_fail(each, APPROVE, APPROVE)
    assert (result.status, result.outputs, elapsed) == (
        "succeeded",
        {"a": "a~2", "b": "b~2", "c": "c"},
        20,
    )
    assert triggers == [("t1", "t2"), ("t2",)]
    assert said == [
        *(
            "asked q1",
            "ask low-confidence",
            "q1 approve",
            "revised by person",
            "execute person-approve",
        ),
        *(
            "asked q2",
            "ask low-confidence",
            "q2 approve",
            "revised by person",
            "execute person-approve",
        ),
    ]


async def test_both_are_declined():
    """A person who rejects a question about two tasks is not asked about either of them again."""
    result, said, triggers, _ = await two_fail(each, REJECT)
    assert (result.status, triggers) == ("failed", [("t1", "t2")])
    assert said[:4] == ["asked q1", "ask low-confidence", "q1 reject", "keep person-reject"]


@pytest.mark.parametrize(
    ("changes", "questions"),
    [
        ((SkipTask(task_id="a"),), [("t1", "t2"), ("t2",)]),
        ((SkipTask(task_id="a"), SkipTask(task_id="b")), [("t1", "t2")]),
        ((ModifyTask(task_id="c", fields={"depends_on": []}),), [("t1", "t2")]),
    ],
    ids=["one", "both", "neither"],
)
async def test_own_changes(changes, questions):
    """A person's own changes answer for the tasks they are about, and where they are about none of them, for all."""
    result, _, triggers, _ = await two_fail(each, Answer("modify", changes=changes), APPROVE)
    assert triggers[: len(questions)] == questions
    assert result.outputs["c"] == "c"

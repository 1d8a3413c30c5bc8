"""Gates: those that come with the library, and what becomes of gates that fail."""

import anyio.lowlevel
import pytest

from replanning import Answer, CallbackGate, Question, StoreGate, Task
from replanning.changes import SkipTask
from replanning.journal import (
    AnswerRefused,
    ErrorContained,
    QuestionReminded,
    SqliteStore,
)
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.testing import ScriptedGate, VirtualClock, hangs, raises, returns
from tests.support.questions import asking, dialogue
from tests.support.runs import bodies, chain, failing, plan

APPROVE = Answer("approve", by="ada", choice=1)
SIDE = plan(Task(id="a"), Task(id="b", depends_on=("a",)), Task(id="other"))
"""A plan of which one part goes on when `a` fails."""


# Gates that fail


async def test_a_gate_that_raises(clock):
    """A failing gate is contained: the rest runs, and the question stays open for an answer from elsewhere."""
    engine = asking(
        clock, gate=ScriptedGate([raises(ConnectionError("no web hook"), after=5)], clock=clock)
    )
    result = await engine.execute(SIDE, failing("a"))
    assert (result.status, result.outputs) == ("needs_human", {"other": "other"})
    engine.answer(result.questions[0], "approve", by="ada", choice=1)
    engine.gate = None
    resumed = await engine.attach(SequentialOrchestrator(failing())).resume(result.run)
    assert (resumed.status, resumed.outputs) == (
        "succeeded",
        {"a": None, "b": "b", "other": "other"},
    )
    (contained,) = bodies(engine.store, result.run, ErrorContained)
    assert (contained.where, contained.error) == ("gate", "ConnectionError('no web hook')")
    dialogue(engine, result.run)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "yes",
        {"verdict": "approve"},
        Answer("sure"),  # type: ignore[arg-type]
        Answer(None),  # type: ignore[arg-type]
        Answer("approve", choice=2),
        Answer("approve", choice=-1),
        Answer("approve", choice="1"),  # type: ignore[arg-type]
        Answer("approve", by=7),  # type: ignore[arg-type]
        Answer("reject", comment=b"no"),  # type: ignore[arg-type]
        Answer("modify"),
        Answer("modify", changes=None),  # type: ignore[arg-type]
        Answer("modify", changes=("skip",)),  # type: ignore[arg-type]
        Answer("modify", changes=(SkipTask(task_id="ghost"),)),
    ],
    ids=repr,
)
async def test_a_gate_that_talks_nonsense(answer, clock):
    """Nonsense is refused with the reason, asked again a few times and no more, and changes nothing."""
    questions: list[Question] = []

    def ask(question):
        questions.append(question)
        return answer

    engine = asking(clock, gate=CallbackGate(ask))
    result = await engine.execute(SIDE, failing("a"))
    assert (result.status, result.outputs, result.revisions) == (
        "needs_human",
        {"other": "other"},
        (),
    )
    assert 1 < len(questions) < 10
    reasons = {body.reason for body in bodies(engine.store, result.run, AnswerRefused)}
    assert {question.rejection_reason for question in questions} == {"", *reasons}
    assert "refused" in bodies(engine.store, result.run, ErrorContained)[0].error
    assert dialogue(engine, result.run) == ["asked q1", "ask low-confidence"]


async def test_a_gate_that_hangs(clock):
    """A gate that never comes back, with all the time in the world, is let go when the answer comes from elsewhere."""
    gate = ScriptedGate([hangs()])
    engine = asking(clock, gate=gate, approval={"timeout": None})
    async with engine.open(SIDE) as run:
        for name in ("a", "other"):
            run.failed(run.started(name), "broken") if name == "a" else run.succeeded(
                run.started(name)
            )
        await clock.sleep(1e6)
        assert gate.questions[0].deadline is None
        engine.answer(gate.questions[0].id, "approve", choice=1)
        run.succeeded(run.started("b"))
        result = await run.wait()
    assert result.status == "succeeded"


@pytest.mark.parametrize("reminder", ["raises", "hangs"])
async def test_a_reminder_that_fails(reminder, clock):
    """A reminder that raises is contained, one that hangs holds up neither answer nor end."""

    class Forgetful(ScriptedGate):
        async def remind(self, question):
            if reminder == "raises":
                raise RuntimeError("no mail")
            await clock.sleep(1e6)

    engine = asking(clock, gate=Forgetful([returns(APPROVE, after=280)], clock=clock))
    result = await engine.execute(chain("a"), failing("a"))
    assert (result.status, clock.elapsed) == ("succeeded", 280)
    assert len(bodies(engine.store, result.run, QuestionReminded)) == 1
    contained = [
        (body.where, body.error) for body in bodies(engine.store, result.run, ErrorContained)
    ]
    assert contained == (
        [("gate reminder", "RuntimeError('no mail')")] if reminder == "raises" else []
    )


async def test_a_gate_is_cancelled_when_its_time_is_up(clock):
    """The call of a gate is cancelled when the deadline passes."""
    closed = []

    async def ask(question):
        try:
            await anyio.sleep_forever()
        finally:
            closed.append(clock.elapsed)
        raise AssertionError

    engine = asking(clock, gate=CallbackGate(ask), approval={"on_timeout": "skip"})
    result = await engine.execute(chain("a"), failing("a"))
    assert (result.status, closed) == ("succeeded", [300])


# Gates that come with the library


async def test_callback():
    """A callback may be sync or async, and so may its reminder."""

    async def later(question: Question) -> Answer:
        await anyio.lowlevel.checkpoint()
        return APPROVE

    async def remind_later(question: Question) -> None:
        reminded.append(question.id)

    for gate in (CallbackGate(lambda question: APPROVE), CallbackGate(later)):
        async with VirtualClock() as clock:
            assert (
                await asking(clock, gate=gate).execute(chain("a"), failing("a"))
            ).status == "succeeded"
    reminded: list[str] = []
    for remind in (lambda question: reminded.append(question.id), remind_later, None):
        reminded.clear()
        async with VirtualClock() as clock:

            async def slow(question: Question) -> Answer:
                await clock.sleep(299)
                return APPROVE

            result = await asking(clock, gate=CallbackGate(slow, remind)).execute(
                chain("a"), failing("a")
            )
        assert result.status == "succeeded"
        assert len(reminded) == (remind is not None)


async def test_store_gate(tmp_path, clock):
    """The store gate keeps the run waiting for an answer that is left in the store, and takes it within a second."""
    store = SqliteStore(f"{tmp_path}/history.db")
    engine = asking(clock, gate=StoreGate(), store=store)
    elsewhere = asking(clock, store=SqliteStore(f"{tmp_path}/history.db"))
    swarm = engine.attach(SwarmOrchestrator(failing("a")))
    results = []

    async def run() -> None:
        results.append(await swarm.run(chain("a", "b")))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await clock.sleep(100)
        (question,) = elsewhere.pending()
        assert "+ a [SKIPPED]" in question.diffs[1]
        assert [trigger.kind for trigger in question.triggers] == ["task-failed"]
        elsewhere.answer(question.id, "approve", by="ada", choice=1)
    elsewhere.store.close()
    assert (results[0].status, results[0].revisions[0].by) == ("succeeded", "person:ada")
    assert 100 <= clock.elapsed <= 101
    store.close()

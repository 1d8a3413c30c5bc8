"""Answers to questions: later, from elsewhere, stale, across crashes and store failures."""

from types import NoneType

import pytest

from replanning import (
    Answer,
    ReplanningEngine,
    ReplanRequest,
    RunResult,
    Task,
    TaskState,
)
from replanning.changes import AbortRun, AddTask, SkipTask
from replanning.errors import ChangeRejected, NotRunning, StaleAnswer, UnknownQuestion
from replanning.journal import (
    AlternativesConsidered,
    AttemptStarted,
    InboxMessage,
    MemoryStore,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RunEnded,
    RunStore,
    SqliteStore,
    TriggerDropped,
)
from replanning.orchestrators import SequentialOrchestrator
from replanning.plan import RunId
from replanning.testing import (
    ScriptedGate,
    VirtualClock,
    hangs,
    returns,
)
from tests.support.questions import asking, dialogue, proposing, two_ways
from tests.support.resume import cut
from tests.support.runs import Proposer, alternative, bodies, chain, failing, perform, plan

APPROVE = Answer("approve", by="ada")
REJECT = Answer("reject", by="ada", comment="not now")


# Several answers at once


async def three_questions(
    clock: VirtualClock, store: RunStore | None = None
) -> tuple[ReplanningEngine, RunResult]:
    """A run that asks about two tasks that failed of one cause, and about a third that failed of another."""
    engine = asking(clock, store=store)
    async with engine.open(plan(*(Task(id=i, arguments={"of": i}) for i in "abc"))) as run:
        for task_id, error in (
            ("a", "disk 1 is full"),
            ("b", "no network"),
            ("c", "disk 2 is full"),
        ):
            run.failed(run.started(task_id), OSError(error))
            await clock.sleep(1)
    return engine, run.result


@pytest.mark.parametrize(
    ("verdict", "cause", "left"),
    [("approve", None, []), ("reject", None, []), ("approve", "q3", ["q2"])],
    ids=["approved", "rejected", "one cause"],
)
async def test_answer_all(verdict, cause, left):
    """All open questions of a run get one answer, or those that have a cause in common with one of them."""
    async with VirtualClock() as clock:
        engine, result = await three_questions(clock)
        about = None if cause is None else f"{result.run}.{cause}"
        answers = engine.answer_all(result.run, verdict, cause_of=about, by="ada")
        names = [name for name in ("q1", "q2", "q3") if name not in left]
        assert answers == {f"{result.run}.{name}": None for name in names}
        again = engine.answer_all(result.run, verdict, by="ada")
        assert [type(error) for error in again.values()] == [
            NoneType if name in left else UnknownQuestion for name in ("q1", "q2", "q3")
        ]
        resumed = await engine.attach(SequentialOrchestrator(failing())).resume(result.run)
    assert resumed.status == ("succeeded" if verdict == "approve" else "failed")
    closed = [
        (body.verdict, body.by) for body in bodies(engine.store, result.run, QuestionAnswered)
    ]
    assert closed == [(verdict, "ada")] * 3


async def test_answer_all_where_one_is_stale(clock):
    """A question that an earlier answer makes stale is reported; the others are answered all the same."""

    def propose(request):
        (task_id,) = request.triggers[0].tasks
        skipped = [SkipTask(task_id=i) for i in ((task_id, "a") if task_id == "b" else (task_id,))]
        return [alternative(*skipped, confidence=0.4)]

    engine = asking(clock, propose, gate=ScriptedGate([hangs()] * 4))
    async with engine.open(plan(*(Task(id=i) for i in "abcd"))) as run:
        for task_id in "abc":
            run.failed(run.started(task_id), OSError(f"{task_id} is broken"))
            await clock.sleep(1)
        answers = engine.answer_all(run.id, "approve", choice=0, comment="go on")
        assert [type(error) for error in answers.values()] == [NoneType, StaleAnswer, NoneType]
        skipped = [entry.id for entry in run.live if entry.state is TaskState.SKIPPED]
        assert skipped == ["a", "c"]


async def test_answer_all_without_questions(clock):
    """Where nothing is asked, or not what the answer is to have a cause in common with, that is an error."""
    engine, result = await three_questions(clock)
    with pytest.raises(UnknownQuestion, match="it is not open"):
        engine.answer_all(result.run, "approve", cause_of=f"{result.run}.q7")
    done = await engine.execute(chain("a"), failing())
    with pytest.raises(UnknownQuestion, match="has no open question"):
        engine.answer_all(done.run, "approve")


async def test_resumed_run_is_edited_before_it_ends(clock):
    """A run in which nothing can go on is resumed, and what its caller changes then is done; it does not end before."""
    engine = asking(clock)
    result = await engine.execute(plan(Task(id="a"), Task(id="b")), failing("a"))
    assert result.status == "needs_human"
    async with engine.resume(result.run) as run:
        run.add_task(Task(id="c"))
        assert await perform(run) == ["c"]


# Late and remote answers


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_without_a_gate(kind, elsewhere, tmp_path):
    """Without a gate the run ends needs_human with a stored question; a resume applies a later answer."""
    store = SqliteStore(f"{tmp_path}/history.db") if kind == "sqlite" else MemoryStore()
    async with VirtualClock() as clock:
        engine = asking(clock, store=store)
        document = plan(Task(id="a"), Task(id="b", depends_on=("a",)), Task(id="other"))
        result = await engine.execute(document, failing("a"))
        assert (result.status, result.outputs) == ("needs_human", {"other": "other"})
        other = asking(clock, store=store) if elsewhere else engine
        (question,) = other.pending()
        assert (question.id, question.deadline) == (result.questions[0], None)
        assert "+ a~2" in question.diffs[0]
        with pytest.raises(ChangeRejected, match="numbered from 0"):
            other.answer(question.id, "approve", choice=5)
        other.answer(question.id, "approve", by="ada")
        with pytest.raises(UnknownQuestion, match="answered already"):
            other.answer(question.id, "reject")
        resumed = await other.attach(SequentialOrchestrator(failing())).resume(result.run)
    assert (resumed.status, resumed.outputs) == (
        "succeeded",
        {"a": "a~2", "b": "b", "other": "other"},
    )
    assert [revision.by for revision in resumed.revisions] == ["person:ada"]
    started = [body.task for body in bodies(store, result.run, AttemptStarted)]
    assert sorted(started) == ["a", "a~2", "b", "other"]
    store.close()


async def test_resumed_without_an_answer():
    """A run resumed without an answer needs the same one again, and asks no second question."""
    async with VirtualClock() as clock:
        engine = asking(clock)
        result = await engine.execute(chain("a"), failing("a"))
        again = await engine.attach(SequentialOrchestrator(failing())).resume(result.run)
    assert (again.status, again.questions) == ("needs_human", result.questions)
    assert len(bodies(engine.store, result.run, QuestionAsked)) == 1


async def test_resumed_with_a_gate():
    """A resume asks an open question through its gate, with a new deadline."""
    async with VirtualClock() as clock:
        store = MemoryStore()
        result = await asking(clock, store=store).execute(chain("a"), failing("a"))
        await clock.sleep(1000)
        gate = ScriptedGate([returns(APPROVE, after=60)], clock=clock)
        engine = asking(clock, gate=gate, store=store)
        resumed = await engine.attach(SequentialOrchestrator(failing())).resume(result.run)
    assert resumed.status == "succeeded"
    assert gate.questions[0].deadline == clock.now() - 60 + 300


@pytest.mark.parametrize("answered", [False, True])
async def test_resumed_after_the_deadline(answered, tmp_path):
    """A resume applies an answer to an expired question at once, and without one asks again with a new deadline."""
    store = SqliteStore(f"{tmp_path}/history.db")
    async with VirtualClock() as clock:
        paused = await asking(clock, gate=ScriptedGate(), store=store).execute(
            chain("a", "b"), failing("a")
        )
        assert paused.status == "paused"
        gate = ScriptedGate([] if answered else [returns(APPROVE, after=60)], clock=clock)
        engine = asking(clock, gate=gate, store=store)
        if answered:
            engine.answer(paused.questions[0], "approve", by="ada")
        resumed = await engine.attach(SequentialOrchestrator(failing())).resume(paused.run)
    found = (resumed.status, len(gate.questions), clock.elapsed)
    assert found == (("succeeded", 0, 300) if answered else ("succeeded", 1, 360))
    store.close()


# Stale questions


async def test_stale_answer():
    """An approval of changed tasks is refused, and triggers that still hold are considered again at once."""
    async with VirtualClock() as clock:
        provider = Proposer(two_ways)
        engine = asking(clock, provider, gate=ScriptedGate())
        async with engine.open(chain("a", "b")) as run:
            run.failed(run.started("a"), "broken")
            await clock.sleep(1)
            (question,) = engine.pending()
            run.modify_task("a", arguments={"fast": False})
            with pytest.raises(StaleAnswer, match="changed since"):
                engine.answer(question.id, "approve", by="ada")
            await clock.sleep(1)
            (second,) = engine.pending()
            assert second.id != question.id
            assert len(provider.requests) == 2
            engine.answer(second.id, "approve", by="ada", choice=1)
            run.succeeded(run.started("b"))
            result = await run.wait()
    assert result.status == "succeeded"
    assert [line for line in dialogue(engine, run.id) if line[0] in "aq"] == [
        "asked q1",
        "ask low-confidence",
        "q1 withdrawn",
        "asked q2",
        "ask low-confidence",
        "q2 approve",
    ]


async def test_edit_withdraws_a_question():
    """An edit of its tasks withdraws a question; the run does not wait for it."""
    async with VirtualClock() as clock:
        engine = asking(clock, gate=ScriptedGate())
        async with engine.open(chain("a", "b")) as run:
            run.failed(run.started("a"), "broken")
            await clock.sleep(1)
            (question,) = engine.pending()
            run.replace_task("a", Task(id="mine"))
            assert engine.pending() == []
            for name in ("mine", "b"):
                run.succeeded(run.started(name))
            result = await run.wait()
            with pytest.raises(StaleAnswer, match="changed since"):
                engine.answer(question.id, "approve")
    assert (result.status, clock.elapsed) == ("succeeded", 1)


async def test_question_about_a_finished_task_is_stale():
    """A question about a running task is stale once the task has finished; a late approval is refused."""
    for seconds in (10, 400):
        async with VirtualClock() as clock:
            one_more = proposing(AddTask(task=Task(id="more")))
            engine = asking(
                clock, one_more, gate=ScriptedGate(), approval={"on_timeout": "abort"}, cooldown=0
            )
            async with engine.open(
                plan(Task(id="slow"), Task(id="c", depends_on=("slow",)))
            ) as run:
                attempt = run.started("slow")
                run.request_replan("is slow right?", tasks=["slow"])
                await clock.sleep(1)
                (question,) = engine.pending()
                run.succeeded(attempt)
                run.succeeded(run.started("c"))
                await clock.sleep(seconds)
                with pytest.raises(StaleAnswer, match="changed since"):
                    engine.answer(question.id, "approve")
                await clock.sleep(1)
                engine.answer(
                    engine.pending()[0].id, "reject"
                )  # the request itself was considered anew
                result = await run.wait()
        assert (result.status, result.revisions) == ("succeeded", ())
        assert "q1 withdrawn" in dialogue(engine, run.id)


async def test_asked_once_for_one_cause():
    """A rejected or unanswered alternative is not asked again when the plan gets stuck over it."""
    for answer, outcome in ((REJECT, "pause"), (hangs(), "continue")):
        async with VirtualClock() as clock:
            gate = ScriptedGate([answer], clock=clock)
            engine = asking(clock, gate=gate, approval={"on_timeout": outcome})
            result = await engine.execute(chain("a", "b"), failing("a"))
        assert (result.status, len(gate.questions)) == ("failed", 1)
        last = bodies(engine.store, result.run, AlternativesConsidered)[-1]
        assert [candidate.rejected for candidate in last.candidates] == [
            "a person was asked about the same already"
        ] * 2


# Concurrency


class Thinking:
    """A provider that takes some time."""

    name = "thinking"

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self.requests: list[ReplanRequest] = []
        self._clock, self._seconds = clock, seconds

    async def propose(self, request):
        self.requests.append(request)
        if request.triggers[0].kind == "human-request":
            await self._clock.sleep(self._seconds)
            return [alternative(AddTask(task=Task(id=request.view.unused_id("extra"))))]
        return two_ways(request)


@pytest.mark.parametrize("verdict", ["approve", "reject"])
async def test_an_answer_while_something_is_decided(verdict):
    """An answer that arrives while providers work on another trigger leaves that to be decided once."""
    async with VirtualClock() as clock:
        provider = Thinking(clock, 10)
        engine = asking(clock, provider, gate=ScriptedGate())
        async with engine.open(plan(Task(id="a"), Task(id="b"))) as run:
            run.failed(run.started("a"), "broken")
            await clock.sleep(1)
            run.request_replan("add something")
            await clock.sleep(5)
            engine.answer(engine.pending()[0].id, verdict, by="ada")
            await clock.sleep(60)
    assert [body.decision for body in engine.history(run.id).events] == [
        "execute" if verdict == "approve" else "keep",
        "execute",
    ]
    assert bodies(engine.store, run.id, TriggerDropped) == []
    considered = [body.triggers for body in bodies(engine.store, run.id, AlternativesConsidered)]
    assert considered == [("t1",), ("t2",)]
    assert "extra~2" in run.live
    assert "extra~3" not in run.live
    dialogue(engine, run.id)


async def test_abort_cancels_the_gate():
    """An abort cancels the gate, and nothing is recorded after the end."""
    async with VirtualClock() as clock:
        gone: list[float] = []

        class Slow(ScriptedGate):
            async def ask(self, question):
                try:
                    await clock.sleep(1e6)
                finally:
                    gone.append(clock.elapsed)
                raise AssertionError

        engine = asking(clock, gate=Slow())
        async with engine.open(plan(Task(id="a"), Task(id="b"))) as run:
            run.failed(run.started("a"), "broken")
            await clock.sleep(5)
            (question,) = engine.pending()
            run.apply([AbortRun(reason="enough")])
            with pytest.raises(NotRunning, match="aborted"):
                engine.answer(question.id, "approve")
            assert engine.pending() == []
        assert engine.pending() == []
        with pytest.raises(NotRunning, match="aborted"):
            engine.answer(question.id, "approve")
    assert (run.result.status, gone) == ("aborted", [5])
    assert isinstance(list(engine.store.read(run.id))[-1].body, RunEnded)


async def test_only_the_first_answer_counts():
    """Of several stored answers the first counts; the others and invalid ones are recorded and ignored."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        engine = asking(clock, store=store)
        result = await engine.execute(chain("a"), failing("a"))
        question = result.questions[0]
        for payload in (
            {"verdict": "approve", "choice": 1},
            {"verdict": "reject"},
            {"verdict": 7, "choice": "x"},
            {},
        ):
            store.post(
                RunId(result.run),
                InboxMessage("answer", clock.now(), "ada", {"question": question, **payload}),
            )
        resumed = await engine.attach(SequentialOrchestrator(failing())).resume(result.run)
    assert (resumed.status, resumed.outputs) == ("succeeded", {"a": None})
    assert [body.verdict for body in bodies(store, result.run, QuestionAnswered)] == ["approve"]


# Crashes and store failures


TWICE = plan(Task(id="a", idempotent=True), Task(id="b", depends_on=("a",), idempotent=True))


async def answered(answer: Answer | None, outcome: str = "pause") -> list[Record]:
    """Return the journal of a run whose question was answered or expired."""
    async with VirtualClock() as clock:
        gate = ScriptedGate([answer] if answer else [])
        engine = asking(clock, gate=gate, approval={"on_timeout": outcome})
        result = await engine.execute(TWICE, failing("a"))
        return list(engine.store.read(RunId(result.run)))


MINE = Answer("modify", by="ada", changes=(SkipTask(task_id="a"),))


@pytest.mark.parametrize(
    ("answer", "outcome", "status", "revisions"),
    [
        (APPROVE, "abort", "succeeded", 1),
        (MINE, "abort", "succeeded", 1),
        (REJECT, "abort", "failed", 0),
        (None, "skip", "succeeded", 1),
        (None, "continue", "failed", 0),
        (None, "abort", "aborted", 1),
    ],
)
async def test_crash_at_any_record(answer, outcome, status, revisions):
    """If the process ends after any record, a resume applies the answer once and asks once."""
    records = await answered(answer, outcome)
    asked = next(i for i, record in enumerate(records) if isinstance(record.body, QuestionAsked))
    for end in range(asked + 1, len(records)):
        async with VirtualClock() as clock:
            clock.advance(1000)
            gate = ScriptedGate([answer] if answer else [])
            engine = asking(
                clock, gate=gate, store=cut(records[:end]), approval={"on_timeout": outcome}
            )
            result = await engine.attach(SequentialOrchestrator(failing())).resume("run-1")
        assert (result.status, len(result.revisions)) == (status, revisions), (
            f"after {records[end - 1]}"
        )
        assert len(bodies(engine.store, "run-1", QuestionAsked)) == 1
        assert len(bodies(engine.store, "run-1", QuestionAnswered)) == 1
        dialogue(engine, "run-1")

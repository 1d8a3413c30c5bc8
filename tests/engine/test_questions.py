"""Questions to people: when they are asked, what they hold, how they are answered, and what follows."""

import anyio.lowlevel
import pytest

from replanning import Answer, ReplanningEngine, ReplanningError, Task
from replanning.changes import AddTask, ReplaceTask, RetryTask, SkipTask
from replanning.errors import ChangeRejected, NotRunning, UnknownQuestion
from replanning.history import run_status
from replanning.journal import (
    AnswerRefused,
    AttemptFenced,
    AttemptStarted,
    MemoryStore,
    QuestionReminded,
    SqliteStore,
    TriggerAttached,
)
from replanning.testing import ScriptedExecutor, ScriptedGate, VirtualClock, raises, returns
from replanning.testing.clock import EPOCH
from tests.support.questions import asked, asking, dialogue, proposing, two_ways
from tests.support.runs import Proposer, bodies, chain, failing, perform, plan

APPROVE = Answer("approve", by="ada")
REJECT = Answer("reject", by="ada", comment="not now")


# When a person is asked


async def test_doubt_asks(clock):
    """A low score asks, with every candidate, its score in parts, what it would change, and until when."""
    gate = ScriptedGate([returns(APPROVE, after=60)], clock=clock)
    engine = asking(clock, gate=gate)
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, clock.elapsed) == ("succeeded", 60)
    (question,) = gate.questions
    assert (question.run, question.holds, question.deadline) == (
        result.run,
        ("a",),
        question.asked_at + 300,
    )
    assert "a is broken" in question.text
    assert "confidence 0.61 is below 0.7" in question.text
    assert [trigger.kind for trigger in question.triggers] == ["task-failed"]
    assert [candidate.alternative.reason for candidate in question.candidates] == [
        "another way",
        "without it",
    ]
    assert question.candidates[0].score is not None
    assert question.candidates[0].score.self_assessment == 0.4
    assert "- a [FAILED]\n+ a~2 [PENDING]\n  b: waiting for a~2 instead of a" in question.diffs[0]
    assert "+ a [SKIPPED]" in question.diffs[1]


async def nobody_knows(*answers: Answer, always_for: tuple[str, ...] = ("goal-unreachable",)):
    """A run that cannot go on and for which no provider knows a way, and the gate that was asked."""
    async with VirtualClock() as clock:
        gate = ScriptedGate([returns(answer, after=60) for answer in answers], clock=clock)
        engine = asking(clock, lambda request: [], gate=gate, approval={"always_for": always_for})
        result = await engine.execute(chain("a", "b"), failing("a"))
    return result, dialogue(engine, result.run), gate.questions


async def test_nobody_knows_a_way_on():
    """A person is asked before a run fails for want of a way on, and may know one."""
    skip = Answer("modify", by="ada", changes=(SkipTask(task_id="a"),))
    result, said, questions = await nobody_knows(APPROVE, skip)
    assert result.status == "succeeded"
    answered = ["q1 modify", "revised by person:ada", "execute person-modify"]
    assert said == ["keep no-alternative", "asked q1", "ask no-alternative", *answered]
    first, second = questions
    assert (first.candidates, first.holds) == ((), ("a",))
    assert first.text.endswith("no provider proposed an alternative")
    assert "has 0 candidates" in second.rejection_reason


async def test_nobody_knows_a_way_on_either():
    """If the person rejects, the run fails, and is not asked about again."""
    result, said, _ = await nobody_knows(REJECT)
    assert (result.status, result.reason) == ("failed", "'a' failed (a is broken)")
    assert said[1:] == ["asked q1", "ask no-alternative", "q1 reject", "keep person-reject"]


async def test_nobody_is_asked_for_a_way_on(clock):
    """The run fails without a question where the settings do not want one, or nobody is there to be asked."""
    result, said, questions = await nobody_knows(always_for=())
    assert (result.status, said, questions) == ("failed", ["keep no-alternative"], [])
    assert (
        await asking(clock, lambda request: []).execute(chain("a", "b"), failing("a"))
    ).status == "failed"


def starts(engine: ReplanningEngine, run: str) -> dict[str, float]:
    """When each task of a run began, in seconds on the clock."""
    records = engine.store.read(run)  # type: ignore[arg-type]
    return {
        record.body.task: record.at - EPOCH
        for record in records
        if isinstance(record.body, AttemptStarted)
    }


# What waits, and what does not


async def test_only_the_footprint_waits(clock):
    """While a person thinks, what the question is about waits with its dependents, and everything else runs."""
    engine = asking(clock, gate=ScriptedGate([returns(APPROVE, after=60)], clock=clock))
    work = ScriptedExecutor(
        {"a": raises(ValueError("broken"))}, default=returns(after=5), clock=clock
    )
    waiting, free = (
        (Task(id="a"), Task(id="b", depends_on=("a",))),
        (Task(id="x"), Task(id="y", depends_on=("x",))),
    )
    result = await engine.execute(plan(*waiting, *free), work)
    assert result.status == "succeeded"
    assert starts(engine, result.run) == {"a": 0, "x": 0, "y": 5, "a~2": 60, "b": 65}


async def test_a_ready_task_is_held(clock):
    """A task that could run is not handed out while a question is about it, and is when the question is rejected."""
    engine = asking(clock, gate=ScriptedGate([returns(REJECT, after=60)], clock=clock))
    work = ScriptedExecutor({"slow": returns(after=20)}, clock=clock)
    tasks = (
        Task(id="slow"),
        Task(id="other", depends_on=("slow",)),
        Task(id="c", depends_on=("slow",)),
    )
    async with engine.open(plan(*tasks)) as run:
        run.request_replan("is c right?", tasks=["c"])
        await perform(run, work)
    assert run.result.status == "succeeded"
    assert starts(engine, run.id) == {"slow": 0, "other": 20, "c": 60}


async def test_a_held_task_cannot_be_started(clock):
    """A task that a question holds cannot be started by a report, nor by a worker that had pulled it already."""
    engine = asking(clock, gate=ScriptedGate([returns(REJECT, after=60)], clock=clock))
    async with engine.open(plan(Task(id="c"))) as run:
        task = await anext(run.ready())
        run.request_replan("is c right?", tasks=["c"])
        await clock.sleep(1)
        with pytest.raises(NotRunning, match="'c' can start: the task is held by a question"):
            run.started("c")
        async with run.attempt(task):
            await anyio.lowlevel.checkpoint()
            raise AssertionError
        assert await perform(run) == ["c"]
    assert starts(engine, run.id) == {"c": 60}
    (fenced,) = bodies(engine.store, run.id, AttemptFenced)
    assert fenced.report == "not started: the task is held by a question"


async def test_a_dependency_that_finishes_is_no_change(clock):
    """That a held task becomes ready meanwhile does not make an approval stale."""
    engine = asking(clock, gate=ScriptedGate([returns(APPROVE, after=60)], clock=clock))
    async with engine.open(chain("slow", "c")) as run:
        run.request_replan("is c right?", tasks=["c"])
        assert await perform(run, ScriptedExecutor({"slow": returns(after=20)}, clock=clock)) == [
            "slow",
            "c~2",
        ]
    answered = ["q1 approve", "revised by person:ada", "execute person-approve"]
    assert dialogue(engine, run.id) == ["asked q1", "ask low-confidence", *answered]


async def test_a_later_trigger_waits_with_the_question(clock):
    """A trigger on what a question holds is attached to it, and is considered when it has been answered."""
    gate = ScriptedGate([returns(REJECT, after=100), returns(REJECT)], clock=clock)
    provider = Proposer(
        lambda request: two_ways(request) if request.triggers[0].kind == "task-failed" else []
    )
    engine = asking(clock, provider, gate=gate)
    async with engine.open(
        plan(Task(id="a", arguments={"x": "${context.x}"}), context={"x": 1})
    ) as run:
        run.failed(run.started("a"), "broken")
        await clock.sleep(10)
        run.change_context({"x": 2})
        await clock.sleep(10)
        assert [body.trigger for body in bodies(engine.store, run.id, TriggerAttached)] == ["t2"]
        assert len(provider.requests) == 1
        result = await run.wait()
    assert result.status == "failed"
    asked = [request.triggers[0].kind for request in provider.requests]
    assert asked == ["task-failed", "context-changed", "goal-unreachable"]
    assert dialogue(engine, run.id)[:4] == [
        "asked q1",
        "ask low-confidence",
        "q1 reject",
        "keep person-reject",
    ]


async def test_two_questions_at_once(clock):
    """Questions about different tasks are open side by side, and answered in any order."""
    delays = {"a": 60, "b": 30}
    gate = ScriptedGate(
        lambda question: returns(APPROVE, after=delays[question.holds[0]]), clock=clock
    )
    engine = asking(clock, gate=gate)
    result = await engine.execute(plan(Task(id="a"), Task(id="b")), failing("a", "b"))
    assert (result.status, clock.elapsed) == ("succeeded", 60)
    assert [line for line in dialogue(engine, result.run) if line[0] == "q"] == [
        "q2 approve",
        "q1 approve",
    ]


# Answers


@pytest.mark.parametrize(
    ("choice", "outputs"), [(0, {"a": "a~2", "b": "b"}), (1, {"a": None, "b": "b"})]
)
async def test_approve(choice, outputs, clock):
    """The approved candidate is the one that is applied, and the record names the person."""
    gate = ScriptedGate([returns(Answer("approve", by="ada", choice=choice), after=5)], clock=clock)
    engine = asking(clock, gate=gate)
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, result.outputs) == ("succeeded", outputs)
    assert [(r.by, r.chosen, r.replan) for r in result.revisions] == [("person:ada", choice, "r1")]
    assert dialogue(engine, result.run)[2:] == [
        "q1 approve",
        "revised by person:ada",
        "execute person-approve",
    ]


async def test_reject(clock):
    """A rejection keeps the plan, and the record has the reason."""
    engine = asking(clock, gate=ScriptedGate([REJECT]))
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, result.revisions) == ("failed", ())
    assert dialogue(engine, result.run)[2:4] == ["q1 reject", "keep person-reject"]
    assert engine.history(result.run).events[0].reason == "not now"


async def test_modify(clock):
    """A person's own changes are applied in place of all candidates, and without a comment the reason says whose."""
    mine = (SkipTask(task_id="a"), AddTask(task=Task(id="instead"), before=("b",)))
    engine = asking(clock, gate=ScriptedGate([Answer("modify", "ada", changes=mine)]))
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, result.outputs) == (
        "succeeded",
        {"a": None, "b": "b", "instead": "instead"},
    )
    (revision,) = result.revisions
    assert (revision.by, revision.chosen, revision.changes) == ("person:ada", None, mine)
    assert revision.reason == "changes by ada"


@pytest.mark.parametrize(
    ("stated", "shown"), [("", "ada has the mail"), ("sent by hand", "sent by hand")]
)
async def test_comment_is_the_reason_of_a_skip(clock, stated, shown):
    """A task that a person skips without a reason is skipped for that of the answer."""
    skip = SkipTask(task_id="a", reason=stated)
    answer = Answer("modify", "ada", comment="ada has the mail", changes=(skip,))
    engine = asking(clock, gate=ScriptedGate([answer]))
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert result.revisions[0].changes == (SkipTask(task_id="a", reason=shown),)


async def test_reason_of_a_skip_is_the_reason_of_the_revision(clock):
    """Without a comment, a revision by a person has the reasons of its changes."""
    skip = SkipTask(task_id="a", reason="a person says that it is done")
    engine = asking(clock, gate=ScriptedGate([Answer("modify", "ada", changes=(skip,))]))
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert result.revisions[0].reason == "a person says that it is done"


async def test_changes_that_do_not_fit(clock):
    """Changes of a person that do not fit are refused, with every problem; the question stays and is asked again."""
    wrong = Answer(
        "modify",
        "ada",
        changes=(RetryTask(task_id="ghost"), SkipTask(task_id="b"), RetryTask(task_id="b")),
    )
    gate = ScriptedGate(
        [wrong, Answer("modify"), Answer("modify", "ada", changes=(SkipTask(task_id="a"),))]
    )
    engine = asking(clock, gate=gate)
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert result.status == "succeeded"
    assert len({question.id for question in gate.questions}) == 1
    refused = [body.reason for body in bodies(engine.store, result.run, AnswerRefused)]
    assert "there is no task 'ghost'" in refused[0]
    assert "at least one change" in refused[1]
    assert refused == [question.rejection_reason for question in gate.questions[1:]]


async def test_answer_by_calling_the_engine(clock):
    """An answer given to the engine, with changes as JSON or as objects, is carried out before the call returns."""
    gate = ScriptedGate()
    engine = asking(clock, gate=gate)
    async with engine.open(chain("a", "b")) as run:
        run.failed(run.started("a"), "broken")
        await clock.sleep(1)
        (question,) = engine.pending()
        assert question == engine.pending(run.id)[0] == gate.questions[0]
        with pytest.raises(ChangeRejected, match=r"changes\[0\].*kind"):
            engine.answer(question.id, "modify", changes=[{"kind": "explode"}])
        with pytest.raises(ChangeRejected, match="'ghost'"):
            engine.answer(question.id, "modify", changes=[{"kind": "skip", "task_id": "ghost"}])
        for verdict in ("approve", "reject"):
            with pytest.raises(
                ChangeRejected,
                match=f"changes: {verdict} takes no changes of your own; answer modify",
            ):
                engine.answer(question.id, verdict, changes=[{"kind": "skip", "task_id": "a"}])
        assert engine.pending() == [question]
        engine.answer(question.id, "modify", by="ada", changes=[SkipTask(task_id="a")])
        assert engine.pending() == []
        assert run.live.revision == 1
        run.succeeded(run.started("b"))
        result = await run.wait()
    assert result.status == "succeeded"
    assert result.revisions[0].by == "person:ada"


async def test_secret_in_an_edit_is_used_and_masked_in_the_journal(clock):
    """An edit with a secret gives it to the task, and the journal and the questions have a mask in its place."""
    secret = "AKIAIOSFODNN7EXAMPLE"
    new = ReplaceTask(task_id="a", tasks=(Task(id="a2", arguments={"key": secret}),))
    engine = asking(clock)
    async with engine.open(chain("a")) as run:
        run.apply([new])
        assert run.live.entry("a2").task.arguments == {"key": secret}
        run.succeeded(run.started("a2"))
    assert "AKIA" not in repr(list(engine.store.read(run.id)))


async def test_answers_that_are_none(clock):
    """A wrong id, verdict or choice, and a second answer, are refused in words that say what is right."""
    engine = asking(clock, gate=ScriptedGate())
    async with engine.open(chain("a")) as run:
        run.failed(run.started("a"), "broken")
        await clock.sleep(1)
        (question,) = engine.pending()
        for wrong in ("nonsense", "", f"{run.id}.q7", "nobody.q1", "../../etc/passwd.q1"):
            with pytest.raises(UnknownQuestion):
                engine.answer(wrong, "reject")
        with pytest.raises(UnknownQuestion, match=r"its id has the form RUN\.q1"):
            engine.answer("nonsense", "reject")
        with pytest.raises(ReplanningError, match="expected approve, reject or modify"):
            engine.answer(question.id, "yes")  # type: ignore[arg-type]
        with pytest.raises(ChangeRejected, match="2 candidates, numbered from 0"):
            engine.answer(question.id, "approve", choice=2)
        engine.answer(question.id, "reject", by="ada")
        with pytest.raises(UnknownQuestion, match=r"answered already.*reject.*ada"):
            engine.answer(question.id, "approve")
    assert dialogue(engine, run.id)[2:4] == ["q1 reject", "keep person-reject"]


# Time


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("abort", "aborted"), ("skip", "succeeded"), ("continue", "failed"), ("pause", "paused")],
)
async def test_nobody_answers(outcome, status, clock):
    """An unanswered question is closed as the settings say, and recorded as decided by the timeout."""
    engine = asking(clock, gate=ScriptedGate(), approval={"on_timeout": outcome})
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, clock.elapsed) == (status, 300)
    closing = [] if outcome == "pause" else [f"q1 {outcome}"]
    assert [line for line in dialogue(engine, result.run) if line[0] == "q"] == closing
    if outcome != "continue":
        assert result.questions == ((f"{result.run}.q1",) if outcome == "pause" else ())
    if outcome in ("abort", "pause"):
        assert "was not answered in time" in result.reason


@pytest.mark.parametrize(("durable", "status"), [(True, "paused"), (False, "aborted")])
async def test_nobody_answers_by_default(durable, status, tmp_path, clock):
    """Unless the settings say otherwise, the run pauses where it can be resumed, and is aborted where it cannot."""
    store = SqliteStore(f"{tmp_path}/history.db") if durable else MemoryStore()
    engine = asking(clock, gate=ScriptedGate(), store=store)
    result = await engine.execute(chain("a"), failing("a"))
    assert (result.status, clock.elapsed) == (status, 300)
    store.close()


async def test_skip_concerns_what_failed(clock):
    """A question that closes by skipping skips what it was about, and not what the candidates would have touched."""
    both = proposing(SkipTask(task_id="a"), AddTask(task=Task(id="more"), before=("last",)))
    engine = asking(clock, both, gate=ScriptedGate(), approval={"on_timeout": "skip"})
    result = await engine.execute(chain("a", "b", "last"), failing("a"))
    assert (result.status, result.outputs) == ("succeeded", {"a": None, "b": "b", "last": "last"})
    assert asked(engine, result.run)[0].holds == ("a", "last")


@pytest.mark.parametrize(("answered", "reminders"), [(100, []), (290, [240])])
async def test_reminder(answered, reminders, clock):
    """A person is reminded once, before the time is up; after the answer nothing is left that waits for it."""
    gate = ScriptedGate([returns(APPROVE, after=answered)], clock=clock)
    engine = asking(clock, gate=gate, approval={"on_timeout": "abort"})
    work = ScriptedExecutor({"a": raises(ValueError()), "slow": returns(after=1000)}, clock=clock)
    result = await engine.execute(plan(Task(id="a"), Task(id="slow")), work)
    assert (result.status, clock.elapsed) == ("succeeded", 1000)
    records = engine.store.read(result.run)
    assert [
        record.at - EPOCH for record in records if isinstance(record.body, QuestionReminded)
    ] == reminders
    assert gate.reminders == gate.questions[: len(reminders)]


@pytest.mark.parametrize(
    ("seconds", "status", "end", "used"), [(60, "succeeded", 290, 90), (150, "aborted", 100, 100)]
)
async def test_work_beside_a_question(clock, seconds, status, end, used):
    """The budget's wall clock goes on while other tasks run, and stands still when only the answer is waited for."""
    gate = ScriptedGate([returns(APPROVE, after=250)], clock=clock)
    engine = asking(clock, gate=gate, budget={"wall_clock": 100})
    script = {
        "a": raises(ValueError(), after=10),
        "a~2": returns(after=30),
        "b": returns(after=seconds),
    }
    result = await engine.execute(
        plan(Task(id="a"), Task(id="b")), ScriptedExecutor(script, clock=clock)
    )
    (info,) = engine.store.runs()
    report = run_status(engine.store, info, now=clock.now())
    assert (result.status, clock.elapsed, report.usage.elapsed) == (status, end, used)

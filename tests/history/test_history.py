"""The history of a run: a projection of its journal, with the plan at any revision."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest

from replanning import (
    Alternative,
    Answer,
    CallbackGate,
    ReplanningEngine,
    ReplanRequest,
    Task,
)
from replanning.changes import (
    ModifyTask,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import ChangeRejected, JournalCorrupt, StoreError, UnknownRun
from replanning.history import (
    Calibration,
    ReplanEvent,
    ReplanHistory,
    ReplanMetrics,
    calibrate,
    compute_metrics,
    export_history,
    import_history,
    markdown_report,
    open_questions,
    text_report,
)
from replanning.history.events import calibrate_sources
from replanning.journal import (
    Candidate,
    MemoryStore,
)
from replanning.plan.types import ReplanId
from replanning.testing import ScriptedExecutor, ScriptedGate, raises, returns
from tests.support.questions import doubtful
from tests.support.runs import (
    Proposer,
    again,
    alternative,
    chain,
    environment,
    failing,
    history_of,
    plan,
)


def two_ways(request: ReplanRequest) -> list[Alternative]:
    """A replacement that is sure of itself, a retry that is not, and something that does not fit."""
    task_id = request.triggers[0].tasks[0]
    retry = alternative(RetryTask(task_id=task_id), confidence=0.1, reason="hope")
    return [*again(request), retry, alternative(RetryTask(task_id="nowhere"), reason="lost")]


async def test_replan_is_one_event():
    """A replan is one entry with its cause, candidates, rejected ones, decision, changes, revisions and outcome."""
    history = await history_of(chain("a", "b", "c"), "b", propose=two_ways)
    (event,) = history.events
    decided = (event.replan, event.trigger_kinds, event.decision, event.rule, event.by)
    assert decided == ("r1", ("task-failed",), "execute", "confident", "policy")
    assert "b is broken" in event.triggers[0].reason
    assert [candidate.alternative.reason for candidate in event.candidates] == ["scripted"]
    assert [candidate.rejected.partition(" ")[0] for candidate in event.rejected] == ["its", "it"]
    assert event.chosen == event.candidates[0]
    assert isinstance(event.changes[0], ReplaceTask)
    assert (event.before, event.after, event.executed, event.outcome) == (0, 1, True, "success")
    assert history.entry(1) == event


@pytest.mark.parametrize(
    ("answer", "decision", "rule", "chosen", "executed"),
    [
        (Answer("approve", "eve"), "execute", "person-approve", "scripted", True),
        (Answer("approve", "eve", choice=1), "execute", "person-approve", "without it", True),
        (Answer("reject", "eve", comment="no"), "keep", "person-reject", None, False),
        (
            Answer("modify", "eve", changes=(SkipTask(task_id="b"),)),
            "execute",
            "person-modify",
            None,
            True,
        ),
    ],
)
async def test_people(answer, decision, rule, chosen, executed):
    """A question, its answer and the alternative that was really applied belong to a replan; no other one is blamed."""
    history = await history_of(
        chain("a", "b", "c"), "b", propose=doubtful, gate=CallbackGate(lambda q: answer)
    )
    event = history.events[0]
    assert (event.decision, event.rule, event.by, event.executed) == (
        decision,
        rule,
        "person:eve",
        executed,
    )
    assert (event.chosen.alternative.reason if event.chosen else None) == chosen
    asked = event.question
    said = (asked.verdict, asked.by, asked.comment, asked.rule)
    assert said == (answer.verdict, "eve", answer.comment, "low-confidence")
    assert (event.outcome, calibrate([event]).count) == (
        "success" if executed else "unknown",
        int(chosen is not None),
    )


async def test_open_question():
    """A replan that waits for a person is decided as `ask`, is not executed, and waits for no time that is known."""
    history = await history_of(chain("a", "b"), "b", propose=doubtful)
    (event,) = history.events
    assert (history.status, event.decision, event.executed, event.waited) == (
        "needs_human",
        "ask",
        False,
        0.0,
    )
    assert event.question.answered_at is None
    (question,) = open_questions(history.records(0))
    assert (question.id, question.run) == (event.question.id, history.run)
    assert [trigger.kind for trigger in question.triggers] == ["task-failed"]
    assert "+ b~2" in question.diffs[0]
    assert "SKIPPED" in question.diffs[1]


async def test_what_befalls_a_question(clock):
    """A refused answer and a trigger that waits for the same answer are noted with the replan."""
    tools = [{"name": "x", "kind": "shell", "command": "x"}]
    both = (RetryTask(task_id="a"), ModifyTask(task_id="b", fields={"name": "later"}))
    unsure = Proposer(lambda request: [alternative(*both, confidence=0.4)])
    engine = ReplanningEngine([unsure], environment=environment(clock))
    document = plan(Task(id="a"), Task(id="b", tool="x"), Task(id="c"), tools=tools)
    async with engine.open(document) as run:
        run.failed(run.started("a"), "broken")
        await anyio.wait_all_tasks_blocked()
        run.change_resource("x", available=False)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ChangeRejected):
            engine.answer("run-1.q1", "approve", by="eve", choice=7)
        (event, *_) = run.history.events
    assert run.history.status == "paused"
    async with engine.resume("run-1") as again_run:
        assert again_run.history.status == "running"
    assert event.notes[0].startswith("resource-changed (b) waits for the same answer")
    assert event.notes[1].startswith("the answer by eve was refused: ")


async def test_dropped_triggers(clock):
    """A trigger that nothing followed from is in the history with the reason."""

    def too_late(request: ReplanRequest) -> Sequence[Alternative]:
        run.apply([RetryTask(task_id="a")], reason="by hand")
        return []

    engine = ReplanningEngine([Proposer(too_late)], environment=environment(clock))
    async with engine.open(chain("a")) as run:
        run.failed(run.started("a"), "broken")
        await anyio.wait_all_tasks_blocked()
    history = run.history
    assert [(drop.trigger.kind, bool(drop.reason)) for drop in history.dropped_triggers] == [
        ("task-failed", True)
    ]
    assert history.metrics.dropped == 1


async def test_filter(clock):
    """Entries are found by trigger, decision, success and time, and all conditions must be met."""
    engine = ReplanningEngine([Proposer(again)], environment=environment(clock))
    async with engine.open(chain("a", "b")) as run:
        run.failed(run.started("a"), "broken")
        await anyio.wait_all_tasks_blocked()
        run.succeeded(run.started("a~2"))
        middle = clock.now() + 50
        clock.advance(100)
        run.request_replan("because", tasks=["b"])
        await anyio.wait_all_tasks_blocked()
    history = run.history
    first, second = history.events
    assert history.filter(trigger="human-request") == (second,)
    assert history.filter(decision="execute") == (first, second)
    assert history.filter(success=True) == (first,)
    assert history.filter(success=False) == ()
    assert history.filter(since=middle) == (second,)
    assert history.filter(until=datetime.fromtimestamp(middle, UTC)) == (first,)
    assert history.filter(trigger="human-request", until=middle) == ()


async def test_plan_and_diff_of_any_revision():
    """The plan is known at any revision, and any two can be compared, in both directions."""
    history = await history_of(chain("a", "b", "c"), "a", "b")
    before, after = history.plan_at(0), history.plan_at(2)
    assert [task.id for task in before.tasks] == ["a", "b", "c"]
    assert {task.id for task in after.tasks} == {"a~2", "b~2", "c"}
    assert history.replay(2, before=True).entry("b").state == "FAILED"
    assert history.replay().complete
    diff, back = history.diff(0, 2), history.diff(2, 0)
    assert ([t.id for t in diff.removed], [t.id for t in diff.added]) == (
        ["a", "b"],
        ["a~2", "b~2"],
    )
    assert str(diff).splitlines()[-1] == '~ c: depends_on: ["b"] → ["b~2"]'
    assert (back.added, back.removed) == (diff.removed, diff.added)
    assert (bool(history.diff(1, 1)), str(history.diff(1, 1))) == (False, "")
    with pytest.raises(StoreError, match="revisions 0 to 2"):
        history.diff(0, 3)


async def test_diff_shows_what_documents_do_not(clock):
    """A retry and a skip, which leave the document as it was, are differences; so are tools and context."""
    engine = ReplanningEngine([], environment=environment(clock))
    tools = [{"name": "x", "kind": "shell", "command": "x"}]
    tasks = (
        Task(id="a", tool="x"),
        Task(id="b", depends_on=("a",), tool="x"),
        Task(id="c", tool="x"),
    )
    async with engine.open(plan(*tasks, tools=tools)) as run:
        run.failed(run.started("a"), "broken")
        run.change_context({"region": "eu"})
        run.change_resource("x", available=False)
        run.apply([RetryTask(task_id="a", delay=2), SkipTask(task_id="c", reason="late")])
        history = run.history
        lines = str(history.diff(0, 1)).splitlines()
    assert lines == [
        "~ tool x: available: none → false",
        '~ context.region: none → "eu"',
        "* run a again after 2 s",
        "* skip c: late",
    ]
    assert str(history.diff(1, 0)).splitlines()[-1] == "* undone: skip c: late"
    assert json.loads(json.dumps(history.diff(0, 1).to_json()))["acts"][1]["reason"] == "late"


async def test_success_rate_is_real():
    """The success rate is the share of executed replans that worked out, of those whose outcome is known, if any is."""
    good = (await history_of(chain("a"), "a")).metrics
    mixed = (await history_of(chain("a", "b"), "a", "a~2", "b")).metrics
    skip = alternative(SkipTask(task_id="a"))  # nothing more ends that could tell how it worked out
    skipped = (
        await history_of(plan(Task(id="a", optional=True)), "a", propose=lambda request: [skip])
    ).metrics
    found = [(m.succeeded, m.failed, m.success_rate) for m in (good, mixed, skipped)]
    assert found == [(1, 0, 1.0), (2, 1, 2 / 3), (1, 0, 1.0)]
    assert ReplanMetrics(replans=3, executed=2).success_rate is None
    assert compute_metrics([]) == ReplanMetrics()


async def test_times(clock):
    """Deciding is measured apart from waiting for people, which counts once where two are asked at once."""
    gate = ScriptedGate(
        [returns(Answer("approve"), after=seconds) for seconds in (30, 50, 10)], clock=clock
    )
    engine = ReplanningEngine([Proposer(doubtful)], gate=gate, environment=environment(clock))
    broken, later = raises(ValueError()), raises(ValueError(), after=100)
    work = ScriptedExecutor({"a": broken, "b": broken, "c": later}, clock=clock)
    result = await engine.execute(plan(Task(id="a"), Task(id="b"), Task(id="c")), work)
    few, history = (ReplanHistory.of(engine.store, result.run, max_events=kept) for kept in (1, 10))
    for metrics in (few.metrics, history.metrics, compute_metrics(history.events)):
        assert (metrics.asked, metrics.waiting, metrics.deciding) == (3, 60.0, 0.0)
        assert (metrics.by_trigger, metrics.by_decision) == ({"task-failed": 3}, {"execute": 3})


async def test_calibration():
    """Predictions are compared with outcomes by Brier score and in bins, over what was applied and is known."""
    history = await history_of(chain("a", "b"), "a", "a~2", "b")
    found = calibrate(history.events, of="self_assessment", bins=4)
    assert found.count == 3
    assert found.brier == pytest.approx((0.1**2 + 0.1**2 + 0.9**2) / 3)
    assert [(b.low, b.high, b.replans) for b in found.bins] == [(0.75, 1.0, 3)]
    assert found.bins[0].succeeded == pytest.approx(2 / 3)
    assert found.predicted == found.bins[0].predicted == pytest.approx(0.9)
    assert found.succeeded == found.bins[0].succeeded
    assert calibrate([]) == Calibration(0, None, ())


async def test_calibration_of_sources():
    """What each source claims is held against its own outcomes; one that claims nothing, or waits for them, is left out."""

    def known(source: str, claimed: float | None, outcome: Any) -> ReplanEvent:
        chosen = Candidate(
            Alternative(changes=(), reason="", source=source, confidence=claimed), None
        )
        return ReplanEvent(ReplanId("r"), 0.0, chosen=chosen, outcome=outcome)

    events = [known("b", 0.5, "success"), known("a", 1.0, "failure"), known("b", 0.0, "failure")]
    events += [
        known("silent", None, "success"),
        known("new", 0.9, "unknown"),
        ReplanEvent(ReplanId("r"), 0.0),
    ]
    found = calibrate_sources(events)
    assert [(source, c.count, c.brier) for source, c in found.items()] == [
        ("a", 1, 1.0),
        ("b", 2, 0.125),
    ]
    assert [(b.low, b.replans) for b in found["b"].bins] == [(0.0, 1), (0.5, 1)]
    assert calibrate(events).count == 0


async def test_run_has_its_history(clock):
    """A run tells its history while it runs, always up to date."""
    engine = ReplanningEngine([Proposer(again)], environment=environment(clock))
    async with engine.open(chain("a", "b")) as run:
        assert not run.history.events
        run.failed(run.started("a"), "broken")
        await anyio.wait_all_tasks_blocked()
        assert [event.outcome for event in run.history.events] == ["unknown"]
        run.succeeded(run.started("a~2"))
        assert [event.outcome for event in run.history.events] == ["success"]
    assert run.history is run.history
    assert (run.history.run, run.history.status) == (run.id, "paused")


async def test_fork(clock):
    """A fork tells where it comes from, and its history begins with what it inherited."""
    history_store = MemoryStore()
    engine = ReplanningEngine(
        [Proposer(again)], store=history_store, environment=environment(clock)
    )
    result = await engine.execute(chain("a", "b"), failing("a", "b"))
    forked = engine.history(engine.fork(result.run, 1))
    assert forked.forked_from == (result.run, 1)
    assert (forked.revision, [(e.decision, e.executed) for e in forked.events]) == (
        1,
        [("execute", True)],
    )


def test_unknown_run():
    """There is no history of a run that does not exist, of a journal that does not begin, or that keeps nothing."""
    with pytest.raises(UnknownRun, match="nowhere"):
        ReplanningEngine([]).history("nowhere")
    with pytest.raises(JournalCorrupt, match="opening"):
        ReplanHistory(lambda after: [])
    with pytest.raises(ValueError, match="at least 1"):
        ReplanHistory(lambda after: [], max_events=0)


async def test_notes():
    """What a program puts on record is in the history, also of the import, and reports count it by type."""
    engine = ReplanningEngine([])
    async with engine.open(chain("a")) as run:
        run.note("price-checked", {"price": 3})
        run.note("seen", {})
        run.note("price-checked", {"price": 4})
        async for task in run.ready():
            run.succeeded(run.started(task.id))
    history = engine.history(run.id)
    assert [note.data for note in history.notes("price-checked")] == [{"price": 3}, {"price": 4}]
    assert [note.type for note in history.notes()] == ["price-checked", "seen", "price-checked"]
    assert import_history(export_history(history)).notes() == history.notes()
    assert "  notes:    2 price-checked, 1 seen\n" in text_report(history)
    assert "- **Notes**: 2 price\\-checked, 1 seen\n" in markdown_report(history)


async def test_round_trip(clock):
    """What was exported is imported with the same entries, figures, plans and differences, and exports the same."""
    answers = [Answer("approve", "ada", choice=1), Answer("reject", "bob", comment="never")]
    gate = ScriptedGate([returns(answer, after=30) for answer in answers], clock=clock)

    def propose(request):
        if request.triggers[0].tasks[0] == "a":
            return two_ways(request)
        return doubtful(request)

    engine = ReplanningEngine([Proposer(propose)], gate=gate, environment=environment(clock))
    async with engine.open(plan(*(Task(id=name) for name in "abc"))) as run:
        run.add_task(Task(id="d"), reason="one more")
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                await clock.sleep(1)
                attempt.output = await failing("a", "b", "c")(task, attempt.context)
    history = engine.history(run.id)
    assert [event.decision for event in history.events] == ["execute", "execute", "keep", "keep"]
    assert len(history.edits) == 1

    text = export_history(history)
    imported = import_history(text)
    assert export_history(imported) == text
    assert (imported.events, list(imported.edits)) == (history.events, list(history.edits))
    assert (imported.metrics, imported.status, imported.reason) == (
        history.metrics,
        history.status,
        history.reason,
    )
    for revision in range(history.revision + 1):
        assert imported.plan_at(revision) == history.plan_at(revision)
        assert imported.diff(0, revision) == history.diff(0, revision)


async def test_export_can_be_read_by_programs():
    """An export says at the top what a reader wants to know, whether a replan was really executed, and not where tools worked."""
    document = json.loads(export_history(await history_of(chain("a", "b"), "b")))
    assert "directory" not in document["journal"][0]["body"]
    assert (document["format"], document["version"], document["status"]) == (
        "replanning-history",
        1,
        "succeeded",
    )
    (event,) = document["events"]
    assert (event["executed"], event["result"], event["revision_after"]) == (True, "success", 1)
    assert event["candidates"][0]["score"]["self_assessment"] == 0.9
    assert event["timestamp"].endswith("Z")
    assert document["metrics"]["success_rate"] == 1.0


def journal(**fields: object) -> Callable[[Any], object]:
    """A change that leaves of the journal its first record alone, with other fields."""
    return lambda d: {**d, "journal": [{**d["journal"][0], **fields}]}


def contradiction(document: Any) -> object:
    """The beginning of the run, and then the end of an attempt that never began."""
    opened, *rest = document["journal"]
    return {
        **document,
        "journal": [
            opened,
            {**next(r for r in rest if r["kind"] == "attempt-succeeded"), "seq": 2},
        ],
    }


BROKEN = {
    "not JSON": (lambda d: "{", "not JSON"),
    "too deep": (lambda d: "[" * 100_000, "not JSON"),
    "a list": (lambda d: [], "not an exported history"),
    "another format": (lambda d: {**d, "format": "x"}, "not an exported history"),
    "a newer version": (lambda d: {**d, "version": 2}, "version 2"),
    "an extract": (lambda d: {**d, "journal": []}, "extract"),
    "a record is missing": (
        lambda d: {**d, "journal": d["journal"][:3] + d["journal"][4:]},
        r"journal\[3\].*missing",
    ),
    "a record is text": (lambda d: {**d, "journal": ["x"]}, r"journal\[0\]"),
    "no beginning": (lambda d: {**d, "journal": [{**d["journal"][1], "seq": 1}]}, "run-opened"),
    "an unknown kind": (journal(kind="x"), "unknown kind"),
    "a bad body": (journal(body={"format": 2, "run": 1}), r"journal\[0\]"),
    "an older journal": (journal(body={"run": "x"}), "'x' has format 1"),
    "no time": (journal(at=10**400), "seconds since the epoch"),
    "no plan": (journal(body={"format": 2, "run": "x", "plan": {}}), r"journal\[0\]"),
    "a story that cannot be": (contradiction, "contradict one another"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_import_refuses(name):
    """What is no export, or was changed so that it no longer fits together, is refused with the place."""
    change, message = BROKEN[name]
    changed = change(json.loads(export_history(await history_of(chain("a", "b"), "b"))))
    text = changed if isinstance(changed, str) else json.dumps(changed)
    with pytest.raises(JournalCorrupt, match=message):
        import_history(text)

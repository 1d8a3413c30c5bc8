"""The history of a run: a projection of its journal, with the plan at any revision."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Alternative, Answer, CallbackGate, Plan, PlanRun, ReplanningEngine, ReplanRequest, Settings, Task
from replanning.changes import AbortRun, AddTask, ModifyTask, PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning.decision import Question
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
    open_questions,
)
from replanning.history.metrics import calibrate_sources
from replanning.journal import (
    AlternativesConsidered,
    Candidate,
    DecisionMade,
    JsonlStore,
    MemoryStore,
    OutcomeRecorded,
    PlanRevised,
    Record,
    SqliteStore,
    TriggerDropped,
)
from replanning.plan.types import ReplanId
from replanning.telemetry import Exporter
from replanning.testing import VirtualClock
from tests.support.runs import Propose, Proposer, again, alternative, chain, environment, failing, plan


async def history_of(
    document: Plan, *failures: str, propose: Propose = again, gate: object = None, **settings: object
) -> ReplanHistory:
    """The history of a run of a plan in which some tasks fail."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(propose)],
            gate=gate,  # type: ignore[arg-type]
            environment=environment(clock),
            settings=Settings.model_validate(settings),
        )
        result = await engine.execute(document, failing(*failures))
        return engine.history(result.run)


def two_ways(request: ReplanRequest) -> list[Alternative]:
    """A replacement that is sure of itself, a retry that is not, and something that does not fit."""
    task_id = request.triggers[0].tasks[0]
    retry = alternative(RetryTask(task_id=task_id), confidence=0.1, reason="hope")
    return [*again(request), retry, alternative(RetryTask(task_id="nowhere"), reason="lost")]


def doubtful(request: ReplanRequest) -> list[Alternative]:
    """Ways on about which a person must be asked."""
    task_id = request.triggers[0].tasks[0]
    replacement = again(request)[0].model_copy(update={"confidence": 0.4})
    return [replacement, alternative(SkipTask(task_id=task_id), confidence=0.35, reason="without it")]


# One replan is one entry


async def test_replan_is_one_event() -> None:
    """A replan is one entry with its cause, candidates, rejected ones, decision, changes, revisions and outcome."""
    history = await history_of(chain("a", "b", "c"), "b", propose=two_ways)
    (event,) = history.events
    assert (event.replan, event.trigger_kinds, event.decision, event.rule, event.by) == (
        "r1",
        ("task-failed",),
        "execute",
        "confident",
        "policy",
    )
    assert "b is broken" in event.triggers[0].reason
    assert [candidate.alternative.reason for candidate in event.candidates] == ["scripted"]
    assert [candidate.rejected.partition(" ")[0] for candidate in event.rejected] == ["its", "it"]
    assert event.chosen == event.candidates[0]
    assert isinstance(event.changes[0], ReplaceTask)
    assert (event.before, event.after, event.executed, event.outcome) == (0, 1, True, "success")
    assert history.entry(1) == event


async def test_executed_is_truthful() -> None:
    """What was only considered, or only would have been done, is not recorded as executed."""
    async with VirtualClock() as clock:
        watching = ReplanningEngine([Proposer(again)], mode="observe", environment=environment(clock))
        result = await watching.execute(chain("a"), failing("a"))
        observed = watching.history(result.run).filter(trigger="task-failed")
    kept = (await history_of(chain("a"), "a", propose=lambda request: [])).filter(trigger="task-failed")
    assert [(e.decision, e.by, e.executed, e.outcome) for e in observed] == [("execute", "observe", False, "unknown")]
    assert [(e.decision, e.rule, e.executed) for e in kept] == [("keep", "no-alternative", False)]


@pytest.mark.parametrize(
    ("answer", "decision", "rule", "chosen", "executed"),
    [
        (Answer("approve", "eve"), "execute", "person-approve", "scripted", True),
        (Answer("approve", "eve", choice=1), "execute", "person-approve", "without it", True),
        (Answer("reject", "eve", comment="no"), "keep", "person-reject", None, False),
        (Answer("modify", "eve", changes=(SkipTask(task_id="b"),)), "execute", "person-modify", None, True),
    ],
)
async def test_people(answer: Answer, decision: str, rule: str, chosen: str | None, executed: bool) -> None:
    """A question, who answered it and how, and the alternative that was really applied belong to its replan."""
    history = await history_of(chain("a", "b", "c"), "b", propose=doubtful, gate=CallbackGate(lambda q: answer))
    event = history.events[0]
    assert (event.decision, event.rule, event.by, event.executed) == (decision, rule, "person:eve", executed)
    assert (event.chosen.alternative.reason if event.chosen else None) == chosen
    asked = event.question
    assert asked is not None
    assert (asked.verdict, asked.by, asked.comment, asked.rule) == (
        answer.verdict,
        "eve",
        answer.comment,
        "low-confidence",
    )


async def test_open_question() -> None:
    """A replan that waits for a person is decided as `ask`, is not executed, and waits for no time that is known."""
    history = await history_of(chain("a", "b"), "b", propose=doubtful)
    (event,) = history.events
    assert (history.status, event.decision, event.executed, event.waited) == ("needs_human", "ask", False, 0.0)
    assert event.question is not None
    assert event.question.answered_at is None
    (question,) = open_questions(history.records(0))
    assert (question.id, question.run) == (event.question.id, history.run)
    assert [trigger.kind for trigger in question.triggers] == ["task-failed"]
    assert "+ b~2" in question.diffs[0]
    assert "SKIPPED" in question.diffs[1]


async def test_what_befalls_a_question() -> None:
    """A refused answer and a trigger that waits for the same answer are noted with the replan."""
    tools = [{"name": "x", "kind": "shell", "command": "x"}]
    both = (RetryTask(task_id="a"), ModifyTask(task_id="b", fields={"name": "later"}))
    async with VirtualClock() as clock:
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
    assert event.notes[0].startswith("resource-changed t2 waits for the same answer")
    assert event.notes[1].startswith("the answer of eve was refused: ")


async def test_refusals_have_their_own_ids() -> None:
    """What the limits refuse is an entry of its own, and no two replans share an id."""
    history = await history_of(chain("a"), "a", "a~2", "a~3", limits={"replans_per_lineage": 2})
    outcomes = [(event.replan, event.rule, event.executed) for event in history.filter(trigger="task-failed")]
    assert outcomes == [("r1", "confident", True), ("r2", "confident", True), ("r3", "limit-lineage", False)]
    assert len({event.replan for event in history.events}) == history.metrics.replans


async def test_edits_are_no_replans() -> None:
    """Edits by hand are in the history, with who and why, and are not counted as replans."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([], environment=environment(clock))
        async with engine.open(chain("a", "b")) as run:
            run.add_task(Task(id="c"), before=["b"], reason="forgotten")
            edits = list(run.history.edits)
    assert [(e.before, e.after, e.reason, e.by, len(e.changes)) for e in edits] == [(0, 1, "forgotten", "edit", 1)]
    assert (run.history.metrics.replans, run.history.metrics.edits) == (0, 1)


async def test_dropped_triggers() -> None:
    """A trigger that nothing followed from is in the history with the reason."""

    def too_late(request: ReplanRequest) -> Sequence[Alternative]:
        run.apply([RetryTask(task_id="a")], reason="by hand")
        return []

    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(too_late)], environment=environment(clock))
        async with engine.open(chain("a")) as run:
            run.failed(run.started("a"), "broken")
            await anyio.wait_all_tasks_blocked()
        history = run.history
    assert [(drop.trigger.kind, bool(drop.reason)) for drop in history.dropped_triggers] == [("task-failed", True)]
    assert history.metrics.dropped == 1


# Finding entries


async def test_filter() -> None:
    """Entries are found by trigger, decision, success and time, and all conditions must be met."""
    async with VirtualClock() as clock:
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


async def test_keeps_the_newest() -> None:
    """At most `max_events` replans are kept, the newest, while figures are over all."""
    document = plan(*(Task(id=f"t{n}") for n in range(6)))
    whole = await history_of(document, *(f"t{n}" for n in range(6)))
    last = ReplanHistory(whole.records, max_events=2)
    assert last.events == whole.events[-2:]
    assert last.metrics == whole.metrics
    assert whole.metrics.replans == 6
    with pytest.raises(ValueError, match="at least 1"):
        ReplanHistory(whole.records, max_events=0)


# The plan at any revision


async def test_before_and_after_differ() -> None:
    """The plans before and after a revision are different documents, and the last is the current plan."""
    history = await history_of(chain("a", "b", "c"), "b")
    before, after = history.plan_at(0), history.plan_at(1)
    assert [task.id for task in before.tasks] == ["a", "b", "c"]
    assert {task.id for task in after.tasks} == {"a", "b~2", "c"}
    assert after.task("c").depends_on == ("b~2",)
    assert history.replay(1, before=True).entry("b").state == "FAILED"
    assert history.replay().complete


async def test_diff_of_any_two() -> None:
    """Any two revisions can be compared, in both directions, and a revision does not differ from itself."""
    history = await history_of(chain("a", "b", "c"), "a", "b")
    diff = history.diff(0, 2)
    assert ([t.id for t in diff.removed], [t.id for t in diff.added]) == (["a", "b"], ["a~2", "b~2"])
    assert str(diff).splitlines()[-1] == '~ c: depends_on: ["b"] → ["b~2"]'
    back = history.diff(2, 0)
    assert (back.added, back.removed) == (diff.removed, diff.added)
    assert not history.diff(1, 1)
    assert str(history.diff(1, 1)) == ""
    with pytest.raises(StoreError, match="revisions 0 to 2"):
        history.diff(0, 3)


async def test_diff_shows_what_documents_do_not() -> None:
    """A retry and a skip, which leave the document as it was, are differences; so are tools and context."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([], environment=environment(clock))
        tools = [{"name": "x", "kind": "shell", "command": "x"}]
        document = plan(Task(id="a"), Task(id="b", depends_on=("a",), tool="x"), Task(id="c"), tools=tools)
        document = document.model_copy(
            update={"tasks": tuple(t.model_copy(update={"tool": "x"}) for t in document.tasks)}
        )
        async with engine.open(document) as run:
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


# Figures


async def test_success_rate_is_real() -> None:
    """The success rate is the share of executed replans that worked out, of those whose outcome is known."""
    good = (await history_of(chain("a"), "a")).metrics
    mixed = (await history_of(chain("a", "b"), "a", "a~2", "b")).metrics
    assert (good.succeeded, good.failed, good.success_rate) == (1, 0, 1.0)
    assert (mixed.succeeded, mixed.failed) == (2, 1)
    assert mixed.success_rate == pytest.approx(2 / 3)


async def test_skip_works_out_at_once() -> None:
    """An alternative that skips what failed has a known outcome, although nothing more ends that could tell it."""

    def skip(request: ReplanRequest) -> list[Alternative]:
        return [alternative(SkipTask(task_id=request.triggers[0].tasks[0]))]

    history = await history_of(plan(Task(id="a", optional=True)), "a", propose=skip)
    assert ([event.outcome for event in history.events], history.metrics.success_rate) == (["success"], 1.0)


def test_rate_of_nothing() -> None:
    """Of no known outcome there is no success rate: neither 0 nor 1 would be true."""
    assert ReplanMetrics().success_rate is None
    assert ReplanMetrics(replans=3, executed=2).success_rate is None
    assert compute_metrics([]) == ReplanMetrics()


async def test_times() -> None:
    """Waiting for a person and deciding are measured apart from one another."""
    async with VirtualClock() as clock:

        async def slow(question: Question) -> Answer:
            await clock.sleep(42)
            return Answer("approve")

        engine = ReplanningEngine([Proposer(doubtful)], gate=CallbackGate(slow), environment=environment(clock))
        result = await engine.execute(chain("a"), failing("a"))
    metrics = engine.history(result.run).metrics
    assert (metrics.asked, metrics.waiting, metrics.deciding) == (1, 42.0, 0.0)
    assert (metrics.by_trigger, metrics.by_decision) == ({"task-failed": 1}, {"execute": 1})


async def test_calibration() -> None:
    """Predictions are compared with outcomes by Brier score and in bins, over what was applied and is known."""

    def unsure(request: ReplanRequest) -> list[Alternative]:
        return [a.model_copy(update={"confidence": 0.75}) for a in again(request)]

    history = await history_of(chain("a", "b"), "a", "a~2", "b", propose=unsure)
    found = calibrate(history.events, of="self_assessment", bins=4)
    assert found.count == 3
    assert found.brier == pytest.approx((0.25**2 + 0.25**2 + 0.75**2) / 3)
    assert [(b.low, b.high, b.replans, b.predicted) for b in found.bins] == [(0.75, 1.0, 3, 0.75)]
    assert found.bins[0].succeeded == pytest.approx(2 / 3)
    assert found.predicted == 0.75
    assert found.succeeded == found.bins[0].succeeded
    assert calibrate([]) == Calibration(0, None, ())


async def test_calibration_of_sources() -> None:
    """What each source claims is held against its own outcomes; one that claims nothing, or waits for them, is left out."""

    def known(source: str, claimed: float | None, outcome: Any) -> ReplanEvent:
        chosen = Candidate(Alternative(changes=(), reason="", source=source, confidence=claimed), None)
        return ReplanEvent(ReplanId("r"), 0.0, chosen=chosen, outcome=outcome)

    events = [known("b", 0.5, "success"), known("a", 1.0, "failure"), known("b", 0.0, "failure")]
    events += [known("silent", None, "success"), known("new", 0.9, "unknown"), ReplanEvent(ReplanId("r"), 0.0)]
    found = calibrate_sources(events)
    assert [(source, c.count, c.brier) for source, c in found.items()] == [("a", 1, 1.0), ("b", 2, 0.125)]
    assert [(b.low, b.replans) for b in found["b"].bins] == [(0.0, 1), (0.5, 1)]
    assert calibrate(events).count == 0


async def test_modified_proposal_is_not_blamed() -> None:
    """What a person did instead of a proposal says nothing about how good the proposal's score was."""
    answer = Answer("modify", "eve", changes=(ReplaceTask(task_id="b", tasks=(Task(id="mine"),)),))
    history = await history_of(chain("a", "b"), "b", propose=doubtful, gate=CallbackGate(lambda q: answer))
    assert history.events[0].outcome == "success"
    assert calibrate(history.events).count == 0


# Where it comes from


async def test_live() -> None:
    """A history that is told of each record as it happens is the same as one that is read afterwards."""

    class Following(Exporter):
        name = "following"
        history: ReplanHistory | None = None

        async def export(self, run: str, record: Record) -> None:
            if self.history is None:
                self.history = ReplanHistory.of(store, run)
            self.history.fold(record)

    follower, store = Following(), MemoryStore()
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(again)], store=store, exporters=[follower], environment=environment(clock))
        result = await engine.execute(chain("a", "b"), failing("a", "b"))
    read = engine.history(result.run)
    assert follower.history is not None
    assert (follower.history.events, follower.history.metrics) == (read.events, read.metrics)


async def test_run_has_its_history() -> None:
    """A run tells its history while it runs, always up to date."""
    async with VirtualClock() as clock:
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


@pytest.mark.parametrize("kind", [SqliteStore, JsonlStore])
async def test_survives_the_process(kind: type, tmp_path) -> None:
    """From a durable store the history is the same after the store was closed and opened again."""
    async with VirtualClock() as clock:
        store = kind(tmp_path / "runs")
        engine = ReplanningEngine([Proposer(again)], store=store, environment=environment(clock))
        result = await engine.execute(chain("a", "b"), failing("b"))
        before = engine.history(result.run)
    events = before.events
    store.close()
    reopened = kind(tmp_path / "runs")
    after = ReplanHistory.of(reopened, result.run)
    assert (after.events, after.metrics, after.status) == (events, before.metrics, "succeeded")
    reopened.close()


async def test_fork() -> None:
    """A fork tells where it comes from, and its history begins with what it inherited."""
    history_store = MemoryStore()
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(again)], store=history_store, environment=environment(clock))
        result = await engine.execute(chain("a", "b"), failing("a", "b"))
        forked = engine.history(engine.fork(result.run, 1))
    assert forked.forked_from == (result.run, 1)
    assert (forked.revision, [(e.decision, e.executed) for e in forked.events]) == (1, [("execute", True)])


def test_unknown_run() -> None:
    """There is no history of a run that does not exist, nor of a journal that does not begin."""
    with pytest.raises(UnknownRun, match="nowhere"):
        ReplanningEngine([]).history("nowhere")
    with pytest.raises(JournalCorrupt, match="opening"):
        ReplanHistory(lambda after: [])


# Any run at all


def proposals(rng: Random) -> Propose:
    """A provider that proposes something else every time, sensible or not."""

    def propose(request: ReplanRequest) -> list[Alternative]:
        task_id = (*request.triggers[0].tasks, "t0")[0]
        ways: list[PlanChange] = [
            ReplaceTask(task_id=task_id, tasks=(Task(id=request.view.unused_id(task_id)),)),
            SkipTask(task_id=task_id, reason="not needed"),
            RetryTask(task_id=task_id, delay=rng.choice([0.0, 5.0])),
            AddTask(task=Task(id=request.view.unused_id("extra")), before=(task_id,)),
            AbortRun(reason="enough"),
        ]
        chosen = rng.sample(ways, k=rng.randint(0, 3))
        return [alternative(way, confidence=rng.choice([0.0, 0.2, 0.4, 0.4, 0.9])) for way in chosen]

    return propose


def answers(rng: Random, clock: VirtualClock) -> CallbackGate:
    """A person who says anything, sooner or later, and at last nothing."""
    said = [
        Answer("approve", "ann"),
        Answer("approve", "ann", choice=1),
        Answer("reject", "bob", comment="never"),
        Answer("modify", "eve", changes=(ModifyTask(task_id="t0", fields={"name": "again"}),)),
    ]
    turns = iter(range(8))

    async def ask(question: Question) -> Answer:
        if next(turns, None) is None:
            await anyio.sleep_forever()
        await clock.sleep(rng.choice([0.0, 5.0, 30.0, 100.0]))
        return rng.choice(said)

    return CallbackGate(ask)


async def played(rng: Random) -> tuple[ReplanningEngine, PlanRun]:
    """A run on the virtual clock in which much goes wrong."""
    size = rng.randint(1, 9)
    tasks = [
        Task(
            id=f"t{n}",
            depends_on=tuple(f"t{d}" for d in rng.sample(range(n), k=rng.choice([0, 0, min(n, 1), min(n, 2)]))),
            optional=rng.random() < 0.3,
        )
        for n in range(size)
    ]
    broken = [f"t{n}{more}" for n in range(size) for more in ("", "~2", "~3") if rng.random() < 0.4]
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(proposals(rng))],
            gate=answers(rng, clock) if rng.random() < 0.7 else None,
            environment=environment(clock),
            settings=Settings.model_validate(
                {"limits": {"replans_per_lineage": rng.randint(0, 3)}, "approval": {"timeout": 60.0}}
            ),
        )
        async with engine.open(plan(*tasks)) as run:
            for number in range(rng.randint(0, 2)):
                run.add_task(Task(id=f"edit{number}"))
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    await clock.sleep(1)
                    attempt.output = await failing(*broken)(task, attempt.context)
    return engine, run


@given(rng=st.randoms(use_true_random=True))
def test_counts_agree_with_the_journal(rng: Random) -> None:
    """Whatever happens in a run, each count of its history is the number of records that say so."""
    engine, run = anyio.run(played, rng)
    history = engine.history(run.id)
    bodies = [record.body for record in history.records(0)]
    revised = [body for body in bodies if isinstance(body, PlanRevised)]
    outcomes = [body for body in bodies if isinstance(body, OutcomeRecorded)]
    replans = {body.replan for body in bodies if isinstance(body, AlternativesConsidered | DecisionMade)}
    metrics = history.metrics
    assert {event.replan for event in history.events} == replans
    assert metrics.replans == len(replans) == sum(metrics.by_decision.values())
    assert metrics.executed == sum(body.replan is not None for body in revised)
    assert metrics.edits == sum(body.replan is None for body in revised)
    assert metrics.dropped == sum(isinstance(body, TriggerDropped) for body in bodies)
    assert metrics.succeeded == sum(body.succeeded for body in outcomes)
    assert metrics.failed == sum(not body.succeeded for body in outcomes)
    last = {body.replan: body.decision for body in bodies if isinstance(body, DecisionMade)}
    assert {event.replan: event.decision for event in history.events if event.replan in last} == last
    assert Counter(e.after for e in history.entries if e.after is not None) == Counter(b.number for b in revised)
    assert history.plan_at(history.revision).tasks == run.plan.tasks


@given(rng=st.randoms(use_true_random=True), kept=st.integers(1, 4))
def test_figures_do_not_depend_on_what_is_kept(rng: Random, kept: int) -> None:
    """However few replans are kept, the figures are those of all."""
    engine, run = anyio.run(played, rng)
    whole = engine.history(run.id)
    small = ReplanHistory(whole.records, max_events=kept)
    assert small.events == whole.events[-kept:]
    assert small.metrics == whole.metrics


@given(rng=st.randoms(use_true_random=True))
def test_round_trip(rng: Random) -> None:
    """What was exported is imported with the same entries, figures, plans and differences, and exports the same."""
    engine, run = anyio.run(played, rng)
    history = engine.history(run.id)
    text = export_history(history)
    imported = import_history(text)
    assert export_history(imported) == text
    assert (imported.events, list(imported.edits)) == (history.events, list(history.edits))
    assert (imported.metrics, imported.status, imported.reason) == (history.metrics, history.status, history.reason)
    for revision in range(history.revision + 1):
        assert imported.plan_at(revision) == history.plan_at(revision)
        assert imported.diff(0, revision) == history.diff(0, revision)


# Exports from elsewhere


async def exported() -> Any:
    """The export of a small run, taken apart."""
    return json.loads(export_history(await history_of(chain("a", "b"), "b")))


async def test_export_can_be_read_by_programs() -> None:
    """An export says at the top what a reader wants to know, and whether a replan was really executed."""
    document = await exported()
    assert (document["format"], document["version"], document["status"]) == ("replanning-history", 1, "succeeded")
    (event,) = document["events"]
    assert (event["executed"], event["result"], event["revision_after"]) == (True, "success", 1)
    assert event["candidates"][0]["score"]["self_assessment"] == 0.9
    assert event["timestamp"].endswith("Z")
    assert document["metrics"]["success_rate"] == 1.0


BROKEN = {
    "not JSON": (lambda d: "{", "not JSON"),
    "too deep": (lambda d: "[" * 100_000, "not JSON"),
    "a list": (lambda d: [], "not an exported history"),
    "another format": (lambda d: {**d, "format": "x"}, "not an exported history"),
    "a newer version": (lambda d: {**d, "version": 2}, "version 2"),
    "an extract": (lambda d: {k: v for k, v in d.items() if k != "journal"}, "extract"),
    "a record is missing": (
        lambda d: {**d, "journal": [*d["journal"][:3], *d["journal"][4:]]},
        r"journal\[3\].*missing",
    ),
    "a record is text": (lambda d: {**d, "journal": ["x"]}, r"journal\[0\]"),
    "no beginning": (lambda d: {**d, "journal": [{**d["journal"][1], "seq": 1}]}, "run-opened"),
    "an unknown kind": (lambda d: {**d, "journal": [{**d["journal"][0], "kind": "x"}]}, "unknown kind"),
    "a bad body": (lambda d: {**d, "journal": [{**d["journal"][0], "body": {"format": 2, "run": 1}}]}, r"journal\[0\]"),
    "an older journal": (lambda d: {**d, "journal": [{**d["journal"][0], "body": {"run": "x"}}]}, "'x' has format 1"),
    "no time": (lambda d: {**d, "journal": [{**d["journal"][0], "at": 10**400}]}, "seconds since the epoch"),
    "no plan": (
        lambda d: {**d, "journal": [{**d["journal"][0], "body": {"format": 2, "run": "x", "plan": {}}}]},
        r"journal\[0\]",
    ),
    "a story that cannot be": (
        lambda d: {
            **d,
            "journal": [
                d["journal"][0],
                {**next(r for r in d["journal"] if r["kind"] == "attempt-succeeded"), "seq": 2},
            ],
        },
        "contradict one another",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_import_refuses(name: str) -> None:
    """What is no export, or was changed so that it no longer fits together, is refused with the place."""
    change, message = BROKEN[name]
    changed = change(await exported())
    text = changed if isinstance(changed, str) else json.dumps(changed)
    with pytest.raises(JournalCorrupt, match=message):
        import_history(text)

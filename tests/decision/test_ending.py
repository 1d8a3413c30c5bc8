# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""The end of a run: whether it ends, how, and what it says about its tasks."""

from collections.abc import Callable

import pytest

from replanning import Budget, journal
from replanning.changes import AbortRun
from replanning.decision.ending import Circumstances, decide_end
from replanning.decision.ledger import Ledger
from replanning.journal import Usage
from tests.support.live import JournaledPlan, cancel, journaled, replace, retry, skip, task, tool

SETTLED = Circumstances(busy=bool, open_ended=False, replans=False)


def decided(run: JournaledPlan) -> object:
    """Return what becomes of a run that nobody replans any more."""
    ledger = Ledger(Budget(), lambda: 0)
    for record in run.records:
        ledger.fold(record)
    return decide_end(run.live, ledger, SETTLED)


def blocked_before_it_ran() -> JournaledPlan:
    """Return a run whose only task a decision has blocked."""
    run = journaled("a")
    run.fold(journal.DecisionMade("r1", (), "keep", "limit", "enough", blocks=("a",)))
    return run


def failed_with_parked(*parked: str) -> JournaledPlan:
    """Return a run whose first task has failed, and in which others lack their tool.

    A task is named as in `b`, or with its tool as in `b=lost`.
    """
    tasks = [task("optional", tool="gone", optional=True)]
    for name in parked:
        task_id, _, needed = name.partition("=")
        tasks.append(task(task_id, tool=needed or "gone"))
    names = dict.fromkeys([str(each.tool) for each in tasks])
    run = journaled("a", *tasks, tools=[tool(name, available=False) for name in names])
    run.fail("a")
    return run


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (blocked_before_it_ran, "'a' blocked"),
        (failed_with_parked, "'a' failed (broken)"),
        (
            lambda: failed_with_parked("b"),
            "'a' failed (broken); 'b' cannot run: its tool 'gone' is unavailable",
        ),
        (
            lambda: failed_with_parked("b", "c", "d"),
            (
                "'a' failed (broken); "
                "'b' and 2 more cannot run, each because its tool 'gone' is unavailable"
            ),
        ),
        (
            lambda: failed_with_parked("b", "c", "d=lost"),
            (
                "'a' failed (broken); "
                "'b' and 1 more cannot run, each because its tool 'gone' is unavailable; "
                "'d' cannot run: its tool 'lost' is unavailable"
            ),
        ),
        (
            lambda: failed_with_parked(*(f"t{n}=tool{n}" for n in range(6))),
            "'a' failed (broken); "
            + "".join(f"'t{n}' cannot run: its tool 'tool{n}' is unavailable; " for n in range(5))
            + "1 more task cannot run for other reasons",
        ),
    ],
    ids=["blocked", "optional task waits", "task waits", "tasks wait", "two tools", "six tools"],
)
def test_why_a_run_failed(build: Callable[[], JournaledPlan], reason: str) -> None:
    """A failed run names the tasks that are stuck, with their errors, and required ones that wait."""
    run = build()
    assert not run.live.scheduler.has_startable()
    assert decided(run) == journal.RunEnded("failed", reason)


@pytest.mark.parametrize(
    ("held", "end"),
    [
        ("a", journal.RunEnded("needs_human", "1 question to a person must be answered first")),
        ("b", journal.RunEnded("succeeded", "every required task is done")),
    ],
)
def test_question_about_a_complete_run(held: str, end: journal.RunEnded) -> None:
    """A complete run waits for an answer only if that decides whether stale results are redone."""
    run = journaled(
        task("a", arguments={"x": "${context.x}"}, on_stale="redo"),
        task("b", optional=True),
        context={"x": 1},
    )
    run.run("a")
    run.fold(journal.ContextUpdated({"x": 2}))
    run.fold(journal.ResultsStale({"a": ("context.x",)}))
    run.apply(cancel("b"))
    run.fold(journal.QuestionAsked("q1", "r1", (), "?", (), (held,), "print", 0))
    assert decided(run) == end


def test_a_question_about_an_unknown_effect() -> None:
    """A run that waits for a person names the calls in doubt, but those that only read or were done in the end."""
    names = ("lost", "again", "reading")
    run = journaled(task("reading", effect="none"), "lost", "again")
    for task_id in names:
        run.fold(journal.AttemptTimedOut(run.start(task_id), task_id, 2.0))
    run.apply(retry("again"))
    run.run("again")
    run.fold(journal.QuestionAsked("q1", "r1", (), "?", (), names, "print", 0))
    reason = (
        "1 question to a person must be answered first: it is unknown whether 'lost' took effect"
    )
    assert decided(run) == journal.RunEnded("needs_human", reason)


def test_a_failure_with_an_unknown_effect() -> None:
    """A run that failed without a question says which of its failures may have had their effect."""
    run = journaled("lost", task("reading", effect="none"))
    for task_id in ("lost", "reading"):
        run.fold(journal.AttemptTimedOut(run.start(task_id), task_id, 2.0))
    ended = decided(run)
    assert isinstance(ended, journal.RunEnded)
    lost, reading = ended.reason.split("; ")
    assert lost.startswith("'lost' failed (")
    assert lost.endswith("), and it is unknown whether it took effect")
    assert reading.endswith(")")


def test_a_failure_in_place_of_a_call_in_doubt() -> None:
    """Where another call failed in the place of one in doubt, the run names the one in doubt."""
    run = journaled("lost")
    in_doubt(run, "lost")
    run.apply(replace("lost", "other"))
    run.fail("other")
    reason = "'other' failed (broken), and it is unknown whether 'lost' took effect"
    assert decided(run) == journal.RunEnded("failed", reason)


def in_doubt(run: JournaledPlan, *task_ids: str) -> None:
    """Let attempts at tasks end by their time limits."""
    for task_id in task_ids:
        run.fold(journal.AttemptTimedOut(run.start(task_id), task_id, 2.0))


def test_a_pause_while_nobody_knows_what_was_done() -> None:
    """A run in which it is still to be asked whether a call was done is paused, and not over."""
    run = journaled(task("a", confirm={"tool": "find", "when": "output"}))
    attempt = run.start("a")
    run.fold(journal.AttemptFailed(attempt, "a", journal.Failure("OSError", "lost"), confirm_at=0))
    run.fold(journal.RunPaused("lunch"))
    assert decided(run) == journal.RunEnded("paused", "lunch")


def skipped(run: JournaledPlan, task_id: str, by: str) -> None:
    """Skip a task, as somebody has decided."""
    before = run.live.revision
    change = skip(task_id)
    run.fold(journal.PlanRevised(before + 1, before, (change,), "not needed", by))


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        (
            "policy",
            "every required task is done: it is unknown whether 'optional', 'left-out' took effect",
        ),
        (
            "ann",
            "every required task is done: it is unknown whether 'optional' took effect",
        ),
    ],
)
def test_a_success_with_an_unknown_effect(by: str, reason: str) -> None:
    """A run that succeeds names its optional calls in doubt, but those about which a person has decided."""
    optional = task("optional", optional=True)
    run = journaled(optional, "left-out", task("reading", effect="none", optional=True))
    in_doubt(run, "optional", "left-out", "reading")
    skipped(run, "left-out", by)
    assert decided(run) == journal.RunEnded("succeeded", reason)


def test_an_early_goal_with_an_unknown_effect() -> None:
    """A run whose goal is reached early names its calls in doubt."""
    goal = {"objective": "x", "facts": ["done"], "stop_when_reached": True}
    run = journaled("lost", "rest", goal=goal)
    in_doubt(run, "lost")
    run.fold(journal.FactsObserved(("done",), ()))
    reason = "the goal was reached early: it is unknown whether 'lost' took effect"
    assert decided(run) == journal.RunEnded("succeeded", reason, ("rest",))


def test_an_abort_with_an_unknown_effect() -> None:
    """A run that is aborted, by a decision or by its budget, names its calls in doubt."""
    run = journaled("lost", "rest")
    in_doubt(run, "lost")
    ledger = Ledger(Budget(tokens=1), lambda: 0)
    ledger.budget_tracker.spend(Usage(tokens=2))
    end = decide_end(run.live, ledger, SETTLED)
    assert isinstance(end, journal.RunEnded)
    assert end.status == "aborted"
    assert end.reason.endswith(": it is unknown whether 'lost' took effect")

    run.apply(AbortRun(reason="no way is left"))
    reason = "no way is left: it is unknown whether 'lost' took effect"
    assert decided(run) == journal.RunEnded("aborted", reason)


def test_a_failure_beside_an_unknown_effect() -> None:
    """A run that failed of something else names the optional calls in doubt as well, once each."""
    run = journaled(task("optional", optional=True), "a", "lost")
    in_doubt(run, "optional", "lost")
    skipped(run, "optional", "policy")
    run.fail("a")
    ended = decided(run)
    assert isinstance(ended, journal.RunEnded)
    assert ended.reason.endswith(": it is unknown whether 'optional' took effect")
    assert ended.reason.count("'lost'") == 1

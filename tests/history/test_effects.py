# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Effects of a run: what its calls have changed, or may have, and whether that can be taken back."""

from dataclasses import replace
from typing import Any

import pytest

from replanning import Plan, Task, TaskContext, ToolSpec, journal
from replanning.changes import CancelTask, ModifyTask, ReplaceTask, SkipTask
from replanning.errors import JournalCorrupt
from replanning.history import ReplanHistory, RunEffect, markdown_report, text_report
from replanning.history.effects import effects_line, effects_so_far
from replanning.history.status import replay_records
from replanning.journal import Failure, Record, RecordBody
from replanning.plan import RunId
from replanning.testing import VirtualClock
from tests.support.runs import make_engine, plan

RUN = RunId("trip")
TOOLS = [
    ToolSpec(name="search", effect="none"),
    ToolSpec(name="reserve", effect="reversible"),
    ToolSpec(name="order", effect="partly"),
    ToolSpec(name="mail", effect="irreversible"),
    ToolSpec(name="push"),
    ToolSpec(name="put", effect="reversible", idempotent=True),
]


def recorded(document: Plan, *bodies: RecordBody) -> ReplanHistory:
    """The history of a run with these records, a second apart."""
    opened = journal.RunOpened(RUN, document, "act")
    records = [Record(n, float(n), body) for n, body in enumerate([opened, *bodies], 1)]
    return ReplanHistory(lambda after: records[after:])


def using(tool: str | None, **fields: Any) -> Plan:
    """A plan of one task."""
    return plan(Task.model_validate({"id": "a", "tool": tool, **fields}), tools=TOOLS)


def start(number: int = 1) -> journal.AttemptStarted:
    """The start of an attempt."""
    return journal.AttemptStarted(f"a#{number}", "a", number)


def doubts(history: ReplanHistory) -> list[tuple[str, bool]]:
    """The keys of the effects, each with whether it is in doubt; whoever is asked reads as many."""
    effects = history.effects()
    expected = ""
    if any(effect.can_undo != "unknown" for effect in effects):
        expected = effects_line(effects, when=" so far")
    assert effects_so_far(replay_records(history.records(0)).live) == expected
    return [(effect.key, effect.in_doubt) for effect in effects]


async def test_what_a_run_has_changed() -> None:
    """Each call that changed something is listed with its tool, arguments, times and key; reading calls are not."""

    async def work(task: Task, context: TaskContext) -> object:
        await clock.sleep(2)
        return {"room": 7}

    document = plan(
        Task(id="find", tool="search"),
        Task(
            id="hotel",
            tool="reserve",
            arguments={"room": "${find.output.room}"},
            depends_on=["find"],
        ),
        Task(id="tell", tool="mail", depends_on=["hotel"]),
        tools=TOOLS,
    )
    async with VirtualClock() as clock:
        begin = clock.now()
        engine = make_engine(clock=clock)
        await engine.execute(document, work, run_id=RUN)
    history = engine.history(RUN)
    hotel, tell = history.effects()
    assert hotel == RunEffect(
        run=RUN,
        task="hotel",
        attempt="hotel#1",
        tool="reserve",
        effect="reversible",
        arguments={"room": 7},
        started=begin + 2,
        ended=begin + 4,
        key="trip/hotel",
        in_doubt=False,
        can_undo="not stated",
    )
    assert (tell.task, tell.effect, tell.can_undo) == ("tell", "irreversible", "irreversible")
    assert "  effects:  2 effects, 0 can be taken back\n" in text_report(history)
    assert "- **Effects**: 2 effects, 0 can be taken back\n" in markdown_report(history)


@pytest.mark.parametrize(
    ("tool", "fields", "can_undo"),
    [
        ("reserve", {"undo": {"tool": "push"}}, "stated"),
        ("mail", {"undo": {"tool": "push"}}, "irreversible"),
        ("order", {}, "not stated"),
        ("order", {"effect": "irreversible"}, "irreversible"),
        ("push", {}, "unknown"),
        ("push", {"undo": {"tool": "push"}}, "stated"),
        (None, {}, "unknown"),
    ],
)
def test_what_can_be_taken_back(tool: str | None, fields: dict[str, Any], can_undo: str) -> None:
    """What is irreversible cannot be taken back, whatever is stated beside it; without a word, nobody knows."""
    history = recorded(using(tool, **fields), start(), journal.AttemptSucceeded("a#1", "a"))
    (effect,) = history.effects()
    assert (effect.tool, effect.can_undo) == (tool or "", can_undo)
    assert ("effects:" in text_report(history)) is (can_undo != "unknown")


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (journal.AttemptSucceeded("a#1", "a"), [False]),
        (journal.AttemptFailed("a#1", "a", Failure("ValueError", "no")), []),
        (journal.AttemptFailed("a#1", "a", Failure("E", "lost", in_doubt=True)), [True]),
        (journal.AttemptFailed("a#1", "a", Failure("E", "bad", kind="rejected")), [False]),
        (journal.AttemptTimedOut("a#1", "a", 5.0), [True]),
        (journal.AttemptInterrupted("a#1", "a", "left"), [True]),
        (journal.AttemptInterrupted("a#1", "a", "again, please", in_doubt=False), []),
        (journal.PlanRevised(1, 0, (CancelTask(task_id="a"),), "", "eve"), [True]),
        (journal.NoteAdded("nothing", {}), [True]),
    ],
)
def test_how_a_call_ended(end: RecordBody, expected: list[bool]) -> None:
    """A call without an answer is in doubt, also one that runs or was cut off; one that failed has changed nothing."""
    assert [doubt for _, doubt in doubts(recorded(using("reserve"), start(), end))] == expected
    assert not recorded(using("search"), start(), end).effects()


def test_calls_that_are_made_again() -> None:
    """What was done and is done again by another task, or was refused and continued, are two effects."""
    done = journal.AttemptSucceeded("a#1", "a")
    again = Task(id="b", tool="reserve")
    change = ReplaceTask(task_id="a", tasks=(again,))
    redo = journal.PlanRevised(1, 0, (change,), "", "eve", adopted=using("reserve"))
    rest = (journal.AttemptStarted("b#1", "b", 1), journal.AttemptSucceeded("b#1", "b"))
    repeated = recorded(using("reserve"), start(), done, redo, *rest)
    assert doubts(repeated) == [("trip/a", False), ("trip/b", False)]

    refused = Failure("NotAccepted", "more, please", kind="unfinished")
    more = journal.AttemptFailed("a#1", "a", refused, retry_at=3.0)
    end = (start(2), journal.AttemptSucceeded("a#2", "a"))
    continued = recorded(using("reserve"), start(), more, *end)
    assert doubts(continued) == [("trip/a", False), ("trip/a#continued-1", False)]


def test_repeated_calls() -> None:
    """Attempts at a call that may be repeated are one effect, at any other one each; a changed call is another one."""
    late = journal.AttemptTimedOut("a#1", "a", 5.0, retry_at=3.0)
    twice = (start(), late, start(2), journal.AttemptSucceeded("a#2", "a"))
    assert doubts(recorded(using("put"), *twice)) == [("trip/a", False)]
    assert doubts(recorded(using("reserve"), *twice)) == [("trip/a", True), ("trip/a", False)]

    changed = journal.PlanRevised(
        1, 0, (ModifyTask(task_id="a", fields={"arguments": {"x": 1}}),), "", "eve"
    )
    again = (start(), late, changed, start(2), journal.AttemptSucceeded("a#2", "a"))
    expected = [("trip/a", True), ("trip/a#changed-1", False)]
    assert doubts(recorded(using("put"), *again)) == expected


def test_call_that_a_person_says_is_done() -> None:
    """Once a person has said that a call took effect, it is no longer in doubt; the attempts before it still are."""
    late = journal.AttemptTimedOut("a#1", "a", 5.0, retry_at=3.0)
    later = journal.AttemptTimedOut("a#2", "a", 5.0)
    twice = (start(), late, start(2), later)

    def told(change: SkipTask, by: str, chosen: int | None = None) -> list[bool]:
        revised = journal.PlanRevised(1, 0, (change,), "", by, chosen=chosen)
        return [doubt for _, doubt in doubts(recorded(using("reserve"), *twice, revised))]

    assert told(SkipTask(task_id="a", done=True), "person:ada") == [True, False]
    assert told(SkipTask(task_id="a"), "person:ada") == [True, True]
    assert told(SkipTask(task_id="a", done=True), "policy") == [True, True]
    # A person has approved what a model proposed.
    assert told(SkipTask(task_id="a", done=True), "person:ada", chosen=0) == [True, True]


def test_arguments_that_nobody_has() -> None:
    """Where a reference leads to nothing any more, the arguments are shown as they were stated."""
    lost = journal.AttemptSucceeded("b#1", "b", recoverable=False)
    document = plan(
        Task(id="b", tool="search"),
        Task(id="a", tool="push", arguments={"x": "${b.output}"}, depends_on=["b"]),
        tools=TOOLS,
    )
    history = recorded(document, journal.AttemptStarted("b#1", "b", 1), lost, start())
    (effect,) = history.effects()
    assert (effect.arguments, effect.ended) == ({"x": "${b.output}"}, None)


def test_planning_changes_nothing() -> None:
    """In planning mode, a phase that makes the plan has no effect, and a use of a tool has the arguments of its note."""
    history = recorded(using(None, metadata={"planning": {"phase": "reflection"}}), start())
    assert not history.effects()
    noted = {"by": "p", "tool": "mail", "arguments": {"to": "ada"}}
    (effect,) = recorded(using(None, metadata={"planning": noted}), start()).effects()
    assert (effect.tool, effect.arguments, effect.effect) == ("mail", {"to": "ada"}, "irreversible")


def test_no_opening() -> None:
    """Records without the opening of a run have no effects, and a journal that lacks it is corrupt."""
    history = recorded(using("push"))
    history.records = lambda after: []
    assert history.effects() == ()
    history.records = lambda after: [Record(1, 0.0, start())]
    with pytest.raises(JournalCorrupt):
        history.effects()


@pytest.mark.parametrize("task", ["a", "plan"])
@pytest.mark.parametrize("answer", ["done", "not done", "unknown"])
def test_a_call_that_is_confirmed(answer: str, task: str) -> None:
    """What was confirmed is an effect, what was not done is none, and what nobody can tell stays in doubt."""
    confirm = {"tool": "search", "when": "true"}
    metadata = {"agent": {"phase": "plan"}} if task == "plan" else {}
    lost = Failure("ConnectionResetError", "lost", in_doubt=True)
    asking = "a#1-confirm1"
    ends = {
        "done": journal.AttemptSucceeded(asking, "a"),
        "not done": journal.AttemptFailed(
            asking, "a", replace(lost, in_doubt=False, not_done=True)
        ),
        "unknown": journal.AttemptFailed(asking, "a", Failure("ValueError", "no access")),
    }
    history = recorded(
        using("mail", confirm=confirm, metadata=metadata),
        start(),
        journal.AttemptFailed("a#1", "a", lost, confirm_at=3.0),
        journal.AttemptStarted(asking, "a", 1, confirms="a#1"),
        ends[answer],
    )
    expected = {"done": [("trip/a", False)], "not done": [], "unknown": [("trip/a", True)]}
    assert doubts(history) == ([] if task == "plan" else expected[answer])

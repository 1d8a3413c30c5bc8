"""Planning history of runs, as any program reads it from the files."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

from replanning import Plan, ReplanningEngine, Settings, StoreGate, Task
from replanning.errors import UnknownRun
from replanning.journal import ErrorContained, MemoryStore, PlanningNoted, Record, RunEnded, RunOpened
from replanning.plan.types import TaskId
from replanning.planning import PlanningHistoryExporter, PlanningHistoryStore, PlanningState
from replanning.planning.history import HistoryLineBuilder, RunJournals
from replanning.testing import ScriptedExecutor, VirtualClock, virtual_environment
from tests.planning.test_resume import desk, model
from tests.support.planning import Desk, Model, Replies, action, coordinator, go_on, replan, revision, summary
from tests.support.planning_history import ISSUE, Freeing, in_order, in_the_way, of_type, solved, solving, written
from tests.support.resume import RUN, cut

pytestmark = pytest.mark.anyio

HEAD = ["type", "timestamp", "task_uuid", "issue_id", "seq"]
STEP = 17
"""Every how many records the run is cut off on each event loop."""
DECISION_FIELDS = {
    "replan_id",
    "phase",
    "llm_decision",
    "confidence",
    "executed",
    "override_reason",
    "timestamp",
    "result",
    "duration",
}
MISSING = FileNotFoundError("no such file")


# Files and lines


async def test_one_file_for_each_run(tmp_path: Path) -> None:
    """Each run has a file of its own in a folder that is made for it, and every line says what, when, which run, which issue."""
    folder = tmp_path / "deep" / "planning_history"
    await solved(Model(), folder, run="a")
    await solved(Model(), folder, run="b", issue="group/project!7")

    assert sorted(path.name for path in folder.glob("*.jsonl")) == [".index.jsonl", "a.jsonl", "b.jsonl"]
    for run, issue in (("a", ISSUE), ("b", "group/project!7")):
        lines = written(folder, run)
        assert {tuple(line)[:5] for line in lines} == {tuple(HEAD)}
        assert {(line["task_uuid"], line["issue_id"]) for line in lines} == {(run, issue)}
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", str(line["timestamp"])) for line in lines)
        numbers = [line["seq"] for line in in_order(lines)]
        assert numbers == sorted(set(numbers))


async def test_times_are_those_of_the_journal(tmp_path: Path) -> None:
    """A line is dated when it happened, not when it was written."""
    await solved(Model(), tmp_path, start=datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC).timestamp())
    assert {str(line["timestamp"])[:19] for line in written(tmp_path)} == {"2031-05-06T07:08:09"}


async def test_lines_follow_from_the_journal(tmp_path: Path) -> None:
    """The same journal gives the same lines, also long after the run; what is there is not written twice."""
    store = MemoryStore()
    await solved(model, tmp_path / "live", desk=desk(), store=store)
    later = PlanningHistoryExporter(PlanningHistoryStore(tmp_path / "later"), journal=store)
    later.catch_up(RUN)
    assert in_order(written(tmp_path / "later")) == in_order(written(tmp_path / "live"))

    before = (tmp_path / "live" / f"{RUN}.jsonl").read_bytes()
    again = PlanningHistoryExporter(PlanningHistoryStore(tmp_path / "live"), journal=store)
    again.catch_up(RUN)
    for record in store.read(RUN):
        await again.export(RUN, record)
    assert (tmp_path / "live" / f"{RUN}.jsonl").read_bytes() == before


@pytest.mark.parametrize("offset", [0, 5, 11])
async def test_a_resumed_run_is_caught_up(tmp_path: Path, offset: int) -> None:
    """Wherever a process was killed, the one that resumes its run writes what is missing, and nothing twice."""
    whole = MemoryStore()
    await solved(model, tmp_path / "whole", desk=desk(), store=whole)
    records = list(whole.read(RUN))
    for length in range(1 + offset, len(records), STEP):
        folder = tmp_path / str(length)
        store = cut(records[:length])
        killed = PlanningHistoryExporter(PlanningHistoryStore(folder), journal=store)
        for record in records[: length // 2]:  # the rest did not get there in time
            await killed.export(RUN, record)
        async with VirtualClock(records[length - 1].at) as clock:
            planning = solving(model, clock, folder, desk=desk(), store=store)
            await planning.execute_with_planning(RUN)
            await planning.engine.aclose()
        fresh = PlanningHistoryExporter(PlanningHistoryStore(tmp_path / f"{length}-fresh"), journal=store)
        fresh.catch_up(RUN)
        assert in_order(written(folder)) == in_order(written(tmp_path / f"{length}-fresh"))


async def test_one_exporter_for_several_engines(tmp_path: Path) -> None:
    """Engines with stores of their own may share an exporter, also where their runs stop and go on in between."""
    shared = PlanningHistoryExporter(PlanningHistoryStore(tmp_path / "shared"))
    unclear = go_on(clarification_needed=True, clarification_questions=["Who?"], assumptions_to_make=["everybody"])
    for run in ("a", "b"):
        store = MemoryStore()
        async with VirtualClock() as clock:
            replies = {"decision:goal_understanding": (unclear, go_on())}
            planning = coordinator(Model(replies), clock, store=store, exporters=[shared])
            assert await planning.execute_with_planning(run)
        PlanningHistoryExporter(PlanningHistoryStore(tmp_path / "fresh"), journal=store).catch_up(run)
        lines = written(tmp_path / "shared", run)
        assert "resumed" in [line.get("event") for line in lines]
        assert in_order(lines) == in_order(written(tmp_path / "fresh", run))


def test_a_journal_that_is_not_known(tmp_path: Path) -> None:
    """An exporter that cannot find the journal of a run says how to tell it where that is."""
    with pytest.raises(UnknownRun, match="journal=store"):
        PlanningHistoryExporter(PlanningHistoryStore(tmp_path)).catch_up("r")


async def test_other_runs_have_none(tmp_path: Path) -> None:
    """A run that is none of planning mode writes no planning history."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            store=store,
            exporters=[PlanningHistoryExporter(PlanningHistoryStore(tmp_path / "none"))],
            environment=virtual_environment(clock=clock),
        )
        await engine.execute(
            Plan.model_validate({"goal": {"objective": "x"}, "tasks": [{"id": "a"}]}), ScriptedExecutor()
        )
        await engine.aclose()
    assert not (tmp_path / "none").exists()


async def test_is_a_plugin_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is told the name `planning-history` writes it into the present folder, at the place of old."""
    monkeypatch.chdir(tmp_path)
    async with VirtualClock() as clock:
        environment = virtual_environment(clock=clock)
        engine = ReplanningEngine(exporters=["planning-history"], environment=environment)
        plan = next(r.body for r in await journal(tmp_path) if isinstance(r.body, RunOpened)).plan
        await engine.execute(plan, ScriptedExecutor())
        await engine.aclose()
    assert written(tmp_path / "planning_history", "run-1")[-1]["result"] == "succeeded"


async def journal(folder: Path) -> list[Record]:
    """The journal of a run of planning mode."""
    store = MemoryStore()
    await solved(Model(), folder / "other", store=store)
    return list(store.read(RUN))


@pytest.mark.parametrize("harm", ["removed", "emptied", "cut"])
async def test_a_file_that_is_lost_is_made_anew(tmp_path: Path, harm: str) -> None:
    """A file that is removed or cut while its run goes on has every line again after the next one is written."""
    store, path = MemoryStore(), tmp_path / "history" / f"{RUN}.jsonl"

    def lose() -> None:
        content = path.read_bytes()
        if harm == "removed":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2 if harm == "cut" else 0])

    await solved(Model(), tmp_path / "history", desk=Freeing("post", lose), store=store)
    PlanningHistoryExporter(PlanningHistoryStore(tmp_path / "fresh"), journal=store).catch_up(RUN)
    lines = PlanningHistoryStore(tmp_path / "history").entries(RUN)
    assert in_order(lines) == in_order(written(tmp_path / "fresh"))


# What the lines hold


async def test_types_and_their_keys(tmp_path: Path) -> None:
    """A run with a question, a failure, a replan, a revision and an end writes every type, each with its keys."""
    planning = await solved(model, tmp_path, desk=desk())
    lines = written(tmp_path)

    assert {line["type"] for line in lines} == {
        "plan", "revision", "reflection", "execution", "replan_decision", "completion"
    }  # fmt: skip
    keys = {str(line["type"]): set(line) - set(HEAD) for line in lines}
    assert keys["plan"] == {"plan"}
    assert keys["revision"] == {"reason", "changes", "updated_plan"}
    assert keys["reflection"] == {"evaluation"}
    (plan,) = of_type("plan", lines)
    assert [one["task_id"] for one in plan["plan"]["action_plan"]["actions"]] == ["write", "post"]
    assert plan["plan"]["goal_understanding"]["main_objective"] == "Tell people"
    assert [(one["reason"], one["changes"]) for one in of_type("revision", lines)] == [
        (
            "a partial_replan is needed",
            [
                {"change": "modified", "task_id": "write", "fields": ["tool"]},
                {"change": "modified", "task_id": "post", "fields": ["arguments"]},
            ],
        ),
        ("a plan_revision is needed", [{"change": "added", "task_id": "fix"}]),
    ]
    assert planning.state.plan is not None
    newest = of_type("revision", lines)[-1]["updated_plan"]
    assert newest["action_plan"] == planning.state.plan.action_plan.model_dump(mode="json")


async def test_what_was_done(tmp_path: Path) -> None:
    """Every attempt at an action is there with its tool, its arguments and its result or error; so is what was changed."""
    plan = {"actions": [action("write", "write", fallback_strategy="shout"), action("post", "post")]}
    await solved(Model({"action_sequence": plan}), tmp_path, desk=Desk({"write": [MISSING]}))
    done = of_type("execution", written(tmp_path))

    assert [(one["event"], one.get("task_id"), one.get("tool")) for one in done] == [
        ("failed", "write", "write"),
        ("changed", None, None),
        ("succeeded", "write", "shout"),
        ("succeeded", "post", "post"),
    ]
    assert done[0]["error"] == {"type": "FileNotFoundError", "message": "no such file", "kind": "error"}
    assert done[1]["changes"][0]["kind"] == "replace"
    assert (done[3]["arguments"], done[3]["result"]) == ({"text": "news"}, "news")


async def test_what_people_were_asked(tmp_path: Path) -> None:
    """A question to a person is there with what would be assumed, and so are the answer, its author and their words."""
    unclear = go_on(clarification_needed=True, clarification_questions=["To whom?"], assumptions_to_make=["to all"])
    async with VirtualClock() as clock:
        exporters = [PlanningHistoryExporter(PlanningHistoryStore(tmp_path))]
        replies = {"decision:goal_understanding": (unclear, go_on())}
        planning = coordinator(Model(replies), clock, gate=StoreGate(), exporters=exporters)
        async with anyio.create_task_group() as group:
            group.start_soon(planning.execute_with_planning, RUN)
            await clock.sleep(10)
            (question,) = planning.engine.pending(RUN)
            planning.engine.answer(question.id, "approve", by="ada", comment="To the customers.")
        await planning.engine.aclose()
    asked, answered = of_type("execution", written(tmp_path))[:2]
    assert (asked["event"], asked["questions"], asked["assumptions"]) == ("asked", ["To whom?"], ["to all"])
    said = {"question": question.id, "verdict": "approve", "by": "ada", "comment": "To the customers."}
    assert {name: answered[name] for name in said} == said
    assert answered["event"] == "answered"


async def test_what_was_assumed(tmp_path: Path) -> None:
    """Without an answer, the history has the assumptions with the questions."""
    unclear = go_on(clarification_needed=True, clarification_questions=["To whom?"], assumptions_to_make=["to all"])
    await solved(Model({"decision:goal_understanding": (unclear, go_on())}), tmp_path)
    (assumed,) = [one for one in of_type("execution", written(tmp_path)) if one["event"] == "assumed"]
    assert assumed["questions"] == ["To whom?"]
    assert assumed["assumptions"][0] == "to all"


async def test_the_end(tmp_path: Path) -> None:
    """The last line says how it came out in the form of a completion; where a person must look, it is not done."""
    await solved(Model(), tmp_path, run="good")
    await solved(Model({"completion": summary(achieved=False)}), tmp_path, run="bad")

    last = written(tmp_path, "good")[-1]
    assert (last["type"], last["status"], last["result"], last["done"]) == ("completion", "success", "succeeded", True)
    assert last["summary"]["goal_achieved"] is True
    (left,) = of_type("completion", written(tmp_path, "bad"))
    assert (left["status"], left["done"]) == ("requires_human_intervention", False)
    assert {"revision_attempts", "reason", "current_state", "recommendations"} <= set(left["summary"])
    assert written(tmp_path, "bad")[-1]["event"] == "needs_human"


# Decisions


async def test_decisions_are_complete(tmp_path: Path) -> None:
    """Each decision of the journal is one line with everything that is on record of it."""
    planning = await solved(model, tmp_path, desk=desk())
    decisions = of_type("replan_decision", written(tmp_path))

    assert len(decisions) == len(planning.state.records)
    for line, record in zip(decisions, planning.state.records, strict=True):
        assert set(line) >= DECISION_FIELDS | {"plan_before", "plan_after"}
        expected = record.model_dump(mode="json")
        assert {name: line[name] for name in expected} == expected


async def test_before_and_after_differ(tmp_path: Path) -> None:
    """The plan before and after a replan that was executed are two plans, and each is the plan as it stood."""
    await solved(model, tmp_path, desk=desk())
    decisions = of_type("replan_decision", written(tmp_path))
    changed = {d["replan_type"]: d for d in decisions if d["executed"]}

    assert set(changed) == {"clarification_request", "partial_replan", "plan_revision"}
    for name in ("partial_replan", "plan_revision"):
        before, after = changed[name]["plan_before"], changed[name]["plan_after"]
        assert after["revision"] == before["revision"] + 1
        assert {task["id"] for task in after["tasks"]} > {task["id"] for task in before["tasks"]} - {"write"}
    gone = [task["id"] for task in changed["partial_replan"]["plan_after"]["tasks"]]
    assert "action_sequence~2" in gone
    assert "write" not in gone
    kept = [d for d in decisions if not d["executed"]]
    assert all(d["plan_before"] == d["plan_after"] for d in kept)


async def test_executed_says_what_was_done(tmp_path: Path) -> None:
    """A decision that was followed says so; one that a limit or its own doubt overrode says that it was not, and why."""
    settings = Settings.model_validate({"planning": {"replanning": {"execution": {"max_partial_replans": 0}}}})
    replies: Replies = {
        "decision:goal_understanding": replan("goal_revision", confidence=0.1),
        "decision:task_decomposition": (replan("task_redecomposition"), go_on()),
        "decision:execution": (replan("partial_replan"), replan("retry")),
    }
    await solved(Model(replies), tmp_path, desk=Desk({"write": [MISSING]}), settings=settings)
    decisions = [d for d in of_type("replan_decision", written(tmp_path)) if d["replan_type"] != "none"]

    assert [(d["replan_type"], d["executed"], d["result"], d["override_reason"]) for d in decisions] == [
        ("goal_revision", False, "skipped", "confidence"),
        ("task_redecomposition", True, "success", None),
        ("partial_replan", False, "skipped", "limit"),
        ("retry", True, "success", None),
    ]


async def test_what_was_decided_survives_a_pause(tmp_path: Path) -> None:
    """A run that is paused in the middle of a replan has its decision in the history, also when another process goes on."""
    store = MemoryStore()
    unsure = replan("partial_replan", confidence=0.4)
    replies = {"decision:execution": unsure, "revision": revision(action("write", "shout"), action("post", "post"))}
    first = await solved(Model(replies), tmp_path, desk=Desk({"write": [MISSING]}), store=store)
    assert first.result.status == "needs_human"
    before = of_type("replan_decision", written(tmp_path))
    assert not any(d["replan_type"] == "partial_replan" for d in before)

    (question,) = first.engine.pending(RUN)
    async with VirtualClock(1_700_000_100.0) as clock:
        second = solving(Model(replies), clock, tmp_path, desk=Desk(), store=store)
        second.engine.answer(question.id, "approve", by="ada")
        assert await second.execute_with_planning(RUN)
        await second.engine.aclose()
    (decided,) = (d for d in of_type("replan_decision", written(tmp_path)) if d["replan_type"] == "partial_replan")
    assert (decided["executed"], decided["result"]) == (True, "success")
    assert decided["plan_before"]["revision"] < decided["plan_after"]["revision"]


# A disk that is full


async def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """If nothing can be written, the run continues, reports it once, and all lines are written as soon as possible."""
    store = MemoryStore()
    make_room = in_the_way(tmp_path / "history")
    planning = await solved(Model(), tmp_path / "history", desk=Freeing("post", make_room), store=store)
    fresh = PlanningHistoryExporter(PlanningHistoryStore(tmp_path / "fresh"), journal=store)
    fresh.catch_up(RUN)

    assert planning.result.status == "succeeded"
    (trouble,) = (record.body for record in store.read(RUN) if isinstance(record.body, ErrorContained))
    assert "planning-history" in trouble.where
    assert "a file has the name of the folder" in trouble.error
    assert in_order(written(tmp_path / "history")) == in_order(written(tmp_path / "fresh"))


async def test_a_disk_that_stays_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If there is room only after the run, closing names the run with missing lines, and they can be written later."""
    store = MemoryStore()
    make_room = in_the_way(tmp_path / "history")
    planning = await solved(Model(), tmp_path / "history", store=store)
    make_room()
    assert planning.result.status == "succeeded"
    assert f"the planning history lacks the latest lines of {RUN}" in caplog.text

    PlanningHistoryExporter(PlanningHistoryStore(tmp_path / "history"), journal=store).catch_up(RUN)
    assert written(tmp_path / "history")[-1]["result"] == "succeeded"


async def test_a_plan_that_is_there_is_continued(tmp_path: Path) -> None:
    """A task that has a plan in its history is continued with it: the lines go on in the same file, with one first plan."""
    store, history = MemoryStore(), PlanningHistoryStore(tmp_path, task_uuid=RUN)
    assert not history.has_plan()
    first = await solved(Model({"completion": summary(achieved=False)}), tmp_path, store=store)
    assert first.result.status == "needs_human"
    assert history.has_plan()
    lines = len(written(tmp_path))

    (question,) = first.engine.pending(RUN)
    model = Model()
    async with VirtualClock(1_700_000_100.0) as clock:
        second = solving(model, clock, tmp_path, store=store)
        second.engine.answer(question.id, "approve", by="ada")
        assert await second.execute_with_planning(RUN)
        await second.engine.aclose()
    assert model.asked == []
    assert [line.get("event") for line in written(tmp_path)[lines:]] == ["resumed", "answered", None]
    assert len(of_type("plan", written(tmp_path))) == 1
    plan = history.get_latest_plan()
    assert plan is not None
    noted = [r.body.data for r in store.read(RUN) if isinstance(r.body, PlanningNoted) and r.body.type == "plan"]
    assert plan["plan"]["action_plan"] == noted[0]["action_plan"]
    assert isinstance(list(store.read(RUN))[-1].body, RunEnded)
    assert PlanningState.from_records(store.read(RUN)).plan is not None


async def test_a_replan_that_changes_no_plan(tmp_path: Path) -> None:
    """A decision is written when the next is made, where no revision has come of it."""
    planning = await solved(model, tmp_path, desk=desk())
    records = list(planning.engine.store.read(RUN))
    notes = [(r, r.body.data) for r in records if isinstance(r.body, PlanningNoted) and r.body.type == "replan"]
    (done, said), *_ = [(r, d["record"]) for r, d in notes if isinstance(d["record"], dict) and d["record"]["executed"]]
    assert isinstance(said, dict)
    others = [(r, d["considered"]) for r, d in notes if r.seq > done.seq and isinstance(d["considered"], dict)]
    other = next(r for r, d in others if d["replan_id"] != said["replan_id"])
    lines = HistoryLineBuilder()
    assert repr(lines) == "<HistoryLineBuilder of no planning run after record 0>"
    assert [line["type"] for record in (records[0], done) for line in lines.lines_from(record)] == []
    first, *_ = lines.lines_from(other)
    assert (first["type"], first["replan_id"]) == ("replan_decision", said["replan_id"])


async def test_what_a_revision_leaves_out(tmp_path: Path) -> None:
    """Tasks of the old plan that are not in the new one are listed as removed."""
    replies: Replies = {"decision:execution": replan("partial_replan"), "revision": revision(action("shout", "shout"))}
    await solved(Model(replies), tmp_path, desk=Desk({"post": [MISSING]}))
    (told,) = of_type("revision", written(tmp_path))
    assert told["changes"] == [{"change": "added", "task_id": "shout"}, {"change": "removed", "task_id": "post"}]


async def journal_of(objective: str) -> MemoryStore:
    """A store with a run of this objective."""
    store = MemoryStore()
    plan = Plan.model_validate({"goal": {"objective": objective}, "tasks": [Task(id=TaskId("one"))]})
    async with ReplanningEngine([], store=store).open(plan, run_id=RUN) as run:
        run.started(TaskId("one"))
    return store


async def test_the_store_that_was_attached_last_is_looked_in_first() -> None:
    """Where two stores have a run of the same name, that of the engine to which an exporter was attached last counts."""
    first, second, journals = await journal_of("first"), await journal_of("second"), RunJournals()
    found = []
    for store in (first, second, first):
        journals.add_store(store)
        opened = journals.records_after(RUN)[0].body
        assert isinstance(opened, RunOpened)
        found.append(opened.plan.goal.objective)
    assert found == ["first", "second", "first"]

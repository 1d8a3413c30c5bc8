"""Planning history of runs, as any program reads it from the files, among processes and after crashes."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Plan, ReplanningEngine, StoreGate
from replanning.errors import SettingsError, StoreError, UnknownRun
from replanning.journal import ErrorContained, MemoryStore
from replanning.plan import JsonObject
from replanning.planning import PlanningHistoryExporter, PlanningHistoryStore
from replanning.planning.history import HistoryLineBuilder
from replanning.planning.outputs import Reflection
from replanning.testing import ScriptedExecutor, VirtualClock, virtual_environment
from tests.planning.test_resume import desk, model
from tests.support.planning import (
    ISSUE,
    MISSING,
    NOW,
    Desk,
    Model,
    action,
    actions,
    coordinator,
    go_on,
    in_order,
    rebuilt,
    replan,
    revision,
    saved,
    solved,
    store_at,
    summary,
    written,
)
from tests.support.resume import RUN, cut

HEAD = ["type", "timestamp", "task_uuid", "issue_id", "seq"]
STEP = 17
"""Every how many records the run is cut off on each event loop."""
UNCLEAR = {
    "decision:goal_understanding": (
        go_on(
            clarification_needed=True,
            clarification_questions=["To whom?"],
            assumptions_to_make=["to all"],
        ),
        go_on(),
    )
}
GOOD = revision(action("write", "shout"), action("post", "post"))


def when_posting(do):
    """Return tools of which `post` does something before it is used."""

    async def before(task):
        if task.tool == "post":
            do()

    return Desk(before=before)


def of_type(kind, lines):
    """Return the lines of one type."""
    return [line for line in lines if line["type"] == kind]


# Files and lines


async def test_one_file_for_each_run(tmp_path):
    """Each run has a file of its own in a new folder; every line says what, when it happened, which run and which issue."""
    folder = tmp_path / "deep" / "planning_history"
    start = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC).timestamp()
    await solved({}, folder, run="a", start=start)
    await solved({}, folder, run="b", start=start, issue="group/project!7")

    assert sorted(path.name for path in folder.glob("*.jsonl")) == [
        ".index.jsonl",
        "a.jsonl",
        "b.jsonl",
    ]
    for run, issue in (("a", ISSUE), ("b", "group/project!7")):
        lines = written(folder, run)
        assert {tuple(line)[:5] for line in lines} == {tuple(HEAD)}
        assert {(line["task_uuid"], line["issue_id"]) for line in lines} == {(run, issue)}
        assert all(
            re.fullmatch(r"2031-05-06T07:08:09\.\d{6}Z", line["timestamp"]) for line in lines
        )
        numbers = [line["seq"] for line in in_order(lines)]
        assert numbers == sorted(set(numbers))


async def test_lines_follow_from_the_journal(tmp_path):
    """The same journal gives the same lines, also long after the run; what is there is not written twice."""
    store, live = MemoryStore(), tmp_path / "live"
    await solved(model, live, desk=desk(), store=store)
    assert rebuilt(store, tmp_path / "later") == in_order(written(live))

    before = written(live)
    again = PlanningHistoryExporter(PlanningHistoryStore(directory=live), journal=store)
    again.catch_up(RUN)
    for record in store.read(RUN):
        await again.export(RUN, record)
    assert written(live) == before


@pytest.mark.parametrize("offset", [0, 5, 11])
async def test_a_resumed_run_is_caught_up(tmp_path, offset):
    """Wherever a process was killed, the one that resumes its run writes what is missing, and nothing twice."""
    whole = MemoryStore()
    await solved(model, tmp_path / "whole", desk=desk(), store=whole)
    records = list(whole.read(RUN))
    for length in range(1 + offset, len(records), STEP):
        folder, store = tmp_path / str(length), cut(records[:length])
        killed = PlanningHistoryExporter(PlanningHistoryStore(directory=folder), journal=store)
        for record in records[: length // 2]:  # the rest did not get there in time
            await killed.export(RUN, record)
        await solved(model, folder, start=records[length - 1].at, desk=desk(), store=store)
        assert in_order(written(folder)) == rebuilt(store, tmp_path / f"{length}-fresh")


def test_a_journal_that_is_not_known(tmp_path):
    """An exporter that cannot find the journal of a run says how to tell it where that is."""
    with pytest.raises(UnknownRun, match="journal=store"):
        PlanningHistoryExporter(PlanningHistoryStore(directory=tmp_path)).catch_up("r")


async def executed_elsewhere(plan):
    """Execute a plan without planning mode, with the exporter that is called `planning-history`."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            exporters=["planning-history"], environment=virtual_environment(clock=clock)
        )
        await engine.execute(plan, ScriptedExecutor())
        await engine.aclose()


async def test_is_a_plugin_for_runs_of_planning_mode(tmp_path, monkeypatch):
    """An engine that is told its name writes the history into the present folder, and for no run that has none."""
    monkeypatch.chdir(tmp_path)
    await executed_elsewhere(
        Plan.model_validate({"goal": {"objective": "x"}, "tasks": [{"id": "a"}]})
    )
    assert not (tmp_path / "planning_history").exists()

    store = MemoryStore()
    await solved({}, tmp_path / "other", store=store)
    await executed_elsewhere(next(iter(store.read(RUN))).body.plan)
    assert written(tmp_path / "planning_history")[-1]["result"] == "succeeded"


@pytest.mark.parametrize("harm", ["removed", "emptied", "cut"])
async def test_a_file_that_is_lost_is_made_anew(tmp_path, harm):
    """A file that is removed or cut while its run goes on has every line again after the next one is written."""
    store, path = MemoryStore(), tmp_path / "history" / f"{RUN}.jsonl"

    def lose():
        content = path.read_bytes()
        if harm == "removed":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2 if harm == "cut" else 0])

    await solved({}, tmp_path / "history", desk=when_posting(lose), store=store)
    lines = PlanningHistoryStore(directory=tmp_path / "history").entries(RUN)
    assert in_order(lines) == rebuilt(store, tmp_path / "fresh")


# What the lines hold


async def test_types_and_their_keys(tmp_path):
    """A run with a question, a failure, a replan, a revision and an end writes every type, each with its keys."""
    planning = await solved(model, tmp_path, desk=desk())
    lines = written(tmp_path)

    keys = {line["type"]: set(line) - set(HEAD) for line in lines}
    assert keys.keys() == {
        "plan",
        "revision",
        "reflection",
        "execution",
        "replan_decision",
        "completion",
    }
    assert (keys["plan"], keys["reflection"]) == ({"plan"}, {"evaluation"})
    assert keys["revision"] == {"reason", "changes", "updated_plan"}
    (plan,) = of_type("plan", lines)
    assert [one["task_id"] for one in plan["plan"]["action_plan"]["actions"]] == ["write", "post"]
    assert plan["plan"]["goal_understanding"]["main_objective"] == "Tell people"
    revisions = of_type("revision", lines)
    assert [(one["reason"], one["changes"]) for one in revisions] == [
        (
            "a partial_replan is needed",
            [
                {"change": "modified", "task_id": "write", "fields": ["tool"]},
                {"change": "modified", "task_id": "post", "fields": ["arguments"]},
            ],
        ),
        ("a plan_revision is needed", [{"change": "added", "task_id": "fix"}]),
    ]
    assert revisions[-1]["updated_plan"][
        "action_plan"
    ] == planning.state.plan.action_plan.model_dump(mode="json")


async def test_what_a_revision_leaves_out(tmp_path):
    """Tasks of the old plan that are not in the new one are listed as removed."""
    replies = {
        "decision:execution": replan("partial_replan"),
        "revision": revision(action("shout", "shout")),
    }
    await solved(replies, tmp_path, desk=Desk({"post": [MISSING]}))
    (told,) = of_type("revision", written(tmp_path))
    assert told["changes"] == [
        {"change": "added", "task_id": "shout"},
        {"change": "removed", "task_id": "post"},
    ]


async def test_what_was_done(tmp_path):
    """Every attempt at an action is there with its tool, its arguments and its result or error; so is what was changed."""
    plan = actions(action("write", "write", fallback_strategy="shout"), action("post", "post"))
    await solved({"action_sequence": plan}, tmp_path, desk=Desk({"write": [MISSING]}))
    done = of_type("execution", written(tmp_path))

    assert [(one["event"], one.get("task_id"), one.get("tool")) for one in done] == [
        ("failed", "write", "write"),
        ("changed", None, None),
        ("succeeded", "write", "shout"),
        ("succeeded", "post", "post"),
    ]
    assert done[0]["error"] == {
        "type": "FileNotFoundError",
        "message": str(MISSING),
        "kind": "error",
    }
    assert done[1]["changes"][0]["kind"] == "replace"
    assert (done[3]["arguments"], done[3]["result"]) == ({"text": "news"}, "news")


async def test_what_people_were_asked(tmp_path):
    """A question to a person is there with what would be assumed, and so are the answer, its author and their words."""
    async with VirtualClock() as clock:
        exporters = [PlanningHistoryExporter(PlanningHistoryStore(directory=tmp_path))]
        planning = coordinator(UNCLEAR, clock, gate=StoreGate(), exporters=exporters)
        async with anyio.create_task_group() as group:
            group.start_soon(planning.execute_with_planning, RUN)
            await clock.sleep(10)
            (question,) = planning.engine.pending(RUN)
            planning.engine.answer(question.id, "approve", by="ada", comment="To the customers.")
        await planning.engine.aclose()
    asked, answered = of_type("execution", written(tmp_path))[:2]
    assert (asked["event"], asked["questions"], asked["assumptions"]) == (
        "asked",
        ["To whom?"],
        ["to all"],
    )
    said = {
        "question": question.id,
        "verdict": "approve",
        "by": "ada",
        "comment": "To the customers.",
    }
    assert answered.items() >= {"event": "answered", **said}.items()


async def test_the_end(tmp_path):
    """The last line says how it came out in the form of a completion; where a person must look, it is not done."""
    await solved({}, tmp_path, run="good")
    await solved({"completion": summary(achieved=False)}, tmp_path, run="bad")

    last = written(tmp_path, "good")[-1]
    assert (last["type"], last["status"], last["result"], last["done"]) == (
        "completion",
        "success",
        "succeeded",
        True,
    )
    assert last["summary"]["goal_achieved"] is True
    (left,) = of_type("completion", written(tmp_path, "bad"))
    assert (left["status"], left["done"]) == ("requires_human_intervention", False)
    assert {"revision_attempts", "reason", "current_state", "recommendations"} <= set(
        left["summary"]
    )
    assert written(tmp_path, "bad")[-1]["event"] == "needs_human"


# Decisions


async def test_decisions_are_complete(tmp_path):
    """Each decision is one line with everything that is on record of it and the plan as it stood before and after."""
    planning = await solved(model, tmp_path, desk=desk())
    decisions = of_type("replan_decision", written(tmp_path))
    for line, record in zip(decisions, planning.state.records, strict=True):
        assert line.items() >= record.model_dump(mode="json").items()

    changed = {d["replan_type"]: d for d in decisions if d["executed"]}
    assert set(changed) == {"clarification_request", "partial_replan", "plan_revision"}
    for name in ("partial_replan", "plan_revision"):
        before, after = changed[name]["plan_before"], changed[name]["plan_after"]
        assert after["revision"] == before["revision"] + 1
        assert {task["id"] for task in after["tasks"]} > {
            task["id"] for task in before["tasks"]
        } - {"write"}
    tasks = [task["id"] for task in changed["partial_replan"]["plan_after"]["tasks"]]
    assert "action_sequence~2" in tasks
    assert "write" not in tasks
    assert all(d["plan_before"] == d["plan_after"] for d in decisions if not d["executed"])


async def test_executed_says_what_was_done(tmp_path):
    """A decision that was followed says so; one that a limit or its own doubt overrode says that it was not, and why."""
    replies = {
        "decision:goal_understanding": replan("goal_revision", confidence=0.1),
        "decision:task_decomposition": (replan("task_redecomposition"), go_on()),
        "decision:execution": (replan("partial_replan"), replan("retry")),
    }
    settings = {"planning": {"replanning": {"execution": {"max_partial_replans": 0}}}}
    await solved(replies, tmp_path, desk=Desk({"write": [MISSING]}), settings=settings)
    decisions = [
        d for d in of_type("replan_decision", written(tmp_path)) if d["replan_type"] != "none"
    ]

    assert [
        (d["replan_type"], d["executed"], d["result"], d["override_reason"]) for d in decisions
    ] == [
        ("goal_revision", False, "skipped", "confidence"),
        ("task_redecomposition", True, "success", None),
        ("partial_replan", False, "skipped", "limit"),
        ("retry", True, "success", None),
    ]


async def waiting(replies, folder, store, **options):
    """Run until a person is asked, who approves; return the lines until then."""
    planning = await solved(replies, folder, store=store, **options)
    assert planning.result.status == "needs_human"
    lines = written(folder)
    (question,) = planning.engine.pending(RUN)
    planning.engine.answer(question.id, "approve", by="ada")
    return lines


async def test_what_was_decided_survives_a_pause(tmp_path):
    """A run that is paused in the middle of a replan has its decision in the history, also when another process goes on."""
    store = MemoryStore()
    replies = {"decision:execution": replan("partial_replan", confidence=0.4), "revision": GOOD}
    before = await waiting(replies, tmp_path, store, desk=Desk({"write": [MISSING]}))
    assert not any(d["replan_type"] == "partial_replan" for d in of_type("replan_decision", before))

    await solved(replies, tmp_path, start=1_700_000_100.0, store=store)
    (decided,) = (
        d
        for d in of_type("replan_decision", written(tmp_path))
        if d["replan_type"] == "partial_replan"
    )
    assert (decided["executed"], decided["result"]) == (True, "success")
    assert decided["plan_before"]["revision"] < decided["plan_after"]["revision"]


async def test_a_plan_that_is_there_is_continued(tmp_path):
    """A task that has a plan in its history is continued with it: the lines go on in the same file, with one first plan."""
    store, history, later = MemoryStore(), PlanningHistoryStore(RUN, tmp_path), Model()
    assert not history.has_plan()
    before = await waiting({"completion": summary(achieved=False)}, tmp_path, store)
    assert history.has_plan()

    planning = await solved(later, tmp_path, start=1_700_000_100.0, store=store)
    assert (planning.result.status, later.asked) == ("succeeded", [])
    lines = written(tmp_path)
    assert [line.get("event") for line in lines[len(before) :]] == ["resumed", "answered", None]
    assert of_type("plan", lines) == [history.get_latest_plan()]
    assert history.get_latest_plan()["plan"][
        "action_plan"
    ] == planning.state.plan.action_plan.model_dump(mode="json")


async def test_a_replan_that_changes_no_plan(tmp_path):
    """A decision is written when the next is made, where no revision has come of it."""
    planning = await solved(model, tmp_path, desk=desk())
    records = list(planning.engine.store.read(RUN))
    notes = [
        (r, r.body.data)
        for r in records
        if r.body.kind == "planning-noted" and r.body.type == "replan"
    ]
    done, replan_id = next(
        (r, d["record"]["replan_id"]) for r, d in notes if d["record"] and d["record"]["executed"]
    )
    others = [(r, d["considered"]) for r, d in notes if r.seq > done.seq and d["considered"]]
    other = next(r for r, d in others if d["replan_id"] != replan_id)
    lines = HistoryLineBuilder()
    assert repr(lines) == "<HistoryLineBuilder of no planning run after record 0>"
    assert [
        line["type"] for record in (records[0], done) for line in lines.lines_from(record)
    ] == []
    first, *_ = lines.lines_from(other)
    assert (first["type"], first["replan_id"]) == ("replan_decision", replan_id)


# A disk that is full


async def test_a_full_disk_loses_nothing(tmp_path):
    """If nothing can be written, the run continues, reports it once, and all lines are written as soon as possible."""
    store, folder = MemoryStore(), tmp_path / "history"
    folder.write_text("in the way")
    planning = await solved({}, folder, desk=when_posting(folder.unlink), store=store)

    assert planning.result.status == "succeeded"
    (trouble,) = (
        record.body for record in store.read(RUN) if isinstance(record.body, ErrorContained)
    )
    assert "planning-history" in trouble.where
    assert "File exists; make room, or name another folder" in trouble.error
    assert in_order(written(folder)) == rebuilt(store, tmp_path / "fresh")


# The files of the planning history


DAY = 86_400.0
PLAN: JsonObject = {"actions": [{"task_id": "write", "tool": "write"}]}
OTHER: JsonObject = {"actions": [{"task_id": "write", "tool": "shout"}]}
REVISION: JsonObject = {"plan_revision": {"reason": "it is too quiet", "changes": ["shout"]}}


def tasks_of(store: PlanningHistoryStore, issue: str) -> list[str]:
    """The tasks of an issue, in order."""
    return [str(one["task_uuid"]) for one in store.get_past_executions_for_issue(issue)]


# Saving and finding again


def test_what_is_saved_is_found(tmp_path):
    """Plans, revisions and reflections are found again by another process, in the order in which they were saved."""
    history = PlanningHistoryStore("t", tmp_path / "new", issue_id=ISSUE)
    assert (history.has_plan(), history.get_latest_plan(), history.entries()) == (False, None, [])
    history.save_plan(PLAN)
    history.save_reflection({"status": "failure", "evaluation": "nobody heard it"})
    history.save_revision(OTHER, REVISION)
    history.save_execution({"event": "succeeded", "task_id": "write"})
    history.save_reflection(Reflection(action_id="write", status="success", evaluation="they did"))
    history.save_completion({"summary": {"goal_achieved": True}})

    other = PlanningHistoryStore(directory=tmp_path / "new")
    assert other.has_plan("t")
    lines = other.entries("t")
    assert [(line["seq"], line["type"]) for line in lines] == [
        (1, "plan"), (2, "reflection"), (3, "revision"), (4, "execution"), (5, "reflection"), (6, "completion")
    ]  # fmt: skip
    assert lines[0]["plan"] == PLAN
    assert other.get_latest_plan("t") == lines[2]
    assert other.get_revision_history("t") == [lines[2]]
    assert {name: lines[2][name] for name in ("reason", "changes", "updated_plan")} == {
        "reason": "it is too quiet", "changes": ["shout"], "updated_plan": OTHER
    }  # fmt: skip
    assert [line["evaluation"]["status"] for line in other.get_all_reflections("t")] == [
        "failure",
        "success",
    ]
    assert {line["issue_id"] for line in lines} == {ISSUE}


def test_no_secret_is_saved(tmp_path):
    """Secrets are also redacted in lines that are saved by hand."""
    history = PlanningHistoryStore("t", tmp_path)
    history.save_reflection(
        {"evaluation": "the key sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789 works"}
    )
    assert "abcdefghijklmnop" not in (tmp_path / "t.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["../t", "a/b", ".t", ""])
def test_names_stay_in_the_folder(tmp_path, name):
    """A task whose name would leave the folder, or hide in it, is refused before anything is written."""
    with pytest.raises(StoreError, match="cannot be the id"):
        PlanningHistoryStore(name, tmp_path / "in").save_plan(PLAN)
    assert list(tmp_path.rglob("*")) == []


def test_a_task_must_be_named(tmp_path):
    """If neither the store nor the call names a task, the error says what to do."""
    with pytest.raises(ValueError, match="no task is named"):
        PlanningHistoryStore(directory=tmp_path).has_plan()


def test_past_executions_of_an_issue(tmp_path):
    """The tasks of an issue come in the order in which they began, with plan and outcome, without those of others."""
    saved(tmp_path, "second", ISSUE, NOW + 100)
    saved(tmp_path, "other", "owner/repo#1", NOW + 50)
    saved(tmp_path, "first", ISSUE, NOW, done=False)
    history = store_at(tmp_path)

    first, second = history.get_past_executions_for_issue(ISSUE)
    assert (first["task_uuid"], first["done"]) == ("first", False)
    assert (second["task_uuid"], second["done"]) == ("second", True)
    assert second["plan"] == {"actions": [{"task_id": "second"}]}
    assert second["completion"] == {"summary": {"goal_achieved": True}, "done": True}
    assert history.get_past_executions_for_issue("owner/repo#99") == []
    assert history.get_past_executions_for_issue("") == []


OPENED = """
import sys
from replanning.planning import PlanningHistoryStore
store, opened = PlanningHistoryStore(directory=sys.argv[1]), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
print([one["task_uuid"] for one in store.get_past_executions_for_issue(sys.argv[2])])
print(sorted(name.rpartition("/")[2] for name in opened if name.startswith(sys.argv[1]) and not name.endswith(".lock")))
"""


def test_other_files_are_not_read(tmp_path):
    """With its index, a history opens the files of the issue that is asked for, and no others."""
    for number in range(20):
        saved(tmp_path, f"t{number}", f"owner/repo#{number}", NOW + number)
    said = subprocess.run(
        [sys.executable, "-c", OPENED, str(tmp_path), "owner/repo#7"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said == ["['t7']", "['.index.jsonl', 't7.jsonl']"]


def test_the_index_is_made_again(tmp_path):
    """Without its index, or with one that is torn, old, or of other files, a history gives the same answers."""
    for number in range(3):
        saved(tmp_path, f"t{number}", ISSUE, NOW + number)
    index = tmp_path / ".index.jsonl"
    whole = index.read_bytes()
    elsewhere = whole.replace(b"#12", b"#13")
    stale = whole + whole.replace(b'"t1"', b'"gone"')
    for content in (
        b"",
        whole[:-9],
        whole.splitlines(keepends=True)[0],
        stale,
        b"\x00\xff{]\n",
        None,
    ):
        index.unlink()
        if content is not None:
            index.write_bytes(content)
        assert tasks_of(store_at(tmp_path), ISSUE) == ["t0", "t1", "t2"]
        assert len(index.read_bytes()) >= len(whole)
    index.write_bytes(elsewhere)
    assert tasks_of(store_at(tmp_path), "owner/repo#13") == []
    assert tasks_of(store_at(tmp_path), ISSUE) == ["t0", "t1", "t2"]


# Torn files


@given(st.lists(st.text(max_size=20), min_size=1, max_size=6), st.floats(min_value=0, max_value=1))
def test_a_cut_loses_the_last_line_at_most(tmp_path_factory, texts, where):
    """Wherever a file is cut off, every line before the cut is read, and what is saved after that can be read, too."""
    folder = tmp_path_factory.mktemp("history")
    history = PlanningHistoryStore("t", folder)
    for text in texts:
        history.save_reflection({"evaluation": text})
    whole = history.entries()
    content = (folder / "t.jsonl").read_bytes()[
        : round(where * (folder / "t.jsonl").stat().st_size)
    ]

    (folder / "t.jsonl").write_bytes(content)
    again = PlanningHistoryStore("t", folder)
    lines = again.entries()
    assert lines[: content.count(b"\n")] == whole[: content.count(b"\n")]
    again.save_reflection({"evaluation": "after that"})
    assert PlanningHistoryStore(directory=folder).entries("t")[: len(lines)] == lines
    assert PlanningHistoryStore(directory=folder).get_all_reflections("t")[-1]["evaluation"] == {
        "evaluation": "after that"
    }


def test_a_torn_line_does_not_lose_the_history(tmp_path):
    """Lines that are torn, empty or no JSON in the middle of a file lose themselves and nothing else."""
    history = saved(tmp_path, "t", ISSUE, NOW)
    first, last = (tmp_path / "t.jsonl").read_bytes().splitlines(keepends=True)
    junk = [
        first[:40] + b"\n",
        b"\n",
        b"\xff\xfe\n",
        b"[1, 2]\n",
        b'{"type": "plan"}\n',
        b"[" * 100_000 + b"\n",
    ]
    (tmp_path / "t.jsonl").write_bytes(b"".join([first, *junk, last]))
    assert [line["type"] for line in history.entries("t")] == ["plan", "completion"]
    assert store_at(tmp_path, NOW + 100 * DAY).prune(90)[0].task_uuid == "t"


async def test_earlier_runs_are_told(tmp_path):
    """Earlier work on an issue is read from the history in a form that a request accepts and keeps."""
    await solved({}, tmp_path, start=NOW)
    (past,) = store_at(tmp_path).get_past_executions_for_issue(ISSUE)
    assert json.loads(json.dumps(past)) == past
    assert (past["done"], past["completion"]["result"]) == (True, "succeeded")
    assert [(one["event"], one["task_id"]) for one in past["actions"]] == [
        ("succeeded", "write"),
        ("succeeded", "post"),
    ]
    assert in_order(written(tmp_path, RUN))[0]["timestamp"] == past["started"]


async def test_reflections_and_decisions_of_earlier_runs(tmp_path):
    """Earlier runs tell what reflections found, and which replans were decided with what became of them."""
    found = {
        "action_id": "post",
        "status": "failure",
        "evaluation": "the token has no right to push",
    }
    replies = {
        "reflection": {"reflection": found},
        "decision:execution": (replan("partial_replan"), go_on()),
        "revision": revision(action("post", "shout")),
    }
    settings = {"planning": {"reflection": {"trigger_interval": 1}}}
    await solved(Model(replies), tmp_path, start=NOW, settings=settings)
    past: Any = store_at(tmp_path).get_past_executions_for_issue(ISSUE)[0]
    assert past["reflections"][0]["evaluation"]["reflection"]["evaluation"] == found["evaluation"]
    (decision,) = past["decisions"]
    assert (decision["replan_type"], decision["result"]) == ("partial_replan", "success")
    assert decision["reasoning"] == "a partial_replan is needed"
    order = [one["timestamp"] for one in past["reflections"]]
    assert order == sorted(order)


def test_decisions_of_a_damaged_history(tmp_path):
    """A decision is told once, as its last line has it; decisions to go on are left out."""
    history = store_at(tmp_path, NOW, "t", ISSUE)
    history.save_plan({"actions": []})
    path = tmp_path / "t.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    common = {**first, "type": "replan_decision"}
    lines = [
        {**common, "seq": 2, "replan_id": "p1", "replan_type": "none", "result": "skipped"},
        {**common, "seq": 3, "replan_id": "p2", "replan_type": "retry", "result": "success"},
        {**common, "seq": 4, "replan_id": "p2", "replan_type": "retry", "result": "failure"},
        {**common, "seq": 5, "replan_id": "p3", "override_reason": "limit", "llm_decision": None},
    ]
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    past: Any = store_at(tmp_path).get_past_executions_for_issue(ISSUE)[0]
    told = [(one["replan_id"], one.get("result")) for one in past["decisions"]]
    assert told == [("p2", "failure"), ("p3", None)]


def test_finished_tasks_are_archived(tmp_path):
    """Tasks that were finished longer ago than is kept go into the archive as they are; later ones and open ones stay."""
    folder, archive = tmp_path / "history", tmp_path / "old" / "archive"
    saved(folder, "old", ISSUE, NOW - 91 * DAY)
    saved(folder, "young", ISSUE, NOW - 89 * DAY)
    saved(folder, "open", ISSUE, NOW - 999 * DAY, done=False)
    content = (folder / "old.jsonl").read_bytes()
    history = store_at(folder)

    wanted = history.prune(90, archive, dry_run=True)
    assert (folder / "old.jsonl").exists()
    assert not archive.exists()
    pruned = history.prune(90, archive)
    assert pruned == wanted
    assert [(one.task_uuid, one.issue_id, one.archived) for one in pruned] == [
        ("old", ISSUE, str(archive / "old.jsonl"))
    ]
    assert (archive / "old.jsonl").read_bytes() == content
    assert not (folder / "old.jsonl").exists()
    assert tasks_of(history, ISSUE) == ["open", "young"]
    assert b'"old"' not in (folder / ".index.jsonl").read_bytes()
    assert history.prune(90, archive) == []


def test_what_goes_on_is_not_finished(tmp_path):
    """A task that was finished and then went on is open; one that was only reflected upon is removed without an archive."""
    for task in ("resumed", "praised"):
        saved(tmp_path, task, ISSUE, NOW - 91 * DAY)
    saved(tmp_path, "open", ISSUE, NOW - 91 * DAY, done=False)
    store_at(tmp_path, NOW - 91 * DAY, "resumed").save_execution({"event": "resumed"})
    store_at(tmp_path, NOW - 91 * DAY, "praised").save_reflection({"feedback": "well done"})
    assert [(one.task_uuid, one.archived) for one in store_at(tmp_path).prune()] == [
        ("praised", "")
    ]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["open.jsonl", "resumed.jsonl"]


def test_an_archive_keeps_what_it_has(tmp_path):
    """A task that comes into the archive again gets another name there; nothing in an archive is overwritten."""
    folder, archive = tmp_path / "history", tmp_path / "archive"
    contents = []
    for at in (NOW - 300 * DAY, NOW - 200 * DAY):
        saved(folder, "t", ISSUE, at)
        contents.append((folder / "t.jsonl").read_bytes())
        store_at(folder).prune(90, archive)
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == {
        "t.jsonl": contents[0],
        "t.2.jsonl": contents[1],
    }


def test_the_archive_is_another_folder(tmp_path):
    """An archive that is the history itself is refused before anything is moved."""
    saved(tmp_path, "t", ISSUE, NOW - 91 * DAY)
    with pytest.raises(SettingsError, match="name another folder"):
        store_at(tmp_path).prune(90, tmp_path / "." / "x" / "..")
    assert (tmp_path / "t.jsonl").exists()

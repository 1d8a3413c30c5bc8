"""What is told of a task with `for_each`: its elements are counted together, and it is never called replaced."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from anyio import wait_all_tasks_blocked

from replanning import Alternative, ReplanningEngine, ReplanRequest, Task
from replanning.changes import ReplaceTask
from replanning.history import ReplanHistory, markdown_report, run_status, text_report, why_report
from replanning.history.graph import draw_graph
from replanning.history.overview import FoldedRows, RunOverview, TaskRow, fold_rows, read_overview
from replanning.journal import MemoryStore
from tests.support.runs import alternative, make_engine, perform, plan


def tasks(count: int, **fields: object) -> list[Task]:
    """A list of elements, what is done for each, and what follows."""
    document = {"id": "convert", "for_each": list(range(count)), **fields}
    return [Task.model_validate(document), Task(id="report", depends_on=("convert",))]


def other_tool(request: ReplanRequest) -> list[Alternative]:
    """Another task in the place of each element that failed."""
    changes = []
    for trigger in request.triggers:
        for task_id in trigger.tasks:
            changes.append(ReplaceTask(task_id=task_id, tasks=(Task(id=f"{task_id}~2"),)))
    return [alternative(*changes)]


def nothing(request: ReplanRequest) -> list[Alternative]:
    """No way on."""
    return []


def breaking(*broken: str) -> Any:
    """Work that these tasks fail at."""

    async def work(task: Task, context: object) -> str:
        if task.id in broken:
            raise ValueError(f"{task.id} is broken")
        return task.id

    return work


async def run_of(
    parts: Sequence[Task],
    *broken: str,
    propose: Callable[[ReplanRequest], list[Alternative]] = nothing,
    stop_after: int | None = None,
) -> tuple[ReplanningEngine, RunOverview]:
    """A run of these tasks, some of which are broken, and what is told of it."""
    engine = make_engine(propose, store=MemoryStore())
    work = breaking(*broken)
    async with engine.open(plan(*parts)) as run:
        if stop_after is None:
            await perform(run, work)
        else:
            ready = run.ready()
            for _ in range(stop_after):
                task = await anext(ready)
                run.succeeded(run.started(task.id), task.id)
            run.pause()
    (info,) = engine.store.runs()
    return engine, read_overview(engine.store, info, 0.0)


def lines(rows: Sequence[TaskRow | FoldedRows]) -> list[str]:
    """Names, words and details of rows."""
    told = []
    for row in rows:
        if isinstance(row, FoldedRows):
            told.append(f"{len(row.rows)} {row.state}")
        else:
            told.append(f"{row.name}: {row.look.word}: {row.detail}")
    return told


async def test_elements_follow_their_list():
    """Where there is room, each element has a line below that of its list, which counts them."""
    _, overview = await run_of(tasks(3))
    assert lines(fold_rows(overview.tasks, 5)) == [
        "convert: done: 3 done",
        "convert[0]: done: ",
        "convert[1]: done: ",
        "convert[2]: done: ",
        "report: done: ",
    ]
    assert [row.element_of for row in overview.tasks] == [None, *["convert"] * 3, None]


async def test_elements_are_folded_into_their_list():
    """Where there is little room, a list is one line, and what depends on it waits for it."""
    _, overview = await run_of(tasks(40), stop_after=37)
    assert lines(fold_rows(overview.tasks, 20)) == [
        "convert: ready: 37 done, 3 ready",
        "report: waiting: waits for convert",
    ]


async def test_elements_with_a_story_are_shown_beside_their_list():
    """Of the elements that were replaced, or failed and were left out, the first have lines of their own."""
    broken = [f"convert[{n}]" for n in range(0, 40, 2)]
    _, overview = await run_of(tasks(40), *broken, propose=other_tool)
    told = lines(fold_rows(overview.tasks, 20))
    assert told[:2] == ["convert: done: 40 done", "convert[0]: replaced: → convert[0]~2"]
    assert len(told) == 1 + 8 + 1

    _, overview = await run_of(tasks(40, on_item_failure="skip"), "convert[1]", "convert[7]")
    assert lines(fold_rows(overview.tasks, 20)) == [
        "convert: done: 38 done, 2 failed and left out",
        "convert[1]: skipped: ValueError: convert[1] is broken",
        "convert[7]: skipped: ValueError: convert[7] is broken",
        "report: done: ",
    ]


async def test_elements_without_their_condition_are_counted():
    """Elements that a condition leaves out are counted as skipped, and did not fail."""
    _, overview = await run_of(tasks(40, when="item > 30"))
    assert lines(fold_rows(overview.tasks, 20)) == [
        "convert: done: 9 done, 31 skipped",
        "report: done: ",
    ]
    assert overview.status.tasks.lists[0].left_out_lines() == []


@pytest.mark.parametrize(("count", "text"), [(0, "no elements"), (1, "1 done")])
async def test_short_lists(count, text):
    """A list without elements, or with one, is told like others."""
    _, overview = await run_of(tasks(count))
    assert overview.tasks[0].detail == text
    assert overview.tasks[0].state == "DONE"


async def test_thousand_elements():
    """A thousand elements, of which hundreds have failed, take ten lines."""
    broken = [f"convert[{n}]" for n in range(0, 1000, 3)]
    _, overview = await run_of(tasks(1000), *broken)
    told = lines(fold_rows(overview.tasks, 20))
    assert told[0] == "convert: failed: 666 done, 334 failed"
    assert told[1:3] == [
        "convert[0]: failed: ValueError: convert[0] is broken",
        "convert[3]: failed: ValueError: convert[3] is broken",
    ]
    assert len(told) == 10


async def test_list_in_a_list():
    """An element that a program expands is a list in the list, and counts as one element."""
    async with make_engine(store=(store := MemoryStore())).open(plan(*tasks(3))) as run:
        ready = run.ready()
        run.succeeded(run.started((await anext(ready)).id), "first")
        run.expand("convert[1]", ["a", "b"])
        await perform(run, breaking())
        assert run.evaluate().elements == 5
    (info,) = store.runs()
    overview = read_overview(store, info, 0.0)
    assert lines(overview.tasks) == [
        "convert: done: 3 done",
        "convert[0]: done: ",
        "convert[1]: done: 2 done",
        "convert[1][0]: done: ",
        "convert[1][1]: done: ",
        "convert[2]: done: ",
        "report: done: ",
    ]
    assert overview.status.evaluation.done == overview.status.evaluation.total == 2


async def test_included_plan_is_shown_by_all_of_its_tasks():
    """A task that includes a plan is as failed as any task of that plan, and status counts each of them."""
    included = {"tasks": [{"id": "read"}, {"id": "count", "depends_on": ["read"]}]}
    one = Task.model_validate({"id": "one", "include": included})
    each = Task.model_validate({"id": "each", "for_each": [1], "include": included})
    engine, overview = await run_of([one, each], "one/read", "each[0]/read")
    assert lines(overview.tasks) == [
        "one: failed: 1 waiting, 1 failed",
        "one/read: failed: ValueError: one/read is broken",
        "one/count: waiting: waits for one/read",
        "each: failed: 1 failed",
        "each[0]: failed: 1 waiting, 1 failed",
        "each[0]/read: failed: ValueError: each[0]/read is broken",
        "each[0]/count: waiting: waits for each[0]/read",
    ]
    titles = {row.id: row.title for row in overview.tasks}
    assert (titles["one"], titles["each"], titles["each[0]"]) == ("one", "each ×1", "each[0]")
    (info,) = engine.store.runs()
    report = run_status(engine.store, info, 0.0)
    assert report.tasks.counts == {"PENDING": 1, "FAILED": 2}


async def test_revisions_of_a_list_are_named():
    """The revision of a list is called what it is, and neither an edit nor a replan."""
    engine, overview = await run_of(tasks(40, on_item_failure="skip"), "convert[7]")
    assert [
        (repair.title, len(repair.steps)) for repair in overview.repairs if repair.revision
    ] == [
        ("convert: 40 elements", 1),
        ("left out of its list: convert[7]", 1),
    ]
    (info,) = engine.store.runs()
    assert engine.history(info.run).metrics.edits == 0


async def test_reports_name_the_revisions_of_a_list():
    """Reports say what a list was expanded into, with one line in the difference of the plan, not one for each element."""
    engine, _ = await run_of(tasks(40), "convert[7]", propose=other_tool)
    (info,) = engine.store.runs()
    history = engine.history(info.run)
    assert "revision 0 → 1 · convert: 40 elements" in text_report(history)
    assert "## convert\\: 40 elements, revision 0 → 1" in markdown_report(history)
    assert why_report(history, history.edits[0]).splitlines()[2:] == [
        "Changes",
        "  expand convert into 40 elements",
        "",
        "Plan",
        "  ~ convert: 40 elements, convert[0] … convert[39]",
    ]
    assert "for_each" not in text_report(history)


async def test_difference_of_one_element():
    """What replaces an element is shown, and not that what follows the list waits for it."""
    engine, _ = await run_of(tasks(3), "convert[1]", propose=other_tool)
    (info,) = engine.store.runs()
    history = engine.history(info.run)
    (event,) = history.events
    assert "report" not in why_report(history, event)


async def test_difference_of_plans_with_a_list():
    """The difference of two revisions has one line for a list, and one for each element that was replaced."""
    engine, _ = await run_of(tasks(40), "convert[7]", propose=other_tool)
    (info,) = engine.store.runs()
    history = engine.history(info.run)
    assert str(history.diff(0, 2)).splitlines() == [
        "~ convert: 40 elements",
        "~ convert[7] → convert[7]~2",
    ]
    assert str(history.diff(2, 0)).splitlines()[0] == "~ undone: convert: 40 elements"
    assert history.diff(0, 1).to_json()["lists"] == {
        "convert": [f"convert[{n}]" for n in range(40)]
    }


async def test_status_counts_a_list_as_one_task():
    """Status counts a list as one task, tells how many elements are done, and why some were left out."""
    engine, _ = await run_of(tasks(40, on_item_failure="skip"), "convert[7]")
    (info,) = engine.store.runs()
    report = run_status(engine.store, info, 0.0)
    assert report.tasks.counts == {"DONE": 2}
    (found,) = report.tasks.lists
    assert str(found) == "39 done, 1 failed and left out"
    assert found.left_out_lines() == [
        "1 of 40 elements of convert failed and was left out",
        "convert[7]: ValueError: convert[7] is broken",
    ]
    evaluation = report.evaluation
    assert (evaluation.done, evaluation.total) == (2, 2)
    assert (evaluation.elements_done, evaluation.elements) == (40, 40)


async def test_progress_does_not_fall_when_a_list_is_known():
    """The progress of a plan grows with each element, and does not fall when their number is known."""
    shares = []
    async with make_engine().open(plan(*tasks(4))) as run:
        shares.append(run.evaluate().progress)
        async for task in run.ready():
            run.succeeded(run.started(task.id))
            shares.append(run.evaluate().progress)
    assert shares == [0.0, 0.125, 0.25, 0.375, 0.5, 1.0]


async def test_equal_causes_of_elements_are_one_step():
    """Elements that fail of one cause are one step of the repair, which counts them."""
    engine = make_engine(other_tool, store=MemoryStore())
    async with engine.open(plan(*tasks(12))) as run:
        ready = run.ready()
        attempts = [run.started((await anext(ready)).id) for _ in range(12)]
        for attempt in attempts[:9]:
            run.failed(attempt, ValueError("the disk is full"))
        for attempt in attempts[9:]:
            run.succeeded(attempt)
        await perform(run, breaking())
    (info,) = engine.store.runs()
    overview = read_overview(engine.store, info, 0.0)
    (repair,) = [repair for repair in overview.repairs if repair.by == "policy"]
    assert [step.text for step in repair.steps if step.word == "failed"] == [
        (
            "9 of 12 elements of 'convert' ('convert[0]', 'convert[1]', 'convert[2]', …): "
            "ValueError: the disk is full"
        )
    ]


def drawn_texts(overview: RunOverview) -> list[str]:
    """The texts of the drawing of a run."""
    root = ET.fromstring(draw_graph(overview))
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


async def test_graph_of_a_run_that_is_over():
    """The drawing of a run that has ended says what was done, and gives no advice."""
    _, overview = await run_of(tasks(2))
    evaluation = replace(
        overview.status.evaluation,
        progress=0.5,
        health="strained",
        recommendations=("look for a cause",),
    )
    status = replace(overview.status, evaluation=evaluation)
    (ended,) = [
        text
        for text in drawn_texts(replace(overview, status=status))
        if text.startswith("succeeded")
    ]
    assert ended.endswith("done (50%)")

    status = replace(status, status="paused")
    (paused,) = [
        text for text in drawn_texts(replace(overview, status=status)) if text.startswith("paused")
    ]
    assert paused.endswith("strained: look for a cause")


async def test_graph_of_a_list():
    """A long list is one box with its counts, beside those elements that were replaced; a short one is its elements."""
    _, overview = await run_of(tasks(100), "convert[7]", propose=other_tool)
    texts = drawn_texts(overview)
    assert [text for text in texts if "convert" in text] == [
        "✓ convert ×100",
        "✓ convert[7]~2",
        "⟳ convert[7]",
        "• revision 1: convert: 100 elements",
        "⟳ revision 2 by policy: convert[7] → convert[7]~2",
    ]
    assert "100 done" in texts

    _, overview = await run_of(tasks(2))
    texts = drawn_texts(overview)
    assert sorted(text for text in texts if text.startswith("✓")) == [
        "✓ convert[0]",
        "✓ convert[1]",
        "✓ done",
        "✓ report",
    ]


async def decided_in_turn(
    parts: Sequence[Task],
    errors: Mapping[str, Exception],
    propose: Callable[[ReplanRequest], list[Alternative]] = nothing,
) -> tuple[ReplanHistory, RunOverview]:
    """What is told of a run in which each failure is decided before the next task begins."""
    engine = make_engine(propose, store=MemoryStore())
    async with engine.open(plan(*parts)) as run:
        async for task in run.ready():
            async with run.attempt(task):
                if task.id in errors:
                    raise errors[task.id]
            await wait_all_tasks_blocked()
    (info,) = engine.store.runs()
    return engine.history(info.run), read_overview(engine.store, info, 0.0)


async def test_elements_that_fail_in_turn_are_told_once():
    """Elements that fail one after another of one cause, and are left out, are one entry of a history, and one repair."""
    errors = {f"convert[{n}]": OSError(f"no room for {n}") for n in range(0, 40, 3)}
    history, overview = await decided_in_turn(tasks(40, on_item_failure="skip"), errors)
    assert len(history.events) == len(errors)
    text = text_report(history)
    assert text.count("plan kept") == 1
    assert "cause:    … and 6 more" in text
    assert "note:     14 replans with this cause and decision, up to replan 14" in text
    assert "· revision 1 → 15 ·" in text
    assert markdown_report(history).count("no provider proposed") == 14
    assert [repair.title for repair in overview.repairs] == [
        "convert: 40 elements",
        "replan 1",
        "left out of its list: convert[0], convert[3], convert[6], …",
    ]
    (failed, *_) = overview.repairs[1].steps
    assert failed.text.startswith("14 of 40 elements of 'convert' ('convert[0]', ")


async def test_elements_that_fail_otherwise_are_told_apart():
    """Replans about elements that failed of another cause, or about other tasks, have entries of their own."""
    both = [*tasks(4, on_item_failure="skip"), Task(id="other"), Task(id="next")]
    wrong = ("convert[2]", "convert[3]", "other", "next")
    errors: dict[str, Exception] = {"convert[1]": OSError("no room")}
    errors.update({name: ValueError("wrong") for name in wrong})
    history, _ = await decided_in_turn(both, errors)
    assert len(history.events) == 6, "the last one is that the goal is unreachable"
    assert text_report(history).count("plan kept") == 5


async def test_elements_that_wait_for_the_answer_about_another():
    """Elements whose failures wait for the answer about another one wait for a person as well, which one note says."""

    def unsure(request: ReplanRequest) -> list[Alternative]:
        return [alternative(*other_tool(request)[0].changes, confidence=0.4)]

    errors = {f"convert[{n}]": OSError("no room") for n in range(4)}
    history, overview = await decided_in_turn(tasks(10), errors, unsure)
    assert overview.tasks[0].detail == "6 done, 4 waiting for a person"
    assert {row.question for row in overview.tasks[1:5]} == {"question 1"}
    (event,) = history.events
    note = "3 triggers wait for the same answer: task-failed (convert[1]), task-failed (convert[2])"
    assert event.notes == (f"{note}, task-failed (convert[3])",)

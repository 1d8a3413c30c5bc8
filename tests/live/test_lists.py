# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Expanded tasks in a live plan: their results, their progress, and how they are told."""

import pytest

from replanning import Plan
from replanning.changes import ExpandTask, ModifyTask
from replanning.live import PlanView, TaskState
from tests.support.live import (
    JournaledPlan,
    add,
    cancel,
    chain,
    journaled,
    replace,
    retry,
    skip,
    task,
)


def expand(task_id: str, count: int) -> ExpandTask:
    """Carry a task out for this many elements."""
    return ExpandTask(task_id=task_id, items=tuple(range(count)))


def expanded(count: int) -> JournaledPlan:
    """A plan whose first task was expanded, and has a dependent."""
    items = list(range(count))
    run = journaled(task("convert", for_each=items), task("report", "convert"))
    run.apply(expand("convert", count))
    return run


def progress(run: JournaledPlan) -> tuple[object, ...]:
    """Tasks that are done and all, elements that are done and all, and the share of both."""
    found = PlanView(run.live).progress
    return found.done, found.total, found.elements_done, found.elements, found.share


def test_results():
    """A list has a result once all of its elements have, which are not listed themselves."""
    run = expanded(2)
    assert list(run.live.results) == []
    run.run("convert[1]", output="b")
    assert list(run.live.results) == []
    run.run("convert[0]", output="a")
    assert list(run.live.results) == ["convert"]
    assert run.live.results["convert"] == ["a", "b"]


def test_difference_of_a_list_that_is_expanded_again():
    """One line says that a list is expanded again; its elements are not shown as lost."""
    run = expanded(3)
    run.run("convert[0]")
    again = "~ convert: expanded again; elements that are done and stay the same are kept"
    assert run.live.diff([retry("convert")]) == again
    modified = ModifyTask(task_id="convert", fields={"on_item_failure": "skip"})
    assert run.live.diff([retry("convert"), modified]).splitlines() == [
        again,
        "- convert: for_each: [0, 1, 2] [PENDING]",
        "+ convert: for_each: [0, 1, 2], on_item_failure: skip [PENDING]",
    ]


def test_progress():
    """A list counts as one task, whose elements that are done count in part."""
    run = expanded(2)
    assert progress(run) == (0, 2, 0, 2, 0.0)
    run.run("convert[0]")
    assert progress(run) == (0, 2, 1, 2, 0.25)
    run.run("convert[1]")
    assert progress(run) == (1, 2, 2, 2, 0.5)
    run.run("report")
    assert progress(run) == (2, 2, 2, 2, 1.0)


def test_progress_of_a_list_in_a_list():
    """An element that is a list itself counts as one element of the outer list."""
    run = expanded(2)
    run.apply(expand("convert[1]", 2))
    run.run("convert[0]", "convert[1][0]")
    assert progress(run) == (0, 2, 2, 4, 0.25)


def test_progress_with_a_cancelled_element():
    """A list whose element was cancelled still counts as one task."""
    run = expanded(2)
    run.apply(cancel("convert[1]"))
    run.run("convert[0]")
    assert progress(run) == (0, 2, 1, 2, 0.25)


def test_progress_of_a_list_that_is_made_again():
    """Elements do not count while their list is made again, and those that are kept count again with it."""
    run = expanded(2)
    run.apply(expand("convert[1]", 2))
    run.run("convert[0]", "convert[1][0]", "convert[1][1]")
    run.apply(retry("convert"))
    assert progress(run) == (0, 2, 0, 0, 0.0)
    run.apply(expand("convert", 3))
    assert progress(run) == (0, 2, 4, 5, pytest.approx(1 / 3))
    run.run("convert[2]")
    assert progress(run) == (1, 2, 5, 5, 0.5)


def test_progress_of_a_shorter_list():
    """An element that the list does not have any more, once it was made again, does not count."""
    run = expanded(3)
    run.apply(skip("convert[2]"))
    run.run("convert[0]", "convert[1]")
    run.apply(retry("convert"))
    run.apply(expand("convert", 1))
    assert progress(run) == (1, 2, 1, 1, 0.5)
    run.run("report")
    assert progress(run) == (2, 2, 1, 1, 1.0)


def test_progress_without_tasks():
    """A plan without tasks is done."""
    assert progress(journaled()) == (0, 0, 0, 0, 1.0)


def test_elements_that_are_read():
    """A condition may ask for an element that the list does not have, which then is no result that the task reads."""
    report = task("report", "convert", when='"convert[9]" not in results')
    run = journaled(task("convert", for_each=[0, 1]), report)
    run.apply(expand("convert", 2))
    run.run("convert[0]", "convert[1]")
    read = run.live.read_results(run.live.entry("report"))
    assert [entry.id for entry in read] == ["convert[0]", "convert[1]"]


def test_view():
    """A view tells the list of an element, and how many elements of a list are in each state."""
    run = expanded(3)
    run.run("convert[0]")
    view = PlanView(run.live)
    lists = [view.list_of(name) for name in ("convert", "convert[1]", "report")]
    assert lists == [None, "convert", None]
    assert view.element_states("convert") == {TaskState.DONE: 1, TaskState.READY: 2}
    assert view.element_states("convert[1]") is None


def test_names_in_sentences():
    """Elements of one list are one phrase; any other task, also a call that the run has forgotten, is named itself."""
    run = journaled(task("convert", for_each=[0, 1, 2]), "read-1")
    run.apply(expand("convert", 3))
    run.run("read-1")
    run.live.forget("read-1")
    named = PlanView(run.live).group_elements(["convert[2]", "read-1", "convert[1]"])
    assert [(group.name, group.verb) for group in named] == [
        ("2 of 3 elements of 'convert' ('convert[1]', 'convert[2]')", "are"),
        ("'read-1'", "is"),
    ]


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (0, "~ convert: no elements"),
        (1, "~ convert: 1 element, convert[0]"),
        (3, "~ convert: 3 elements, convert[0] … convert[2]"),
    ],
)
def test_diff(count, line):
    """The difference that an expansion makes is one line."""
    run = chain("convert", "report")
    assert run.live.diff([expand("convert", count)]) == line


def test_document_of_a_list():
    """The document of a plan states a list as one task, also one that a program has given, without what limits it."""
    run = journaled(
        task("list"),
        task("convert", "list", for_each="${list.output}", max_parallel=1, resources={"gpu[]": 1}),
        task("named", "list"),
        task("report", "convert", arguments={"x": "${convert.output}"}),
        resources={"cpu": 2.0, "gpu[]": 1.0},
    )
    run.run("list")
    run.apply(expand("convert", 2))
    run.apply(ExpandTask(task_id="named", items=("${a}", 2), keys=("x", "y")))
    run.apply(replace("convert[1]", task("other")))
    run.apply(add("one", "convert[0]", "other", arguments={"x": "${convert[0].output}"}))
    document = run.live.document()
    assert [each.id for each in document.tasks] == ["list", "convert", "named", "report", "one"]
    assert document.task("convert") == run.plan.task("convert")
    assert document.task("named").for_each == {"x": "$${a}", "y": 2}
    assert document.task("one").depends_on == ("convert",)
    assert document.resources == {"cpu": 2.0, "gpu[]": 1.0}
    # A resource of the plan is no limit of a list, whatever its name is.
    assert run.live.entry("other").task.resources == {"convert[]": 1.0}
    text = document.to_yaml()
    assert Plan.parse(text).to_yaml() == text
    assert {each.id for each in run.live.expanded_document().tasks} == {
        *("list", "report", "one"),
        *("convert[0]", "other", "named[x]", "named[y]"),
    }


def test_document_of_a_list_without_keys():
    """A list that a program has given has the form of a list in the document, unless its elements have names."""
    run = journaled(task("a"), task("b", key="${item}", for_each=["x"]), task("c"))
    run.apply(expand("a", 2))
    run.apply(ExpandTask(task_id="c", items=()))
    document = run.live.document()
    assert (document.task("a").for_each, document.task("c").for_each) == ([0, 1], [])


def test_document_with_replaced_tasks():
    """In the document of a plan, the tasks depend on what has replaced others, and refer to it."""
    run = journaled(
        task("list"),
        task("each", "list", for_each="${list.output}"),
        task(
            "report",
            "list",
            arguments={"x": "of ${list.output.n}"},
            when="results.list.n > 1",
            fallbacks=[{"arguments": {"x": "${list.output}"}}],
        ),
    )
    run.apply(replace("list", task("list~2")))
    run.apply(replace("list~2", task("list~3")))
    document = run.live.document()
    report = document.task("report")
    assert report.arguments == {"x": "of ${list~3.output.n}"}
    assert report.when == "results['list~3'].n > 1"
    assert report.fallbacks[0].arguments == {"x": "${list~3.output}"}
    assert document.task("each").for_each == "${list~3.output}"
    text = document.to_yaml()
    assert Plan.parse(text).to_yaml() == text


def test_document_with_a_task_replaced_by_several():
    """In the document of a plan, the tasks depend on all that have replaced another."""
    run = journaled(task("list"), task("report", "list"))
    run.apply(replace("list", "left", "right"))
    assert run.live.document().task("report").depends_on == ("left", "right")

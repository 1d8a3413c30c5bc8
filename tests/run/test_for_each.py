"""A task for each element of a list that only the run knows."""

from typing import Any

import pytest

from replanning import Plan, PlanRun, Task, TaskContext, ToolSpec, open_run
from replanning.changes import AddTask, ExpandTask, ModifyTask, ReplaceTask, RetryTask
from replanning.errors import ChangeRejected, PlanError
from replanning.journal import MemoryStore, PlanRevised
from replanning.plan import Fallback, JsonValue, RunId
from replanning.plan.tasks import Undo
from tests.support.runs import alternative, make_engine, perform, plan

LISTED = Task(id="list")


def template(**fields: object) -> Task:
    """A task that is carried out for each element of what `list` returns."""
    document: dict[str, object] = {
        "id": "convert",
        "depends_on": ["list"],
        "for_each": "${list.output}",
        "arguments": {"item": "${item}"},
    }
    return Task.model_validate(document | fields)


REPORT_EACH = Task(id="report", depends_on=("each",))
REPORT = Task(id="report", depends_on=("convert",), arguments={"all": "${convert.output}"})


def returning(items: JsonValue, *, broken: tuple[str, ...] = ()) -> Any:
    """Work whose `list` returns these items; every other task returns its arguments, or fails."""

    async def work(task: Task, context: TaskContext) -> object:
        if task.id.startswith("list"):
            return items
        if task.id in broken:
            raise ValueError(f"{task.id} is broken")
        return dict(task.arguments)

    return work


def states(run: PlanRun) -> dict[str, str]:
    """The state of every task."""
    return {each.id: str(each.state) for each in run.view.tasks()}


async def test_each_element_is_a_task_and_the_result_is_their_list():
    """Each element of a list becomes a task, by one revision, and dependents see the list of their outputs in its order."""
    async with open_run(plan(LISTED, template(), REPORT)) as run:
        ran = await perform(run, returning(["a", {"b": 1}, None]))
        revisions = [r.body for r in run.records() if isinstance(r.body, PlanRevised)]
    assert ran == ["list", "convert[0]", "convert[1]", "convert[2]", "report"]
    outputs = [{"item": "a"}, {"item": {"b": 1}}, {"item": None}]
    assert run.result.outputs["convert"] == outputs
    assert run.result.outputs["report"] == {"all": outputs}
    assert set(run.result.outputs) == {"list", "convert", "report"}
    assert [body.by for body in revisions] == ["for_each"]
    assert run.history.events == ()


async def test_list_without_elements_is_done_at_once():
    """An empty list gives an empty result, and the dependents run."""
    async with open_run(plan(LISTED, template(), REPORT)) as run:
        assert await perform(run, returning([])) == ["list", "report"]
    assert run.result.status == "succeeded"
    assert run.result.outputs["report"] == {"all": []}


async def test_condition_about_a_list_without_elements():
    """To conditions, a list without elements is done."""
    reader = Task(id="reader", depends_on=("convert",), when="status.convert == 'DONE'")
    async with open_run(plan(LISTED, template(), reader)) as run:
        assert await perform(run, returning([])) == ["list", "reader"]


@pytest.mark.parametrize("source", [["x", "y"], "${context.names}"])
async def test_list_that_is_known_before_the_run(source):
    """A list may be written in the plan, or be a value of the context."""
    each = Task(id="convert", for_each=source, arguments={"name": "${item}"})
    async with open_run(plan(each, context={"names": ["x", "y"]})) as run:
        await perform(run, returning(None))
    assert run.result.outputs["convert"] == [{"name": "x"}, {"name": "y"}]


async def test_elements_of_a_mapping_are_called_by_its_keys():
    """The values of a mapping are the elements, and its keys name their tasks."""
    task = template(arguments={"is": "${key} ${index} ${item.n}"})
    async with open_run(plan(LISTED, task)) as run:
        ran = await perform(run, returning({"b": {"n": 1}, "a": {"n": 2}}))
    assert ran == ["list", "convert[b]", "convert[a]"]
    assert run.result.outputs["convert"] == [{"is": "b 0 1"}, {"is": "a 1 2"}]


async def test_key_names_the_tasks_of_elements():
    """With `key`, the tasks are called by what the elements say, and others refer to one of them by that."""
    names: dict[str, str | None] = {}

    async def work(task: Task, context: TaskContext) -> object:
        names[task.id] = task.name
        return [{"path": "a.txt"}, {"path": "b.txt"}] if task.id == "list" else task.id

    task = template(key="${item.path}", name="Convert ${item.path}", goal="No ${index}")
    async with open_run(plan(LISTED, task)) as run:
        await perform(run, work)
        assert run.view.task("convert[b.txt]").task.goal == "No 1"
    assert names["convert[a.txt]"] == "Convert a.txt"
    assert run.result.outputs["convert"] == ["convert[a.txt]", "convert[b.txt]"]


async def test_condition_about_the_element_leaves_out_elements():
    """A condition that reads the element is evaluated for each; those left out have the output null, and dependents run."""
    async with open_run(plan(LISTED, template(when="item > 1"), REPORT)) as run:
        ran = await perform(run, returning([1, 2, 0, 3]))
    assert ran == ["list", "convert[1]", "convert[3]", "report"]
    assert run.result.outputs["convert"] == [None, {"item": 2}, None, {"item": 3}]
    async with open_run(plan(LISTED, template(when="item > 9"), REPORT)) as run:
        assert await perform(run, returning([1, 2])) == ["list", "report"]


async def test_condition_about_something_else_decides_about_the_list():
    """A condition that does not read the element is evaluated once, and leaves the whole list out."""
    task = template(when="context.go")
    async with open_run(plan(LISTED, task, REPORT, context={"go": False})) as run:
        assert await perform(run, returning([1, 2])) == ["list"]
    assert states(run) == {"list": "DONE", "convert": "SKIPPED", "report": "SKIPPED"}


@pytest.mark.parametrize(
    ("items", "fields", "problem"),
    [
        ("text", {}, "`for_each` needs a list or a mapping, got a string: 'text'"),
        (None, {}, "`for_each` needs a list or a mapping, got null: None"),
        (
            [1, 2, 3],
            {"max_items": 2},
            "the list has 3 elements, and `max_items` allows 2; it begins with 1",
        ),
        (
            [{"id": "x"}, {"id": "y"}, {"id": "x"}],
            {"key": "${item.id}"},
            "several elements have the key 'x'",
        ),
        (
            [{"id": ["x"]}, {}],
            {"key": "${item.id}"},
            (
                "the key of an element is a text or a number: element 0: ${item.id} is ['x']; "
                "element 1: ${item.id}: 'id' does not exist; there is nothing yet"
            ),
        ),
        (
            [" a", "b\n", ""],
            {"key": "${item}"},
            "a key needs 1 to 191 printable characters, without a blank at either end, unlike ' a', 'b\\n', ''",
        ),
    ],
)
async def test_what_is_no_list_of_elements_fails_the_task(items, fields, problem):
    """What is no list, has too many elements or unusable keys is one failure of the task, which names them."""
    async with open_run(plan(LISTED, template(**fields))) as run:
        await perform(run, returning(items))
        failure = run.view.task("convert").failure
    assert run.result.status == "failed"
    assert failure is not None
    assert failure.message == problem


async def test_failure_of_a_template_can_be_replanned():
    """A provider may change a task whose list was too long, and then it is expanded."""

    def longer(request):
        more = ModifyTask(task_id="convert", fields={"max_items": 5})
        return [alternative(more, RetryTask(task_id="convert"))]

    async with make_engine(longer).open(plan(LISTED, template(max_items=1))) as run:
        await perform(run, returning([1, 2]))
    assert run.result.status == "succeeded"
    assert run.result.outputs["convert"] == [{"item": 1}, {"item": 2}]


async def test_element_is_repaired_alone():
    """What replaces one element keeps its place in the result and its element, and the others go on."""

    def other(request):
        (task_id,) = request.triggers[0].tasks
        instead = Task(id=f"{task_id}-b", arguments={"instead": "${item}"})
        return [alternative(ReplaceTask(task_id=task_id, tasks=(instead,)))]

    engine = make_engine(other, limits={"replans_per_lineage": 1})
    broken = ("convert[0]", "convert[2]", "convert[3]", "convert[5]")
    async with engine.open(plan(LISTED, template(), REPORT)) as run:
        await perform(run, returning(list("abcdef"), broken=broken))
    assert run.result.status == "succeeded"
    assert run.result.outputs["convert"] == [
        {"instead": "a"},
        {"item": "b"},
        {"instead": "c"},
        {"instead": "d"},
        {"item": "e"},
        {"instead": "f"},
    ]


async def test_list_goes_on_without_elements_that_fail():
    """With `on_item_failure: skip`, an element that fails for good has the output null and says why."""
    task = template(on_item_failure="skip")
    async with open_run(plan(LISTED, task, REPORT)) as run:
        await perform(run, returning([1, 2, 3], broken=("convert[1]",)))
        reason = run.view.task("convert[1]").reason
    assert run.result.status == "succeeded"
    assert run.result.outputs["report"] == {"all": [{"item": 1}, None, {"item": 3}]}
    assert reason == "ValueError: convert[1] is broken"


async def test_max_parallel_limits_the_elements_that_run():
    """At most `max_parallel` elements run at a time, what replaces one included; other tasks are not held up."""
    task = template(max_parallel=2)
    async with open_run(plan(LISTED, task, Task(id="other", depends_on=("list",)))) as run:
        ready = run.ready()
        first = await anext(ready)
        run.succeeded(run.started(first.id), [1, 2, 3, 4])
        started = [run.started((await anext(ready)).id) for _ in range(3)]
        assert started == ["other#1", "convert[0]#1", "convert[1]#1"]
        assert run.view.task("convert[2]").state == "READY"
        run.replace_task("convert[2]", Task(id="new"))
        run.succeeded(started[1])
        last = run.started((await anext(ready)).id)
        assert last == "convert[3]#1"
        assert run.view.task("new").state == "READY"
        run.succeeded(last)
        assert (await anext(ready)).id == "new"
        run.pause()


async def test_another_tool_for_elements_that_wait():
    """A change of an expanded task changes its elements that are waiting, and no others."""
    async with open_run(plan(LISTED, template())) as run:
        ready = run.ready()
        run.succeeded(run.started((await anext(ready)).id), [1, 2, 3])
        run.started((await anext(ready)).id)
        run.modify_task("convert", tool="better")
        tools = [run.view.task(f"convert[{n}]").task.tool for n in range(3)]
        assert tools == [None, "better", "better"]
        run.pause()


async def test_program_expands_a_task():
    """A program gives a task a list that only it knows, and is told what is wrong with a list."""
    task = Task(id="each", arguments={"of": "${item.n}"}, scope={"item": {"n": 0}})
    async with open_run(plan(task)) as run:
        with pytest.raises(ChangeRejected, match="the list has 1001 elements"):
            run.expand("each", list(range(1001)))
        run.expand("each", {"x": {"n": 1}, "y": {"n": 2}})
        assert await perform(run, returning(None)) == ["each[x]", "each[y]"]
    assert run.result.outputs["each"] == [{"of": 1}, {"of": 2}]


async def test_resumed_in_the_midst_of_a_list():
    """A resumed run has the same elements, keeps those that are done, and does the rest."""
    store = MemoryStore()
    document = plan(LISTED, template(), REPORT)
    async with make_engine(store=store).open(document, run_id=RunId("r")) as run:
        ready = run.ready()
        run.succeeded(run.started((await anext(ready)).id), ["a", "b", "c"])
        run.succeeded(run.started((await anext(ready)).id), "A")
        run.pause()
    async with make_engine(store=store).resume(RunId("r")) as run:
        ran = await perform(run, returning(None))
    assert ran == ["convert[1]", "convert[2]", "report"]
    assert run.result.outputs["convert"] == ["A", {"item": "b"}, {"item": "c"}]


async def test_text_of_an_element_is_text():
    """What looks like a reference in an element reaches the work as it is."""
    async with open_run(plan(LISTED, template(), context={"secret": "s"})) as run:
        await perform(run, returning(["${context.secret}"]))
    assert run.result.outputs["convert"] == [{"item": "${context.secret}"}]


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        (
            [{"id": "a", "arguments": {"x": "${item.y}"}}],
            (
                "tasks[0].arguments: task 'a': ${item.y} refers to an element: only a task with "
                "`for_each` has any"
            ),
        ),
        (
            [{"id": "a", "when": "index > 1"}],
            (
                "tasks[0].when: task 'a': the condition 'index > 1' refers to an element: only a task "
                "with `for_each` has any"
            ),
        ),
        (
            [{"id": "a", "key": "${item}"}],
            "tasks[0].key: task 'a': `key` needs `for_each`, which is missing",
        ),
        (
            [{"id": "item"}, {"id": "a", "for_each": [1]}],
            (
                "tasks[0].id: a plan with `for_each` reserves the id 'item' for elements; "
                "choose another id"
            ),
        ),
        (
            [{"id": "a"}, {"id": "b", "for_each": "${a.output}"}],
            (
                "tasks[1].for_each: task 'b' refers to ${a.output} and does not depend on 'a': add "
                "'a' to its depends_on"
            ),
        ),
        (
            [{"id": "b", "for_each": "${list}"}],
            (
                "tasks[0].for_each: expected a list, a mapping, or a reference such as "
                "${list.output}, got '${list}'"
            ),
        ),
        (
            [{"id": "b", "for_each": "list"}],
            (
                "tasks[0].for_each: expected a list, a mapping, or a reference such as "
                "${list.output}, got 'list'"
            ),
        ),
        (
            [{"id": "b", "for_each": 3}],
            (
                "tasks[0].for_each: expected a list, a mapping, or a reference such as "
                "${list.output}, got 3"
            ),
        ),
        (
            [{"id": "b", "for_each": [1], "name": "${context.x}"}],
            (
                "tasks[0].name: task 'b': '${context.x}' is not a reference here: write ${item}, "
                "${index}, or ${key}"
            ),
        ),
    ],
)
def test_what_a_plan_cannot_say_about_elements(tasks, problem):
    """A plan that speaks of elements where there are none is refused with the place."""
    with pytest.raises(PlanError) as caught:
        Plan.model_validate({"goal": {"objective": "x"}, "tasks": tasks})
    assert [str(found) for found in caught.value.problems] == [problem]


async def rerun(store: MemoryStore, old: str, items: JsonValue) -> tuple[list[str], PlanRun]:
    """Run `list` again, with what follows from it; return the tasks that ran, and the new run."""
    engine = make_engine(store=store)
    async with engine.resume(engine.rerun(old, "list", new_id=f"{old}+")) as run:
        ran = await perform(run, returning(items))
    return ran, run


async def test_list_that_is_made_again_keeps_equal_elements():
    """When a list is made again, elements with equal keys and arguments are kept, others run, and those that are gone do not count."""
    store = MemoryStore()
    document = plan(LISTED, template(key="${item.id}"), REPORT)
    first: JsonValue = [{"id": "a"}, {"id": "b", "n": 1}, {"id": "c"}]
    async with make_engine(store=store).open(document, run_id=RunId("r")) as run:
        await perform(run, returning(first))
    assert run.result.status == "succeeded"

    second: JsonValue = [{"id": "c"}, {"id": "b", "n": 2}, {"id": "d"}]
    ran, run = await rerun(store, "r", second)
    assert ran == ["list~2", "convert[b]~2", "convert[d]", "report~2"]
    assert run.result.outputs["convert"] == [{"item": item} for item in second]
    assert run.result.outputs["report"] == {"all": run.result.outputs["convert"]}

    ran, run = await rerun(store, "r+", second)
    assert ran == ["list~3", "report~3"]
    assert run.result.status == "succeeded"
    assert run.result.outputs["convert"] == [{"item": item} for item in second]


async def test_corrected_template_is_expanded_again():
    """A corrected plan that changes what is done for each element does it for all of them again."""
    store = MemoryStore()
    document = plan(LISTED, template(), REPORT)
    async with make_engine(store=store).open(document, run_id=RunId("r")) as run:
        await perform(run, returning([1, 2], broken=("report",)))
    corrected = plan(LISTED, template(arguments={"item": "${item}", "more": True}), REPORT)
    engine = make_engine(store=store)
    engine.adopt(RunId("r"), corrected, rerun="changed", by="ada")
    async with engine.resume(RunId("r")) as run:
        ran = await perform(run, returning(None))
    assert ran == ["convert[0]~2", "convert[1]~2", "report"]
    assert run.result.outputs["convert"] == [{"item": 1, "more": True}, {"item": 2, "more": True}]


def other_tool(request):
    """Replace what failed by a task that does not fail."""
    (task_id,) = request.triggers[0].tasks
    instead = Task(id=f"{task_id}-b", arguments={"instead": "${item}"})
    return [alternative(ReplaceTask(task_id=task_id, tasks=(instead,)))]


async def test_list_with_a_repaired_element_is_made_again():
    """A list with an element that was repaired is made again, and an element that was repaired and is the same is kept."""
    store = MemoryStore()
    document = plan(LISTED, template(key="${item}"), REPORT)
    engine = make_engine(other_tool, store=store)
    async with engine.open(document, run_id=RunId("r")) as run:
        await perform(run, returning(["a", "b"], broken=("convert[b]",)))
    assert run.result.outputs["convert"] == [{"item": "a"}, {"instead": "b"}]

    ran, run = await rerun(store, "r", ["a", "b", "c"])
    assert ran == ["list~2", "convert[c]", "report~2"]
    assert run.result.outputs["convert"] == [{"item": "a"}, {"instead": "b"}, {"item": "c"}]


async def test_corrected_template_leaves_out_what_failed_before():
    """A corrected plan that changes a list is not held up by what failed in place of its elements."""
    store = MemoryStore()
    document = plan(LISTED, template(), REPORT)
    engine = make_engine(other_tool, store=store)
    broken = ("convert[1]", "convert[1]-b", "convert[1]~2")
    async with engine.open(document, run_id=RunId("r")) as run:
        await perform(run, returning([1, 2], broken=broken))
    assert run.result.status == "failed"
    engine = make_engine(store=store)
    corrected = plan(LISTED, template(on_item_failure="skip"), REPORT)
    engine.adopt(RunId("r"), corrected, rerun="changed", by="ada")
    async with engine.resume(RunId("r")) as run:
        ran = await perform(run, returning(None, broken=broken))
    assert ran == ["convert[1]~2", "report"]
    assert run.result.outputs["report"] == {"all": [{"item": 1}, None]}


async def test_secret_in_an_element():
    """A secret in an element reaches the work and no journal; after a resume, its task fails with the reason and no mask is used."""
    store = MemoryStore()
    document = plan(LISTED, template())
    used: list[object] = []

    async def work(task: Task, context: TaskContext) -> object:
        used.append(dict(context.arguments))
        return None

    async with make_engine(store=store).open(document, run_id=RunId("r")) as run:
        ready = run.ready()
        run.succeeded(run.started((await anext(ready)).id), [{"token": "tok-abcdef"}, "b"])
        assert (await anext(ready)).arguments == {"item": {"token": "tok-abcdef"}}
        run.pause()
    assert "tok-abcdef" not in str([record.body for record in store.read(RunId("r"))])
    async with make_engine(store=store).resume(RunId("r")) as run:
        await perform(run, work)
        failure = run.view.task("convert[0]").failure
    assert used == [{"item": "b"}]
    assert failure is not None
    assert "expand its list again" in failure.message


async def test_others_refer_to_one_element():
    """Tasks that depend on a list refer to one of its elements by its id, in arguments and conditions."""
    first = Task(
        id="first",
        depends_on=("convert",),
        arguments={"of": "${convert[1].output.item}"},
        when='results["convert[0]"].item == "a" and status["convert[1]"] == "DONE"',
    )
    none = Task(id="none", depends_on=("convert",), when='"convert[9]" in results')
    store = MemoryStore()
    document = plan(LISTED, template(), first, none)
    async with make_engine(store=store).open(document, run_id=RunId("r")) as run:
        run.succeeded(run.started((await anext(run.ready())).id), ["a", "b"])
        run.pause()
    async with make_engine(store=store).resume(RunId("r")) as run:
        await perform(run, returning(None))
    assert run.result.outputs["first"] == {"of": "b"}
    assert states(run)["none"] == "SKIPPED"
    with pytest.raises(PlanError, match="does not depend on 'convert': add 'convert' to its dep"):
        plan(LISTED, template(), Task(id="x", arguments={"of": "${convert[1].output}"}))


async def test_kept_elements_are_not_stale():
    """Elements that are kept where a list is made again are results of the new list, and are not done again."""
    store = MemoryStore()
    document = plan(LISTED, template(key="${item}"), REPORT, on_stale="redo")
    async with make_engine(store=store).open(document, run_id=RunId("r")) as run:
        await perform(run, returning(["a", "b"]))
    ran, run = await rerun(store, "r", ["a", "b", "c"])
    assert ran == ["list~2", "convert[c]", "report~2"]
    assert run.result.status == "succeeded"
    assert run.view.stale_results() == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (ExpandTask(task_id="done", items=(1,)), "task 'done' is DONE: it cannot be expanded"),
        (
            ExpandTask(task_id="convert", items=(1, 2), keys=("a",)),
            "task 'convert': the list has 2 elements but 1 key",
        ),
        (
            ExpandTask(task_id="named", items=({},)),
            "task 'named': ${item.name}: 'name' does not exist; there is nothing yet",
        ),
        (RetryTask(task_id="open"), "task 'open': its part 'open[0]' is running: cancel it first"),
        (ModifyTask(task_id="over", fields={"tool": "x"}), "none of its elements is waiting"),
        (
            RetryTask(task_id="over"),
            "task 'over' is done, and since then 'after' started: it cannot be retried",
        ),
    ],
)
async def test_changes_of_lists_that_are_refused(change, problem):
    """A change of a list that cannot be made is refused with the reason, and nothing has changed."""
    tasks = (
        Task(id="done"),
        Task(id="open", for_each=[1]),
        Task(id="over", for_each=[]),
        Task(id="after", depends_on=("over",)),
        template(depends_on=("never",), for_each="${never.output}"),
        template(
            id="named", depends_on=("never",), for_each="${never.output}", name="${item.name}"
        ),
        Task(id="never", depends_on=("after",)),
    )
    async with open_run(plan(*tasks)) as run:
        ready = run.ready()
        run.succeeded(run.started((await anext(ready)).id))
        for _ in range(2):
            run.started((await anext(ready)).id)
        before = run.view.revision
        with pytest.raises(ChangeRejected) as caught:
            run.apply([change])
        assert problem in str(caught.value)
        assert run.view.revision == before
        run.pause()


async def test_waiting_elements_are_taken_out_when_a_list_is_made_again():
    """A person has a list made again whose elements wait or have failed; what was done and is the same is kept."""
    async with open_run(plan(LISTED, template(max_parallel=1))) as run:
        ready = run.ready()
        run.succeeded(run.started((await anext(ready)).id), ["a", "b", "c"])
        run.succeeded(run.started((await anext(ready)).id), "A")
        run.failed(run.started((await anext(ready)).id), "broken")
        run.apply([RetryTask(task_id="convert")], reason="it was a bad day")
        assert await perform(run, returning(None)) == ["convert[1]~2", "convert[2]~2"]
    assert run.result.outputs["convert"] == ["A", {"item": "b"}, {"item": "c"}]


async def test_elements_that_read_other_results_are_done_again():
    """An element that reads the result of another task, or its place in the list, is no longer the same when these change."""
    store = MemoryStore()
    reads = template(arguments={"item": "${item}", "all": "${list.output}"}, key="${item}")
    places = template(id="places", arguments={"at": "${index}"}, key="${item}")
    async with make_engine(store=store).open(plan(LISTED, reads, places), run_id=RunId("r")) as run:
        await perform(run, returning(["a", "b"]))
    ran, run = await rerun(store, "r", ["b", "a"])
    assert sorted(ran) == [
        "convert[a]~2",
        "convert[b]~2",
        "list~2",
        "places[a]~2",
        "places[b]~2",
    ]


async def test_many_keys_that_are_none():
    """Of many elements without a key, the first are named, and the number of the others."""
    async with open_run(plan(LISTED, template(key="${item.id}"))) as run:
        await perform(run, returning([None] * 9))
        failure = run.view.task("convert").failure
    assert failure is not None
    assert failure.message.endswith("; and 4 more")


async def test_secret_as_a_key():
    """A key that looks like a secret names no task: the list fails, and says so without it."""
    key = "ghp_" + "a1B2" * 9
    async with open_run(plan(LISTED, template(key="${item}"))) as run:
        await perform(run, returning([key]))
        failure = run.view.task("convert").failure
    assert failure is not None
    assert "keys become ids of tasks" in failure.message
    assert key not in failure.message


async def test_id_of_an_element_that_is_taken():
    """An element whose id another task has gets the next one, and keeps its place."""
    async with open_run(plan(Task(id="each", for_each=["a"]), Task(id="wait"))) as run:
        run.apply([AddTask(task=Task(id="each[0]")), ExpandTask(task_id="each", items=("a", "b"))])
        await perform(run, returning(None))
        assert [each.id for each in run.view.tasks()][2:] == ["each[0]", "each[0]~2", "each[1]"]
    assert run.result.status == "succeeded"


async def test_list_that_is_done_is_made_again():
    """A list that is done can be made again while nothing that depends on it has started."""
    async with open_run(plan(Task(id="each", for_each=["a"]), REPORT_EACH)) as run:
        ready = run.ready()
        run.succeeded(run.started((await anext(ready)).id), "A")
        run.apply([RetryTask(task_id="each")])
        assert await perform(run, returning(None)) == ["report"]
    assert run.result.outputs["each"] == ["A"]


async def test_elements_are_taken_back():
    """What takes the call of an element back refers to its element and to other results, as the tool or the task states it."""
    tools = [
        ToolSpec(
            name="make",
            undo=Undo(tool="drop", arguments={"what": "${item.id}", "of": "${results.list[0].id}"}),
        ),
        ToolSpec(name="drop"),
        ToolSpec(name="list", effect="none"),
    ]
    own = Fallback(tool="drop", arguments={"own": "${item.id}", "at": "${index}"})
    tasks = (
        LISTED.model_copy(update={"tool": "list"}),
        template(tool="make"),
        template(id="other", tool="make", undo=own),
    )
    store = MemoryStore()
    document = plan(*tasks, tools=tools)
    async with make_engine(store=store).open(document, run_id=RunId("r")) as run:
        await perform(run, returning([{"id": "a"}, {"id": "b"}]))
    engine = make_engine(store=store)
    engine.undo(RunId("r"), by="ada")
    async with engine.resume(RunId("r")) as run:
        taken_back: list[JsonValue] = []
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                taken_back.append(dict(attempt.context.arguments))
    assert sorted(map(str, taken_back)) == [
        "{'own': 'a', 'at': 0}",
        "{'own': 'b', 'at': 1}",
        "{'what': 'a', 'of': 'a'}",
        "{'what': 'b', 'of': 'a'}",
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"key": "${item}"}, "`key` needs `for_each`, which is missing"),
        ({"max_items": 2}, "`max_items` needs `for_each`, which is missing"),
        ({"with": {"x": 1}}, "`with` needs `include`, which is missing"),
        (
            {"arguments": {"x": "${item}"}},
            "${item} refers to an element: only a task with `for_each` has any",
        ),
        (
            {"include": {"tasks": [{"id": "read", "arguments": {"x": "${item}"}}]}},
            (
                "include.tasks[0].arguments: task 'read': ${item} refers to an element: only a task "
                "with `for_each` has any"
            ),
        ),
        (
            {"include": {"tasks": [{"id": "read", "depends_on": ["list"]}]}},
            (
                "include.tasks[0].depends_on[0]: task 'read' depends on 'list', which is not a task of "
                "the plan"
            ),
        ),
    ],
)
async def test_edit_without_a_list(fields, problem):
    """An edit is refused for what it states about a list, an element or an included plan that is not there."""
    new = Task.model_validate({"id": "new", **fields})
    async with open_run(plan(LISTED)) as run:
        with pytest.raises(ChangeRejected) as refused:
            run.add_task(new)
        await perform(run, returning([]))
    (told,) = refused.value.problems
    assert told.message == f"task 'new': {problem}"


async def test_part_of_an_included_plan_has_no_element():
    """A task that replaces one of an included plan cannot read an element, because that one has none."""
    one = Task.model_validate({"id": "one", "include": {"tasks": [{"id": "read"}]}})
    new = Task.model_validate({"id": "new", "arguments": {"x": "${item}"}})
    async with open_run(plan(one)) as run:
        part = await anext(run.ready())
        with pytest.raises(ChangeRejected, match="only a task with `for_each` has any"):
            run.replace_task(part.id, new)
        await perform(run, returning([]))


async def test_elements_cannot_be_given_another_list():
    """What a list is made by changes only with the list; what becomes of it when an element fails changes at any time."""
    async with open_run(plan(LISTED, template())) as run:
        async for task in run.ready():
            if task.id == "list":
                async with run.attempt(task) as attempt:
                    attempt.output = [1, 2]
                continue
            break
        with pytest.raises(
            ChangeRejected, match="`max_parallel` cannot change once the list is expanded"
        ):
            run.modify_task("convert", max_parallel=1)
        run.modify_task("convert", on_item_failure="skip")
        assert run.view.task("convert[1]").task.on_item_failure == "skip"
        limit = ModifyTask(task_id="convert", fields={"max_parallel": 1})
        run.apply([RetryTask(task_id="convert"), limit])
        ran = await perform(run, returning([]))
    assert ran == ["convert[0]~2", "convert[1]~2"]

"""Plans that are carried out in the place of a task of another plan."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from replanning import Plan, PlanRun, Task, TaskContext, open_run, tool
from replanning.changes import IncludePlan, ReplaceTask
from replanning.errors import ChangeRejected, PlanError
from replanning.journal import MemoryStore, PlanRevised
from replanning.plan import JsonObject, JsonValue, RunId
from replanning.plan.document import plan_schema
from replanning.plan.included_files import locate_problems
from replanning.tools import check_tools
from replanning.tools.check import check_danger, check_unused_arguments
from tests.support.runs import alternative, make_engine, perform, plan

ONE: JsonObject = {
    "parameters": {"name": "string", "times": {"type": "integer", "default": 2}},
    "tasks": [
        {"id": "count", "arguments": {"text": "${parameters.name}"}},
        {
            "id": "say",
            "depends_on": ["count"],
            "arguments": {"n": "${count.output.text}", "times": "${parameters.times}"},
        },
    ],
}


def including(**fields: object) -> Task:
    """A task that includes a plan."""
    document: JsonObject = {"id": "one", "include": ONE, "with": {"name": "${list.output}"}}
    return Task.model_validate({**document, "depends_on": ["list"], **fields})


def returning(value: object, *, broken: tuple[str, ...] = ()) -> Any:
    """Work whose `list` returns this; every other task returns its arguments, or fails."""

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "list":
            return value
        if task.id in broken:
            raise ValueError(f"{task.id} is broken")
        return dict(task.arguments)

    return work


def states(run: PlanRun) -> dict[str, str]:
    """The state of every task."""
    return {each.id: str(each.state) for each in run.view.tasks()}


LISTED = Task(id="list")
REPORT = Task(id="report", depends_on=("one",), arguments={"of": "${one.output}"})


async def test_included_plan_is_carried_out_in_the_place_of_its_task():
    """The tasks of an included plan run once its task may start, with its values as their parameters, and its last one gives the result."""
    async with open_run(plan(LISTED, including(), REPORT)) as run:
        ran = await perform(run, returning("x"))
        revisions = [r.body.by for r in run.records() if isinstance(r.body, PlanRevised)]
    assert ran == ["list", "one/count", "one/say", "report"]
    assert run.result.outputs["one"] == {"n": "x", "times": 2}
    assert set(run.result.outputs) == {"list", "one", "report"}
    assert revisions == ["include"]
    assert run.history.events == ()


async def test_stated_outputs_of_an_included_plan():
    """With `outputs`, the result is made of the outputs of any of its tasks."""
    task = including(outputs={"all": ["${count.output.text}", "${say.output.times}"]})
    async with open_run(plan(LISTED, task, REPORT)) as run:
        await perform(run, returning("x"))
    assert run.result.outputs["report"] == {"of": {"all": ["x", 2]}}


async def test_conditions_and_checks_of_an_included_plan_name_its_own_tasks():
    """Conditions, expectations and confirmations within an included plan are about its own tasks."""
    included: JsonObject = {
        "tasks": [
            {"id": "a", "arguments": {"ok": True}},
            {"id": "b", "depends_on": ["a"], "when": "results.a.ok and status['a'] == 'DONE'"},
            {"id": "c", "depends_on": ["a"], "when": "'a' not in results"},
            {"id": "d", "depends_on": ["a"], "expect": {"where": ["len(results.a) == 1"]}},
        ]
    }
    task = Task.model_validate({"id": "one", "include": included})
    async with open_run(plan(task, Task(id="a"))) as run:
        await perform(run, returning(None))
    assert run.result.status == "succeeded"
    assert states(run)["one/b"] == "DONE"
    assert states(run)["one/c"] == "SKIPPED"
    assert states(run)["one/d"] == "DONE"


async def test_task_of_an_included_plan_is_repaired_alone():
    """What replaces a task of an included plan gets its parameters, and gives its result."""

    def other(request):
        (task_id,) = request.triggers[0].tasks
        instead = Task(id="instead", arguments={"text": "${parameters.name}!"})
        return [alternative(ReplaceTask(task_id=task_id, tasks=(instead,)))]

    async with make_engine(other).open(plan(LISTED, including())) as run:
        await perform(run, returning("x", broken=("one/count",)))
    assert run.result.outputs["one"] == {"n": "x!", "times": 2}


async def test_plan_for_each_element():
    """A plan may be included for each element of a list, and has such tasks itself."""
    included: JsonObject = {
        "parameters": {"names": "array", "of": "string"},
        "tasks": [
            {
                "id": "each",
                "for_each": "${parameters.names}",
                "arguments": {"name": "${item}", "of": "${parameters.of}"},
            }
        ],
    }
    task = Task.model_validate(
        {
            "id": "all",
            "depends_on": ["list"],
            "for_each": "${list.output}",
            "include": included,
            "with": {"names": "${item}", "of": "${key}"},
        }
    )
    async with open_run(plan(LISTED, task)) as run:
        ran = await perform(run, returning({"x": ["a", "b"], "y": []}))
    assert ran == ["list", "all[x]/each[0]", "all[x]/each[1]"]
    first = [{"name": "a", "of": "x"}, {"name": "b", "of": "x"}]
    assert run.result.outputs["all"] == [first, []]


async def test_element_with_a_plan_that_fails_is_left_out():
    """With `on_item_failure: skip`, an element is left out as a whole when a task of its plan fails."""
    task = including(
        for_each="${list.output}", on_item_failure="skip", **{"with": {"name": "${item}"}}
    )
    async with open_run(plan(LISTED, task)) as run:
        ran = await perform(run, returning(["a", "b"], broken=("one[0]/count",)))
    assert "one[0]/say" not in ran
    assert run.result.status == "succeeded"
    assert run.result.outputs["one"] == [None, {"n": "b", "times": 2}]


async def test_resumed_in_the_midst_of_an_included_plan():
    """A resumed run goes on within an included plan."""
    store = MemoryStore()
    document = plan(LISTED, including(), REPORT)
    async with make_engine(store=store).open(document, run_id=RunId("r")) as run:
        ready = run.ready()
        run.succeeded(run.started((await anext(ready)).id), "x")
        run.succeeded(run.started((await anext(ready)).id), {"text": "y"})
        run.pause()
    async with make_engine(store=store).resume(RunId("r")) as run:
        assert await perform(run, returning(None)) == ["one/say", "report"]
    assert run.result.outputs["one"] == {"n": "y", "times": 2}


async def test_value_of_another_type_fails_the_task():
    """A value that turns out to be of another type is a failure of the task that includes the plan."""
    async with open_run(plan(LISTED, including())) as run:
        await perform(run, returning(3))
        failure = run.view.task("one").failure
    assert failure is not None
    assert failure.message == "parameter 'name' of the included plan: expected string, got 3"


# Files

MAIN = """
goal: {objective: convert}
tools:
  - {name: list, kind: shell, command: ls}
tasks:
  - {id: list, tool: list}
  - {id: one, include: sub/one.yaml, with: {name: x}, depends_on: [list]}
"""

INCLUDED = """
goal: {objective: convert one}
sequential: true
parameters: {name: string}
resources: {cpu: 2}
tools:
  - {name: say, kind: shell, command: "echo {text}", resources: {cpu: 1}}
tasks:
  - {id: a, tool: say, arguments: {text: "${parameters.name}"}}
  - {id: b, tool: list}
"""


def write(folder: Path, **files: str) -> Path:
    """Write `main.yaml` and files below `sub`; return the path of the first."""
    (folder / "sub").mkdir(exist_ok=True)
    for name, text in files.items():
        place = folder / "main.yaml" if name == "main" else folder / "sub" / f"{name}.yaml"
        place.write_text(text)
    return folder / "main.yaml"


def problems(path: Path) -> list[str]:
    """Why a plan cannot be loaded, with places that begin in its folder."""
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    return [str(each).replace(f"{path.parent}/", "") for each in caught.value.problems]


def test_included_file(tmp_path):
    """An included file is read from the folder of the file that includes it, and its tools and resources become those of the whole."""
    loaded = Plan.load(write(tmp_path, main=MAIN, one=INCLUDED))
    assert [tool.name for tool in loaded.tools] == ["list", "say"]
    assert loaded.tools[1].cwd == str(tmp_path / "sub")
    assert loaded.resources == {"cpu": 2}
    included = loaded.tasks[1].include
    assert not isinstance(included, str)
    assert included is not None
    assert included.source == "sub/one.yaml"
    assert included.tasks[1].depends_on == ("a",)
    assert Plan.parse(loaded.to_yaml()) == loaded


def test_problems_of_an_included_file_are_found_there(tmp_path):
    """What is wrong in an included file is told with its file, line and column, all at once."""
    wrong = INCLUDED.replace("tool: list", "tool: lst").replace("parameters.name", "parameters.nme")
    path = write(tmp_path, main=MAIN.replace("name: x", "nam: x"), one=wrong)
    assert problems(path) == [
        (
            "main.yaml:7:38 tasks[1].with: task 'one': the included plan has no parameter 'nam'; "
            "did you mean 'name'?"
        ),
        (
            "main.yaml:7:38 tasks[1].with: task 'one': parameter 'name' of the included plan has no "
            "value"
        ),
        (
            "sub/one.yaml:9:24 tasks[0].arguments: task 'a': ${parameters.nme}: the plan has no "
            "parameter 'nme'; did you mean 'name'?; declare it under `parameters`"
        ),
        (
            "sub/one.yaml:10:13 tasks[1].tool: task 'b': there is no tool 'lst'; did you mean 'list'?; "
            "describe it under `tools`"
        ),
    ]


def test_files_that_cannot_be_included(tmp_path):
    """A missing file, a plan that includes itself, and other descriptions of a tool are each told with their place."""
    path = write(tmp_path, main=MAIN.replace("one.yaml", "two.yaml"))
    assert problems(path) == [
        (
            "main.yaml:7:15 tasks[1].include: sub/two.yaml: the plan cannot be read: No such file or "
            "directory"
        )
    ]
    itself = "tasks:\n  - {id: a, include: two.yaml}\n"
    back = "tasks:\n  - {id: a, include: ../main.yaml}\n"
    path = write(tmp_path, main=MAIN, one=itself, two=back)
    assert problems(path) == [
        (
            "sub/two.yaml:2:13 tasks[0].include: a plan cannot include itself: main.yaml → one.yaml → "
            "two.yaml → main.yaml"
        )
    ]
    other = "context: {a: 1}\ntools:\n  - {name: list, kind: shell, command: dir}\ntasks: []\n"
    path = write(tmp_path, main=MAIN, one=other)
    assert problems(path) == [
        (
            "sub/one.yaml:1:1 context: an included plan has no `context`: state `parameters` with a "
            "default"
        ),
        (
            "sub/one.yaml:3:5 tools[0]: tool 'list' has a different description in main.yaml: "
            "rename one of them, or delete one of the descriptions"
        ),
    ]


def test_tools_of_different_folders(tmp_path):
    """A command that two files in different folders describe alike is refused, unless it works in one folder for both."""
    main = MAIN.replace("sub/one.yaml", "sub/inner/two.yaml").replace(", with: {name: x}", "")
    main += "  - {id: again, include: sub/one.yaml}\n"
    tool = "tools:\n  - {name: say, kind: shell, command: echo}\n"
    (tmp_path / "sub" / "inner").mkdir(parents=True)
    inner = tmp_path / "sub" / "inner" / "two.yaml"
    inner.write_text(f"{tool}tasks: []\n")
    path = write(tmp_path, main=main, one=f"{tool}tasks: []\n")
    assert problems(path) == [
        (
            "sub/one.yaml:2:5 tools[0]: tool 'say' is also described in sub/inner/two.yaml, where "
            "its program works in another folder: rename one of them, or let the `cwd` of both "
            "lead to the same folder"
        )
    ]
    inner.write_text(tool.replace("echo", "echo, cwd: ..") + "tasks: []\n")
    assert Plan.load(path).tools[1].cwd == str(tmp_path / "sub")


def test_text_of_a_plan_includes_no_file():
    """A plan that is no file cannot include one."""
    with pytest.raises(PlanError, match="is read only if the plan that includes it is a file"):
        Plan.parse(MAIN)


async def test_corrected_included_plan_is_carried_out_again_for_each_element():
    """Where an included plan is corrected, it is carried out anew for all elements, also for those that were done."""
    store = MemoryStore()
    each = including(for_each="${list.output}", **{"with": {"name": "${item}"}})
    async with make_engine(store=store).open(plan(LISTED, each), run_id=RunId("r")) as run:
        await perform(run, returning(["a", "b"], broken=("one[1]/say",)))
    corrected = {
        **ONE,
        "parameters": {"name": "string", "times": {"type": "integer", "default": 3}},
    }
    each = including(for_each="${list.output}", include=corrected, **{"with": {"name": "${item}"}})
    engine = make_engine(store=store)
    engine.adopt(RunId("r"), plan(LISTED, each), rerun="changed", by="ada")
    async with engine.resume(RunId("r")) as run:
        await perform(run, returning(None))
    assert run.result.outputs["one"] == [{"n": "a", "times": 3}, {"n": "b", "times": 3}]


@pytest.mark.parametrize("broken", ["one/count", "one/say"])
async def test_corrected_value_for_an_included_plan(broken):
    """Where a task passes another value to its included plan, that plan is carried out again with it."""
    store = MemoryStore()
    task = including(**{"with": {"name": "wrong"}})
    async with make_engine(store=store).open(plan(LISTED, task), run_id=RunId("r")) as run:
        await perform(run, returning("x", broken=(broken,)))
    corrected = plan(LISTED, including(**{"with": {"name": "right"}}))
    engine = make_engine(store=store)
    assert engine.compare("r", corrected).diff.splitlines()[0] == (
        "~ one: its included plan is run again"
    )
    engine.adopt(RunId("r"), corrected, rerun="changed", by="ada")
    async with engine.resume(RunId("r")) as run:
        await perform(run, returning(None))
    assert run.result.outputs["one"] == {"n": "right", "times": 2}


def test_schema_for_editors():
    """The JSON Schema of plan files takes a list, a mapping or a reference under `for_each`, and a file under `include`."""
    validator = Draft202012Validator(plan_schema())
    task: JsonObject = {
        "id": "each",
        "for_each": "${list.output}",
        "key": "${item.id}",
        "max_items": 5,
        "max_parallel": 2,
        "on_item_failure": "skip",
        "include": "one.yaml",
        "with": {"name": "${item}"},
        "outputs": {"all": "${a.output}"},
    }
    document: JsonObject = {"goal": {"objective": "x"}, "tasks": [task]}
    assert validator.is_valid(document)
    rights: list[JsonValue] = [[1], {"a": 1}]
    for right in rights:
        task["for_each"] = right
        assert validator.is_valid(document)
    for wrong in (3, "all", True):
        task["for_each"] = wrong
        assert not validator.is_valid(document)


def test_tasks_of_an_included_plan_are_checked_with_their_tools(tmp_path):
    """What is bound to fail in an included plan, or looks dangerous, is found as in a plan, with its file."""
    included = """
tools:
  - {name: sh, kind: shell, command: "sh -c {text}"}
  - {name: post, kind: http, method: POST, url: "http://localhost:1/x", body: {a: "{a}"}}
tasks:
  - {id: a, tool: sh, arguments: {text: "rm -rf /"}, expect: {where: ["output.nothing == 1"]}}
  - {id: b, tool: post, arguments: {c: 1}}
"""
    main = MAIN.replace(", with: {name: x}", "") + "  - {id: again, include: sub/one.yaml}\n"
    loaded = Plan.load(write(tmp_path, main=main, one=included))
    assert [problem.place for problem in check_tools(loaded)] == [
        "tasks[1].include.tasks[1].arguments",
        "tasks[1].include.tasks[0].expect.where[0]",
    ]
    assert check_tools(loaded)[0].message.startswith("task 'b': the body of tool")
    assert [
        each.place for each in locate_problems(check_tools(loaded), tmp_path / "main.yaml")
    ] == [
        f"{tmp_path}/sub/one.yaml:7:25 tasks[1].arguments",
        f"{tmp_path}/sub/one.yaml:6:71 tasks[0].expect.where[0]",
    ]
    (tmp_path / "sub" / "one.yaml").unlink()
    assert [
        each.place for each in locate_problems(check_tools(loaded), tmp_path / "main.yaml")
    ] == [
        f"{tmp_path}/main.yaml:7:15 tasks[1].include.tasks[1].arguments",
        f"{tmp_path}/main.yaml:7:15 tasks[1].include.tasks[0].expect.where[0]",
    ]
    (danger,) = check_danger(loaded)
    assert danger.message.startswith("sub/one.yaml: task 'a': tool 'sh' may do harm")
    (unused,) = check_unused_arguments(loaded)
    assert unused.message == "sub/one.yaml: task 'b': tool 'post' does not use 'c'"


def test_what_is_no_included_plan(tmp_path):
    """What an included file says wrongly is told there: text that cannot be read, no mapping, no list of tasks."""
    cases = {
        "tasks: [": "sub/one.yaml:2:1: this is not YAML",
        "taks: []": "sub/one.yaml:1:1 taks: there is no field 'taks' here; did you mean 'tasks'?",
        "facts: []": "sub/one.yaml:1:1 facts: an included plan has no `facts`: state it in the plan",
        "tasks: [{id: a, toool: x}]": "sub/one.yaml:1:17 tasks[0].toool: there is no field 'toool'",
        "- a": "main.yaml:7:15 tasks[1].include: sub/one.yaml is not a plan: expected a mapping with tasks",
        "tasks: x": "sub/one.yaml:1:1 tasks: expected a list, got 'x'",
        "tools: x\ntasks: []": "",
        "mcp: [x]\ntasks: []": "",
        "sequential: true\ntasks: x": "sub/one.yaml:2:1 tasks: expected a list, got 'x'",
        "sequential: true\ntasks: [x]": "sub/one.yaml:2:9 tasks[0]: expected",
        "tools: [x]\ntasks: []": "sub/one.yaml:1:9 tools[0]: expected",
    }
    for text, expected in cases.items():
        path = write(tmp_path, main=MAIN.replace("with: {name: x}, ", ""), one=text)
        if expected:
            assert problems(path)[0].startswith(expected), text
        else:
            # What is no list of tools, or no mapping of servers, adds none.
            assert Plan.load(path).tools[0].name == "list"


def test_parts_of_included_files_are_merged(tmp_path):
    """Servers and objects of included files are taken once; the same with another description is an error, and the capacity of the outer plan counts."""
    main = MAIN + "mcp: {files: {command: serve}}\nresources: {cpu: 8}\nobjects: {desk: table}\n"
    one = (
        "mcp: {files: {command: other}, web: {command: browse}}\nresources: {cpu: 2, disk: 1}\n"
        "objects: {desk: chair, lamp: light}\ntasks: []\n"
    )
    path = write(tmp_path, main=main.replace("with: {name: x}, ", ""), one=one)
    text = (
        "has a different description in main.yaml: rename one of them, or delete one of the "
        "descriptions"
    )
    assert problems(path) == [
        f"sub/one.yaml:1:7 mcp.files: 'files' {text}",
        f"sub/one.yaml:3:11 objects.desk: 'desk' {text}",
    ]
    one = one.replace("files: {command: other}, ", "").replace("desk: chair, ", "")
    loaded = Plan.load(write(tmp_path, main=main.replace("with: {name: x}, ", ""), one=one))
    assert loaded.resources == {"cpu": 8, "disk": 1}
    assert loaded.objects == {"desk": "table", "lamp": "light"}
    assert loaded.mcp["web"].cwd == str(tmp_path / "sub")


def test_file_that_is_included_twice(tmp_path):
    """A file may be included by several tasks, from any folder; its tools are those of the whole once."""
    again = "  - {id: two, include: sub/one.yaml, with: {name: y}}\n"
    nested = "  - {id: three, include: sub/two.yaml}\n"
    two = "tasks:\n  - {id: deep, include: one.yaml, with: {name: z}}\n"
    path = write(tmp_path, main=MAIN + again + nested, one=INCLUDED, two=two)
    assert [tool.name for tool in Plan.load(path).tools] == ["list", "say"]
    # In the folder of the plan itself, programs work where the run does.
    (tmp_path / "beside.yaml").write_text(INCLUDED)
    beside = MAIN.replace("sub/one.yaml", "beside.yaml")
    assert Plan.load(write(tmp_path, main=beside)).tools[1].cwd is None


def test_too_many_included_tasks(tmp_path):
    """Plans that include more tasks than a plan may have are refused."""
    tasks = "".join(f"  - {{id: t{number}}}\n" for number in range(60_000))
    again = "  - {id: two, include: sub/one.yaml}\n  - {id: three, include: sub/one.yaml}\n"
    main = MAIN.replace("with: {name: x}, ", "") + again
    path = write(tmp_path, main=main, one=f"tasks:\n{tasks}")
    assert problems(path) == [
        "main.yaml:9:17 tasks[3].include: with the included plans, the plan has over 100000 tasks"
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"include": None}, "tasks[0].with: task 'one': `with` needs `include`"),
        (
            {"tool": "list"},
            "tasks[0].tool: task 'one': a task with `include` has no `tool`: state it in the",
        ),
        (
            {"with": {"name": 3}},
            "tasks[0].with: task 'one': parameter 'name' of the included plan: expected string",
        ),
        (
            {"outputs": {"x": "${list.output}"}},
            "tasks[0].outputs: task 'one': ${list.output} is not an output of a task of the included",
        ),
        ({"outputs": {"x": "${"}}, "tasks[0].outputs: task 'one': '${': a ${ is not closed"),
    ],
)
def test_what_a_task_cannot_say_of_an_included_plan(fields, problem):
    """What a task states of an included plan, and that plan does not have, is refused with the place."""
    with pytest.raises(PlanError) as caught:
        plan(including(**{"depends_on": [], "with": {"name": "x"}, **fields}))
    assert str(caught.value.problems[0]).startswith(problem)


async def test_included_plan_that_was_never_read():
    """A task whose included plan was never read from its file cannot be added to a run."""
    async with open_run(plan(LISTED)) as run:
        with pytest.raises(ChangeRejected, match="is read only if the plan that includes it"):
            run.add_task(Task(id="one", include="one.yaml"))
        run.add_task(including())
        with pytest.raises(ChangeRejected, match="task 'list': the plan None was not read"):
            run.apply([IncludePlan(task_id="list")])
        with pytest.raises(ChangeRejected, match=r"task 'nothing' .*unknown|there is no task"):
            run.apply([IncludePlan(task_id="nothing")])
        run.pause()


async def test_several_last_tasks_and_missing_outputs():
    """Without `outputs`, several last tasks give a mapping by their ids; what a task did not return is no result."""
    both: JsonObject = {"tasks": [{"id": "a"}, {"id": "b", "when": "context.go"}]}
    task = Task.model_validate({"id": "one", "include": both})
    async with open_run(plan(task, context={"go": False})) as run:
        await perform(run, returning(None))
    assert run.result.outputs["one"] == {"a": {}, "b": None}

    wrong = including(outputs={"x": "${say.output.nothing}"})
    async with open_run(plan(LISTED, wrong, REPORT)) as run:
        await perform(run, returning("x"))
        failure = run.view.task("report").failure
    assert failure is not None
    assert "'nothing' does not exist" in failure.message


async def test_everything_that_names_a_task_has_its_new_id():
    """Fallbacks, confirmations, lists, inner plans and undo tasks of an included plan refer to its own tasks."""
    inner: JsonObject = {"parameters": {"n": "array"}, "tasks": [{"id": "z"}]}
    included: JsonObject = {
        "tasks": [
            {"id": "a", "undo": {"tool": "back", "arguments": {"id": "${a.output.id}"}}},
            {
                "id": "b",
                "depends_on": ["a"],
                "when": "len(results.a) > 0 and not ('x' in ['y'])",
                "arguments": {"x": "${a.output.missing}"},
                "fallbacks": [{"arguments": {"y": "${a.output.id}"}}],
                "confirm": {
                    "tool": "look",
                    "arguments": {"of": "${results.a.id}", "as": "$${x}", "in": "${context.go}"},
                    "when": "output == results.a.id",
                    "output": ["${results.a}", "${output}"],
                },
            },
            {"id": "c", "depends_on": ["a"], "for_each": "${a.output.list}"},
            {
                "id": "d",
                "depends_on": ["a"],
                "include": inner,
                "with": {"n": "${a.output.list}"},
            },
        ]
    }
    tools: list[JsonObject] = [{"name": "look", "effect": "none"}, {"name": "back"}]
    document = plan(
        Task.model_validate({"id": "one", "include": included}), tools=tools, context={"go": 1}
    )

    async def work(task: Task, context: TaskContext) -> object:
        return {"id": 7, "list": [1]} if task.id == "one/a" else dict(context.arguments)

    async with make_engine("repair").open(document) as run:
        ran = await perform(run, work)
        parts = {each.id: each.task for each in run.view.tasks()}
    assert run.result.status == "succeeded"
    assert set(ran) == {"one/a", "one/c[0]", "one/d/z", "one/b~2"}
    confirm = parts["one/b"].confirm
    assert confirm is not None
    assert confirm.arguments == {
        "of": '${results["one/a"]["id"]}',
        "as": "$${x}",
        "in": "${context.go}",
    }
    assert confirm.when == "output == results['one/a'].id"
    assert confirm.output == ['${results["one/a"]}', "${output}"]
    undo = parts["one/a"].undo
    assert undo is not None
    assert undo.arguments == {"id": "${one/a.output.id}"}


async def test_included_plan_is_carried_out_again():
    """Where what it depends on is done again, an included plan is carried out again, by tasks with ids of their own."""
    store = MemoryStore()
    engine = make_engine(store=store)
    async with engine.open(plan(LISTED, including(), REPORT), run_id=RunId("r")) as run:
        await perform(run, returning("x"))
    lines = engine.compare_rerun("r", "list").diff.splitlines()
    assert lines[0] == "~ one: its included plan is run again"
    assert lines[-1] == "  one: waiting for list~2 instead of list"
    async with engine.resume(engine.rerun("r", "list")) as run:
        ran = []
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                ran.append(task.id)
                attempt.output = "y" if task.id == "list~2" else dict(attempt.context.arguments)
    assert ran == ["list~2", "one/count~2", "one/say~2", "report~2"]
    assert run.result.outputs["one"] == {"n": "y", "times": 2}


@pytest.mark.parametrize("main", [MAIN, MAIN[: MAIN.index("  - {id: one")]])
def test_files_within_a_plan_that_is_written_in_place(tmp_path, main):
    """A plan that is written in the place of a file may include files as well, also where no other task does."""
    inline = "  - {id: two, include: {tasks: [{id: in, include: sub/one.yaml, with: {name: y}}]}}\n"
    loaded = Plan.load(write(tmp_path, main=main + inline, one=INCLUDED))
    two = loaded.tasks[-1].include
    assert not isinstance(two, str)
    assert two is not None
    inner = two.tasks[0].include
    assert not isinstance(inner, str)
    assert inner is not None
    assert inner.tasks[0].id == "a"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("- {id: list, tool: list}", "- x", "main.yaml:6:5 tasks[0]: expected a mapping"),
        ("goal:", "resources: [x]\ngoal:", "main.yaml:2:1 resources: expected a mapping"),
        ("tools:\n  - {name: list, kind: shell, command: ls}", "tools: x", "main.yaml:3:1 tools"),
        ("name: x", "zzz: x", "main.yaml:7:38 tasks[1].with: task 'one': the included plan has no"),
    ],
)
def test_mistakes_in_a_plan_that_includes_a_file(tmp_path, old, new, problem):
    """What is wrong with the plan that includes a file is told as in any other plan."""
    path = write(tmp_path, main=MAIN.replace(old, new), one=INCLUDED)
    assert any(each.startswith(problem) for each in problems(path)), problems(path)


def test_plan_whose_tasks_are_no_list(tmp_path):
    """A plan without a list of tasks includes nothing."""
    assert problems(write(tmp_path, main="goal: {objective: x}\ntasks: x\n")) == [
        "main.yaml:2:1 tasks: expected a list, got 'x'; put it in brackets"
    ]


async def test_optional_plan_and_branches_in_elements():
    """The tasks of an optional included plan are optional; a branch that is left out is no failure of its element."""
    both: JsonObject = {
        "parameters": {"n": "integer"},
        "tasks": [{"id": "a"}, {"id": "b", "when": "parameters.n > 1"}],
    }
    document: JsonObject = {
        "id": "one",
        "include": both,
        "for_each": [1, 2],
        "with": {"n": "${item}"},
        "optional": True,
        "on_item_failure": "skip",
    }
    async with open_run(plan(Task.model_validate(document))) as run:
        await perform(run, returning(None))
        assert run.view.task("one[0]/a").task.optional
    assert run.result.outputs["one"] == [{"a": {}, "b": None}, {"a": {}, "b": {}}]


async def test_functions_carry_out_an_included_plan():
    """A task that includes a plan needs no function of its own; the tools of the included tasks do."""

    @tool
    def double(n: int) -> int:
        return 2 * n

    included: JsonObject = {"tasks": [{"id": "a", "tool": "double", "arguments": {"n": 2}}]}
    task = Task.model_validate({"id": "one", "include": included})
    result = await make_engine().execute(plan(task), tools=[double])
    assert result.outputs == {"one": 4}

# Ids are written as plain text here.
# mypy: disable-error-code="arg-type, index"
"""Read-only views of a plan, pinned to a revision."""

import pytest

from replanning import Goal, TaskState, journal
from replanning.errors import ExpressionError, NoResult, StaleView, UnknownTask
from replanning.live import PlanView
from tests.support.live import (
    JournaledPlan,
    add,
    after,
    journaled,
    modify,
    remove,
    replace,
    retry,
    skip,
    task,
    tool,
)


def example() -> JournaledPlan:
    """Return a plan with three tasks, a tool, a resource, a context and facts."""
    return journaled(
        task("a", tool="pip", arguments={"x": "${context.go}"}, resources={"cpu": 1}),
        task("b", "a", arguments={"y": "${a.output}"}),
        task("c", when="context.go"),
        goal=Goal(objective="test", facts=("done",)),
        tools=[tool("pip", resources={"disk": 1}), tool("uv")],
        context={"go": True},
        resources={"cpu": 2, "disk": 1},
        facts=("raw",),
    )


def test_view_is_current():
    """A view shows goal, original document, and the current context, facts, tools and capacity."""
    run = example()
    view = PlanView(run.live)
    for body in (
        journal.ContextUpdated({"go": False}),
        journal.FactsObserved(("new",)),
        journal.ResourceUpdated("pip", available=False),
        journal.ResourceUpdated("cpu", capacity=5),
    ):
        run.fold(body)
    assert (view.goal.facts, view.original_plan) == (("done",), run.plan)
    assert (dict(view.context), set(view.facts), dict(view.capacity)) == (
        {"go": False},
        {"raw", "new"},
        {"cpu": 5, "disk": 1},
    )
    assert list(view.tools) == ["pip", "uv"]
    assert (
        view.tool("pip") == view.tools["pip"] == tool("pip", resources={"disk": 1}, available=False)
    )
    assert view.tool("ghost") is view.tool(None) is None
    assert dict(view.demand(run.plan.tasks[0])) == {"disk": 1, "cpu": 1}
    assert repr(view).startswith("<PlanView revision=0 of <LivePlan")


def test_unknown_task():
    """A view refuses the id of a task that does not exist, and names it."""
    view = PlanView(example().live)
    draft = view.with_changes([modify("b", cost=2)])
    for call in (
        view.task,
        view.state,
        view.lineage,
        view.result,
        view.arguments,
        draft.task,
        draft.lineage,
    ):
        with pytest.raises(UnknownTask, match="there is no task 'ghost'"):
            call("ghost")


def test_view_is_read_only():
    """A view does not allow changes."""
    view = PlanView(example().live)
    for mapping in (view.context, view.tools, view.capacity, view.counts):
        with pytest.raises(TypeError):
            mapping["new"] = 1


def test_tasks():
    """A task view shows state, attempts, last failure, duration and lineage; the plan view counts attempts and seconds."""
    run = example()
    attempt = run.start("a")
    run.now += 2
    run.end(attempt, output="x")
    run.fail("c")
    run.apply(replace("c", "c2", "c3"))
    run.fold(journal.QuestionAsked("q1", "r1", (), "?", (), ("c3",), "print", 1))
    view = PlanView(run.live)
    seen = {task.id: task for task in view.tasks()}
    assert (seen["a"].state, seen["a"].attempts, seen["a"].duration) == (TaskState.DONE, 1, 2.0)
    assert (seen["c"].replaced_by, seen["c"].failures) == (("c2", "c3"), 1)
    assert seen["c"].failure == journal.Failure("OSError", "broken")
    assert (seen["c3"].root, seen["c3"].iteration, seen["c3"].is_held, seen["c2"].is_held) == (
        "c",
        1,
        True,
        False,
    )
    assert (view.ended_attempts, view.succeeded_attempts, view.successful_seconds) == (2, 1, 2.0)
    assert view.task("b") == seen["b"]
    assert {task_id: view.state(task_id) for task_id in seen} == {
        task.id: task.state for task in seen.values()
    }
    assert [task.id for task in view.lineage("c3")] == ["c", "c3"]
    with pytest.raises(UnknownTask, match="'ghost'"):
        view.task("ghost")


def test_stuck_and_unfinished_tasks():
    """Stuck tasks are FAILED or BLOCKED; unfinished ones still have to run or are stuck."""
    run = example()
    run.fail("a")
    run.fold(journal.DecisionMade("r1", (), "keep", "limit", "enough", blocks=("a",)))
    run.apply(add("d"), remove("d"), skip("b"))
    view = PlanView(run.live)
    assert [(task.id, task.reason) for task in view.stuck()] == [("a", "enough")]
    assert [task.id for task in view.unfinished()] == ["a", "c"]
    assert view.counts[TaskState.BLOCKED] == 1


def test_unmet_conditions():
    """A task that its condition skipped differs from one that a change skipped."""
    run = example()
    run.fold(journal.ConditionEvaluated("c", False))
    run.apply(skip("a"))
    view = PlanView(run.live)
    assert [view.task(task_id).condition_not_met for task_id in ("a", "b", "c")] == [
        False,
        False,
        True,
    ]


def test_who_uses_what():
    """Tasks are indexed by tools, resources and context keys, and changes update the index."""
    run = after(example(), modify("c", when="context.stop and context.go"))

    def users() -> dict[str, list[str]]:
        return {
            name: [task.id for task in PlanView(run.live).resource_users(name)]
            for name in ("pip", "disk", "cpu")
        }

    def readers() -> dict[str, list[str]]:
        return {
            key: [task.id for task in PlanView(run.live).context_readers(key)]
            for key in ("go", "stop", "ghost")
        }

    assert users() == {"pip": ["a"], "disk": ["a"], "cpu": ["a"]}
    assert readers() == {"go": ["a", "c"], "stop": ["c"], "ghost": []}
    assert PlanView(run.live).dependents("a") == ("b",)
    run.apply(modify("a", tool=None, arguments={}, resources={}))
    assert (users(), readers()["go"]) == ({"pip": [], "disk": [], "cpu": []}, ["c"])
    after(run, [add("d", tool="pip"), skip("d"), retry("d")])
    assert users() == {"pip": ["d"], "disk": ["d"], "cpu": []}
    after(run, "run d")
    assert users() == {"pip": [], "disk": [], "cpu": []}


def test_results_and_arguments():
    """Results, arguments and conditions are available as far as their values exist."""
    run = example()
    view = PlanView(run.live)
    with pytest.raises(NoResult):
        view.result("a")
    with pytest.raises(ExpressionError):
        view.arguments("b")
    assert view.arguments("a") == {"x": True}
    run.run("a", output=5)
    assert (view.result("a"), view.arguments("b"), view.evaluate("results.a == 5")) == (
        5,
        {"y": 5},
        True,
    )
    with pytest.raises(ExpressionError):
        view.evaluate("results.b")


def test_unused_ids():
    """An unused id derives from another, was never used, and stays short."""
    run = example()
    run.apply(add("a~2"), remove("a~2"))
    view = PlanView(run.live)
    assert view.unused_id("a") == view.unused_id("a~7") == "a~3"
    assert view.unused_id("a", taken=("a~3", "a~4")) == "a~5"
    assert view.unused_id("x" * 500) == "x" * 180 + "~2"


@pytest.mark.parametrize(
    "read",
    [
        lambda view: view.goal,
        lambda view: view.task("a"),
        lambda view: list(view.tasks()),
        lambda view: view.counts,
        lambda view: view.check([]),
        lambda view: view.unused_id("a"),
    ],
)
def test_stale_view(read):
    """A view raises StaleView after a revision; within one, states change under it."""
    run = example()
    view = PlanView(run.live)
    run.run("a")
    assert view.task("a").state is TaskState.DONE
    run.apply(skip("c"))
    with pytest.raises(StaleView, match="this view shows revision 0, the plan is at revision 1"):
        read(view)


# Draft views


def test_draft_view():
    """A draft view shows every task and its lineage as the changes would leave them, and checks further changes."""
    changes = [
        replace("a", "x"),
        replace("x", task("y", tool="uv")),
        add("n"),
        replace("n", "a~2"),
        skip("c"),
        modify("b", timeout=2),
    ]
    draft = PlanView(example().live).with_changes(changes)
    assert {task.id: (str(task.state), task.root, task.iteration) for task in draft.tasks()} == {
        "a": ("REPLACED_BY_REPLAN", "a", 0),
        "b": ("PENDING", "b", 0),
        "c": ("SKIPPED", "c", 0),
        "x": ("REPLACED_BY_REPLAN", "a", 1),
        "y": ("PENDING", "a", 2),
        "n": ("REPLACED_BY_REPLAN", "n", 0),
        "a~2": ("PENDING", "n", 1),
    }
    assert [(task.id, state) for task, state in draft.task_states()] == [
        (task.id, task.state) for task in draft.tasks()
    ]
    assert draft.task("b").task.timeout == 2
    assert [task.id for task in draft.lineage("y")] == ["a", "x", "y"]
    assert draft.new_task_ids == ("x", "y", "n", "a~2")
    assert draft.made_true_since("a fact that does not hold", "b")
    assert (draft.goal.facts, draft.original_plan.tasks[0].id) == (("done",), "a")
    assert (list(draft.tools), draft.tool("ghost")) == (["pip", "uv"], None)
    assert [(step.id, step.tool) for step in draft.strips_problem().steps] == [
        ("b", None),
        ("y", "uv"),
        ("a~2", None),
    ]
    assert draft.capacity == PlanView(example().live).capacity
    assert repr(draft).startswith("<DraftView of 6 changes to <PlanView revision=0")
    with pytest.raises(UnknownTask):
        draft.task("ghost")
    assert draft.check([skip("y")]) == ()
    [problem] = draft.check([skip("x")])
    assert str(problem) == "changes[6]: task 'x' is REPLACED_BY_REPLAN: it cannot be skipped"
    assert (draft.unused_id("a"), draft.unused_id("a", taken=("a~3",))) == ("a~3", "a~4")

# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Stale results of a live plan, and what follows them."""

from replanning.journal import ConditionEvaluated, ContextUpdated
from replanning.live import PlanView
from tests.support.live import (
    JournaledPlan,
    inconsistencies,
    journaled,
    modify,
    replace,
    retry,
    skip,
    task,
)

USES_X = {"arguments": {"x": "${context.x}"}}


def causes(run: JournaledPlan) -> dict[str, tuple[str, ...]]:
    """Return the stale results with their causes, also as a replay of the journal finds them."""
    found = PlanView(run.live).stale_results()
    assert PlanView(run.replayed()).stale_results() == found
    assert not inconsistencies(run.live)
    return {task_id: result.causes for task_id, result in found.items()}


def test_what_follows():
    """Followers have each cause once, also over tasks that were skipped by hand or have changed the context themselves."""
    run = journaled(
        task("a", **USES_X),
        *(task(name, "a") for name in ("b", "c", "skipped", "author", "failed")),
        task("d", "b", "c"),
        task("e", "skipped", "author", on_stale="redo"),
        task("f", "e"),
        task("g", "author"),
        task("skipped too", "skipped", "author"),
        task("h", "e", "d"),
        context={"x": 1},
    )
    run.run("a", "b", "c", "d")
    run.apply(skip("skipped"), replace("failed", task("failed~2")))
    author = run.start("author")
    run.fold(ContextUpdated({"x": 2}, attempt=author))
    run.end(author)
    run.apply(skip("skipped too"))
    run.run("e", "h")
    found = {task_id: tuple(sorted(names)) for task_id, names in causes(run).items()}
    assert found == {
        "a": ("context.x",),
        "b": ("a",),
        "c": ("a",),
        "d": ("b", "c"),
        "e": ("a",),
        "h": ("d", "e"),
    }
    assert [i for i, result in PlanView(run.live).stale_results().items() if result.redo] == [
        "e",
        "h",
    ]
    behind = PlanView(run.live).followers(["a", "b", "c", "d", "e"])
    assert behind == {"b": [], "c": [], "d": [], "e": ["a"], "f": [], "failed~2": [], "g": ["a"]}


def test_done_again():
    """What began before a task was done again is stale; what begins afterwards is not, nor is the task once it is done."""
    run = journaled(
        task("a", **USES_X),
        task("b", "a"),
        task("c", "a"),
        task("d", "b"),
        context={"x": 1},
        on_stale="redo",
    )
    run.run("a", output="first")
    running = run.start("b")
    run.fold(ContextUpdated({"x": 2}))
    run.apply(replace("a", task("a~2", **USES_X)))
    assert (causes(run), run.live.results["a"]) == ({}, "first")
    run.end(running)
    assert causes(run) == {"b": ("a",)}
    run.run("a~2", output="second")
    run.run("c")
    assert (causes(run), run.live.results["a"]) == ({"b": ("a",)}, "second")
    run.fold(ContextUpdated({"x": 1}))
    assert causes(run) == {"a~2": ("context.x",), "b": ("a",), "c": ("a",)}
    run.apply(replace("a~2", task("a~3", **USES_X)), replace("b", task("b~2")))
    run.run("a~3", "b~2")
    assert causes(run) == {"c": ("a",)}


def test_redo_by_a_change():
    """A change may state that a task is done again once its result is stale."""
    run = journaled(task("a", **USES_X), context={"x": 1})
    run.apply(modify("a", on_stale="redo"))
    run.run("a")
    run.fold(ContextUpdated({"x": 2}))
    assert causes(run) == {"a": ("context.x",)}
    assert PlanView(run.live).stale_results()["a"].redo


def test_running_task_waits_for_what_is_done_again():
    """A task that fails while what it depends on is done again is tried again after that."""
    run = journaled(task("a", **USES_X), task("b", "a"), context={"x": 1}, on_stale="redo")
    run.run("a")
    run.fold(ContextUpdated({"x": 2}))
    run.apply(replace("a", task("a~2")))
    run.fail("a~2", retry_at=run.now)
    assert run.states() == {"a": "REPLACED_BY_REPLAN", "b": "PENDING", "a~2": "BACKOFF"}


def test_conditions():
    """A skipped task is stale if it would not be skipped now, and a retried attempt has read the newest value."""
    run = journaled(
        task("a", "z", when="context.x > 1 and results.z == null"),
        task("b", when="context.y == 1", **USES_X),
        "z",
        context={"x": 1, "y": 1},
    )
    run.run("z")
    run.fold(ConditionEvaluated("a", value=False))
    run.fail("b")
    run.apply(retry("b"))
    run.fold(ContextUpdated({"x": 2}))
    run.run("b")
    assert causes(run) == {"a": ("context.x",)}
    run.fold(ContextUpdated({"z": 2}, removed=("x",)))
    assert causes(run) == {"b": ("context.x",)}
    run.fold(ContextUpdated({"x": 2}))
    assert causes(run) == {"a": ("context.x",)}

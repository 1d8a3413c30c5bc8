# Nonsense is passed on purpose.
# mypy: disable-error-code="arg-type"
"""Drafts: sets of changes are checked as a whole and applied as a whole or not at all."""

from functools import partial

import pytest

from replanning import Goal, Plan, Task
from replanning.changes import AbortRun, AddTask, PlanChange
from replanning.errors import ChangeRejected
from replanning.journal import QuestionAsked
from replanning.live.plan import LivePlan
from tests.support.cost import calls
from tests.support.live import (
    JournaledPlan,
    add,
    after,
    cancel,
    chain,
    claimed,
    full_state,
    inconsistencies,
    journaled,
    modify,
    remove,
    reorder,
    replace,
    retry,
    skip,
    task,
    tool,
)


def reading(task_id: str, text: str, *depends_on: str) -> Task:
    """Return a task that refers to a result."""
    return task(task_id, *depends_on, arguments={"value": text})


def rejections(run: JournaledPlan, *changes: PlanChange) -> list[str]:
    """Return the reasons for which changes are rejected; check that nothing has changed."""
    before = full_state(run.live)
    with pytest.raises(ChangeRejected) as caught:
        run.apply(*changes)
    assert full_state(run.live) == before
    return [str(problem) for problem in caught.value.problems]


PART = replace("a", "x")

REJECTED = {
    "all problems at once": (
        after(chain("a", "b"), "run a"),
        [
            skip("ghost"),
            cancel("a"),
            add("b"),
            reorder("a", "b", "b"),
            modify("b", colour="red", timeout=-1),
            add("c", "nowhere"),
        ],
        [
            "changes[0]: there is no task 'ghost'",
            "changes[1]: task 'a' is DONE: it cannot be cancelled",
            "changes[2]: the id 'b' is already used; ids are never used again",
            "changes[3]: order names tasks twice: ['a', 'b', 'b']",
            "changes[3]: task 'a' is DONE: only waiting tasks can be reordered",
            "changes[4]: task 'b', timeout: must be more than 0, got -1",
            "changes[4]: task 'b', colour: there is no field 'colour' here",
            "changes[5]: task 'c' depends on 'nowhere', which does not exist",
        ],
    ),
    "a retry of what is done": (
        after(journaled("a"), "run a"),
        [retry("a")],
        ["changes[0]: task 'a' is DONE: it cannot be retried"],
    ),
    "a dependency named twice": (
        journaled("a", "b"),
        [add("x", "a", "a"), modify("a", depends_on=["b", "b"])],
        ["changes[0]: task 'x' depends on 'a' twice", "changes[1]: task 'a' depends on 'b' twice"],
    ),
    "started tasks wait for new ones": (
        after(journaled("a", "b"), "start a", "run b"),
        [add("x", before=("a",)), add("y", before=("b",)), add("z", before=("ghost",))],
        [
            "changes[0]: task 'a' is RUNNING: it cannot be made to wait for another task",
            "changes[1]: task 'b' is DONE: its dependencies cannot change",
            "changes[2]: there is no task 'ghost'",
        ],
    ),
    "tasks that no plan file may have": (
        journaled(task("a", tool="t"), tools=[tool("t", capability="c")], resources={"cpu": 2}),
        [
            add("x", tool="u"),
            modify("a", resources={"cpu": 3}),
            replace("a", task("y", resources={"gpu": 1})),
        ],
        [
            "changes[0]: task 'x': there is no tool 'u'; describe it under `tools`",
            "changes[1]: task 'a': it takes 3 of 'cpu', but the plan has only 2",
            "changes[2]: task 'y': the plan has no resource 'gpu'; did you mean 'cpu'?; state its capacity under `resources`",
        ],
    ),
    "a removal that strands dependents": (
        chain("a", "b"),
        [remove("a")],
        ["changes[0]: task 'a' cannot be removed: 'b' would be left waiting for it"],
    ),
    "a removal that strands many": (
        journaled("a", *(task(f"t{n:02}", "a") for n in range(12))),
        [remove("a")],
        [
            "changes[0]: task 'a' cannot be removed: "
            + ", ".join(repr(f"t{n:02}") for n in range(10))
            + ", … would be left waiting for it"
        ],
    ),
    "a removal that strands new tasks": (
        journaled("a", "b", "c"),
        [add("x", "a"), modify("c", depends_on=["b"]), remove("a"), remove("b")],
        [
            "changes[0]: task 'x' depends on 'a', which was removed",
            "changes[1]: task 'c' depends on 'b', which was removed",
            "changes[2]: task 'a' cannot be removed: 'x' would be left waiting for it",
            "changes[3]: task 'b' cannot be removed: 'c' would be left waiting for it",
        ],
    ),
    "the removal of a new sink": (
        chain("a", "b"),
        [PART, remove("x")],
        ["changes[1]: task 'x' cannot be removed: 'a' would be left waiting for it"],
    ),
    "the removal of a sink": (
        after(chain("a", "b"), PART),
        [remove("x")],
        ["changes[0]: task 'x' cannot be removed: 'a' would be left waiting for it"],
    ),
    "the removal and skip of started tasks": (
        after(journaled("a", "b"), "start a", "run b"),
        [remove("a"), remove("b"), skip("a")],
        [
            "changes[0]: task 'a' is RUNNING: it cannot be removed",
            "changes[1]: task 'b' is DONE: it cannot be removed",
            "changes[2]: task 'a' is RUNNING: it cannot be skipped",
        ],
    ),
    "anything but a retry of a removed task": (
        after(journaled("a", "b"), remove("a")),
        [
            skip("a"),
            modify("a", name="x"),
            remove("a"),
            replace("a", "c"),
            modify("b", depends_on=["a"]),
        ],
        [
            "changes[0]: task 'a' was removed: it cannot be skipped, only retried",
            "changes[1]: task 'a' was removed: it cannot be modified, only retried",
            "changes[2]: task 'a' was removed: it cannot be removed, only retried",
            "changes[3]: task 'a' was removed: it cannot be replaced, only retried",
            "changes[4]: task 'b' depends on 'a', which was removed",
        ],
    ),
    "a retry without the dependencies": (
        after(chain("a", "b"), [remove("b"), remove("a")]),
        [retry("b")],
        ["changes[0]: task 'b' depends on 'a', which was removed"],
    ),
    "a new task that depended on nothing": (
        chain("a"),
        [add("y", "ghost"), remove("y")],
        ["changes[0]: task 'y' depends on 'ghost', which does not exist"],
    ),
    "the replacement of started tasks": (
        after(journaled("a", "b", "c"), "start a", "run b", replace("c", "c2")),
        [*(replace(i, f"{i}3") for i in "abc"), replace("c2", "c2")],
        [
            "changes[0]: task 'a' is RUNNING: it cannot be replaced",
            "changes[1]: task 'b' is DONE: it cannot be replaced",
            "changes[2]: task 'c' is REPLACED_BY_REPLAN: it cannot be replaced",
            "changes[3]: the id 'c2' is already used; ids are never used again",
        ],
    ),
    "two parts of one id": (
        chain("a"),
        [replace("a", "x", "x")],
        ["changes[0]: the id 'x' is already used; ids are never used again"],
    ),
    "the retry of a started replacement": (
        after(chain("a", "b"), replace("a", "x", "y"), "start x"),
        [skip("y"), retry("a")],
        [
            "changes[1]: task 'a' was replaced, and since then 'x', 'y' started or ended: it cannot be retried"
        ],
    ),
    "a task that is replaced and retried": (
        chain("a", "b"),
        [PART, retry("a")],
        ["changes[1]: task 'a' is replaced by these changes: it cannot be retried by them as well"],
    ),
    "a task whose part is replaced and that is retried": (
        after(chain("a", "b"), PART),
        [replace("x", "y"), retry("a")],
        ["changes[1]: task 'a' is replaced by these changes: it cannot be retried by them as well"],
    ),
    "a task that is added, replaced and retried": (
        chain("a"),
        [add("x"), replace("x", "y"), retry("x")],
        ["changes[2]: task 'x' is replaced by these changes: it cannot be retried by them as well"],
    ),
    "a task that is withdrawn and retried": (
        after(chain("a", "b"), PART),
        [retry("a"), retry("x")],
        [
            "changes[1]: task 'x' was withdrawn in favour of the task that it replaced: it cannot be retried"
        ],
    ),
    "the retry of a ready task": (
        chain("a"),
        [retry("a")],
        ["changes[0]: task 'a' is READY: it cannot be retried"],
    ),
    "the retry of a skip after a dependent has started": (
        after(chain("a", "b", "c"), skip("a"), "start b"),
        [retry("a")],
        ["changes[0]: task 'a' was skipped, and since then 'b' started: it cannot be retried"],
    ),
    "the retry of a skipped replacement after a dependent has started": (
        after(chain("a", "b"), PART, skip("x"), "run b"),
        [retry("x")],
        ["changes[0]: task 'x' was skipped, and since then 'b' started: it cannot be retried"],
    ),
    "fields that the state does not allow": (
        after(journaled("a", "b", "d"), "run a", "start b"),
        [
            modify("a", timeout=5.0),
            modify("b", name="n"),
            modify("d", id="e"),
            modify("ghost", name="n"),
        ],
        [
            "changes[0]: task 'a' is DONE: it cannot be modified, only annotated (goal, metadata, name, undo_on_replace)",
            "changes[1]: task 'b' is RUNNING: it cannot be modified",
            "changes[2]: task 'd': an id cannot be changed; replace the task instead",
            "changes[3]: there is no task 'ghost'",
        ],
    ),
    "an order of unknown tasks": (
        journaled("a"),
        [reorder("ghost", "a")],
        ["changes[0]: there is no task 'ghost'"],
    ),
}


@pytest.mark.parametrize(("run", "changes", "problems"), REJECTED.values(), ids=REJECTED)
def test_rejected_changes(run, changes, problems):
    """Changes that break a rule are rejected as a whole, with every problem and its change."""
    assert rejections(run, *changes) == problems


CYCLES = [
    (chain("a", "b", "c"), [add("x", "x")], "changes[0]", "x -> x"),
    (chain("a", "b", "c"), [modify("a", depends_on=["c"])], "changes[0]", "a -> c -> b -> a"),
    (chain("a", "b", "c"), [add("x", "c", before=("a",))], "changes[0]", "a -> x -> c -> b -> a"),
    (chain("a"), [add("x", "y"), add("y", "x")], "changes[0]", "x -> y -> x"),
    (
        chain("a", "b"),
        [replace("b", task("x", "y"), task("y", "x"), "z")],
        "changes[0]",
        "x -> y -> x",
    ),
    (chain("a", "b"), [replace("b", task("x", "b"))], "changes[0]", "x -> x"),
    (chain("a", "b"), [replace("b", task("x", "a", "x"))], "changes[0]", "x -> x"),
    (
        after(chain("a", "b"), replace("b", "x")),
        [replace("x", task("y", "b"))],
        "changes[0]",
        "y -> y",
    ),
    (chain("a", "b", "c"), [replace("b", task("x", "c"))], "changes[0]", "x -> c -> x"),
    (
        chain("a", "b", "c"),
        [add("x"), modify("x", depends_on=["c"]), modify("a", depends_on=["x"])],
        "changes[1]",
        "x -> c -> b -> a -> x",
    ),
    (
        chain(*(f"t{n}" for n in range(30))),
        [modify("t0", depends_on=["t29"])],
        "changes[0]",
        "t0 -> t29 -> t28 -> t27 -> t26 -> t25 -> t24 -> t23 -> t22 -> t21 -> … -> t0",
    ),
    (
        after(
            journaled("b", task("o", "b"), task("d", "o")),
            [replace("o", "s"), modify("s", depends_on=[])],
            modify("b", depends_on=["d"]),
        ),
        [retry("o")],
        "changes[0]",
        "o -> b -> d -> o",
    ),
    (
        after(chain("a", "b"), skip("a")),
        [retry("a"), modify("a", depends_on=["b"])],
        "changes[1]",
        "a -> b -> a",
    ),
]
EARLY_SKIPS = [
    after(chain("a", "b", "c"), skip("b"), "run c"),
    after(chain("a", "b", "c"), skip("a"), skip("b"), "run c", retry("a")),
]
CYCLES += [
    (run, [modify("a", depends_on=["c"])], "changes[0]", "a -> c -> b -> a") for run in EARLY_SKIPS
]


@pytest.mark.parametrize(("run", "changes", "path", "loop"), CYCLES)
def test_cycles_are_rejected(run, changes, path, loop):
    """Changes that close a dependency cycle are rejected, and the cycle is named, the beginning of a long one."""
    assert rejections(run, *changes) == [f"{path}: tasks would wait for one another: {loop}"]


SITUATIONS = {
    "a satisfied dependency closes no cycle": (
        after(
            chain("a", "b", "c"),
            "run a",
            add("x", "a", before=("c",)),
            skip("b"),
            modify("x", depends_on=["b"]),
        ),
        {"a": "DONE", "b": "SKIPPED", "c": "PENDING", "x": "READY"},
    ),
    "a change names a task that a later one adds": (
        after(
            chain("a"), [add("x", "y", "z"), replace("a", task("z", "y")), add("y", before=("x",))]
        ),
        {"a": "REPLACED_BY_REPLAN", "x": "PENDING", "z": "PENDING", "y": "READY"},
    ),
    "a task removed and retried in one set still stands for what it replaced": (
        after(chain("a", "b"), replace("a", "a2"), [remove("a2"), retry("a2")], "run a2 b"),
        {"a": "REPLACED_BY_REPLAN", "a2": "DONE", "b": "DONE"},
    ),
    "one sink of several is skipped and retried while another is open": (
        after(chain("a", "b"), replace("a", "x", "y"), skip("x"), retry("x"), "run x y"),
        {"a": "REPLACED_BY_REPLAN", "x": "DONE", "y": "DONE", "b": "READY"},
    ),
    "a new task is changed in every way by the set that adds it": (
        after(
            chain("a"),
            [
                *(
                    add("x"),
                    skip("x"),
                    modify("x", name="skipped"),
                    retry("x"),
                    modify("x", depends_on=["a"]),
                ),
                *(reorder("x", "a"), cancel("x"), add("y"), remove("y")),
            ],
        ),
        {"a": "READY", "x": "CANCELLED", "y": "CANCELLED"},
    ),
    "references of a task that the same set adds and removes are ignored": (
        after(
            chain("a", "b"),
            [AddTask(task=reading("x", "${ghost.output}", "b")), remove("x"), remove("b")],
        ),
        {"a": "READY", "b": "CANCELLED", "x": "CANCELLED"},
    ),
}


@pytest.mark.parametrize(("run", "states"), SITUATIONS.values(), ids=SITUATIONS)
def test_states_after_changes(run, states):
    """Changes that break no rule are applied, and leave a consistent plan."""
    assert (run.states(), inconsistencies(run.live)) == (states, [])


# Adding, removing, replacing


def test_add_between_tasks():
    """A task added between others waits for its dependencies, and those in `before` wait for it."""
    run = after(chain("a", "b"), add("x", "a", before=("b", "b")))
    assert {task.id: task.depends_on for task in run.live.document().tasks} == {
        "a": (),
        "b": ("a", "x"),
        "x": ("a",),
    }
    assert claimed(after(run, "run a x").live) == ["b"]


def test_ids_that_look_like_those_of_calls():
    """A task may be called as a call of a session would be."""
    run = chain("a")
    run.apply(add("part-0"), add("part-1"))
    assert "part-0" in run.live


def test_removal():
    """Tasks are removed and retried together with their dependents, and a retry is all that a removed task accepts."""
    run = after(chain("a", "b"), [remove("a"), remove("b")])
    assert (run.live.document().tasks, run.live.complete) == ((), True)
    run.apply(retry("b"), retry("a"))
    assert run.states() == {"a": "READY", "b": "PENDING"}
    run.apply(remove("b"))
    run.apply(retry("b"), modify("b", depends_on=[]), skip("b"))
    assert run.states() == {"a": "READY", "b": "SKIPPED"}


def test_replaced_tasks_do_not_block_removal():
    """A replaced task no longer needs its dependencies, unless it is retried."""
    run = after(chain("a", "b"), [replace("b", "b2"), modify("b2", depends_on=[])], remove("a"))
    assert rejections(run, retry("b")) == ["changes[0]: task 'b' depends on 'a', which was removed"]


def test_replace_by_a_sub_plan():
    """Roots of a sub-plan inherit the dependencies, dependents wait for its sinks, and results come from these."""
    run = after(chain("a", "b", "c"), replace("b", "l", "r", task("x", "l"), task("y", "l", "r")))
    document = {task.id: task.depends_on for task in run.live.document().tasks}
    assert document == {
        "a": (),
        "l": ("a",),
        "r": ("a",),
        "x": ("l",),
        "y": ("l", "r"),
        "c": ("x", "y"),
    }
    run.run("a", "l", "r", "x", "y", output=1)
    assert run.live.results.output_of("b") == {"x": 1, "y": 1}
    assert claimed(run.live) == ["c"]
    assert [run.live.entry(i).iteration for i in ("b", "x")] == [0, 1]


# Skipping, cancelling, retrying


def test_skipped_tasks_satisfy_dependents():
    """A skipped task satisfies its dependents without output; a cancelled one does not."""
    run = after(
        journaled("a", task("b", "a"), "c", task("d", "c")),
        [skip("a", "no need"), cancel("c", "no wish")],
    )
    assert run.states() == {"a": "SKIPPED", "b": "READY", "c": "CANCELLED", "d": "PENDING"}
    assert run.live.results.output_of("a") is None
    assert [run.live.entry(i).reason for i in "ac"] == ["no need", "no wish"]


def test_retry_a_failed_task():
    """A failed task is retried at once, or after a delay that counts from the change and not from a check of it."""
    run = after(journaled("a", "b"), "fail a b")
    changes = (retry("a"), retry("b", delay=5.0))
    assert run.live.check(changes) == ()
    run.apply(*changes)
    assert run.states() == {"a": "READY", "b": "BACKOFF"}
    assert run.live.scheduler.deadlines.next_due() == run.now + 5
    assert after(run, retry("b")).states()["b"] == "READY"


def test_delay_of_a_waiting_task():
    """A delay counts from the change, even while the task waits for others."""
    run = after(chain("a", "b"), cancel("b"), retry("b", delay=5.0))
    assert run.states()["b"] == "PENDING"
    assert after(run, "run a").states()["b"] == "BACKOFF"
    run.live.advance(run.now + 5)
    assert run.states()["b"] == "READY"


@pytest.mark.parametrize(("seconds", "state"), [(1.0, "BACKOFF"), (9.0, "READY")])
def test_backoff_and_a_new_dependency(seconds, state):
    """A task that backs off and gets a dependency waits for both."""
    run = journaled("a", "x")
    run.fail("a", retry_at=run.now + 5)
    run.apply(modify("a", depends_on=["x"]))
    assert (run.states()["a"], run.live.scheduler.deadlines.next_due()) == ("PENDING", run.now + 5)
    run.now += seconds
    assert run.live.advance(run.now) == []
    assert run.states()["a"] == "PENDING"
    run.run("x")
    assert run.states()["a"] == state
    assert inconsistencies(run.live) == []
    run.live.advance(run.now + 5)
    assert (claimed(run.live), run.live.scheduler.deadlines.next_due()) == (["a"], None)
    run.apply(skip("a"))
    run.apply(retry("a"))
    assert run.states()["a"] == "READY"


def test_retry_a_skipped_task():
    """The dependents of a retried skip wait again, those of the task that it replaced included."""
    run = after(chain("a", "b", "c"), skip("a"), retry("a"))
    assert run.states() == {"a": "READY", "b": "PENDING", "c": "PENDING"}
    after(run, replace("a", "x"), skip("x"))
    assert run.states()["b"] == "READY"
    assert after(run, retry("x")).states()["b"] == "PENDING"
    run.apply(skip("x"), retry("x"))
    assert inconsistencies(run.live) == []


def test_abort():
    """An abort keeps its reason, or a default one."""
    run = after(chain("a"), AbortRun())
    assert run.live.aborted == "a change asked for it"
    assert after(run, AbortRun(reason="enough")).live.aborted == "enough"


# Modifying and reordering


def test_modify_by_state():
    """A waiting or failed task accepts any field, a finished one annotations."""
    run = after(journaled(*"acd"), "run a", "fail c")
    run.apply(
        modify("a", name="n", goal="g", metadata={"k": 1}),
        modify("c", timeout=5.0, priority=3),
        modify("d", optional=True),
    )
    assert run.live.entry("a").task.metadata == {"k": 1}
    assert (run.live.entry("c").task.timeout, run.live.entry("c").task.priority) == (5.0, 3)
    assert run.live.unsatisfied_count == 1


def test_modify_requeues_a_ready_task():
    """A new priority takes effect at once, even after a retry; an available tool makes a parked task ready."""
    run = journaled(
        "a", "b", task("c", tool="gone"), tools=[tool("gone", available=False), tool("there")]
    )
    assert claimed(run.live) == ["a", "b"]
    assert claimed(after(run, [modify("b", priority=-1), modify("c", tool="there")]).live) == [
        "b",
        "a",
        "c",
    ]
    assert claimed(after(run, "fail a", [modify("a", priority=-2), retry("a")]).live) == [
        "a",
        "b",
        "c",
    ]


def test_modify_dependencies():
    """New dependencies make a task wait and end its claim; fewer make it ready."""
    run = journaled("a", "b", task("c", "a"))
    entry = [run.live.scheduler.claim_next(), run.live.scheduler.claim_next()][1]
    assert entry is run.live.entry("b")
    run.apply(modify("b", depends_on=["c"]), modify("c", depends_on=[]))
    assert run.states() == {"a": "READY", "b": "PENDING", "c": "READY"}
    assert not entry.claim
    assert after(run, "run c").states()["b"] == "READY"
    assert inconsistencies(run.live) == []


def test_reorder_exchanges_positions():
    """Reordered tasks exchange their positions and priorities, in the document too; dependencies stay."""
    run = journaled(task("a", priority=-1), "b", task("c", priority=5), "d")
    assert claimed(run.live) == ["a", "b", "d", "c"]
    assert claimed(after(run, reorder("c", "b", "a")).live) == ["c", "b", "d", "a"]
    document = run.live.document()
    assert [(task.id, task.priority) for task in document.tasks] == [
        ("c", -1),
        ("b", 0),
        ("a", 5),
        ("d", 0),
    ]
    assert claimed(LivePlan(document)) == ["c", "b", "d", "a"]


def test_order_survives_other_edits():
    """A later change of another field keeps the order, within a set and after it."""
    run = journaled("a", task("b", priority=5))
    after(run, [reorder("b", "a"), modify("b", name="x")], modify("a", goal="y"))
    assert claimed(run.live) == ["b", "a"]
    run.apply(reorder("a", "b"), reorder("b", "a"), modify("b", priority=7))
    assert claimed(run.live) == ["a", "b"]
    assert inconsistencies(run.live) == []


def test_repeated_reordering():
    """After any number of reorderings each task is handed out once, in the last order."""
    ids = [f"t{n}" for n in range(6)]
    run = after(journaled(*ids), *(reorder(*ids[turn:], *ids[:turn]) for turn in range(6)))
    assert claimed(run.live) == [ids[5], *ids[:5]]


# References to results


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (AddTask(task=reading("x", "${ghost.output}")), "${ghost.output}, and 'ghost' is not a task of the plan"),
        (AddTask(task=reading("x", "${x.output}")), "${x.output}, its own output"),
        (AddTask(task=reading("x", "${b.output}")), "${b.output}, and does not depend on 'b': add 'b' to its depends_on"),
        (add("x", when="results.b == 1"), "results.b, and does not depend on 'b': add 'b' to its depends_on"),
        (AddTask(task=reading("x", "${gone.output}")), "${gone.output}, and 'gone' is not a task of the plan"),
        (
            replace("b", reading("x", "${b.output}")),
            "${b.output}, the output of a task that it replaces: it does not exist until 'x' is done",
        ),
    ],
)  # fmt: skip
def test_invalid_references_are_rejected(change, why):
    """A new task may refer only to results of existing tasks that it depends on."""
    run = journaled("a", task("b", "a"), task("gone"))
    run.apply(remove("gone"))
    assert rejections(run, change) == [f"changes[0]: task 'x' refers to {why}"]


def test_references_stay_valid():
    """A replacement cannot refer to any task of its lineage, and no change takes away a dependency that is referred to."""
    run = after(chain("a", "b"), replace("b", "b2"))
    assert (
        "the output of a task that it replaces"
        in rejections(run, replace("b2", reading("b3", "${b.output}")))[0]
    )
    after(run, [add("c"), replace("b2", reading("b3", "${a.output}"))])
    assert "does not depend on 'a'" in rejections(run, modify("b3", depends_on=[]))[0]
    after(
        run,
        [modify("b3", depends_on=[], arguments={}), remove("a")],
        modify("b3", arguments={"x": "${context.y}"}),
    )


def test_valid_references():
    """A task may refer to results of done tasks, dependencies and the tasks that these stand for."""
    run = chain("a", "b", "c", "d")
    run.run("a", output=1)
    run.apply(replace("b", "l", "r"))
    run.apply(
        AddTask(task=reading("x", "${a.output}")),
        AddTask(task=reading("y", "${b.output} ${a.output}", "d")),
        add("z", undo={"arguments": {"of": "${z.output}"}}),
    )
    run.run("l", "r", "c", "d")
    assert run.live.arguments(run.live.entry("x")) == {"value": 1}


def test_search_for_a_dependency():
    """A dependency is found along several paths; the search is bounded, and beyond the bound a reference is accepted."""
    diamond = journaled("a", task("l", "a"), task("r", "a"), task("z", "l", "r"))
    far, near = chain(*(f"t{n}" for n in range(1_500))), chain(*(f"t{n}" for n in range(500)))
    far.apply(AddTask(task=reading("x", "${t0.output}", "t1499")))
    for run, first, last in ((diamond, "a", "z"), (near, "t0", "t499")):
        run.apply(add("other"), AddTask(task=reading("x", f"${{{first}.output}}", last)))
        problem = rejections(run, AddTask(task=reading("y", "${other.output}", last)))[0]
        assert "does not depend on 'other'" in problem


# Held and claimed tasks, and the diff


def test_changes_of_claimed_and_running_tasks():
    """Claimed tasks can be replaced, skipped, cancelled and removed, running ones cancelled; all resources are freed."""
    run = journaled(*(task(i, resources={"cpu": 1}) for i in "abcde"), resources={"cpu": 5})
    run.start("a", deadline=5.0)
    while run.live.scheduler.claim_next() is not None:
        pass
    run.apply(cancel("a"), replace("b", "x"), skip("c"), cancel("d"), remove("e"))
    assert (run.live.scheduler.pool.used, run.live.scheduler.deadlines.next_due()) == (
        {"cpu": 0.0},
        None,
    )
    assert inconsistencies(run.live) == []


def test_held_tasks_can_be_changed():
    """A question keeps a task from being handed out, not from being changed."""
    run = journaled("a")
    run.fold(QuestionAsked("q1", "r1", (), "?", (), ("a",), "print", 0))
    run.apply(modify("a", priority=1))
    assert claimed(run.live) == []


def test_diff():
    """The diff shows each task before and after, the new dependencies of dependents, and order and abort."""
    run = chain("a", "b", *(f"c{n}" for n in range(2)))
    run.apply(*(add(f"d{n}", "b") for n in range(9)))
    changes = [
        replace("b", task("b2", tool="t"), task("b3", goal="why")),
        modify("c1", name="last"),
        remove("d8"),
        reorder("d1", "d0"),
        AbortRun(reason="enough"),
    ]
    assert run.live.diff(changes).splitlines() == [
        '- b: depends_on: ["a"] [PENDING]',
        '- d8: depends_on: ["b"] [PENDING]',
        '- c1: depends_on: ["c0"] [PENDING]',
        '+ b2: tool: t, depends_on: ["a"] [PENDING]',
        '+ b3: goal: why, depends_on: ["a"] [PENDING]',
        '+ c1: name: last, depends_on: ["c0"] [PENDING]',
        "  c0, d0, d1, d2, d3, d4, d5, d6 and 2 more: waiting for b2, b3 instead of b",
        "  handed out in this order: d1, d0",
        "  the run is aborted: enough",
    ]
    assert run.live.diff([add("x"), replace("x", "y")]) == "+ y [PENDING]"
    timed = [add("x", timeout=90), add("y", timeout=0.5)]
    assert run.live.diff(timed).splitlines() == [
        "+ x: timeout: 90 [PENDING]",
        "+ y: timeout: 0.5 [PENDING]",
    ]
    assert run.live.diff([modify("a", name="first"), modify("a", name=None)]) == ""


def test_diff_of_program_notes():
    """The diff shows the tool and arguments that a program intends, and of metadata the plain values."""
    run = journaled("a")
    said = {"by": "action_sequence", "tool": "post", "arguments": {"text": "hi"}}
    planned = task("b", metadata={"planning": said})
    noted = task("c", tool="dig", metadata={"planning": said, "owner": "eve"})
    lines = run.live.diff([AddTask(task=planned), AddTask(task=noted)]).splitlines()
    assert lines == [
        '+ b: tool: post, arguments: {"text": "hi"} [PENDING]',
        '+ c: tool: dig, metadata: {"owner": "eve"} [PENDING]',
    ]


# Cost


def wide(size: int) -> LivePlan:
    """Return a plan of many chains of ten tasks."""
    tasks = [task(f"t{n}", *(f"t{n - 1}",) if n % 10 else ()) for n in range(size)]
    live = LivePlan(Plan.model_construct(goal=Goal(objective="test"), tasks=tuple(tasks)))
    assert live.hash  # read through once, before the first change
    return live


def test_cost_is_independent_of_the_plan():
    """A check, a diff or a change costs as many calls in a plan of 50,000 tasks as in one of 500."""
    small, large = wide(500), wide(50_000)
    tried = [replace("t5", "x"), skip("ghost")]
    assert calls(partial(small.check, tried)) == calls(partial(large.check, tried))
    assert calls(partial(small.diff, tried)) == calls(partial(large.diff, tried))
    sets: list[list[PlanChange]] = [
        [replace("t5", task("x", arguments={"value": "${t4.output}"}))],
        [add("y", "t3", before=("t7",))],
        [modify("t8", name="new", priority=3)],
        [reorder("t20", "t10"), skip("t30"), cancel("t40")],
        [remove("t19"), retry("t19")],
    ]
    for changes in sets:
        costs = [calls(partial(live.apply, changes)) for live in (small, large)]
        assert costs[0] == costs[1] < 2_000

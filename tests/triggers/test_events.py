"""Triggers made by people: what their constructors take, say and refuse."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from replanning import journal
from replanning.journal import TriggerFired, dump_body, load_body
from replanning.plan import TaskId
from replanning.triggers import (
    BetterPathFound,
    ContextChanged,
    GoalUnreachable,
    HumanRequest,
    ResourceChanged,
    TaskFailed,
    TaskTimedOut,
    TriggerEvent,
)


class Strange(TriggerEvent):
    """A kind of a plugin, with a field of its own that is called like an argument of others."""

    kind: str = "strange"
    error: int = 0


class Numbered(TriggerEvent):
    """A kind of a plugin whose own field has the name of the argument for tasks."""

    kind: str = "numbered"
    task_id: int = 0


def test_failure_of_a_task_from_its_id_and_an_error():
    """A failure is stated by the id of its task and the text of the error, and gets a reason."""
    trigger = TaskFailed(task_id="build", error="disk full")
    assert (trigger.kind, trigger.tasks, trigger.message) == (
        "task-failed",
        ("build",),
        "disk full",
    )
    assert (trigger.error_type, trigger.traceback) == ("", "")
    assert trigger.reason == "task 'build' failed: disk full"


def test_failure_of_a_task_from_an_exception():
    """An exception gives its class, its text, and its traceback if it was raised."""
    trigger = TaskFailed(task_id="build", error=OSError("disk full"))
    assert (trigger.error_type, trigger.message) == ("OSError", "disk full")
    assert (trigger.reason, trigger.traceback) == ("task 'build' failed: OSError: disk full", "")
    try:
        raise ValueError("wrong")
    except ValueError as error:
        raised = TaskFailed(task_id="build", error=error, message="in other words")
    assert raised.traceback.startswith("Traceback")
    assert raised.traceback.endswith("ValueError: wrong\n")
    assert raised.message == "in other words"


@pytest.mark.parametrize(
    ("trigger", "reason"),
    [
        (TaskFailed(), "a task failed"),
        (TaskFailed(task_ids=["a", "b"]), "tasks 'a', 'b' failed"),
        (TaskTimedOut(task_id="a"), "task 'a' did not finish in time"),
        (TaskTimedOut(task_id="a", timeout=5), "task 'a' did not finish within 5 s"),
        (ContextChanged(), "the context changed"),
        (
            ContextChanged(keys=["region"], facts=["door(open)"]),
            "context.region, door(open) changed",
        ),
        (ContextChanged(goal=True), "the goal changed"),
        (ResourceChanged(name="gpu"), "'gpu' changed"),
        (ResourceChanged(name="gpu", available=False), "'gpu' is unavailable"),
        (BetterPathFound(), "there may be a cheaper way"),
        (BetterPathFound(tool="train"), "there may be a cheaper way with 'train'"),
        (HumanRequest(), "a person asked for replanning"),
        (HumanRequest(by="ann"), "ann asked for replanning"),
        (HumanRequest(by="ann", reason="it rains"), "it rains"),
        (GoalUnreachable(), "nothing can run any more"),
        (GoalUnreachable(missing_facts=["done"]), "nothing can run any more: the goal lacks done"),
    ],
)
def test_reason_says_what_the_fields_state(trigger, reason):
    """A trigger without a reason says in one sentence what its fields state."""
    assert trigger.reason == reason


def test_misspelt_fields_are_refused():
    """A field that a class of the library does not have is an error that names it and the nearest one."""
    failed: Any = TaskFailed
    changed: Any = ContextChanged
    with pytest.raises(
        TypeError, match="TaskFailed has no field 'task_idd'; did you mean 'task_id'"
    ):
        failed(task_idd="build")
    with pytest.raises(TypeError, match="ContextChanged has no field 'error'") as raised:
        changed(error="x", keyz=["a"])
    assert "ContextChanged has no field 'keyz'; did you mean 'keys'?" in str(raised.value)
    with pytest.raises(TypeError, match="state either task_id or tasks"):
        TaskFailed(task_id="a", tasks=["b"])
    with pytest.raises(ValidationError, match="tasks"):
        TaskFailed(task_ids="build")
    with pytest.raises(ValidationError, match="tasks"):
        failed(task_id=5)


def test_kinds_of_plugins_keep_their_fields():
    """A kind of a plugin takes the id of its task, and what it declares or has besides stays as it is."""
    strange: Any = Strange
    trigger = strange(task_id="build", error=3, more="x")
    assert (trigger.tasks, trigger.error, trigger.reason) == (("build",), 3, "")
    assert trigger.model_extra == {"more": "x"}
    numbered = Numbered(task_id=7, tasks=(TaskId("build"),))
    assert (numbered.task_id, numbered.tasks) == (7, ("build",))


def test_journals_of_other_versions_are_read():
    """A journal may have fields of a trigger that this version does not know, and is read all the same."""
    text = json.loads(dump_body(TriggerFired(TaskFailed(task_id="build", error="x"))))
    text["trigger"] |= {"task_idd": "y", "error": "z"}
    del text["trigger"]["by"], text["trigger"]["reason"]
    fired = load_body("trigger-fired", json.dumps(text))
    assert isinstance(fired, TriggerFired)
    assert fired.trigger.model_extra == {"task_idd": "y", "error": "z"}
    assert (fired.trigger.tasks, fired.trigger.reason, fired.trigger.by) == (("build",), "", "")
    text["trigger"] |= {"kind": "strange", "error": 2, "task_id": "y"}
    other = load_body("trigger-fired", json.dumps(text)).trigger
    assert (type(other), other.error, other.tasks) == (Strange, 2, ("build",))


def test_one_class_for_each_kind():
    """The classes of `replanning.triggers` are those of the journal."""
    assert TaskFailed is journal.TaskFailed
    assert TaskTimedOut.model_fields["kind"].default == "timeout"

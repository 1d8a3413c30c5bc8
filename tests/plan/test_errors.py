"""The errors: one tree, messages made from facts, and the same again after a journey between processes."""

import copy
import inspect
import pickle

import pytest

from replanning import errors
from replanning.errors import (
    ChangeRejected,
    IllegalTransition,
    LLMError,
    LLMUnavailable,
    NeedsHuman,
    NoResult,
    PlanError,
    Problem,
    ReplanningError,
    RevisionConflict,
    RunOwned,
    StaleView,
    StoreError,
    UnknownTask,
)

TREE = [
    kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, Exception) and not name.startswith("_")
]

MADE = [
    (NeedsHuman("answer first", ["r.q1"], "a"), {"questions": ("r.q1",), "task": "a"}),
    (PlanError([Problem("tasks[0]", "it is wrong"), Problem("", "so is all")]), {}),
    (
        RevisionConflict([Problem("", "too late")], expected=3, actual=4),
        {"expected": 3, "actual": 4},
    ),
    (
        IllegalTransition("DONE", "attempt started", "'build'"),
        {"state": "DONE", "subject": "'build'"},
    ),
    (NoResult("build", "it is READY"), {"name": "build", "hint": "it is READY"}),
    (StaleView(1, 2), {"pinned": 1, "actual": 2}),
    (RunOwned("run-1", "host:77"), {"run_id": "run-1", "owner": "host:77"}),
    (
        LLMUnavailable(
            "overloaded", provider="acme", status=529, request_id="req-1", excerpt="later"
        ),
        {"provider": "acme", "status": 529, "request_id": "req-1", "excerpt": "later"},
    ),
]


@pytest.mark.parametrize("kind", TREE)
def test_one_tree(kind):
    """Every error can be caught as a ReplanningError, and stands in the drawing of the tree."""
    assert issubclass(kind, ReplanningError)
    assert kind.__name__ in str(errors.__doc__)


@pytest.mark.parametrize(("error", "attributes"), MADE)
def test_errors_travel(error, attributes):
    """An error that is copied or sent to another process is the same there, with its message and facts."""
    error.add_note("while testing")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
        assert attributes.items() <= vars(again).items()


def test_problems_are_all_named():
    """An error made of several problems names each with its place, and counts them."""
    lines = str(
        PlanError([Problem("tasks[0].id", "is empty"), Problem("", "has no goal")])
    ).splitlines()
    assert lines == [
        "the plan is not valid (2 problems):",
        "  tasks[0].id: is empty",
        "  has no goal",
    ]
    assert str(ChangeRejected([Problem("", "no")])).startswith(
        "the changes were refused and nothing was changed (1 pr"
    )


def test_what_is_caught_together():
    """What is unknown is a LookupError too, and an owned run a matter of the store."""
    with pytest.raises(LookupError, match=r"^there is no task 'x'; did you mean 'y'\?$"):
        raise UnknownTask("x", "did you mean 'y'?")
    with pytest.raises(StoreError, match="run 'r' is owned by p; stop that process"):
        raise RunOwned("r", "p")
    assert str(StaleView(1, 2)) == "this view shows revision 1, the plan is at revision 2"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "overloaded"),
        ({"provider": "acme"}, "acme: overloaded"),
        ({"status": 529, "request_id": "req-1"}, "overloaded (HTTP 529, request req-1)"),
        ({"request_id": "req-1", "excerpt": "later"}, "overloaded (request req-1): later"),
    ],
)
def test_what_a_language_model_says(facts, message):
    """An error of a language model says who was asked and what came back, as far as it is known."""
    assert str(LLMError("overloaded", **facts)) == message

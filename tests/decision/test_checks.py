# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Proposals: what is computed about an alternative, and the checks that read it."""

from functools import partial

import pytest

from replanning import Alternative, Budget, PlanEvaluator, Task, journal
from replanning.changes import AbortRun, PlanChange
from replanning.decision.ledger import Ledger
from replanning.decision.proposal import (
    Proposal,
    analyse,
    check_confidence,
    check_content,
    check_feasible,
    check_fits_plan,
    check_futile_calls,
    check_limits,
    check_repeats,
    check_saving,
    relative_saving,
)
from replanning.live.draft import Draft
from replanning.secrets import Redactor
from replanning.settings import AlternativeSettings, LimitSettings
from tests.support.live import (
    JournaledPlan,
    add,
    cancel,
    journaled,
    modify,
    replace,
    retry,
    skip,
    task,
    tool,
)

SECRET = "ghp_" + "0123456789abcdefghij" + "ABCDEFGHIJ012345"
PASSWORD = {"password": "hunter2hunter2"}
MASKED = {"password": "[redacted]"}
MASKS_REASON = (
    "[redacted] and [cut: …] stand for text that is not shown: do without them in the arguments"
    " of 'c'"
)


def build_plan() -> JournaledPlan:
    """Return a plan whose first task has failed, and the tools that could do it."""
    tools = [
        tool("pip", cost=2, capability="install"),
        tool("uv", cost=1, capability="install"),
        tool("gone", available=False),
    ]
    run = journaled(task("a", tool="pip", arguments=PASSWORD), task("b", "a"), tools=tools)
    run.fail("a")
    return run


def proposed(run: JournaledPlan, *changes: PlanChange, asked_at: float = 0.0) -> Proposal:
    """Return the proposal of these changes, as the plan is now."""
    alternative = Alternative(changes=changes, reason="a way", expected_cost=1)
    return analyse(alternative, run.live, Redactor(), asked_at=asked_at)


def ledger_after(*applied: PlanChange) -> Ledger:
    """Return a ledger in which the changes were applied to the lineage of `a`."""
    ledger = Ledger(Budget(), lambda: 0)
    trigger = journal.TaskFailed(id="t1", tasks=("a",), root="a")
    ledger.fold(journal.Record(1, 1.0, journal.TriggerFired(trigger)))
    revised = journal.PlanRevised(1, 0, tuple(applied), "", "policy", ("t1",), replan="r1")
    ledger.fold(journal.Record(2, 2.0, revised))
    return ledger


# Analysis


def test_what_a_proposal_answers():
    """A proposal has the tasks that changes concern, their arguments, and what would run."""
    run = build_plan()
    new = task("c", tool="uv", arguments={"x": 1})
    found = proposed(run, replace("a", new), retry("b"), skip("zz"))
    assert found.targets == ("a", "b", "zz")
    assert [entry.id for entry in found.entries] == ["a", "b"]
    assert found.arguments == (("c", {"x": 1}),)
    assert found.draft.problems
    assert found.tasks_to_run == ()

    fitting = proposed(run, replace("a", new))
    assert not fitting.draft.problems
    assert fitting.tasks_to_run == (new,)
    assert fitting.version == run.live.version
    assert fitting.fingerprint == proposed(run, replace("a", new)).fingerprint


def test_what_has_begun_is_left_out():
    """Changes of a task that has started since the request are left out, with a note."""
    run = build_plan()
    run.apply(retry("a"))
    run.start("a")
    found = proposed(run, skip("a"), modify("b", timeout=5), asked_at=run.now - 1)
    assert found.targets == ("b",)
    assert found.alternative.reason == "a way (without what has begun meanwhile)"
    assert found.alternative.expected_cost is None


def test_names_that_look_like_secrets():
    """A secret as a name rejects an alternative, and its changes are not kept for the record."""
    found = proposed(build_plan(), replace("a", SECRET))
    assert found.changes == ()
    assert check_content(found).startswith("[0].tasks[0].id: what looks like a secret")


def test_masks_that_are_restored_nowhere():
    """A mask stays in a change of an unknown task, or with a tool that is no name."""
    unknown = modify("zz", arguments=MASKED)
    assert proposed(build_plan(), unknown).arguments == (("zz", MASKED),)
    known = replace("a", task("c", tool="pip", arguments={**MASKED, "x": 1}))
    both = proposed(build_plan(), known, unknown)
    assert both.arguments == (("c", {**PASSWORD, "x": 1}), ("zz", MASKED))
    unnamed = modify("a", tool=5, arguments=MASKED)
    assert proposed(build_plan(), unnamed).arguments == (("a", MASKED),)


@pytest.mark.parametrize("change", [modify("a", tool="pip"), modify("b", tool="uv")])
def test_tools_that_get_no_secret(change):
    """A change of the tool is accepted if the tool stays, or if no argument is a secret."""
    assert check_content(proposed(build_plan(), change)) == ""


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("uv", ""),
        ("curl", "the secret parameter 'token' does not go to 'curl' in 'c'"),
    ],
)
def test_secret_parameters(tool, reason):
    """A secret parameter goes to the tools alone that have it, or can stand in for them; what else a task reads is free."""
    run = journaled(
        task("a", tool="pip", arguments={"key": "${parameters.token}"}),
        parameters={"token": {"secret": True}, "region": "string"},
        context={"name": "x"},
        tools=[{"name": name, "capability": "install"} for name in ("pip", "uv")]
        + [{"name": "curl"}],
    )
    values = {"key": "${parameters.token}", "in": "${parameters.region}", "of": "${context.name}"}
    new = task("c", tool=tool, arguments=values)
    assert check_fits_plan(proposed(run, replace("a", new))) == reason


# Checks


@pytest.mark.parametrize(
    ("check", "changes", "reason"),
    [
        (
            check_content,
            [replace("a", task("c", arguments={"x": "[redacted]"}))],
            MASKS_REASON,
        ),
        (check_content, [], "it changes nothing"),
        (
            check_fits_plan,
            [skip("zz")],
            "it does not fit the plan: changes[0]: there is no task 'zz'",
        ),
        (
            check_fits_plan,
            [replace("a", task("c", tool="gone"))],
            "the tool 'gone' is unavailable",
        ),
        (
            check_fits_plan,
            [modify("b", tool="gone")],
            "the tool 'gone' is unavailable",
        ),
        (
            check_futile_calls,
            [replace("a", task("c", tool="pip", arguments=PASSWORD))],
            "'a' has failed with the same tool and arguments",
        ),
        (
            partial(check_saving, min_gain=0.1, compare=PlanEvaluator().compare),
            [add("c", tool="pip")],
            "it saves -67% of the remaining cost, which is too little",
        ),
    ],
    ids=["masks", "empty", "fits", "available", "another tool", "futile", "saving"],
)
def test_rejected(check, changes, reason):
    """A check rejects a proposal with its reason, and accepts one without the fault."""
    run = build_plan()
    assert check(proposed(run, *changes)) == reason
    assert check(proposed(run, replace("a", task("c", tool="uv")))) == ""


@pytest.mark.parametrize(
    "changes",
    [
        [replace("a", task("c", undo={"tool": "uv", "arguments": {"x": "[redacted]"}}))],
        [modify("c", fallbacks=[{"tool": "uv", "arguments": {"x": "[redacted]"}}])],
        [modify("c", undo={"tool": "uv", "arguments": {"x": "[redacted]"}})],
    ],
    ids=["undo", "modified fallback", "modified undo"],
)
def test_masks_beside_the_arguments(changes):
    """A mask is found in the arguments of fallbacks and undo tasks as well."""
    assert check_content(proposed(build_plan(), *changes)) == MASKS_REASON


def test_masks_of_the_plan_itself():
    """A replacement may repeat a mask that the original task states as its own text."""
    stated = {"title": "write [redacted] there"}
    run = journaled(task("a", arguments=stated))
    run.fail("a")
    assert check_content(proposed(run, replace("a", task("c", arguments=stated)))) == ""


def test_repeats():
    """Changes that were applied before are rejected, but for a retry, which may succeed now."""
    run = build_plan()
    change = replace("a", task("c", tool="uv"))
    ledger = ledger_after(change)
    tried = ledger.lineages.tried(["a"])
    again = proposed(run, replace("a", task("other", tool="uv")))
    reason = "the same was tried before and did not help"
    assert check_repeats(again, tried, (), ledger) == reason
    assert check_repeats(again, (), (), ledger) == ""
    assert check_repeats(proposed(run, retry("a")), tried, (), ledger) == ""


def test_declined_changes():
    """Changes that a person declined are rejected for a stuck plan until the task runs again."""
    run = build_plan()
    change = replace("a", task("c", tool="uv"))
    declined = Alternative(changes=(change,), reason="a way")
    asked = journal.QuestionAsked(
        "q1", "r1", (), "?", (journal.Candidate(declined),), ("a",), "print", 0
    )
    ledger = Ledger(Budget(), lambda: 0)
    ledger.fold(journal.Record(1, run.now, asked))
    ledger.fold(journal.Record(2, run.now, journal.QuestionAnswered("q1", "reject", "eve")))

    stuck = journal.GoalUnreachable(id="t1", tasks=("a",))
    failed = journal.TaskFailed(id="t2", tasks=("a",), root="a")
    reason = "a person was asked about the same already"
    assert check_repeats(proposed(run, change), (), [stuck], ledger) == reason
    assert check_repeats(proposed(run, change), (), [stuck, failed], ledger) == ""

    run.apply(retry("a"))
    run.now += 1
    run.fail("a")
    assert check_repeats(proposed(run, change), (), [stuck], ledger) == ""


def test_limits():
    """No more replans are accepted than the limits of the run and of the lineage allow."""
    run = build_plan()
    change = replace("a", task("c", tool="uv"))
    ledger = ledger_after(change)
    found = proposed(run, change)
    per_run = LimitSettings(replans_per_run=1)
    assert check_limits(found, per_run, ledger) == "the limit of 1 replan per run is reached"
    per_lineage = LimitSettings(replans_per_lineage=1)
    reason = "the limit of 1 replan per lineage is reached for 'a'"
    assert check_limits(found, per_lineage, ledger) == reason
    assert check_limits(found, LimitSettings(), ledger) == ""


def test_feasible():
    """With stated facts, changes must leave the goal within reach, unless they end the run."""
    tools = [tool("pip", adds=["built"]), tool("send", requires=["built"], adds=["sent"])]
    run = journaled(
        Task(id="a", tool="pip"),
        task("b", "a", tool="send"),
        tools=tools,
        facts=[],
        goal={"objective": "release", "facts": ["sent"]},
    )
    run.fail("a")
    trigger = journal.TaskFailed(id="t1", tasks=("a",), root="a")
    reason = check_feasible(proposed(run, skip("a")), [trigger])
    assert reason.startswith("the plan could not be executed: ")
    assert check_feasible(proposed(run, retry("a")), [trigger]) == ""
    assert check_feasible(proposed(run, AbortRun()), [trigger]) == ""


def test_faults_elsewhere():
    """A fault that the plan has in any case is held against no changes for another task."""
    tools = [
        tool("build", adds=["built"]),
        tool("send", requires=["built", "signed"], adds=["sent"]),
    ]
    run = journaled(
        task("a", tool="build"),
        task("b", tool="send"),
        tools=tools,
        facts=[],
        goal={"objective": "release", "facts": ["sent"]},
    )
    run.fail("a")
    found = proposed(run, retry("a"))
    failed = journal.TaskFailed(id="t1", tasks=("a",), root="a")
    assert check_feasible(found, [failed]) == ""
    # A plan that is stuck as a whole must reach its goal, whoever is to blame.
    stuck = journal.GoalUnreachable(id="t2", missing_facts=("sent",))
    reason = check_feasible(found, [stuck])
    assert reason == "the plan could not be executed: task 'b' needs signed, which would not hold"


def test_repeated_call_whose_facts_have_changed():
    """A call that failed may be repeated once a fact that it needs was made true again."""
    run = journaled(task("a", tool="enter"), tools=[tool("enter", requires=["open"])], facts=[])
    run.fail("a")
    again = replace("a", task("c", tool="enter"))
    reason = "'a' has failed with the same tool and arguments"
    run.fold(journal.FactsObserved(holds=("open",)))
    assert check_futile_calls(proposed(run, again)) == ""
    run.apply(retry("a"))
    run.fail("a")
    assert check_futile_calls(proposed(run, again)) == reason


def test_repeated_call_of_an_undescribed_tool():
    """A failed call of a tool that the plan does not describe is not repeated either."""
    run = journaled(task("a", tool="own"))
    run.fail("a")
    reason = "'a' has failed with the same tool and arguments"
    assert check_futile_calls(proposed(run, replace("a", task("c", tool="own")))) == reason


def test_failed_task_that_is_only_modified():
    """Modifying a task that has failed needs a retry beside it, unless the plan can do without it then."""
    run = journaled(task("a"), task("b"))
    run.fail("a")
    other = modify("a", arguments={"x": 1})
    reason = "'a' has failed, and modifying it does not run it again: retry it as well"
    assert check_futile_calls(proposed(run, other)) == reason
    assert check_futile_calls(proposed(run, other, retry("a"))) == ""
    assert check_futile_calls(proposed(run, modify("a", optional=True))) == ""
    assert check_futile_calls(proposed(run, modify("b", arguments={"x": 1}))) == ""


def test_refused_call_that_needs_its_tool_no_more():
    """A task whose tool was refused may be retried without that tool."""
    tools = [tool("start", kind="shell", command="timeout 5 {x}", parameters={"x": "string"})]
    run = journaled(
        task("a", tool="start", arguments={"x": "${context.x}"}), tools=tools, context={"x": "rm"}
    )
    refused = journal.Failure("ArgumentError", "it uses 'rm'", kind="refused")
    run.fold(journal.AttemptFailed(run.start("a"), "a", refused))
    reason = "the use of 'start' for 'a' would be refused again: it uses 'rm'"
    assert check_futile_calls(proposed(run, retry("a"))) == reason
    run.apply(modify("a", tool=None))
    assert check_futile_calls(proposed(run, retry("a"))) == ""


def test_confidence():
    """Both the confidence of the source and the score must reach their thresholds."""
    run = build_plan()
    unsure = Alternative(changes=[retry("a")], reason="a way", confidence=0.2)
    settings = AlternativeSettings()
    good = journal.Score(0.9, 1, 1, 1, 1)
    poor = journal.Score(0.4, 1, 1, 1, 1)
    found = analyse(unsure, run.live, Redactor(), asked_at=0.0)
    assert check_confidence(found, good, settings) == "its own confidence 0.2 is below 0.3"
    sure = proposed(run, retry("a"))
    assert check_confidence(sure, poor, settings) == "confidence 0.40 is below 0.5"
    assert check_confidence(sure, good, settings) == ""


# Saving


@pytest.mark.parametrize(
    ("changes", "saving"),
    [
        ([], 0.0),
        ([skip("a")], 0.4),
        ([replace("a", task("c", tool="uv"))], 0.2),
        ([replace("a", "c", "g")], 0.0),
        ([add("c", tool="pip")], -0.4),
        ([cancel("e")], 0.0),
    ],
)
def test_relative_saving(changes, saving):
    """Changes save a share of the cost of unfinished tasks: that of their tools, or else 1."""
    tools = [tool("pip", cost=2), tool("uv", cost=1), tool("echo")]
    run = journaled(task("a", tool="pip"), task("b"), "d", task("e", tool="echo"), "f", tools=tools)
    run.run("d")
    run.start("e")
    compare = PlanEvaluator().compare
    assert relative_saving(Draft(run.live, changes), run.live, compare) == pytest.approx(saving)
    run.apply(*map(cancel, "abef"))
    # Where nothing is left, the plan costs 1 more.
    assert relative_saving(Draft(run.live, [add("c")]), run.live, compare) == -1

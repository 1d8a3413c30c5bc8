# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Policy: the rule that decides on ranked alternatives, its reason, and stale triggers."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest

from replanning import Alternative, Budget, Settings, Task, journal
from replanning.changes import AbortRun, PlanChange, RemoveTask, ReplaceTask
from replanning.decision.grouping import group_triggers
from replanning.decision.ledger import Ledger
from replanning.decision.policy import Decision, ReplanPolicy, relevant_triggers, stale_reason
from replanning.live import PlanView
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

FAILED = journal.TaskFailed(id="t1", tasks=("a",), root="a")


def one(**fields: object) -> JournaledPlan:
    """Return a plan with one task, and the tools that could do it."""
    tools = [
        tool("pip", capability="build"),
        tool("uv", capability="build"),
        tool("rm", dangerous=True),
        tool("echo"),
    ]
    tools.append(tool("start", kind="shell", command="timeout 5 {x}"))
    return journaled(
        Task.model_validate({"id": "a", "tool": "pip", **fields}), task("b"), tools=tools
    )


def candidate(
    *changes: PlanChange, total: float | None = 0.9, rejected: str = "", **fields: object
) -> journal.Candidate:
    """Return a candidate with these changes."""
    alternative = Alternative.model_validate({"changes": changes, "reason": "a way", **fields})
    return journal.Candidate(
        alternative, None if total is None else journal.Score(total, 1, 1, 1, 1), rejected
    )


def decided(
    run: JournaledPlan,
    *candidates: journal.Candidate,
    triggers: tuple[journal.Trigger, ...] = (FAILED,),
    gate: bool = False,
    **settings: object,
) -> Decision:
    """The decision about candidates."""
    policy = ReplanPolicy(Settings.model_validate(settings))
    return policy.decide(triggers, candidates, PlanView(run.live), gate=gate)


RETRY = retry("a")
PAY = tool("pay", effect="irreversible", dangerous=False)
instead = partial(ReplaceTask, task_id="a")


# Candidates


def test_the_best_is_executed() -> None:
    """The first candidate that was not rejected is executed if its confidence is high enough."""
    found = decided(
        one(),
        candidate(RETRY, rejected="it does not fit"),
        candidate(RETRY, total=0.7),
        candidate(RETRY),
    )
    assert found == Decision("execute", "confident", "confidence 0.70 is at least 0.7", chosen=1)


def test_low_confidence_asks() -> None:
    """Below the threshold a person is asked; a candidate without a score has confidence 0."""
    assert decided(one(), candidate(RETRY, total=0.69)).rule == "low-confidence"
    assert decided(one(), candidate(RETRY, total=None)) == Decision(
        "ask", "low-confidence", "confidence 0.00 is below 0.7", chosen=0
    )
    trusting = {"alternatives": {"human_approval_threshold": 0.0}}
    assert decided(one(), candidate(RETRY, total=None), **trusting).kind == "execute"


def test_division_of_a_rejected_result() -> None:
    """A task is divided with less confidence than others need only if a judge rejected its result."""
    divided = candidate(replace("a", "n", "m"), total=0.6)
    run = one()
    run.fail("a")
    assert decided(run, divided).rule == "low-confidence"
    run = one()
    rejected = journal.Failure("NotAccepted", "too short", kind="rejected")
    run.fold(journal.AttemptFailed(run.start("a"), "a", rejected))
    assert decided(run, divided).kind == "execute"


def test_abort() -> None:
    """An abort keeps its reason, or a default one."""
    assert decided(one(), candidate(AbortRun())) == Decision(
        "abort", "confident", "a way", chosen=0
    )


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([], "no provider proposed an alternative"),
        ([candidate(rejected="-", unreachable="proven-unreachable")], "proven-unreachable: a way"),
        (
            [
                candidate(rejected="nothing", unreachable="not-found-within-bound"),
                candidate(RETRY, rejected="tried"),
            ],
            "every alternative was rejected: a way: nothing; a way: tried",
        ),
    ],
)
def test_no_alternative(candidates: list[journal.Candidate], reason: str) -> None:
    """Without a usable candidate the plan is kept, with the reason."""
    assert decided(one(), *candidates) == Decision("keep", "no-alternative", reason)


# Approval


def test_approval_of_everything() -> None:
    """Required approval comes before all other reasons to ask."""
    found = decided(one(), candidate(RETRY, total=0.1), alternatives={"require_approval": True})
    assert (found.kind, found.rule) == ("ask", "approval-required")


@pytest.mark.parametrize(
    ("settings", "triggers"),
    [
        ({"alternatives": {"require_approval": True}}, (FAILED,)),
        ({}, (FAILED, journal.GoalUnreachable(tasks=("a",)))),
    ],
)
def test_a_question_for_another_reason_names_the_harm(
    settings: Mapping[str, object], triggers: tuple[journal.Trigger, ...]
) -> None:
    """Whoever is asked because of a setting or an event reads that the call may have taken effect, or is dangerous."""
    found = decided(cut_off(False), candidate(RETRY), triggers=triggers, **settings)
    assert found.rule in ("approval-required", "always-ask")
    assert "; it is unknown whether 'a' took effect: look first." in found.reason


def test_an_unreachable_goal_asks_by_default() -> None:
    """A person decides when nothing can run any more, unless the settings take that trigger off the list."""
    stuck = journal.GoalUnreachable(tasks=("a",))
    assert decided(one(), candidate(RETRY), triggers=(FAILED, stuck)).rule == "always-ask"
    assert (
        decided(one(), candidate(RETRY), triggers=(stuck,), approval={"always_for": []}).kind
        == "execute"
    )


@pytest.mark.parametrize(
    "kind",
    [
        journal.TaskFailed,
        journal.TaskTimedOut,
        journal.HumanRequest,
        journal.ContextChanged,
        journal.ResourceChanged,
    ],
)
def test_kinds_of_trigger_that_always_ask(kind: Callable[..., journal.Trigger]) -> None:
    """A person decides about every trigger of a kind for which the settings say so, and about no other."""
    trigger = kind(tasks=("a",))
    for chosen, rule in ((trigger.kind, "always-ask"), ("better-path-found", "confident")):
        found = decided(
            one(), candidate(RETRY), triggers=(trigger,), approval={"always_for": [chosen]}
        )
        assert found.rule == rule


@pytest.mark.parametrize("candidates", [(), (candidate(RETRY, rejected="tried"),)])
def test_question_without_an_alternative(candidates: tuple[journal.Candidate, ...]) -> None:
    """If a person always decides and there is no alternative, a present gate is asked."""
    stuck = journal.GoalUnreachable(tasks=("a",))
    asked = [decided(one(), *candidates, triggers=(stuck,), gate=gate) for gate in (True, False)]
    assert [(found.kind, found.rule, found.chosen) for found in asked] == [
        ("ask", "no-alternative", None),
        ("keep", "no-alternative", None),
    ]
    assert decided(one(), *candidates, gate=True).kind == "keep"


def test_provider_requests_approval() -> None:
    """An alternative may request approval with its own reason."""
    assert decided(one(), candidate(RETRY, ask="it costs a lot")) == Decision(
        "ask", "provider-asks", "it costs a lot", chosen=0
    )


def cut_off(timeout: bool, **fields: object) -> JournaledPlan:
    """Return a plan whose task was cut off and may have taken effect."""
    run = one(**fields)
    attempt = run.start("a")
    run.fold(
        journal.AttemptTimedOut(attempt, "a", 2.0)
        if timeout
        else journal.AttemptInterrupted(attempt, "a", "killed")
    )
    return run


@pytest.mark.parametrize("timeout", [True, False])
@pytest.mark.parametrize(
    ("changes", "approved"),
    [
        ([RETRY], "another run of 'a'"),
        ([instead(tasks=(task("n", tool="uv"),))], "'uv' in place of 'a'"),
        ([add("n", tool="pip")], "another run of 'a'"),
        ([skip("a"), add("n", tool="uv")], "'uv' in place of 'a'"),
        (
            [modify("a", arguments={"out": "y"}), RETRY],
            "'pip' with other arguments in place of 'a'",
        ),
        ([instead(tasks=(task("n"),))], "'n' in place of 'a'"),
    ],
)
def test_cut_off_tasks_need_approval(
    timeout: bool, changes: list[PlanChange], approved: str
) -> None:
    """A task in doubt is not executed again in any form without approval; a reading one is replaced at once."""
    found = decided(cut_off(timeout), candidate(*changes))
    assert (found.kind, found.rule) == ("ask", "in-doubt")
    assert found.reason.startswith(
        "it is unknown whether 'a' took effect: look first. If so, skip the task."
        f" If not, approve {approved}. Not to be asked next time, state"
    )
    assert decided(cut_off(timeout, effect="none"), candidate(*changes)).kind == "execute"


@pytest.mark.parametrize("timeout", [True, False])
@pytest.mark.parametrize(
    "other",
    [
        [instead(tasks=(task("n", tool="uv"),))],
        [instead(tasks=(task("n", tool="pip"),)), modify("n", tool="uv")],
        [instead(tasks=(task("n", tool="pip"),)), replace("n", task("m", tool="uv"))],
        [modify("a", tool="uv"), RETRY],
        [RETRY, modify("a", tool="uv")],
        [modify("a", arguments={"out": "y"}), RETRY],
        [modify("a", tool="uv"), retry("a", delay=5), modify("a", timeout=5)],
    ],
)
def test_a_stand_in_has_an_effect_of_its_own(timeout: bool, other: list[PlanChange]) -> None:
    """An idempotent task in doubt is repeated without asking, and never becomes another call."""
    run = cut_off(timeout, idempotent=True)
    assert decided(run, candidate(RETRY)).kind == "execute"
    assert decided(run, candidate(modify("a", timeout=5, resources={}), RETRY)).kind == "execute"
    assert decided(run, candidate(*other)).rule == "in-doubt"
    reading = cut_off(timeout, effect="none")
    assert decided(reading, candidate(*other)).kind == "execute"


def test_a_lineage_in_doubt_is_not_retried_without_asking() -> None:
    """A retry of a replacement asks about the replaced task in doubt, whose effect would be a second one."""
    run = cut_off(True, idempotent=True)
    run.apply(replace("a", task("n", tool="pip", idempotent=True)))
    run.fail("n")
    failed = journal.TaskFailed(id="t2", tasks=("n",), root="a")
    assert decided(run, candidate(retry("n")), triggers=(failed,)).rule == "in-doubt"


def test_only_what_replaces_a_task_in_doubt_is_compared_with_it() -> None:
    """An idempotent call is repeated by a replacement without asking, whatever else is added."""
    run = cut_off(True, idempotent=True)
    same = instead(tasks=(task("n", tool="pip"),))
    assert decided(run, candidate(same, add("m", tool="echo"))).kind == "execute"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool": "uv"},
        {"arguments": {"out": "y"}},
        {"goal": "do something else"},
        {"effect": "none"},
        {"idempotent": True},
        {"retry": {"max_attempts": 9}},
        {"fallbacks": [{"tool": "uv"}]},
    ],
)
@pytest.mark.parametrize("changes", [[], [RETRY], [instead(tasks=(task("n", tool="uv"),))]])
def test_no_proposal_allows_itself_to_repeat_a_task(
    fields: dict[str, object], changes: list[PlanChange]
) -> None:
    """A person is asked before a task in doubt becomes another call or states that it may be repeated."""
    run = cut_off(True)
    assert decided(run, candidate(modify("a", **fields), *changes)).rule == "in-doubt"
    assert decided(run, candidate(modify("a", timeout=5))).kind == "execute"


@pytest.mark.parametrize(
    "changes",
    [
        [modify("b", tool="uv"), skip("a")],
        [modify("b", tool="uv")],
        [replace("b", task("n", tool="uv"))],
        [replace("b", "n"), modify("n", tool="uv"), cancel("a")],
        [add("n", tool="echo"), modify("n", tool="uv"), skip("a")],
        [add("n", tool="echo"), replace("n", task("m", tool="uv")), skip("a")],
        [modify("b", fallbacks=[{"tool": "uv"}]), skip("a")],
    ],
)
def test_other_tasks_take_up_work_in_doubt(changes: list[PlanChange]) -> None:
    """A person is asked before a task that did other work takes up that of a task in doubt."""
    run = cut_off(True, idempotent=True)
    assert decided(run, candidate(*changes)).rule == "in-doubt"


@pytest.mark.parametrize(("kind", "rule"), [("agent", "in-doubt"), ("shell", "confident")])
def test_another_goal_for_an_idempotent_call(kind: str, rule: str) -> None:
    """A replacement with another goal is another call of a tool that is given it, about which a person is asked."""
    run = journaled(
        task("a", tool="t", goal="book the trip", idempotent=True),
        tools=[tool("t", kind=kind, command="true" if kind == "shell" else None)],
    )
    run.fold(journal.AttemptTimedOut(run.start("a"), "a", 2.0))
    repeated = replace("a", task("n", tool="t", goal="book the trip", idempotent=True))
    assert decided(run, candidate(repeated)).kind == "execute"
    other = replace("a", task("n", tool="t", goal="book the train", idempotent=True))
    assert decided(run, candidate(other)).rule == rule


@pytest.mark.parametrize(("goal", "rule"), [("pay", "in-doubt"), ("look", "confident")])
def test_another_task_gets_the_goal_in_doubt(goal: str, rule: str) -> None:
    """A person is asked before another task of the same worker gets the goal of a task in doubt."""
    run = journaled(
        task("a", tool="worker", goal="pay"),
        task("b", tool="worker", goal="read"),
        tools=[tool("worker")],
    )
    run.fold(journal.AttemptTimedOut(run.start("a"), "a", 2.0))
    assert decided(run, candidate(modify("b", goal=goal))).rule == rule


def test_other_tasks_keep_their_work() -> None:
    """A task that does the same kind of work as one in doubt is changed without asking."""
    run = journaled(
        task("a", tool="pip"),
        task("b", tool="pip"),
        tools=[tool("pip", capability="build"), tool("uv", capability="build")],
    )
    run.fold(journal.AttemptTimedOut(run.start("a"), "a", 2.0))
    for changes in ([modify("b", tool="uv")], [replace("b", task("n", tool="uv"))]):
        assert decided(run, candidate(*changes)).kind == "execute"


@pytest.mark.parametrize(
    "given",
    [
        lambda **call: modify("b", **call),
        lambda **call: modify("b", fallbacks=[{"tool": "pip", **call}]),
        lambda **call: replace("b", task("n", tool="uv", **call)),
    ],
    ids=["modified", "fallback", "replaced"],
)
def test_no_task_of_its_kind_gets_the_call_in_doubt(given: Callable[..., PlanChange]) -> None:
    """A person is asked before a task of the same kind gets the arguments of one in doubt; others are harmless."""
    run = journaled(
        task("a", tool="pip", arguments={"out": "x"}),
        task("b", tool="pip", arguments={"out": "y"}),
        tools=[tool("pip", capability="build"), tool("uv", capability="build")],
    )
    run.fold(journal.AttemptTimedOut(run.start("a"), "a", 2.0))
    assert decided(run, candidate(given(arguments={"out": "x"}), skip("a"))).rule == "in-doubt"
    assert decided(run, candidate(given(arguments={"out": "z"}), skip("a"))).kind == "execute"


@pytest.mark.parametrize("left_out", [skip("a"), cancel("a"), RemoveTask(task_id="a")])
def test_work_stays_in_doubt_after_it_was_left_out(left_out: PlanChange) -> None:
    """A person is asked before a later proposal adds what a task in doubt did; a stated fallback is taken."""
    run = journaled(
        task("a", tool="pip", optional=True),
        task("b", fallbacks=[{"tool": "uv"}]),
        tools=[tool("pip", capability="build"), tool("uv", capability="build")],
    )
    run.fold(journal.AttemptTimedOut(run.start("a"), "a", 2.0))
    run.apply(left_out)
    run.fail("b")
    triggers = (journal.TaskFailed(id="t2", tasks=("b",), root="b"),)
    later = candidate(add("n", tool="uv"), skip("b"))
    assert decided(run, later, triggers=triggers).rule == "in-doubt"
    fallback = candidate(replace("b", task("n", tool="uv")))
    assert decided(run, fallback, triggers=triggers).kind == "execute"


def test_finished_tasks_are_annotated() -> None:
    """A finished task gets another name without asking: it is not done again."""
    run = one()
    run.run("a")
    assert decided(run, candidate(modify("a", name="built"))).kind == "execute"
    assert decided(run, candidate(modify("a", name="built"), RETRY)).rule == "in-doubt"


def test_finished_tasks_have_taken_effect() -> None:
    """A person is asked before finished tasks are done again, and reads which have taken effect."""
    run = one()
    run.run("a", "b")
    again = [replace(task_id, f"{task_id}~2") for task_id in "ab"]
    for changes, reason in (
        (again[:1], "'a' has taken effect"),
        (again, "'a', 'b' have taken effect"),
    ):
        found = decided(run, candidate(*changes))
        assert found.rule == "in-doubt"
        assert found.reason.startswith(f"{reason}; running it again may do harm")


FALLBACK = {"tool": "uv", "arguments": {"out": "x"}}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ([instead(tasks=(task("n", tool="uv", arguments={"out": "x"}),))], "execute"),
        ([instead(tasks=(task("n", tool="uv", arguments={"out": "y"}),))], "ask"),
        ([instead(tasks=(task("n", tool="uv", arguments={"out": "x"}), task("m")))], "ask"),
        ([RETRY], "ask"),
        ([skip("a")], "execute"),
        ([skip("a"), add("n", tool="echo")], "execute"),
        ([cancel("b"), add("n"), replace("n", "m")], "execute"),
    ],
)  # fmt: skip
def test_declared_fallbacks_need_no_approval(changes: list[PlanChange], kind: str) -> None:
    """A declared fallback, and work of another kind, need no approval after a task was cut off."""
    assert decided(cut_off(True, fallbacks=[FALLBACK]), candidate(*changes)).kind == kind


def test_dangerous_tools() -> None:
    """A dangerous tool needs approval."""
    asked = Decision("ask", "dangerous-tool", "the tool 'rm' needs a person's agreement", chosen=0)
    assert decided(one(), candidate(instead(tasks=(task("n", tool="rm"),)))) == asked
    # A task that waits is executed as it is modified.
    assert decided(one(), candidate(modify("b", tool="rm"))) == asked


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"tool": "pay"}, "the tool 'pay' needs a person's agreement: its effect is irreversible"),
        (
            {"tool": "echo", "effect": "irreversible"},
            "the tool 'echo' needs a person's agreement: its effect is irreversible",
        ),
        (
            {"tool": None, "effect": "irreversible"},
            "the task 'n' needs a person's agreement: its effect is irreversible",
        ),
        ({"tool": "pay", "effect": "reversible"}, ""),
        ({"tool": "echo"}, ""),
        ({"tool": None}, ""),
        ({"tool": "echo", "fallbacks": [{"tool": "pay"}]}, ""),
    ],
)
def test_effects_that_are_asked_about(body: dict[str, object], reason: str) -> None:
    """With `effects.ask_before`, a call with such an effect is dangerous, whatever `dangerous` says; a task's word beats its tool's."""
    run = journaled(task("a", tool="echo"), tools=[tool("echo"), PAY])
    run.fail("a")
    new = candidate(instead(tasks=(task("n", **body),)))
    assert decided(run, new).kind == "execute"
    found = decided(run, new, effects={"ask_before": ["irreversible", "partly"]})
    if reason:
        assert found == Decision("ask", "dangerous-tool", reason, chosen=0)
    else:
        assert found.kind == "execute"


DELETING: dict[str, object] = {"tool": "start", "arguments": {"x": ["rm", "f"]}}


def started(arguments: dict[str, object]) -> list[list[PlanChange]]:
    """Return the ways to execute the first task with another tool and these arguments."""
    called = {"tool": "start", "arguments": arguments}
    return [
        [instead(tasks=(task("n", **called),))],
        [modify("a", **called), RETRY],
        [RETRY, modify("a", tool="start"), modify("a", arguments=arguments)],
        [replace("a", "n"), modify("n", **called)],
        [skip("a"), add("n"), modify("n", **called)],
    ]


@pytest.mark.parametrize(("stated", "kind"), [({}, "ask"), ({"x": ["rm", "f"]}, "execute")])
def test_arguments_that_make_a_command_dangerous(stated: dict[str, object], kind: str) -> None:
    """A use whose command is dangerous needs approval, unless the plan states these arguments for the task itself."""
    for changes in started({"x": ["rm", "f"]}):
        run = one(arguments=stated)
        run.fail("a")
        assert decided(run, candidate(*changes)).kind == kind
    for changes in started({"x": "ls"}):
        run = one()
        run.fail("a")
        assert decided(run, candidate(*changes)).kind == "execute"


@pytest.mark.parametrize(
    "changes",
    [
        [modify("a", fallbacks=[DELETING])],
        [modify("a", fallbacks=[DELETING]), instead(tasks=(task("n", **DELETING),))],
        [modify("b", fallbacks=[{"tool": "echo", "fallbacks": [DELETING]}])],
        [add("n", tool="echo", fallbacks=[DELETING])],
        [instead(tasks=(task("n", tool="echo", fallbacks=[DELETING]),))],
    ],
)
def test_a_new_fallback_is_judged(changes: list[PlanChange]) -> None:
    """A person agrees to a dangerous fallback before it comes into the plan: nobody is asked again."""
    run = one()
    run.fail("a")
    assert decided(run, candidate(*changes)).rule == "dangerous-tool"


def test_a_fallback_to_a_dangerous_tool_is_asked_about_when_it_is_taken() -> None:
    """A new fallback to a tool that is declared dangerous needs no approval yet, and the use of it does."""
    run = one()
    run.fail("a")
    risky = {"tool": "rm", "arguments": {}}
    added = candidate(instead(tasks=(task("n", tool="echo", fallbacks=[risky]),)))
    assert decided(run, added).kind == "execute"
    assert decided(run, candidate(instead(tasks=(task("n", tool="rm"),)))).rule == "dangerous-tool"


@pytest.mark.parametrize("nested", [False, True])
def test_a_fallback_of_the_plan_is_agreed_to(nested: bool) -> None:
    """A task is retried and its fallbacks are taken without asking if the plan states their arguments."""
    fallback: dict[str, object] = DELETING
    if nested:
        fallback = {"tool": "echo", "fallbacks": [DELETING]}
    run = one(fallbacks=[fallback])
    run.fail("a")
    for changes in ([RETRY], [instead(tasks=(task("n", **fallback),))]):
        assert decided(run, candidate(*changes)).kind == "execute"


# Limits


def after_replans(run: JournaledPlan, count: int) -> Ledger:
    """Return the ledger of a run whose task was replaced so many times."""
    ledger = Ledger(Budget(), lambda: 0)
    for number in range(count):
        old, new = f"a{number or ''}", f"a{number + 1}"
        run.apply(replace(old, task(new)))
        changes = run.records[-1].body.changes
        body = journal.PlanRevised(
            number + 1, number, changes, "", "policy", replan=f"r{number + 1}"
        )
        ledger.fold(journal.Record(number + 1, 0.0, body))
    return ledger


@pytest.mark.parametrize("count", [2, 3])
def test_replans_per_lineage(count: int) -> None:
    """After three replans of a lineage no provider is asked, and its failed tasks are blocked."""
    run = one()
    ledger = after_replans(run, count)
    run.fail(f"a{count}", "b")
    trigger = journal.TaskFailed(tasks=(f"a{count}", "b"))
    found = ReplanPolicy(Settings()).check_limits((trigger,), PlanView(run.live), ledger)
    reason = "the limit of 3 replans per lineage is reached for 'a'"
    assert found == (
        Decision("keep", "limit-lineage", reason, blocks=("a3",)) if count == 3 else None
    )


@pytest.mark.parametrize(
    "trigger", [journal.GoalUnreachable(tasks=("a3",)), journal.HumanRequest(tasks=("a3",))]
)
def test_lineage_limits_do_not_apply_to_the_whole_plan(trigger: journal.Trigger) -> None:
    """The limit per lineage does not apply to a stuck plan or a person's request."""
    run = one()
    ledger = after_replans(run, 3)
    assert ReplanPolicy(Settings()).check_limits((trigger,), PlanView(run.live), ledger) is None


def test_replans_per_run() -> None:
    """The limit per run applies to every trigger."""
    run = one()
    policy = ReplanPolicy(Settings.model_validate({"limits": {"replans_per_run": 1}}))
    stuck = (journal.GoalUnreachable(),)
    assert policy.check_limits(stuck, PlanView(run.live), after_replans(run, 0)) is None
    ledger = after_replans(run, 1)
    assert policy.check_limits(stuck, PlanView(run.live), ledger) == Decision(
        "keep", "limit-run", "the limit of 1 replan per run is reached"
    )


# Staleness of triggers

ALL = (
    journal.TaskFailed(tasks=("a",)),
    journal.TaskTimedOut(tasks=("b",)),
    journal.HumanRequest(reason="faster"),
)


@pytest.mark.parametrize(
    ("tasks", "about"), [(("a",), (0, 2)), (("b", "a"), (0, 1, 2)), (("c",), (2,)), ((), (2,))]
)
def test_relevant_triggers(tasks: tuple[str, ...], about: tuple[int, ...]) -> None:
    """Changes concern the failures of the tasks that they name, and all other triggers."""
    proposed = [(skip(task_id),) for task_id in tasks]
    assert list(relevant_triggers(ALL, proposed)) == [ALL[number] for number in about]


def test_changes_of_other_tasks_concern_all_triggers() -> None:
    """Changes that name no failed task concern all triggers."""
    assert relevant_triggers(ALL[:2], [(skip("c"),)]) == ALL[:2]


def pressing() -> JournaledPlan:
    """Return a plan of one task that needs a tool and a resource."""
    return journaled(
        task("a", tool="press"),
        "b",
        tools=[tool("press", resources={"room": 2})],
        resources={"room": 2},
    )


def test_a_better_path_is_stale_when_none_of_its_tasks_waits() -> None:
    """A better path may be taken as long as one of its tasks has not begun, whatever was changed elsewhere."""
    run = journaled("a", "b", "c")
    trigger = journal.BetterPathFound(tasks=("a", "b"))
    run.apply(skip("c"))
    run.start("a")
    assert stale_reason(trigger, run.live) == ""
    run.fail("b")
    assert stale_reason(trigger, run.live) == "none of its tasks waits any more"


def test_trigger_of_unknown_tasks_is_stale() -> None:
    """A failure of tasks that the plan does not have, of which a plugin may tell, is stale."""
    trigger = journal.TaskFailed(id="t1", tasks=("ghost",), root="ghost")
    assert stale_reason(trigger, one().live) == "the task is no longer failed"


def test_triggers_of_another_revision_are_stale() -> None:
    """A goal-unreachable trigger holds only for its own revision."""
    run, trigger = pressing(), journal.GoalUnreachable(tasks=("a",))
    run.fail("a")
    run.apply(skip("b"))
    assert stale_reason(trigger, run.live) == "the plan has changed since"
    assert stale_reason(trigger.model_copy(update={"revision": run.live.revision}), run.live) == ""


def test_results_that_are_not_stale_any_more() -> None:
    """A trigger about stale results holds until the context has the value that they have read."""
    run = journaled(task("a", arguments={"x": "${context.x}"}), context={"x": 1})
    run.run("a")
    run.fold(journal.ContextUpdated({"x": 2}))
    trigger = journal.ContextChanged(tasks=("a",), stale=("a",))
    assert stale_reason(trigger, run.live) == ""
    run.fold(journal.ContextUpdated({"x": 1}))
    assert stale_reason(trigger, run.live) == "the results are not stale any more"


def test_changed_context_concerns_no_finished_task() -> None:
    """A trigger about a changed context is stale once its tasks are done."""
    run = journaled("a", "b")
    trigger = journal.ContextChanged(tasks=("a",), keys=("x",))
    assert stale_reason(trigger, run.live) == ""
    run.run("a")
    assert stale_reason(trigger, run.live) == "no remaining task depends on it"


def test_unreachable_goal_is_stale_when_a_task_can_run() -> None:
    """A goal-unreachable trigger is stale once a task can run."""
    run = pressing()
    assert (
        stale_reason(journal.GoalUnreachable(revision=run.live.revision), run.live)
        == "something can run"
    )


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        (
            journal.ResourceUpdated("press", available=False),
            journal.ResourceUpdated("press", available=True),
        ),
        (journal.ResourceUpdated("room", capacity=1), journal.ResourceUpdated("room", capacity=2)),
    ],
)
def test_restored_resource(lost: journal.ResourceUpdated, found: journal.ResourceUpdated) -> None:
    """A resource trigger is stale once the resource is available again."""
    run = pressing()
    trigger = journal.ResourceChanged(tasks=("a",), name=lost.name)
    run.fold(lost)
    assert stale_reason(trigger, run.live) == ""
    run.fold(found)
    assert stale_reason(trigger, run.live) == "the resource is available"


def test_a_trigger_that_waits_for_an_answer_joins_no_others() -> None:
    """Two triggers stay apart though a third one, which waits for an answer, concerns dependents of both."""
    run = journaled("a", "b", "c", task("held", "a"), task("d", "a", "b"), task("e", "a", "c"))
    waits, first, second = (journal.TaskFailed(id=name, tasks=(name,)) for name in "abc")
    question = journal.QuestionAsked("q1", "r1", (), "?", (), ("held",), "", 0)
    grouped = group_triggers((waits, first, second), run.live, [question])
    assert grouped == ([[first], [second]], [(waits, "q1")])

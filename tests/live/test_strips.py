# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""STRIPS model: actions, feasibility, components, regression, planning problems and fact patterns."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import ExpressionError
from replanning.journal import FactsObserved, ResourceUpdated
from replanning.live import GroundAction, PlanView, StripsProblem, StripsStep
from replanning.live.strips import connected_components, regress_at
from replanning.plan.json_values import as_text
from replanning.plan.references import FactPattern, fill_placeholders, normalise_fact, placeholders
from tests.support.live import JournaledPlan, journaled, modify, replace, task, tool


def action(needs: str = "", adds: str = "", removes: str = "") -> GroundAction:
    """Return an action on facts of one letter."""
    return GroundAction(
        frozenset(needs),
        frozenset(adds),
        frozenset(removes),
        facts=tuple(dict.fromkeys(needs + adds + removes)),
    )


def step(name: str, what: GroundAction, *after: str, usable: bool = True) -> StripsStep:
    """Return a step after others."""
    return StripsStep(name, None, {}, what, after, running=False, startable=usable)


def ids(steps: Iterable[StripsStep]) -> list[str]:
    """Return the tasks of steps."""
    return [found.id for found in steps]


# Actions


def test_apply():
    """An action removes facts, then adds facts, so that a fact in both holds."""
    assert action("a", "bc", "ac").apply(frozenset("ad")) == frozenset("bcd")


@pytest.mark.parametrize(
    ("one", "other", "disturbs"),
    [
        (action("a", "x", "a"), action("a", "y"), True),
        (action(removes="a"), action(adds="a"), True),
        (action(adds="a", removes="a"), action(adds="a", removes="a"), False),
        (action("a", "b"), action("a", "c"), False),
    ],
)
def test_interference(one, other, disturbs):
    """Actions interfere if one removes what the other requires or adds."""
    assert one.interferes_with(other) is other.interferes_with(one) is disturbs


# Feasibility


def test_order_of_simulated_steps():
    """Steps are executed after their dependencies as soon as their preconditions hold; ties go by position."""
    steps = (
        step("eat", action("c"), "lay", "cook"),
        step("lay", action(adds="t")),
        step("cook", action("f", "c")),
        step("buy", action("m", "f", "m")),
        step("pay", action(adds="m")),
    )
    standing = StripsProblem((), steps, ("c",), closed_world=True).feasibility()
    assert ids(standing.executable) == ["lay", "pay", "buy", "cook", "eat"]
    assert (standing.valid, standing.final_facts) == (True, frozenset("tfc"))


def test_stuck_steps_and_missing_facts():
    """Stuck steps are named with their missing facts and can be excluded."""
    steps = (
        step("a", action("x")),
        step("b", action("y", "g")),
        step("c", action(adds="z"), "a"),
        step("d", action()),
    )
    standing = StripsProblem(("k",), steps, ("g", "h"), closed_world=True).feasibility()
    assert (ids(standing.executable), ids(standing.stuck), standing.missing_goal_facts) == (
        ["d"],
        ["a", "b"],
        ("h",),
    )
    assert standing.unmet_facts() == ("x", "y", "h")
    assert standing.explain() == "task 'a' needs x, which would not hold (and 1 more)"
    assert standing.excluding(["a"], ["h"]).explain() == "task 'b' needs y, which would not hold"
    assert standing.excluding(["a", "b"], []).explain() == "the goal would lack h"
    passed = standing.excluding(["a", "b"], ["h"])
    assert (passed.valid, passed.explain()) == (True, "")


def test_strict():
    """Steps that cannot be started count as stuck only in a strict simulation."""
    steps = (step("a", action("x", "g"), usable=False), step("b", action(adds="x")))
    world = StripsProblem((), steps, ("g",), closed_world=True)
    assert world.feasibility().valid
    strict = world.feasibility(strict=True)
    assert (ids(strict.stuck), strict.missing_goal_facts, strict.unmet_facts()) == (["a"], (), ())


def test_tasks_related_to_stuck_steps():
    """A loss concerns the tasks that share facts with the stuck ones, and no others."""
    steps = (
        step("make", action("r", "m")),
        step("ship", action("m")),
        step("other", action(adds="o")),
        step("paint", action("o", "p")),
    )
    world = StripsProblem(("r",), steps, (), closed_world=True)
    assert world.feasibility().tasks_related_to(["p"]) == ("other", "paint")
    assert world.feasibility().tasks_related_to_stuck() == ()
    lost = StripsProblem((), steps, (), closed_world=True)
    assert lost.feasibility().tasks_related_to_stuck() == ("make", "ship")


def test_components():
    """Steps are linked by dependencies and by facts that one of them changes."""
    steps = [
        step("a", action("k", "x")),
        step("b", action("x")),
        step("c", action("k")),
        step("d", action("k"), "c"),
        step("e", action()),
    ]
    assert [ids(group) for group in connected_components(steps)] == [["a", "b"], ["c", "d"], ["e"]]
    assert [ids(group) for group in connected_components(steps, "k")] == [
        ["a", "b", "c", "d"],
        ["e"],
    ]


letters = st.text("abcd", max_size=2)


@given(st.lists(st.builds(action, letters, letters, letters), max_size=4), letters, letters)
def test_regression_is_right(uses, goal, start):
    """A sequence of actions reaches the goal exactly if the regressed facts hold at its start."""
    needed = regress_at(goal, uses)[0]
    facts, possible = frozenset(start), True
    for one in uses:
        possible = possible and one.requires <= facts
        facts = one.apply(facts)
    assert (possible and facts >= set(goal)) is (needed is not None and needed <= set(start))


# Planning problem of a plan


def doors() -> JournaledPlan:
    """Return a plan to unlock a door and enter."""
    return journaled(
        task("enter", "unlock", tool="enter"),
        task("unlock", tool="unlock", arguments={"key": "${context.key}"}),
        task("wait"),
        tools=[
            tool(
                "unlock",
                parameters={"key": "string"},
                requires=["has({key})"],
                adds=["open"],
                removes=["shut"],
            ),
            tool("enter", requires=["open"], produces=["report"]),
        ],
        facts=["has(k)", "shut"],
        context={"key": "k"},
        goal={"objective": "be inside", "facts": ["artifact(report)"]},
    )


def test_planning_problem():
    """The planning problem has the remaining steps, running ones first, with the arguments known so far."""
    run = doors()
    run.start("wait")
    world = PlanView(run.live).strips_problem()
    assert ids(world.steps) == ["wait", "enter", "unlock"]
    assert [(s.running, s.startable) for s in world.steps] == [
        (True, True),
        (False, True),
        (False, True),
    ]
    assert world.steps[2].action == GroundAction(
        frozenset({"has(k)"}),
        frozenset({"open"}),
        frozenset({"shut"}),
        facts=("has(k)", "open", "shut"),
    )
    assert (world.steps[1].depends_on, world.steps[1].action.adds) == (
        ("unlock",),
        frozenset({"artifact(report)"}),
    )
    assert world.feasibility().valid
    run.fold(FactsObserved(ceased=("has(k)",)))
    assert ids(PlanView(run.live).strips_problem().feasibility().stuck) == ["unlock"]


def test_running_tasks_are_assumed_to_succeed():
    """A running task is assumed to succeed, whatever has ceased since; a task without its tool is not startable."""
    run = doors()
    run.start("unlock")
    for body in (FactsObserved(ceased=("has(k)",)), ResourceUpdated("enter", available=False)):
        run.fold(body)
    world = PlanView(run.live).strips_problem()
    assert (world.steps[0].action.requires, world.steps[2].id) == (frozenset(), "wait")
    assert world.feasibility().valid
    assert ids(world.feasibility(strict=True).stuck) == ["enter"]


def test_planning_problem_after_changes():
    """The planning problem can be built as changes would leave it."""
    view = PlanView(doors().live)
    changes = [replace("unlock", "climb"), modify("enter", tool=None)]
    world = view.strips_problem(changes)
    assert ids(world.steps) == ["enter", "wait", "climb"]
    assert world.steps[0].depends_on == ("climb",)
    assert world.feasibility().explain() == "the goal would lack artifact(report)"


# Patterns


def test_placeholders():
    """Placeholders are plain names in braces; doubled braces stand for one, shell variables stay."""
    text = "on({x},{y_1},{x}) ${HOME} {0} {a b} {{z}}"
    assert placeholders(text) == ("x", "y_1")
    assert fill_placeholders(text, {"x": "a", "y_1": "b"}) == "on(a,b,a) ${HOME} {0} {a b} {z}"
    assert (placeholders("plain"), fill_placeholders("plain", {})) == ((), "plain")
    with pytest.raises(KeyError):
        fill_placeholders("{x}", {})


@pytest.mark.parametrize(
    ("pattern", "fact", "found"),
    [
        ("on({x},{y})", "on(a,b)", {"x": "a", "y": "b"}),
        ("on({x},{y})", "on(a,b,c)", {"x": "a", "y": "b,c"}),
        ("on({x},{x})", "on(a,b)", None),
        ("on({x},{x})", "on(a,b,a,b)", {"x": "a,b"}),
        ("is {{x}} {y}", "is {x} b", {"y": "b"}),
        ("at({p})", "at(home)", {"p": "home"}),
        ("at({x},{p})", "at(a,b,home)", {"x": "a,b", "p": "home"}),
        ("at({r},{x})", "at(room 1,a)", {"r": "room 1", "x": "a"}),
        ("at({p})", "at(work)", None),
        ("at({q})", "at(x)", None),
        ("at({x})", "at()", None),
        ("at({x})", "is(y)", None),
        ("a.c", "abc", None),
        ("a.c", "a.c", {}),
    ],
)
def test_fact_patterns(pattern, fact, found):
    """A pattern matches the facts that it can become, given the objects of its placeholders."""
    objects = {"p": ["home"], "q": [], "r": ["room", "room 1"]}
    assert FactPattern(pattern, objects).match(fact) == found


def test_ambiguous_fact_pattern():
    """A pattern that might fit a fact in very many ways is given up."""
    with pytest.raises(ExpressionError, match="might fit a fact in too many ways"):
        FactPattern("{x}{y}{x}{y}").match("a" * 100 + "b")


def test_text_of_values():
    """A string in a fact is used as it is, any other value as JSON; a fact has one spelling."""
    assert [as_text(value) for value in ("a b", 1, None, ["ä", True])] == [
        "a b",
        "1",
        "null",
        '["ä",true]',
    ]
    assert normalise_fact("  on( a ,  b ) ") == "on( a,b )"

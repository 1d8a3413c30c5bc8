# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""A plan on facts: uses of tools, how far steps can be carried out, what belongs together, and patterns of facts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Goal, Task
from replanning.changes import ModifyTask, ReplaceTask
from replanning.journal import ContextUpdated, FactsObserved, GoalChanged, ResourceUpdated
from replanning.live import (
    GroundAction,
    PlanView,
    StripsProblem,
    StripsStep,
    artifact_fact,
    connected_components,
    regress,
    regress_at,
)
from replanning.plan import as_text, compile_fact_pattern, placeholders
from replanning.plan.references import fill_placeholders, normalise_fact
from tests.support.live import Kept, kept, tool


def use(needs: str = "", adds: str = "", removes: str = "") -> GroundAction:
    """A use of a tool on facts of one letter."""
    return GroundAction(
        frozenset(needs), frozenset(adds), frozenset(removes), facts=tuple(dict.fromkeys(needs + adds + removes))
    )


def step(name: str, what: GroundAction, *after: str, usable: bool = True) -> StripsStep:
    """A step after others."""
    return StripsStep(name, None, {}, what, after, running=False, startable=usable)


def ids(steps: Iterable[StripsStep]) -> list[str]:
    """The tasks of steps."""
    return [found.id for found in steps]


# Uses


def test_what_follows() -> None:
    """A use removes facts, then adds facts: what it does both with holds."""
    assert use("a", "bc", "ac").apply(frozenset("ad")) == frozenset("bcd")


@pytest.mark.parametrize(
    ("one", "other", "disturbs"),
    [
        (use("a", "x", "a"), use("a", "y"), True),
        (use(removes="a"), use(adds="a"), True),
        (use(adds="a", removes="a"), use(adds="a", removes="a"), False),
        (use("a", "b"), use("a", "c"), False),
    ],
)
def test_what_must_not_overlap(one: GroundAction, other: GroundAction, disturbs: bool) -> None:
    """Two uses must not overlap where one takes what the other needs or adds."""
    assert one.interferes_with(other) is other.interferes_with(one) is disturbs


# Carrying out


def test_each_step_when_its_turn_comes() -> None:
    """Steps are taken after those before them and as soon as what they need holds; a tie goes by place."""
    steps = (
        step("eat", use("c"), "lay", "cook"),
        step("lay", use(adds="t")),
        step("cook", use("f", "c")),
        step("buy", use("m", "f", "m")),
        step("pay", use(adds="m")),
    )
    standing = StripsProblem((), steps, ("c",), closed_world=True).feasibility()
    assert ids(standing.executable) == ["lay", "pay", "buy", "cook", "eat"]
    assert (standing.valid, standing.final_facts) == (True, frozenset("tfc"))


def test_what_stands_in_the_way() -> None:
    """What cannot be carried out is named with the facts for want of which, and can be passed over."""
    steps = (step("a", use("x")), step("b", use("y", "g")), step("c", use(adds="z"), "a"), step("d", use()))
    standing = StripsProblem(("k",), steps, ("g", "h"), closed_world=True).feasibility()
    assert (ids(standing.executable), ids(standing.stuck), standing.missing_goal_facts) == (["d"], ["a", "b"], ("h",))
    assert standing.unmet_facts() == ("x", "y", "h")
    assert standing.explain() == "task 'a' needs x, which would not hold (and 1 more)"
    assert standing.excluding(["a"], ["h"]).explain() == "task 'b' needs y, which would not hold"
    assert standing.excluding(["a", "b"], []).explain() == "the goal would lack h"
    passed = standing.excluding(["a", "b"], ["h"])
    assert (passed.valid, passed.explain()) == (True, "")


def test_strict() -> None:
    """Steps that cannot be started now are taken to be seen to, or not where that is asked; they may lack facts too."""
    steps = (step("a", use("x", "g"), usable=False), step("b", use(adds="x")))
    world = StripsProblem((), steps, ("g",), closed_world=True)
    assert world.feasibility().valid
    strict = world.feasibility(strict=True)
    assert (ids(strict.stuck), strict.missing_goal_facts, strict.unmet_facts()) == (["a"], (), ())


def test_what_is_concerned() -> None:
    """A loss concerns the tasks that bear on the same facts as what is stuck, and no others."""
    steps = (
        step("make", use("r", "m")),
        step("ship", use("m")),
        step("other", use(adds="o")),
        step("paint", use("o", "p")),
    )
    world = StripsProblem(("r",), steps, (), closed_world=True)
    assert world.tasks_related_to(["p"], world.feasibility()) == ("other", "paint")
    assert world.tasks_related_to_stuck(world.feasibility()) == ()
    lost = StripsProblem((), steps, (), closed_world=True)
    assert lost.tasks_related_to_stuck(lost.feasibility()) == ("make", "ship")


def test_related() -> None:
    """Steps belong together by dependencies and by facts that one of them changes, not by what all only need."""
    steps = [
        step("a", use("k", "x")),
        step("b", use("x")),
        step("c", use("k")),
        step("d", use("k"), "c"),
        step("e", use()),
    ]
    assert [ids(group) for group in connected_components(steps)] == [["a", "b"], ["c", "d"], ["e"]]
    assert [ids(group) for group in connected_components(steps, "k")] == [["a", "b", "c", "d"], ["e"]]


letters = st.text("abcd", max_size=2)


@given(st.lists(st.builds(use, letters, letters, letters), max_size=4), letters, letters)
def test_regression_is_right(uses: list[GroundAction], goal: str, start: str) -> None:
    """From a state a sequence of uses can be taken and reaches the goal exactly if what regression says holds there."""
    needed = list(regress(goal, uses))[-1]
    facts, possible = frozenset(start), True
    for one in uses:
        possible = possible and one.requires <= facts
        facts = one.apply(facts)
    assert (possible and facts >= set(goal)) is (needed is not None and facts_hold(needed, start))


def facts_hold(needed: frozenset[str], start: str) -> bool:
    """Whether all that is needed is there at the start."""
    return needed <= set(start)


@given(st.lists(st.builds(use, letters, letters, letters), max_size=4), letters, st.sets(st.integers(0, 4)))
def test_regression_to_some_places(uses: list[GroundAction], goal: str, places: set[int]) -> None:
    """What must hold before some suffixes alone is the same as where all of them are looked at."""
    every = dict(zip(range(len(uses), -1, -1), regress(goal, uses), strict=True))
    assert regress_at(goal, uses, places) == {place: every[place] for place in every.keys() & places}


# The world of a plan


def doors() -> Kept:
    """A door to be unlocked and entered."""
    return kept(
        Task(id="enter", tool="enter", depends_on=("unlock",)),
        Task(id="unlock", tool="unlock", arguments={"key": "${context.key}"}),
        Task(id="wait"),
        tools=[
            tool("unlock", parameters={"key": "string"}, requires=["has({key})"], adds=["open"], removes=["shut"]),
            tool("enter", requires=["open"], produces=["report"]),
        ],
        facts=["has(k)", "shut"],
        context={"key": "k"},
        goal={"objective": "be inside", "facts": ["artifact(report)"]},
    )


def test_world_of_a_plan() -> None:
    """A view shows the steps that are left on facts, those that run first, with what is known of their arguments."""
    run = doors()
    run.start("wait")
    world = PlanView(run.live).strips_problem()
    assert ids(world.steps) == ["wait", "enter", "unlock"]
    assert [(s.running, s.startable) for s in world.steps] == [(True, True), (False, True), (False, True)]
    assert world.steps[2].action == GroundAction(
        frozenset({"has(k)"}), frozenset({"open"}), frozenset({"shut"}), facts=("has(k)", "open", "shut")
    )
    assert (world.steps[1].depends_on, world.steps[1].action.adds) == (
        ("unlock",),
        frozenset({artifact_fact("report")}),
    )
    assert world.feasibility().valid
    run.fold(FactsObserved(ceased=("has(k)",)))
    assert ids(PlanView(run.live).strips_problem().feasibility().stuck) == ["unlock"]


def test_what_runs_has_what_it_needs() -> None:
    """A running task is taken to succeed, whatever has ceased since it began; a tool that is gone is not usable."""
    run = doors()
    run.start("unlock")
    for body in (FactsObserved(ceased=("has(k)",)), ResourceUpdated("enter", available=False)):
        run.fold(body)
    world = PlanView(run.live).strips_problem()
    assert (world.steps[0].action.requires, world.steps[2].id) == (frozenset(), "wait")
    assert world.feasibility().valid
    assert ids(world.feasibility(strict=True).stuck) == ["enter"]


def test_world_is_never_stale() -> None:
    """Whatever happens to a plan, what is said of it on facts is what would be said of one read anew from the journal."""
    run = doors()
    happening = [
        lambda: run.fold(FactsObserved(holds=("open",), ceased=("shut",))),
        lambda: run.fold(ContextUpdated({"key": "other"})),
        lambda: run.fold(ResourceUpdated("enter", available=False)),
        lambda: run.fold(GoalChanged(Goal(objective="look", facts=("open",)), ("facts",))),
        lambda: run.start("wait"),
        lambda: run.end("wait#1"),
        lambda: run.fail("unlock"),
        lambda: run.apply(ReplaceTask(task_id="unlock", tasks=(Task(id="climb"),))),
        lambda: run.run("climb"),
    ]
    about: list[dict[str, list[str]]] = [{}, {"facts": ["open"]}, {"tasks": ["enter"]}]
    before = None
    for happens in happening:
        happens()
        live, anew = PlanView(run.live), PlanView(run.replayed())
        assert [live.strips_problem(**some) for some in about] == [anew.strips_problem(**some) for some in about]
        assert (
            live.strips_problem().feasibility()
            == anew.strips_problem().feasibility()
            == live.strips_problem().feasibility()
        )
        assert live.strips_problem() != before
        before = live.strips_problem()


def test_world_after_changes() -> None:
    """The world can be asked for as changes would leave it."""
    view = PlanView(doors().live)
    changes = [
        ReplaceTask(task_id="unlock", tasks=(Task(id="climb"),)),
        ModifyTask(task_id="enter", fields={"tool": None}),
    ]
    world = view.strips_problem(changes)
    assert ids(world.steps) == ["enter", "wait", "climb"]
    assert world.steps[0].depends_on == ("climb",)
    assert world.feasibility().explain() == "the goal would lack artifact(report)"


# Patterns


def test_holes() -> None:
    """Holes are plain names in braces; shell variables and other braces are left alone, doubled ones stand for one."""
    text = "on({x},{y_1},{x}) ${HOME} {0} {a b} {{z}}"
    assert placeholders(text) == ("x", "y_1")
    assert fill_placeholders(text, {"x": "a", "y_1": "b"}) == "on(a,b,a) ${HOME} {0} {a b} {z}"
    assert (placeholders("plain"), fill_placeholders("plain", {})) == ((), "plain")
    with pytest.raises(KeyError):
        fill_placeholders("{x}", {})


@pytest.mark.parametrize(
    ("pattern", "fact", "found"),
    [
        ("on({x},{y})", "on(a,b)", ("a", "b")),
        ("on({x},{x})", "on(a,b)", None),
        ("on({x},{x})", "on(a,a)", ("a",)),
        ("is {{x}} {y}", "is {x} b", ("b",)),
        ("at({p})", "at(home)", ("home",)),
        ("at({p})", "at(work)", None),
        ("at({q})", "at(x)", None),
        ("a.c", "abc", None),
    ],
)
def test_finder(pattern: str, fact: str, found: tuple[str, ...] | None) -> None:
    """A pattern finds the facts that it can become, by what its holes may stand for."""
    match = compile_fact_pattern(pattern, {"p": ["home"], "q": []}).fullmatch(fact)
    assert (match and match.groups()) == found


def test_text_of_values() -> None:
    """A value inside a fact is a string as it is, anything else as JSON; a fact has one spelling."""
    assert [as_text(value) for value in ("a b", 1, None, ["ä", True])] == ["a b", "1", "null", '["ä",true]']
    assert normalise_fact("  on( a ,  b ) ") == "on( a,b )"


def test_what_has_to_do_with_nearly_everything() -> None:
    """Of a line of more than a thousand tasks the whole is looked at, instead of following it task by task."""
    line = [Task(id=f"t{n}", tool="go", depends_on=[f"t{n - 1}"] if n else []) for n in range(1_100)]
    plan = kept(*line, tools=[tool("go", needs=["x"])], facts=["artifact(x)"])

    assert len(PlanView(plan.live).strips_problem(tasks=["t5"]).steps) == 1_100
    assert repr(plan.live.dependency_index.fact_index) == "<FactIndex of 1100 tasks>"

"""Decisions in a model's reply: parsing, normalisation of contradictions, and where replans lead."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import LLMResponseInvalid
from replanning.planning import Phase, ReplanType
from replanning.planning.decisions import (
    ALLOWED_REPLANS,
    LEVEL_DESCRIPTIONS,
    REPLAN_TARGETS,
    decision_model,
    keeps_finished,
    normalise,
    parse_decision,
)

GOAL, DECOMPOSITION, ACTIONS, EXECUTION, REFLECTION = Phase

FULL = {
    "replan_needed": True,
    "confidence": 0.85,
    "reasoning": "The file is not there.",
    "replan_type": "partial_replan",
    "target_phase": "execution",
    "replan_level": 2,
    "issues_found": ["no such file"],
    "recommended_actions": ["create it"],
    "clarification_needed": False,
    "clarification_questions": [],
}
"""A decision with every common field."""

PAIRS = [(phase, kind) for phase in Phase for kind in ReplanType]
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
levels = st.none() | st.integers(1, 5)


def reply(**changes) -> str:
    """A reply with every field, some of them changed."""
    return json.dumps({"replan_decision": {**FULL, **changes}})


def problem(text: str, phase: Phase = EXECUTION) -> str:
    """Return the reason for refusing a reply."""
    with pytest.raises(LLMResponseInvalid) as caught:
        parse_decision(text, phase)
    return str(caught.value)


def said(phase: Phase = EXECUTION, **changes):
    """Return the normalised decision with only these fields."""
    fields = {"replan_needed": True, "confidence": 0.9, "reasoning": "so", **changes}
    return normalise(parse_decision(json.dumps(fields), phase))


@st.composite
def decisions(draw):
    """Any decision that a phase may reply, with contradictions."""
    phase = draw(st.sampled_from(Phase))
    fields = {
        "replan_needed": draw(st.booleans()),
        "confidence": draw(st.floats(0, 1)),
        "reasoning": draw(texts),
        "replan_type": draw(st.sampled_from(ALLOWED_REPLANS[phase])),
        "target_phase": draw(st.none() | st.sampled_from(Phase)),
        "replan_level": draw(levels),
        "issues_found": draw(st.lists(texts, max_size=2)),
        "clarification_needed": draw(st.booleans()),
        "clarification_questions": draw(st.lists(texts, max_size=2)),
    }
    return parse_decision(json.dumps(fields), phase)


# Phases and targets


def test_allowed_types():
    """Each of the five phases, in order, has its own types, and may decide that nothing is needed."""
    phases = {str(phase): " ".join(kinds) for phase, kinds in ALLOWED_REPLANS.items()}
    assert phases == {
        "goal_understanding": "clarification_request goal_revision none",
        "task_decomposition": "task_redecomposition none",
        "action_sequence": "action_regeneration none",
        "execution": "retry partial_replan full_replan action_regeneration task_redecomposition goal_revision none",
        "reflection": "plan_revision none",
    }
    assert [*phases] == [str(phase) for phase in Phase]
    assert {kind for kinds in ALLOWED_REPLANS.values() for kind in kinds} == set(ReplanType)


def test_targets():
    """A level leads to the same phase with every type; only what continues the action plan keeps finished tasks."""
    phases = {1: EXECUTION, 2: EXECUTION, 3: ACTIONS, 4: DECOMPOSITION, 5: GOAL}
    wanted = [kind for kind in ReplanType if kind is not ReplanType.NONE]
    for kind in wanted:
        assert REPLAN_TARGETS[kind] == {level: phases[level] for level in REPLAN_TARGETS[kind]}
    assert (
        [*LEVEL_DESCRIPTIONS] == sorted({level for kind in wanted for level in REPLAN_TARGETS[kind]}) == [1, 2, 3, 4, 5]
    )
    assert {
        phase: {target for kind in kinds for target in REPLAN_TARGETS[kind].values()}
        for phase, kinds in ALLOWED_REPLANS.items()
    } == {
        **{phase: {phase} for phase in (GOAL, DECOMPOSITION, ACTIONS)},
        EXECUTION: {GOAL, DECOMPOSITION, ACTIONS, EXECUTION},
        REFLECTION: {EXECUTION},
    }
    assert [phase for phase in phases.values() if keeps_finished(phase)] == [EXECUTION, EXECUTION, ACTIONS]


# Replies


@pytest.mark.parametrize(
    ("phase", "field", "values"),
    [
        (EXECUTION, "confidence", [0, 0.0, 1e-9, 0.3, 1, 1.0]),
        (EXECUTION, "replan_level", [1, 2, 3, 4, 5, None]),
        (REFLECTION, "achievement_rate", [0, 100, 33.3]),
    ],
)
def test_numbers_in_their_range(phase, field, values):
    """A confidence is from 0 to 1, a level from 1 to 5 and an achievement rate from 0 to 100, both ends included."""
    for value in values:
        assert getattr(parse_decision(reply(**{"replan_type": "none", field: value}), phase), field) == value


@pytest.mark.parametrize(
    ("phase", "field", "values"),
    [
        (EXECUTION, "confidence", [85, 1.0001, -0.0001, "0.9", "85%", True, None, [0.9]]),
        (EXECUTION, "replan_needed", ["false", "true", 0, 1, None]),
        (EXECUTION, "clarification_needed", ["false", "true", 0, 1, None]),
        (EXECUTION, "replan_level", [0, 6, -1, 2.0, "2", True]),
        (EXECUTION, "replan_type", ["redo", "", None, 3, ["retry"], {"retry": 1}]),
        (EXECUTION, "target_phase", ["planning", "", 3, "EXECUTION"]),
        (GOAL, "assumptions_to_make", ["none"]),
        (DECOMPOSITION, "missing_steps", [[1]]),
        (DECOMPOSITION, "recommended_granularity", [3]),
        (ACTIONS, "unavailable_tools", [None]),
        (EXECUTION, "error_classification", ["odd"]),
        (REFLECTION, "evaluation_result", ["ok"]),
        (REFLECTION, "achievement_rate", [100.1, -0.1]),
        (REFLECTION, "revision_scope", ["huge"]),
    ],
)
def test_fields_are_strict(phase, field, values):
    """A field of another type or beyond its range is refused by name, those of a phase like the others."""
    for value in values:
        assert problem(reply(**{"replan_type": "none", field: value}), phase).startswith(field)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(value):
    """NaN and infinity are no confidences, and the message says what may be the matter."""
    assert "NaN or Infinity" in problem(reply().replace("0.85", value))


def test_all_problems_at_once():
    """Everything that is wrong or missing is named together, with its place and what was expected."""
    text = problem(reply(replan_needed="no", confidence=2, replan_type="redo", issues_found=["a", 1], reasoning=None))
    for part in (
        "replan_needed: expected true or false, got 'no'",
        "confidence: ",
        "replan_type: execution allows retry, ",
        "issues_found[1]: expected text, got 1",
        "reasoning: expected text, got None",
    ):
        assert part in text
    text = problem('{"replan_decision": {}}')
    assert all(f"'{name}' is missing" in text for name in ("replan_needed", "confidence", "reasoning", "replan_type"))


def test_bounded_replies():
    """More items or longer texts than anybody reads are refused, with a message that does not name each of them."""
    text = problem(reply(issues_found=list(range(90)), recommended_actions=list(range(90))))
    assert (text.count("expected text"), text.endswith("and 160 more")) == (20, True)
    assert "issues_found" in problem(reply(issues_found=["x"] * 101))
    assert "reasoning" in problem(reply(reasoning="x" * 20_001))
    assert len(parse_decision(reply(issues_found=["x"] * 100, reasoning="x" * 20_000), EXECUTION).issues_found) == 100


@pytest.mark.parametrize(("phase", "kind"), PAIRS)
def test_types_by_phase(phase, kind):
    """A type that the phase does not allow makes the decision invalid, and the message names those it allows."""
    text = reply(replan_type=str(kind))
    if kind in ALLOWED_REPLANS[phase]:
        assert parse_decision(text, phase).replan_type is kind
    else:
        assert problem(text, phase).startswith(f"replan_type: {phase} allows {', '.join(ALLOWED_REPLANS[phase])}, got ")


@pytest.mark.parametrize(("phase", "kind"), [pair for pair in PAIRS if pair[1] in ALLOWED_REPLANS[pair[0]]])
@pytest.mark.parametrize("level", [None, 1, 2, 3, 4, 5])
def test_type_then_level_then_target(phase, kind, level):
    """Whatever level and target are said with a type, what remains fits the type, and the level before the target."""
    for target in (None, *Phase):
        decision, notes = said(phase, replan_type=str(kind), replan_level=level, target_phase=target)
        if decision.replan_type is ReplanType.NONE:
            assert (decision.replan_level, decision.target_phase) == (None, None)
            continue
        targets = REPLAN_TARGETS[kind]
        assert decision.replan_type is kind
        assert decision.target_phase is targets[decision.replan_level]
        if level in targets:
            assert decision.replan_level == level
        elif target in targets.values():
            assert decision.target_phase is target
        else:
            assert decision.replan_level == next(iter(targets))
        assert any("replan_level was" in note for note in notes) is (level not in (None, decision.replan_level))
        assert any("target_phase was" in note for note in notes) is (target not in (None, decision.target_phase))


def test_normalisation_is_recorded():
    """Corrections are noted with the old and the new value."""
    decision, notes = said(replan_type="action_regeneration", replan_level=5, target_phase="reflection")
    assert (decision.replan_level, decision.target_phase) == (3, ACTIONS)
    assert notes == (
        "replan_level was 5, but action_regeneration has level 3",
        "target_phase was reflection, but action_regeneration at level 3 returns to action_sequence",
    )
    assert said(replan_type="full_replan").decision.target_phase is DECOMPOSITION
    agreeing = parse_decision(reply(), EXECUTION)
    assert normalise(agreeing) == (agreeing, ())
    assert said(replan_type="none").notes == ("replan_needed was true, but replan_type none: the run continues",)
    unneeded = said(replan_needed=False, replan_type="retry").notes
    assert unneeded == ("replan_type was retry, but replan_needed false: the run continues",)


NOTHING = "a clarification without questions: "


@pytest.mark.parametrize(
    ("fields", "questions", "notes"),
    [
        (
            {"clarification_needed": True, "clarification_questions": [" Which? ", " "], "issues_found": ["x"]},
            ("Which?",),
            (),
        ),
        (
            {"issues_found": ["no region"]},
            ("no region",),
            (
                "clarification_needed was false, but a clarification was requested",
                f"{NOTHING}the issues found are asked about",
            ),
        ),
        ({"clarification_needed": True}, ("so",), (f"{NOTHING}its reasoning is shown",)),
        ({"clarification_needed": True, "reasoning": " "}, (), (f"{NOTHING}there is nothing to ask",)),
    ],
)
def test_request_asks_something(fields, questions, notes):
    """A clarification request asks its questions; else about the issues found; else it shows its reasons, or is none."""
    asked = said(GOAL, replan_type="clarification_request", **fields)
    assert (asked.decision.clarification_questions, asked.notes) == (questions, notes)
    assert asked.decision.clarification_needed is asked.decision.replan_needed is bool(questions)


@pytest.mark.parametrize("phase", Phase)
def test_asked_regardless_of_replan(phase):
    """A question to the user stays where nothing is to be done again, in whichever phase."""
    asks = {"clarification_needed": True, "clarification_questions": ["Which branch?"]}
    decision, notes = said(phase, replan_needed=False, replan_type="none", **asks)
    assert (decision.replan_needed, decision.clarification_questions) == (False, ("Which branch?",))
    assert notes == ()


@given(decisions())
def test_normal_form(decision):
    """Every decision has one normal form: it needs a replan exactly where it names one, and stays as it is."""
    normal, notes = normalise(decision)
    assert normal.replan_needed is (normal.replan_type is not ReplanType.NONE)
    assert (normal.replan_level is None) is (normal.target_phase is None) is not normal.replan_needed
    assert normal.clarification_needed is False or normal.clarification_questions
    assert normalise(normal) == (normal, ())
    parts = ("replan_needed", "replan_type") if not normal.replan_needed else ("replan_level", "target_phase")
    assert notes or all(getattr(decision, part) in (None, getattr(normal, part)) for part in parts)


EXTRAS = {
    GOAL: {"assumptions_to_make": ["main is the default branch"]},
    DECOMPOSITION: {"missing_steps": ["test"], "recommended_granularity": "finer", "scope_adjustment": "without docs"},
    ACTIONS: {
        "unavailable_tools": ["docker"],
        "alternative_tools": ["podman"],
        "dependency_issues": ["b before a"],
        "plan_adjustments": ["swap them"],
    },
    EXECUTION: {
        "error_classification": "persistent",
        "recovery_strategy": "another mirror",
        "affected_actions": ["fetch"],
    },
    REFLECTION: {
        "evaluation_result": "partial_success",
        "achievement_rate": 62.5,
        "issues_identified": ["slow"],
        "additional_actions": ["profile it"],
        "revision_scope": "minor",
    },
}


@pytest.mark.parametrize("phase", list(Phase))
def test_every_field_is_kept(phase):
    """All fields, those of the phase and any that nobody asked for are kept in what is recorded."""
    fields = {**FULL, "replan_type": str(ALLOWED_REPLANS[phase][0]), **EXTRAS[phase], "mood": {"good": [1, None]}}
    decision = parse_decision(json.dumps(fields), phase)
    written = json.loads(decision.model_dump_json())
    assert {name: written[name] for name in fields} == fields
    assert decision_model(phase).model_validate_json(decision.model_dump_json()) == decision


def test_decision_in_prose():
    """A decision is found without its wrapper, in a fenced block, in prose, after thoughts; of several the last counts."""
    other = reply(confidence=0.1)
    for text in (
        f"Here you are:\n```json\n{reply()}\n```\nAnything else?",
        f"I thought {{about it}} and say {reply()} so.",
        f"<think>{other}</think>{reply()}",
        f"First {other}, no: {reply()}",
        json.dumps(FULL),
        json.dumps({"comment": "hm", "replan_decision": FULL}),
        f'{reply()} The tool said {{"exit": 1}} and {{"replan_needed": "maybe"}}.',
    ):
        assert parse_decision(text, EXECUTION) == parse_decision(reply(), EXECUTION)


def test_blames_what_looks_like_a_decision():
    """If no object is valid, the message is about the one that was meant as the decision."""
    assert problem(f'{reply(confidence=9)} as {{"exit": 1}}').startswith("confidence: ")
    assert "replan_needed: " in problem('{"replan_needed": 0} as {"exit": 1}')


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ["", "No.", "I would replan { everything }", '{"replan_needed": true, ', "\ud800"],
            "the reply holds no JSON object",
        ),
        ([reply(reasoning="\ud800")], "Invalid JSON"),
        (
            ["[]", "true", '"retry"', '{"replan_decision": "retry"}', '{"replan_decision": null}'],
            "expected a JSON object, got ",
        ),
    ],
)
def test_no_object(texts, said):
    """A reply without JSON, and JSON that is no object, are refused with a message that says so."""
    for text in texts:
        assert problem(text).startswith(said)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 100) | st.floats() | texts | st.sampled_from([*Phase, *ReplanType]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
any_fields = st.dictionaries(st.sampled_from([*FULL, "replan_decision", "achievement_rate"]) | texts, json_values)


@given(
    st.text() | any_fields.map(json.dumps) | st.tuples(st.text(), any_fields.map(json.dumps), st.text()).map("".join),
    st.sampled_from(Phase),
)
def test_any_reply(text, phase):
    """Any reply at all gives a decision that can be stored, or an error with a reason."""
    try:
        decision = parse_decision(text, phase)
    except LLMResponseInvalid as error:
        stored = str(error)
    else:
        normal = normalise(decision).decision
        stored = normal.model_dump_json()
        assert decision_model(phase).model_validate_json(stored) == normal
    assert stored

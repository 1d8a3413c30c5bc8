"""Decisions in a model's reply: parsing, and normalisation of contradictions."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import LLMResponseInvalid
from replanning.planning import Phase, ReplanType
from replanning.planning.decisions import ALLOWED_REPLANS, REPLAN_TARGETS, decision_model, normalise, parse_decision

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


def test_every_field() -> None:
    """Every field of the reply is read, and is written again as it was."""
    decision = parse_decision(reply(), EXECUTION)
    written = json.loads(decision.model_dump_json())
    assert {name: written[name] for name in FULL} == FULL
    assert decision.replan_type is ReplanType.PARTIAL_REPLAN
    assert decision.target_phase is EXECUTION


def test_flat_object() -> None:
    """A flat object means the same as one in the wrapper, also beside other fields."""
    wrapped = parse_decision(reply(), EXECUTION)
    assert parse_decision(json.dumps(FULL), EXECUTION) == wrapped
    assert parse_decision(json.dumps({"comment": "hm", "replan_decision": FULL}), EXECUTION) == wrapped


def test_what_may_be_left_out() -> None:
    """Only the need, the confidence, the reasons and the type must be said."""
    decision = parse_decision(
        '{"replan_needed": false, "confidence": 1, "reasoning": "", "replan_type": "none"}', EXECUTION
    )
    assert (decision.target_phase, decision.replan_level, decision.clarification_needed) == (None, None, False)
    assert decision.issues_found == decision.recommended_actions == decision.clarification_questions == ()


@pytest.mark.parametrize("value", [0, 0.0, 1e-9, 0.3, 1, 1.0])
def test_confidences(value) -> None:
    """A number from 0 to 1 is a confidence, both ends included."""
    assert parse_decision(reply(confidence=value), EXECUTION).confidence == value


@pytest.mark.parametrize("value", [85, 1.0001, -0.0001, "0.9", "85%", True, None, [0.9]])
def test_no_confidences(value) -> None:
    """A confidence that is not a number from 0 to 1 is refused."""
    assert problem(reply(confidence=value)).startswith("confidence: ")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(value) -> None:
    """NaN and infinity are no confidences, and the message says what may be the matter."""
    assert "NaN or Infinity" in problem(reply().replace("0.85", value))


@pytest.mark.parametrize("value", ["false", "true", 0, 1, None])
@pytest.mark.parametrize("name", ["replan_needed", "clarification_needed"])
def test_false_is_not_true(name, value) -> None:
    """Only true and false are true and false."""
    assert problem(reply(**{name: value})) == f"{name}: expected true or false, got {value!r}"


@pytest.mark.parametrize("value", [0, 6, -1, 2.0, "2", True])
def test_no_levels(value) -> None:
    """A level is a whole number from 1 to 5."""
    assert problem(reply(replan_level=value)).startswith("replan_level: ")


@pytest.mark.parametrize("value", [1, 2, 3, 4, 5])
def test_levels(value) -> None:
    """Every level from 1 to 5 can be said."""
    assert parse_decision(reply(replan_level=value), EXECUTION).replan_level == value


def test_all_problems_at_once() -> None:
    """Everything that is wrong is named together, with its place and what was expected."""
    text = problem(reply(replan_needed="no", confidence=2, replan_type="redo", issues_found=["a", 1], reasoning=None))
    for part in (
        "replan_needed: expected true or false, got 'no'",
        "confidence: ",
        "replan_type: execution allows retry, ",
        "issues_found[1]: expected text, got 1",
        "reasoning: expected text, got None",
    ):
        assert part in text


def test_missing_fields() -> None:
    """Missing required fields are named."""
    text = problem('{"replan_decision": {}}')
    for name in ("replan_needed", "confidence", "reasoning", "replan_type"):
        assert f"'{name}' is missing" in text


def test_bounded_messages() -> None:
    """A reply that is wrong a hundred times does not make a message of a hundred parts."""
    text = problem(reply(issues_found=list(range(90)), recommended_actions=list(range(90))))
    assert text.count("expected text") == 20
    assert text.endswith("and 160 more")


def test_bounded_replies() -> None:
    """More items or longer texts than anybody reads are refused."""
    assert "issues_found" in problem(reply(issues_found=["x"] * 101))
    assert "reasoning" in problem(reply(reasoning="x" * 20_001))
    assert len(parse_decision(reply(issues_found=["x"] * 100, reasoning="x" * 20_000), EXECUTION).issues_found) == 100


@pytest.mark.parametrize(("phase", "kind"), PAIRS)
def test_types_by_phase(phase, kind) -> None:
    """A type that the phase does not allow makes the decision invalid, and the message names those it allows."""
    text = reply(replan_type=str(kind))
    if kind in ALLOWED_REPLANS[phase]:
        assert parse_decision(text, phase).replan_type is kind
    else:
        assert problem(text, phase).startswith(f"replan_type: {phase} allows {', '.join(ALLOWED_REPLANS[phase])}, got ")


@pytest.mark.parametrize("value", ["redo", "", None, 3, ["retry"], {"retry": 1}])
def test_no_types(value) -> None:
    """A value that is not a replan type is refused."""
    assert problem(reply(replan_type=value)).startswith("replan_type: execution allows ")


@pytest.mark.parametrize("value", ["planning", "", 3, "EXECUTION"])
def test_no_phases(value) -> None:
    """A target that is none of the five phases is refused."""
    assert problem(reply(target_phase=value)).startswith("target_phase: ")


@pytest.mark.parametrize(("phase", "kind"), [pair for pair in PAIRS if pair[1] in ALLOWED_REPLANS[pair[0]]])
@pytest.mark.parametrize("level", [None, 1, 2, 3, 4, 5])
def test_type_then_level_then_target(phase, kind, level) -> None:
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


def test_normalisation_is_recorded() -> None:
    """Corrections are noted with the old and the new value."""
    decision, notes = said(replan_type="action_regeneration", replan_level=5, target_phase="reflection")
    assert (decision.replan_level, decision.target_phase) == (3, ACTIONS)
    assert notes == (
        "replan_level was 5, but action_regeneration has level 3",
        "target_phase was reflection, but action_regeneration at level 3 returns to action_sequence",
    )


def test_agreeing_decision_stays() -> None:
    """A decision whose parts agree is left as it is, without a note."""
    decision = parse_decision(reply(), EXECUTION)
    assert normalise(decision) == (decision, ())


@pytest.mark.parametrize(("level", "target"), [(3, ACTIONS), (4, DECOMPOSITION), (5, GOAL)])
def test_full_replan_has_three_targets(level, target) -> None:
    """A full replan returns to the phase of its level, or else to its target; without either it decomposes again."""
    assert said(replan_type="full_replan", replan_level=level, target_phase="execution")[0].target_phase is target
    assert said(replan_type="full_replan", replan_level=1, target_phase=str(target))[0].replan_level == level
    assert said(replan_type="full_replan")[0].target_phase is DECOMPOSITION


def test_needed_but_nothing_named() -> None:
    """A replan of no type is none, which is noted."""
    decision, notes = said(replan_type="none", replan_level=3)
    assert (decision.replan_needed, decision.replan_level) == (False, None)
    assert notes == ("replan_needed was true, but replan_type none: the run continues",)


def test_named_but_not_needed() -> None:
    """A type without a need is no replan, which is noted."""
    decision, notes = said(replan_needed=False, replan_type="retry", replan_level=1)
    assert (decision.replan_needed, decision.replan_type) == (False, ReplanType.NONE)
    assert notes == ("replan_type was retry, but replan_needed false: the run continues",)


@given(decisions())
def test_normal_form(decision) -> None:
    """Every decision has one normal form: it needs a replan exactly where it names one, and stays as it is."""
    normal, notes = normalise(decision)
    assert normal.replan_needed is (normal.replan_type is not ReplanType.NONE)
    assert (normal.replan_level is None) is (normal.target_phase is None) is not normal.replan_needed
    assert normal.clarification_needed is False or normal.clarification_questions
    assert normalise(normal) == (normal, ())
    parts = ("replan_needed", "replan_type") if not normal.replan_needed else ("replan_level", "target_phase")
    assert notes or all(getattr(decision, part) in (None, getattr(normal, part)) for part in parts)


def test_request_asks_something() -> None:
    """A clarification request asks its questions; else about the issues found; else it shows its reasons."""
    asked = said(
        GOAL,
        replan_type="clarification_request",
        clarification_needed=True,
        clarification_questions=[" Which? ", " "],
        issues_found=["x"],
    )
    assert asked.decision.clarification_questions == ("Which?",)
    assert asked.notes == ()

    issues, notes = said(GOAL, replan_type="clarification_request", issues_found=["no region"])
    assert (issues.clarification_needed, issues.clarification_questions) == (True, ("no region",))
    assert notes == (
        "clarification_needed was false, but a clarification was requested",
        "a clarification without questions: the issues found are asked about",
    )

    reasons, notes = said(GOAL, replan_type="clarification_request", clarification_needed=True)
    assert reasons.clarification_questions == ("so",)
    assert notes == ("a clarification without questions: its reasoning is shown",)


def test_request_for_nothing_is_none() -> None:
    """A clarification request that has nothing to ask does not count as a replan."""
    decision, notes = said(GOAL, replan_type="clarification_request", clarification_needed=True, reasoning=" ")
    assert (decision.replan_needed, decision.replan_type, decision.clarification_needed) == (
        False,
        ReplanType.NONE,
        False,
    )
    assert notes == ("a clarification without questions: there is nothing to ask",)


def test_asked_regardless_of_replan() -> None:
    """A question to the user stays where nothing is to be done again, in whichever phase."""
    for phase in Phase:
        decision, notes = said(
            phase,
            replan_needed=False,
            replan_type="none",
            clarification_needed=True,
            clarification_questions=["Which branch?"],
        )
        assert (decision.replan_needed, decision.clarification_questions) == (False, ("Which branch?",))
        assert notes == ()


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
def test_extra_fields_are_kept(phase) -> None:
    """The fields of each phase, and any that nobody asked for, are kept in what is recorded."""
    extras = {**EXTRAS[phase], "mood": {"good": [1, None]}}
    decision, _ = said(phase, replan_type="none", replan_needed=False, **extras)
    written = json.loads(decision.model_dump_json())
    assert {name: written[name] for name in extras} == extras
    assert decision_model(phase).model_validate_json(decision.model_dump_json()) == decision


@pytest.mark.parametrize(
    ("phase", "field", "value"),
    [
        (GOAL, "assumptions_to_make", "none"),
        (DECOMPOSITION, "missing_steps", [1]),
        (DECOMPOSITION, "recommended_granularity", 3),
        (ACTIONS, "unavailable_tools", None),
        (EXECUTION, "error_classification", "odd"),
        (REFLECTION, "evaluation_result", "ok"),
        (REFLECTION, "achievement_rate", 100.1),
        (REFLECTION, "achievement_rate", -0.1),
        (REFLECTION, "revision_scope", "huge"),
    ],
)
def test_extra_fields_are_checked(phase, field, value) -> None:
    """The fields of a phase are as strict as the others."""
    assert problem(reply(replan_type="none", **{field: value}), phase).startswith(field)


@pytest.mark.parametrize("rate", [0, 100, 33.3])
def test_achievement_rates(rate) -> None:
    """An achievement rate is from 0 to 100, both ends included."""
    assert said(REFLECTION, replan_type="none", achievement_rate=rate).decision.achievement_rate == rate


def test_decision_in_prose() -> None:
    """A decision is found in a fenced block, in prose with braces, after thoughts, and of two the last counts."""
    other = reply(confidence=0.1)
    for text in (
        f"Here you are:\n```json\n{reply()}\n```\nAnything else?",
        f"I thought {{about it}} and say {reply()} so.",
        f"<think>{other}</think>{reply()}",
        f"First {other}, no: {reply()}",
    ):
        assert parse_decision(text, EXECUTION).confidence == 0.85


def test_first_that_fits() -> None:
    """Of several objects the likeliest that is a decision counts, not one that is something else."""
    text = f'{reply()} The tool said {{"exit": 1}} and {{"replan_needed": "maybe"}}.'
    assert parse_decision(text, EXECUTION).confidence == 0.85


def test_blames_what_looks_like_a_decision() -> None:
    """If no object is valid, the message is about the one that was meant as the decision."""
    assert problem(f'{reply(confidence=9)} as {{"exit": 1}}').startswith("confidence: ")
    assert "replan_needed: " in problem('{"replan_needed": 0} as {"exit": 1}')


@pytest.mark.parametrize("text", ["", "No.", "I would replan { everything }", '{"replan_needed": true, ', "\ud800"])
def test_no_json(text) -> None:
    """A reply without JSON is refused with a message that says so."""
    assert problem(text).startswith("the reply holds no JSON object")


@pytest.mark.parametrize("text", ["[]", "true", '"retry"', '{"replan_decision": "retry"}', '{"replan_decision": null}'])
def test_no_object(text) -> None:
    """JSON that is no object is no decision."""
    assert problem(text).startswith("expected a JSON object, got ")


def test_broken_characters() -> None:
    """Half a character, which no journal could hold, makes a decision unusable."""
    assert "Invalid JSON" in problem(reply(reasoning="\ud800"))


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
def test_any_reply(text, phase) -> None:
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

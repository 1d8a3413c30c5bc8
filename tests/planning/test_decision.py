"""Decisions of a model to replan: parsing, normal form, where they lead, their limits, bands of confidence, and loops."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import LLMResponseInvalid, SettingsError
from replanning.planning import Phase, ReplanLimits, ReplanType
from replanning.planning.decisions import (
    ALLOWED_REPLANS,
    LEVEL_DESCRIPTIONS,
    REPLAN_TARGETS,
    ReplanCause,
    ReplanCounts,
    available_replan_types,
    decision_model,
    fingerprint,
    keeps_finished,
    make_ruling,
    normalise,
    parse_decision,
)
from replanning.settings import PlanningSettings

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
        [*LEVEL_DESCRIPTIONS]
        == sorted({level for kind in wanted for level in REPLAN_TARGETS[kind]})
        == [1, 2, 3, 4, 5]
    )
    assert {
        phase: {target for kind in kinds for target in REPLAN_TARGETS[kind].values()}
        for phase, kinds in ALLOWED_REPLANS.items()
    } == {
        **{phase: {phase} for phase in (GOAL, DECOMPOSITION, ACTIONS)},
        EXECUTION: {GOAL, DECOMPOSITION, ACTIONS, EXECUTION},
        REFLECTION: {EXECUTION},
    }
    assert [phase for phase in phases.values() if keeps_finished(phase)] == [
        EXECUTION,
        EXECUTION,
        ACTIONS,
    ]


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
        assert (
            getattr(parse_decision(reply(**{"replan_type": "none", field: value}), phase), field)
            == value
        )


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
    text = problem(
        reply(
            replan_needed="no",
            confidence=2,
            replan_type="redo",
            issues_found=["a", 1],
            reasoning=None,
        )
    )
    for part in (
        "replan_needed: expected true or false, got 'no'",
        "confidence: ",
        "replan_type: execution allows retry, ",
        "issues_found[1]: expected text, got 1",
        "reasoning: expected text, got None",
    ):
        assert part in text
    text = problem('{"replan_decision": {}}')
    assert all(
        f"'{name}' is missing" in text
        for name in ("replan_needed", "confidence", "reasoning", "replan_type")
    )


def test_bounded_replies():
    """More items or longer texts than anybody reads are refused, with a message that does not name each of them."""
    text = problem(reply(issues_found=list(range(90)), recommended_actions=list(range(90))))
    assert (text.count("expected text"), text.endswith("and 160 more")) == (20, True)
    assert "issues_found" in problem(reply(issues_found=["x"] * 101))
    assert "reasoning" in problem(reply(reasoning="x" * 20_001))
    assert (
        len(
            parse_decision(
                reply(issues_found=["x"] * 100, reasoning="x" * 20_000), EXECUTION
            ).issues_found
        )
        == 100
    )


@pytest.mark.parametrize(("phase", "kind"), PAIRS)
def test_types_by_phase(phase, kind):
    """A type that the phase does not allow makes the decision invalid, and the message names those it allows."""
    text = reply(replan_type=str(kind))
    if kind in ALLOWED_REPLANS[phase]:
        assert parse_decision(text, phase).replan_type is kind
    else:
        assert problem(text, phase).startswith(
            f"replan_type: {phase} allows {', '.join(ALLOWED_REPLANS[phase])}, got "
        )


@pytest.mark.parametrize(
    ("phase", "kind"), [pair for pair in PAIRS if pair[1] in ALLOWED_REPLANS[pair[0]]]
)
@pytest.mark.parametrize("level", [None, 1, 2, 3, 4, 5])
def test_type_then_level_then_target(phase, kind, level):
    """Whatever level and target are said with a type, what remains fits the type, and the level before the target."""
    for target in (None, *Phase):
        decision, notes = said(
            phase, replan_type=str(kind), replan_level=level, target_phase=target
        )
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
        assert any("replan_level was" in note for note in notes) is (
            level not in (None, decision.replan_level)
        )
        assert any("target_phase was" in note for note in notes) is (
            target not in (None, decision.target_phase)
        )


def test_normalisation_is_recorded():
    """Corrections are noted with the old and the new value."""
    decision, notes = said(
        replan_type="action_regeneration", replan_level=5, target_phase="reflection"
    )
    assert (decision.replan_level, decision.target_phase) == (3, ACTIONS)
    assert notes == (
        "replan_level was 5, but action_regeneration has level 3",
        "target_phase was reflection, but action_regeneration at level 3 returns to action_sequence",
    )
    assert said(replan_type="full_replan").decision.target_phase is DECOMPOSITION
    agreeing = parse_decision(reply(), EXECUTION)
    assert normalise(agreeing) == (agreeing, ())
    assert said(replan_type="none").notes == (
        "replan_needed was true, but replan_type none: the run continues",
    )
    unneeded = said(replan_needed=False, replan_type="retry").notes
    assert unneeded == ("replan_type was retry, but replan_needed false: the run continues",)


NOTHING = "a clarification without questions: "


@pytest.mark.parametrize(
    ("fields", "questions", "notes"),
    [
        (
            {
                "clarification_needed": True,
                "clarification_questions": [" Which? ", " "],
                "issues_found": ["x"],
            },
            ("Which?",),
            (),
        ),
        (
            {"issues_found": ["no region"]},
            ("no region",),
            (
                "clarification_needed was false, but a clarification was requested",
                f"{NOTHING}the issues found serve as questions",
            ),
        ),
        (
            {"clarification_needed": True},
            ("so",),
            (f"{NOTHING}its reasoning serves as the question",),
        ),
        (
            {"clarification_needed": True, "reasoning": " "},
            (),
            (f"{NOTHING}there is nothing to ask",),
        ),
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
    assert (
        (normal.replan_level is None) is (normal.target_phase is None) is not normal.replan_needed
    )
    assert normal.clarification_needed is False or normal.clarification_questions
    assert normalise(normal) == (normal, ())
    parts = (
        ("replan_needed", "replan_type")
        if not normal.replan_needed
        else ("replan_level", "target_phase")
    )
    assert notes or all(getattr(decision, part) in (None, getattr(normal, part)) for part in parts)


EXTRAS = {
    GOAL: {"assumptions_to_make": ["main is the default branch"]},
    DECOMPOSITION: {
        "missing_steps": ["test"],
        "recommended_granularity": "finer",
        "scope_adjustment": "without docs",
    },
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
    fields = {
        **FULL,
        "replan_type": str(ALLOWED_REPLANS[phase][0]),
        **EXTRAS[phase],
        "mood": {"good": [1, None]},
    }
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
    st.none()
    | st.booleans()
    | st.integers(-2, 100)
    | st.floats()
    | texts
    | st.sampled_from([*Phase, *ReplanType]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
any_fields = st.dictionaries(
    st.sampled_from([*FULL, "replan_decision", "achievement_rate"]) | texts, json_values
)


@given(
    st.text()
    | any_fields.map(json.dumps)
    | st.tuples(st.text(), any_fields.map(json.dumps), st.text()).map("".join),
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


# Limits on replans in planning mode, confidence bands, and loop detection


LIMITS = ReplanLimits()
OWN = ("clarifications", "redecompositions", "regenerations", "partial_replans", "plan_revisions")
"""The limits of one kind of replan each."""
MANY: dict[str, Any] = dict.fromkeys((*OWN, "action_retries", "total", "replans_per_lineage"), 99)
LOOSE = replace(LIMITS, loop_detection=False, **MANY)
NO_CAUSE = ReplanCause()
FETCH = ReplanCause("HTTP 503 from mirror 7", action="fetch#2", lineage="fetch")


def decided(phase=EXECUTION, kind="partial_replan", confidence=0.9, **changes):
    """A normalised decision."""
    fields = {
        "replan_needed": kind != "none",
        "confidence": confidence,
        "reasoning": "because",
        "replan_type": kind,
        "clarification_needed": kind == "clarification_request",
        **changes,
    }
    return normalise(decision_model(phase).model_validate_json(json.dumps(fields))).decision


RETRY = decided(kind="retry")


def ruled(decision, counts=None, cause=FETCH, **limits):
    """The ruling on a decision with the default limits, some of them changed."""
    return make_ruling(decision, replace(LIMITS, **limits), counts or ReplanCounts(), cause)


def numbered(number):
    """A cause unlike all others."""
    return ReplanCause("error " + "abcdefghijklmnopqrstuvwxyz"[number] * 3)


def spent(decision, times, **cause):
    """The counts after the same kind of replan for so many different causes."""
    counts = ReplanCounts()
    for number in range(times):
        counts = counts.add_replan(decision, replace(numbered(number), **cause))
    return counts


@pytest.mark.parametrize(
    ("phase", "kind", "name", "most"),
    [
        (GOAL, "clarification_request", "clarifications", 2),
        (DECOMPOSITION, "task_redecomposition", "redecompositions", 3),
        (ACTIONS, "action_regeneration", "regenerations", 3),
        (EXECUTION, "partial_replan", "partial_replans", 2),
        (REFLECTION, "plan_revision", "plan_revisions", 2),
    ],
)
def test_each_kind_has_a_limit(phase, kind, name, most):
    """Each kind is open and runs as often as its limit says by default, and no more; the override says which it was."""
    decision = decided(phase, kind)
    before, counts = spent(decision, most - 1), spent(decision, most)
    assert ruled(decision, before, numbered(20)).is_executable
    assert kind in available_replan_types(phase, LIMITS, before, NO_CAUSE)

    ruling = ruled(decision, counts, numbered(20))
    assert (ruling.kind, ruling.override, ruling.needs_escalation) == ("skip", "limit", True)
    assert ruling.reason == f"the limit of {most} {name.replace('_', ' ')} is reached"
    assert kind not in available_replan_types(phase, LIMITS, counts, NO_CAUSE)
    assert getattr(counts, name) == counts.total == most


def test_retries_per_action():
    """Each action is retried three times on a model's word, whatever happened to the others."""
    one, other = ReplanCause(action="a"), ReplanCause(action="b")
    counts = ReplanCounts()
    for _ in range(3):
        assert ruled(RETRY, counts, one).is_executable
        counts = counts.add_replan(RETRY, one)

    ruling = ruled(RETRY, counts, one)
    assert (ruling.override, ruling.reason) == (
        "limit",
        "the limit of 3 retries of action 'a' is reached",
    )
    assert ReplanType.RETRY not in available_replan_types(EXECUTION, LIMITS, counts, one)
    assert ruled(RETRY, counts, other).is_executable
    assert ReplanType.RETRY in available_replan_types(EXECUTION, LIMITS, counts, other)
    assert counts.add_replan(RETRY, other).retries == {"a": 3, "b": 1}


def test_retry_of_nothing():
    """A retry without an executed action is no replan and spends nothing."""
    ruling = ruled(RETRY, cause=NO_CAUSE)
    assert (ruling.kind, ruling.override) == ("continue", None)
    assert ReplanType.RETRY not in available_replan_types(
        EXECUTION, LIMITS, ReplanCounts(), NO_CAUSE
    )


@pytest.mark.parametrize(
    ("level", "name"), [(3, "regenerations"), (4, "redecompositions"), (5, None)]
)
def test_full_replan_counts_as_what_it_does(level, name):
    """A full replan spends the limit of the phase that it returns to, so that no limit is escaped by another name."""
    full = decided(kind="full_replan", replan_level=level)
    counts = spent(full, 3)
    assert ruled(full, counts, numbered(20)).override == (None if name is None else "limit")
    assert name is None or getattr(counts, name) == 3
    assert ReplanType.FULL_REPLAN in available_replan_types(EXECUTION, LIMITS, counts, NO_CAUSE)


def test_switched_off():
    """With replanning switched off only a plan that was carried out may be revised, as often as its own limit says."""
    off = replace(LIMITS, enabled=False)
    left = {phase: available_replan_types(phase, off, ReplanCounts(), FETCH) for phase in Phase}
    assert left.pop(Phase.REFLECTION) == (ReplanType.PLAN_REVISION,)
    assert set(left.values()) == {()}
    assert (
        available_replan_types(
            Phase.REFLECTION, replace(off, plan_revisions=0), ReplanCounts(), FETCH
        )
        == ()
    )
    ruling = ruled(decided(), enabled=False)
    assert (ruling.override, ruling.reason) == ("limit", "replanning is switched off")


def test_only_success_resets():
    """A success gives an action its retries back, and resets nothing else; neither does understanding the goal again."""
    counts = (
        spent(decided(), 2, lineage="fetch")
        .add_replan(RETRY, FETCH)
        .add_replan(RETRY, ReplanCause(action="b"))
    )
    assert counts.reset_retries("fetch#2") == counts.model_copy(update={"retries": {"b": 1}})
    assert counts.reset_retries("unknown") == counts

    before, after = (
        counts.model_dump(),
        counts.add_replan(decided(kind="goal_revision"), FETCH).model_dump(),
    )
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"total", "lineages", "causes", "phases"}
    assert after["total"] == before["total"] + 1


@pytest.mark.parametrize(
    ("confidence", "kind"),
    [
        (1.0, "execute"),
        (0.8, "execute"),
        (math.nextafter(0.8, 0), "execute_with_warning"),
        (0.5, "execute_with_warning"),
        (math.nextafter(0.5, 0), "ask"),
        (0.3, "ask"),
        (math.nextafter(0.3, 0), "skip"),
        (0.0, "skip"),
    ],
)
def test_bands(confidence, kind):
    """Each band has its outcome and its lower edge; if the user may not be asked, replans that need it are skipped."""
    ruling = ruled(decided(confidence=confidence))
    assert ruling.kind == kind
    assert ruling.is_executable is (confidence >= 0.5)
    assert ruling.override == ("confidence" if kind == "skip" else None)
    assert not ruling.needs_escalation
    assert f"{confidence:g}" in ruling.reason

    unasked = ruled(decided(confidence=confidence), confirm_low_confidence=False)
    assert unasked.kind == ("skip" if kind == "ask" else kind)
    assert (
        (unasked.override == "confidence")
        is unasked.reason.endswith("and 0.5 is needed")
        is (confidence < 0.5)
    )


@pytest.mark.parametrize(
    ("edges", "confidence"),
    [((0, 0, 0), 0), ((0, 0.5, 1), 1), ((1, 1, 1), 1), ((0.3, 0.3, 0.3), 1)],
)
def test_edges_in_order(edges, confidence):
    """Bands may be empty, and may reach to both ends; a confidence of zero is no default."""
    user, minimum, immediate = edges
    edges = {
        "confirmation_threshold": user,
        "min_threshold": minimum,
        "immediate_threshold": immediate,
    }
    assert ruled(decided(confidence=confidence), **edges).kind == "execute"


@pytest.mark.parametrize(
    "edges",
    [
        (-0.1, 0.5, 0.8),
        (0.6, 0.5, 0.8),
        (0.3, 0.9, 0.8),
        (0.3, 0.5, 1.1),
        (math.nan, 0.5, 0.8),
        (0.3, 0.5, math.nan),
    ],
)
def test_edges_out_of_order(edges):
    """Edges that are not in order, or not from 0 to 1, are refused with the order that is expected."""
    user, minimum, immediate = edges
    with pytest.raises(SettingsError, match="expected 0 ≤ user ≤ minimum ≤ immediate ≤ 1"):
        ReplanLimits(
            confirmation_threshold=user, min_threshold=minimum, immediate_threshold=immediate
        )


def test_negative_limits():
    """Every limit that is negative is named, together with edges that are out of order."""
    with pytest.raises(SettingsError) as caught:
        ReplanLimits(total=-1, partial_replans=-2, confirmation_threshold=0.9)
    assert [problem.place for problem in caught.value.problems] == [
        "partial_replans",
        "total",
        "confidence",
    ]


def test_limit_before_confidence_before_loop():
    """Of several reasons against a replan the limit is named first, then the confidence, then the loop."""
    looped = ReplanCounts().add_replan(decided(), FETCH).add_replan(decided(), FETCH)
    unsure = decided(confidence=0.1)
    assert ruled(unsure, looped).override == "limit"
    assert ruled(unsure, looped, partial_replans=9).override == "confidence"
    assert ruled(decided(confidence=0.4), looped, partial_replans=9).override == "loop"


@pytest.mark.parametrize("confidence", [0, 1])
def test_not_wanted_is_not_overridden(confidence):
    """A decision that wants no replan lets the run go on, at any confidence and with every limit reached."""
    ruling = ruled(decided(kind="none", confidence=confidence), total=0)
    assert (ruling.kind, ruling.override) == ("continue", None)
    assert (ruling.is_executable, ruling.needs_escalation) == (False, False)


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_repetitions_are_skipped(most):
    """The same replan for the same cause runs as often as its setting says; then it is skipped as a loop, unless off."""
    limits = replace(LOOSE, loop_detection=True, same_trigger=most)
    counts = ReplanCounts()
    for _ in range(most):
        assert make_ruling(decided(), limits, counts, FETCH).is_executable
        counts = counts.add_replan(decided(), FETCH)

    ruling = make_ruling(decided(), limits, counts, FETCH)
    assert (ruling.kind, ruling.override, ruling.needs_escalation) == ("skip", "loop", True)
    assert f"the same partial_replan has run {most} time" in ruling.reason
    assert ruling.fingerprint == fingerprint(decided(), FETCH)
    assert make_ruling(decided(), LOOSE, counts, FETCH).is_executable


def test_retries_are_exempt():
    """Retrying an action for the same cause again and again is no loop, and no replan of its lineage."""
    counts = ReplanCounts()
    for _ in range(5):
        counts = counts.add_replan(RETRY, FETCH)
    assert make_ruling(RETRY, replace(LOOSE, loop_detection=True), counts, FETCH).is_executable
    assert (counts.causes, counts.lineages) == ({}, {})


def test_what_is_the_same_cause():
    """Numbers, addresses, case and space make no other cause, and neither do other actions of the lineage."""
    mark = fingerprint(decided(), FETCH)
    for error in ("HTTP 504 from mirror 12", "http 503  FROM mirror 7\n"):
        assert fingerprint(decided(), replace(FETCH, error=error)) == mark
    assert fingerprint(decided(), replace(FETCH, action="fetch~2#1")) == mark
    assert fingerprint(decided(confidence=0.1, issues_found=["else"]), FETCH) == mark


def test_what_is_another_cause():
    """Another error, lineage, type or phase is another trigger."""
    marks = {
        fingerprint(decided(), FETCH),
        fingerprint(decided(), replace(FETCH, error="no such file")),
        fingerprint(decided(), replace(FETCH, lineage="build")),
        fingerprint(decided(kind="action_regeneration"), FETCH),
        fingerprint(decided(ACTIONS, "action_regeneration"), FETCH),
    }
    assert len(marks) == 5


def test_issues_are_the_cause_where_nothing_failed():
    """After a phase without an error the issues found are the cause, in any order; else the reasons are."""
    one, other, reasoned = (
        fingerprint(decided(DECOMPOSITION, "task_redecomposition", **said), NO_CAUSE)
        for said in (
            {"issues_found": ["No tests", "too coarse (3 tasks)"]},
            {"issues_found": ["too coarse (9 tasks)", "no  tests"]},
            {"reasoning": "no tests"},
        )
    )
    assert one == other != reasoned


def test_lineage():
    """A task and what replaced it are replanned three times together; the fourth time the task ends blocked."""
    revision = decided(kind="goal_revision")
    counts = ReplanCounts()
    for number in range(3):
        cause = ReplanCause(f"error {'xyz'[number]}", action=f"fetch~{number}", lineage="fetch")
        assert ruled(revision, counts, cause).blocks is None
        counts = counts.add_replan(revision, cause)

    ruling = ruled(decided(), counts)
    assert (ruling.override, ruling.blocks) == ("limit", "fetch")
    assert ruling.reason == "the limit of 3 replans of 'fetch' and its replacements is reached"
    assert available_replan_types(EXECUTION, LIMITS, counts, FETCH) == (ReplanType.RETRY,)
    assert ruled(decided(), counts, ReplanCause("other", lineage="build")).is_executable


def test_questions_beside_a_replan():
    """Questions beside a replan are asked even if the replan itself is overridden."""
    both = decided(clarification_needed=True, clarification_questions=["Which?"])
    assert ruled(both).questions == ruled(both, total=0).questions == ("Which?",)
    assert ruled(decided(clarification_questions=["Which?"])).questions == ()


def test_clarification_request_asks_once():
    """A clarification request of low confidence is asked without approval; below that, or beyond its limit, it is not."""
    request = decided(GOAL, "clarification_request", 0.3, clarification_questions=["Which?"])
    asked = ruled(request, cause=NO_CAUSE)
    assert (asked.kind, asked.questions) == ("execute_with_warning", ("Which?",))
    unsure = ruled(request.model_copy(update={"confidence": 0.29}), cause=NO_CAUSE)
    assert (unsure.override, unsure.questions) == ("confidence", ())
    refused = ruled(request, ReplanCounts().add_clarification().add_clarification(), NO_CAUSE)
    assert (refused.override, refused.questions) == ("limit", ())


def test_every_setting_counts():
    """Each setting ends up in the limit that it is about, and the defaults are the same."""
    assert ReplanLimits.from_settings(PlanningSettings()) == LIMITS
    settings = PlanningSettings.model_validate(
        {
            "revision": {"max_revisions": 11},
            "replanning": {
                "llm_decision": {
                    "min_confidence_threshold": 0.6,
                    "require_user_confirmation_on_low_confidence": False,
                    "user_confirmation_threshold": 0.2,
                    "immediate_execution_threshold": 0.9,
                },
                "goal_understanding": {"max_clarification_requests": 4},
                "task_decomposition": {"max_redecomposition_attempts": 5},
                "action_sequence": {"max_regeneration_attempts": 6},
                "execution": {"max_action_retries": 7, "max_partial_replans": 8},
                "reflection": {"max_plan_revisions": 9},
                "global": {
                    "max_total_replans": 20,
                    "infinite_loop_detection": False,
                    "same_trigger_max_count": 12,
                },
            },
        }
    )
    counts = (4, 5, 6, 7, 8, 9, 20, 13)
    assert ReplanLimits.from_settings(settings, replans_per_lineage=13) == ReplanLimits(
        True,
        *counts,
        False,
        12,
        immediate_threshold=0.9,
        min_threshold=0.6,
        confirmation_threshold=0.2,
        confirm_low_confidence=False,
    )


@pytest.mark.parametrize(
    ("replanning", "revisions", "most"), [(True, 1, 1), (True, 3, 2), (False, 3, 3), (False, 1, 1)]
)
def test_smaller_of_two_settings(replanning, revisions, most):
    """With replanning on, the smaller of the two limits of plan revisions holds; with it off, the general one."""
    settings = PlanningSettings.model_validate(
        {"revision": {"max_revisions": revisions}, "replanning": {"enabled": replanning}}
    )
    limits = ReplanLimits.from_settings(settings)
    assert (limits.enabled, limits.plan_revisions) == (replanning, most)


causes = st.builds(
    ReplanCause,
    error=st.sampled_from(["", "timeout", "no such file", "denied"]),
    action=st.none() | st.sampled_from("abc"),
    lineage=st.none() | st.sampled_from("xy"),
)
wanted = st.sampled_from(
    [(phase, str(kind)) for phase in Phase for kind in ALLOWED_REPLANS[phase]]
).flatmap(
    lambda pair: st.builds(
        decided,
        *map(st.just, pair),
        st.sampled_from([0, 0.3, 0.5, 0.8, 1]),
        replan_level=st.none() | st.integers(1, 5),
        issues_found=st.lists(st.sampled_from(["vague", "slow"]), max_size=1),
        clarification_needed=st.booleans(),
        clarification_questions=st.just(["Which?"]),
    )
)

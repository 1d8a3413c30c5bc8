"""Limits on replans in planning mode, confidence bands, and loop detection."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import SettingsError
from replanning.planning import Phase, ReplanLimits, ReplanType
from replanning.planning.decisions import (
    ALLOWED_REPLANS,
    REPLAN_TARGETS,
    ReplanCause,
    ReplanCounts,
    available_replan_types,
    decision_model,
    fingerprint,
    make_ruling,
    normalise,
)
from replanning.settings import PlanningSettings

GOAL, DECOMPOSITION, ACTIONS, EXECUTION, REFLECTION = Phase
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
    assert (ruling.override, ruling.reason) == ("limit", "the limit of 3 retries of action 'a' is reached")
    assert ReplanType.RETRY not in available_replan_types(EXECUTION, LIMITS, counts, one)
    assert ruled(RETRY, counts, other).is_executable
    assert ReplanType.RETRY in available_replan_types(EXECUTION, LIMITS, counts, other)
    assert counts.add_replan(RETRY, other).retries == {"a": 3, "b": 1}


def test_retry_of_nothing():
    """A retry without an executed action is no replan and spends nothing."""
    ruling = ruled(RETRY, cause=NO_CAUSE)
    assert (ruling.kind, ruling.override) == ("continue", None)
    assert ReplanType.RETRY not in available_replan_types(EXECUTION, LIMITS, ReplanCounts(), NO_CAUSE)


@pytest.mark.parametrize(("level", "name"), [(3, "regenerations"), (4, "redecompositions"), (5, None)])
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
    assert available_replan_types(Phase.REFLECTION, replace(off, plan_revisions=0), ReplanCounts(), FETCH) == ()
    ruling = ruled(decided(), enabled=False)
    assert (ruling.override, ruling.reason) == ("limit", "replanning is switched off")


def test_only_success_resets():
    """A success gives an action its retries back, and resets nothing else; neither does understanding the goal again."""
    counts = spent(decided(), 2, lineage="fetch").add_replan(RETRY, FETCH).add_replan(RETRY, ReplanCause(action="b"))
    assert counts.reset_retries("fetch#2") == counts.model_copy(update={"retries": {"b": 1}})
    assert counts.reset_retries("unknown") == counts

    before, after = counts.model_dump(), counts.add_replan(decided(kind="goal_revision"), FETCH).model_dump()
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
    assert (unasked.override == "confidence") is unasked.reason.endswith("and 0.5 is needed") is (confidence < 0.5)


@pytest.mark.parametrize(
    ("edges", "confidence"), [((0, 0, 0), 0), ((0, 0.5, 1), 1), ((1, 1, 1), 1), ((0.3, 0.3, 0.3), 1)]
)
def test_edges_in_order(edges, confidence):
    """Bands may be empty, and may reach to both ends; a confidence of zero is no default."""
    user, minimum, immediate = edges
    edges = {"confirmation_threshold": user, "min_threshold": minimum, "immediate_threshold": immediate}
    assert ruled(decided(confidence=confidence), **edges).kind == "execute"


@pytest.mark.parametrize(
    "edges",
    [(-0.1, 0.5, 0.8), (0.6, 0.5, 0.8), (0.3, 0.9, 0.8), (0.3, 0.5, 1.1), (math.nan, 0.5, 0.8), (0.3, 0.5, math.nan)],
)
def test_edges_out_of_order(edges):
    """Edges that are not in order, or not from 0 to 1, are refused with the order that is expected."""
    user, minimum, immediate = edges
    with pytest.raises(SettingsError, match="expected 0 ≤ user ≤ minimum ≤ immediate ≤ 1"):
        ReplanLimits(confirmation_threshold=user, min_threshold=minimum, immediate_threshold=immediate)


def test_negative_limits():
    """Every limit that is negative is named, together with edges that are out of order."""
    with pytest.raises(SettingsError) as caught:
        ReplanLimits(total=-1, partial_replans=-2, confirmation_threshold=0.9)
    assert [problem.place for problem in caught.value.problems] == ["partial_replans", "total", "confidence"]


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
                "global": {"max_total_replans": 20, "infinite_loop_detection": False, "same_trigger_max_count": 12},
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
wanted = st.sampled_from([(phase, str(kind)) for phase in Phase for kind in ALLOWED_REPLANS[phase]]).flatmap(
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
small = st.integers(0, 3)
any_limits = st.builds(
    ReplanLimits,
    **dict.fromkeys(OWN, small),
    action_retries=small,
    total=st.integers(0, 12),
    replans_per_lineage=small,
    loop_detection=st.booleans(),
    same_trigger=small,
    confirm_low_confidence=st.booleans(),
)


@given(any_limits, st.lists(st.tuples(wanted, causes, st.booleans()), max_size=40))
def test_no_sequence_exceeds_a_limit(limits, sequence):
    """Whatever a model decides in whichever order, and whatever succeeds between, no count exceeds its limit."""
    counts = ReplanCounts()
    asked = 0
    for decision, cause, succeeds in sequence:
        ruling = make_ruling(decision, limits, counts, cause)
        if ruling.is_executable or ruling.kind == "ask":
            counts = counts.add_replan(decision, cause)
        if ruling.questions:
            asked += 1
            counts = counts if decision.replan_type == "clarification_request" else counts.add_clarification()
        if succeeds and cause.action:
            counts = counts.reset_retries(cause.action)
        for name in (*OWN, "total"):
            assert getattr(counts, name) <= getattr(limits, name)
        assert all(times <= limits.action_retries for times in counts.retries.values())
        assert all(times <= limits.replans_per_lineage for times in counts.lineages.values())
        assert not limits.loop_detection or all(times <= limits.same_trigger for times in counts.causes.values())
        assert asked <= limits.clarifications
        assert sum(counts.phases.values()) == counts.total


@given(any_limits, st.lists(st.tuples(wanted, causes), max_size=12), wanted, causes)
def test_what_is_open_agrees_with_what_is_ruled(limits, before, decision, cause):
    """A replan is refused by a limit exactly where its type was not open, but for the targets of a full one."""
    counts = ReplanCounts()
    for earlier, its_cause in before:
        if earlier.replan_needed:
            counts = counts.add_replan(earlier, its_cause)
    ruling = make_ruling(decision, limits, counts, cause)
    usable = decision.replan_type in available_replan_types(decision.phase, limits, counts, cause)
    if ruling.kind != "continue" and len(REPLAN_TARGETS[decision.replan_type]) == 1:
        assert (ruling.override == "limit") is not usable
    if ruling.is_executable:
        assert usable


@given(wanted, causes)
def test_what_is_executed_does_something(decision, cause):
    """Whatever is executed returns to a phase, or asks something, and is counted."""
    ruling = make_ruling(decision, LOOSE, ReplanCounts(), cause)
    if ruling.is_executable:
        assert decision.target_phase is not None
        assert decision.replan_type != "clarification_request" or ruling.questions
        assert ReplanCounts().add_replan(decision, cause).total == 1
    else:
        assert not ruling.fingerprint or ruling.kind in ("ask", "skip")

"""Limits on replans in planning mode, confidence bands, and loop detection."""

from __future__ import annotations

import json
import math
from dataclasses import replace

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
LOOSE = ReplanLimits(
    clarifications=99,
    redecompositions=99,
    regenerations=99,
    action_retries=99,
    partial_replans=99,
    plan_revisions=99,
    total=99,
    replans_per_lineage=99,
    loop_detection=False,
)
FETCH = ReplanCause("HTTP 503 from mirror 7", action="fetch#2", lineage="fetch")

OWN_LIMIT = [
    (GOAL, "clarification_request", "clarifications", 2),
    (DECOMPOSITION, "task_redecomposition", "redecompositions", 3),
    (ACTIONS, "action_regeneration", "regenerations", 3),
    (EXECUTION, "partial_replan", "partial_replans", 2),
    (REFLECTION, "plan_revision", "plan_revisions", 2),
]
"""Each limit with a replan that it covers and its default."""


def decided(phase: Phase = EXECUTION, kind: str = "partial_replan", confidence: float = 0.9, **changes):
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


def limited(**limits) -> ReplanLimits:
    """The limits by default, with some of them changed."""
    return replace(LIMITS, **limits)


def numbered(number: int) -> ReplanCause:
    """A cause unlike all others."""
    return ReplanCause("error " + "abcdefghijklmnopqrstuvwxyz"[number] * 3)


def spent(decision, times: int, **cause) -> ReplanCounts:
    """The counts after the same kind of replan for so many different causes."""
    counts = ReplanCounts()
    for number in range(times):
        counts = counts.add_replan(decision, replace(numbered(number), **cause))
    return counts


@pytest.mark.parametrize(("phase", "kind", "name", "most"), OWN_LIMIT)
def test_each_kind_has_a_limit(phase, kind, name, most) -> None:
    """Each kind of replan runs as often as its limit says, and no more; the override says which limit it was."""
    decision = decided(phase, kind)
    assert getattr(LIMITS, name) == most
    assert make_ruling(decision, LIMITS, spent(decision, most - 1), numbered(20)).is_executable

    counts = spent(decision, most)
    ruling = make_ruling(decision, LIMITS, counts, numbered(20))
    assert (ruling.kind, ruling.override, ruling.needs_escalation) == ("skip", "limit", True)
    assert ruling.reason == f"the limit of {most} {name.replace('_', ' ')} is reached"
    assert getattr(counts, name) == counts.total == most


@pytest.mark.parametrize(("phase", "kind", "name", "most"), OWN_LIMIT)
def test_limits_are_checked_before_the_model_is_asked(phase, kind, name, most) -> None:
    """A kind of replan that has used up its limit is not open any more, before any model is asked."""
    decision = decided(phase, kind)
    assert kind in available_replan_types(phase, LIMITS, spent(decision, most - 1), ReplanCause())
    assert kind not in available_replan_types(phase, LIMITS, spent(decision, most), ReplanCause())


def test_retries_per_action() -> None:
    """Each action is retried three times on a model's word, whatever happened to the others."""
    retry = decided(kind="retry")
    counts = ReplanCounts()
    for _ in range(3):
        assert make_ruling(retry, LIMITS, counts, ReplanCause(action="a")).is_executable
        counts = counts.add_replan(retry, ReplanCause(action="a"))

    ruling = make_ruling(retry, LIMITS, counts, ReplanCause(action="a"))
    assert (ruling.override, ruling.reason) == ("limit", "the limit of 3 retries of action 'a' is reached")
    assert ReplanType.RETRY not in available_replan_types(EXECUTION, LIMITS, counts, ReplanCause(action="a"))
    assert make_ruling(retry, LIMITS, counts, ReplanCause(action="b")).is_executable
    assert ReplanType.RETRY in available_replan_types(EXECUTION, LIMITS, counts, ReplanCause(action="b"))


def test_retry_of_nothing() -> None:
    """A retry without an executed action is no replan and spends nothing."""
    ruling = make_ruling(decided(kind="retry"), LIMITS, ReplanCounts(), ReplanCause())
    assert (ruling.kind, ruling.override) == ("continue", None)
    assert ReplanType.RETRY not in available_replan_types(EXECUTION, LIMITS, ReplanCounts(), ReplanCause())


def test_total() -> None:
    """Ten replans of all kinds are the end of replanning, retries included, in every phase."""
    counts = ReplanCounts()
    for number in range(10):
        assert available_replan_types(GOAL, LIMITS, counts, ReplanCause())
        retried = ReplanCause(action=f"a{number}")
        assert make_ruling(decided(kind="retry"), LIMITS, counts, retried).is_executable
        counts = counts.add_replan(decided(kind="retry"), retried)

    for phase in Phase:
        assert available_replan_types(phase, LIMITS, counts, ReplanCause(action="new")) == ()
    ruling = make_ruling(decided(kind="retry"), LIMITS, counts, ReplanCause(action="new"))
    assert (ruling.override, ruling.reason) == ("limit", "the limit of 10 replans in total is reached")


def test_only_the_total_bounds_goal_revisions() -> None:
    """Understanding the goal again has no limit of its own."""
    revision = decided(GOAL, "goal_revision")
    assert make_ruling(revision, LIMITS, spent(revision, 9), numbered(20)).is_executable
    assert make_ruling(revision, LIMITS, spent(revision, 10), numbered(20)).override == "limit"


@pytest.mark.parametrize(("level", "name"), [(3, "regenerations"), (4, "redecompositions"), (5, None)])
def test_full_replan_counts_as_what_it_does(level, name) -> None:
    """A full replan spends the limit of the phase that it returns to, so that no limit is escaped by another name."""
    full = decided(kind="full_replan", replan_level=level)
    counts = spent(full, 3)
    assert make_ruling(full, LIMITS, counts, numbered(20)).override == (None if name is None else "limit")
    assert name is None or getattr(counts, name) == 3
    assert ReplanType.FULL_REPLAN in available_replan_types(EXECUTION, LIMITS, counts, ReplanCause())


def test_limit_of_zero() -> None:
    """A limit of zero means never."""
    for phase, kind, name, _ in OWN_LIMIT:
        assert (
            make_ruling(decided(phase, kind), limited(**{name: 0}), ReplanCounts(), ReplanCause()).override == "limit"
        )
    assert available_replan_types(EXECUTION, replace(LIMITS, total=0), ReplanCounts(), FETCH) == ()
    assert (
        make_ruling(decided(kind="retry"), replace(LIMITS, action_retries=0), ReplanCounts(), FETCH).override == "limit"
    )


def test_switched_off() -> None:
    """With replanning switched off only a plan that was carried out may be revised, as often as its own limit says."""
    off = replace(LIMITS, enabled=False)
    left = {phase: available_replan_types(phase, off, ReplanCounts(), FETCH) for phase in Phase}
    assert left.pop(Phase.REFLECTION) == (ReplanType.PLAN_REVISION,)
    assert set(left.values()) == {()}
    assert available_replan_types(Phase.REFLECTION, replace(off, plan_revisions=0), ReplanCounts(), FETCH) == ()
    ruling = make_ruling(decided(), off, ReplanCounts(), FETCH)
    assert (ruling.override, ruling.reason) == ("limit", "replanning is switched off")


def test_open_types_without_limits_reached() -> None:
    """At the start everything that a phase allows is open, but for the decision that nothing is needed."""
    for phase in Phase:
        expected = tuple(kind for kind in ALLOWED_REPLANS[phase] if kind is not ReplanType.NONE)
        assert available_replan_types(phase, LIMITS, ReplanCounts(), FETCH) == expected


def test_retries_are_not_shared() -> None:
    """Retries of one action do not use up those of another."""
    counts = (
        ReplanCounts()
        .add_replan(decided(kind="retry"), ReplanCause(action="a"))
        .add_replan(decided(kind="retry"), ReplanCause(action="b"))
    )
    assert counts.retries == {"a": 1, "b": 1}


def test_only_success_resets() -> None:
    """A success gives an action its retries back, and resets nothing else."""
    counts = spent(decided(), 2, lineage="fetch")
    counts = counts.add_replan(decided(kind="retry"), FETCH).add_replan(decided(kind="retry"), ReplanCause(action="b"))
    assert counts.reset_retries("fetch#2") == counts.model_copy(update={"retries": {"b": 1}})
    assert counts.reset_retries("unknown") == counts


def test_goal_revision_resets_nothing() -> None:
    """Understanding the goal again leaves every count as it was, and adds itself."""
    counts = spent(decided(), 2, lineage="fetch").add_replan(decided(kind="retry"), FETCH)
    revised = counts.add_replan(decided(kind="goal_revision"), FETCH)
    before, after = counts.model_dump(), revised.model_dump()
    assert after["total"] == before["total"] + 1
    for name in ("retries", "partial_replans", "redecompositions", "regenerations", "plan_revisions", "clarifications"):
        assert after[name] == before[name]


def test_counted_before_it_runs() -> None:
    """A replan is counted when it begins, so that one that fails has cost the same."""
    assert ReplanCounts().add_replan(decided(), FETCH).total == 1


def test_counts_are_json() -> None:
    """Counts are stored and read as JSON without loss, those of each phase included."""
    counts = (
        spent(decided(), 2, lineage="fetch")
        .add_replan(decided(GOAL, "goal_revision"), ReplanCause("x"))
        .add_clarification()
        .add_loop_warning("mark")
    )
    counts = counts.add_replan(decided(kind="retry"), FETCH)
    assert ReplanCounts.model_validate_json(counts.model_dump_json()) == counts
    assert counts.phases == {EXECUTION: 3, GOAL: 1}
    assert ReplanCounts.model_validate_json("{}") == ReplanCounts()


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
def test_bands(confidence, kind) -> None:
    """Each band of confidence has its outcome, and each lower edge belongs to its band."""
    ruling = make_ruling(decided(confidence=confidence), LIMITS, ReplanCounts(), FETCH)
    assert ruling.kind == kind
    assert ruling.is_executable is (confidence >= 0.5)
    assert ruling.override == ("confidence" if kind == "skip" else None)
    assert not ruling.needs_escalation
    assert f"{confidence:g}" in ruling.reason


@pytest.mark.parametrize("confidence", [0.3, 0.4, math.nextafter(0.5, 0)])
def test_asking_is_off(confidence) -> None:
    """If the user may not be asked, replans that need approval are skipped, and all others are executed."""
    quiet = replace(LIMITS, confirm_low_confidence=False)
    ruling = make_ruling(decided(confidence=confidence), quiet, ReplanCounts(), FETCH)
    assert (ruling.kind, ruling.override) == ("skip", "confidence")
    assert ruling.reason.endswith("and 0.5 is needed")
    assert make_ruling(decided(confidence=0.5), quiet, ReplanCounts(), FETCH).kind == "execute_with_warning"


def test_low_confidence_asks() -> None:
    """Between 0.3 and 0.5 a person is asked."""
    assert make_ruling(decided(confidence=0.4), LIMITS, ReplanCounts(), FETCH).kind == "ask"


def test_zero_is_zero() -> None:
    """A confidence of zero is no default: it is skipped, unless the settings let everything pass."""
    assert make_ruling(decided(confidence=0), LIMITS, ReplanCounts(), FETCH).kind == "skip"
    assert (
        ReplanLimits(confirmation_threshold=0, min_threshold=0, immediate_threshold=0).confidence_band(0) == "execute"
    )


@pytest.mark.parametrize("edges", [(0, 0, 0), (0, 0.5, 1), (1, 1, 1), (0.3, 0.3, 0.3)])
def test_edges_in_order(edges) -> None:
    """Bands may be empty, and may reach to both ends."""
    user, minimum, immediate = edges
    assert (
        ReplanLimits(confirmation_threshold=user, min_threshold=minimum, immediate_threshold=immediate).confidence_band(
            1
        )
        == "execute"
    )


@pytest.mark.parametrize(
    "edges",
    [(-0.1, 0.5, 0.8), (0.6, 0.5, 0.8), (0.3, 0.9, 0.8), (0.3, 0.5, 1.1), (math.nan, 0.5, 0.8), (0.3, 0.5, math.nan)],
)
def test_edges_out_of_order(edges) -> None:
    """Edges that are not in order, or not from 0 to 1, are refused with the order that is expected."""
    user, minimum, immediate = edges
    with pytest.raises(SettingsError, match="expected 0 ≤ user ≤ minimum ≤ immediate ≤ 1"):
        ReplanLimits(confirmation_threshold=user, min_threshold=minimum, immediate_threshold=immediate)


def test_negative_limits() -> None:
    """Every limit that is negative is named, together with edges that are out of order."""
    with pytest.raises(SettingsError) as caught:
        ReplanLimits(total=-1, partial_replans=-2, confirmation_threshold=0.9)
    assert [problem.place for problem in caught.value.problems] == ["partial_replans", "total", "confidence"]


def test_limit_before_confidence_before_loop() -> None:
    """Of several reasons against a replan the limit is named first, then the confidence, then the loop."""
    looped = ReplanCounts().add_replan(decided(), FETCH).add_replan(decided(), FETCH)
    unsure = decided(confidence=0.1)
    assert make_ruling(unsure, LIMITS, looped, FETCH).override == "limit"
    assert make_ruling(unsure, replace(LIMITS, partial_replans=9), looped, FETCH).override == "confidence"
    assert make_ruling(decided(confidence=0.4), replace(LIMITS, partial_replans=9), looped, FETCH).override == "loop"


def test_not_wanted_is_not_overridden() -> None:
    """A decision that wants no replan lets the run go on, at any confidence and with every limit reached."""
    for confidence in (0, 1):
        none = decided(kind="none", confidence=confidence)
        ruling = make_ruling(none, replace(LIMITS, total=0), ReplanCounts(), FETCH)
        assert (ruling.kind, ruling.override, ruling.is_executable, ruling.needs_escalation) == (
            "continue",
            None,
            False,
            False,
        )


def test_third_time_is_skipped() -> None:
    """The same replan for the same cause runs twice; the third time it is skipped as a loop."""
    limits = replace(LIMITS, partial_replans=9)
    counts = ReplanCounts()
    for _ in range(2):
        assert make_ruling(decided(), limits, counts, FETCH).is_executable
        counts = counts.add_replan(decided(), FETCH)

    ruling = make_ruling(decided(), limits, counts, FETCH)
    assert (ruling.kind, ruling.override, ruling.needs_escalation) == ("skip", "loop", True)
    assert ruling.reason == "the same partial_replan has run 2 times for the same cause"
    assert ruling.fingerprint == fingerprint(decided(), FETCH)


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_same_trigger_max_count(most) -> None:
    """The number of repetitions is a setting, and may be zero."""
    limits = replace(LOOSE, loop_detection=True, same_trigger=most)
    counts = ReplanCounts()
    for _ in range(most):
        assert make_ruling(decided(), limits, counts, FETCH).is_executable
        counts = counts.add_replan(decided(), FETCH)
    assert make_ruling(decided(), limits, counts, FETCH).override == "loop"


def test_off() -> None:
    """Without loop detection the same runs until a limit is reached."""
    counts = ReplanCounts()
    for _ in range(5):
        counts = counts.add_replan(decided(), FETCH)
    assert make_ruling(decided(), LOOSE, counts, FETCH).is_executable


def test_retries_are_exempt() -> None:
    """Retrying an action for the same cause again and again is no loop."""
    retry = decided(kind="retry")
    counts = ReplanCounts()
    for _ in range(5):
        counts = counts.add_replan(retry, FETCH)
    assert make_ruling(retry, replace(LOOSE, loop_detection=True), counts, FETCH).is_executable
    assert counts.causes == {}


def test_what_is_the_same_cause() -> None:
    """Numbers, addresses, case and space make no other cause, and neither do other actions of the lineage."""
    mark = fingerprint(decided(), FETCH)
    for error in ("HTTP 504 from mirror 12", "http 503  FROM mirror 7\n"):
        assert fingerprint(decided(), replace(FETCH, error=error)) == mark
    assert fingerprint(decided(), replace(FETCH, action="fetch~2#1")) == mark
    assert fingerprint(decided(confidence=0.1, issues_found=["else"]), FETCH) == mark


def test_what_is_another_cause() -> None:
    """Another error, lineage, type or phase is another trigger."""
    others = [
        fingerprint(decided(), replace(FETCH, error="no such file")),
        fingerprint(decided(), replace(FETCH, lineage="build")),
        fingerprint(decided(kind="action_regeneration"), FETCH),
        fingerprint(decided(ACTIONS, "action_regeneration"), FETCH),
    ]
    assert len({fingerprint(decided(), FETCH), *others}) == 5


def test_issues_are_the_cause_where_nothing_failed() -> None:
    """After a phase without an error the issues found are the cause, in any order; else the reasons are."""
    one = decided(DECOMPOSITION, "task_redecomposition", issues_found=["No tests", "too coarse (3 tasks)"])
    other = decided(DECOMPOSITION, "task_redecomposition", issues_found=["too coarse (9 tasks)", "no  tests"])
    reasoned = decided(DECOMPOSITION, "task_redecomposition", reasoning="no tests")
    assert fingerprint(one, ReplanCause()) == fingerprint(other, ReplanCause()) != fingerprint(reasoned, ReplanCause())


def test_lineage() -> None:
    """A task and what replaced it are replanned three times together; the fourth time the task ends blocked."""
    counts = ReplanCounts()
    for number in range(3):
        cause = ReplanCause(f"error {'xyz'[number]}", action=f"fetch~{number}", lineage="fetch")
        assert make_ruling(decided(kind="goal_revision"), LIMITS, counts, cause).blocks is None
        counts = counts.add_replan(decided(kind="goal_revision"), cause)

    ruling = make_ruling(decided(), LIMITS, counts, FETCH)
    assert (ruling.override, ruling.blocks) == ("limit", "fetch")
    assert ruling.reason == "the limit of 3 replans of 'fetch' and its replacements is reached"
    assert available_replan_types(EXECUTION, LIMITS, counts, FETCH) == (ReplanType.RETRY,)
    assert make_ruling(decided(), LIMITS, counts, ReplanCause("other", lineage="build")).is_executable


def test_retries_are_no_replans_of_a_lineage() -> None:
    """Retries leave the count of a lineage alone."""
    assert ReplanCounts().add_replan(decided(kind="retry"), FETCH).lineages == {}


def test_questions_within_their_limit() -> None:
    """A question is asked whether or not a replan is wanted, at most twice in a run."""
    for phase in Phase:
        asking = decided(phase, "none", clarification_needed=True, clarification_questions=["Which branch?"])
        assert make_ruling(asking, LIMITS, ReplanCounts(), ReplanCause()).questions == ("Which branch?",)
        assert make_ruling(asking, LIMITS, ReplanCounts().add_clarification(), ReplanCause()).questions == (
            "Which branch?",
        )
        assert (
            make_ruling(asking, LIMITS, ReplanCounts().add_clarification().add_clarification(), ReplanCause()).questions
            == ()
        )


def test_questions_beside_a_replan() -> None:
    """Questions beside a replan are asked even if the replan itself is overridden."""
    both = decided(clarification_needed=True, clarification_questions=["Which?"])
    assert make_ruling(both, LIMITS, ReplanCounts(), FETCH).questions == ("Which?",)
    assert make_ruling(both, replace(LIMITS, total=0), ReplanCounts(), FETCH).questions == ("Which?",)
    assert make_ruling(decided(clarification_questions=["Which?"]), LIMITS, ReplanCounts(), FETCH).questions == ()


def test_requests_and_questions_share_a_limit() -> None:
    """Clarification requests and questions beside other decisions are counted together."""
    request = decided(GOAL, "clarification_request", clarification_questions=["Which?"])
    assert make_ruling(request, LIMITS, ReplanCounts(), ReplanCause()).questions == ("Which?",)
    refused = make_ruling(request, LIMITS, ReplanCounts().add_clarification().add_clarification(), ReplanCause())
    assert (refused.override, refused.questions) == ("limit", ())


def test_clarification_request_asks_once() -> None:
    """A clarification request of low confidence is not asked about first: it is asked; below that it is not."""
    request = decided(GOAL, "clarification_request", 0.3, clarification_questions=["Which?"])
    asked = make_ruling(request, LIMITS, ReplanCounts(), ReplanCause())
    assert (asked.kind, asked.questions) == ("execute_with_warning", ("Which?",))
    unsure = make_ruling(request.model_copy(update={"confidence": 0.29}), LIMITS, ReplanCounts(), ReplanCause())
    assert (unsure.override, unsure.questions) == ("confidence", ())


def test_limits_of_settings() -> None:
    """The limits by default are those of the settings by default."""
    assert ReplanLimits.from_settings(PlanningSettings()) == LIMITS


def test_every_setting_counts() -> None:
    """Each setting ends up in the limit that it is about."""
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
    assert ReplanLimits.from_settings(settings, replans_per_lineage=13) == ReplanLimits(
        True,
        4,
        5,
        6,
        7,
        8,
        9,
        20,
        13,
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
def test_smaller_of_two_settings(replanning, revisions, most) -> None:
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
kinds = st.sampled_from([(phase, str(kind)) for phase in Phase for kind in ALLOWED_REPLANS[phase]])
wanted = st.builds(
    lambda pair, confidence, level, issues, asks: decided(
        pair[0],
        pair[1],
        confidence,
        replan_level=level,
        issues_found=issues,
        clarification_needed=asks,
        clarification_questions=["Which?"],
    ),
    kinds,
    st.sampled_from([0, 0.3, 0.5, 0.8, 1]),
    st.none() | st.integers(1, 5),
    st.lists(st.sampled_from(["vague", "slow"]), max_size=1),
    st.booleans(),
)
small = st.integers(0, 3)
any_limits = st.builds(
    ReplanLimits,
    clarifications=small,
    redecompositions=small,
    regenerations=small,
    action_retries=small,
    partial_replans=small,
    plan_revisions=small,
    total=st.integers(0, 12),
    replans_per_lineage=small,
    loop_detection=st.booleans(),
    same_trigger=small,
    confirm_low_confidence=st.booleans(),
)


@given(any_limits, st.lists(st.tuples(wanted, causes, st.booleans()), max_size=40))
def test_no_sequence_exceeds_a_limit(limits, sequence) -> None:
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
        for name in (
            "clarifications",
            "redecompositions",
            "regenerations",
            "partial_replans",
            "plan_revisions",
            "total",
        ):
            assert getattr(counts, name) <= getattr(limits, name)
        assert all(times <= limits.action_retries for times in counts.retries.values())
        assert all(times <= limits.replans_per_lineage for times in counts.lineages.values())
        assert not limits.loop_detection or all(times <= limits.same_trigger for times in counts.causes.values())
        assert asked <= limits.clarifications
        assert sum(counts.phases.values()) == counts.total


@given(any_limits, st.lists(st.tuples(wanted, causes), max_size=12), wanted, causes)
def test_what_is_open_agrees_with_what_is_ruled(limits, before, decision, cause) -> None:
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
def test_what_is_executed_does_something(decision, cause) -> None:
    """Whatever is executed returns to a phase, or asks something, and is counted."""
    ruling = make_ruling(decision, LOOSE, ReplanCounts(), cause)
    if ruling.is_executable:
        assert decision.target_phase is not None
        assert decision.replan_type != "clarification_request" or ruling.questions
        assert ReplanCounts().add_replan(decision, cause).total == 1
    else:
        assert not ruling.fingerprint or ruling.kind in ("ask", "skip")

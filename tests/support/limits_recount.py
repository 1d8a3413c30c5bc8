"""Independent recount of the limits of planning mode from a journal, without the code under test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from replanning import Settings, journal
from replanning.plan import JsonObject

ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "goal_understanding": frozenset({"clarification_request", "goal_revision", "none"}),
    "task_decomposition": frozenset({"task_redecomposition", "none"}),
    "action_sequence": frozenset({"action_regeneration", "none"}),
    "execution": frozenset(
        {
            "retry",
            "partial_replan",
            "full_replan",
            "action_regeneration",
            "task_redecomposition",
            "goal_revision",
            "none",
        }
    ),
    "reflection": frozenset({"plan_revision", "none"}),
}
"""Replans that each phase may decide on."""


@dataclass
class Told:
    """Replans of a journal, counted from its decisions and effects.

    Attributes:
        counts: replans that were executed, by what limits call them; `total` is all of them.
        retries: the most retries in a row of each action.
        lineages: replans of each lineage.
        repeats: replans of a type after a phase, for the same cause.
        broken: what must not be, in words.
    """

    counts: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    lineages: Counter[str] = field(default_factory=Counter)
    repeats: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


_COUNTED: Final = {
    "clarification_request": "clarifications",
    "task_redecomposition": "redecompositions",
    "action_regeneration": "regenerations",
    "partial_replan": "partial_replans",
    "plan_revision": "plan_revisions",
}
_FULL: Final = {3: "regenerations", 4: "redecompositions", 5: "goals"}
_FULL_TARGETS: Final = {"action_sequence": 3, "task_decomposition": 4, "goal_understanding": 5}


def told(records: Sequence[journal.Record]) -> Told:
    """Count the executed replans from records alone."""
    found, streak, asked, counted = Told(), Counter[str](), set[str](), set[str]()
    approved = any(isinstance(r.body, journal.QuestionAnswered) and r.body.verdict in _YES for r in records)
    for record in records:
        body = record.body
        if not isinstance(body, journal.PlanningNoted) or body.type not in ("replan", "held"):
            continue
        if body.type == "held":
            about = body.data["considered"]
            if body.data["why"] == "clarification" and isinstance(about, dict):
                asked.add(str(about["replan_id"]))  # a process may have ended before it could ask
            found.counts["asked"] = len(asked)
            continue
        done, counts = body.data.get("record"), body.data["counts"]
        assert isinstance(counts, dict)
        known = counts["retries"]
        assert isinstance(known, dict)
        for action_id in [name for name in streak if name not in known]:
            del streak[action_id]  # it succeeded
        if isinstance(done, dict) and done["executed"] and str(done["replan_id"]) not in counted:
            _count(found, streak, done, approved)
            counted.add(str(done["replan_id"]))  # one that comes to nothing later is on record once more
    return found


_YES: Final = ("approve", "modify")


def _count(found: Told, streak: Counter[str], done: JsonObject, approved: bool) -> None:
    kind, said, cause = str(done["replan_type"]), done["llm_decision"], done["cause"]
    assert isinstance(said, dict)
    assert isinstance(cause, dict)
    found.counts["total"] += 1
    if kind not in ALLOWED[str(done["phase"])] or kind == "none":
        found.broken.append(f"{done['phase']} did {kind}")
    confidence = float(str(done["confidence"]))
    sure = 0.3 if approved or kind == "clarification_request" else 0.5
    if confidence < sure:
        found.broken.append(f"{kind} was done with a confidence of {confidence}")
    if kind == "full_replan":
        level = said["replan_level"]
        target = level if level in _FULL else _FULL_TARGETS.get(str(said["target_phase"]), 4)
        assert isinstance(target, int)
        found.counts[_FULL[target]] += 1
    found.counts[_COUNTED.get(kind, kind)] += 1
    if kind == "retry":
        streak[str(cause["action"])] += 1
        found.retries[str(cause["action"])] = max(streak[str(cause["action"])], found.retries[str(cause["action"])])
        return
    if cause["lineage"] is not None:
        found.lineages[str(cause["lineage"])] += 1
    about = [cause["lineage"], cause["error"]] if cause["error"] else said["issues_found"] or said["reasoning"]
    found.repeats[f"{done['phase']} {kind} {about}"] += 1


def exceeded(seen: Told, settings: Settings, *, reached: bool = False) -> list[str]:
    """Return the exceeded limits, or those that were just reached, each beginning with its name."""
    replanning = settings.planning.replanning
    revisions, most_replans = settings.planning.revision.max_revisions, replanning.overall.max_total_replans
    if replanning.enabled:
        revisions = min(revisions, replanning.reflection.max_plan_revisions)
    else:
        most_replans = min(revisions, most_replans)  # nothing but revisions is left
    most = {
        "clarifications": replanning.goal_understanding.max_clarification_requests,
        "asked": replanning.goal_understanding.max_clarification_requests,
        "redecompositions": replanning.task_decomposition.max_redecomposition_attempts,
        "regenerations": replanning.action_sequence.max_regeneration_attempts,
        "partial_replans": replanning.execution.max_partial_replans,
        "plan_revisions": revisions,
        "total": most_replans,
    }
    found = [(name, seen.counts[name], limit) for name, limit in most.items()]
    each = {
        "retries": (seen.retries, replanning.execution.max_action_retries),
        "lineage": (seen.lineages, settings.limits.replans_per_lineage),
        "repeats": (seen.repeats, replanning.overall.same_trigger_max_count),
    }
    found += [(f"{name} of {key}", count, limit) for name, (all_, limit) in each.items() for key, count in all_.items()]
    return [
        f"{name}: {count} of {limit}"
        for name, count, limit in found
        if count > limit or (reached and count == limit > 0)
    ]


def overrun(records: Sequence[journal.Record], settings: Settings) -> list[str]:
    """Return the overrun budgets; a model whose reply is too long may not be asked again."""
    used = [record.body.usage for record in records if isinstance(record.body, journal.UsageCharged)]
    budget, found = settings.budget, list[str]()
    if budget.calls is not None and (calls := sum(one.calls for one in used)) > budget.calls:
        found.append(f"{calls} of {budget.calls} calls")
    if budget.tokens is not None and (tokens := sum(one.tokens for one in used[:-1])) > budget.tokens:
        found.append(f"{tokens} of {budget.tokens} tokens, and one more call")
    return found


def begun(records: Sequence[journal.Record]) -> int:
    """Return the number of attempts at phases and actions."""
    return sum(isinstance(record.body, journal.AttemptStarted) for record in records)


def answered(records: Sequence[journal.Record]) -> int:
    """Return the number of answers, timeouts and requests for a replan."""
    wishes = (record.body for record in records if isinstance(record.body, journal.TriggerFired))
    answers = sum(isinstance(record.body, journal.QuestionAnswered) for record in records)
    return answers + sum(isinstance(body.trigger, journal.HumanRequest) for body in wishes)

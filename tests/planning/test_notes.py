"""Notes of planning mode in a journal: their stored form stays, so that earlier journals can be read."""

import pytest

from replanning.journal import NoteAdded
from replanning.plan import JsonObject
from replanning.planning.notes import read_note

RULING: JsonObject = {
    "kind": "execute",
    "reason": "its confidence is 0.9",
    "override": None,
    "questions": [],
    "blocks": None,
    "fingerprint": "execution:retry:0",
}
CONSIDERED: JsonObject = {
    "replan_id": "p1",
    "phase": "execution",
    "cause": {"error": "no such file", "action": "write", "lineage": "write"},
    "llm_decision": {"replan_needed": True, "replan_type": "retry"},
    "problem": "",
    "model_unavailable": False,
    "ruling": RULING,
    "timestamp": "2026-01-01T00:00:00+00:00",
    "seconds": 0.5,
    "instead_of": None,
}
COUNTS: JsonObject = {
    "considered": 1,
    "total": 1,
    "clarifications": 0,
    "redecompositions": 0,
    "regenerations": 0,
    "partial_replans": 0,
    "plan_revisions": 0,
    "phases": {"execution": 1},
    "retries": {"write": 1},
    "lineages": {},
    "causes": {},
    "warned": [],
}
SUBTASK: JsonObject = {
    "id": "write",
    "description": "Write it",
    "dependencies": [],
    "estimated_complexity": "low",
    "required_tools": [],
}
ACTION: JsonObject = {
    "task_id": "write",
    "action_type": "",
    "tool": "write_file",
    "arguments": {"path": "a.txt", "mode": None},
    "purpose": "",
    "expected_outcome": "",
    "fallback_strategy": None,
    "may_fail": False,
}
ACTIONS: JsonObject = {"execution_order": [], "actions": [ACTION], "renamed": {}}
REFLECTION: JsonObject = {
    "action_id": "write",
    "status": "failure",
    "evaluation": "",
    "alignment_with_plan": "",
    "issues_identified": ["no such file"],
    "plan_revision_needed": True,
}

STORED: list[tuple[str, JsonObject]] = [
    ("replan", {"stage": "applying", "counts": COUNTS, "considered": CONSIDERED, "record": None}),
    ("judged", {"task": "write#1", "considered": CONSIDERED}),
    ("output", {"task": "reflection", "phase": "reflection", "value": {"not_judged": "no reply"}}),
    ("ahead", {"replan": "", "parts": {"action_sequence": ACTIONS}}),
    (
        "plan",
        {
            "number": 1,
            "task": "action_sequence",
            "reason": "",
            "decomposition": {"reasoning": "", "subtasks": [SUBTASK], "renamed": {}},
            "action_plan": ACTIONS,
            "tasks": {"write": "write"},
            "kept": [],
            "lineage": "",
        },
    ),
    (
        "held",
        {
            "task": "write",
            "why": "clarification",
            "text": "Where to?",
            "target": None,
            "questions": ["Where to?"],
            "assumptions": [],
            "risk": "",
            "due": 60.0,
            "verdict": "",
            "by": "",
            "considered": None,
        },
    ),
    ("assumed", {"questions": ["Where to?"], "assumptions": ["to a.txt"]}),
    ("call", {"task": "write#1", "arguments": {"path": "a.txt", "mode": None}}),
    ("call", {"task": "write#2", "arguments": {}, "comment": "The usual place."}),
    (
        "reflection",
        {"task": "write#1", "action": "write", "phase": "reflection", "reflection": REFLECTION},
    ),
    ("reflection", {"task": "write#2", "action": "write", "error": "the model gave no reply"}),
    ("reflection", {"by": "ada", "feedback": "Shorter, please."}),
    (
        "completion",
        {
            "phase": "completion",
            "comment": "Done.",
            "summary": {"goal_achieved": True, "tasks_completed": 1, "tasks_failed": 0},
            "done": True,
            "status": "success",
        },
    ),
    ("heard", {"comments": ["12", "13"], "why": "they were there before the run"}),
]
"""Notes as journals have them."""


@pytest.mark.parametrize(("kind", "data"), STORED)
def test_the_stored_form_stays(kind, data):
    """A note that is read from a journal has the same stored form again."""
    note = read_note(NoteAdded(kind, data))
    assert note is not None
    assert (note.note_type, note.to_json()) == (kind, data)


@pytest.mark.parametrize(("kind", "data"), STORED)
def test_further_fields_are_ignored(kind, data):
    """A note with a field of another version is read without it."""
    note = read_note(NoteAdded(kind, {**data, "of_another_version": 1}))
    assert note is not None
    assert note.to_json() == data


def test_notes_of_other_programs_are_none_of_ours():
    """A note whose type planning mode does not have is left to the program that made it."""
    assert read_note(NoteAdded("price-checked", {"price": 3})) is None

"""Export of a history as JSON, and its import, which reads only the exported journal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from pydantic_core import from_json

from replanning.changes import dump_change
from replanning.errors import JournalCorrupt, ReplanningError
from replanning.history.effects import RunEffect
from replanning.history.events import DroppedTrigger, GoalEdit, PlanEdit, ReplanEvent
from replanning.history.history import MAX_EVENTS, ReplanHistory
from replanning.history.wording import format_iso_time
from replanning.journal.records import Candidate, Record, RunOpened, RunResumed, Trigger
from replanning.journal.store import decode_body, encode_body
from replanning.plan.messages import brief_repr
from replanning.plan.types import JsonObject, JsonValue

FORMAT: Final = "replanning-history"

FORMAT_VERSION: Final = 1

MAX_IMPORT_CHARS: Final = 512 * 1024 * 1024
"""Longest text that can be imported, in characters."""

_MAX_EPOCH_SECONDS: Final = 1e18


def history_json(history: ReplanHistory) -> JsonObject:
    """Return the whole history: metrics, entries and journal."""
    document = summary_json(history, history.events)
    journal: list[JsonValue] = []
    for record in history.records(0):
        entry: JsonObject = {"seq": record.seq, "at": record.at, "kind": record.body.kind}
        # In the encoding of stores, because the import reads it with their checks.
        body: JsonObject = json.loads(encode_body(record))
        if isinstance(record.body, RunOpened | RunResumed):
            body.pop("directory", None)  # a path of this machine is of no use to readers
        entry["body"] = body
        journal.append(entry)
    document["journal"] = journal
    return document


def summary_json(history: ReplanHistory, events: Iterable[ReplanEvent]) -> JsonObject:
    """Return the metrics and the given replans, with all other entries."""
    metrics: JsonObject = asdict(history.metrics)
    # Null if no outcome is known: 0 would say that all replans failed.
    metrics["success_rate"] = history.metrics.success_rate
    forked_from: JsonValue = None
    if history.forked_from is not None:
        forked_from = list(history.forked_from)
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "run": history.run,
        "name": history.plan.name,
        "objective": history.goal.objective,
        "forked_from": forked_from,
        "status": history.status,
        "reason": history.reason,
        "stale": {task_id: list(causes) for task_id, causes in history.stale.items()},
        "unstored": dict(history.unstored),
        "started": format_iso_time(history.started),
        "updated": format_iso_time(history.updated),
        "revision": history.revision,
        "evaluation": asdict(history.evaluate()),
        "metrics": metrics,
        "events": list(map(event_json, events)),
        "edits": list(map(edit_json, history.edits)),
        "goals": list(map(_goal_edit_json, history.goal_edits)),
        "dropped": list(map(_dropped_json, history.dropped_triggers)),
    }


def event_json(event: ReplanEvent) -> JsonObject:
    """Return a replan as JSON."""
    chosen = None
    if event.chosen is not None:
        chosen = candidate_json(event.chosen)
    decided = None
    if event.decided_at is not None:
        decided = format_iso_time(event.decided_at)
    question = None
    if event.question is not None:
        question = asdict(event.question)
    return {
        "replan_id": event.replan,
        "timestamp": format_iso_time(event.at),
        "triggers": list(map(_trigger_json, event.triggers)),
        "candidates": list(map(candidate_json, event.candidates)),
        "rejected": list(map(candidate_json, event.rejected)),
        "notes": list(event.notes),
        "decision": event.decision,
        "rule": event.rule,
        "reason": event.reason,
        "by": event.by,
        "chosen": chosen,
        "changes": list(map(dump_change, event.changes)),
        "revision_before": event.before,
        "revision_after": event.after,
        "executed": event.executed,
        "result": event.outcome,
        "duration": event.duration,
        "decided": decided,
        "waited": event.waited,
        "question": question,
        "spent": dict(asdict(event.spent)),
    }


def edit_json(edit: PlanEdit) -> JsonObject:
    """Return an edit by hand as JSON."""
    return {
        "timestamp": format_iso_time(edit.at),
        "by": edit.by,
        "reason": edit.reason,
        "changes": list(map(dump_change, edit.changes)),
        "revision_before": edit.before,
        "revision_after": edit.after,
    }


def effect_json(effect: RunEffect) -> JsonObject:
    """Return a call that has changed something, or may have, as JSON."""
    ended = None
    if effect.ended is not None:
        ended = format_iso_time(effect.ended)
    return {**asdict(effect), "started": format_iso_time(effect.started), "ended": ended}


def candidate_json(candidate: Candidate) -> JsonObject:
    """Return an alternative with its score, or with the reason why it was rejected."""
    alternative = candidate.alternative
    document: JsonObject = alternative.model_dump(
        mode="json", exclude={"changes"}, exclude_none=True
    )
    # Not dumped by the model, because a change of the journal leaves out its defaults.
    document["changes"] = list(map(dump_change, alternative.changes))
    document["score"] = None
    if candidate.score is not None:
        document["score"] = dict(asdict(candidate.score))
    document["rejected"] = candidate.rejected
    return document


def _trigger_json(trigger: Trigger) -> JsonObject:
    fields: JsonObject = trigger.model_dump(
        mode="json", exclude_defaults=True, exclude={"run", "at"}
    )
    return {"kind": trigger.kind, "timestamp": format_iso_time(trigger.at), **fields}


def _goal_edit_json(edit: GoalEdit) -> JsonObject:
    return {
        "timestamp": format_iso_time(edit.at),
        "by": edit.by,
        "reason": edit.reason,
        "changed": list(edit.changed),
        "goal": edit.goal.model_dump(mode="json", exclude_defaults=True),
    }


def _dropped_json(drop: DroppedTrigger) -> JsonObject:
    return {
        "timestamp": format_iso_time(drop.at),
        "reason": drop.reason,
        "trigger": _trigger_json(drop.trigger),
    }


def export_history(history: ReplanHistory) -> str:
    """Return the whole history as JSON text.

    Metrics and entries are for readers, the journal is for the import.
    """
    return json.dumps(history_json(history), indent=1) + "\n"


def import_history(text: str, *, max_events: int = MAX_EVENTS) -> ReplanHistory:
    """Return the history that `export_history` wrote, complete.

    Args:
        text: the exported JSON.
        max_events: number of replans to keep, the newest.

    Raises:
        JournalCorrupt: the text is not an exported history, or its records are wrong, missing or
            contradictory.
    """
    journal = _exported_journal(text)
    # Numbered from 1 without gaps: a cut-out record would give another plan, not an error.
    records = []
    for number, entry in enumerate(journal, 1):
        records.append(_imported_record(number, entry))
    if not isinstance(records[0].body, RunOpened):
        raise JournalCorrupt("journal[0]: a journal begins with a record of kind 'run-opened'")
    history = ReplanHistory(lambda after: records[after:], max_events=max_events)
    try:
        # Each record may be valid by itself and still name a task that never existed.
        history.replay()
    except ReplanningError as error:
        text = f"the records of this history contradict one another: {error}"
        raise JournalCorrupt(text) from error
    return history


def _exported_journal(text: str) -> list[JsonValue]:
    if len(text) > MAX_IMPORT_CHARS:
        raise JournalCorrupt(f"this history has more than {MAX_IMPORT_CHARS} characters")
    try:
        document: JsonValue = from_json(text)
    except ValueError as error:
        raise JournalCorrupt(f"not an exported history: the text is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise JournalCorrupt(f"not an exported history: its `format` is not {FORMAT!r}")
    version = document.get("version")
    # A later version may give the same fields another meaning.
    if version != FORMAT_VERSION:
        raise JournalCorrupt(
            f"this history has version {brief_repr(version)}, this library reads version "
            f"{FORMAT_VERSION}; import it with the version of the library that exported it"
        )
    journal = document.get("journal")
    if not isinstance(journal, list) or not journal:
        why = "it is an extract; export the whole history to import it"
        raise JournalCorrupt(f"this history has no `journal`: {why}")
    return journal


def _imported_record(number: int, entry: JsonValue) -> Record:
    place = f"journal[{number - 1}]"
    if not isinstance(entry, dict) or not entry.keys() >= {"seq", "at", "kind", "body"}:
        expected = "a record has seq, at, kind and body"
        raise JournalCorrupt(f"{place}: {expected}; got {brief_repr(entry)}")
    seq = entry["seq"]
    # `True` equals 1 in Python, but it is not a number in JSON.
    if seq != number or isinstance(seq, bool):
        got = f"{brief_repr(seq)}: records are missing or out of order"
        raise JournalCorrupt(f"{place}: expected record {number}, got {got}")
    at = entry["at"]
    if (
        not isinstance(at, float | int)
        or isinstance(at, bool)
        or not -_MAX_EPOCH_SECONDS < at < _MAX_EPOCH_SECONDS
    ):
        got = brief_repr(at)
        raise JournalCorrupt(f"{place}.at: expected seconds since the epoch, got {got}")
    # Decoded as a store decodes it, with its checks of every field.
    try:
        kind = str(entry["kind"])
        body = decode_body(kind, json.dumps(entry["body"]))
        return Record(number, float(at), body)
    except ValueError as error:
        raise JournalCorrupt(f"{place}: {error}") from error

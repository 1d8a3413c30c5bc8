"""Export of a history as JSON, and import. Only the exported journal is imported; the rest is for readers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from replanning.changes import dump_change
from replanning.errors import JournalCorrupt, ReplanningError
from replanning.history.events import PlanEdit, ReplanEvent
from replanning.history.history import MAX_EVENTS, ReplanHistory
from replanning.history.wording import format_iso_time
from replanning.journal.records import Candidate, Record, RunOpened, Trigger
from replanning.journal.store import decode_body, encode_body
from replanning.plan.messages import brief_repr, checked
from replanning.plan.types import JsonObject, JsonValue

FORMAT: Final = "replanning-history"

FORMAT_VERSION: Final = 1

MAX_IMPORT_CHARS: Final = 512 * 1024 * 1024
"""Longest text that can be imported, in characters."""

_MAX_EPOCH_SECONDS: Final = 1e18


def history_json(history: ReplanHistory) -> JsonObject:
    """Return the whole history: metrics, entries and journal."""
    document = summary_json(history, history.events)
    document["journal"] = [
        {
            "seq": record.seq,
            "at": record.at,
            "kind": record.body.kind,
            "body": json.loads(encode_body(record)),
        }
        for record in history.records(0)
    ]
    return document


def summary_json(history: ReplanHistory, events: Iterable[ReplanEvent]) -> JsonObject:
    """Return the metrics and the given replans, with all other entries."""
    metrics = history.metrics
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "run": history.run,
        "name": history.plan.name,
        "objective": history.goal.objective,
        "forked_from": list(history.forked_from) if history.forked_from else None,
        "status": history.status,
        "reason": history.reason,
        "stale": {task_id: list(causes) for task_id, causes in history.stale.items()},
        "unstored": dict(history.unstored),
        "started": format_iso_time(history.started),
        "updated": format_iso_time(history.updated),
        "revision": history.revision,
        "evaluation": asdict(history.evaluate()),
        "metrics": {
            **asdict(metrics),
            "success_rate": metrics.success_rate,
        },  # null if no outcome is known
        "events": [event_json(event) for event in events],
        "edits": [edit_json(edit) for edit in history.edits],
        "goals": [
            {
                "timestamp": format_iso_time(edit.at),
                "by": edit.by,
                "reason": edit.reason,
                "changed": list(edit.changed),
                "goal": edit.goal.model_dump(mode="json", exclude_defaults=True),
            }
            for edit in history.goal_edits
        ],
        "dropped": [
            {
                "timestamp": format_iso_time(drop.at),
                "reason": drop.reason,
                "trigger": _trigger_json(drop.trigger),
            }
            for drop in history.dropped_triggers
        ],
    }


def event_json(event: ReplanEvent) -> JsonObject:
    """Return a replan as JSON."""
    question = event.question
    return {
        "replan_id": event.replan,
        "timestamp": format_iso_time(event.at),
        "triggers": [_trigger_json(trigger) for trigger in event.triggers],
        "candidates": [candidate_json(candidate) for candidate in event.candidates],
        "rejected": [candidate_json(candidate) for candidate in event.rejected],
        "notes": list(event.notes),
        "decision": event.decision,
        "rule": event.rule,
        "reason": event.reason,
        "by": event.by,
        "chosen": None if event.chosen is None else candidate_json(event.chosen),
        "changes": [dump_change(change) for change in event.changes],
        "revision_before": event.before,
        "revision_after": event.after,
        "executed": event.executed,
        "result": event.outcome,
        "duration": event.duration,
        "decided": None if event.decided_at is None else format_iso_time(event.decided_at),
        "waited": event.waited,
        "question": None if question is None else dict(asdict(question)),
        "spent": dict(asdict(event.spent)),
    }


def edit_json(edit: PlanEdit) -> JsonObject:
    """Return an edit by hand as JSON."""
    return {
        "timestamp": format_iso_time(edit.at),
        "by": edit.by,
        "reason": edit.reason,
        "changes": [dump_change(change) for change in edit.changes],
        "revision_before": edit.before,
        "revision_after": edit.after,
    }


def candidate_json(candidate: Candidate) -> JsonObject:
    """Return an alternative with its score, or with the reason why it was rejected."""
    alternative = candidate.alternative
    rest: JsonObject = alternative.model_dump(mode="json", exclude={"changes"}, exclude_none=True)
    return {
        **rest,
        "changes": [dump_change(change) for change in alternative.changes],
        "score": None if candidate.score is None else dict(asdict(candidate.score)),
        "rejected": candidate.rejected,
    }


def _trigger_json(trigger: Trigger) -> JsonObject:
    fields: JsonObject = trigger.model_dump(
        mode="json", exclude_defaults=True, exclude={"run", "at"}
    )
    return {"kind": trigger.kind, "timestamp": format_iso_time(trigger.at), **fields}


@checked
def export_history(history: ReplanHistory) -> str:
    """Return the whole history as JSON text: metrics and entries for readers, and the journal for the import."""
    return json.dumps(history_json(history), indent=1) + "\n"


@checked
def import_history(text: str, *, max_events: int = MAX_EVENTS) -> ReplanHistory:
    """Return the history that `export_history` wrote, with everything that it contained.

    Args:
        text: the exported JSON.
        max_events: number of replans to keep, the newest.

    Raises:
        JournalCorrupt: the text is no exported history, or its records are wrong, missing or contradictory.
    """
    if len(text) > MAX_IMPORT_CHARS:
        raise JournalCorrupt(f"this history has more than {MAX_IMPORT_CHARS} characters")
    try:
        document: JsonValue = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JournalCorrupt(f"not an exported history: the text is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise JournalCorrupt(f"not an exported history: its `format` is not {FORMAT!r}")
    if document.get("version") != FORMAT_VERSION:
        raise JournalCorrupt(
            f"this history has version {brief_repr(document.get('version'))}, this library reads version "
            f"{FORMAT_VERSION}; import it with the version of the library that exported it"
        )
    journal = document.get("journal")
    if not isinstance(journal, list) or not journal:
        raise JournalCorrupt(
            "this history has no `journal`: it is an extract; export the whole history to import it"
        )
    records = []
    for number, entry in enumerate(journal, 1):
        place = f"journal[{number - 1}]"
        if not isinstance(entry, dict) or not entry.keys() >= {"seq", "at", "kind", "body"}:
            raise JournalCorrupt(
                f"{place}: a record has seq, at, kind and body; got {brief_repr(entry)}"
            )
        seq, at, kind, body = entry["seq"], entry["at"], entry["kind"], entry["body"]
        if seq != number or isinstance(seq, bool):
            got = f"{brief_repr(seq)}: records are missing or out of order"
            raise JournalCorrupt(f"{place}: expected record {number}, got {got}")
        if (
            not isinstance(at, float | int)
            or isinstance(at, bool)
            or not -_MAX_EPOCH_SECONDS < at < _MAX_EPOCH_SECONDS
        ):
            raise JournalCorrupt(
                f"{place}.at: expected seconds since the epoch, got {brief_repr(at)}"
            )
        try:
            records.append(Record(number, float(at), decode_body(str(kind), json.dumps(body))))
        except (ValueError, RecursionError) as error:
            raise JournalCorrupt(f"{place}: {error}") from error
    if not isinstance(records[0].body, RunOpened):
        raise JournalCorrupt("journal[0]: a journal begins with a record of kind 'run-opened'")
    history = ReplanHistory(lambda after: records[after:], max_events=max_events)
    try:
        history.replay()
    except ReplanningError as error:
        raise JournalCorrupt(
            f"the records of this history contradict one another: {error}"
        ) from error
    return history

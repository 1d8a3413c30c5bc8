"""Reports as text or Markdown: a whole history, the reasons for one revision, and calibration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Final

from replanning.changes import ReplaceTask
from replanning.history.diff import describe_replacement
from replanning.history.effects import effects_line
from replanning.history.events import (
    Calibration,
    GoalEdit,
    PlanEdit,
    QuestionEntry,
    ReplanEvent,
    ReplanMetrics,
    timeline,
)
from replanning.history.history import ReplanHistory
from replanning.history.wording import (
    HELD_FAILURE_TYPES,
    change_line,
    edit_author,
    evaluation_line,
    format_time,
    format_usage,
    goal_line,
    labelled,
    list_title,
    printable_line,
    printable_lines,
    stale_line,
    status_phrase,
    trigger_cause,
    trigger_kinds_text,
    trigger_line,
)
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Candidate,
    PlanRevised,
    Record,
    RunResumed,
    Score,
)
from replanning.plan.messages import format_duration, pluralise, spoken_id
from replanning.plan.types import AttemptId

_MAX_ITEMS: Final = 8
"""Maximum number of items of one kind in a report."""

_MARKDOWN_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@$^=:-])")
_FENCE: Final = re.compile("`{3,}|~{3,}")


def text_report(history: ReplanHistory, events: Sequence[ReplanEvent] | None = None) -> str:
    """Return a history as text: a head, then each entry in chronological order.

    Args:
        history: the history.
        events: the replans to show, instead of all entries and dropped triggers.
    """
    lines = _report_head(history)
    # Selected replans are an extract; nothing else may appear in it.
    entries: Sequence[ReplanEvent | PlanEdit | GoalEdit]
    if events is None:
        entries = timeline([*history.goal_edits, *history.entries])
        nothing = "no replans"
    else:
        entries = events
        nothing = "no replan matches"
    for entry in entries:
        match entry:
            case GoalEdit():
                lines += _goal_edit_lines(entry)
            case PlanEdit():
                lines.append(_entry_title(entry))
                lines += _applied_lines(entry)
            case ReplanEvent():
                lines += _replan_lines(entry)
        lines.append("")
    if not entries:
        lines += [nothing, ""]
    if events is None and history.dropped_triggers:
        lines.append("dropped triggers:")
        newest = list(history.dropped_triggers)[-_MAX_ITEMS:]
        for drop in newest:
            at = format_time(drop.at)
            cause = trigger_cause(drop.trigger)
            reason = printable_line(drop.reason)
            lines.append(f"  {at} {drop.trigger.kind}: {cause}: {reason}")
        lines.append("")
    return "\n".join(lines)


def _report_head(history: ReplanHistory) -> list[str]:
    title = f"run {printable_line(history.run)}"
    # Text of the plan goes through `printable_line`: it must not move the cursor of a terminal.
    name = history.plan.name
    if name:
        title += f" {printable_line(name)!r}"
    origin = ""
    if history.forked_from is not None:
        parent, revision = history.forked_from
        origin = f", forked from revision {revision} of {printable_line(parent)}"
    reason = labelled(": ", printable_line(history.reason))
    lines = [
        f"{title} {status_phrase(history.status)}{reason}",
        f"  goal:     {printable_line(history.goal.objective)}",
        f"  started:  {format_time(history.started)}{origin}",
    ]
    resumed = _resumed_text(history)
    if resumed:
        lines.append(f"  resumed:  {resumed}")
    lines += [
        f"  progress: {_progress_line(history)}",
        f"  replans:  {_metrics_line(history.metrics)}",
    ]
    effects = _effects_text(history)
    if effects:
        lines.append(f"  effects:  {effects}")
    if history.stale:
        lines.append(f"  stale:    {stale_line(history.stale)}")
    notes = _notes_text(history)
    if notes:
        lines.append(f"  notes:    {notes}")
    for task_id, why in list(history.unstored.items())[:_MAX_ITEMS]:
        lines.append(f"  unstored: the output of {printable_line(task_id)}: {printable_line(why)}")
    lines.append("")
    return lines


def _resumed_text(history: ReplanHistory) -> str:
    """Return when a process resumed the run last, and how often that was; "" if none has."""
    text = ""
    count = 0
    for _, at, body in history.records(0):
        if isinstance(body, RunResumed):
            count += 1
            text = f"{format_time(at)}, after {format_duration(body.waited)} without a process"
    if count > 1:
        text += f"; {count} times in all"
    return text


def _progress_line(history: ReplanHistory) -> str:
    """Return the progress of a run in one line, without a remaining time.

    A history is read when nothing is executed, too, and `status` knows whether the run continues.
    """
    return evaluation_line(replace(history.evaluate(), remaining_seconds=None))


def _effects_text(history: ReplanHistory) -> str:
    """Return the number of effects; "" if the run declares none."""
    effects = history.effects()
    if all(effect.can_undo == "unknown" for effect in effects):
        return ""
    return effects_line(effects)


def _notes_text(history: ReplanHistory) -> str:
    """Return the number of notes of programs by type; "" without notes."""
    counts = Counter(note.type for note in history.notes())
    shown = [f"{count} {printable_line(kind)}" for kind, count in counts.most_common(_MAX_ITEMS)]
    return ", ".join(shown)


def _goal_edit_lines(edit: GoalEdit) -> list[str]:
    by = labelled(" by ", printable_line(edit.by))
    goal = goal_line(edit.goal, edit.changed)
    at = format_time(edit.at)
    lines = [f"goal · {at} · changed{by}: {goal}"]
    if edit.reason:
        lines.append(f"    reason:   {printable_line(edit.reason)}")
    return lines


def _applied_lines(entry: ReplanEvent | PlanEdit) -> list[str]:
    return [f"    applied:  {change_line(change)}" for change in entry.changes[:_MAX_ITEMS]]


def _replan_lines(event: ReplanEvent) -> list[str]:
    lines = [_entry_title(event)]
    # A burst may have fired hundreds of triggers with one cause.
    for cause in _limited_lines(map(trigger_cause, event.triggers)):
        lines.append(f"    cause:    {cause}")
    for line in _question_lines(event.question):
        lines.append(f"    asked:    {line}")
    lines.append(f"    decided:  {_decision_line(event)}")
    lines += _applied_lines(event)
    if event.spent.calls:
        spent = format_usage(event.spent)
        lines.append(f"    spent:    {spent}")
    for note in event.notes[:_MAX_ITEMS]:
        text = printable_line(note)
        lines.append(f"    note:     {text}")
    return lines


def why_report(history: ReplanHistory, entry: ReplanEvent | PlanEdit) -> str:
    """Return one screen about a replan or an edit.

    It shows the cause, the candidates, the rejected ones, the decision and the diff of the plan.
    """
    if isinstance(entry, PlanEdit):
        sections = [("Changes", list(map(change_line, entry.changes)))]
    else:
        sections = _why_sections(entry)
    if entry.after is None:
        plan = ["nothing was applied"]
    else:
        diff = revision_diffs(history, [entry.after]).get(entry.after, "")
        # A replan may only run a task again, which does not change the plan.
        plan = diff.splitlines() or ["no task changed"]
    sections.append(("Plan", plan))
    if history.stale:
        sections.append(("Stale", [stale_line(history.stale)]))

    subject = f"run {printable_line(history.run)}"
    # Replans that kept the plan count as well, so the number of one may be another than this.
    if entry.after is not None:
        subject += f", revision {entry.after}"
    lines = [f"{subject}: {_entry_title(entry)}"]
    for title, content in sections:
        if content:
            lines += ["", title]
            lines += [f"  {line}" for line in content]
    return "\n".join(lines) + "\n"


def _why_sections(event: ReplanEvent) -> list[tuple[str, list[str]]]:
    traceback = []
    for trigger in event.triggers:
        # One is enough for a screen: triggers of one replan usually have one cause.
        if trigger.traceback:
            traceback = printable_lines(trigger.traceback)
            break
    candidates = []
    for number, candidate in enumerate(event.candidates, 1):
        # A chosen candidate may have been declined afterwards.
        chosen = candidate == event.chosen and event.executed
        candidates += candidate_lines(number, candidate, chosen=chosen)
    rejected = []
    for candidate in event.rejected[:_MAX_ITEMS]:
        text = _candidate_text(candidate)
        reason = printable_line(_rejection(candidate))
        rejected += [text, f"   {reason}"]
        if candidate.score is not None:
            score = format_score(candidate.score)
            rejected.append(f"   {score}")
    more = len(event.rejected) - _MAX_ITEMS
    if more > 0:
        rejected.append(f"… and {more} more")
    outputs = [printable_line(f"{task_id}: {text}") for task_id, text in event.outputs.items()]
    spent = []
    if event.spent.calls:
        spent.append(format_usage(event.spent))
    decision = [_decision_line(event)]
    if event.executed:
        decision.append(f"outcome: {event.outcome}")
    return [
        ("Cause", _limited_lines(map(trigger_line, event.triggers))),
        ("Unexpected output", _limited_lines(outputs)),
        ("Traceback", traceback),
        ("Candidates", candidates or ["none"]),
        ("Rejected", rejected),
        ("Notes", _limited_lines(map(printable_line, event.notes))),
        ("Spent", spent),
        ("Asked", _question_lines(event.question)),
        ("Decision", decision),
    ]


def _metrics_line(metrics: ReplanMetrics) -> str:
    """Return metrics as one line."""
    known = metrics.succeeded + metrics.failed
    rate = ""
    if known:
        rate = f", {metrics.succeeded} of {known} worked"
    parts = [f"{metrics.replans}, {metrics.executed} applied{rate}"]
    if not metrics.replans:
        parts = ["none"]
    # Most runs have none of these, and zeros would hide the others.
    if metrics.edits:
        parts.append(pluralise(metrics.edits, "edit"))
    if metrics.dropped:
        dropped = pluralise(metrics.dropped, "trigger")
        parts.append(f"{dropped} dropped")
    if metrics.replans:
        parts.append(f"deciding took {format_duration(metrics.deciding)}")
    if metrics.waiting:
        waiting = format_duration(metrics.waiting)
        parts.append(f"people took {waiting}")
    if metrics.spent.calls:
        spent = format_usage(metrics.spent)
        parts.append(f"providers used {spent}")
    return "; ".join(parts)


def _entry_title(entry: ReplanEvent | PlanEdit) -> str:
    at = format_time(entry.at)
    made = "plan kept"
    if entry.after is not None:
        made = f"revision {entry.before} → {entry.after}"
    if isinstance(entry, PlanEdit):
        title = list_title(entry.by, entry.changes)
        if title:
            return f"list · {at} · {made} · {title}"
        reason = labelled(": ", printable_line(entry.reason))
        return f"edit · {at} · {made} · by {edit_author(entry.by)}{reason}"
    replan = printable_line(spoken_id(entry.replan))
    why = trigger_kinds_text(entry.triggers)
    decision = entry.decision or "undecided"
    title = f"{replan} · {at} · {why} → {decision} · {made}"
    if entry.executed and entry.outcome != "unknown":
        title += f" · {entry.outcome}"
    return title


def _decision_line(event: ReplanEvent) -> str:
    """Return the decision with its decider, rule, reason and duration."""
    if event.decision is None:
        return "no decision: the process ended first"
    by = labelled(" by ", printable_line(event.by))
    rule = labelled(", rule ", printable_line(event.rule))
    reason = printable_line(event.reason)
    took = format_duration(event.duration)
    return f"{event.decision}{by}{rule}: {reason} ({took})"


def attempt_lines(records: Iterable[Record]) -> Iterator[str]:
    """Yield a title and a line for each attempt: when it ended, how, and how long it took."""
    started: dict[AttemptId, AttemptStarted] = {}
    times: dict[AttemptId, float] = {}
    title = "attempts:"
    for record in records:
        body = record.body
        match body:
            case AttemptStarted():
                started[body.attempt] = body
                times[body.attempt] = record.at
                continue
            case AttemptSucceeded():
                outcome = "done"
            case AttemptFailed() if body.failure.type in HELD_FAILURE_TYPES:
                outcome = f"waits for a person: {printable_line(body.failure.message)}"
            case AttemptFailed():
                outcome = f"failed: {printable_line(str(body.failure))}"
            case AttemptTimedOut():
                outcome = "timed out"
            case AttemptInterrupted():
                outcome = f"cut off: {printable_line(body.reason)}"
            case _:
                continue
        begun = started.get(body.attempt)
        if begun is None:
            continue
        if title:
            yield title
            title = ""
        took = format_duration(max(0.0, record.at - times[body.attempt]))
        name = printable_line(begun.task)
        if begun.number > 1:
            name += f", attempt {begun.number}"
        yield f"  {format_time(times[body.attempt])} {name}: {outcome} ({took})"


def decision_text(event: ReplanEvent) -> str:
    """Return the decision of a replan and its revision as one line."""
    made = "plan kept"
    if event.after is not None:
        made = f"revision {event.after}"
    replan = printable_line(spoken_id(event.replan))
    return f"{replan} · {format_time(event.at)} · {made} · {_decision_line(event)}"


def _question_lines(asked: QuestionEntry | None) -> list[str]:
    """Return the question to a person and its answer."""
    if asked is None:
        return []
    name = printable_line(spoken_id(asked.id))
    text = f"{name}: {printable_line(asked.text)}"
    if asked.answered_at is None:
        return [text, "not answered yet"]
    by = labelled(" by ", printable_line(asked.by))
    comment = labelled(", who said: ", printable_line(asked.comment))
    waited = asked.answered_at - asked.at
    after = format_duration(waited)
    return [text, f"{asked.verdict}{by} after {after}{comment}"]


def candidate_lines(number: int, candidate: Candidate, *, chosen: bool = False) -> list[str]:
    """Return lines about an alternative that can be chosen, with its score."""
    line = f"{number}. {_candidate_text(candidate)}"
    if chosen:
        line += "  ← applied"
    score = "not scored"
    if candidate.score is not None:
        score = format_score(candidate.score)
    return [line, f"   {score}"]


def _candidate_text(candidate: Candidate) -> str:
    alternative = candidate.alternative
    first = alternative.changes[:_MAX_ITEMS]
    changes = "; ".join(map(change_line, first)) or "nothing found"
    reason = printable_line(alternative.reason)
    if alternative.source:
        reason = f"{printable_line(alternative.source)}: {reason}"
    return f"{changes}  ({reason})"


def _rejection(candidate: Candidate) -> str:
    """Return why a candidate was not considered; a source that found nothing gives its verdict."""
    if candidate.rejected == candidate.alternative.unreachable:
        return f"verdict: {candidate.rejected}"
    return f"rejected: {candidate.rejected}"


def format_score(score: Score) -> str:
    """Return a confidence score with its parts."""
    parts = (
        f"self-assessment {score.self_assessment:.2f}",
        f"past success {score.past_success:.2f}",
        f"availability {score.availability:.2f}",
        f"simplicity {score.simplicity:.2f}",
    )
    return f"confidence {score.total:.2f}: {', '.join(parts)}"


def _limited_lines(lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    shown = lines[:_MAX_ITEMS]
    more = len(lines) - _MAX_ITEMS
    if more > 0:
        shown.append(f"… and {more} more")
    return shown


def calibration_lines(calibration: Calibration, title: str = "calibration") -> list[str]:
    """Return a calibration as a table with a row for each bin."""
    if calibration.brier is None:
        return [f"{title}: no replan with a score has a known outcome yet"]
    over = f"{printable_line(title)} over {pluralise(calibration.count, 'replan')}"
    lines = [
        f"{over}: Brier score {calibration.brier:.3f} (0 is perfect)",
        f"  predicted {calibration.predicted:.0%}, came true {calibration.succeeded:.0%}",
        "  predicted    mean   came true  replans",
    ]
    for row in calibration.bins:
        between = f"{row.low:.1f} to {row.high:.1f}"
        shares = f"{row.predicted:.2f}   {row.succeeded:9.0%}"
        lines.append(f"  {between}   {shares}  {row.replans:7}")
    return lines


def revision_diffs(
    history: ReplanHistory, revisions: Collection[int] | None = None
) -> dict[int, str]:
    """Return the diff of the changed tasks of each revision.

    Replacements come first, then the tasks before (`-`) and after (`+`).

    Args:
        history: the history; its journal is replayed once.
        revisions: numbers of the revisions; all by default.
    """
    diffs = {}
    for live, following in history.replay_records():
        if not isinstance(following, PlanRevised):
            continue
        if revisions is not None and following.number not in revisions:
            continue
        lines = []
        for change in following.changes:
            if isinstance(change, ReplaceTask) and change.task_id in live:
                task = live.entry(change.task_id).task
                lines.append(f"~ {describe_replacement(task, change.tasks, live)}")
        lines += filter(None, live.diff(following.changes).split("\n"))
        # The sign stays outside: a line that is cut or escaped must still show it.
        shown = [line[:2] + printable_line(line[2:]) for line in lines]
        diffs[following.number] = "\n".join(shown)
        # Records after the last one need not be replayed.
        if revisions is not None and len(diffs) == len(revisions):
            break
    return diffs


def markdown_report(history: ReplanHistory, events: Sequence[ReplanEvent] | None = None) -> str:
    """Return a history as a document: a head, then each entry with its diff of the plan.

    Args:
        history: the history.
        events: the replans to include, instead of all entries and dropped triggers.
    """
    plan = history.plan
    metrics = history.metrics
    status = _escape_inline(history.status)
    reason = labelled(" – ", _escape_inline(history.reason))
    lines = [
        f"# Replanning of {_escape_inline(plan.name or plan.id or 'a plan')}",
        "",
        f"- **Run**: {_escape_inline(history.run)}",
        f"- **Goal**: {_escape_inline(history.goal.objective)}",
        f"- **Status**: {status}{reason}",
        f"- **Started**: {format_time(history.started)}",
    ]
    resumed = _resumed_text(history)
    if resumed:
        lines.append(f"- **Resumed**: {resumed}")
    lines += [
        f"- **Progress**: {_escape_inline(_progress_line(history))}",
        f"- **Replans**: {_escape_inline(_metrics_line(metrics))}",
    ]
    if metrics.by_trigger:
        counts = _counts_text(metrics.by_trigger)
        lines.append(f"- **By trigger**: {counts}")
    if metrics.by_decision:
        counts = _counts_text(metrics.by_decision)
        lines.append(f"- **By decision**: {counts}")
    effects_text = _effects_text(history)
    if effects_text:
        lines.append(f"- **Effects**: {_escape_inline(effects_text)}")
    notes = _notes_text(history)
    if notes:
        lines.append(f"- **Notes**: {_escape_inline(notes)}")
    lines.append("")

    # One replay for all revisions: one for each would take time quadratic in the journal.
    diffs = revision_diffs(history)
    entries: Sequence[ReplanEvent | PlanEdit | GoalEdit]
    if events is None:
        # Each has its own diff, so none are merged.
        entries = sorted([*history.goal_edits, *history.entries], key=lambda entry: entry.at)
    else:
        entries = events
    for entry in entries:
        match entry:
            case GoalEdit():
                lines += _goal_edit_section(entry)
            case PlanEdit():
                lines += _edit_section(entry, diffs.get(entry.after, ""))
            case ReplanEvent():
                lines += _replan_section(entry, diffs.get(entry.after or 0, ""))
    if history.dropped_triggers and events is None:
        lines += ["## Dropped triggers", ""]
        for drop in history.dropped_triggers:
            cause = _escape_inline(trigger_cause(drop.trigger))
            reason = _escape_inline(drop.reason)
            lines.append(f"- {drop.trigger.kind}: {cause} – {reason}")
        lines.append("")
    return "\n".join(lines)


def _escape_inline(text: str) -> str:
    """Escape a text for use in a line of Markdown."""
    # A name or an error must not add headings or links to the document.
    return _MARKDOWN_SPECIAL.sub(r"\\\1", printable_line(text))


def _goal_edit_section(edit: GoalEdit) -> list[str]:
    lines = ["## The goal changed", "", _when_line(edit)]
    if edit.by:
        lines.append(f"- **By**: {_escape_inline(edit.by)}")
    lines += _reason_lines(edit)
    new = goal_line(edit.goal, edit.changed)
    lines += [f"- **New**: {_escape_inline(new)}", ""]
    return lines


def _edit_section(edit: PlanEdit, diff: str) -> list[str]:
    made = f"revision {edit.before} → {edit.after}"
    title = list_title(edit.by, edit.changes)
    if title:
        lines = [f"## {_escape_inline(title)}, {made}", "", _when_line(edit)]
    else:
        author = edit_author(edit.by)
        lines = [f"## Edit by {author}, {made}", "", _when_line(edit)]
        lines += _reason_lines(edit)
    for change in edit.changes:
        line = change_line(change)
        lines.append(f"- {_escape_inline(line)}")
    lines.append("")
    return lines + _diff_block(diff)


def _replan_section(event: ReplanEvent, diff: str) -> list[str]:
    replan = _escape_inline(spoken_id(event.replan))
    title = f"{trigger_kinds_text(event.triggers)} → {event.decision or 'undecided'}"
    if event.after is not None:
        title += f", revision {event.before} → {event.after}"
    lines = [f"## {replan}: {title}", "", _when_line(event)]
    for trigger in event.triggers:
        cause = trigger_cause(trigger)
        lines.append(f"- **Cause**: {_escape_inline(cause)}")
    if event.question is not None:
        asked = "; ".join(_question_lines(event.question))
        lines.append(f"- **Asked**: {_escape_inline(asked)}")
    decision = _decision_line(event)
    lines.append(f"- **Decision**: {_escape_inline(decision)}")
    executed = "no"
    if event.executed:
        executed = "yes"
    lines.append(f"- **Executed**: {executed}, outcome: {event.outcome}")
    if event.spent.calls:
        lines.append(f"- **Spent**: {format_usage(event.spent)}")
    lines += [f"- **Note**: {_escape_inline(note)}" for note in event.notes]
    lines.append("")
    if event.all_candidates:
        columns = "confidence | self-assessment | past success | availability | simplicity"
        lines += [f"| | alternative | {columns} |", "|-|-|-|-|-|-|-|"]
        lines += [_candidate_row(candidate, event) for candidate in event.all_candidates]
        lines.append("")
    return lines + _diff_block(diff)


def _when_line(entry: ReplanEvent | PlanEdit | GoalEdit) -> str:
    return f"- **When**: {format_time(entry.at)}"


def _reason_lines(edit: PlanEdit | GoalEdit) -> list[str]:
    if not edit.reason:
        return []
    return [f"- **Reason**: {_escape_inline(edit.reason)}"]


def _candidate_row(candidate: Candidate, event: ReplanEvent) -> str:
    alternative = candidate.alternative
    changes = "; ".join(map(change_line, alternative.changes)) or "nothing found"
    reason = f"{alternative.source}: {alternative.reason}"
    text = _escape_inline(f"{changes} ({reason})")
    mark = ""
    if candidate.rejected:
        mark = "✘"
        text += f" – {_escape_inline(_rejection(candidate))}"
    elif event.executed and candidate == event.chosen:
        mark = "✔"
    # A row has all columns, even if the candidate was rejected before it was scored.
    scores = [""] * 5
    if candidate.score is not None:
        scores = [f"{part:.2f}" for part in astuple(candidate.score)]
    return f"| {mark} | {text} | {' | '.join(scores)} |"


def _diff_block(diff: str) -> list[str]:
    if not diff:
        return []
    # Longer than any fence inside: values of tasks are text of other people.
    inside = [len(fence) for fence in _FENCE.findall(diff)]
    fence = "`" * max(3, 1 + max(inside, default=0))
    return [f"{fence}diff", *diff.split("\n"), fence, ""]


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{_escape_inline(name)} {number}" for name, number in counts.items())

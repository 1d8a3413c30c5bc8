"""Suggestions of expectations, learned from past outputs of tools.

A false alarm costs more than a miss, so a rule is suggested only if it held for enough outputs,
with varied arguments, without a single exception.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from replanning.expectations.calls import ObservedCall
from replanning.expectations.outputs import (
    ERROR_OBJECT,
    ERROR_WORD,
    Path,
    Sample,
    at_base,
    base_of,
    count_runs,
    damaged_outputs,
    error_texts,
    failure_texts,
)
from replanning.expectations.repetitions import repeated_arguments
from replanning.expectations.shapes import (
    MIN_OUTPUTS,
    MIN_RULES,
    MIN_VARIETY,
    optional_fields,
    schema_of,
)
from replanning.plan.expectations import readable_output, says_error
from replanning.plan.json_form import json_form
from replanning.plan.types import JsonObject, JsonValue

_MAX_NAMED: Final = 3
"""Number of calls that a note names as exceptions."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Suggested entry of `expect` for a tool.

    Attributes:
        field: the field of `expect`.
        value: the JSON Schema, the condition or the text.
        outputs: number of past outputs that support it.
        runs: number of runs with these outputs.
        rejected: number of past outputs that it would have rejected.
        proposed: false for a condition that some past outputs break and a person must examine
            first; it is not part of `ToolSuggestions.expect`.
        note: further information for a person; usually empty.
    """

    field: Literal["schema", "where", "errors"]
    value: JsonValue
    outputs: int
    runs: int
    rejected: int = 0
    proposed: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class ToolSuggestions:
    """Suggestions for one tool.

    Attributes:
        tool: the name of the tool.
        outputs: number of examined outputs.
        runs: number of runs with these outputs.
        failed: number of its calls that failed.
        unreadable: number of its outputs that were not stored, or have no JSON form.
        suggestions: the suggestions.
        notes: why nothing, or nothing more, is suggested.
    """

    tool: str
    outputs: int
    runs: int
    failed: int
    unreadable: int
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...] = ()

    @property
    def expect(self) -> JsonObject:
        """The proposed fields of `expect`, in the form of a plan file; may be empty."""
        fields: JsonObject = {}
        for suggestion in self.suggestions:
            if not suggestion.proposed:
                continue
            if suggestion.field == "schema":
                fields["schema"] = suggestion.value
            else:
                entries = fields.setdefault(suggestion.field, [])
                assert isinstance(entries, list)
                entries.append(suggestion.value)
        return fields


def suggest_expectations(calls: Iterable[ObservedCall]) -> dict[str, ToolSuggestions]:
    """Return suggested expectations for the outputs of each tool, learned from past calls.

    Suggestions are a JSON Schema with the fields that were always present, conditions for arguments
    that the output repeats, and the beginnings of error texts. Apart from errors and truncated
    JSON, a proposed entry would have rejected no output of these calls. Shapes and repeated
    arguments need 5 outputs for varied arguments, rules that may hold by chance 10, and types of
    inner values 20.

    Args:
        calls: the calls, of any number of tools and runs: `recorded_calls` of each journal, or your
            own recordings.

    Returns:
        the suggestions by tool name, in the order of the first calls.
    """
    by_tool: dict[str, list[ObservedCall]] = {}
    for call in calls:
        by_tool.setdefault(call.tool, []).append(call)
    recordings: list[_Recording] = []
    # Tools of one service report errors in the same form.
    conventions: Counter[str] = Counter()
    for tool, made in by_tool.items():
        recording = _Recording(tool, made)
        recordings.append(recording)
        for pattern in recording.errors:
            if ERROR_WORD.fullmatch(pattern) or ERROR_OBJECT.fullmatch(pattern):
                conventions[pattern] += 1
    return {recording.tool: recording.suggestions(conventions) for recording in recordings}


class _Recording:
    """Past outputs of one tool, split into those that report errors and the others.

    Attributes:
        samples: the outputs that report no error and are not damaged.
        errors: the texts that mark outputs as errors, with these outputs.
    """

    def __init__(self, tool: str, calls: Sequence[ObservedCall]) -> None:
        self.tool = tool
        self.samples: list[Sample] = []
        self._failed = 0
        self._unreadable = 0
        failures = []
        for call in calls:
            if call.failure:
                self._failed += 1
                failures.append(call)
                continue
            try:
                if not call.kept:
                    raise ValueError("not kept")
                output, text = readable_output(call.output)
                arguments = json_form(call.arguments)
                assert isinstance(arguments, dict)
            except ValueError:
                self._unreadable += 1
                continue
            self.samples.append(Sample(call, arguments, output, text))
        self._total = len(self.samples)
        self._runs = count_runs(self.samples)
        self.errors = error_texts(self.samples)
        self._failures = failure_texts(failures, self.errors, self.samples)
        for matching in self.errors.values():
            self._leave_out(matching)
        self._damaged = damaged_outputs(self.samples)
        self._leave_out(self._damaged)

    def __repr__(self) -> str:
        return f"<_Recording of {self.tool!r}: {len(self.samples)} outputs>"

    def _leave_out(self, others: Sequence[Sample]) -> None:
        ids = set(map(id, others))
        self.samples = [sample for sample in self.samples if id(sample) not in ids]

    def suggestions(self, conventions: Mapping[str, int]) -> ToolSuggestions:
        """Return the suggestions for the tool.

        Args:
            conventions: the number of tools that report errors with a text, by that text.
        """
        found: list[Suggestion] = []
        notes: list[str] = []
        count = len(self.samples)
        if count < MIN_OUTPUTS:
            least = f"at least {MIN_OUTPUTS} are needed"
            notes.append(f"outputs that report no error: {count}; to learn from them, {least}")
        else:
            base = base_of(self.samples)
            found += self._schema(base)
            if not found:
                notes.append("its outputs have no type in common")
            found += self._repetitions(base)
            found += _word_conditions(self.samples)
        found += self._error_suggestions(conventions)
        return ToolSuggestions(
            self.tool,
            self._total,
            self._runs,
            self._failed,
            self._unreadable,
            tuple(found),
            tuple(notes),
        )

    def _schema(self, base: Path) -> Iterator[Suggestion]:
        schema = schema_of([at_base(sample, base) for sample in self.samples])
        if not schema:
            return
        note = ""
        optional = sorted(set(optional_fields(schema)))
        if optional:
            note = f"not in all of them: {', '.join(optional)}"
        if base:
            schema = {"type": "object", "required": ["json"], "properties": {"json": schema}}
        if self._damaged:
            damaged = f"some are JSON that is cut off: {_named(self._damaged)}"
            note = "; ".join(filter(None, [note, damaged]))
        yield Suggestion(
            "schema",
            schema,
            len(self.samples),
            count_runs(self.samples),
            rejected=len(self._damaged),
            note=note,
        )

    def _repetitions(self, base: Path) -> Iterator[Suggestion]:
        for found in repeated_arguments(self.samples, base):
            note = ""
            if found.breaking:
                note = f"look at these first: {_named(found.breaking)}"
            yield Suggestion(
                "where",
                found.condition,
                len(found.holding),
                count_runs(found.holding),
                rejected=len(found.breaking),
                proposed=not found.breaking,
                note=note,
            )

    def _error_suggestions(self, conventions: Mapping[str, int]) -> Iterator[Suggestion]:
        for pattern, matching in self.errors.items():
            count = len(matching)
            yield Suggestion("errors", pattern, count, count_runs(matching), rejected=count)
        known = set(self.errors)
        for pattern, failures in self._failures.items():
            known.add(pattern)
            note = "it begins the messages of calls that failed"
            yield Suggestion("errors", pattern, 0, count_runs(failures), note=note)
        for pattern, tools in conventions.items():
            if pattern.startswith(tuple(known)):
                continue
            if not any(says_error(sample.text, pattern) for sample in self.samples):
                note = f"it begins the errors of {tools} other tools"
                if tools == 1:
                    note = "it begins the errors of another tool"
                yield Suggestion("errors", pattern, 0, 0, note=note)


def _named(samples: Sequence[Sample]) -> str:
    """Return the names of the first calls of these outputs, for a person."""
    calls: list[str] = []
    for sample in samples[:_MAX_NAMED]:
        call = sample.call
        calls.append(f"{call.task or call.tool} of run {call.run or '-'}")
    return ", ".join(calls)


def _word_conditions(samples: Sequence[Sample]) -> Iterator[Suggestion]:
    """Yield conditions that outputs are ids: single words with equal separators between parts.

    Words without digits may be names, and the next name may have two words.
    """
    different = {sample.text for sample in samples}
    if len(different) < MIN_VARIETY:
        return
    for sample in samples:
        if not isinstance(sample.output, str):
            return
        if re.search(r"\s", sample.text):
            return
        if not re.search(r"[0-9]", sample.text):
            return
    runs = count_runs(samples)
    yield Suggestion("where", '" " not in text', len(samples), runs)
    signs = {tuple(re.findall(r"[^A-Za-z0-9]", text)) for text in different}
    if len(samples) < MIN_RULES:
        return
    if len(signs) == 1:
        (common,) = signs
        if common and set(common).isdisjoint('*"\\'):
            pattern = f"*{'*'.join(common)}*"
            yield Suggestion("where", f'text matches "{pattern}"', len(samples), runs)

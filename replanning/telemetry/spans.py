"""Spans of a run in OpenTelemetry: attempts, replans, their questions, and calls of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from replanning import journal
from replanning.changes import CancelTask, PlanChange
from replanning.environment import Clock
from replanning.live.entries import TaskEntry
from replanning.llm.completions import Completion, LLMCall
from replanning.plan.messages import format_duration
from replanning.plan.types import AttemptId, JsonValue, QuestionId, ReplanId, RunId, TaskId
from replanning.secrets import Redactor
from replanning.telemetry import names
from replanning.telemetry.tracer import ReportCompletion, ReportProposals, RunTracer, WatchedRun

MAX_TEXT_CHARS: Final = 1_000
"""Characters kept of names, reasons and error messages."""

MAX_CONTENT_CHARS: Final = 10_000
"""Characters kept of captured content such as arguments, outputs and prompts."""

_REDACTION_MARGIN: Final = 1_000
"""Characters searched for secrets beyond the limit, so that no secret is cut in half and missed."""

_W3C_PROPAGATOR: Final = TraceContextTextMapPropagator()
_CAUSED_BY_ATTRIBUTES: Final = {names.LINK_KIND: "caused-by"}

Attributes = Mapping[str, str | int | float | Sequence[str]]


def to_nanoseconds(seconds: float) -> int:
    """Convert seconds since the epoch to nanoseconds, rounded to the precision of a float."""
    return round(seconds * 1e6) * 1000


def _format_trace(context: Context) -> str | None:
    carrier: dict[str, str] = {}
    _W3C_PROPAGATOR.inject(carrier, context)
    return carrier.get("traceparent")


def _parse_trace(trace: str) -> SpanContext:
    context = _W3C_PROPAGATOR.extract({"traceparent": trace}, Context())
    return get_current_span(context).get_span_context()


class _SpanIds:
    """Id generator that gives the next span preset ids; others come from another generator."""

    def __init__(self, others: Any) -> None:
        self.others = others
        self.trace_id = 0
        self.span_id = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.others, name)

    def generate_trace_id(self) -> Any:
        return self.trace_id or self.others.generate_trace_id()

    def generate_span_id(self) -> Any:
        return self.span_id or self.others.generate_span_id()


def _span_id(base: int, number: int) -> int:
    """Return the id of a run's span by its number; any process can compute it."""
    return (base + number * 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF


class SpanWriter:
    """Writes spans with the times of the run's clock and without secrets.

    It contains the errors of span processors.

    Args:
        tracer: starts spans.
        clock: gives the time where no record does.
        redactor: removes secrets from text.
        capture_content: put arguments, outputs, prompts, reasons and questions on spans.

    Attributes:
        on_error: called with the error when a span processor raises.
    """

    def __init__(
        self, tracer: Tracer, clock: Clock, redactor: Redactor, *, capture_content: bool = False
    ) -> None:
        self.capture_content = capture_content
        self.on_error: Callable[[Exception], None] = lambda error: None
        self._ids = _SpanIds(getattr(tracer, "id_generator", None))
        # Tracers of the SDK have an id generator; the API does not require one.
        if self._ids.others is not None:
            tracer = copy(tracer)
            tracer.id_generator = self._ids  # type: ignore[attr-defined]
        self._tracer = tracer
        self._clock = clock
        self._redactor = redactor

    def now(self) -> int:
        """Return the current time in nanoseconds."""
        return to_nanoseconds(self._clock.now())

    def start(
        self,
        name: str,
        attributes: Attributes,
        context: Context | None = None,
        links: Sequence[Link] = (),
        at: int | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        trace_id: int = 0,
        span_id: int = 0,
    ) -> Span:
        """Start a span, with these ids if possible.

        By default it starts now, within the current context.
        """
        if at is None:
            at = self.now()
        self._ids.trace_id = trace_id
        self._ids.span_id = span_id
        try:
            return self._tracer.start_span(
                name,
                context,
                kind,
                attributes,
                links,
                at,
            )
        except Exception as error:  # noqa: BLE001 - a span processor may raise anything
            self.on_error(error)
            return INVALID_SPAN

    def restore(
        self,
        lost: SpanContext,
        parent: SpanContext,
        name: str,
        attributes: Attributes,
        times: tuple[int, int],
    ) -> None:
        """Write a span that was open, and therefore lost, when its process was killed.

        Its children need it as their parent.
        """
        if self._ids.others is None:
            return
        context = set_span_in_context(NonRecordingSpan(parent), Context())
        span = self.start(
            name, attributes, context, (), times[0], trace_id=lost.trace_id, span_id=lost.span_id
        )
        if name == names.RUN_SPAN:
            self.set_error(span, "killed", "its process ended before the run did")
        self.end(span, times[1])

    def end(self, span: Span, at: int | None = None) -> None:
        """End a span at `at` (default: now)."""
        try:
            span.end(self.now() if at is None else at)
        except Exception as error:  # noqa: BLE001 - a span processor may raise anything
            self.on_error(error)

    @contextmanager
    def use_span(self, span: Span, *, current: bool = True) -> Iterator[None]:
        """End a span with the block, as an error if the block raises.

        `current` makes it the current span meanwhile.
        """
        token = otel.attach(set_span_in_context(span)) if current else None
        try:
            yield
        except Exception as error:
            self.set_error(span, type(error).__name__, str(error))
            raise
        finally:
            if token is not None:
                otel.detach(token)
            self.end(span)

    def set_error(self, span: Span, kind: str, text: str) -> None:
        """Mark a span as an error."""
        span.set_attribute(names.ERROR_TYPE, kind)
        span.set_status(Status(StatusCode.ERROR, self.redact_text(text)))

    def set_usage(self, span: Span, usage: journal.Usage) -> None:
        """Put calls, tokens and money on a span, each where it is not zero."""
        amounts = (usage.calls, usage.tokens, usage.money)
        for name, amount in zip(names.USAGE_ATTRIBUTES, amounts, strict=True):
            if amount:
                span.set_attribute(name, amount)

    def redact_text(self, text: str, limit: int = MAX_TEXT_CHARS) -> str:
        """Return a text without secrets, cut at `limit` characters.

        The rest of a long text is not searched.
        """
        searched = limit + _REDACTION_MARGIN
        if len(text) > searched:
            # The searched part may end within a secret, which is then not recognised.
            clean = self._redactor.text(text[:searched])[:-_REDACTION_MARGIN]
            return f"{clean[:limit]}…"
        clean = self._redactor.text(text)
        if len(clean) <= limit:
            return clean
        return f"{clean[:limit]}…"

    def redact_json(self, value: JsonValue, *, redacted: bool = False) -> str:
        """Return a JSON value as text without secrets; `redacted` says that it contains none."""
        text = json.dumps(value, ensure_ascii=False)
        if len(text) > 10 * MAX_CONTENT_CHARS:
            return f"[{len(text)} characters]"
        if not redacted:
            text = json.dumps(self._redactor.value(value), ensure_ascii=False)
        return self.redact_text(text, MAX_CONTENT_CHARS)


@dataclass
class _EarlierProcesses:
    """Spans of the earlier processes of a run, as far as its journal has them.

    Attributes:
        first: span of the run in the first process; invalid if there was none.
        last: span of the run in the last process.
        killed: the first record of the last process, if it did not end its spans.
        ended_at: time of the last record.
        base: base of the ids of the spans that were left open; 0 if none were.
        unsuccessful: span of the last unsuccessful attempt of each task.
        cut_off: the attempts that did not end, each with the span of its process, and its record.
    """

    first: SpanContext = INVALID_SPAN_CONTEXT
    last: SpanContext = INVALID_SPAN_CONTEXT
    killed: journal.Record | None = None
    ended_at: int = 0
    base: int = 0
    unsuccessful: dict[TaskId, SpanContext] = field(default_factory=dict)
    cut_off: dict[AttemptId, tuple[SpanContext, journal.Record]] = field(default_factory=dict)

    def add(self, record: journal.Record) -> None:
        """Fold the next record."""
        self.ended_at = to_nanoseconds(record.at)
        match record.body:
            case journal.AttemptStarted(attempt=attempt):
                self.cut_off[attempt] = (self.last, record)
            case journal.AttemptSucceeded(attempt=attempt):
                self.cut_off.pop(attempt, None)
            case journal.RunOpened(trace=trace) | journal.RunResumed(trace=trace):
                self.last = _parse_trace(trace or "")
                if not self.first.is_valid:
                    self.first = self.last
                self.killed = record
                self.base = self.base or self.last.span_id
            case journal.RunEnded():
                self.killed = None
                self.base = 0
                self.cut_off.clear()
            case (
                journal.AttemptFailed(task=task, trace=trace)
                | journal.AttemptTimedOut(task=task, trace=trace)
                | journal.AttemptInterrupted(task=task, trace=trace)
            ):
                if trace is not None:
                    self.unsuccessful[task] = _parse_trace(trace)
            case journal.PlanRevised(traces=traces):
                for task, trace in traces.items():
                    self.unsuccessful[task] = _parse_trace(trace)

    def restore_run(self, writer: SpanWriter, run: RunId) -> None:
        """Write the span of the run that a killed process left open."""
        if self.killed is None or not self.last.trace_flags.sampled:
            return
        parent = INVALID_SPAN_CONTEXT if self.last == self.first else self.first
        attributes: Attributes = {
            names.RUN_ID: run,
            names.RUN_RESUMED: isinstance(self.killed.body, journal.RunResumed),
        }
        times = (to_nanoseconds(self.killed.at), self.ended_at)
        writer.restore(self.last, parent, names.RUN_SPAN, attributes, times)


class _AttemptSpans:
    """Spans of attempts: the open ones, and the last unsuccessful one of each task.

    Args:
        writer: writes the spans.
        context: context of the run's span.
        base: base of the ids of spans.
        earlier: the spans of earlier processes.
    """

    def __init__(
        self, writer: SpanWriter, context: Context, base: int, earlier: _EarlierProcesses
    ) -> None:
        self.open: dict[AttemptId, Span] = {}
        self.unsuccessful = earlier.unsuccessful
        self._writer = writer
        self._context = context
        self._base = base
        self._cut_off = earlier.cut_off
        self._cut_off_at = earlier.ended_at

    def start(
        self, body: journal.AttemptStarted, entry: TaskEntry, progress: float, at: int, seq: int
    ) -> None:
        """Start the span of an attempt."""
        # Set once for the usual outcome, which is cheaper.
        attributes = self._attributes(body, entry, "succeeded")
        attributes[names.PROGRESS] = progress
        links = self._predecessor_links(entry)
        span_id = _span_id(self._base, seq)
        self.open[body.attempt] = self._writer.start(
            names.ATTEMPT_SPAN, attributes, self._context, links, at, span_id=span_id
        )

    def restore(self, attempt: AttemptId, entry: TaskEntry) -> None:
        """Write the span of an attempt if it was running when its process was killed."""
        process, record = self._cut_off.pop(attempt, (INVALID_SPAN_CONTEXT, None))
        if record is None or not process.trace_flags.sampled:
            return
        assert isinstance(record.body, journal.AttemptStarted)
        span_id = _span_id(self._base, record.seq)
        lost = SpanContext(process.trace_id, span_id, True, process.trace_flags)
        self.unsuccessful[entry.id] = lost
        attributes = self._attributes(record.body, entry, "interrupted")
        times = (to_nanoseconds(record.at), self._cut_off_at)
        self._writer.restore(lost, process, names.ATTEMPT_SPAN, attributes, times)

    def end(self, attempt: AttemptId, at: int) -> None:
        """End the span of an attempt that succeeded."""
        span = self.open.pop(attempt, None)
        if span is not None:
            self._writer.end(span, at)

    def end_unsuccessful(
        self,
        attempt: AttemptId,
        task: TaskId,
        outcome: str,
        at: int,
        error: tuple[str, str] | None = None,
    ) -> None:
        """End the span of an attempt that did not succeed."""
        span = self.open.pop(attempt, None)
        if span is None:
            return
        self.unsuccessful[task] = span.get_span_context()
        if error is not None:
            self._writer.set_error(span, *error)
        span.set_attribute(names.ATTEMPT_OUTCOME, outcome)
        self._writer.end(span, at)

    def end_all(self, at: int) -> None:
        """End the spans that are still open, as cancelled."""
        for span in self.open.values():
            span.set_attribute(names.ATTEMPT_OUTCOME, "cancelled")
            self._writer.end(span, at)
        self.open.clear()

    def set_output(self, body: journal.AttemptSucceeded | journal.AttemptFailed) -> None:
        """Put the output of an attempt on its span, expected or not."""
        span = self.open.get(body.attempt)
        if span is not None and self._writer.capture_content and body.output is not None:
            output = self._writer.redact_json(body.output, redacted=True)
            span.set_attribute(names.TASK_OUTPUT, output)

    def add_exception(self, attempt: AttemptId, failure: journal.Failure, at: int) -> None:
        """Add the exception that an attempt raised."""
        span = self.open.get(attempt)
        if span is not None and failure.traceback:
            message = self._writer.redact_text(failure.message)
            values = (failure.type, message, failure.traceback)
            event = dict(zip(names.EXCEPTION_ATTRIBUTES, values, strict=True))
            span.add_event(names.EXCEPTION_EVENT, event, timestamp=at)

    def note_doubt(
        self, body: journal.AttemptFailed | journal.AttemptTimedOut | journal.AttemptInterrupted
    ) -> None:
        """Mark the span of an attempt as in doubt, if it is to be confirmed."""
        span = self.open.get(body.attempt)
        if span is not None and body.confirm_at is not None:
            span.set_attribute(names.ATTEMPT_IN_DOUBT, True)

    def _attributes(
        self, body: journal.AttemptStarted, entry: TaskEntry, outcome: str
    ) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            names.TASK_ID: body.task,
            names.ATTEMPT_ID: body.attempt,
            names.ATTEMPT_NUMBER: body.number,
            names.ATTEMPT_OUTCOME: outcome,
        }
        tool = entry.task.tool
        if body.confirms is not None and entry.log.doubt is not None:
            attributes[names.ATTEMPT_CONFIRMS] = body.confirms
            tool = entry.log.doubt.confirm.tool
        if tool is not None:
            attributes[names.TASK_TOOL] = tool
        if entry.root != entry.id:
            attributes[names.TASK_ROOT] = entry.root
        if self._writer.capture_content and entry.task.arguments:
            attributes[names.TASK_ARGUMENTS] = self._writer.redact_json(entry.task.arguments)
        return attributes

    def _predecessor_links(self, entry: TaskEntry) -> tuple[Link, ...]:
        """Link to the last unsuccessful attempt of the task, or of the nearest one it replaces."""
        contexts = self.unsuccessful
        if not contexts:
            return ()
        kind = "retries"
        ancestor = entry
        while ancestor.id not in contexts:
            if ancestor.parent is None:
                return ()
            kind = "replaces"
            ancestor = ancestor.parent
        return (Link(contexts[ancestor.id], {names.LINK_KIND: kind}),)


class _ReplanSpans:
    """Open spans of replans, and of the questions that they ask.

    The span of a replan stays open as long as its question.

    Args:
        writer: writes the spans.
        context: context of the run's span.
        base: base of the ids of spans.
    """

    def __init__(self, writer: SpanWriter, context: Context, base: int) -> None:
        self.open: dict[str, Span] = {}
        self.questions: dict[QuestionId, tuple[Span, str]] = {}
        self.parked: set[str] = set()
        self._writer = writer
        self._context = context
        self._base = base
        self._decided: set[ReplanId] = set()

    def start(self, replan: ReplanId, attributes: Attributes, links: Sequence[Link]) -> Span:
        """Start the span of a replan."""
        span_id = 0
        if replan not in self._decided:
            # A replan that a killed process left undecided is decided again under the same id. Its
            # span is then the parent of the spans that the process left.
            span_id = _span_id(self._base, -int.from_bytes(replan.encode()))
        self._decided.add(replan)
        span = self._writer.start(
            names.PLAN_SPAN, attributes, self._context, links, span_id=span_id
        )
        self.open[replan] = span
        return span

    def end(self, replan: str, at: int) -> None:
        """End the span of a replan."""
        self.parked.discard(replan)
        span = self.open.pop(replan, None)
        if span is not None:
            self._writer.end(span, at)

    def end_all(self, at: int) -> None:
        """End all spans that are still open."""
        for span, _ in self.questions.values():
            self._writer.end(span, at)
        self.questions.clear()
        for replan in list(self.open):
            self.end(replan, at)

    def context(self, replan: str | None) -> Context:
        """Return the context of a replan; that of the run without an open one."""
        span = None if replan is None else self.open.get(replan)
        if span is None:
            return self._context
        return set_span_in_context(span, self._context)

    def start_question(self, body: journal.QuestionAsked, at: int) -> None:
        """Start the span of a question."""
        attributes: dict[str, str] = {names.QUESTION_ID: body.question}
        if self._writer.capture_content:
            attributes[names.QUESTION_TEXT] = self._writer.redact_text(body.text, MAX_CONTENT_CHARS)
        context = self.context(body.replan)
        span = self._writer.start(names.ASK_SPAN, attributes, context, at=at)
        self.questions[body.question] = (span, body.replan)
        self.parked.add(body.replan)


class OTelRunTracer(RunTracer):
    """Spans of one run: `replanning.run`, with its attempts and replans as children.

    Its own state is the span of the run and those of open requests to providers. `_HANDLERS` below
    has the method for each kind of record.

    Args:
        writer: writes the spans.
        run: the run.
        records: the journal of a resumed run.
    """

    def __init__(
        self, writer: SpanWriter, run: RunId, records: Sequence[journal.Record] = ()
    ) -> None:
        earlier = _EarlierProcesses()
        for record in records:
            earlier.add(record)
        links: list[Link] = []
        parent = otel.get_current()
        if earlier.first.is_valid:
            # The trace of the run continues; the caller that resumes it becomes a link instead of
            # the parent.
            caller = get_current_span().get_span_context()
            if caller.is_valid:
                links.append(Link(caller))
            parent = set_span_in_context(NonRecordingSpan(earlier.first), parent)
        earlier.restore_run(writer, run)
        attributes: Attributes = {names.RUN_ID: run, names.RUN_RESUMED: bool(records)}
        self._writer = writer
        self._span = writer.start(names.RUN_SPAN, attributes, parent, links)
        context = set_span_in_context(self._span, parent)
        self.traceparent = _format_trace(context)
        # Span ids follow from one base, so that the next process knows the ids of the spans that a
        # killed one left open.
        base = earlier.base or self._span.get_span_context().span_id
        self._attempts = _AttemptSpans(writer, context, base, earlier)
        self._replans = _ReplanSpans(writer, context, base)
        self._run: WatchedRun | None = None
        self._provider_spans: dict[str, Span] = {}
        self._usage: dict[Span, journal.Usage] = {}
        self._ended_at: int | None = None
        self._closed = False
        self._error_reported = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<OTelRunTracer {state} {self.traceparent}>"

    def watch(self, run: WatchedRun) -> None:
        """Follow the records of a run from now on."""
        self._run = run
        plan = run.live.plan
        writer = self._writer
        writer.on_error = self._report_error
        self._span.set_attribute(names.PLAN_TASKS, len(plan.tasks))
        if plan.name:
            self._span.set_attribute(names.PLAN_NAME, writer.redact_text(plan.name))
        if writer.capture_content:
            objective = writer.redact_text(plan.goal.objective, MAX_CONTENT_CHARS)
            self._span.set_attribute(names.PLAN_OBJECTIVE, objective)
        run.journal.subscribe(self._on_record, [journal.AttemptStarted, *_HANDLERS])
        for question in run.ledger.questions.open.values():
            triggers: list[journal.Trigger] = []
            for trigger in question.triggers:
                if trigger in run.ledger.triggers:
                    triggers.append(run.ledger.triggers[trigger])
            self._start_replan(question.replan, triggers)
            self._replans.start_question(question, writer.now())

    def _on_record(self, record: journal.Record) -> None:
        body = record.body
        at = to_nanoseconds(record.at)
        if isinstance(body, journal.AttemptStarted):
            assert self._run is not None
            entry = self._run.live.entry(body.task)
            progress = self._run.live.progress().share
            self._attempts.start(body, entry, progress, at, record.seq)
        else:
            _HANDLERS[type(body)](self, body, at)

    def _on_succeeded(self, body: journal.AttemptSucceeded, at: int) -> None:
        self._attempts.set_output(body)
        self._attempts.end(body.attempt, at)

    def _on_failed(self, body: journal.AttemptFailed, at: int) -> None:
        failure = body.failure
        self._attempts.add_exception(body.attempt, failure, at)
        self._attempts.set_output(body)
        self._attempts.note_doubt(body)
        if failure.not_done:
            self._attempts.end_unsuccessful(body.attempt, body.task, "not-done", at)
        else:
            error = (failure.type, failure.message)
            self._attempts.end_unsuccessful(body.attempt, body.task, "failed", at, error)

    def _on_timed_out(self, body: journal.AttemptTimedOut, at: int) -> None:
        error = ("timeout", f"not finished after {format_duration(body.timeout)}")
        self._attempts.note_doubt(body)
        self._attempts.end_unsuccessful(body.attempt, body.task, "timed-out", at, error)

    def _on_interrupted(self, body: journal.AttemptInterrupted, at: int) -> None:
        assert self._run is not None
        self._attempts.restore(body.attempt, self._run.live.entry(body.task))
        self._attempts.note_doubt(body)
        self._attempts.end_unsuccessful(body.attempt, body.task, "interrupted", at)

    def _on_stale(self, body: journal.ResultsStale, at: int) -> None:
        causes: dict[str, None] = {}
        for found in body.tasks.values():
            causes.update(dict.fromkeys(found))
        stale = {names.STALE_TASKS: list(body.tasks), names.STALE_CAUSES: list(causes)}
        self._span.add_event(names.STALE_EVENT, stale, timestamp=at)

    def _on_revised(self, body: journal.PlanRevised, at: int) -> None:
        """End the spans of attempts that a revision cancels."""
        assert self._run is not None
        for change in body.changes:
            if not isinstance(change, CancelTask) or change.task_id not in self._run.live:
                continue
            entry = self._run.live.entry(change.task_id)
            attempt = AttemptId(f"{entry.id}#{entry.log.count}")
            # The attempt itself, or one that asks whether it was done.
            for running in list(self._attempts.open):
                if running == attempt or running.startswith(f"{attempt}-"):
                    self._attempts.end_unsuccessful(running, entry.id, "cancelled", at)

    def _on_charged(self, body: journal.UsageCharged, at: int) -> None:
        span: Span | None = None
        if body.attempt is not None:
            span = self._attempts.open.get(body.attempt)
        elif body.provider is not None:
            span = self._provider_spans.get(body.provider)
        if span is not None:
            total = self._usage.get(span, journal.Usage()) + body.usage
            self._usage[span] = total
            self._writer.set_usage(span, total)

    def _on_considered(self, body: journal.AlternativesConsidered, at: int) -> None:
        span = self._replans.open.get(body.replan)
        if span is None:
            return
        rejected = 0
        for candidate in body.candidates:
            rejected += bool(candidate.rejected)
        span.set_attribute(names.CANDIDATE_COUNT, len(body.candidates))
        span.set_attribute(names.REJECTED_COUNT, rejected)
        best = body.candidates[0].score if rejected < len(body.candidates) else None
        if best is not None:
            span.set_attribute(names.CONFIDENCE, best.total)
        if self._writer.capture_content:
            proposals: list[JsonValue] = []
            for candidate in body.candidates:
                proposals.append(candidate.alternative.model_dump(mode="json"))
            span.set_attribute(names.ALTERNATIVES, self._writer.redact_json(proposals))

    def _on_decided(self, body: journal.DecisionMade, at: int) -> None:
        span = self._replans.open.get(body.replan)
        if span is None:
            return
        writer = self._writer
        span.set_attribute(names.DECISION, body.decision)
        span.set_attribute(names.DECISION_RULE, body.rule)
        span.set_attribute(names.DECISION_BY, writer.redact_text(body.by))
        if writer.capture_content:
            reason = writer.redact_text(body.reason, MAX_CONTENT_CHARS)
            span.set_attribute(names.DECISION_REASON, reason)
        if body.replan in self._replans.parked and body.decision != "ask":
            self._replans.end(body.replan, at)

    def _on_asked(self, body: journal.QuestionAsked, at: int) -> None:
        self._replans.start_question(body, at)

    def _on_reminded(self, body: journal.QuestionReminded, at: int) -> None:
        if body.question in self._replans.questions:
            span, _ = self._replans.questions[body.question]
            span.add_event("reminded", timestamp=at)

    def _on_answered(self, body: journal.QuestionAnswered, at: int) -> None:
        if body.question not in self._replans.questions:
            return
        span, replan = self._replans.questions.pop(body.question)
        span.set_attribute(names.QUESTION_VERDICT, body.verdict)
        self._writer.end(span, at)
        if body.verdict == "withdrawn":
            self._replans.end(replan, at)

    def _on_ended(self, body: journal.RunEnded, at: int) -> None:
        self._ended_at = at
        self._end_open_spans(at)

    def close(self, failure: BaseException | None) -> None:
        """End all spans.

        The span of the run is an error if the run failed, was aborted or raised `failure`.
        """
        if self._closed:
            return
        self._closed = True
        now = self._writer.now()
        if self._run is not None:
            self._end_open_spans(now)
            self._set_result(self._run)
        if failure is not None:
            self._writer.set_error(self._span, type(failure).__name__, str(failure))
        self._writer.end(self._span, now if self._ended_at is None else self._ended_at)

    def _set_result(self, run: WatchedRun) -> None:
        """Put the result of the run on its span."""
        self._span.set_attribute(names.REVISION, run.live.revision)
        self._span.set_attributes(self._evaluation_attributes())
        self._writer.set_usage(self._span, run.ledger.budget_tracker.spent)
        if run.end is not None:
            self._span.set_attribute(names.RUN_STATUS, run.end.status)
            self._span.set_attribute(names.RUN_REASON, self._writer.redact_text(run.end.reason))
            if run.end.status in ("failed", "aborted"):
                self._writer.set_error(self._span, run.end.status, run.end.reason)

    def _evaluation_attributes(self) -> dict[str, str | float | Sequence[str]]:
        assert self._run is not None
        found = self._run.evaluation.evaluate()
        attributes: dict[str, str | float | Sequence[str]] = {
            names.PROGRESS: found.progress,
            names.HEALTH: found.health,
        }
        if found.remaining_seconds is not None:
            attributes[names.REMAINING_SECONDS] = found.remaining_seconds
        if found.recommendations and self._writer.capture_content:
            texts = [self._writer.redact_text(text) for text in found.recommendations]
            attributes[names.RECOMMENDATIONS] = texts
        return attributes

    def _report_error(self, error: Exception) -> None:
        """Record the first error of a span processor; the run continues without those spans."""
        if self._run is None or self._error_reported:
            return
        if self._run.journal.state == "open":
            self._error_reported = True
            self._run.record_error("tracing", error)

    def _end_open_spans(self, at: int) -> None:
        self._attempts.end_all(at)
        self._replans.end_all(at)
        self._usage.clear()

    # Attempts

    def attempt_trace(self, attempt: AttemptId) -> str | None:
        """Return the trace context of a running attempt as a W3C `traceparent` header, if any."""
        span = self._attempts.open.get(attempt)
        return None if span is None else _format_trace(set_span_in_context(span))

    def attach_attempt(self, attempt: AttemptId) -> Token[Context] | None:
        """Make the span of an attempt the parent of the spans of its body; None without a span."""
        span = self._attempts.open.get(attempt)
        return None if span is None else otel.attach(set_span_in_context(span))

    def record_asked(self, attempt: AttemptId, tool: str) -> None:
        """Record in the span of an attempt that a second tool is called, to verify its output."""
        span = self._attempts.open.get(attempt)
        if span is not None:
            span.add_event(names.ASKED_EVENT, {names.TASK_TOOL: tool}, timestamp=self._writer.now())

    def detach(self, token: Token[Context]) -> None:
        """Restore the span that was current before `attach_attempt`."""
        otel.detach(token)

    # Replans

    @contextmanager
    def replan_span(self, replan: ReplanId, triggers: Sequence[journal.Trigger]) -> Iterator[None]:
        """Trace a replan; an open question keeps its span open beyond the block."""
        span = self._start_replan(replan, triggers)
        token = otel.attach(set_span_in_context(span))
        try:
            yield
        except Exception as error:
            self._writer.set_error(span, type(error).__name__, str(error))
            raise
        finally:
            otel.detach(token)
            if replan not in self._replans.parked:
                self._replans.end(replan, self._writer.now())

    def _start_replan(self, replan: ReplanId, triggers: Sequence[journal.Trigger]) -> Span:
        attributes = {
            names.OPERATION_NAME: "plan",
            names.AGENT_NAME: names.INSTRUMENTATION_SCOPE,
            names.REPLAN_ID: replan,
            names.TRIGGER_IDS: [trigger.id for trigger in triggers],
            names.TRIGGER_KINDS: [trigger.kind for trigger in triggers],
            **self._evaluation_attributes(),
        }
        tasks: dict[TaskId, None] = {}
        for trigger in triggers:
            tasks.update(dict.fromkeys(trigger.tasks))
        links: list[Link] = []
        for task in tasks:
            cause = self._attempts.unsuccessful.get(task)
            if cause is not None:
                links.append(Link(cause, _CAUSED_BY_ATTRIBUTES))
        return self._replans.start(replan, attributes, links)

    @contextmanager
    def provider_span(self, name: str) -> Iterator[ReportProposals]:
        """Trace a request to a provider; spans that it opens itself become children."""
        span = self._writer.start(f"propose {name}", {names.PROVIDER_NAME: name})
        self._provider_spans[name] = span

        def report(proposed: int, late: bool) -> None:
            span.set_attribute(names.PROPOSED_COUNT, proposed)
            if late:
                self._writer.set_error(span, "timeout", "it did not answer in time")

        try:
            with self._writer.use_span(span):
                yield report
        finally:
            self._provider_spans.pop(name, None)

    def scoring_span(self) -> AbstractContextManager[None]:
        """Trace the checks, scores and ranking of the proposals."""
        return self._writer.use_span(self._writer.start(names.SCORE_SPAN, {}))

    @contextmanager
    def apply_span(
        self, changes: Sequence[PlanChange], by: str, replan: str | None
    ) -> Iterator[None]:
        """Trace the application of changes, as part of a replan or, without one, of the run."""
        assert self._run is not None
        attributes = {
            names.CHANGES: [change.kind for change in changes],
            names.CHANGED_BY: self._writer.redact_text(by),
        }
        span = self._writer.start(names.APPLY_SPAN, attributes, self._replans.context(replan))
        with self._writer.use_span(span, current=False):
            yield
            span.set_attribute(names.REVISION, self._run.live.revision)

    # Calls of language models, by the GenAI conventions

    @contextmanager
    def chat_span(self, call: LLMCall) -> Iterator[ReportCompletion]:
        """Trace a call of a language model as a child of the current span."""
        writer = self._writer
        redact = writer.redact_text
        content = writer.capture_content
        attributes: dict[str, str | int | float | None] = {
            names.OPERATION_NAME: call.operation,
            names.LLM_PROVIDER_NAME: redact(call.provider),
            names.REQUEST_MODEL: redact(call.model) or None,
            names.TEMPERATURE: call.temperature,
            names.MAX_TOKENS: call.max_tokens,
        }
        if content:
            prompt: JsonValue = [{"role": "user", "parts": [self._text_part(call.prompt)]}]
            attributes[names.INPUT_MESSAGES] = json.dumps(prompt, ensure_ascii=False)
            if call.system:
                parts: JsonValue = [self._text_part(call.system)]
                attributes[names.SYSTEM_INSTRUCTIONS] = json.dumps(parts, ensure_ascii=False)
        known: dict[str, str | int | float | Sequence[str]] = {}
        for name, value in attributes.items():
            if value is not None:
                known[name] = value
        span_name = f"{call.operation} {redact(call.model)}".rstrip()
        span = writer.start(span_name, known, kind=SpanKind.CLIENT)

        def report(completion: Completion) -> None:
            span.set_attribute(names.RESPONSE_MODEL, redact(completion.model))
            if completion.request_id:
                span.set_attribute(names.RESPONSE_ID, redact(completion.request_id))
            span.set_attribute(names.INPUT_TOKENS, completion.input_tokens)
            writer.set_usage(span, completion.usage)
            if call.operation != "chat":
                return
            span.set_attribute(names.FINISH_REASONS, [completion.finish])
            span.set_attribute(names.OUTPUT_TOKENS, completion.output_tokens)
            if content:
                message = {
                    "role": "assistant",
                    "parts": [self._text_part(completion.text)],
                    "finish_reason": completion.finish,
                }
                messages = json.dumps([message], ensure_ascii=False)
                span.set_attribute(names.OUTPUT_MESSAGES, messages)

        with writer.use_span(span):
            try:
                yield report
            except Exception:
                raise  # use_span records it
            except BaseException:
                writer.set_error(span, "cancelled", "the call was cut off")
                raise

    def _text_part(self, text: str) -> JsonValue:
        return {"type": "text", "content": self._writer.redact_text(text, MAX_CONTENT_CHARS)}


_HANDLERS: Final[Mapping[type[journal.RecordBody], Callable[[OTelRunTracer, Any, int], None]]] = (
    MappingProxyType(
        {
            journal.AttemptSucceeded: OTelRunTracer._on_succeeded,
            journal.AttemptFailed: OTelRunTracer._on_failed,
            journal.AttemptTimedOut: OTelRunTracer._on_timed_out,
            journal.AttemptInterrupted: OTelRunTracer._on_interrupted,
            journal.ResultsStale: OTelRunTracer._on_stale,
            journal.PlanRevised: OTelRunTracer._on_revised,
            journal.AlternativesConsidered: OTelRunTracer._on_considered,
            journal.DecisionMade: OTelRunTracer._on_decided,
            journal.QuestionAsked: OTelRunTracer._on_asked,
            journal.QuestionReminded: OTelRunTracer._on_reminded,
            journal.QuestionAnswered: OTelRunTracer._on_answered,
            journal.UsageCharged: OTelRunTracer._on_charged,
            journal.RunEnded: OTelRunTracer._on_ended,
        }
    )
)
"""Method for each kind of record that concerns spans; the beginning of an attempt has its own."""

"""Spans of a run in OpenTelemetry: attempts, replans with their questions, and calls of language models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from copy import copy
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
    """Convert seconds since the epoch to nanoseconds, rounded to the microseconds that a float can hold."""
    return round(seconds * 1e6) * 1000


def _format_trace(context: Context) -> str | None:
    carrier: dict[str, str] = {}
    _W3C_PROPAGATOR.inject(carrier, context)
    return carrier.get("traceparent")


def _parse_trace(trace: str) -> SpanContext:
    return get_current_span(
        _W3C_PROPAGATOR.extract({"traceparent": trace}, Context())
    ).get_span_context()


class _SpanIds:
    """Generator of ids that gives the next span the ids that are set, and leaves all others to another generator."""

    def __init__(self, others: Any) -> None:
        self.others = others
        self.trace_id = self.span_id = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.others, name)

    def generate_trace_id(self) -> Any:
        return self.trace_id or self.others.generate_trace_id()

    def generate_span_id(self) -> Any:
        return self.span_id or self.others.generate_span_id()


def _span_id(base: int, number: int) -> int:
    """Return the id of a span of a run, which another process can tell as well; another one for each number."""
    return (base + number * 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF


class SpanWriter:
    """Writes spans with the times of the run's clock and without secrets; contains errors of span processors.

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
        if (
            self._ids.others is not None
        ):  # tracers of the SDK have them, which the API does not demand
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
        """Start a span at `at` (default: now) within `context` (default: the current one), with these ids if possible."""
        at = self.now() if at is None else at
        self._ids.trace_id = trace_id
        self._ids.span_id = span_id
        try:
            return self._tracer.start_span(name, context, kind, attributes, links, at)
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
        """Write a span that was open, and therefore lost, when its process was killed: others are below it."""
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
        """End a span with the block, as an error if the block raises; `current` makes it the current span meanwhile."""
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
        for name, amount in zip(
            names.USAGE_ATTRIBUTES, (usage.calls, usage.tokens, usage.money), strict=True
        ):
            if amount:
                span.set_attribute(name, amount)

    def redact_text(self, text: str, limit: int = MAX_TEXT_CHARS) -> str:
        """Return a text without secrets, cut at `limit` characters; the rest of a long text is not searched."""
        cut = len(text) > limit + _REDACTION_MARGIN
        clean = self._redactor.text(text[: limit + _REDACTION_MARGIN] if cut else text)
        if cut:
            clean = clean[
                :-_REDACTION_MARGIN
            ]  # it may end in half a secret, which is not recognised
        return clean if len(clean) <= limit and not cut else f"{clean[:limit]}…"

    def redact_json(self, value: JsonValue, *, redacted: bool = False) -> str:
        """Return a JSON value as text without secrets; `redacted` says that it contains none."""
        text = json.dumps(value, ensure_ascii=False)
        if len(text) > 10 * MAX_CONTENT_CHARS:
            return f"[{len(text)} characters]"
        if not redacted:
            text = json.dumps(self._redactor.value(value), ensure_ascii=False)
        return self.redact_text(text, MAX_CONTENT_CHARS)


class OTelRunTracer(RunTracer):
    """Spans of one run: `replanning.run`, with its attempts and replans as children.

    Args:
        writer: writes the spans.
        run: the run.
        records: the journal of a resumed run.
    """

    def __init__(
        self, writer: SpanWriter, run: RunId, records: Sequence[journal.Record] = ()
    ) -> None:
        links: tuple[Link, ...] = ()
        parent = otel.get_current()
        self._unsuccessful_contexts: dict[TaskId, SpanContext] = {}
        self._cut_off: dict[AttemptId, tuple[SpanContext, journal.Record]] = {}
        first = current = INVALID_SPAN_CONTEXT
        killed: journal.Record | None = (
            None  # the first record of the last process, if it did not end its spans
        )
        self._base = 0
        for record in records:
            body = record.body
            match body:
                case journal.AttemptStarted():
                    self._cut_off[body.attempt] = current, record
                case journal.AttemptSucceeded():
                    self._cut_off.pop(body.attempt, None)
                case journal.RunOpened() | journal.RunResumed():
                    current = _parse_trace(body.trace or "")
                    first = first if first.is_valid else current
                    killed = record
                    self._base = self._base or current.span_id
                case journal.RunEnded():
                    killed = None
                    self._base = 0
                    self._cut_off.clear()
                case (
                    journal.AttemptFailed()
                    | journal.AttemptTimedOut()
                    | journal.AttemptInterrupted()
                ):
                    if body.trace is not None:
                        self._unsuccessful_contexts[body.task] = _parse_trace(body.trace)
                case journal.PlanRevised():
                    self._unsuccessful_contexts |= {
                        task: _parse_trace(trace) for task, trace in body.traces.items()
                    }
        if first.is_valid:
            # The trace of the run continues; the caller that resumes it becomes a link instead of
            # the parent.
            caller = get_current_span().get_span_context()
            links = (Link(caller),) if caller.is_valid else ()
            parent = set_span_in_context(NonRecordingSpan(first), parent)
        self._killed_at = to_nanoseconds(records[-1].at) if records else 0
        if killed is not None and current.trace_flags.sampled:
            above = INVALID_SPAN_CONTEXT if current == first else first
            attributes: Attributes = {
                names.RUN_ID: run,
                names.RUN_RESUMED: isinstance(killed.body, journal.RunResumed),
            }
            writer.restore(
                current,
                above,
                names.RUN_SPAN,
                attributes,
                (to_nanoseconds(killed.at), self._killed_at),
            )
        self._writer = writer
        self._span = writer.start(
            names.RUN_SPAN, {names.RUN_ID: run, names.RUN_RESUMED: bool(records)}, parent, links
        )
        self._context = set_span_in_context(self._span, parent)
        self.traceparent = _format_trace(self._context)
        # The spans that a process leaves open when it is killed have ids that the next one knows,
        # from the same base.
        self._base = self._base or self._span.get_span_context().span_id
        self._run: WatchedRun | None = None
        self._attempt_spans: dict[AttemptId, Span] = {}
        self._replan_spans: dict[str, Span] = {}
        self._parked_replans: set[str] = set()
        self._decided: set[ReplanId] = set()
        self._question_spans: dict[QuestionId, tuple[Span, str]] = {}
        self._provider_spans: dict[str, Span] = {}
        self._usage: dict[Span, journal.Usage] = {}
        self._ended_at: int | None = None
        self._closed = False
        self._error_reported = False

    def __repr__(self) -> str:
        return f"<OTelRunTracer {'closed' if self._closed else 'open'} {self.traceparent}>"

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
            self._span.set_attribute(
                names.PLAN_OBJECTIVE, writer.redact_text(plan.goal.objective, MAX_CONTENT_CHARS)
            )
        run.journal.subscribe(self._on_record, _OBSERVED)
        for question in run.ledger.questions.open.values():
            triggers = [
                run.ledger.triggers[t] for t in question.triggers if t in run.ledger.triggers
            ]
            self._start_replan(question.replan, triggers)
            self._start_question(question, writer.now())

    def _on_record(self, record: journal.Record) -> None:
        body = record.body
        at = to_nanoseconds(record.at)
        writer = self._writer
        match body:
            case journal.AttemptStarted():
                self._on_started(body, at, record.seq)
            case journal.AttemptSucceeded():
                self._set_output(body)
                span = self._attempt_spans.pop(body.attempt, None)
                if span is not None:
                    writer.end(span, at)
            case journal.AttemptFailed():
                failure = body.failure
                error = (failure.type, failure.message)
                if (
                    failure.traceback
                    and (span := self._attempt_spans.get(body.attempt)) is not None
                ):
                    values = (failure.type, writer.redact_text(failure.message), failure.traceback)
                    event = dict(zip(names.EXCEPTION_ATTRIBUTES, values, strict=True))
                    span.add_event(names.EXCEPTION_EVENT, event, timestamp=at)
                self._set_output(body)
                self._note_doubt(body)
                if failure.not_done:
                    self._end_unsuccessful(body.attempt, body.task, "not-done", at)
                else:
                    self._end_unsuccessful(body.attempt, body.task, "failed", at, error)
            case journal.AttemptTimedOut():
                error = ("timeout", f"not finished after {body.timeout:g} s")
                self._note_doubt(body)
                self._end_unsuccessful(body.attempt, body.task, "timed-out", at, error)
            case journal.AttemptInterrupted():
                self._restore_attempt(body)
                self._note_doubt(body)
                self._end_unsuccessful(body.attempt, body.task, "interrupted", at)
            case journal.ResultsStale():
                causes = dict.fromkeys(cause for found in body.tasks.values() for cause in found)
                stale = {names.STALE_TASKS: list(body.tasks), names.STALE_CAUSES: list(causes)}
                self._span.add_event(names.STALE_EVENT, stale, timestamp=at)
            case journal.PlanRevised():
                assert self._run is not None
                for change in body.changes:
                    if isinstance(change, CancelTask) and change.task_id in self._run.live:
                        entry = self._run.live.entry(change.task_id)
                        attempt = AttemptId(f"{entry.id}#{entry.log.count}")
                        # The attempt itself, or one that asks whether it was done.
                        for running in list(self._attempt_spans):
                            if running == attempt or running.startswith(f"{attempt}-"):
                                self._end_unsuccessful(running, entry.id, "cancelled", at)
            case journal.UsageCharged():
                span = None
                if body.attempt is not None:
                    span = self._attempt_spans.get(body.attempt)
                elif body.provider is not None:
                    span = self._provider_spans.get(body.provider)
                if span is not None:
                    self._usage[span] = total = self._usage.get(span, journal.Usage()) + body.usage
                    writer.set_usage(span, total)
            case journal.AlternativesConsidered() if body.replan in self._replan_spans:
                span = self._replan_spans[body.replan]
                rejected = sum(bool(candidate.rejected) for candidate in body.candidates)
                span.set_attribute(names.CANDIDATE_COUNT, len(body.candidates))
                span.set_attribute(names.REJECTED_COUNT, rejected)
                best = body.candidates[0].score if rejected < len(body.candidates) else None
                if best is not None:
                    span.set_attribute(names.CONFIDENCE, best.total)
                if writer.capture_content:
                    proposals: JsonValue = [
                        c.alternative.model_dump(mode="json") for c in body.candidates
                    ]
                    span.set_attribute(names.ALTERNATIVES, writer.redact_json(proposals))
            case journal.DecisionMade() if body.replan in self._replan_spans:
                span = self._replan_spans[body.replan]
                span.set_attribute(names.DECISION, body.decision)
                span.set_attribute(names.DECISION_RULE, body.rule)
                span.set_attribute(names.DECISION_BY, writer.redact_text(body.by))
                if writer.capture_content:
                    span.set_attribute(
                        names.DECISION_REASON, writer.redact_text(body.reason, MAX_CONTENT_CHARS)
                    )
                if body.replan in self._parked_replans and body.decision != "ask":
                    self._end_replan(body.replan, at)
            case journal.QuestionAsked():
                self._start_question(body, at)
            case journal.QuestionReminded() if body.question in self._question_spans:
                self._question_spans[body.question][0].add_event("reminded", timestamp=at)
            case journal.QuestionAnswered() if body.question in self._question_spans:
                span, replan = self._question_spans.pop(body.question)
                span.set_attribute(names.QUESTION_VERDICT, body.verdict)
                writer.end(span, at)
                if body.verdict == "withdrawn":
                    self._end_replan(replan, at)
            case journal.RunEnded():
                self._ended_at = at
                self._end_open_spans(at)

    def close(self, failure: BaseException | None) -> None:
        """End all spans; the run's is an error if the run failed or was aborted, or if `failure` was raised in it."""
        if self._closed:
            return
        self._closed = True
        now = self._writer.now()
        run = self._run
        if run is not None:
            self._end_open_spans(now)
            self._span.set_attribute(names.REVISION, run.live.revision)
            self._span.set_attributes(self._evaluation_attributes())
            self._writer.set_usage(self._span, run.ledger.budget_tracker.spent)
            if run.end is not None:
                self._span.set_attribute(names.RUN_STATUS, run.end.status)
                self._span.set_attribute(names.RUN_REASON, self._writer.redact_text(run.end.reason))
                if run.end.status in ("failed", "aborted"):
                    self._writer.set_error(self._span, run.end.status, run.end.reason)
        if failure is not None:
            self._writer.set_error(self._span, type(failure).__name__, str(failure))
        self._writer.end(self._span, now if self._ended_at is None else self._ended_at)

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
            attributes[names.RECOMMENDATIONS] = [
                self._writer.redact_text(text) for text in found.recommendations
            ]
        return attributes

    def _report_error(self, error: Exception) -> None:
        """Record the first error of a span processor; the run continues without those spans."""
        if self._run is None or self._error_reported:
            return
        if self._run.journal.state == "open":
            self._error_reported = True
            self._run.record_error("tracing", error)

    def _end_open_spans(self, at: int) -> None:
        for span in self._attempt_spans.values():
            span.set_attribute(names.ATTEMPT_OUTCOME, "cancelled")
            self._writer.end(span, at)
        self._attempt_spans.clear()
        for span, _ in self._question_spans.values():
            self._writer.end(span, at)
        self._question_spans.clear()
        for replan in list(self._replan_spans):
            self._end_replan(replan, at)
        self._usage.clear()

    # Attempts

    def attempt_trace(self, attempt: AttemptId) -> str | None:
        """The trace context of a running attempt as a W3C `traceparent` header; None without a span."""
        span = self._attempt_spans.get(attempt)
        return None if span is None else _format_trace(set_span_in_context(span))

    def attach_attempt(self, attempt: AttemptId) -> Token[Context] | None:
        """Make the span of an attempt current, so that spans of its body become children; None without a span."""
        span = self._attempt_spans.get(attempt)
        return None if span is None else otel.attach(set_span_in_context(span))

    def record_asked(self, attempt: AttemptId, tool: str) -> None:
        """Record in the span of an attempt that a second tool is called."""
        span = self._attempt_spans.get(attempt)
        if span is not None:
            span.add_event(names.ASKED_EVENT, {names.TASK_TOOL: tool}, timestamp=self._writer.now())

    def detach(self, token: Token[Context]) -> None:
        """Restore the span that was current before `attach_attempt`."""
        otel.detach(token)

    def _on_started(self, body: journal.AttemptStarted, at: int, seq: int) -> None:
        assert self._run is not None
        entry = self._run.live.entry(body.task)
        attributes = self._attempt_attributes(
            body, entry, "succeeded"
        )  # set once for the usual outcome, which is cheaper
        attributes[names.PROGRESS] = self._run.live.progress().share
        links = self._predecessor_links(entry)
        span_id = _span_id(self._base, seq)
        span = self._writer.start(
            names.ATTEMPT_SPAN, attributes, self._context, links, at, span_id=span_id
        )
        self._attempt_spans[body.attempt] = span

    def _restore_attempt(self, interrupted: journal.AttemptInterrupted) -> None:
        """Write the span of an attempt if it was running when its process was killed."""
        process, record = self._cut_off.pop(interrupted.attempt, (INVALID_SPAN_CONTEXT, None))
        if process.trace_flags.sampled and record is not None and self._run is not None:
            assert isinstance(record.body, journal.AttemptStarted)
            lost = SpanContext(
                process.trace_id, _span_id(self._base, record.seq), True, process.trace_flags
            )
            self._unsuccessful_contexts[interrupted.task] = lost
            attributes = self._attempt_attributes(
                record.body, self._run.live.entry(interrupted.task), "interrupted"
            )
            times = to_nanoseconds(record.at), self._killed_at
            self._writer.restore(lost, process, names.ATTEMPT_SPAN, attributes, times)

    def _attempt_attributes(
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
        """Link to the last unsuccessful attempt of the task, or of the nearest task that it replaces."""
        contexts = self._unsuccessful_contexts
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

    def _set_output(self, body: journal.AttemptSucceeded | journal.AttemptFailed) -> None:
        """Put the output of an attempt on its span, also one that was not as expected."""
        span = self._attempt_spans.get(body.attempt)
        writer = self._writer
        if span is not None and writer.capture_content and body.output is not None:
            output = writer.redact_json(body.output, redacted=True)
            span.set_attribute(names.TASK_OUTPUT, output)

    def _note_doubt(
        self,
        body: journal.AttemptFailed | journal.AttemptTimedOut | journal.AttemptInterrupted,
    ) -> None:
        """Note in the span of an attempt that it is asked whether it was done."""
        span = self._attempt_spans.get(body.attempt)
        if span is not None and body.confirm_at is not None:
            span.set_attribute(names.ATTEMPT_IN_DOUBT, True)

    def _end_unsuccessful(
        self,
        attempt: AttemptId,
        task: TaskId,
        outcome: str,
        at: int,
        error: tuple[str, str] | None = None,
    ) -> None:
        span = self._attempt_spans.pop(attempt, None)
        if span is not None:
            self._unsuccessful_contexts[task] = span.get_span_context()
            if error is not None:
                self._writer.set_error(span, *error)
            span.set_attribute(names.ATTEMPT_OUTCOME, outcome)
            self._writer.end(span, at)

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
            if replan not in self._parked_replans:
                self._end_replan(replan, self._writer.now())

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
        span = self._writer.start(names.APPLY_SPAN, attributes, self._replan_context(replan))
        with self._writer.use_span(span, current=False):
            yield
            span.set_attribute(names.REVISION, self._run.live.revision)

    def _replan_context(self, replan: str | None) -> Context:
        span = None if replan is None else self._replan_spans.get(replan)
        return self._context if span is None else set_span_in_context(span, self._context)

    def _start_replan(self, replan: ReplanId, triggers: Sequence[journal.Trigger]) -> Span:
        attributes = {
            names.OPERATION_NAME: "plan",
            names.AGENT_NAME: names.INSTRUMENTATION_SCOPE,
            names.REPLAN_ID: replan,
            names.TRIGGER_IDS: [trigger.id for trigger in triggers],
            names.TRIGGER_KINDS: [trigger.kind for trigger in triggers],
            **self._evaluation_attributes(),
        }
        tasks = dict.fromkeys(task for trigger in triggers for task in trigger.tasks)
        causes = [
            self._unsuccessful_contexts[task]
            for task in tasks
            if task in self._unsuccessful_contexts
        ]
        links = [Link(cause, _CAUSED_BY_ATTRIBUTES) for cause in causes]
        # What a killed process was deciding is decided again under the same id, above the spans
        # that it left.
        span_id = (
            0 if replan in self._decided else _span_id(self._base, -int.from_bytes(replan.encode()))
        )
        self._decided.add(replan)
        span = self._writer.start(
            names.PLAN_SPAN, attributes, self._context, links, span_id=span_id
        )
        self._replan_spans[replan] = span
        return span

    def _end_replan(self, replan: str, at: int) -> None:
        self._parked_replans.discard(replan)
        span = self._replan_spans.pop(replan, None)
        if span is not None:
            self._writer.end(span, at)

    def _start_question(self, body: journal.QuestionAsked, at: int) -> None:
        attributes: dict[str, str] = {names.QUESTION_ID: body.question}
        if self._writer.capture_content:
            attributes[names.QUESTION_TEXT] = self._writer.redact_text(body.text, MAX_CONTENT_CHARS)
        span = self._writer.start(
            names.ASK_SPAN, attributes, self._replan_context(body.replan), at=at
        )
        self._question_spans[body.question] = span, body.replan
        self._parked_replans.add(body.replan)

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
                attributes[names.SYSTEM_INSTRUCTIONS] = json.dumps(
                    [self._text_part(call.system)], ensure_ascii=False
                )
        known = {name: value for name, value in attributes.items() if value is not None}
        span = writer.start(
            f"{call.operation} {redact(call.model)}".rstrip(), known, kind=SpanKind.CLIENT
        )

        def report(completion: Completion) -> None:
            span.set_attribute(names.RESPONSE_MODEL, redact(completion.model))
            if completion.request_id:
                span.set_attribute(names.RESPONSE_ID, redact(completion.request_id))
            span.set_attribute(names.INPUT_TOKENS, completion.input_tokens)
            writer.set_usage(span, completion.usage)
            if call.operation == "chat":
                span.set_attribute(names.FINISH_REASONS, [completion.finish])
                span.set_attribute(names.OUTPUT_TOKENS, completion.output_tokens)
                if content:
                    parts = [self._text_part(completion.text)]
                    message = {
                        "role": "assistant",
                        "parts": parts,
                        "finish_reason": completion.finish,
                    }
                    span.set_attribute(
                        names.OUTPUT_MESSAGES, json.dumps([message], ensure_ascii=False)
                    )

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


_UNSUCCESSFUL: Final = (journal.AttemptFailed, journal.AttemptTimedOut, journal.AttemptInterrupted)
_OBSERVED: Final[tuple[type[journal.RecordBody], ...]] = (
    journal.AttemptStarted,
    journal.AttemptSucceeded,
    *_UNSUCCESSFUL,
    journal.ResultsStale,
    journal.PlanRevised,
    journal.AlternativesConsidered,
    journal.DecisionMade,
    journal.QuestionAsked,
    journal.QuestionReminded,
    journal.QuestionAnswered,
    journal.UsageCharged,
    journal.RunEnded,
)

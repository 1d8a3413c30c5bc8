"""The spans below that of a run: its attempts, its replans with the questions that they put, and what models are asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from replanning.changes import CancelTask, PlanChange
from replanning.journal.observations import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Usage,
    UsageCharged,
)
from replanning.journal.records import (
    AlternativesConsidered,
    DecisionMade,
    ErrorContained,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    Record,
    RecordBody,
    RunEnded,
)
from replanning.journal.triggers import Trigger
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.llm.completions import Completion, LLMCall
from replanning.plan.types import AttemptId, JsonValue, QuestionId, ReplanId, RunId, TaskId
from replanning.telemetry import names
from replanning.telemetry.names import ReportCompletion, ReportProposals, RunTracer
from replanning.telemetry.writer import MAX_CONTENT_CHARS, RecordHandler, SpanWriter, to_nanoseconds

if TYPE_CHECKING:
    from replanning.run.lifecycle import Lifecycle


_CAUSED_BY_ATTRIBUTES: Final = {names.LINK_KIND: "caused-by"}


class AttemptSpans:
    """The spans of a run's attempts.

    Args:
        pen: writes them.
        context: that of the run's span.
        live: the plan.
    """

    def __init__(self, pen: SpanWriter, context: Context, live: LivePlan) -> None:
        self.open_spans: dict[AttemptId, Span] = {}
        self.unsuccessful_contexts: dict[TaskId, SpanContext] = {}
        self._writer = pen
        self._context = context
        self._live = live

    def handlers(self) -> dict[type[RecordBody], RecordHandler]:
        """What is to be done on which record."""
        return {
            AttemptStarted: self._on_started,
            AttemptSucceeded: self._on_succeeded,
            AttemptFailed: self._on_failed,
            AttemptTimedOut: self._on_timed_out,
            AttemptInterrupted: self._on_interrupted,
            PlanRevised: self._on_revised,
        }

    def end_open(self, at: int) -> None:
        """End what the end of the run stops: it is not wanted any more, which is no error."""
        for span in self.open_spans.values():
            self._finish(span, "cancelled", at)
        self.open_spans.clear()

    def _on_started(self, body: AttemptStarted, at: int) -> None:
        entry = self._live.entry(body.task)
        attributes: dict[str, str | int] = {
            names.TASK_ID: body.task,
            names.ATTEMPT_ID: body.attempt,
            names.ATTEMPT_NUMBER: body.number,
            names.ATTEMPT_OUTCOME: "succeeded",  # what most come to costs nothing more when they end; nobody sees it before
        }
        tool = entry.fields["tool"]
        if tool is not None:
            attributes[names.TASK_TOOL] = tool
        if entry.parent is not None:
            attributes[names.TASK_ROOT] = entry.root
        if self._writer.capture_content and entry.task.arguments:
            attributes[names.TASK_ARGUMENTS] = self._writer.redact_json(entry.task.arguments)
        links = self._predecessor_links(entry)
        self.open_spans[body.attempt] = self._writer.start(names.ATTEMPT_SPAN, attributes, self._context, links, at)

    def _predecessor_links(self, entry: TaskEntry) -> tuple[Link, ...]:
        """A link to the attempt that one at this task comes after: at the task itself, or at one it replaces."""
        known = self.unsuccessful_contexts
        if not known:
            return ()
        kind, ancestor = "retries", entry
        while ancestor.id not in known:
            if ancestor.parent is None:
                return ()
            kind, ancestor = "replaces", ancestor.parent
        return (Link(known[ancestor.id], {names.LINK_KIND: kind}),)

    def _on_succeeded(self, body: AttemptSucceeded, at: int) -> None:
        span = self.open_spans.pop(body.attempt, None)
        if span is not None:
            if self._writer.capture_content and body.output is not None:
                span.set_attribute(names.TASK_OUTPUT, self._writer.redact_json(body.output, redacted=True))
            self._writer.end(span, at)

    def _on_failed(self, body: AttemptFailed, at: int) -> None:
        span = self._pop_unsuccessful(body.attempt, body.task)
        if span is not None:
            self._writer.set_error(span, body.failure.type, body.failure.message)
            self._finish(span, "failed", at)

    def _on_timed_out(self, body: AttemptTimedOut, at: int) -> None:
        span = self._pop_unsuccessful(body.attempt, body.task)
        if span is not None:
            self._writer.set_error(span, "timeout", f"not finished after {body.timeout:g} s")
            self._finish(span, "timed-out", at)

    def _on_interrupted(self, body: AttemptInterrupted, at: int) -> None:
        span = self._pop_unsuccessful(body.attempt, body.task)
        if span is not None:
            self._finish(span, "interrupted", at)

    def _on_revised(self, body: PlanRevised, at: int) -> None:
        for change in body.changes:
            if isinstance(change, CancelTask) and change.task_id in self._live:
                entry = self._live.entry(change.task_id)
                span = self._pop_unsuccessful(AttemptId(f"{entry.id}#{entry.attempts}"), entry.id)
                if span is not None:
                    self._finish(span, "cancelled", at)

    def _pop_unsuccessful(self, attempt: AttemptId, task: TaskId) -> Span | None:
        span = self.open_spans.pop(attempt, None)
        if span is not None:
            self.unsuccessful_contexts[task] = span.get_span_context()
        return span

    def _finish(self, span: Span, outcome: str, at: int) -> None:
        span.set_attribute(names.ATTEMPT_OUTCOME, outcome)
        self._writer.end(span, at)


class ReplanSpans:
    """The spans of a run's replans and of the questions that they put.

    Args:
        pen: writes them.
        context: that of the run's span.
        causes: the attempts that did not succeed, by task.
    """

    def __init__(self, pen: SpanWriter, context: Context, causes: Mapping[TaskId, SpanContext]) -> None:
        self.provider_spans: dict[str, Span] = {}
        self._writer = pen
        self._context = context
        self._cause_contexts = causes
        self._open_spans: dict[str, Span] = {}
        self._parked: set[str] = set()
        self._questions: dict[QuestionId, tuple[Span, str]] = {}

    def handlers(self) -> dict[type[RecordBody], RecordHandler]:
        """What is to be done on which record."""
        return {
            AlternativesConsidered: self._on_considered,
            DecisionMade: self._on_decided,
            QuestionAsked: self._on_asked,
            QuestionReminded: self._on_reminded,
            QuestionAnswered: self._on_answered,
        }

    def replan_context(self, replan: str | None) -> Context:
        """The context of a replan's span, or without one that of the run's."""
        span = None if replan is None else self._open_spans.get(replan)
        return self._context if span is None else set_span_in_context(span, self._context)

    @contextmanager
    def replan_span(self, replan: ReplanId, triggers: Sequence[Trigger]) -> Iterator[None]:
        """Trace a replan; a question to a person keeps it open beyond the block."""
        span = self._begin(replan, triggers)
        token = otel.attach(set_span_in_context(span))
        try:
            yield
        except Exception as error:
            self._writer.set_error(span, type(error).__name__, str(error))
            raise
        finally:
            otel.detach(token)
            if replan not in self._parked:
                self._end(replan, self._writer.now())

    def resume_question(self, asked: QuestionAsked, triggers: Sequence[Trigger]) -> None:
        """Go on waiting for the answer to a question that was asked before the run was resumed."""
        self._begin(asked.replan, triggers)
        self._on_asked(asked, self._writer.now())

    def end_open(self, at: int) -> None:
        """End what the end of the run leaves open."""
        for span, _ in self._questions.values():
            self._writer.end(span, at)
        self._questions.clear()
        for replan in list(self._open_spans):
            self._end(replan, at)

    def _begin(self, replan: ReplanId, triggers: Sequence[Trigger]) -> Span:
        attributes = {
            names.OPERATION_NAME: "plan",
            names.AGENT_NAME: names.INSTRUMENTATION_SCOPE,
            names.REPLAN_ID: replan,
            names.TRIGGER_IDS: [trigger.id for trigger in triggers],
            names.TRIGGER_KINDS: [trigger.kind for trigger in triggers],
        }
        tasks = dict.fromkeys(task_id for trigger in triggers for task_id in trigger.tasks)
        links = [
            Link(self._cause_contexts[task_id], _CAUSED_BY_ATTRIBUTES)
            for task_id in tasks
            if task_id in self._cause_contexts
        ]
        span = self._open_spans[replan] = self._writer.start(names.PLAN_SPAN, attributes, self._context, links)
        return span

    def _end(self, replan: str, at: int) -> None:
        self._parked.discard(replan)
        span = self._open_spans.pop(replan, None)
        if span is not None:
            self._writer.end(span, at)

    def _on_considered(self, body: AlternativesConsidered, at: int) -> None:
        span = self._open_spans.get(body.replan)
        if span is None:
            return
        rejected = sum(bool(candidate.rejected) for candidate in body.candidates)
        span.set_attribute(names.CANDIDATE_COUNT, len(body.candidates))
        span.set_attribute(names.REJECTED_COUNT, rejected)
        best = body.candidates[0].score if rejected < len(body.candidates) else None
        if best is not None:
            span.set_attribute(names.CONFIDENCE, best.total)
        if self._writer.capture_content:
            proposals: JsonValue = [c.alternative.model_dump(mode="json") for c in body.candidates]
            span.set_attribute(names.ALTERNATIVES, self._writer.redact_json(proposals))

    def _on_decided(self, body: DecisionMade, at: int) -> None:
        span = self._open_spans.get(body.replan)
        if span is None:
            return
        span.set_attribute(names.DECISION, body.decision)
        span.set_attribute(names.DECISION_RULE, body.rule)
        span.set_attribute(names.DECISION_BY, self._writer.redact_text(body.by))
        if self._writer.capture_content:
            span.set_attribute(names.DECISION_REASON, self._writer.redact_text(body.reason, MAX_CONTENT_CHARS))
        if body.replan in self._parked and body.decision != "ask":
            self._end(body.replan, at)

    def _on_asked(self, body: QuestionAsked, at: int) -> None:
        attributes: dict[str, str] = {names.QUESTION_ID: body.question}
        if self._writer.capture_content:
            attributes[names.QUESTION_TEXT] = self._writer.redact_text(body.text, MAX_CONTENT_CHARS)
        span = self._writer.start(names.ASK_SPAN, attributes, self.replan_context(body.replan), at=at)
        self._questions[body.question] = span, body.replan
        self._parked.add(body.replan)

    def _on_reminded(self, body: QuestionReminded, at: int) -> None:
        if body.question in self._questions:
            self._questions[body.question][0].add_event("reminded", timestamp=at)

    def _on_answered(self, body: QuestionAnswered, at: int) -> None:
        if body.question in self._questions:
            span, replan = self._questions.pop(body.question)
            span.set_attribute(names.QUESTION_VERDICT, body.verdict)
            self._writer.end(span, at)
            if body.verdict == "withdrawn":
                self._end(replan, at)


@contextmanager
def chat_span(pen: SpanWriter, call: LLMCall) -> Iterator[ReportCompletion]:
    """Trace a call of a language model by the GenAI conventions, as a child of the current span."""
    name = f"{call.operation} {pen.redact_text(call.model)}".rstrip()
    span = pen.start(name, _request_attributes(pen, call), kind=SpanKind.CLIENT)
    with pen.use_span(span):
        try:
            yield lambda completion: _set_response_attributes(pen, span, call, completion)
        except Exception:
            raise  # the span says so when it ends
        except BaseException:
            pen.set_error(span, "cancelled", "the call was cut off")
            raise


def _request_attributes(pen: SpanWriter, call: LLMCall) -> dict[str, str | int | float]:
    optional: dict[str, str | int | float | None] = {
        names.REQUEST_MODEL: pen.redact_text(call.model) or None,
        names.TEMPERATURE: call.temperature,
        names.MAX_TOKENS: call.max_tokens,
    }
    if pen.capture_content:
        system = [_text_part(pen, call.system)] if call.system else []
        optional[names.SYSTEM_INSTRUCTIONS] = json.dumps(system, ensure_ascii=False) if system else None
        asked: JsonValue = [{"role": "user", "parts": [_text_part(pen, call.prompt)]}]
        optional[names.INPUT_MESSAGES] = json.dumps(asked, ensure_ascii=False)
    given = {name: value for name, value in optional.items() if value is not None}
    return {names.OPERATION_NAME: call.operation, names.LLM_PROVIDER_NAME: pen.redact_text(call.provider), **given}


def _set_response_attributes(pen: SpanWriter, span: Span, call: LLMCall, completion: Completion) -> None:
    span.set_attribute(names.RESPONSE_MODEL, pen.redact_text(completion.model))
    if completion.request_id:
        span.set_attribute(names.RESPONSE_ID, pen.redact_text(completion.request_id))
    span.set_attribute(names.INPUT_TOKENS, completion.input_tokens)
    pen.set_usage(span, completion.usage)
    if call.operation != "chat":
        return
    span.set_attribute(names.FINISH_REASONS, [completion.finish])
    span.set_attribute(names.OUTPUT_TOKENS, completion.output_tokens)
    if pen.capture_content:
        message: JsonValue = {
            "role": "assistant",
            "parts": [_text_part(pen, completion.text)],
            "finish_reason": completion.finish,
        }
        span.set_attribute(names.OUTPUT_MESSAGES, json.dumps([message], ensure_ascii=False))


def _text_part(pen: SpanWriter, text: str) -> JsonValue:
    return {"type": "text", "content": pen.redact_text(text, MAX_CONTENT_CHARS)}


_W3C_PROPAGATOR: Final = TraceContextTextMapPropagator()


class OTelRunTracer(RunTracer):
    """The spans of a run: `replanning.run`, below it its attempts and replans, below these what they consist of.

    Args:
        pen: writes them.
        run: the run.
        trace: the trace context that the run began with, if it goes on in a new process.
        resumed: whether it does.
    """

    def __init__(self, pen: SpanWriter, run: RunId, *, trace: str | None = None, resumed: bool = False) -> None:
        links: tuple[Link, ...] = ()
        parent = otel.get_current()
        if trace is not None:
            # The trace goes on; who resumed the run is not its parent but is found from here.
            current = get_current_span().get_span_context()
            links = (Link(current),) if current.is_valid else ()
            parent = _W3C_PROPAGATOR.extract({"traceparent": trace}, context=parent)
        self._writer = pen
        self._span = pen.start(names.RUN_SPAN, {names.RUN_ID: run, names.RUN_RESUMED: resumed}, parent, links)
        self._context = set_span_in_context(self._span, parent)
        self._life: Lifecycle | None = None
        self._usage: dict[Span, Usage] = {}
        self._ended_at: int | None = None
        self._closed = False
        self._error_reported = False

    def __repr__(self) -> str:
        return f"<RunSpans {'closed' if self._closed else 'open'} {self.traceparent}>"

    @property
    def traceparent(self) -> str | None:
        """The trace context in the form of the W3C header; None where the trace has no identity."""
        carrier: dict[str, str] = {}
        _W3C_PROPAGATOR.inject(carrier, self._context)
        return carrier.get("traceparent")

    def watch(self, life: Lifecycle) -> None:
        """Follow a run from here on."""
        self._life = life
        plan, pen = life.live.plan, self._writer
        pen.on_error = self._report_error
        self._span.set_attribute(names.PLAN_TASKS, len(plan.tasks))
        if plan.name:
            self._span.set_attribute(names.PLAN_NAME, pen.redact_text(plan.name))
        if pen.capture_content:
            self._span.set_attribute(names.PLAN_OBJECTIVE, pen.redact_text(plan.goal.objective, MAX_CONTENT_CHARS))
        self._attempts = AttemptSpans(pen, self._context, life.live)
        self._replans = ReplanSpans(pen, self._context, self._attempts.unsuccessful_contexts)
        handlers = {**self._attempts.handlers(), **self._replans.handlers()}
        handlers[UsageCharged] = self._on_charged
        handlers[RunEnded] = self._on_ended
        for kind, handler in handlers.items():
            life.observers.setdefault(kind, []).append(_as_observer(handler))
        for asked in life.ledger.open_questions.values():
            found = [life.ledger.triggers[t] for t in asked.triggers if t in life.ledger.triggers]
            self._replans.resume_question(asked, found)

    def attach_attempt(self, attempt: AttemptId) -> Token[Context] | None:
        """Make the span of an attempt the current one, so that spans of its body become its children."""
        span = self._attempts.open_spans.get(attempt)
        return None if span is None else otel.attach(set_span_in_context(span))

    def detach(self, token: Token[Context]) -> None:
        """Make the span that was current before the current one again."""
        otel.detach(token)

    def replan_span(self, replan: ReplanId, triggers: Sequence[Trigger]) -> AbstractContextManager[None]:
        """Trace a replan; a question to a person keeps it open beyond the block."""
        return self._replans.replan_span(replan, triggers)

    @contextmanager
    def provider_span(self, name: str) -> Iterator[ReportProposals]:
        """Trace the asking of a provider, whose own spans become children."""
        span = self._writer.start(f"propose {name}", {names.PROVIDER_NAME: name})
        self._replans.provider_spans[name] = span

        def answered(proposed: int, late: bool) -> None:
            span.set_attribute(names.PROPOSED_COUNT, proposed)
            if late:
                self._writer.set_error(span, "timeout", "it did not answer in time")

        try:
            with self._writer.use_span(span):
                yield answered
        finally:
            self._replans.provider_spans.pop(name, None)

    def chat_span(self, call: LLMCall) -> AbstractContextManager[ReportCompletion]:
        """Trace a call of a language model, as a child of whatever span is current."""
        return chat_span(self._writer, call)

    def scoring_span(self) -> AbstractContextManager[None]:
        """Trace the checking, scoring and ranking of what was proposed."""
        return self._writer.use_span(self._writer.start(names.SCORE_SPAN, {}))

    @contextmanager
    def apply_span(self, changes: Sequence[PlanChange], by: str, replan: str | None) -> Iterator[None]:
        """Trace the applying of changes to the plan, within their replan, or by hand within the run."""
        assert self._life is not None
        context = self._replans.replan_context(replan)
        attributes = {
            names.CHANGES: [change.kind for change in changes],
            names.CHANGED_BY: self._writer.redact_text(by),
        }
        span = self._writer.start(names.APPLY_SPAN, attributes, context)
        with self._writer.use_span(span, current=False):
            yield
            span.set_attribute(names.REVISION, self._life.live.revision)

    def close(self, failure: BaseException | None) -> None:
        """End the span of the run; it is an error when the run failed or was aborted, or its user's code raised."""
        if self._closed:
            return
        self._closed = True
        now = self._writer.now()
        if self._life is not None:
            self._end_open(now)
            self._set_run_attributes(self._life)
        if failure is not None:
            self._writer.set_error(self._span, type(failure).__name__, str(failure))
        self._writer.end(self._span, now if self._ended_at is None else self._ended_at)

    def _set_run_attributes(self, life: Lifecycle) -> None:
        self._span.set_attribute(names.REVISION, life.live.revision)
        self._writer.set_usage(self._span, life.ledger.budget_tracker.spent)
        if life.end is not None:
            self._span.set_attribute(names.RUN_STATUS, life.end.status)
            self._span.set_attribute(names.RUN_REASON, self._writer.redact_text(life.end.reason))
            if life.end.status in ("failed", "aborted"):
                self._writer.set_error(self._span, life.end.status, life.end.reason)

    def _report_error(self, text: str) -> None:
        """Record, once, that tracing fails; the run goes on without those spans."""
        life = self._life
        if life is not None and not self._error_reported and not life.journal.blocked:
            self._error_reported = True
            life.commit_or_defer(ErrorContained("tracing", text))

    def _on_ended(self, body: RunEnded, at: int) -> None:
        self._ended_at = at
        self._end_open(at)

    def _end_open(self, at: int) -> None:
        self._attempts.end_open(at)
        self._replans.end_open(at)
        self._usage.clear()

    def _on_charged(self, body: UsageCharged, at: int) -> None:
        span = None
        if body.attempt is not None:
            span = self._attempts.open_spans.get(body.attempt)
        elif body.provider is not None:
            span = self._replans.provider_spans.get(body.provider)
        if span is not None:
            self._usage[span] = total = self._usage.get(span, Usage()) + body.usage
            self._writer.set_usage(span, total)


def _as_observer(handler: RecordHandler) -> Callable[[Record], None]:
    return lambda record: handler(record.body, to_nanoseconds(record.at))

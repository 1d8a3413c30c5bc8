"""The spans of one run, made from its records as they are committed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
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

from replanning import _spans as names
from replanning._changes import CancelTask, PlanChange
from replanning._entries import Entry
from replanning._ids import AttemptId, QuestionId, ReplanId, RunId, TaskId
from replanning._interfaces import Clock
from replanning._live import LivePlan
from replanning._plan import JsonValue
from replanning._records import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Body,
    Charged,
    Contained,
    Decided,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    Record,
    Revised,
    RunEnded,
    Usage,
)
from replanning._redaction import Redactor
from replanning._spans import Answered, Spans
from replanning._triggers import Trigger

if TYPE_CHECKING:
    from replanning._lifecycle import Lifecycle

MAX_TEXT: Final = 1_000
"""Characters of a description."""

MAX_CONTENT: Final = 10_000
"""Characters of arguments, outputs and the like, where they are wanted."""

_MARGIN: Final = 1_000
"""Characters that are looked at beyond what is kept, so that nothing kept is half a secret."""

_CAUSED_BY: Final = {names.LINK: "caused-by"}

_W3C: Final = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int | Sequence[str]]


def nanoseconds(seconds: float) -> int:
    """Seconds since the epoch as OpenTelemetry wants them; a float has no more than microseconds of them."""
    return round(seconds * 1e6) * 1000


class Pen:
    """Writes spans: times from the clock of the run, and no secrets.

    Args:
        tracer: makes spans.
        clock: stamps spans whose beginning or end is no record.
        redactor: takes secrets out of text.
        content: whether arguments, outputs, reasons and questions go onto spans.
    """

    def __init__(self, tracer: Tracer, clock: Clock, redactor: Redactor, *, content: bool = False) -> None:
        self.content = content
        self.on_trouble: Callable[[str], None] = lambda text: None
        self._tracer = tracer
        self._clock = clock
        self._redactor = redactor

    def now(self) -> int:
        """The time of the run's clock in nanoseconds."""
        return nanoseconds(self._clock.now())

    def start(
        self,
        name: str,
        attributes: Attributes,
        context: Context | None = None,
        links: Sequence[Link] = (),
        at: int | None = None,
    ) -> Span:
        """Start a span, now unless it is said when, within the given context or else the current one."""
        at = self.now() if at is None else at
        try:
            return self._tracer.start_span(name, context, SpanKind.INTERNAL, attributes, links, at)
        except Exception as error:  # noqa: BLE001 - law 7: a span processor may raise anything
            self.on_trouble(self.text(repr(error)))
            return INVALID_SPAN

    def end(self, span: Span, at: int | None = None) -> None:
        """End a span, now unless it is said when."""
        try:
            span.end(self.now() if at is None else at)
        except Exception as error:  # noqa: BLE001 - law 7: likewise
            self.on_trouble(self.text(repr(error)))

    @contextmanager
    def within(self, span: Span, *, current: bool = True) -> Iterator[None]:
        """End a span with a block, as an error if the block raises one; in between it may be the current span."""
        token = otel.attach(set_span_in_context(span)) if current else None
        try:
            yield
        except Exception as error:
            self.fail(span, type(error).__name__, str(error))
            raise
        finally:
            if token is not None:
                otel.detach(token)
            self.end(span)

    def fail(self, span: Span, kind: str, text: str) -> None:
        """Mark a span as an error."""
        span.set_attribute(names.ERROR_TYPE, kind)
        span.set_status(Status(StatusCode.ERROR, self.text(text)))

    def spent(self, span: Span, usage: Usage) -> None:
        """Put on a span what was used."""
        for name, amount in zip(names.USAGE, (usage.calls, usage.tokens, usage.money), strict=True):
            if amount:
                span.set_attribute(name, amount)

    def text(self, text: str, limit: int = MAX_TEXT) -> str:
        """A text without secrets, cut where it is long; only as much of it is looked at as is kept."""
        cut = len(text) > limit + _MARGIN
        clean = self._redactor.text(text[: limit + _MARGIN] if cut else text)
        if cut:
            clean = clean[:-_MARGIN]  # its end may be half a secret, which is not known for one
        return clean if len(clean) <= limit and not cut else f"{clean[:limit]}…"

    def json(self, value: JsonValue, *, clean: bool = False) -> str:
        """The same for a JSON value; one that has no secrets is not searched for them again."""
        text = json.dumps(value, ensure_ascii=False)
        if len(text) > 10 * MAX_CONTENT:
            return f"[{len(text)} characters]"
        return self.text(text if clean else json.dumps(self._redactor.value(value), ensure_ascii=False), MAX_CONTENT)


class RunSpans(Spans):
    """The spans of a run: `replanning.run`, below it its attempts and replans, below these what they consist of.

    Args:
        pen: writes them.
        run: the run.
        trace: the trace context that the run began with, if it goes on in a new process.
        resumed: whether it does.
    """

    def __init__(self, pen: Pen, run: RunId, *, trace: str | None = None, resumed: bool = False) -> None:
        links: tuple[Link, ...] = ()
        parent = otel.get_current()
        if trace is not None:
            # The trace goes on; who resumed the run is not its parent but is found from here.
            current = get_current_span().get_span_context()
            links = (Link(current),) if current.is_valid else ()
            parent = _W3C.extract({"traceparent": trace}, context=parent)
        self._pen = pen
        self._span = pen.start(names.RUN_SPAN, {names.RUN_ID: run, names.RUN_RESUMED: resumed}, parent, links)
        self._context = set_span_in_context(self._span, parent)
        self._life: Lifecycle | None = None
        self._usage: dict[Span, Usage] = {}
        self._ended_at: int | None = None
        self._closed = False
        self._troubled = False

    def __repr__(self) -> str:
        return f"<RunSpans {'closed' if self._closed else 'open'} {self.traceparent}>"

    @property
    def traceparent(self) -> str | None:
        """The trace context in the form of the W3C header; None where the trace has no identity."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return carrier.get("traceparent")

    def watch(self, life: Lifecycle) -> None:
        """Follow a run from here on."""
        self._life = life
        plan, pen = life.live.plan, self._pen
        pen.on_trouble = self._contain
        self._span.set_attribute(names.PLAN_TASKS, len(plan.tasks))
        if plan.name:
            self._span.set_attribute(names.PLAN_NAME, pen.text(plan.name))
        if pen.content:
            self._span.set_attribute(names.PLAN_OBJECTIVE, pen.text(plan.goal.objective, MAX_CONTENT))
        self._attempts = AttemptSpans(pen, self._context, life.live)
        self._replans = ReplanSpans(pen, self._context, self._attempts.unsuccessful)
        handlers = {**self._attempts.handlers(), **self._replans.handlers()}
        handlers[Charged] = self._on_charged
        handlers[RunEnded] = self._on_ended
        for kind, handler in handlers.items():
            life.observers.setdefault(kind, []).append(_observer(handler))
        for asked in life.ledger.questions.values():
            found = [life.ledger.triggers[t] for t in asked.triggers if t in life.ledger.triggers]
            self._replans.reopen(asked, found)

    def enter(self, attempt: AttemptId) -> Token[Context] | None:
        """Make the span of an attempt the current one, so that spans of its body become its children."""
        span = self._attempts.open.get(attempt)
        return None if span is None else otel.attach(set_span_in_context(span))

    def leave(self, token: Token[Context]) -> None:
        """Make the span that was current before the current one again."""
        otel.detach(token)

    def replan(self, replan: ReplanId, triggers: Sequence[Trigger]) -> AbstractContextManager[None]:
        """Trace a replan; a question to a person keeps it open beyond the block."""
        return self._replans.trace(replan, triggers)

    @contextmanager
    def provider(self, name: str) -> Iterator[Answered]:
        """Trace the asking of a provider, whose own spans become children."""
        span = self._pen.start(f"propose {name}", {names.PROVIDER: name})
        self._replans.providers[name] = span

        def answered(proposed: int, late: bool) -> None:
            span.set_attribute(names.PROPOSED, proposed)
            if late:
                self._pen.fail(span, "timeout", "it did not answer in time")

        try:
            with self._pen.within(span):
                yield answered
        finally:
            self._replans.providers.pop(name, None)

    def score(self) -> AbstractContextManager[None]:
        """Trace the checking, scoring and ranking of what was proposed."""
        return self._pen.within(self._pen.start(names.SCORE_SPAN, {}))

    @contextmanager
    def apply(self, changes: Sequence[PlanChange], by: str, replan: str | None) -> Iterator[None]:
        """Trace the applying of changes to the plan, within their replan, or by hand within the run."""
        assert self._life is not None
        context = self._replans.context_of(replan)
        attributes = {names.CHANGES: [change.kind for change in changes], names.CHANGED_BY: self._pen.text(by)}
        span = self._pen.start(names.APPLY_SPAN, attributes, context)
        with self._pen.within(span, current=False):
            yield
            span.set_attribute(names.REVISION, self._life.live.revision)

    def close(self, failure: BaseException | None) -> None:
        """End the span of the run; it is an error when the run failed or was aborted, or its user's code raised."""
        if self._closed:
            return
        self._closed = True
        now = self._pen.now()
        if self._life is not None:
            self._end_open(now)
            self._describe(self._life)
        if failure is not None:
            self._pen.fail(self._span, type(failure).__name__, str(failure))
        self._pen.end(self._span, now if self._ended_at is None else self._ended_at)

    def _describe(self, life: Lifecycle) -> None:
        self._span.set_attribute(names.REVISION, life.live.revision)
        self._pen.spent(self._span, life.ledger.spending.spent)
        if life.end is not None:
            self._span.set_attribute(names.RUN_STATUS, life.end.status)
            self._span.set_attribute(names.RUN_REASON, self._pen.text(life.end.reason))
            if life.end.status in ("failed", "aborted"):
                self._pen.fail(self._span, life.end.status, life.end.reason)

    def _contain(self, text: str) -> None:
        """Record, once, that tracing fails; the run goes on without those spans."""
        life = self._life
        if life is not None and not self._troubled and not life.journal.blocked:
            self._troubled = True
            life.observe(Contained("tracing", text))

    def _on_ended(self, body: RunEnded, at: int) -> None:
        self._ended_at = at
        self._end_open(at)

    def _end_open(self, at: int) -> None:
        self._attempts.end_open(at)
        self._replans.end_open(at)
        self._usage.clear()

    def _on_charged(self, body: Charged, at: int) -> None:
        span = None
        if body.attempt is not None:
            span = self._attempts.open.get(body.attempt)
        elif body.provider is not None:
            span = self._replans.providers.get(body.provider)
        if span is not None:
            self._usage[span] = total = self._usage.get(span, Usage()) + body.usage
            self._pen.spent(span, total)


class AttemptSpans:
    """The spans of a run's attempts.

    Args:
        pen: writes them.
        context: that of the run's span.
        live: the plan.
    """

    def __init__(self, pen: Pen, context: Context, live: LivePlan) -> None:
        self.open: dict[AttemptId, Span] = {}
        self.unsuccessful: dict[TaskId, SpanContext] = {}
        self._pen = pen
        self._context = context
        self._live = live

    def handlers(self) -> dict[type[Body], Handler]:
        """What is to be done on which record."""
        return {
            AttemptStarted: self._on_started,
            AttemptSucceeded: self._on_succeeded,
            AttemptFailed: self._on_failed,
            AttemptTimedOut: self._on_timed_out,
            AttemptInterrupted: self._on_interrupted,
            Revised: self._on_revised,
        }

    def end_open(self, at: int) -> None:
        """End what the end of the run stops: it is not wanted any more, which is no error."""
        for span in self.open.values():
            self._finish(span, "cancelled", at)
        self.open.clear()

    def _on_started(self, body: AttemptStarted, at: int) -> None:
        entry = self._live.entry(body.task)
        attributes: dict[str, str | int] = {
            names.TASK_ID: body.task,
            names.ATTEMPT_ID: body.attempt,
            names.ATTEMPT_NUMBER: body.number,
        }
        if entry.task.tool is not None:
            attributes[names.TASK_TOOL] = entry.task.tool
        if entry.parent is not None:
            attributes[names.TASK_ROOT] = entry.root
        if self._pen.content and entry.task.arguments:
            attributes[names.TASK_ARGUMENTS] = self._pen.json(entry.task.arguments)
        links = self._earlier(entry)
        self.open[body.attempt] = self._pen.start(names.ATTEMPT_SPAN, attributes, self._context, links, at)

    def _earlier(self, entry: Entry) -> tuple[Link, ...]:
        """A link to the attempt that one at this task comes after: at the task itself, or at one it replaces."""
        known = self.unsuccessful
        if not known:
            return ()
        kind, ancestor = "retries", entry
        while ancestor.id not in known:
            if ancestor.parent is None:
                return ()
            kind, ancestor = "replaces", ancestor.parent
        return (Link(known[ancestor.id], {names.LINK: kind}),)

    def _on_succeeded(self, body: AttemptSucceeded, at: int) -> None:
        span = self.open.pop(body.attempt, None)
        if span is not None:
            if self._pen.content and body.output is not None:
                span.set_attribute(names.TASK_OUTPUT, self._pen.json(body.output, clean=True))
            self._finish(span, "succeeded", at)

    def _on_failed(self, body: AttemptFailed, at: int) -> None:
        span = self._unsuccessful(body.attempt, body.task)
        if span is not None:
            self._pen.fail(span, body.failure.type, body.failure.message)
            self._finish(span, "failed", at)

    def _on_timed_out(self, body: AttemptTimedOut, at: int) -> None:
        span = self._unsuccessful(body.attempt, body.task)
        if span is not None:
            self._pen.fail(span, "timeout", f"not finished after {body.timeout:g} s")
            self._finish(span, "timed-out", at)

    def _on_interrupted(self, body: AttemptInterrupted, at: int) -> None:
        span = self._unsuccessful(body.attempt, body.task)
        if span is not None:
            self._finish(span, "interrupted", at)

    def _on_revised(self, body: Revised, at: int) -> None:
        for change in body.changes:
            if isinstance(change, CancelTask) and change.task_id in self._live:
                entry = self._live.entry(change.task_id)
                span = self._unsuccessful(AttemptId(f"{entry.id}#{entry.attempts}"), entry.id)
                if span is not None:
                    self._finish(span, "cancelled", at)

    def _unsuccessful(self, attempt: AttemptId, task: TaskId) -> Span | None:
        span = self.open.pop(attempt, None)
        if span is not None:
            self.unsuccessful[task] = span.get_span_context()
        return span

    def _finish(self, span: Span, outcome: str, at: int) -> None:
        span.set_attribute(names.OUTCOME, outcome)
        self._pen.end(span, at)


class ReplanSpans:
    """The spans of a run's replans and of the questions that they put.

    Args:
        pen: writes them.
        context: that of the run's span.
        causes: the attempts that did not succeed, by task.
    """

    def __init__(self, pen: Pen, context: Context, causes: Mapping[TaskId, SpanContext]) -> None:
        self.providers: dict[str, Span] = {}
        self._pen = pen
        self._context = context
        self._causes = causes
        self._open: dict[str, Span] = {}
        self._parked: set[str] = set()
        self._questions: dict[QuestionId, tuple[Span, str]] = {}

    def handlers(self) -> dict[type[Body], Handler]:
        """What is to be done on which record."""
        return {
            AlternativesConsidered: self._on_considered,
            Decided: self._on_decided,
            QuestionAsked: self._on_asked,
            QuestionReminded: self._on_reminded,
            QuestionAnswered: self._on_answered,
        }

    def context_of(self, replan: str | None) -> Context:
        """The context of a replan's span, or without one that of the run's."""
        span = None if replan is None else self._open.get(replan)
        return self._context if span is None else set_span_in_context(span, self._context)

    @contextmanager
    def trace(self, replan: ReplanId, triggers: Sequence[Trigger]) -> Iterator[None]:
        """Trace a replan; a question to a person keeps it open beyond the block."""
        span = self._begin(replan, triggers)
        token = otel.attach(set_span_in_context(span))
        try:
            yield
        except Exception as error:
            self._pen.fail(span, type(error).__name__, str(error))
            raise
        finally:
            otel.detach(token)
            if replan not in self._parked:
                self._end(replan, self._pen.now())

    def reopen(self, asked: QuestionAsked, triggers: Sequence[Trigger]) -> None:
        """Go on waiting for the answer to a question that was asked before the run was resumed."""
        self._begin(asked.replan, triggers)
        self._on_asked(asked, self._pen.now())

    def end_open(self, at: int) -> None:
        """End what the end of the run leaves open."""
        for span, _ in self._questions.values():
            self._pen.end(span, at)
        self._questions.clear()
        for replan in list(self._open):
            self._end(replan, at)

    def _begin(self, replan: ReplanId, triggers: Sequence[Trigger]) -> Span:
        attributes = {
            names.OPERATION: "plan",
            names.AGENT: names.SCOPE,
            names.REPLAN_ID: replan,
            names.TRIGGERS: [trigger.id for trigger in triggers],
            names.TRIGGER_KINDS: [trigger.kind for trigger in triggers],
        }
        tasks = dict.fromkeys(task_id for trigger in triggers for task_id in trigger.tasks)
        links = [Link(self._causes[task_id], _CAUSED_BY) for task_id in tasks if task_id in self._causes]
        span = self._open[replan] = self._pen.start(names.PLAN_SPAN, attributes, self._context, links)
        return span

    def _end(self, replan: str, at: int) -> None:
        self._parked.discard(replan)
        span = self._open.pop(replan, None)
        if span is not None:
            self._pen.end(span, at)

    def _on_considered(self, body: AlternativesConsidered, at: int) -> None:
        span = self._open.get(body.replan)
        if span is None:
            return
        rejected = sum(bool(candidate.rejected) for candidate in body.candidates)
        span.set_attribute(names.CANDIDATES, len(body.candidates))
        span.set_attribute(names.REJECTED, rejected)
        best = body.candidates[0].score if rejected < len(body.candidates) else None
        if best is not None:
            span.set_attribute(names.CONFIDENCE, best.total)
        if self._pen.content:
            proposals: JsonValue = [c.alternative.model_dump(mode="json") for c in body.candidates]
            span.set_attribute(names.ALTERNATIVES, self._pen.json(proposals))

    def _on_decided(self, body: Decided, at: int) -> None:
        span = self._open.get(body.replan)
        if span is None:
            return
        span.set_attribute(names.DECISION, body.decision)
        span.set_attribute(names.DECISION_RULE, body.rule)
        span.set_attribute(names.DECISION_BY, self._pen.text(body.by))
        if self._pen.content:
            span.set_attribute(names.DECISION_REASON, self._pen.text(body.reason, MAX_CONTENT))
        if body.replan in self._parked and body.decision != "ask":
            self._end(body.replan, at)

    def _on_asked(self, body: QuestionAsked, at: int) -> None:
        attributes: dict[str, str] = {names.QUESTION_ID: body.question}
        if self._pen.content:
            attributes[names.QUESTION_TEXT] = self._pen.text(body.text, MAX_CONTENT)
        span = self._pen.start(names.ASK_SPAN, attributes, self.context_of(body.replan), at=at)
        self._questions[body.question] = span, body.replan
        self._parked.add(body.replan)

    def _on_reminded(self, body: QuestionReminded, at: int) -> None:
        if body.question in self._questions:
            self._questions[body.question][0].add_event("reminded", timestamp=at)

    def _on_answered(self, body: QuestionAnswered, at: int) -> None:
        if body.question in self._questions:
            span, replan = self._questions.pop(body.question)
            span.set_attribute(names.VERDICT, body.verdict)
            self._pen.end(span, at)
            if body.verdict == "withdrawn":
                self._end(replan, at)


Handler = Callable[[Any, int], None]
"""Takes the body of a record and its time in nanoseconds."""


def _observer(handler: Handler) -> Callable[[Record], None]:
    return lambda record: handler(record.body, nanoseconds(record.at))

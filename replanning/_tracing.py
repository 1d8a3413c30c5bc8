"""The spans of one run, made from its records as they are committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from replanning import _spans as names
from replanning._changes import PlanChange
from replanning._completions import LLMCall
from replanning._ids import AttemptId, ReplanId, RunId
from replanning._observations import Charged, Usage
from replanning._pen import MAX_CONTENT, Handler, Pen, nanoseconds
from replanning._records import Contained, Record, RunEnded
from replanning._span_parts import AttemptSpans, ReplanSpans, chat
from replanning._spans import Answered, Completed, Spans
from replanning._triggers import Trigger

if TYPE_CHECKING:
    from replanning._lifecycle import Lifecycle

_W3C: Final = TraceContextTextMapPropagator()


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

    def chat(self, call: LLMCall) -> AbstractContextManager[Completed]:
        """Trace a call of a language model, as a child of whatever span is current."""
        return chat(self._pen, call)

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


def _observer(handler: Handler) -> Callable[[Record], None]:
    return lambda record: handler(record.body, nanoseconds(record.at))

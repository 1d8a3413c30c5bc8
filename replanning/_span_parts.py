"""The spans below that of a run: its attempts, its replans with the questions that they put, and what models are asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, set_span_in_context

from replanning import _spans as names
from replanning._changes import CancelTask
from replanning._completions import Completion, LLMCall
from replanning._entries import Entry
from replanning._ids import AttemptId, QuestionId, ReplanId, TaskId
from replanning._live import LivePlan
from replanning._observations import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
)
from replanning._pen import MAX_CONTENT, Handler, Pen
from replanning._plan import JsonValue
from replanning._records import (
    AlternativesConsidered,
    Body,
    Decided,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    Revised,
)
from replanning._spans import Completed
from replanning._triggers import Trigger

_CAUSED_BY: Final = {names.LINK: "caused-by"}


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
            names.OUTCOME: "succeeded",  # what most come to costs nothing more when they end; nobody sees it before
        }
        tool = entry.fields["tool"]
        if tool is not None:
            attributes[names.TASK_TOOL] = tool
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
            self._pen.end(span, at)

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


@contextmanager
def chat(pen: Pen, call: LLMCall) -> Iterator[Completed]:
    """Trace a call of a language model by the GenAI conventions, as a child of the current span."""
    name = f"{call.operation} {pen.text(call.model)}".rstrip()
    span = pen.start(name, _asked(pen, call), kind=SpanKind.CLIENT)
    with pen.within(span):
        try:
            yield lambda completion: _on_completed(pen, span, call, completion)
        except Exception:
            raise  # the span says so when it ends
        except BaseException:
            pen.fail(span, "cancelled", "the call was cut off")
            raise


def _asked(pen: Pen, call: LLMCall) -> dict[str, str | int | float]:
    optional: dict[str, str | int | float | None] = {
        names.REQUEST_MODEL: pen.text(call.model) or None,
        names.TEMPERATURE: call.temperature,
        names.MAX_TOKENS: call.max_tokens,
    }
    if pen.content:
        system = [_part(pen, call.system)] if call.system else []
        optional[names.SYSTEM_INSTRUCTIONS] = json.dumps(system, ensure_ascii=False) if system else None
        asked: JsonValue = [{"role": "user", "parts": [_part(pen, call.prompt)]}]
        optional[names.INPUT_MESSAGES] = json.dumps(asked, ensure_ascii=False)
    given = {name: value for name, value in optional.items() if value is not None}
    return {names.OPERATION: call.operation, names.LLM_PROVIDER: pen.text(call.provider), **given}


def _on_completed(pen: Pen, span: Span, call: LLMCall, completion: Completion) -> None:
    span.set_attribute(names.RESPONSE_MODEL, pen.text(completion.model))
    if completion.request_id:
        span.set_attribute(names.RESPONSE_ID, pen.text(completion.request_id))
    span.set_attribute(names.INPUT_TOKENS, completion.input_tokens)
    pen.spent(span, completion.usage)
    if call.operation != "chat":
        return
    span.set_attribute(names.FINISH_REASONS, [completion.finish])
    span.set_attribute(names.OUTPUT_TOKENS, completion.output_tokens)
    if pen.content:
        message: JsonValue = {
            "role": "assistant",
            "parts": [_part(pen, completion.text)],
            "finish_reason": completion.finish,
        }
        span.set_attribute(names.OUTPUT_MESSAGES, json.dumps([message], ensure_ascii=False))


def _part(pen: Pen, text: str) -> JsonValue:
    return {"type": "text", "content": pen.text(text, MAX_CONTENT)}

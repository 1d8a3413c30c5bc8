"""Interface between a run and its tracing; importing it does not load OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Protocol

from replanning.changes import PlanChange
from replanning.decision.evaluation import PlanEvaluation
from replanning.decision.ledger import Ledger
from replanning.journal.records import Record, RecordBody, RunEnded, Trigger
from replanning.live.plan import LivePlan
from replanning.llm.completions import Completion, LLMCall
from replanning.plan.types import AttemptId, ReplanId

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context


ReportProposals = Callable[[int, bool], None]
"""Called with the number of proposals of a provider, and with True if the provider was cut off."""

ReportCompletion = Callable[[Completion], None]
"""Called with the completion of a language model."""


class WatchedJournal(Protocol):
    """The parts of a run's journal that tracing and metrics use."""

    @property
    def state(self) -> str:
        """`open` while it takes records."""
        ...

    def subscribe(
        self, function: Callable[[Record], None], kinds: Sequence[type[RecordBody]] = ()
    ) -> None:
        """Call a function with each record of these kinds after it took effect."""
        ...


class WatchedEvaluation(Protocol):
    """Evaluates the plan of a run."""

    def evaluate(self) -> PlanEvaluation:
        """Return the progress and health of the plan now."""
        ...


class WatchedRun(Protocol):
    """The parts of a run that tracing and metrics read.

    Attributes:
        live: the plan as it runs.
        ledger: the triggers, open questions and budget of the run.
        end: the last record of the run, once it has ended.
    """

    live: LivePlan
    ledger: Ledger
    end: RunEnded | None

    @property
    def journal(self) -> WatchedJournal:
        """Its journal."""
        ...

    @property
    def evaluation(self) -> WatchedEvaluation:
        """Evaluates its plan."""
        ...

    def record_error(self, where: str, error: BaseException | str) -> None:
        """Record an error that was contained, and warn of it."""
        ...


_NO_SPAN: Final = nullcontext()
_NO_PROVIDER_SPAN: Final[AbstractContextManager[ReportProposals]] = nullcontext(
    lambda proposed, late: None
)


class RunTracer:
    """Tracing hooks of a run, which do nothing.

    `OTelRunTracer` in `replanning.telemetry.spans` writes spans.

    Attributes:
        traceparent: the trace context as a W3C `traceparent` header; None without a valid trace.
    """

    traceparent: str | None = None

    def watch(self, run: WatchedRun) -> None:
        """Follow the records of a run from now on."""

    def attempt_trace(self, attempt: AttemptId) -> str | None:
        """Return the trace context of a running attempt as a W3C `traceparent` header, if any."""
        return None

    def attach_attempt(self, attempt: AttemptId) -> Token[Context] | None:
        """Make the span of an attempt the parent of the spans of its body; None without a span."""
        return None

    def record_asked(self, attempt: AttemptId, tool: str) -> None:
        """Record in the span of an attempt that a second tool is called, to verify its output."""

    def detach(self, token: Token[Context]) -> None:
        """Restore the span that was current before `attach_attempt`."""

    def replan_span(
        self, replan: ReplanId, triggers: Sequence[Trigger]
    ) -> AbstractContextManager[None]:
        """Trace a replan; an open question keeps its span open beyond the block."""
        return _NO_SPAN

    def provider_span(self, name: str) -> AbstractContextManager[ReportProposals]:
        """Trace a request to a provider; spans that it opens itself become children."""
        return _NO_PROVIDER_SPAN

    def chat_span(self, call: LLMCall) -> AbstractContextManager[ReportCompletion]:
        """Trace a call of a language model as a child of the current span."""
        return nullcontext(lambda completion: None)

    def scoring_span(self) -> AbstractContextManager[None]:
        """Trace the checks, scores and ranking of the proposals."""
        return _NO_SPAN

    def apply_span(
        self, changes: Sequence[PlanChange], by: str, replan: str | None
    ) -> AbstractContextManager[None]:
        """Trace the application of changes, as part of a replan or, without one, of the run."""
        return _NO_SPAN

    def close(self, failure: BaseException | None) -> None:
        """End the span of the run and all spans that are still open."""


NOOP_TRACER: Final = RunTracer()
"""The tracer of every run without tracing."""

"""Meter of the calls that a provider makes for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from replanning.decision.ledger import Ledger
from replanning.errors import LLMRequestRejected, LLMUnavailable
from replanning.journal.records import Usage
from replanning.llm.completions import Completion, LLMCall
from replanning.run.event_loop import LoopThread
from replanning.telemetry.tracer import RunTracer

_UNBILLED_ERRORS: Final = (LLMRequestRejected, LLMUnavailable)


class MeteredRun(Protocol):
    """The parts of a run that its meters use.

    Attributes:
        loop: the thread in which the usage is counted.
        ledger: has the budget.
        spans: traces the calls.
    """

    loop: LoopThread
    ledger: Ledger
    spans: RunTracer

    def charge(self, usage: Usage, *, provider: str | None = None) -> None:
        """Count usage against the budget."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class RunMeter:
    """Reserves, traces and counts the calls that one provider makes for a run.

    Each call counts, however it ends.

    An answer counts with the tokens that the service reports. A call that the service rejected, or
    that did not reach it, counts without tokens. The cost of any other, such as one cut off at its
    deadline, is unknown: it counts with the whole reservation, so that the budget holds.

    Attributes:
        note: records remarks on calls.
    """

    _run: MeteredRun
    _provider: str
    note: Callable[[str], None] = lambda text: None

    def __repr__(self) -> str:
        return f"<RunMeter of {self._provider} {self._run.ledger.budget_tracker!r}>"

    @contextmanager
    def call(self, call: LLMCall) -> Iterator[Callable[[Completion], None]]:
        """Reserve the estimate of a call and trace it.

        Yields a function; call it with the completion.

        Raises:
            BudgetExceeded: the call exceeds the rest of the budget; nothing was sent.
        """
        run = self._run
        release = run.loop.call(run.ledger.budget_tracker.reserve, call.estimate)
        used = call.estimate
        try:
            with run.spans.chat_span(call) as traced:

                def answered(completion: Completion) -> None:
                    nonlocal used
                    used = completion.usage
                    traced(completion)

                yield answered
        except _UNBILLED_ERRORS:
            used = Usage(calls=1) if used is call.estimate else used
            raise
        finally:
            run.loop.call(run.charge, used, provider=self._provider)
            release()

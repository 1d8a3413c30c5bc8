"""Metering of the calls of language models for a run: against its budget, and on its trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from replanning.decision.ledger import BudgetTracker
from replanning.errors import LLMRequestRejected, LLMUnavailable
from replanning.journal.records import Usage
from replanning.llm.completions import Completion, LLMCall
from replanning.telemetry.tracer import RunTracer

_UNBILLED_ERRORS: Final = (LLMRequestRejected, LLMUnavailable)


class ChargeUsage(Protocol):
    """Counts usage against a budget."""

    def __call__(self, usage: Usage, *, provider: str | None = None) -> None:
        """Count the usage of a provider."""
        ...


class RunMeter:
    """Reserves, traces and counts the calls that one provider makes for a run; each counts, however it ends.

    An answer counts with the tokens that the service reports. A call that the service turned down, or that did not
    reach it, counts without tokens. The cost of any other, such as one cut off at its deadline, is unknown: it counts
    with everything that was reserved, so that the budget holds.

    Args:
        provider: the provider that makes the calls.
        spending: the budget of the run.
        charge: records usage.
        spans: traces the calls.
        note: records remarks on calls.
    """

    def __init__(
        self,
        provider: str,
        spending: BudgetTracker,
        charge: ChargeUsage,
        spans: RunTracer,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._provider = provider
        self._spending = spending
        self._charge = charge
        self._spans = spans
        self.note = note

    def __repr__(self) -> str:
        return f"<RunMeter of {self._provider} {self._spending!r}>"

    @contextmanager
    def call(self, call: LLMCall) -> Iterator[Callable[[Completion], None]]:
        """Reserve the estimate of a call and trace it; yields a function to be called with the completion.

        Raises:
            BudgetExceeded: it does not fit the rest of the budget; nothing was sent.
        """
        release = self._spending.reserve(call.estimate)
        used = call.estimate
        try:
            with self._spans.chat_span(call) as traced:

                def answered(completion: Completion) -> None:
                    nonlocal used
                    used = completion.usage
                    traced(completion)

                yield answered
        except _UNBILLED_ERRORS:
            used = Usage(calls=1) if used is call.estimate else used
            raise
        finally:
            self._charge(used, provider=self._provider)
            release()

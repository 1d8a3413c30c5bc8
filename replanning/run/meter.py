"""Meter of the calls that a provider makes for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from replanning.errors import LLMRequestRejected, LLMUnavailable
from replanning.journal.records import Usage
from replanning.llm.completions import Completion, LLMCall
from replanning.run.lifecycle import Lifecycle

_UNBILLED_ERRORS: Final = (LLMRequestRejected, LLMUnavailable)


@dataclass(slots=True, eq=False, repr=False)
class RunMeter:
    """Reserves, traces and counts the calls that one provider makes for a run.

    Each counts, however it ends.

    An answer counts with the tokens that the service reports. A call that the service turned down,
    or that did not reach it, counts without tokens. The cost of any other, such as one cut off at
    its deadline, is unknown: it counts with everything that was reserved, so that the budget holds.

    Attributes:
        note: records remarks on calls.
    """

    _lifecycle: Lifecycle
    _provider: str
    note: Callable[[str], None] = lambda text: None

    def __repr__(self) -> str:
        return f"<RunMeter of {self._provider} {self._lifecycle.ledger.budget_tracker!r}>"

    @contextmanager
    def call(self, call: LLMCall) -> Iterator[Callable[[Completion], None]]:
        """Reserve the estimate of a call and trace it.

        Yields a function to be called with the completion.

        Raises:
            BudgetExceeded: it does not fit the rest of the budget; nothing was sent.
        """
        life = self._lifecycle
        release = life.loop.call(life.ledger.budget_tracker.reserve, call.estimate)
        used = call.estimate
        try:
            with life.spans.chat_span(call) as traced:

                def answered(completion: Completion) -> None:
                    nonlocal used
                    used = completion.usage
                    traced(completion)

                yield answered
        except _UNBILLED_ERRORS:
            used = Usage(calls=1) if used is call.estimate else used
            raise
        finally:
            life.loop.call(life.charge, used, provider=self._provider)
            release()

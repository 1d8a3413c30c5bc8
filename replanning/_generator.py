"""Asks providers for alternatives, checks each against the live plan, scores and ranks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import anyio

from replanning._changes import Alternative, RetryTask
from replanning._confidence import ConfidenceScorer, PastSuccess
from replanning._errors import BudgetExceeded, StaleView
from replanning._interfaces import AlternativeProvider, ReplanRequest
from replanning._ledger import Ledger
from replanning._live import LivePlan
from replanning._plan import Goal
from replanning._records import Candidate, Usage
from replanning._settings import Settings
from replanning._timer import Timer
from replanning._triggers import Trigger
from replanning._view import PlanView

ProviderSpan = Callable[[str], AbstractContextManager[None]]


class Setting(NamedTuple):
    """Where alternatives are generated: the plan, what the run remembers, its timer, and its evidence."""

    live: LivePlan
    ledger: Ledger
    timer: Timer
    past: PastSuccess
    now: float
    time_left: float | None
    charge: Callable[[Usage], None] = lambda usage: None
    span: ProviderSpan = lambda name: nullcontext()


@dataclass(frozen=True, slots=True)
class Generated:
    """Candidates, best first, the rejected ones last; and what providers had to say or failed with."""

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]


class ContextAnalyzer:
    """Reads from a plan what a provider is asked."""

    def analyse(self, triggers: Sequence[Trigger], setting: Setting, settings: Settings) -> ReplanRequest:
        """The request that follows from triggers."""
        roots = {setting.live.entry(t).root for trigger in triggers for t in trigger.tasks}
        tried = [setting.ledger.tried[root] for root in sorted(roots) if root in setting.ledger.tried]
        return ReplanRequest(
            triggers=tuple(triggers),
            view=PlanView(setting.live),
            max_alternatives=settings.alternatives.max_count,
            deadline=setting.now + settings.timeout.replan,
            tried=frozenset(print_ for prints in tried for print_ in prints),
            charge=setting.charge,
        )

    def extract_goal(self, view: PlanView) -> Goal:
        """The goal of the plan, which no alternative changes."""
        return view.goal


class PathGenerator:
    """Asks providers, and ranks what they propose.

    Args:
        providers: asked concurrently, each with its own deadline; a failing one is passed over and noted.
        scorer: scores what is valid.
    """

    def __init__(self, providers: Sequence[AlternativeProvider], scorer: ConfidenceScorer) -> None:
        self.providers = tuple(providers)
        self.scorer = scorer

    async def generate(self, request: ReplanRequest, setting: Setting) -> tuple[list[Alternative], list[str]]:
        """Everything the providers propose, in their order, and notes on those that failed."""
        answers: list[list[Alternative]] = [[] for _ in self.providers]
        notes: list[list[str]] = [[] for _ in self.providers]
        if len(self.providers) == 1:
            await self._ask(self.providers[0], request, setting, answers[0], notes[0])
        elif self.providers:
            async with anyio.create_task_group() as group:
                for provider, answer, note in zip(self.providers, answers, notes, strict=True):
                    group.start_soon(self._ask, provider, request, setting, answer, note)
        return [a for answer in answers for a in answer], [n for note in notes for n in note]

    async def _ask(
        self,
        provider: AlternativeProvider,
        request: ReplanRequest,
        setting: Setting,
        answer: list[Alternative],
        notes: list[str],
    ) -> None:
        name = str(getattr(provider, "name", type(provider).__name__))
        spending = setting.ledger.spending
        try:
            estimate = getattr(provider, "estimate", None)
            reserved = spending.reserve(estimate(request) if estimate is not None else Usage())
        except BudgetExceeded as error:
            notes.append(f"{name} was not asked: {error}")
            return
        except Exception as error:  # the estimate is the provider's code
            notes.append(f"{name} failed: {error!r}")
            return
        scope = anyio.CancelScope()
        alarm = setting.timer.at(request.deadline, scope.cancel)
        try:
            with setting.span(name), scope:
                proposed = await provider.propose(request)
                answer.extend(_named(alternative, name) for alternative in proposed)
            if scope.cancelled_caught:
                notes.append(f"{name} did not answer in time")
        except StaleView:
            notes.append(f"{name}: the plan moved on while it was asked")
        except Exception as error:  # law 7: a failing provider is contained
            answer.clear()
            notes.append(f"{name} failed: {error!r}"[:2000])
        finally:
            alarm.cancel()
            spending.settle(reserved)

    def rank(
        self, alternatives: Sequence[Alternative], request: ReplanRequest, setting: Setting, settings: Settings
    ) -> tuple[Candidate, ...]:
        """Candidates, best first; ties go by provider, then by its order. Rejected ones come last, with why."""
        wanted = settings.alternatives
        seen: set[str] = set()
        good: list[Candidate] = []
        bad: list[Candidate] = []
        for alternative in alternatives:
            candidate = self._judge(alternative, request, setting, settings, seen)
            (bad if candidate.rejected else good).append(candidate)
        good.sort(key=lambda candidate: -candidate.score.total if candidate.score else 0.0)
        spare = [replace(c, rejected=f"only {wanted.max_count} are considered") for c in good[wanted.max_count :]]
        return (*good[: wanted.max_count], *spare, *bad)

    def _judge(
        self, alternative: Alternative, request: ReplanRequest, setting: Setting, settings: Settings, seen: set[str]
    ) -> Candidate:
        if not alternative.changes:
            return Candidate(alternative, None, alternative.unreachable or "it changes nothing")
        print_ = alternative.fingerprint()
        if print_ in seen:
            return Candidate(alternative, None, "the same was proposed already")
        seen.add(print_)
        if print_ in request.tried and not all(isinstance(c, RetryTask) for c in alternative.changes):
            return Candidate(alternative, None, "the same was tried before and did not help")
        if problems := setting.live.check(alternative.changes):
            return Candidate(alternative, None, "it does not fit the plan: " + "; ".join(map(str, problems[:5])))
        score = self.scorer.score(alternative, request.view, setting.past, time_left=setting.time_left)
        wanted = settings.alternatives
        if alternative.confidence is not None and alternative.confidence < wanted.min_llm_confidence:
            reason = f"its own confidence {alternative.confidence:g} is below {wanted.min_llm_confidence:g}"
            return Candidate(alternative, score, reason)
        if score.total < wanted.min_confidence:
            return Candidate(alternative, score, f"confidence {score.total:.2f} is below {wanted.min_confidence:g}")
        return Candidate(alternative, score)


class AlternativeGenerator:
    """Obtains ranked alternatives: analyse the context, ask, check, score, rank.

    Args:
        providers: who is asked.
        analyzer: makes the request.
        scorer: scores; its weights can be set.
    """

    def __init__(
        self,
        providers: Sequence[AlternativeProvider],
        *,
        analyzer: ContextAnalyzer | None = None,
        scorer: ConfidenceScorer | None = None,
    ) -> None:
        self.analyzer = analyzer or ContextAnalyzer()
        self.paths = PathGenerator(providers, scorer or ConfidenceScorer())

    def __repr__(self) -> str:
        return f"<AlternativeGenerator of {[getattr(p, 'name', p) for p in self.paths.providers]}>"

    async def generate(self, request: ReplanRequest, setting: Setting, settings: Settings) -> Generated:
        """Ranked candidates for a request.

        Raises:
            StaleView: the plan moved on to another revision meanwhile.
        """
        alternatives, notes = await self.paths.generate(request, setting)
        return Generated(self.paths.rank(alternatives, request, setting, settings), tuple(notes))


def _named(alternative: Alternative, source: str) -> Alternative:
    if not isinstance(alternative, Alternative):
        raise TypeError(f"expected an Alternative, got {type(alternative).__name__}")
    return alternative if alternative.source else alternative.model_copy(update={"source": source})

"""Asks providers for alternatives, checks each against the live plan, scores and ranks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import anyio

from replanning.changes import Alternative, RetryTask
from replanning.decision.confidence import ConfidenceScorer, OutcomeHistory
from replanning.decision.ledger import Ledger
from replanning.decision.request import AlternativeProvider, ReplanRequest
from replanning.decision.vetting import (
    INFEASIBLE,
    check_feasible,
    check_masked,
    check_secrets,
    exceeded_limit,
    was_declined,
)
from replanning.engine.providers import ToolSimilarity
from replanning.errors import BudgetExceeded, LLMError, StaleView
from replanning.journal.observations import Usage
from replanning.journal.records import Candidate
from replanning.journal.triggers import Trigger
from replanning.live.plan import LivePlan
from replanning.live.view import PlanView
from replanning.llm.completions import LLMOptions
from replanning.plan.tasks import Goal
from replanning.run.isolation import describe_error, isolate
from replanning.run.meter import ChargeUsage, RunMeter
from replanning.run.timer import Timer
from replanning.settings import Settings
from replanning.telemetry.tracer import NOOP_TRACER, RunTracer

_MAX_NOTES = 20

Proposals = tuple[list[Alternative], list[str]]

AlternativeCheck = Callable[[Alternative], str]


class GenerationContext(NamedTuple):
    """Where alternatives are generated: the plan, what the run remembers, its timer, and its evidence."""

    live: LivePlan
    ledger: Ledger
    timer: Timer
    past_success: OutcomeHistory
    now: float
    time_left: float | None
    charge: ChargeUsage = lambda usage, provider=None: None
    spans: RunTracer = NOOP_TRACER
    redact: Callable[[Alternative], Alternative] = lambda alternative: alternative


@dataclass(frozen=True, slots=True)
class RankedCandidates:
    """Candidates, best first, the rejected ones last; and what providers had to say or failed with."""

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    view: PlanView


class ContextAnalyzer:
    """Reads from a plan what a provider is asked."""

    def analyse(self, triggers: Sequence[Trigger], setting: GenerationContext, settings: Settings) -> ReplanRequest:
        """The request that follows from triggers."""
        roots = {setting.live.entry(t).root for trigger in triggers for t in trigger.tasks}
        tried = [setting.ledger.tried_by_root[root] for root in sorted(roots) if root in setting.ledger.tried_by_root]
        patience = settings.timeout.replan
        if all(trigger.kind == "better-path-found" for trigger in triggers):
            patience = min(patience, settings.better_path.time_cap)  # the plan can go on as it is
        return ReplanRequest(
            triggers=tuple(triggers),
            view=PlanView(setting.live),
            max_alternatives=settings.alternatives.max_count,
            deadline=setting.now + patience,
            tried_fingerprints=frozenset(print_ for prints in tried for print_ in prints),
            charge=setting.charge,
            history=tuple(setting.ledger.recent_records),
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
        self._low_priority = {
            _ProviderCall(provider).name for provider in providers if getattr(provider, "yields_priority", False)
        }

    async def generate(self, request: ReplanRequest, setting: GenerationContext, check: AlternativeCheck) -> Proposals:
        """Everything the providers propose, in their order, and notes on those that failed.

        Raises:
            StaleView: one of them read the plan after it had moved on.
        """
        return await self._collect([_ProviderCall(provider) for provider in self.providers], request, setting, check)

    async def complete_rejected(
        self, flawed: Sequence[Candidate], request: ReplanRequest, setting: GenerationContext
    ) -> Proposals:
        """What providers make of others' proposals that could not be carried out, and notes on those that failed.

        Raises:
            StaleView: one of them read the plan after it had moved on.
        """
        able = [provider for provider in self.providers if flawed and hasattr(provider, "complete")]
        replies = [_CompletionCall(provider, flawed) for provider in able]
        return await self._collect(replies, request, setting, request.rejection_reason)

    async def _collect(
        self,
        replies: Sequence[_ProviderCall],
        request: ReplanRequest,
        setting: GenerationContext,
        check: AlternativeCheck,
    ) -> Proposals:
        if len(replies) == 1:
            await self._ask_provider(replies[0], request, setting, check)
        elif replies:
            async with anyio.create_task_group() as group:
                for reply in replies:
                    group.start_soon(self._ask_provider, reply, request, setting, check)
        for reply in replies:
            if reply.stale_error is not None:
                raise reply.stale_error
        alternatives = [alternative for reply in replies for alternative in reply.alternatives]
        return alternatives, [note for reply in replies for note in reply.notes]

    async def _ask_provider(
        self, reply: _ProviderCall, request: ReplanRequest, setting: GenerationContext, check: AlternativeCheck
    ) -> None:
        provider, name = reply.provider, reply.name
        spending = setting.ledger.budget_tracker
        try:
            estimate = getattr(provider, "estimate", None)
            reserved = spending.reserve(estimate(request) if estimate is not None else Usage())
        except BudgetExceeded as error:
            reply.notes.append(f"{name} was not asked: {error}")
            return
        except Exception as error:  # noqa: BLE001 - the estimate is the provider's code
            reply.notes.append(f"{name} failed: {describe_error(error)}"[:2000])
            return
        scope = anyio.CancelScope()
        alarm = setting.timer.call_at(request.deadline, scope.cancel)
        meter = RunMeter(name, spending, setting.charge, setting.spans, reply.note)
        charge = partial(setting.charge, provider=name)
        # As `replace` would make it, which takes several times as long.
        request = ReplanRequest(
            triggers=request.triggers,
            view=request.view,
            max_alternatives=request.max_alternatives,
            deadline=request.deadline,
            tried_fingerprints=request.tried_fingerprints,
            charge=charge,
            meter=meter,
            history=request.history,
            rejection_reason=check,
            add_note=reply.note,
        )
        try:
            with setting.spans.provider_span(name) as answered:
                with scope:
                    reply.accept(await isolate(reply.ask(request)))
                answered(len(reply.alternatives), scope.cancelled_caught)
            if scope.cancelled_caught:
                reply.notes.append(f"{name} did not answer in time")
        except StaleView as error:
            reply.stale_error = error
        except BudgetExceeded as error:
            reply.notes.append(f"{name} could ask no further: {error}")
        except LLMError as error:  # what it says is meant for people
            reply.notes.append(f"{name} failed: {str(error).removeprefix(f'{name}: ')}"[:2000])
        except Exception as error:  # noqa: BLE001 - law 7: a failing provider is contained
            reply.notes.append(f"{name} failed: {describe_error(error)}"[:2000])
        finally:
            alarm.cancel()
            spending.settle(reserved)

    def rank(
        self,
        alternatives: Sequence[Alternative],
        request: ReplanRequest,
        setting: GenerationContext,
        settings: Settings,
    ) -> tuple[Candidate, ...]:
        """Candidates, best first; ties go by provider, then by its order. Rejected ones come last, with why."""
        wanted = settings.alternatives
        seen: set[str] = set()
        good: list[Candidate] = []
        bad: list[Candidate] = []
        for alternative in alternatives:
            candidate = self.vet(alternative, request, setting, settings, seen)
            (bad if candidate.rejected else good).append(candidate)
        sure = wanted.human_approval_threshold if setting.live.plan.facts is not None else 2.0
        good.sort(key=lambda candidate: self._sort_key(candidate, sure))
        spare = [replace(c, rejected=f"only {wanted.max_count} are considered") for c in good[wanted.max_count :]]
        return (*good[: wanted.max_count], *spare, *bad)

    def _sort_key(self, candidate: Candidate, sure: float) -> tuple[bool, float]:
        """By what a candidate is ranked.

        Where facts have shown it to be valid and it needs no person, it goes before what providers propose that give
        way to others.
        """
        total = candidate.score.total if candidate.score else 0.0
        doubtful = total < sure or bool(candidate.alternative.ask)
        leading, _, _ = candidate.alternative.source.partition("+")  # of a proposal that another completed
        return doubtful or leading in self._low_priority, -total

    def vet(
        self,
        alternative: Alternative,
        request: ReplanRequest,
        setting: GenerationContext,
        settings: Settings,
        seen: set[str],
    ) -> Candidate:
        """What is to be said of an alternative: its score, or why it is rejected.

        Args:
            alternative: what is proposed.
            request: what was asked, with a view of the plan as it stands.
            setting: the plan and what the run remembers.
            settings: thresholds and limits.
            seen: fingerprints of what was judged before; that of the alternative is added.
        """
        clean = setting.redact(alternative)
        lost = "" if clean is alternative else check_secrets(clean.changes, alternative.changes)
        lost = lost or check_masked(clean.changes, setting.live)
        return Candidate(clean, None, lost) if lost else self._vet_redacted(clean, request, setting, settings, seen)

    def _vet_redacted(
        self,
        alternative: Alternative,
        request: ReplanRequest,
        setting: GenerationContext,
        settings: Settings,
        seen: set[str],
    ) -> Candidate:
        if not alternative.changes:
            return Candidate(alternative, None, alternative.unreachable or "it changes nothing")
        print_ = alternative.fingerprint()
        if print_ in seen:
            return Candidate(alternative, None, "the same was proposed already")
        seen.add(print_)
        if print_ in request.tried_fingerprints and not all(isinstance(c, RetryTask) for c in alternative.changes):
            return Candidate(alternative, None, "the same was tried before and did not help")
        if was_declined(print_, alternative, request, setting):
            return Candidate(alternative, None, "a person was asked about the same already")
        if limit := exceeded_limit(alternative, setting, settings):
            return Candidate(alternative, None, limit)
        draft = setting.live.draft(alternative.changes)
        if draft.problems:
            return Candidate(alternative, None, "it does not fit the plan: " + "; ".join(map(str, draft.problems[:5])))
        if broken := check_feasible(alternative, draft, request, setting.live):
            return Candidate(alternative, None, broken)
        score = self.scorer.score(alternative, request.view, setting.past_success, time_left=setting.time_left)
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
        tool_similarity: finds evidence for tools that have none of their own; none is looked for when left out.
    """

    def __init__(
        self,
        providers: Sequence[AlternativeProvider],
        *,
        analyzer: ContextAnalyzer | None = None,
        scorer: ConfidenceScorer | None = None,
        tool_similarity: ToolSimilarity | None = None,
    ) -> None:
        self.analyzer = analyzer or ContextAnalyzer()
        self.tool_similarity = tool_similarity
        self.path_generator = PathGenerator(providers, scorer or ConfidenceScorer())

    def __repr__(self) -> str:
        return f"<AlternativeGenerator of {[getattr(p, 'name', p) for p in self.path_generator.providers]}>"

    async def generate(
        self, request: ReplanRequest, setting: GenerationContext, settings: Settings
    ) -> RankedCandidates:
        """Ranked candidates for a request, checked against the plan as it stands when the last provider answers.

        Raises:
            StaleView: a provider read the plan after it had moved on to another revision, and must be asked anew.
        """

        def check(alternative: Alternative) -> str:
            now = replace(request, view=PlanView(setting.live))
            return self.path_generator.vet(alternative, now, setting, settings, set()).rejected

        alternatives, notes = await self.path_generator.generate(request, setting, check)
        found = self._rank_candidates(alternatives, notes, request, setting, settings)
        flawed = [candidate for candidate in found.candidates if candidate.rejected.startswith(INFEASIBLE)]
        completed, more = await self.path_generator.complete_rejected(
            flawed[: request.max_alternatives], request, setting
        )
        past, unlike = await self._extended_outcomes(found, request, setting)
        if not completed and not more and past is setting.past_success and not unlike:
            return found
        setting = setting._replace(past_success=past)
        return self._rank_candidates([*alternatives, *completed], [*notes, *more, *unlike], request, setting, settings)

    async def _extended_outcomes(
        self, found: RankedCandidates, request: ReplanRequest, setting: GenerationContext
    ) -> tuple[OutcomeHistory, Sequence[str]]:
        """The evidence, with that of tools that are alike where it is looked for."""
        if self.tool_similarity is None:
            return setting.past_success, ()
        scored = [candidate.alternative for candidate in found.candidates if candidate.score is not None]
        meter = RunMeter("confidence", setting.ledger.budget_tracker, setting.charge, setting.spans)
        options = LLMOptions(deadline=request.deadline, meter=meter)
        failing = {setting.live.entry(task_id).task.tool for task_id in setting.live.stuck}
        return await self.tool_similarity.extend_outcomes(
            setting.past_success, scored, found.view, options, failing=failing
        )

    def _rank_candidates(
        self,
        alternatives: Sequence[Alternative],
        notes: Sequence[str],
        request: ReplanRequest,
        setting: GenerationContext,
        settings: Settings,
    ) -> RankedCandidates:
        now = request
        if request.view.revision != setting.live.revision:
            now = replace(request, view=PlanView(setting.live))
        with setting.spans.scoring_span():
            candidates = self.path_generator.rank(alternatives, now, setting, settings)
        return RankedCandidates(candidates, tuple(notes), now.view)


class _ProviderCall:
    """What one provider had to say."""

    def __init__(self, provider: AlternativeProvider) -> None:
        self.provider = provider
        self.name = str(getattr(provider, "name", type(provider).__name__))
        self.alternatives: list[Alternative] = []
        self.notes: list[str] = []
        self.stale_error: StaleView | None = None

    def note(self, text: str) -> None:
        """Keep what the provider wants to be known beside its alternatives; not without end."""
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(f"{self.name}: {text}"[:2000])

    async def ask(self, request: ReplanRequest) -> Sequence[Alternative]:
        """What the provider proposes."""
        return await self.provider.propose(request)

    def accept(self, proposed: Sequence[Alternative]) -> None:
        """Keep what was proposed; all of it or nothing."""
        for alternative in proposed:
            if not isinstance(alternative, Alternative):
                raise TypeError(f"expected an Alternative, got {type(alternative).__name__}")
        self.alternatives = [a if a.source else a.model_copy(update={"source": self.name}) for a in proposed]


class _CompletionCall(_ProviderCall):
    """What one provider makes of what others proposed and cannot be carried out."""

    def __init__(self, provider: AlternativeProvider, flawed: Sequence[Candidate]) -> None:
        super().__init__(provider)
        self._flawed = flawed

    async def ask(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Those that it could put right."""
        complete = getattr(self.provider, "complete")  # noqa: B009 - not every provider has it
        others = [candidate for candidate in self._flawed if candidate.alternative.source != self.name]
        found = [(other.alternative, await complete(request, other.alternative, other.rejected)) for other in others]
        # What needed a person needs one still, whoever completes it.
        return [made.model_copy(update={"ask": made.ask or first.ask}) for first, made in found if made is not None]

"""Generation of alternatives: providers are asked; proposals are vetted, scored and ranked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

import anyio

from replanning.changes import Alternative
from replanning.decision.proposal import (
    INFEASIBLE,
    ConfidenceScorer,
    Proposal,
    analyse,
    check_confidence,
    check_content,
    check_feasible,
    check_fits_plan,
    check_futile_calls,
    check_limits,
    check_repeats,
    check_saving,
    relative_saving,
    seeks_better_path,
)
from replanning.decision.request import AlternativeProvider, ReplanRequest
from replanning.errors import BudgetExceeded, LLMError, StaleView
from replanning.journal.records import (
    AlternativesConsidered,
    Candidate,
    Score,
    Trigger,
    Usage,
)
from replanning.live.view import PlanView
from replanning.plan.messages import cut
from replanning.plan.tasks import Goal
from replanning.plan.types import ReplanId, TaskId
from replanning.plugins import plugin_name
from replanning.run.event_loop import describe_error, isolate
from replanning.run.lifecycle import Lifecycle
from replanning.run.meter import RunMeter

_MAX_NOTES: Final = 20

_MAX_NOTE_CHARS: Final = 2_000

MAX_PROPOSALS: Final = 100
"""Maximum number of proposals of a provider that are considered."""


class VettedAlternative(NamedTuple):
    """A proposal with the verdict on it: its score, or the reason why it is rejected."""

    proposal: Proposal
    candidate: Candidate


class RankedCandidates(NamedTuple):
    """Candidates, best first, the rejected ones last; with their proposals and providers' notes.

    The first `usable` ones were not rejected. `rank` ranks them again when the plan has another
    `version`. Candidates of earlier searches have no proposals.
    """

    candidates: tuple[Candidate, ...]
    usable: int
    proposals: tuple[Proposal, ...]
    notes: tuple[str, ...]
    view: PlanView
    version: int
    rank: Callable[[], RankedCandidates]


class ContextAnalyzer:
    """Derives the request to providers from a run."""

    def analyse(self, triggers: Sequence[Trigger], life: Lifecycle, began: float) -> ReplanRequest:
        """Return the request that follows from triggers, considered since `began`."""
        ledger = life.ledger
        settings = life.settings

        patience = settings.timeout.replan
        if seeks_better_path(triggers):
            # The plan goes on as it is, so a late answer would find little left to improve.
            patience = min(patience, settings.better_path.time_cap)

        roots: list[TaskId] = []
        for trigger in triggers:
            for task_id in trigger.tasks:
                roots.append(life.live.entry(task_id).root)

        return ReplanRequest(
            triggers=tuple(triggers),
            view=PlanView(life.live),
            max_alternatives=settings.alternatives.max_count,
            deadline=began + patience,
            tried_fingerprints=frozenset(ledger.lineages.tried(roots)),
            charge=life.charge,
            history=tuple(ledger.recent_records),
        )

    def extract_goal(self, view: PlanView) -> Goal:
        """Return the goal of the plan, which no alternative changes."""
        return view.goal


class AlternativeVetter:
    """Vets the alternatives of one replan; each once, unless the plan moves meanwhile.

    Args:
        request: the request.
        life: the run whose plan is to be changed.
        scorer: scores valid alternatives.
        time_left: seconds that remain of the budget, if it limits them.
        asked_at: time of the request in seconds since the epoch.

    Attributes:
        better_path: whether the plan could go on as it is, and only a cheaper one is sought.
    """

    def __init__(
        self,
        request: ReplanRequest,
        life: Lifecycle,
        scorer: ConfidenceScorer,
        time_left: float | None,
        asked_at: float,
    ) -> None:
        self.request = request
        self.life = life
        self.better_path = seeks_better_path(request.triggers)
        self._scorer = scorer
        self._time_left = time_left
        self._asked_at = asked_at
        self._tasks: set[TaskId] = set()
        for trigger in request.triggers:
            self._tasks.update(trigger.tasks)
        self._vetted: dict[int, tuple[Alternative, VettedAlternative]] = {}
        self._outcomes: dict[str, Sequence[bool]] = {}

        # What is wrong with the changes themselves comes first, then the history of the run, then
        # the plan as they would leave it. Each check relies on those before it: later ones look at
        # tasks that only changes that fit have.
        triggers = request.triggers
        tried = request.tried_fingerprints
        limits = life.settings.limits
        self._checks: list[Callable[[Proposal], str]] = [
            check_content,
            partial(check_repeats, tried=tried, triggers=triggers, ledger=life.ledger),
            partial(check_limits, limits=limits, ledger=life.ledger),
            check_fits_plan,
            check_futile_calls,
        ]
        if life.live.world.closed:
            self._checks.append(partial(check_feasible, triggers=triggers))
        if self.better_path:
            min_gain = life.settings.better_path.min_gain
            compare = life.evaluation.compare
            self._checks.append(partial(check_saving, min_gain=min_gain, compare=compare))

    def past_outcomes(self, tool: str) -> Sequence[bool]:
        """Return earlier outcomes of a tool: the same for all alternatives."""
        if tool not in self._outcomes:
            self._outcomes[tool] = self.life.evaluation.past_outcomes(tool)
        return self._outcomes[tool]

    def vet(self, given: Alternative, source: str) -> VettedAlternative:
        """Return the verdict on an alternative as the plan is now.

        It gets this source if it names none. The first check that objects rejects it, and that
        reason is on record.
        """
        life = self.life
        # Kept with the alternative itself: otherwise another one might get its identity.
        known = self._vetted.get(id(given))
        if known is not None and known[1].proposal.version == life.live.version:
            return known[1]

        proposed = given
        if not given.source:
            proposed = given.model_copy(update={"source": source})
        proposal = analyse(proposed, life.live, life.redactor, asked_at=self._asked_at)
        rejected = ""
        for check in self._checks:
            rejected = check(proposal)
            if rejected:
                break

        score = None
        if not rejected:
            score = self._scorer.score(
                proposal.alternative,
                proposal.view,
                self.past_outcomes,
                time_left=self._time_left,
                tasks=self._tasks,
                run=proposal.tasks_to_run,
            )
            rejected = check_confidence(proposal, score, life.settings.alternatives)
        candidate = Candidate(proposal.alternative, score, rejected)
        vetted = VettedAlternative(proposal, candidate)
        self._vetted[id(given)] = (given, vetted)
        return vetted


class PathGenerator:
    """Asks providers, and ranks their proposals.

    Args:
        providers: asked at the same time, with one deadline; failing ones are left out and noted.
        scorer: scores valid proposals.

    Attributes:
        last_resorts: the providers that are asked even if nothing can run any more and they found
            nothing before.
    """

    def __init__(self, providers: Sequence[AlternativeProvider], scorer: ConfidenceScorer) -> None:
        self.providers = tuple(providers)
        self.scorer = scorer
        self._names = [plugin_name(provider) for provider in self.providers]
        # A provider may lack these attributes, and a mock has every attribute: only True counts.
        last_resorts = []
        self._immediate: set[str] = set()
        self._low_priority: set[str] = set()
        for name, provider in zip(self._names, self.providers, strict=True):
            if getattr(provider, "last_resort", False) is True:
                last_resorts.append(provider)
            if getattr(provider, "immediate", False) is True:
                self._immediate.add(name)
            if getattr(provider, "yields_priority", False) is True:
                self._low_priority.add(name)
        self.last_resorts = tuple(last_resorts)

    async def generate(
        self, vetter: AlternativeVetter, *, last: bool, flawed: Sequence[Candidate] = ()
    ) -> list[ProviderReply]:
        """Ask all providers for proposals, and return their replies in the order of the providers.

        They are asked at the same time. For a better path, providers with `immediate` are asked
        first, and the others only if these find none: the plan goes on while a slow provider is
        awaited, so that little may remain to be improved.

        Args:
            vetter: holds the request and the run, and vets proposals on behalf of providers.
            last: leave out a provider whose view of the plan is stale, with a note.
            flawed: proposals that could not be executed; if given, only providers that can
                complete them are asked.

        Raises:
            StaleView: one of them read the plan after it had moved on.
        """
        replies: list[ProviderReply] = []
        immediate: list[ProviderReply] = []
        others: list[ProviderReply] = []
        for name, provider in zip(self._names, self.providers, strict=True):
            ask = provider.propose
            if flawed:
                if getattr(provider, "complete", None) is None:
                    continue
                ask = partial(_complete, provider, name, flawed)
            reply = ProviderReply(name, ask, getattr(provider, "estimate", None))
            replies.append(reply)
            if name in self._immediate:
                immediate.append(reply)
            else:
                others.append(reply)

        if len(replies) == len(immediate) == 1:
            # It needs no task of its own, and its answer comes a turn of the event loop earlier.
            await _ask_provider(immediate[0], vetter)
        elif not vetter.better_path:
            await _ask_providers(replies, vetter)
        else:
            await _ask_providers(immediate, vetter)
            if not _has_acceptable(immediate, vetter):
                await _ask_providers(others, vetter)

        # All failures are on record before a stale view makes the caller ask again.
        for reply in replies:
            if reply.failure is not None and vetter.life.end is None:
                vetter.life.record_error(f"provider {reply.name!r}", reply.failure)
        for reply in replies:
            if reply.stale_error is None:
                continue
            if not last:
                raise reply.stale_error
            reply.notes.append(f"{reply.name}: the plan changed each time that it was asked")
        return replies

    def rank(self, replies: Sequence[ProviderReply], vetter: AlternativeVetter) -> RankedCandidates:
        """Vet and rank the alternatives of replies, best first.

        Those that need no person come first, then those that score more. Ties go by provider, then
        by the order in which a provider made its proposals. Duplicates within the round are
        rejected here; repetitions of earlier rounds, by `check_repeats` and `check_futile_calls`.
        """
        life = vetter.life
        settings = life.settings.alternatives
        count = 0
        for reply in replies:
            count += len(reply.alternatives)
        fingerprints: set[str] = set()
        good: list[tuple[bool, float, VettedAlternative]] = []
        bad: list[VettedAlternative] = []
        notes: list[str] = []
        with life.spans.scoring_span():
            for reply in replies:
                notes += reply.notes
                for alternative in reply.alternatives:
                    vetted = vetter.vet(alternative, reply.name)
                    proposal, candidate = vetted
                    # The changes may be empty, and verdicts without changes are no duplicates.
                    if proposal.changes and count > 1:
                        fingerprint = proposal.fingerprint
                        if fingerprint in fingerprints:
                            bad.append(_reject(vetted, "the same was proposed already", score=None))
                            continue
                        fingerprints.add(fingerprint)
                    score = candidate.score
                    if score is None or candidate.rejected:
                        bad.append(vetted)
                        continue

                    value = score.total
                    considered = proposal.alternative
                    needs_person = value < settings.human_approval_threshold or bool(considered.ask)
                    # Also where another provider completed the proposal.
                    source, _, _ = considered.source.partition("+")
                    if vetter.better_path:
                        # All of them are sure to work, so the cheapest path is the best.
                        value = relative_saving(proposal.draft, life.live, life.evaluation.compare)
                    elif life.live.plan.facts is None or source in self._low_priority:
                        # Without facts nothing is verified; a person may be needed in any case.
                        needs_person = True
                    good.append((needs_person, -value, vetted))

        good.sort(key=itemgetter(0, 1))
        ranked: list[VettedAlternative] = []
        for _, _, vetted in good:
            ranked.append(vetted)
        limit = settings.max_count
        for index in range(limit, len(ranked)):
            reason = f"only {limit} are considered"
            surplus = ranked[index]
            ranked[index] = _reject(surplus, reason, score=surplus.candidate.score)
        proposals: list[Proposal] = []
        candidates: list[Candidate] = []
        for proposal, candidate in ranked + bad:
            proposals.append(proposal)
            candidates.append(candidate)
        return RankedCandidates(
            candidates=tuple(candidates),
            usable=min(len(good), limit),
            proposals=tuple(proposals),
            notes=tuple(notes),
            view=PlanView(life.live),
            version=life.live.version,
            rank=partial(self.rank, replies, vetter),
        )


def _reject(vetted: VettedAlternative, reason: str, *, score: Score | None) -> VettedAlternative:
    """Return a vetted alternative that is rejected after all, because of the others."""
    return vetted._replace(candidate=Candidate(vetted.proposal.alternative, score, reason))


class AlternativeGenerator:
    """Obtains ranked alternatives: analyse the context, ask, vet, score, rank.

    Args:
        providers: asked for proposals.
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
        if analyzer is None:
            analyzer = ContextAnalyzer()
        if scorer is None:
            scorer = ConfidenceScorer()
        self.analyzer = analyzer
        self.path_generator = PathGenerator(providers, scorer)

    def __repr__(self) -> str:
        names = [plugin_name(provider) for provider in self.path_generator.providers]
        return f"<AlternativeGenerator of {names}>"

    async def generate(
        self, triggers: Sequence[Trigger], life: Lifecycle, *, began: float, last: bool
    ) -> RankedCandidates:
        """Return ranked candidates, vetted against the plan when the last provider answers.

        Args:
            triggers: why replanning is considered.
            life: the run.
            began: since when it is considered, in seconds since the epoch.
            last: do without a provider whose view of the plan is stale, instead of raising.

        Raises:
            StaleView: a provider read the plan after it had moved on to another revision, and must
                be asked again.
        """
        paths = self.path_generator
        is_stuck = len(triggers) == 1 and triggers[0].kind == "goal-unreachable"
        if is_stuck and not paths.last_resorts:
            # Providers have said already what they know; only a last resort is asked once more.
            if life.ledger.is_fruitless(triggers[0]):
                return _earlier_candidates(triggers[0], life)

        request = self.analyzer.analyse(triggers, life, began)
        vetter = AlternativeVetter(
            request, life, paths.scorer, life.wall_clock_left(began), asked_at=life.clock.now()
        )
        replies = await paths.generate(vetter, last=last)
        ranked = paths.rank(replies, vetter)

        # What only the facts forbid may be completed by a provider that plans over facts.
        flawed = []
        for candidate in ranked.candidates:
            if candidate.rejected.startswith(INFEASIBLE):
                flawed.append(candidate)
        if not flawed:
            return ranked
        flawed = flawed[: request.max_alternatives]
        completions = await paths.generate(vetter, last=last, flawed=flawed)
        if any(reply.alternatives or reply.notes for reply in completions):
            return paths.rank([*replies, *completions], vetter)
        return ranked


def _earlier_candidates(trigger: Trigger, life: Lifecycle) -> RankedCandidates:
    """Return the candidates of the searches that found nothing, each search once."""
    searches: dict[ReplanId, AlternativesConsidered] = {}
    for task_id in trigger.tasks:
        search = life.ledger.fruitless_searches[task_id]
        searches[search.replan] = search
    candidates: list[Candidate] = []
    notes: list[str] = []
    for search in searches.values():
        candidates += search.candidates
        notes += search.notes

    def again() -> RankedCandidates:
        return ranked

    ranked = RankedCandidates(
        candidates=tuple(candidates),
        usable=0,
        proposals=(),
        notes=tuple(notes),
        view=PlanView(life.live),
        version=life.live.version,
        rank=again,
    )
    return ranked


# Asking


@dataclass(slots=True, eq=False)
class ProviderReply:
    """Reply of one provider: its alternatives and notes. It stays as it is once it is settled."""

    name: str
    ask: Callable[[ReplanRequest], Awaitable[Sequence[Alternative]]]
    estimate: Callable[[ReplanRequest], Usage] | None
    alternatives: list[Alternative] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale_error: StaleView | None = None
    failure: Exception | str | None = None
    settled: bool = False
    when_settled: anyio.Event | None = None

    def add_note(self, text: str) -> None:
        """Keep a note of the provider beside its alternatives, up to a limit."""
        if len(self.notes) < _MAX_NOTES and not self.settled:
            self.notes.append(cut(f"{self.name}: {text}", _MAX_NOTE_CHARS))

    def settle(self, problem: str = "") -> None:
        """Accept nothing more from the provider; note the problem unless settled before."""
        if problem and not self.settled:
            self.notes.append(cut(f"{self.name} {problem}", _MAX_NOTE_CHARS))
        self.settled = True
        if self.when_settled is not None:
            self.when_settled.set()

    def fail(self, problem: str, error: Exception | str) -> None:
        """Settle with a failure of the provider, to be recorded once all have answered."""
        if not self.settled:
            self.failure = error
        self.settle(problem)


async def _complete(
    provider: AlternativeProvider, name: str, flawed: Sequence[Candidate], request: ReplanRequest
) -> list[Alternative]:
    """Ask a provider to complete the proposals of others."""
    complete = getattr(provider, "complete")  # noqa: B009 - not every provider has it
    completed = []
    for other in flawed:
        # A provider that could complete its own proposal would have done so.
        if other.alternative.source == name:
            continue
        made = await complete(request, other.alternative, other.rejected)
        if made is not None:
            # A proposal that needed a person still needs one.
            if not made.ask:
                made = made.model_copy(update={"ask": other.alternative.ask})
            completed.append(made)
    return completed


def _has_acceptable(replies: Sequence[ProviderReply], vetter: AlternativeVetter) -> bool:
    """Return whether a reply has an alternative that is not rejected."""
    for reply in replies:
        for alternative in reply.alternatives:
            if not vetter.vet(alternative, reply.name).candidate.rejected:
                return True
    return False


async def _ask_providers(replies: Sequence[ProviderReply], vetter: AlternativeVetter) -> None:
    """Ask providers at the same time, and wait until all replies are settled."""
    for reply in replies:
        reply.when_settled = anyio.Event()
        # A provider that waits in a thread goes on after its deadline; its answer is ignored.
        vetter.life.plugins.run(f"provider {reply.name!r}", _ask_provider, reply, vetter)
    for reply in replies:
        # Waiting for what has happened would take a turn of the event loop.
        if not reply.settled and reply.when_settled is not None:
            await reply.when_settled.wait()


async def _ask_provider(reply: ProviderReply, vetter: AlternativeVetter) -> None:
    """Ask one provider within budget and deadline; a failure is contained and noted."""
    life = vetter.life
    budget = life.ledger.budget_tracker
    release: Callable[[], None] | None = None
    # What costs nothing needs no reservation, unless the budget may be used up already.
    if reply.estimate is not None or budget.has_limits:
        try:
            usage = Usage()
            if reply.estimate is not None:
                usage = reply.estimate(vetter.request)
            release = budget.reserve(usage)
        except BudgetExceeded as error:
            reply.settle(f"was not asked: {error}")
            return
        except Exception as error:  # noqa: BLE001 - the estimate is the provider's code
            reply.fail(f"failed: {describe_error(error)}", error)
            return

    asked = vetter.request
    request = ReplanRequest(
        triggers=asked.triggers,
        view=asked.view,
        max_alternatives=asked.max_alternatives,
        deadline=asked.deadline,
        tried_fingerprints=asked.tried_fingerprints,
        charge=partial(life.charge, provider=reply.name),
        meter=RunMeter(life, reply.name, reply.add_note),
        history=asked.history,
        rejection_reason=lambda alternative: vetter.vet(alternative, reply.name).candidate.rejected,
        add_note=reply.add_note,
    )
    scope = anyio.CancelScope()

    def expire() -> None:
        problem = "did not answer in time"
        reply.fail(problem, f"it {problem}")
        scope.cancel()

    alarm = life.timer.call_at(request.deadline, expire)
    try:
        with life.spans.provider_span(reply.name) as answered:
            alternatives: list[Alternative] = []
            with scope:
                ask = partial(reply.ask, request)
                alternatives = await isolate(collect_alternatives, ask, reply.add_note)
            # An answer after the deadline is ignored.
            if not reply.settled:
                reply.alternatives = alternatives
            answered(len(reply.alternatives), scope.cancelled_caught)
    except StaleView as error:
        reply.stale_error = error
    except BudgetExceeded as error:
        reply.settle(f"could ask no further: {error}")
    except LLMError as error:
        # Its message is meant for people, and begins with the name that the note has already.
        message = str(error).removeprefix(f"{reply.name}: ")
        reply.fail(f"failed: {message}", error)
    except Exception as error:  # noqa: BLE001 - a failing provider is contained
        reply.fail(f"failed: {describe_error(error)}", error)
    finally:
        alarm.cancel()
        if release is not None:
            release()
    # Not in the `finally` above: where the program is ending, nothing may be decided for lack of an
    # answer, because the process that resumes asks again.
    reply.settle()


async def collect_alternatives(
    ask: Callable[[], object], add_note: Callable[[str], None]
) -> list[Alternative]:
    """Return the proposals of a provider that is asked, which may come from a generator.

    Raises:
        TypeError: one of them is not an alternative, or the provider is not async.
    """
    answer: Any = ask()
    if not isinstance(answer, Awaitable):
        raise TypeError("`propose` is not async; write `async def propose(self, request)`")
    given: Any = await answer
    proposed = [given]
    # A pydantic model is iterable, over its fields, and is no list of alternatives.
    if isinstance(given, Iterable) and not isinstance(given, Alternative):
        proposed = list(given)
    alternatives = proposed[:MAX_PROPOSALS]
    for alternative in alternatives:
        # One of another type says that the provider is broken, so none of them is taken.
        if not isinstance(alternative, Alternative):
            raise TypeError(f"expected an Alternative, got {type(alternative).__name__}")
    if len(proposed) > MAX_PROPOSALS:
        add_note(f"made more than {MAX_PROPOSALS} proposals; the others are left out")
    return alternatives

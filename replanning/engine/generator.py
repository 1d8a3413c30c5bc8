"""Generation of alternatives: providers are asked; proposals are vetted, scored and ranked."""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cmp_to_key, partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import anyio
from anyio.abc import TaskGroup

from replanning.changes import Alternative, RetryTask
from replanning.decision.evaluation import PlanEvaluator
from replanning.decision.policy import stale_reason
from replanning.decision.proposal import (
    INFEASIBLE,
    ConfidenceScorer,
    Proposal,
    analyse,
    check_changes,
    check_confidence,
    check_feasible,
    check_saving,
    relative_saving,
    seeks_better_path,
)
from replanning.decision.request import AlternativeProvider, ReplanRequest
from replanning.engine.registry import (
    REPAIR_PLUGIN,
    ProviderRegistry,
    ProviderSpec,
    as_settings,
)
from replanning.engine.situation import Situation
from replanning.environment import Clock, Environment, SystemClock
from replanning.errors import BudgetExceeded, LLMError, StaleView
from replanning.history.history import ReplanHistory
from replanning.journal.records import (
    AlternativesConsidered,
    Candidate,
    Record,
    RunEnded,
    Score,
    Trigger,
    TriggerEvent,
    Usage,
)
from replanning.live.states import TaskState
from replanning.live.view import PlanView, TaskView
from replanning.plan.document import Plan
from replanning.plan.messages import join_names, truncate
from replanning.plan.tasks import Goal, is_repeatable
from replanning.plan.types import JsonValue, ReplanId, TaskId
from replanning.plugins import plugin_name
from replanning.run.event_loop import LoopThread, Timer, describe_error, isolate, without_group
from replanning.run.lifecycle import PluginTasks
from replanning.run.meter import MeteredRun, RunMeter
from replanning.run.opening import redactor_for
from replanning.run.retries import warn_of_error
from replanning.secrets import Redactor
from replanning.settings import Settings
from replanning.telemetry.tracer import NOOP_TRACER

if TYPE_CHECKING:
    from replanning.config import LoadedSettings

_MAX_NOTES: Final = 20

_MAX_NOTE_CHARS: Final = 2_000

MAX_DOUBTS_TOGETHER: Final = 20
"""Calls in doubt about which one question is; the next one is about the others."""

_DOUBT_CONFIDENCE: Final = 0.6

_ENGINE: Final = "engine"
"""Source of what the engine itself proposes."""

MAX_PROPOSALS: Final = 100
"""Maximum number of proposals considered from one provider."""


class VettedAlternative(NamedTuple):
    """A proposal with its verdict: its score, or the reason for its rejection."""

    proposal: Proposal
    candidate: Candidate


class RankedCandidates(NamedTuple):
    """The considered alternatives, best first, rejected ones last.

    Attributes:
        candidates: the alternatives, each with its score or the reason for its rejection.
        usable: the number of candidates that were not rejected.
        proposals: the analysis of each candidate; empty for candidates of an earlier search.
        notes: omissions of providers, and which of them failed or did not answer in time.
        view: the plan for which they were ranked.
        version: the version of that plan; it grows with every event.
        rank: ranks them again once the plan has another version.
    """

    candidates: tuple[Candidate, ...]
    usable: int
    proposals: tuple[Proposal, ...]
    notes: tuple[str, ...]
    view: PlanView
    version: int
    rank: Callable[[], RankedCandidates]

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """The candidates that were not rejected, best first."""
        return self.candidates[: self.usable]

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The rejected candidates, each with its reason."""
        return self.candidates[self.usable :]


class AskingRun(MeteredRun, Protocol):
    """The parts of a run that are needed to ask providers.

    A run of an engine has them. `detached_run` supplies them for a plan without a run.

    Attributes:
        clock: the clock.
        timer: calls back at the deadline.
        plugins: starts the async tasks that ask providers.
        end: the end of the run, after which nothing is recorded.
    """

    clock: Clock
    timer: Timer
    plugins: PluginTasks
    end: RunEnded | None

    def record_error(self, where: str, error: BaseException | str) -> None:
        """Record an error that was contained, and warn of it.

        Args:
            where: what failed, such as the provider.
            error: the error.
        """
        ...

    def wall_clock_left(self, now: float) -> float | None:
        """Return the seconds that remain of the budget's wall clock; None if it has no limit."""
        ...


class ContextAnalyzer:
    """Derives the request to providers from triggers and a plan. It keeps no state.

    Override a method to show providers something else:
    `AlternativeGenerator(providers, analyzer=…)`.
    """

    def analyze(
        self, triggers: Sequence[Trigger], situation: Situation, began: float
    ) -> ReplanRequest:
        """Return the request for a set of triggers.

        Args:
            triggers: the reasons for replanning.
            situation: the plan, and earlier tries.
            began: the start of the replan, in seconds since the epoch; the deadline counts from it.

        Raises:
            UnknownTask: a trigger names a task that the plan does not have.
        """
        ledger = situation.ledger
        settings = situation.settings

        patience = settings.timeout.replan
        if seeks_better_path(triggers):
            # The plan continues meanwhile, so a late answer would have little left to improve.
            patience = min(patience, settings.better_path.time_cap)

        roots: list[TaskId] = []
        for trigger in triggers:
            for task_id in trigger.tasks:
                roots.append(situation.live.entry(task_id).root)

        view = situation.view
        return ReplanRequest(
            triggers=tuple(triggers),
            view=view,
            max_alternatives=settings.alternatives.max_count,
            deadline=began + patience,
            tried_fingerprints=frozenset(ledger.lineages.tried(roots)),
            history=tuple(ledger.recent_records),
            goal=self.extract_goal(view),
        )

    def extract_goal(self, view: PlanView) -> Goal:
        """Return the goal that providers see: the goal of the plan, which no alternative changes.

        Alternatives are checked against the goal of the plan in any case.
        """
        return view.goal


class AlternativeVetter:
    """Vets the alternatives of one replan; verdicts are cached until the plan changes.

    Args:
        request: the request.
        situation: the plan to change, and earlier tries.
        scorer: scores valid alternatives.
        time_left: remaining seconds of the budget, if it limits time.
        asked_at: time of the request in seconds since the epoch; tasks that have started since are
            left out of alternatives. By default no task has started meanwhile.

    Attributes:
        better_path: whether the plan could continue as it is, so that only a cheaper path is sought.
    """

    def __init__(
        self,
        request: ReplanRequest,
        situation: Situation,
        scorer: ConfidenceScorer,
        time_left: float | None = None,
        asked_at: float = inf,
    ) -> None:
        self.request = request
        self.situation = situation
        self.scorer = scorer
        self.better_path = seeks_better_path(request.triggers)
        self._time_left = time_left
        self._asked_at = asked_at
        self._tasks: set[TaskId] = set()
        for trigger in request.triggers:
            self._tasks.update(trigger.tasks)
        self._vetted: dict[int, tuple[Alternative, VettedAlternative]] = {}
        self._outcomes: dict[str, Sequence[bool]] = {}

    def past_outcomes(self, tool: str) -> Sequence[bool]:
        """Return whether earlier calls of a tool succeeded, the newest last.

        They stay the same for all alternatives. `Evaluation` explains their origin.
        """
        if tool not in self._outcomes:
            self._outcomes[tool] = self.situation.evaluation.past_outcomes(tool)
        return self._outcomes[tool]

    def vet(self, given: Alternative, source: str) -> VettedAlternative:
        """Return the current verdict on an alternative: its score, or the reason for its rejection.

        The first check that objects rejects it; its reason is recorded.

        Args:
            given: the alternative.
            source: the name of its provider, used if the alternative names no source.
        """
        situation = self.situation
        # Cached together with the alternative; otherwise another object might reuse its identity.
        known = self._vetted.get(id(given))
        if known is not None and known[1].proposal.version == situation.live.version:
            return known[1]

        proposed = given
        if not given.source:
            proposed = given.model_copy(update={"source": source})
        question = situation.question_about_replaced(proposed.changes)
        # One that is read from a journal has this question already.
        if question and question not in proposed.ask:
            asks = [reason for reason in (proposed.ask, question) if reason]
            proposed = proposed.model_copy(update={"ask": "; ".join(asks)})
        proposal = analyse(proposed, situation.live, situation.redactor, asked_at=self._asked_at)
        rejected = self._rejection(proposal)
        score = None
        if not rejected:
            score = self.scorer.score(
                proposal.alternative,
                proposal.view,
                self.past_outcomes,
                time_left=self._time_left,
                tasks=self._tasks,
                run=proposal.tasks_to_run,
            )
            rejected = check_confidence(proposal, score, situation.settings.alternatives)
        candidate = Candidate(proposal.alternative, score, rejected)
        vetted = VettedAlternative(proposal, candidate)
        self._vetted[id(given)] = (given, vetted)
        return vetted

    def _rejection(self, proposal: Proposal) -> str:
        """Return why a proposal is rejected, before it is scored; empty if no check objects."""
        situation = self.situation
        triggers = self.request.triggers
        rejected = check_changes(
            proposal,
            self.request.tried_fingerprints,
            triggers,
            situation.ledger,
            situation.settings.limits,
        )
        if not rejected:
            rejected = situation.undo_problem(proposal.changes)
        if not rejected and situation.live.world.closed:
            rejected = check_feasible(proposal, triggers)
        if not rejected and self.better_path:
            min_gain = situation.settings.better_path.min_gain
            rejected = check_saving(proposal, min_gain, situation.evaluation.compare)
        return rejected


class PathGenerator:
    """Asks providers, and ranks their proposals.

    Override a method to ask or rank in another way: `AlternativeGenerator(…, path_generator=…)`
    takes the class.

    Args:
        providers: asked at the same time, with one deadline; failing ones are left out with a note.

    Attributes:
        last_resorts: the providers to ask again when the plan is stuck.
    """

    def __init__(self, providers: Sequence[AlternativeProvider]) -> None:
        self.providers = tuple(providers)
        self._names = [plugin_name(provider) for provider in self.providers]
        # A provider may lack these attributes, and a mock has all of them: only True counts.
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._names}>"

    async def generate(
        self,
        vetter: AlternativeVetter,
        run: AskingRun,
        *,
        last: bool = True,
        flawed: Sequence[Candidate] = (),
    ) -> list[ProviderReply]:
        """Ask all providers for proposals; return the replies in the order of the providers.

        They are asked at the same time. For a better path, providers with `immediate` are asked
        first, and the others only if those find none: the plan continues during a slow answer, and
        then little may remain to improve.

        Args:
            vetter: has the request, and vets proposals for providers.
            run: supplies the clock, the budget and the async tasks.
            last: leave out a provider whose view of the plan is stale, with a note.
            flawed: proposals that could not be executed; if given, only providers that can
                complete them are asked.

        Raises:
            StaleView: one of them read the plan after it had moved on; not with `last`.
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
            # It needs no async task of its own, and answers a turn of the event loop earlier.
            await _ask_provider(immediate[0], vetter, run)
        elif not vetter.better_path:
            await _ask_providers(replies, vetter, run)
        else:
            await _ask_providers(immediate, vetter, run)
            if not _has_acceptable(immediate, vetter):
                await _ask_providers(others, vetter, run)

        # Record all failures before a stale view makes the caller ask again.
        for reply in replies:
            if reply.failure is not None and run.end is None:
                run.record_error(f"provider {reply.name!r}", reply.failure)
        for reply in replies:
            if reply.stale_error is None:
                continue
            if not last:
                raise reply.stale_error
            reply.notes.append(f"{reply.name}: the plan changed every time it was asked")
        return replies

    def rank(self, replies: Sequence[ProviderReply], vetter: AlternativeVetter) -> RankedCandidates:
        """Vet and rank the alternatives of replies, best first.

        Alternatives that need no person come first, then those with a higher score. Ties go by
        provider, then by the order of its proposals. Duplicates within the round are rejected here;
        repetitions of earlier rounds, by `check_changes`.

        Args:
            replies: the replies from `generate`.
            vetter: vets the alternatives, and has the scorer that compares them.
        """
        situation = vetter.situation
        settings = situation.settings.alternatives
        count = 0
        for reply in replies:
            count += len(reply.alternatives)
        fingerprints: set[str] = set()
        good: list[_Acceptable] = []
        bad: list[VettedAlternative] = []
        notes: list[str] = []
        for reply in replies:
            notes += reply.notes
            for alternative in reply.alternatives:
                vetted = vetter.vet(alternative, reply.name)
                proposal, candidate = vetted
                # The changes may be empty; verdicts without changes are not duplicates.
                if proposal.changes and count > 1:
                    fingerprint = proposal.fingerprint
                    if fingerprint in fingerprints:
                        bad.append(_reject(vetted, "a duplicate of another proposal", score=None))
                        continue
                    fingerprints.add(fingerprint)
                score = candidate.score
                if score is None or candidate.rejected:
                    bad.append(vetted)
                    continue

                considered = proposal.alternative
                needs_person = score.total < settings.human_approval_threshold
                needs_person = needs_person or bool(considered.ask)
                saving = 0.0
                # Also if another provider completed the proposal.
                source, _, _ = considered.source.partition("+")
                if vetter.better_path:
                    compare = situation.evaluation.compare
                    saving = relative_saving(proposal.draft, situation.live, compare)
                elif situation.live.plan.facts is None or source in self._low_priority:
                    # Without facts nothing is verified, and a person may be needed anyway.
                    needs_person = True
                good.append(_Acceptable(needs_person, saving, score, vetted))

        def preference(one: _Acceptable, other: _Acceptable) -> int:
            if one.needs_person is not other.needs_person:
                return one.needs_person - other.needs_person
            if vetter.better_path:
                # All of them are sure to work, so the cheapest path is the best.
                return (one.saving < other.saving) - (one.saving > other.saving)
            return vetter.scorer.compare(other.score, one.score)

        good.sort(key=cmp_to_key(preference))
        ranked = [acceptable.vetted for acceptable in good]
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
            view=situation.view,
            version=situation.live.version,
            rank=partial(self.rank, replies, vetter),
        )


class _Acceptable(NamedTuple):
    """An alternative that was not rejected, with the values for its rank."""

    needs_person: bool
    saving: float
    score: Score
    vetted: VettedAlternative


def _reject(vetted: VettedAlternative, reason: str, *, score: Score | None) -> VettedAlternative:
    """Return a vetted alternative, rejected after all because of the others."""
    return vetted._replace(candidate=Candidate(vetted.proposal.alternative, score, reason))


class AlternativeGenerator:
    """Obtains ranked alternatives: analyze the context, ask, vet, score, rank.

    An engine has one and calls `search` for its runs. A program without a run calls `generate`.

    Args:
        providers: propose alternatives: names or objects, as for `ReplanningEngine`.
        settings: thresholds and limits for `generate`, and the named language models; or a mapping.
            A run uses the settings of its engine.
        environment: the clock for `generate`, and random numbers for language models.
        analyzer: makes the request for providers.
        path_generator: asks providers and ranks their proposals: a subclass of `PathGenerator`, or
            a function that makes one from the providers.
        scorer: scores alternatives; by default with the weights in the settings.
        evaluator: compares better paths for `generate`. A run uses the evaluator of its engine.
        redactor: recognises secrets; by default made from the settings.

    Attributes:
        path_generator: asks the providers, listed in its `providers`.

    Raises:
        NoLLMProvider, PluginError: a named provider cannot be used.
        SettingsError: the settings are invalid.
    """

    def __init__(
        self,
        providers: Sequence[ProviderSpec] = (REPAIR_PLUGIN,),
        *,
        settings: Settings | LoadedSettings | Mapping[str, JsonValue] | None = None,
        environment: Environment | None = None,
        analyzer: ContextAnalyzer | None = None,
        path_generator: Callable[[Sequence[AlternativeProvider]], PathGenerator] = PathGenerator,
        scorer: ConfidenceScorer | None = None,
        evaluator: PlanEvaluator | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        if environment is None:
            environment = Environment()
        if analyzer is None:
            analyzer = ContextAnalyzer()
        self.settings = as_settings(settings)
        self.analyzer = analyzer
        self.scorer = scorer
        self.evaluator = evaluator
        self._clock = environment.clock
        self._redactor = redactor or redactor_for(self.settings)
        self._registry = ProviderRegistry(self.settings, environment, self._redactor)
        self.path_generator = path_generator(self._registry.resolve(providers))

    def __repr__(self) -> str:
        names = [plugin_name(provider) for provider in self.path_generator.providers]
        return f"<{type(self).__name__} of {names}>"

    def use_redactor(self, redactor: Redactor) -> None:
        """Recognise secrets, also in prompts, with another redactor: an engine's, for its runs."""
        self._redactor = redactor
        self._registry.use_redactor(redactor)

    async def generate(
        self,
        trigger: Trigger | Sequence[Trigger],
        plan: Plan | PlanView,
        *,
        history: Iterable[Record] | ReplanHistory = (),
        facts: Collection[str] | None = None,
    ) -> RankedCandidates:
        """Return ranked alternatives for a plan without a run; changes and records nothing.

        The plan is brought to the state in which the trigger fires, see `Situation.of`: without
        further information, the task of a trigger has failed as it says, and its dependencies are
        done. Providers get the same request as in a run, and their alternatives are checked, scored
        and ranked in the same way.

        A provider that fails, does not answer in time or returns something else is left out;
        `notes` says so, and a warning on the logger `replanning`. It can be cancelled while it
        awaits. If it waits in a thread, this method waits as well.

        Args:
            trigger: the reason for seeking alternatives; several are considered together.
            plan: the plan; or the view of a run, used as it is.
            history: earlier events: records in order, starting from the plan as passed; or the
                history of a run. It supplies states, earlier tries and outcomes of tools.
            facts: all facts that hold now; by default derived from the other arguments.

        Returns:
            `ranked` alternatives with the parts of their scores, `rejected` ones with the reasons,
            and `notes`.

        Raises:
            StaleView: the plan has changed since the view was made.
            UnknownTask: a trigger names a task that the plan does not have.
            ValueError: there is no trigger, a fact is invalid, facts are passed together with a
                view, or a record does not fit the plan.
            Exception: any exception of your own analyzer, path generator or scorer.
        """
        triggers: Sequence[Trigger]
        if isinstance(trigger, TriggerEvent):
            triggers = (trigger,)
        else:
            triggers = tuple(trigger)
        if not triggers:
            raise ValueError("generate: expected at least one trigger")
        situation = Situation.of(
            plan,
            triggers,
            history=history,
            facts=facts,
            settings=self.settings,
            redactor=self._redactor,
            evaluator=self.evaluator,
        )
        notes: list[str] = []
        for each in triggers:
            reason = stale_reason(each, situation.live)
            if reason:
                notes.append(f"the trigger {each.kind} does not hold: {reason}")
        async with detached_run(situation, self._clock) as run:
            began = self._clock.now()
            ranked = await self.search(triggers, situation, run, began=began, last=True)
        return ranked._replace(notes=(*notes, *ranked.notes))

    async def search(
        self,
        triggers: Sequence[Trigger],
        situation: Situation,
        run: AskingRun,
        *,
        began: float,
        last: bool,
    ) -> RankedCandidates:
        """Return ranked candidates, vetted against the plan at the time of the last answer.

        Args:
            triggers: the reasons for replanning.
            situation: the plan, and earlier tries.
            run: has the clock, the budget and the tasks in which providers are asked.
            began: the start of the replan, in seconds since the epoch.
            last: leave out a provider whose view of the plan is stale, instead of raising.

        Raises:
            StaleView: a provider read the plan after a new revision, and must be asked again.
        """
        paths = self.path_generator
        is_stuck = len(triggers) == 1 and triggers[0].kind == "goal-unreachable"
        if is_stuck and not paths.last_resorts:
            # Providers have already given their answers; only last resorts are asked once more.
            if situation.ledger.is_fruitless(triggers[0]):
                return _earlier_candidates(triggers[0], situation)

        request = self.analyzer.analyze(triggers, situation, began)
        vetter = self.vetter(request, situation, run, began=began)
        replies = await paths.generate(vetter, run, last=last)
        with run.spans.scoring_span():
            ranked = paths.rank(replies, vetter)

        # A provider that plans over facts may complete a proposal that was rejected only for its
        # facts.
        flawed = []
        for candidate in ranked.candidates:
            if candidate.rejected.startswith(INFEASIBLE):
                flawed.append(candidate)
        if flawed:
            flawed = flawed[: request.max_alternatives]
            completions = await paths.generate(vetter, run, last=last, flawed=flawed)
            if any(reply.alternatives or reply.notes for reply in completions):
                replies += completions
                with run.spans.scoring_span():
                    ranked = paths.rank(replies, vetter)

        if ranked.usable:
            return ranked
        doubts = _retries_in_doubt(triggers, situation, ranked.candidates)
        if doubts is None:
            return ranked
        with run.spans.scoring_span():
            return paths.rank([*replies, doubts], vetter)

    def vetter(
        self, request: ReplanRequest, situation: Situation, run: AskingRun, *, began: float
    ) -> AlternativeVetter:
        """Return the vetter for the alternatives of a request.

        Args:
            request: the request.
            situation: the plan, and earlier tries.
            run: supplies the clock and the remaining time of the budget.
            began: the start of the replan, in seconds since the epoch.
        """
        scorer = self.scorer
        if scorer is None:
            settings = situation.settings
            scorer = ConfidenceScorer(settings.weights, shrink=settings.alternatives.shrink)
        asked_at = inf
        if situation.is_running:
            asked_at = run.clock.now()
        time_left = run.wall_clock_left(began)
        return AlternativeVetter(request, situation, scorer, time_left, asked_at)

    async def aclose(self) -> None:
        """Close the connections of named language models; a later call opens them again."""
        await self._registry.aclose()


def _retries_in_doubt(
    triggers: Sequence[Trigger], situation: Situation, rejected: Sequence[Candidate]
) -> ProviderReply | None:
    """Return how calls in doubt that triggers are about would be tried again; None if none are.

    Whether they took effect is not a question of what providers know: somebody has to look. So a
    person is asked, as the policy sees to, also where no provider knows a way on.

    Args:
        triggers: why replanning is considered.
        situation: the plan.
        rejected: the alternatives of providers, none of which can be used.
    """
    known = _rejected_retries(rejected)
    view = situation.view
    ids: dict[TaskId, None] = {}
    for trigger in triggers:
        ids.update(dict.fromkeys(trigger.tasks))
        if not trigger.tasks:
            ids.update(dict.fromkeys(task.id for task in view.stuck()))
    # That nothing can run any more is no reason to ask again about what a person has given up.
    asks_again = any(trigger.kind != "goal-unreachable" for trigger in triggers)
    questions = situation.ledger.questions
    retries: list[RetryTask] = []
    for task_id in ids:
        if task_id in known:
            continue
        began = situation.live.entry(task_id).log.started_at
        if questions.was_given_up(task_id, since=began) and not asks_again:
            continue
        if _is_for_person(view.task(task_id), view):
            retries.append(RetryTask(task_id=task_id))
    if not retries:
        return None

    sets: list[list[RetryTask]] = [retries[:MAX_DOUBTS_TOGETHER]]
    if len(retries) > 1:
        # They need not have gone alike.
        sets += [[retry] for retry in sets[0]]
    reply = ProviderReply(_ENGINE)
    for changes in sets:
        names = join_names([repr(change.task_id) for change in changes], 5)
        reason = f"try {names} again; it may then have its effect twice"
        if len(changes) > 1:
            reason = f"try {names} again; they may then have their effects twice"
        reply.alternatives.append(
            Alternative(changes=changes, reason=reason, confidence=_DOUBT_CONFIDENCE)
        )
    return reply


def _rejected_retries(rejected: Sequence[Candidate]) -> set[TaskId]:
    """Return the tasks of which it was considered already to try them again."""
    known: set[TaskId] = set()
    for candidate in rejected:
        # One with a score was rejected for its confidence, which does not matter to a person.
        if candidate.score is not None and candidate.alternative.source != _ENGINE:
            continue
        for change in candidate.alternative.changes:
            if change.kind == "retry":
                known.add(change.task_id)
    return known


def _is_for_person(task: TaskView, view: PlanView) -> bool:
    """Return whether only a person can decide what follows the failure of a task.

    An optional task is not worth a question, and one whose retries were made has failed for good.
    """
    if task.state is not TaskState.FAILED or task.is_held or task.task.optional:
        return False
    if task.failure is None or not task.failure.in_doubt:
        return False
    if is_repeatable(task.task, view.tool(task.task.tool)):
        return False
    return not view.has_used_retries(task.id)


def _earlier_candidates(trigger: Trigger, situation: Situation) -> RankedCandidates:
    """Return the candidates of fruitless searches, each search once."""
    searches: dict[ReplanId, AlternativesConsidered] = {}
    for task_id in trigger.tasks:
        search = situation.ledger.fruitless_searches[task_id]
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
        view=situation.view,
        version=situation.live.version,
        rank=again,
    )
    return ranked


# Asking


@dataclass(slots=True, eq=False)
class ProviderReply:
    """Reply of one provider. It is final once it is settled.

    Attributes:
        name: the name of the provider.
        ask: asks it; None for what the engine itself proposes.
        estimate: returns the expected use of the budget; None if it costs nothing.
        alternatives: its proposals.
        notes: its omissions, and why it failed.
        stale_error: the error it raised because the plan had changed.
        failure: why it failed, for the record.
        settled: whether later answers are ignored.
        when_settled: set at that moment, if a task waits for it.
    """

    name: str
    ask: Callable[[ReplanRequest], Awaitable[Sequence[Alternative]]] | None = None
    estimate: Callable[[ReplanRequest], Usage] | None = None
    alternatives: list[Alternative] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale_error: StaleView | None = None
    failure: Exception | str | None = None
    settled: bool = False
    when_settled: anyio.Event | None = None

    def add_note(self, text: str) -> None:
        """Keep a note of the provider beside its alternatives, up to a limit."""
        if len(self.notes) < _MAX_NOTES and not self.settled:
            self.notes.append(truncate(f"{self.name}: {text}", _MAX_NOTE_CHARS))

    def settle(self, problem: str = "") -> None:
        """Ignore later answers of the provider; note the problem unless settled before."""
        if problem and not self.settled:
            self.notes.append(truncate(f"{self.name} {problem}", _MAX_NOTE_CHARS))
        self.settled = True
        if self.when_settled is not None:
            self.when_settled.set()

    def fail(self, problem: str, error: Exception | str) -> None:
        """Settle with a failure of the provider; it is recorded once all have answered."""
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
        # A provider able to complete its own proposal would have done so.
        if other.alternative.source == name:
            continue
        made = await complete(request, other.alternative, other.rejected)
        if made is not None:
            # A completed proposal still needs a person if the original did.
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


async def _ask_providers(
    replies: Sequence[ProviderReply], vetter: AlternativeVetter, run: AskingRun
) -> None:
    """Ask providers at the same time, and wait until all replies are settled."""
    for reply in replies:
        reply.when_settled = anyio.Event()
        # A provider that waits in a thread continues after its deadline; its answer is ignored.
        run.plugins.run(f"provider {reply.name!r}", _ask_provider, reply, vetter, run)
    for reply in replies:
        # Waiting for an event that has happened would take a turn of the event loop.
        if not reply.settled and reply.when_settled is not None:
            await reply.when_settled.wait()


async def _ask_provider(reply: ProviderReply, vetter: AlternativeVetter, run: AskingRun) -> None:
    """Ask one provider within budget and deadline; contain and note a failure."""
    budget = run.ledger.budget_tracker
    release: Callable[[], None] | None = None
    # A free provider needs no reservation, unless the budget may be used up already.
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

    made = vetter.request
    request = ReplanRequest(
        triggers=made.triggers,
        view=made.view,
        max_alternatives=made.max_alternatives,
        deadline=made.deadline,
        tried_fingerprints=made.tried_fingerprints,
        charge=partial(run.charge, provider=reply.name),
        meter=RunMeter(run, reply.name, reply.add_note),
        history=made.history,
        rejection_reason=lambda alternative: vetter.vet(alternative, reply.name).candidate.rejected,
        add_note=reply.add_note,
        goal=made.goal,
    )
    scope = anyio.CancelScope()

    def expire() -> None:
        problem = "did not answer in time"
        reply.fail(problem, f"it {problem}")
        scope.cancel()

    alarm = run.timer.call_at(request.deadline, expire)
    try:
        with run.spans.provider_span(reply.name) as answered:
            alternatives: list[Alternative] = []
            with scope:
                assert reply.ask is not None
                ask = partial(reply.ask, request)
                alternatives = await isolate(collect_alternatives, ask, reply.add_note)
            # An answer after the deadline is ignored.
            if not reply.settled:
                reply.alternatives = alternatives
            answered(len(reply.alternatives), scope.cancelled_caught)
    except StaleView as error:
        reply.stale_error = error
    except BudgetExceeded as error:
        reply.settle(f"could not continue asking: {error}")
    except LLMError as error:
        # Its message is for people, and begins with the name that the note already has.
        message = str(error).removeprefix(f"{reply.name}: ")
        reply.fail(f"failed: {message}", error)
    except Exception as error:  # noqa: BLE001 - a failing provider is contained
        reply.fail(f"failed: {describe_error(error)}", error)
    finally:
        alarm.cancel()
        if release is not None:
            release()
    # Not in the `finally` above: if the program is ending, nothing may be decided for lack of an
    # answer, because the process that resumes will ask again.
    reply.settle()


async def collect_alternatives(
    ask: Callable[[], object], add_note: Callable[[str], None]
) -> list[Alternative]:
    """Ask a provider and return its proposals, which may come from a generator.

    Raises:
        TypeError: one of them is not an alternative, or the provider is not async.
    """
    answer: Any = ask()
    if not isinstance(answer, Awaitable):
        raise TypeError("`propose` is not async; write `async def propose(self, request)`")
    given: Any = await answer
    proposed = [given]
    # A pydantic model is iterable over its fields, but it is not a list of alternatives.
    if isinstance(given, Iterable) and not isinstance(given, Alternative):
        proposed = list(given)
    alternatives = proposed[:MAX_PROPOSALS]
    for alternative in alternatives:
        # An object of another type means that the provider is broken, so none is accepted.
        if not isinstance(alternative, Alternative):
            raise TypeError(f"expected an Alternative, got {type(alternative).__name__}")
    if len(proposed) > MAX_PROPOSALS:
        add_note(f"made more than {MAX_PROPOSALS} proposals; the others are left out")
    return alternatives


# Without a run


class DetachedRun:
    """Stand-in for a run, to ask providers about a plan without one; records nothing.

    Usage counts against the budget during its lifetime.

    Args:
        situation: the plan.
        clock: the clock.
        group: the task group for asking providers.
    """

    def __init__(self, situation: Situation, clock: Clock, group: TaskGroup) -> None:
        self.ledger = situation.ledger
        self.clock = clock
        self.loop = LoopThread()
        self.spans = NOOP_TRACER
        self.plugins = PluginTasks(group.start_soon)
        self.end: RunEnded | None = None
        self._situation = situation

        def no_deadline() -> float | None:
            return None

        # No attempt runs, so the only alarms are those of providers.
        self.timer = Timer(clock, no_deadline, lambda now: None)

    def __repr__(self) -> str:
        return f"<DetachedRun of {self._situation.live!r}>"

    def charge(self, usage: Usage, *, provider: str | None = None) -> None:
        """Count usage against the budget."""
        self.ledger.budget_tracker.spend(usage)

    def record_error(self, where: str, error: BaseException | str) -> None:
        """Warn of an error that was contained."""
        warn_of_error(where, error, self._situation.redactor)

    def wall_clock_left(self, now: float) -> float | None:
        """Return the seconds left of the budget's wall clock, if it has a limit."""
        limit = self._situation.ledger.budget_tracker.budget.wall_clock
        if limit is None:
            return None
        return limit - self._situation.elapsed


@asynccontextmanager
async def detached_run(
    situation: Situation, clock: Clock | None = None
) -> AsyncIterator[DetachedRun]:
    """Supply a stand-in for a run, to ask providers about a plan, within a block.

    Providers that wait in threads may hold up the end of the block. An exception of the block is
    raised again unwrapped.

    Args:
        situation: the plan, as `Situation.of` makes it.
        clock: the clock; by default that of this machine.
    """
    if clock is None:
        clock = SystemClock()
    failure: Exception | None = None
    group = anyio.create_task_group()
    run = DetachedRun(situation, clock, group)
    try:
        async with group:
            group.start_soon(run.timer.run)
            try:
                yield run
            except Exception as error:  # noqa: BLE001 - raised again below
                # Raised here, it would reach the caller in a group that they never opened.
                failure = error
            finally:
                group.cancel_scope.cancel()
    except BaseExceptionGroup as error:
        raise without_group(error) from None
    finally:
        await run.loop.close()
    if failure is not None:
        raise failure

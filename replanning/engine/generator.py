"""Generation of alternatives: providers are asked, each proposal is vetted against the live plan, scored and ranked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import compress
from typing import Any, Final, NamedTuple

import anyio

from replanning.changes import Alternative
from replanning.decision.confidence import ConfidenceScorer, OutcomeHistory
from replanning.decision.policy import (
    INFEASIBLE,
    check_feasible,
    find_futile_call,
    find_objection,
    relative_saving,
    restore_masks,
)
from replanning.decision.request import AlternativeProvider, ReplanRequest
from replanning.decision.staleness import drop_started
from replanning.errors import BudgetExceeded, LLMError, StaleView
from replanning.journal.records import Candidate, Trigger, Usage
from replanning.live.draft import Draft
from replanning.live.view import PlanView
from replanning.plan.json_values import detached
from replanning.plan.messages import cut, join_names
from replanning.plan.tasks import Goal
from replanning.plugins import plugin_name
from replanning.run.event_loop import describe_error, isolate
from replanning.run.lifecycle import Lifecycle, RunMeter

_MAX_NOTES: Final = 20

_MAX_NOTE_CHARS: Final = 2_000

MAX_PROPOSALS: Final = 100
"""Most proposals of a provider that are considered."""


class VettedAlternative(NamedTuple):
    """An alternative with the verdict on it: its score or the reason of its rejection, and its staged changes."""

    proposed: Alternative
    candidate: Candidate
    draft: Draft | None
    version: int


@dataclass(frozen=True, slots=True)
class RankedCandidates:
    """Candidates, best first, the rejected ones last, with the drafts of their changes; and notes of providers.

    `rank` ranks them anew when the plan has another `version`.
    """

    candidates: tuple[Candidate, ...]
    drafts: tuple[Draft | None, ...]
    notes: tuple[str, ...]
    view: PlanView
    version: int
    rank: Callable[[], RankedCandidates]

    @property
    def has_usable(self) -> bool:
        """Whether a candidate was not rejected."""
        return bool(self.candidates) and not self.candidates[0].rejected


class ContextAnalyzer:
    """Derives the request to providers from a run."""

    def analyse(self, triggers: Sequence[Trigger], life: Lifecycle, began: float) -> ReplanRequest:
        """Return the request that follows from triggers, considered since `began`."""
        live, ledger, settings = life.live, life.ledger, life.settings
        roots = sorted(
            {live.entry(task_id).root for trigger in triggers for task_id in trigger.tasks}
        )
        patience = settings.timeout.replan
        if all(trigger.kind == "better-path-found" for trigger in triggers):
            patience = min(patience, settings.better_path.time_cap)  # the plan can go on as it is
        return ReplanRequest(
            triggers=detached(tuple(triggers)),
            view=PlanView(live),
            max_alternatives=settings.alternatives.max_count,
            deadline=began + patience,
            tried_fingerprints=frozenset(
                tried for root in roots for tried in ledger.lineages.tried.get(root, ())
            ),
            charge=life.charge,
            history=tuple(ledger.recent_records),
        )

    def extract_goal(self, view: PlanView) -> Goal:
        """Return the goal of the plan, which no alternative changes."""
        return view.goal


@dataclass(slots=True, eq=False)
class AlternativeVetter:
    """Vets the alternatives of one replan; each once, unless the plan moves meanwhile.

    Args:
        request: the request.
        life: the run whose plan is to be changed.
        scorer: scores valid alternatives.
        past: finds earlier outcomes of tools: the same for all alternatives.
        time_left: seconds that remain of the budget, if it limits them.
        asked_at: time of the request in seconds since the epoch.
    """

    request: ReplanRequest
    life: Lifecycle
    scorer: ConfidenceScorer
    past: OutcomeHistory
    time_left: float | None
    asked_at: float
    _vetted: dict[str, VettedAlternative] = field(default_factory=dict)

    @property
    def seeks_better_path(self) -> bool:
        """Whether the plan could go on as it is, and only a cheaper one is sought."""
        return all(trigger.kind == "better-path-found" for trigger in self.request.triggers)

    def vet(self, proposed: Alternative, source: str) -> VettedAlternative:
        """Return the verdict on an alternative as the plan is now; it gets this source if it names none."""
        if not proposed.source:
            proposed = proposed.model_copy(update={"source": source})
        version, fingerprint = self.life.live.version, proposed.fingerprint()
        vetted = self._vetted.get(fingerprint)
        if vetted is not None and vetted.version == version and vetted.proposed == proposed:
            return vetted
        life, request = self.life, self.request
        live, settings = life.live, life.settings
        draft, score, current = None, None, proposed
        rest = drop_started(proposed.changes, live, self.asked_at)
        if rest and len(rest) < len(proposed.changes):
            reason = f"{proposed.reason} (without what has begun meanwhile)"
            current = proposed.model_copy(
                update={"changes": rest, "reason": reason, "expected_cost": None}
            )
        problem = "; ".join(map(str, life.redactor.name_problems(current.changes)[:5]))
        if problem:
            # Names are not masked, and alternatives are on record even if they are rejected.
            alternative = current.model_copy(update={"changes": ()})
        else:
            changes = restore_masks(current.changes, live, life.redactor)
            alternative = current.model_copy(update={"changes": changes})
            problem = find_objection(alternative, request, live, life.ledger, settings.limits)
        if not problem:
            draft = Draft(live, alternative.changes)
            left_out = [
                c.task_id
                for c in alternative.changes
                if c.kind == "remove" and c.task_id in live.scheduler.queue.reserved
            ]
            if draft.problems:
                problem = "it does not fit the plan: " + "; ".join(map(str, draft.problems[:5]))
            elif left_out:
                problem = f"a caller waits for the result of {join_names(left_out, 5)}, which it leaves out"
            elif (
                not (problem := find_futile_call(alternative.changes, PlanView(live)))
                and live.world.closed
            ):
                problem = check_feasible(draft, request.triggers, live)
            if not problem and self.seeks_better_path:
                saving = relative_saving(draft, live)
                if saving <= 0 or saving < settings.better_path.min_gain:
                    problem = f"it saves {saving:.0%} of the remaining cost, which is too little"
        if not problem:
            tasks = {task_id for trigger in request.triggers for task_id in trigger.tasks}
            score = self.scorer.score(
                alternative, PlanView(live), self.past, time_left=self.time_left, tasks=tasks
            )
            minimum = settings.alternatives
            if (
                alternative.confidence is not None
                and alternative.confidence < minimum.min_llm_confidence
            ):
                problem = f"its own confidence {alternative.confidence:g} is below {minimum.min_llm_confidence:g}"
            elif score.total < minimum.min_confidence:
                problem = f"confidence {score.total:.2f} is below {minimum.min_confidence:g}"
        candidate = Candidate(alternative, score, problem)
        vetted = self._vetted[fingerprint] = VettedAlternative(proposed, candidate, draft, version)
        return vetted


class PathGenerator:
    """Asks providers, and ranks their proposals.

    Args:
        providers: asked at the same time, with one deadline for all; a failing one is left out and noted.
        scorer: scores valid proposals.

    Attributes:
        last_resorts: the providers that are asked even if nothing can run any more and they found nothing before.
    """

    def __init__(self, providers: Sequence[AlternativeProvider], scorer: ConfidenceScorer) -> None:
        self.providers = tuple(providers)
        self.scorer = scorer
        self.last_resorts = tuple(
            p for p in self.providers if getattr(p, "last_resort", False) is True
        )
        self._names = [plugin_name(provider) for provider in self.providers]
        yielding = [
            getattr(provider, "yields_priority", False) is True for provider in self.providers
        ]
        self._low_priority = set(compress(self._names, yielding))

    async def generate(
        self, vetter: AlternativeVetter, *, last: bool, flawed: Sequence[Candidate] = ()
    ) -> list[ProviderReply]:
        """Ask all providers for proposals at the same time, and return their replies in the order of the providers.

        For a better path, providers with `immediate` are asked first, and the others only if these find none: the plan
        goes on while a slow provider is awaited, so that little may remain to be improved.

        Args:
            vetter: holds the request and the run, and vets proposals that providers want to know about.
            last: leave out a provider whose view of the plan is stale, with a note.
            flawed: proposals that could not be executed; if given, only providers that can complete them are asked.

        Raises:
            StaleView: one of them read the plan after it had moved on.
        """
        replies = [
            ProviderReply(
                name,
                provider,
                partial(_complete, provider, name, flawed)
                if flawed
                else partial(_propose, provider),
            )
            for name, provider in zip(self._names, self.providers, strict=True)
            if not flawed or getattr(provider, "complete", None) is not None
        ]
        rounds = [replies]
        if vetter.seeks_better_path:
            rounds = [
                [r for r in replies if (getattr(r.provider, "immediate", False) is True) is first]
                for first in (True, False)
            ]
        for together in rounds:
            for reply in together:
                if len(together) == 1 and getattr(reply.provider, "immediate", False):
                    await _ask_provider(reply, vetter)
                else:  # a provider that waits in a thread goes on after its deadline, and its answer is ignored
                    vetter.life.start_plugin(
                        f"provider {reply.name!r}", _ask_provider, reply, vetter
                    )
            for reply in together:
                if (
                    not reply.settled.is_set()
                ):  # waiting for what has happened takes a turn of the event loop
                    await reply.settled.wait()
            proposals = [
                (alternative, reply.name)
                for reply in together
                for alternative in reply.alternatives
            ]
            if len(rounds) > 1 and not all(
                vetter.vet(*proposal).candidate.rejected for proposal in proposals
            ):
                break
        for reply in replies:  # in the order of the providers, whichever failed first
            if reply.failure is not None and vetter.life.end is None:
                vetter.life.record_error(f"provider {reply.name!r}", reply.failure)
        for reply in replies:
            if reply.stale_error is not None and not last:
                raise reply.stale_error
            if reply.stale_error is not None:
                reply.notes.append(f"{reply.name}: the plan changed each time that it was asked")
        return replies

    def rank(self, replies: Sequence[ProviderReply], vetter: AlternativeVetter) -> RankedCandidates:
        """Vet and rank the alternatives of replies, best first; ties go by provider, then by its order."""
        life = vetter.life
        limit = life.settings.alternatives.max_count
        fingerprints: set[str] = set()
        good: list[tuple[Candidate, Draft | None]] = []
        bad: list[tuple[Candidate, Draft | None]] = []
        with life.spans.scoring_span():
            for alternative, source in (
                (proposed, reply.name) for reply in replies for proposed in reply.alternatives
            ):
                _, candidate, draft, _ = vetter.vet(alternative, source)
                fingerprint = candidate.alternative.fingerprint()
                if candidate.alternative.changes and fingerprint in fingerprints:
                    candidate = Candidate(
                        candidate.alternative, None, "the same was proposed already"
                    )
                fingerprints.add(fingerprint)
                (bad if candidate.rejected else good).append((candidate, draft))
        verifiable = life.live.plan.facts is not None
        threshold = life.settings.alternatives.human_approval_threshold

        def order(ranked: tuple[Candidate, Draft | None]) -> tuple[bool, float]:
            """Proposals that facts have verified, and that need no person, precede those of providers that yield."""
            alternative, score, draft = ranked[0].alternative, ranked[0].score, ranked[1]
            total = score.total if score else 0.0
            if draft is not None and vetter.seeks_better_path:
                return total < threshold or bool(alternative.ask), -relative_saving(
                    draft, life.live
                )
            needs_person = not verifiable or total < threshold or bool(alternative.ask)
            leading, _, _ = alternative.source.partition(
                "+"
            )  # of a proposal that another completed
            return needs_person or leading in self._low_priority, -total

        good.sort(key=order)
        spare = [
            (replace(c, rejected=f"only {limit} are considered"), draft)
            for c, draft in good[limit:]
        ]
        ranked = [*good[:limit], *spare, *bad]
        return RankedCandidates(
            tuple(candidate for candidate, _ in ranked),
            tuple(draft for _, draft in ranked),
            tuple(note for reply in replies for note in reply.notes),
            PlanView(life.live),
            life.live.version,
            partial(self.rank, replies, vetter),
        )


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
        self.analyzer = analyzer or ContextAnalyzer()
        self.path_generator = PathGenerator(providers, scorer or ConfidenceScorer())

    def __repr__(self) -> str:
        return (
            f"<AlternativeGenerator of {[plugin_name(p) for p in self.path_generator.providers]}>"
        )

    async def generate(
        self, triggers: Sequence[Trigger], life: Lifecycle, *, began: float, last: bool
    ) -> RankedCandidates:
        """Return ranked candidates, vetted against the plan as it is when the last provider answers.

        Args:
            triggers: why replanning is considered.
            life: the run.
            began: since when it is considered, in seconds since the epoch.
            last: do without a provider whose view of the plan is stale, instead of raising.

        Raises:
            StaleView: a provider read the plan after it had moved on to another revision, and must be asked again.
        """
        paths, in_vain = self.path_generator, life.ledger.fruitless_searches
        stuck = {
            task_id
            for trigger in triggers
            for task_id in trigger.tasks
            if trigger.kind == "goal-unreachable"
        }
        again = stuck and len(triggers) == 1 and in_vain.keys() >= stuck
        if again and not paths.last_resorts:  # providers have said already what they know
            earlier = {
                body.replan: body for body in (in_vain[task_id] for task_id in triggers[0].tasks)
            }.values()
            candidates = tuple(candidate for body in earlier for candidate in body.candidates)
            notes = tuple(note for body in earlier for note in body.notes)
            view, version = PlanView(life.live), life.live.version
            ranked = RankedCandidates(
                candidates, (None,) * len(candidates), notes, view, version, lambda: ranked
            )
            return ranked
        request = self.analyzer.analyse(triggers, life, began)
        time_left, past = life.wall_clock_left(began), cache(life.past_outcomes)
        vetter = AlternativeVetter(request, life, paths.scorer, past, time_left, life.clock.now())
        replies = await paths.generate(vetter, last=last)
        ranked = paths.rank(replies, vetter)
        flawed = [
            candidate
            for candidate in ranked.candidates
            if candidate.rejected.startswith(INFEASIBLE)
        ]
        if flawed:
            completions = await paths.generate(
                vetter, last=last, flawed=flawed[: request.max_alternatives]
            )
            if any(reply.alternatives or reply.notes for reply in completions):
                ranked = paths.rank([*replies, *completions], vetter)
        return ranked


@dataclass(slots=True, eq=False)
class ProviderReply:
    """Reply of one provider: its alternatives and notes, to which nothing is added once the reply is settled."""

    name: str
    provider: AlternativeProvider
    ask: Callable[[ReplanRequest], Awaitable[Sequence[Alternative]]]
    alternatives: list[Alternative] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale_error: StaleView | None = None
    failure: Exception | str | None = None
    settled: anyio.Event = field(default_factory=anyio.Event)

    def add_note(self, text: str) -> None:
        """Keep a note of the provider beside its alternatives, up to a limit."""
        if len(self.notes) < _MAX_NOTES and not self.settled.is_set():
            self.notes.append(cut(f"{self.name}: {text}", _MAX_NOTE_CHARS))

    def settle(self, problem: str = "") -> None:
        """Accept nothing more from the provider; note the problem unless the reply was settled before."""
        if problem and not self.settled.is_set():
            self.notes.append(cut(f"{self.name} {problem}", _MAX_NOTE_CHARS))
        self.settled.set()

    def fail(self, problem: str, error: Exception | str) -> None:
        """Settle with a failure of the provider, to be recorded once all have answered."""
        if not self.settled.is_set():
            self.failure = error
        self.settle(problem)


def _propose(
    provider: AlternativeProvider, request: ReplanRequest
) -> Awaitable[Sequence[Alternative]]:
    return provider.propose(request)


async def _complete(
    provider: AlternativeProvider, name: str, flawed: Sequence[Candidate], request: ReplanRequest
) -> list[Alternative]:
    """Ask a provider to complete the proposals of others."""
    complete = getattr(provider, "complete")  # noqa: B009 - not every provider has it
    completed = []
    for other in flawed:
        if other.alternative.source != name:
            made = await complete(request, detached(other.alternative), other.rejected)
            if made is not None:  # a proposal that needed a person still needs one
                completed.append(made.model_copy(update={"ask": made.ask or other.alternative.ask}))
    return completed


async def _ask_provider(reply: ProviderReply, vetter: AlternativeVetter) -> None:
    """Ask one provider within budget and deadline; a failure is contained and noted."""
    name, request, life = reply.name, vetter.request, vetter.life
    try:
        estimate = getattr(reply.provider, "estimate", None)
        release = life.ledger.budget_tracker.reserve(
            estimate(request) if estimate is not None else Usage()
        )
    except BudgetExceeded as error:
        reply.settle(f"was not asked: {error}")
        return
    except Exception as error:  # noqa: BLE001 - the estimate is the provider's code
        reply.fail(f"failed: {describe_error(error)}", error)
        return
    scope = life.scope_type()

    def expire() -> None:
        problem = "did not answer in time"
        reply.fail(problem, f"it {problem}")
        scope.cancel()

    alarm = life.timer.call_at(request.deadline, expire)
    # As `replace` would make it, which takes several times as long.
    request = ReplanRequest(
        triggers=request.triggers,
        view=request.view,
        max_alternatives=request.max_alternatives,
        deadline=request.deadline,
        tried_fingerprints=request.tried_fingerprints,
        charge=partial(life.charge, provider=name),
        meter=RunMeter(life, name, reply.add_note),
        history=request.history,
        rejection_reason=lambda alternative: (
            vetter.vet(detached(alternative), name).candidate.rejected
        ),
        add_note=reply.add_note,
    )
    try:
        with life.spans.provider_span(name) as answered:
            alternatives: list[Alternative] = []
            with scope:
                alternatives = await isolate(
                    collect_alternatives, lambda: reply.ask(request), reply.add_note
                )
            if not reply.settled.is_set():
                reply.alternatives = alternatives
            answered(len(reply.alternatives), scope.cancelled_caught)
    except StaleView as error:
        reply.stale_error = error
    except BudgetExceeded as error:
        reply.settle(f"could ask no further: {error}")
    except LLMError as error:  # its message is meant for people
        reply.fail(f"failed: {str(error).removeprefix(f'{name}: ')}", error)
    except Exception as error:  # noqa: BLE001 - a failing provider is contained
        reply.fail(f"failed: {describe_error(error)}", error)
    finally:
        alarm.cancel()
        release()
    # Not where the program is ending: nothing may be decided for lack of an answer, as the process that resumes asks again.
    reply.settle()


async def collect_alternatives(
    ask: Callable[[], object], add_note: Callable[[str], None]
) -> list[Alternative]:
    """Return the proposals of a provider that is asked, which may come from a generator.

    Raises:
        TypeError: one of them is no alternative, or the provider is not async.
    """
    answer: Any = ask()
    if not isinstance(answer, Awaitable):
        raise TypeError("`propose` is not async; write `async def propose(self, request)`")
    given: Any = await answer
    several = isinstance(given, Iterable) and not isinstance(given, Alternative)
    proposed = list(given) if several else [given]
    alternatives = detached(proposed[:MAX_PROPOSALS])  # the provider may keep its own
    for alternative in alternatives:
        if not isinstance(alternative, Alternative):  # then none of them is taken
            raise TypeError(f"expected an Alternative, got {type(alternative).__name__}")
    if len(proposed) > MAX_PROPOSALS:
        add_note(f"made more than {MAX_PROPOSALS} proposals; the others are left out")
    return alternatives

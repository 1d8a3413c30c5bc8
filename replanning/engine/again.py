"""Decisions of recorded runs, made again: with other providers, models, settings, or rules.

A journal holds what providers and policy saw at each decision. It is replayed up to there, providers
are asked about the plan as it was, and their alternatives are checked, scored and decided about as in
a run. Nothing is executed, and nothing is written to the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Never

from pydantic_core import from_json

from replanning.changes import Alternative, changes_hash, target_task_ids
from replanning.decision.evaluation import PlanEvaluator
from replanning.decision.ledger import Ledger
from replanning.decision.policy import PERSISTENT_KINDS, RULES, Decision, ReplanPolicy
from replanning.decision.proposal import ConfidenceScorer
from replanning.decision.request import AlternativeProvider, ReplanRequest
from replanning.engine.generator import (
    MAX_PROPOSALS,
    AlternativeGenerator,
    RankedCandidates,
    detached_run,
)
from replanning.engine.replanner import (
    AUTOMATIC_DECIDERS,
    NOBODY_CAN_BE_ASKED,
    make_decision,
)
from replanning.engine.situation import Situation
from replanning.environment import Clock
from replanning.errors import BudgetExceeded, LLMError, PluginError, SettingsError, StoreError
from replanning.history.effects import RunEffect, run_effects
from replanning.history.export import candidate_json
from replanning.history.history import ReplanHistory
from replanning.history.status import ReplayedRun, apply_record, replay_records
from replanning.history.wording import edit_author, format_iso_time
from replanning.journal.memory import MemoryStore
from replanning.journal.records import (
    AlternativesConsidered,
    AttemptSucceeded,
    Candidate,
    DecisionKind,
    DecisionMade,
    NoteAdded,
    PlanRevised,
    QuestionAsked,
    Record,
    RunResumed,
    Score,
    Trigger,
    Usage,
)
from replanning.journal.store import RunStore, ToolOutcome
from replanning.live.entries import TaskOutput
from replanning.live.plan import LivePlan
from replanning.live.view import PlanView
from replanning.llm.completions import LLMCall
from replanning.llm.provider import LLMProvider
from replanning.plan.elements import FORESEEN
from replanning.plan.json_values import is_redacted
from replanning.plan.messages import join_names, pluralise, spoken_id
from replanning.plan.tasks import Budget, program_note
from replanning.plan.types import JsonObject, JsonValue, ReplanId, RunId, TaskId
from replanning.plugins import installed_plugins, load_plugin
from replanning.run.outcomes import Evaluation
from replanning.run.retries import warn_of_error
from replanning.run.undo import RunUndo
from replanning.secrets import Redactor
from replanning.settings import Settings
from replanning.version import __version__

_MAX_NAMED_TASKS: Final = 5

_MAX_OUTCOMES: Final = 1_000
"""Outcomes of a tool among which those before a run are looked for."""

_GIVING_UP: Final[tuple[DecisionKind, ...]] = ("keep", "abort")


def parse_overrides(texts: Sequence[str], place: str) -> dict[str, JsonValue]:
    """Return the settings in texts such as `alternatives.min_confidence=0.6`.

    Values are JSON, or else texts.

    Args:
        texts: a setting each.
        place: where they were stated.

    Raises:
        SettingsError: one of them is no setting with a value.
    """
    overrides: dict[str, JsonValue] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise SettingsError.at(place, f"expected KEY=VALUE, got {text!r}")
        try:
            overrides[key.strip()] = from_json(value)
        except ValueError:
            overrides[key.strip()] = value
    return overrides


def with_overrides(recorded: Settings, overrides: Mapping[str, JsonValue]) -> Settings:
    """Return the settings of a run with some that are different.

    Raises:
        SettingsError: together they are not valid.
    """
    document: JsonObject = recorded.model_dump(mode="json", exclude_defaults=True)
    for key, value in overrides.items():
        *sections, name = key.split(".")
        section = document
        for each in sections:
            inner = section.setdefault(each, {})
            if not isinstance(inner, dict):
                raise SettingsError.at(key, f"{each!r} is no section of settings")
            section = inner
        section[name] = value
    return Settings.model_validate(document)


@dataclass(frozen=True, slots=True)
class MadeDecision:
    """Decision about a replan: the one on record, or the one that was made again.

    Attributes:
        kind: what became of the replan.
        rule: the rule behind it.
        reason: why, in words.
        candidates: the alternatives, best first, the rejected ones last.
        chosen: the alternative that it is about, if any.
        diff: what that changes in the plan, in lines for people.
        rules: the version of the rules by which it was made.
        version: the version of this library that made it.
    """

    kind: DecisionKind
    rule: str
    reason: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    diff: str
    rules: int
    version: str

    @property
    def score(self) -> Score | None:
        """The score of the chosen alternative."""
        if self.chosen is None:
            return None
        return self.chosen.score

    def to_json(self) -> JsonObject:
        """Return the decision as JSON values."""
        chosen = None
        if self.chosen is not None:
            chosen = candidate_json(self.chosen)
        return {
            "decision": self.kind,
            "rule": self.rule,
            "reason": self.reason,
            "chosen": chosen,
            "candidates": list(map(candidate_json, self.candidates)),
            "diff": list[JsonValue](self.diff.splitlines()),
            "rules": self.rules,
            "version": self.version,
        }


@dataclass(frozen=True, slots=True)
class ComparedDecision:
    """A recorded decision beside the one that was made again in the same situation.

    Attributes:
        replan: the replan.
        revision: the revision that it made; None if nothing was applied.
        at: the time of the replan, in seconds since the epoch.
        triggers: why replanning was considered.
        recorded: the decision on record; what a person answered to a question is in `answer`.
        again: the decision that was made again.
        answer: the rule and the author of the answer that followed a question; empty without one.
        notes: what providers left out, and what the journal lacks.
    """

    replan: ReplanId
    revision: int | None
    at: float
    triggers: tuple[Trigger, ...]
    recorded: MadeDecision
    again: MadeDecision
    answer: str = ""
    notes: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """What differs: `decision`, `rule`, `choice`, `score` or `candidates`; empty if nothing.

        The score is that of the chosen alternative. The candidates differ if others are proposed,
        or are rejected, or rank in another order.
        """
        old = self.recorded
        new = self.again
        found: list[str] = []
        if old.rule == _REFUSED:
            # The policy had chosen an alternative, and the plan refused it afterwards.
            if new.kind not in ("execute", "abort"):
                found.append("decision")
        else:
            if old.kind != new.kind:
                found.append("decision")
            if old.rule != new.rule:
                found.append("rule")
        if _changes_of(old.chosen) != _changes_of(new.chosen) and old.rule != _REFUSED:
            found.append("choice")
        elif _total(old) != _total(new):
            found.append("score")
        if _ranking(old) != _ranking(new):
            found.append("candidates")
        return tuple(found)

    @property
    def same(self) -> bool:
        """Whether the same is done, by the same rule, with the same alternative."""
        return {"decision", "rule", "choice"}.isdisjoint(self.differences)

    def to_json(self) -> JsonObject:
        """Return the comparison as JSON values."""
        return {
            "replan": self.replan,
            "revision": self.revision,
            "timestamp": format_iso_time(self.at),
            "triggers": [trigger.kind for trigger in self.triggers],
            "same": self.same,
            "differences": list[JsonValue](self.differences),
            "recorded": self.recorded.to_json(),
            "again": self.again.to_json(),
            "answer": self.answer,
            "notes": list[JsonValue](self.notes),
        }


_REFUSED: Final = "refused"
"""Rule of a decision whose changes the plan did not take when they were to be applied."""


def _changes_of(chosen: Candidate | None) -> str:
    if chosen is None:
        return ""
    return changes_hash(chosen.alternative.changes)


def _total(decision: MadeDecision) -> float | None:
    if decision.score is None:
        return None
    return decision.score.total


def _ranking(decision: MadeDecision) -> list[tuple[str, float | None, bool]]:
    """Return the alternatives in their order, each with its score and whether it is rejected."""
    ranking = []
    for candidate in decision.candidates:
        total = None
        if candidate.score is not None:
            total = candidate.score.total
        changes = changes_hash(candidate.alternative.changes)
        ranking.append((changes, total, bool(candidate.rejected)))
    return ranking


class LeftOut(NamedTuple):
    """A decision that cannot be made again: what it is called, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class ComparedRun:
    """The decisions of a recorded run, made again.

    Attributes:
        run: the run.
        decisions: the decisions, oldest first.
        left_out: the decisions that cannot be made again, each with the reason.
        spent: what asking providers has used.
    """

    run: RunId
    decisions: tuple[ComparedDecision, ...]
    left_out: tuple[LeftOut, ...] = ()
    spent: Usage = field(default_factory=Usage)

    def __repr__(self) -> str:
        counts = f"decisions={len(self.decisions)} changed={len(self.changed)}"
        return f"<ComparedRun of {self.run!r} {counts}>"

    @property
    def changed(self) -> tuple[ComparedDecision, ...]:
        """The decisions that are not the same."""
        return tuple(decision for decision in self.decisions if not decision.same)

    def asked(self, *, recorded: bool = False) -> int:
        """Return how often a person is asked; or was, by the decisions on record."""
        asked = 0
        for decision in self.decisions:
            made = decision.recorded if recorded else decision.again
            asked += made.kind == "ask"
        return asked

    def gave_up(self, *, recorded: bool = False) -> int:
        """Return how often nothing is done about a failure; or was, by the decisions on record."""
        gave_up = 0
        for decision in self.decisions:
            made = decision.recorded if recorded else decision.again
            if made.kind in _GIVING_UP and made.rule != _REFUSED:
                kinds = {trigger.kind for trigger in decision.triggers}
                gave_up += not kinds.isdisjoint((*PERSISTENT_KINDS, "goal-unreachable"))
        return gave_up

    def to_json(self) -> JsonObject:
        """Return the comparison as JSON values."""
        return {
            "run": self.run,
            "decisions": [decision.to_json() for decision in self.decisions],
            "left_out": [left_out._asdict() for left_out in self.left_out],
            "counts": {
                "decisions": len(self.decisions),
                "changed": len(self.changed),
                "asked": {"recorded": self.asked(recorded=True), "again": self.asked()},
                "gave_up": {"recorded": self.gave_up(recorded=True), "again": self.gave_up()},
            },
            "spent": dict(asdict(self.spent)),
        }


@dataclass(slots=True)
class _RecordedReplan:
    """Records of one replan in a journal.

    Attributes:
        replan: the replan.
        position: the number of records before its decision.
        at: the time of the record after them.
        considered: the alternatives; None if a limit decided before providers were asked.
        made: the decision of the policy; None if the process ended before it was recorded.
        made_at: the time of that decision.
        revision: the revision that was made.
        answer: the rule and the author of the answer to a question.
    """

    replan: ReplanId
    position: int
    at: float
    considered: AlternativesConsidered | None = None
    made: DecisionMade | None = None
    made_at: float = 0.0
    revision: int | None = None
    answer: str = ""

    @property
    def began(self) -> float:
        """Since when the triggers were considered."""
        if self.made is None:
            return self.at
        return self.made_at - self.made.duration


class _Moment(NamedTuple):
    """The situation of a recorded decision, for as long as the next one is not looked at.

    Attributes:
        recorded: the replan.
        made: the decision on record.
        version: the version of this library that made it.
        triggers: why replanning was considered.
        situation: what providers and policy saw.
        policy: decides again.
        known: the settings of the run.
        unstored: the tasks whose outputs the journal lacks.
    """

    recorded: _RecordedReplan
    made: DecisionMade
    version: str
    triggers: tuple[Trigger, ...]
    situation: Situation
    policy: ReplanPolicy
    known: Settings
    unstored: tuple[TaskId, ...]


@dataclass(repr=False, eq=False)
class RecordedDecisions:
    """Makes decisions of recorded runs again; executes nothing, and writes to no journal.

    Args:
        generator: asks providers, and checks and ranks their alternatives.
        settings: returns the settings to decide with for those of a run.
        redactor: recognises secrets in alternatives.
        store: has the outcomes of tools in earlier runs.
        clock: the time, for the deadlines of providers.
        policy: decides; when left out, one of the settings.
        evaluator: compares better paths.
        replies_on_record: take the alternatives on record, and ask no provider.
    """

    generator: AlternativeGenerator
    settings: Callable[[Settings], Settings]
    redactor: Redactor
    store: RunStore
    clock: Clock
    policy: ReplanPolicy | None = None
    evaluator: PlanEvaluator = field(default_factory=PlanEvaluator)
    replies_on_record: bool = False

    async def estimate(self, history: ReplanHistory, at: int | str | None = None) -> Usage:
        """Return the usage of one call of each language model about each decision, from above.

        Nothing is sent. A provider without a model, and without an `estimate` of its own, costs
        nothing.

        Args:
            history: of the run.
            at: the only decision to make again, by its revision, or as `r2`.

        Raises:
            StoreError: there is no such decision.
        """
        total = Usage()
        records = list(history.records(0))
        replans, _ = _replans(history, records, at)
        if self.replies_on_record:
            return total
        for moment in self._moments(records, replans):
            asked, _ = _allowed(moment)
            if not asked:
                continue
            for provider in self.generator.path_generator.providers:
                request = self.generator.analyzer.analyze(asked, moment.situation, self.clock.now())
                total += await _estimate_of(provider, request)
        return total

    async def decide(
        self, history: ReplanHistory, at: int | str | None = None, *, max_cost: float = 0.0
    ) -> ComparedRun:
        """Return the decisions of a run, made again, beside those on record.

        Args:
            history: of the run.
            at: the only decision to make again, by its revision, or as `r2`.
            max_cost: most money that language models may cost, in the currency of their prices.

        Raises:
            StoreError: there is no such decision.
        """
        records = list(history.records(0))
        replans, left_out = _replans(history, records, at)
        spending = Ledger(Budget(money=max_cost), lambda: 0)
        people = _People.of(records)
        decisions: list[ComparedDecision] = []
        for moment in self._moments(records, replans):
            recorded = moment.recorded
            asked, refusal = _allowed(moment)
            if asked and self.replies_on_record and recorded.considered is None:
                left_out[recorded.position] = LeftOut(spoken_id(recorded.replan), _NO_REPLIES)
                continue
            again = refusal
            notes: tuple[str, ...] = ()
            candidates: tuple[Candidate, ...] = ()
            if asked:
                ranked = await self._search(asked, moment, spending)
                candidates = ranked.candidates
                notes = ranked.notes
                if moment.unstored and not self.replies_on_record:
                    names = join_names(list(map(repr, moment.unstored)), _MAX_NAMED_TASKS)
                    notes += (f"the journal lacks the outputs of {names}, which providers saw",)
                again = make_decision(
                    moment.policy,
                    asked,
                    ranked,
                    moment.situation,
                    gate=people.has_gate(moment.made),
                    can_ask=people.can_ask,
                )
            if again is not None:
                decisions.append(_compare(moment, again, candidates, notes))
        named = [left_out[position] for position in sorted(left_out)]
        spent = spending.budget_tracker.spent
        return ComparedRun(history.run, tuple(decisions), tuple(named), spent)

    def _moments(
        self, records: Sequence[Record], replans: Sequence[_RecordedReplan]
    ) -> Iterator[_Moment]:
        """Replay a journal; yield the situation before each decision that the policy made."""
        replayed = replay_records(records[:1])
        opened, live, ledger, began, _ = replayed
        known = Settings.model_validate(opened.settings or {})
        version = opened.version
        outputs = _UnstoredOutputs(live)
        position = 1
        for recorded in replans:
            if recorded.made is None:
                continue
            for record in records[position : recorded.position]:
                apply_record(outputs.in_process(record), live, ledger, opened.run)
                if isinstance(record.body, RunResumed):
                    version = record.body.version
                    if record.body.settings is not None:
                        known = Settings.model_validate(record.body.settings)
            position = recorded.position
            # That the delay of a task is over is not on record.
            live.advance(recorded.at)
            settings = self.settings(known)
            ids = recorded.made.triggers
            if recorded.considered is not None:
                ids = recorded.considered.triggers
            triggers = tuple(ledger.triggers[each] for each in ids if each in ledger.triggers)
            elapsed = ledger.questions.elapsed_seconds(began, recorded.began)
            effects = partial(run_effects, records[:position])
            situation = self._situation(replayed, effects, settings, elapsed)
            policy = self.policy or ReplanPolicy(settings)
            yield _Moment(
                recorded,
                recorded.made,
                version,
                triggers,
                situation,
                policy,
                known,
                tuple(outputs.lacking),
            )

    def _situation(
        self,
        replayed: ReplayedRun,
        effects: Callable[[], Sequence[RunEffect]],
        settings: Settings,
        elapsed: float,
    ) -> Situation:
        """Return what providers and policy saw of a run.

        Args:
            replayed: the run, as its records leave it.
            effects: returns the effects that it has had.
            settings: the settings to decide with.
            elapsed: seconds of the budget's wall clock that were used up.
        """
        opened, live, ledger, began, _ = replayed

        def warn(where: str, error: BaseException) -> None:
            warn_of_error(where, error, self.redactor)

        undo = RunUndo(
            live, opened.run, settings, self.redactor, effects, lambda: opened.open_ended
        )
        earlier = _EarlierOutcomes(self.store, began)
        evaluation = Evaluation(live, ledger, earlier, self.clock, warn)
        evaluation.evaluator = self.evaluator
        return Situation(
            live,
            ledger,
            settings,
            self.redactor,
            evaluation,
            is_running=False,
            elapsed=elapsed,
            undo_problem=undo.problem,
            question_about_replaced=undo.question_about_replaced,
        )

    async def _search(
        self, triggers: Sequence[Trigger], moment: _Moment, spending: Ledger
    ) -> RankedCandidates:
        """Return the candidates of the providers, or those on record, checked and ranked anew."""
        situation = moment.situation
        considered = moment.recorded.considered
        generator = copy(self.generator)
        scorer = generator.scorer
        if scorer is None:
            settings = situation.settings
            scorer = ConfidenceScorer(settings.weights, shrink=settings.alternatives.shrink)
        if type(scorer) is ConfidenceScorer and considered is not None:
            were_shrunk = moment.known.alternatives.shrink
            generator.scorer = _ScorerOnRecord(scorer, considered.candidates, were_shrunk)
        if considered is not None and self.replies_on_record:
            paths = type(generator.path_generator)
            generator.path_generator = paths(_replies(considered.candidates))
        async with detached_run(situation, self.clock) as run:
            # What the run had left of its own budget says nothing about this.
            run.ledger = spending
            began = self.clock.now()
            ranked = await generator.search(triggers, situation, run, began=began, last=True)
        if considered is not None and self.replies_on_record:
            return ranked._replace(notes=considered.notes)
        return ranked


_CUT_OFF: Final = "its process ended before it was decided"

_OF_PLANNING_MODE: Final = (
    "planning mode decides about its steps by itself, with a state of its own"
)

_PLANNING_DECISION: Final = "replan"
"""Type of the notes in which planning mode keeps the decisions of its language model."""

_NO_REPLIES: Final = (
    "no provider was asked at that time, because a limit was reached; name one that is asked now"
)


def _recorded_replans(records: Sequence[Record]) -> list[_RecordedReplan]:
    """Return the replans of a journal in the order in which they were decided."""
    replans: dict[ReplanId, _RecordedReplan] = {}
    for position, record in enumerate(records):
        body = record.body
        match body:
            case AlternativesConsidered():
                # The store may have failed in between, and providers were asked again.
                replans[body.replan] = _RecordedReplan(body.replan, position, record.at, body)
            case PlanRevised(replan=replan) if replan in replans:
                replans[replan].revision = body.number
            case DecisionMade():
                found = replans.get(body.replan)
                if found is None:
                    found = _RecordedReplan(body.replan, position, record.at)
                    replans[body.replan] = found
                if body.by in AUTOMATIC_DECIDERS and found.made is None:
                    found.made = body
                    found.made_at = record.at
                elif body.by not in AUTOMATIC_DECIDERS:
                    found.answer = f"{body.rule} by {body.by}"
    return sorted(replans.values(), key=lambda found: found.position)


def _replans(
    history: ReplanHistory, records: Sequence[Record], at: int | str | None
) -> tuple[list[_RecordedReplan], dict[int, LeftOut]]:
    """Return the replans that can be decided again, and what cannot, by its place in the journal.

    Raises:
        StoreError: there is no replan at this revision, or of this name.
    """
    found = _recorded_replans(records)
    left_out: dict[int, LeftOut] = {}
    if at is None:
        left_out |= _decided_elsewhere(records)
    else:
        found = [_find(history, found, at)]
    of_planning_mode = any(program_note(task).get("phase") for task in history.plan.tasks)
    replans: list[_RecordedReplan] = []
    for replan in found:
        name = spoken_id(replan.replan)
        if of_planning_mode:
            left_out[replan.position] = LeftOut(name, _OF_PLANNING_MODE)
        elif replan.made is None:
            left_out[replan.position] = LeftOut(name, _CUT_OFF)
        else:
            replans.append(replan)
    return replans, left_out


def _find(
    history: ReplanHistory, replans: Sequence[_RecordedReplan], at: int | str
) -> _RecordedReplan:
    """Return the replan that made a revision, or has a name such as `r2`.

    Raises:
        StoreError: there is no such one; names those that are there.
    """
    names = []
    for found in replans:
        if at in (found.revision, found.replan):
            return found
        name = str(found.replan)
        if found.revision is not None:
            name = f"{name} (revision {found.revision})"
        names.append(name)
    run = history.run
    if isinstance(at, int) and not 0 <= at <= history.revision:
        known = f"it has revisions 0 to {history.revision}"
        raise StoreError(f"run {run!r} has no revision {at}; {known}")
    known = join_names(names, 8) or "none"
    what = f"revision {at} of run {run!r} was not made by a replan"
    if isinstance(at, str):
        what = f"run {run!r} has no replan {at!r}"
    raise StoreError(f"{what}; its replans are: {known}")


def _decided_elsewhere(records: Sequence[Record]) -> dict[int, LeftOut]:
    """Return what was decided without a replan: edits by hand, and decisions of planning mode."""
    found: dict[int, LeftOut] = {}
    of_planning_mode = 0
    for position, record in enumerate(records):
        body = record.body
        if isinstance(body, PlanRevised) and body.replan is None and body.by not in FORESEEN:
            author = edit_author(body.by)
            found[position] = LeftOut(f"revision {body.number}", f"an edit by {author}")
        elif isinstance(body, NoteAdded) and body.type == _PLANNING_DECISION:
            of_planning_mode += 1
    if of_planning_mode:
        found[len(records)] = LeftOut(pluralise(of_planning_mode, "decision"), _OF_PLANNING_MODE)
    return found


def _allowed(moment: _Moment) -> tuple[list[Trigger], Decision | None]:
    """Return the triggers about which providers may be asked, and the refusal of the others."""
    # The limits were checked before providers were asked, and may have been reached since.
    is_same = moment.situation.settings.limits == moment.known.limits
    if moment.recorded.considered is not None and is_same:
        return list(moment.triggers), None
    view = PlanView(moment.situation.live)
    allowed: list[Trigger] = []
    refusal: Decision | None = None
    for trigger in moment.triggers:
        refused = moment.policy.check_limits([trigger], view, moment.situation.ledger)
        if refused is None:
            allowed.append(trigger)
        else:
            refusal = refused
    return allowed, refusal


def _compare(
    moment: _Moment,
    again: Decision,
    candidates: tuple[Candidate, ...],
    notes: Sequence[str],
) -> ComparedDecision:
    recorded = moment.recorded
    made = moment.made
    on_record: tuple[Candidate, ...] = ()
    if recorded.considered is not None:
        on_record = recorded.considered.candidates

    def decision(
        kind: DecisionKind, by: Decision | DecisionMade, among: tuple[Candidate, ...]
    ) -> MadeDecision:
        chosen = None
        diff = ""
        if by.chosen is not None and by.chosen < len(among):
            chosen = among[by.chosen]
            diff = moment.situation.live.diff(chosen.alternative.changes)
        return MadeDecision(
            kind, by.rule, by.reason, among, chosen, diff, rules=RULES, version=__version__
        )

    before = decision(made.decision, made, on_record)
    return ComparedDecision(
        recorded.replan,
        recorded.revision,
        recorded.at,
        moment.triggers,
        recorded=replace(before, rules=made.rules, version=moment.version),
        again=decision(again.kind, again, candidates),
        answer=recorded.answer,
        notes=(*notes, *_masked(moment, candidates)),
    )


def _masked(moment: _Moment, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield a note about the tasks of which the journal has no secrets."""
    concerned: dict[TaskId, None] = {}
    for trigger in moment.triggers:
        concerned.update(dict.fromkeys(trigger.tasks))
    for candidate in candidates:
        concerned.update(dict.fromkeys(target_task_ids(candidate.alternative.changes)))
    entries = moment.situation.live.entries
    masked = []
    for task_id in concerned:
        if task_id in entries and is_redacted(entries[task_id].task.arguments):
            masked.append(repr(task_id))
    if masked:
        names = join_names(masked, _MAX_NAMED_TASKS)
        yield (
            f"the journal masks secrets in the arguments of {names}: a decision that depends on "
            "their values may be another one than in the run"
        )


@dataclass(frozen=True, slots=True)
class _People:
    """Whether a run could ask people, as far as its journal tells.

    Attributes:
        gate: whether a gate was asked.
        can_ask: whether a person could be asked about the call of an agent.
    """

    gate: bool = False
    can_ask: bool = True

    @classmethod
    def of(cls, records: Sequence[Record]) -> _People:
        found = cls()
        for record in records:
            body = record.body
            # Only a gate has to answer in time.
            if isinstance(body, QuestionAsked) and body.deadline is not None:
                found = replace(found, gate=True)
            elif isinstance(body, DecisionMade) and body.reason.endswith(NOBODY_CAN_BE_ASKED):
                found = replace(found, can_ask=False)
        return found

    def has_gate(self, made: DecisionMade) -> bool:
        """Return whether a person could be asked without an alternative to approve."""
        if made.rule == "no-alternative":
            return made.decision == "ask"
        return self.gate


class _UnstoredOutputs:
    """Outputs that a journal lacks, which the process had until it ended.

    Args:
        live: the plan, as it is replayed.

    Attributes:
        lacking: the tasks whose outputs the journal lacks, or has with masks.
    """

    def __init__(self, live: LivePlan) -> None:
        self._live = live
        self.lacking: dict[TaskId, None] = {}
        self._at_hand: dict[TaskId, AttemptSucceeded] = {}

    def in_process(self, record: Record) -> Record:
        """Return a record as the process that wrote it had it; let go of what a later one lacks."""
        body = record.body
        if isinstance(body, RunResumed):
            for task_id, lost in self._at_hand.items():
                entry = self._live.entry(task_id)
                entry.output = TaskOutput(None, recoverable=False, unstored=lost.unstored)
            self._at_hand.clear()
        if isinstance(body, AttemptSucceeded):
            self._at_hand.pop(body.task, None)
            self.lacking.pop(body.task, None)
            if not body.recoverable:
                self.lacking[body.task] = None
                self._at_hand[body.task] = body
                return record._replace(body=replace(body, recoverable=True))
        return record


class _EarlierOutcomes(MemoryStore):
    """The outcomes of tools in a store, as they were when a run began."""

    def __init__(self, store: RunStore, before: float) -> None:
        super().__init__()
        self._all = store
        self._before = before

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """Return the last outcomes before the run, newest first."""
        newest = self._all.outcomes(tool=tool, capability=capability, limit=_MAX_OUTCOMES)
        earlier = [outcome for outcome in newest if outcome.at < self._before]
        return earlier[:limit]


class _ScorerOnRecord(ConfidenceScorer):
    """Scores with the past success that is on record of the same changes.

    It comes from the outcomes of other runs as well, of which a store has others today.

    Args:
        scorer: scores by itself.
        candidates: the alternatives on record, with their scores.
        were_shrunk: whether their self-assessments were shrunk by the success of their sources.
    """

    def __init__(
        self, scorer: ConfidenceScorer, candidates: Sequence[Candidate], were_shrunk: bool
    ) -> None:
        super().__init__(scorer.weights, shrink=scorer.shrink)
        self._were_shrunk = were_shrunk
        self._known: dict[str, tuple[Alternative, Score]] = {}
        for candidate in candidates:
            if candidate.score is not None:
                known = (candidate.alternative, candidate.score)
                self._known[changes_hash(candidate.alternative.changes)] = known

    def score(self, alternative: Alternative, *args: Any, **options: Any) -> Score:
        """Return the score of an alternative, with the evidence on record if there is some."""
        score = super().score(alternative, *args, **options)
        known = self._known.get(changes_hash(alternative.changes))
        if known is None:
            return score
        before, evidence = known
        own = score.self_assessment
        if self.shrink and self._were_shrunk and before.source == alternative.source:
            if before.confidence == alternative.confidence:
                own = evidence.self_assessment
        weights = self.weights
        total = weights.self_assessment * own
        total += weights.past_success * evidence.past_success
        total += weights.availability * score.availability
        total += weights.simplicity * score.simplicity
        return replace(
            score,
            total=round(total, 6),
            self_assessment=own,
            past_success=evidence.past_success,
        )


@dataclass(eq=False)
class _ProviderOnRecord:
    """Provider whose alternatives are on record."""

    name: str
    alternatives: Sequence[Alternative] = ()
    yields_priority: bool = False

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return the alternatives on record."""
        return self.alternatives


def _replies(candidates: Sequence[Candidate]) -> list[AlternativeProvider]:
    """Return providers that propose again what is on record, in the order of its rank.

    Ties are broken by the order of proposals, so that equal alternatives keep their order.
    """
    alternatives = [candidate.alternative for candidate in candidates]
    providers: list[AlternativeProvider] = []
    for start in range(0, len(alternatives), MAX_PROPOSALS):
        part = alternatives[start : start + MAX_PROPOSALS]
        providers.append(_ProviderOnRecord(f"record {start}", part))
    sources: dict[str, None] = {}
    for alternative in alternatives:
        # Another provider may have completed the proposal.
        sources[alternative.source.partition("+")[0]] = None
    for source in sources:
        if _yields_priority(source):
            providers.append(_ProviderOnRecord(source, yields_priority=True))
    return providers


def _yields_priority(source: str) -> bool:
    """Return whether the alternatives of a provider come after those of others."""
    if source not in installed_plugins("providers"):
        return False
    try:
        plugin = load_plugin("providers", source)
    except PluginError:
        return False
    return getattr(plugin, "yields_priority", False) is True


# Costs


def cost_problem(estimate: Usage, max_cost: float) -> str:
    """Return why providers are not asked, as this might cost too much; empty if they may be."""
    if estimate.unpriced:
        return (
            "the price of the model is not known; state it under llm.prices in the settings, or "
            "install the published prices: pip install 'replanning[prices]'"
        )
    if estimate.money > max_cost:
        return f"it may cost up to {estimate.money:.4g}, and {max_cost:.4g} is allowed"
    return ""


async def _estimate_of(provider: AlternativeProvider, request: ReplanRequest) -> Usage:
    """Return an upper bound of what a provider uses for one call; nothing is sent."""
    estimate = getattr(provider, "estimate", None)
    if estimate is not None:
        stated: Usage = estimate(request)
        return stated
    if not isinstance(getattr(provider, "client", None), LLMProvider):
        return Usage()
    meter = _EstimatingMeter()
    # A model that cannot be asked costs nothing, and says why once it is asked.
    with suppress(BudgetExceeded, LLMError):
        await provider.propose(replace(request, meter=meter))
    return meter.estimate


@dataclass(slots=True)
class _EstimatingMeter:
    """Meter that lets no call through, and adds up what they might use."""

    estimate: Usage = field(default_factory=Usage)

    @contextmanager
    def call(self, call: LLMCall) -> Iterator[Never]:
        """Count the estimate of a call, and refuse it.

        Raises:
            BudgetExceeded: always.
        """
        self.estimate += call.estimate
        raise BudgetExceeded("it is only estimated")
        yield

    def note(self, text: str) -> None:
        """Ignore a remark on calls."""

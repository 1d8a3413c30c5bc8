"""Manager of replans: asks a model after each phase, rules on its decision, and records it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Final, Literal, NamedTuple, Self

from replanning.environment import Environment
from replanning.errors import (
    BudgetExceeded,
    LLMError,
    LLMRequestRejected,
    LLMResponseInvalid,
    LLMTimeout,
    LLMUnavailable,
    StoreError,
)
from replanning.history.wording import format_iso_time
from replanning.llm.completions import Completion, LLMOptions
from replanning.llm.provider import LLMProvider
from replanning.plan.messages import truncate
from replanning.plan.types import JsonObject
from replanning.planning.decisions import (
    ALLOWED_REPLANS,
    REPLAN_TARGETS,
    DecisionRecord,
    DecisionRequest,
    OverrideReason,
    Phase,
    PlanningNote,
    RecordModel,
    ReplanCause,
    ReplanCounts,
    ReplanDecision,
    ReplanLimits,
    ReplanType,
    Ruling,
    available_replan_types,
    decision_model,
    exhausted_limit,
    exhausted_lineage,
    make_ruling,
    normalise,
    parse_decision,
)
from replanning.planning.prompts import ReplanPromptBuilder

_log: Final = logging.getLogger("replanning.planning")

ReplanStage = Literal[
    "idle", "deciding", "awaiting_user", "generating", "applying", "applied", "failed"
]
"""Progress of a replan."""


class Consideration(RecordModel):
    """Decision with its ruling.

    It is JSON-serialisable, so that it can wait for a person and survive a restart.

    Attributes:
        replan_id: its id: `p1`, `p2`, … in each run.
        llm_decision: the decision as the model wrote it; None if there is none.
        phase: the phase that was completed.
        cause: the action and error that it is about.
        problem: reason for the missing decision.
        model_unavailable: true if the reason is that the model could not be asked at all.
        ruling: the ruling on the decision.
        timestamp: start of deciding, in UTC.
        seconds: duration of deciding.
        instead_of: id of the replan that could not be executed and that this one substitutes.
    """

    replan_id: str
    phase: Phase
    cause: ReplanCause
    llm_decision: JsonObject | None
    problem: str = ""
    model_unavailable: bool = False
    ruling: Ruling
    timestamp: str
    seconds: float = 0.0
    instead_of: str | None = None

    @property
    def normalised(self) -> tuple[ReplanDecision | None, tuple[str, ...]]:
        """The normalised decision, with notes about the corrections."""
        if self.llm_decision is None:
            return None, ()
        return normalise(decision_model(self.phase).model_validate(self.llm_decision, strict=False))

    @property
    def decision(self) -> ReplanDecision | None:
        """The normalised decision; None if there is none."""
        return self.normalised[0]

    @property
    def replan_type(self) -> ReplanType:
        """The type of the replan, normalised; none without a decision."""
        decision = self.decision
        if decision is None:
            return ReplanType.NONE
        return decision.replan_type

    @property
    def changes_plan(self) -> bool:
        """True if the decision is to change the plan, unlike a retry."""
        return self.replan_type not in (ReplanType.RETRY, ReplanType.NONE)

    def sees_no_harm(self, limits: ReplanLimits) -> bool:
        """Return whether the model's first decision is to continue unchanged, with confidence.

        A decision that contradicts itself does not count.
        """
        decision = self.decision
        if decision is None:
            return False
        if self.instead_of is not None:
            return False
        if self.ruling.kind != "continue":
            return False
        if self.ruling.questions:
            return False
        if getattr(decision, "error_classification", None) == "fatal":
            return False
        assert self.llm_decision is not None  # the decision was read from it
        if self.llm_decision.get("replan_needed") is not False:
            return False
        return decision.confidence >= limits.immediate_threshold


class ReplanNote(PlanningNote):
    """Step of a replan, journaled before it takes effect.

    A resumed run continues from the latest one.

    Attributes:
        stage: progress of the replan.
        counts: replans spent, this one included once it begins.
        considered: the decision, once there is one.
        record: its outcome, once it is known.
    """

    note_type: ClassVar = "replan"
    stage: ReplanStage
    counts: ReplanCounts
    considered: Consideration | None = None
    record: DecisionRecord | None = None


class ReplanStatistics(RecordModel):
    """Statistics of the decisions of a run.

    Attributes:
        decisions: all decisions, including those to continue and those made without a model.
        wanted: decisions to replan.
        executed: replans that were executed.
        succeeded: those of them that succeeded.
        failed: those of them that failed.
        success_rate: share of the executed replans that succeeded; None before the first.
        mean_confidence: mean confidence of the decisions to replan; None before the first.
        by_phase: executed replans by the phase they were decided after.
        by_type: executed replans by type.
        overridden: skipped replans by reason.
        seconds: total duration.
    """

    decisions: int
    wanted: int
    executed: int
    succeeded: int
    failed: int
    success_rate: float | None
    mean_confidence: float | None
    by_phase: dict[Phase, int]
    by_type: dict[ReplanType, int]
    overridden: dict[OverrideReason, int]
    seconds: float

    @classmethod
    def from_records(cls, records: Sequence[DecisionRecord]) -> Self:
        """Return the statistics of these decisions, such as those of `PlanningState.records`."""
        executed = [record for record in records if record.executed]
        succeeded = sum(record.result == "success" for record in executed)
        wanted = [record for record in records if record.replan_type is not ReplanType.NONE]
        confidences = [record.confidence for record in wanted if record.confidence is not None]
        overrides = [record.override_reason for record in records if record.override_reason]
        success_rate: float | None = None
        if executed:
            success_rate = succeeded / len(executed)
        mean_confidence: float | None = None
        if confidences:
            mean_confidence = sum(confidences) / len(confidences)
        return cls(
            decisions=len(records),
            wanted=len(wanted),
            executed=len(executed),
            succeeded=succeeded,
            failed=len(executed) - succeeded,
            success_rate=success_rate,
            mean_confidence=mean_confidence,
            by_phase=dict(Counter(record.phase for record in executed)),
            by_type=dict(Counter(record.replan_type for record in executed)),
            overridden=dict(Counter(overrides)),
            seconds=sum(record.duration for record in records),
        )


MODEL_UNAVAILABLE_ERRORS: Final = (LLMUnavailable, LLMTimeout, LLMRequestRejected)
"""Errors that do not depend on the prompt: the model is unavailable, or rejects requests."""


class DecisionResponse(NamedTuple):
    """Response of a model: its decision, or the reason why there is none.

    Attributes:
        decision: the decision as the model wrote it; None if there is none.
        problem: reason for the missing decision.
        model_unavailable: true if the model could not be asked at all, so that asking later may
            help.
        unusable_text: the reply, if it is unusable.
    """

    decision: ReplanDecision | None
    problem: str = ""
    model_unavailable: bool = False
    unusable_text: str | None = None


def reply_problem(completion: Completion, problem: str) -> str:
    """Return the problem of a reply, to be shown to the model; truncation is named first."""
    if completion.finish != "length":
        return problem
    return (
        f"it was cut off after {completion.output_tokens} tokens, so it must be shorter ({problem})"
    )


_MAX_ERROR_CHARS: Final = 2000
"""Maximum length of a recorded error message, in characters."""

ApplyReplan = Callable[[ReplanDecision], Awaitable[None]]
"""Executes a replan; raises if it fails."""


class ReplanManager:
    """Decides on replans with a model, within limits that the model cannot escape.

    ::

        manager = ReplanManager(model, limits=ReplanLimits.from_settings(settings.planning))
        considered = await manager.consider(Phase.ACTION_SEQUENCE, {"action_plan": plan})
        if considered.ruling.is_executable:
            record = await manager.execute_replan(considered, apply)

    `consider` takes all steps up to the ruling: it checks the limits (`can_replan`), asks the model
    (`request_llm_decision`), reads its reply (`parse_decision_response`), and rules on the
    decision. `decide` rules on a decision that comes from elsewhere.

    Args:
        llm: the model.
        prompts: writer of its prompts; by default one with default settings and no tools.
        limits: maximum numbers of replans, and the confidence needed.
        counts: counts of a resumed run.
        records: decisions of a resumed run.
        on_note: receives every step before it takes effect, to journal it.
        options: options of model calls, such as the run's budget meter.
        environment: source of time.
    """

    def __init__(
        self,
        llm: LLMProvider,
        prompts: ReplanPromptBuilder | None = None,
        limits: ReplanLimits | None = None,
        *,
        counts: ReplanCounts | None = None,
        records: Sequence[DecisionRecord] = (),
        on_note: Callable[[ReplanNote], None] | None = None,
        options: LLMOptions | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.limits = limits or ReplanLimits()
        self._llm = llm
        self._prompts = prompts or ReplanPromptBuilder()
        self._options = options or LLMOptions()
        self._counts = counts or ReplanCounts()
        self._records = list(records)
        self._on_note = on_note
        self._clock = (environment or Environment()).clock

    def __repr__(self) -> str:
        return (
            f"<ReplanManager {self._llm.name} {self._counts.total} of {self.limits.total} replans>"
        )

    @property
    def counts(self) -> ReplanCounts:
        """Replans spent so far."""
        return self._counts

    @property
    def records(self) -> tuple[DecisionRecord, ...]:
        """Decisions so far, oldest first."""
        return tuple(self._records)

    def can_replan(self, phase: Phase, cause: ReplanCause | None = None) -> bool:
        """Return whether the limits allow any replan of a phase; if not, no model is asked."""
        if cause is None:
            cause = ReplanCause()
        return bool(available_replan_types(phase, self.limits, self._counts, cause))

    def should_override(
        self, decision: ReplanDecision, cause: ReplanCause | None = None
    ) -> OverrideReason | None:
        """Return why a replan would not be executed; None if it would be, or if none is wanted."""
        if cause is None:
            cause = ReplanCause()
        return self._rule_on(decision, cause).override

    def parse_decision_response(self, text: str, phase: Phase) -> ReplanDecision:
        """Return the decision in a model's reply.

        Raises:
            LLMResponseInvalid: the reply holds no valid decision; lists all problems.
        """
        return parse_decision(text, phase)

    async def consider(
        self,
        phase: Phase,
        prompt_data: JsonObject,
        cause: ReplanCause | None = None,
        *,
        questions: tuple[str, ...] = (),
    ) -> Consideration:
        """Ask the model whether to replan after a phase, and rule on its decision.

        The model is not asked if the limits allow no replan. If a limit or a loop forbids the
        replan that it wants, it is asked once for another decision. Decisions that are not executed
        are recorded at once, others once executed.

        Args:
            phase: the phase that was completed.
            prompt_data: its output, for the prompt.
            cause: the action and error to decide about, if any.
            questions: questions that the output of the phase asks the user; they are asked, within
                their limit, unless the decision asks others.
        """
        if cause is None:
            cause = ReplanCause()
        began = self._clock.now()
        if not self.can_replan(phase, cause):
            ruling = self._with_questions(self._ruling_unasked(phase, cause), questions)
            return self._conclude(phase, cause, DecisionResponse(None), ruling, began=began)
        self._notify("deciding")
        response = await self.request_llm_decision(phase, prompt_data, cause)
        ruling = self._with_questions(self._ruling(response, cause), questions)
        first = self._conclude(phase, cause, response, ruling, began=began)
        if not first.ruling.needs_escalation:
            return first
        questions = first.ruling.questions
        other = await self.escalate(first, prompt_data, first.ruling.reason, questions=questions)
        return first if other is None else other

    def _ruling_unasked(self, phase: Phase, cause: ReplanCause) -> Ruling:
        """Return the ruling where limits allow no replan, so that no model is asked."""
        reached: dict[str, None] = {}
        for kind in ALLOWED_REPLANS[phase]:
            for target in REPLAN_TARGETS[kind].values():
                reached[exhausted_limit(kind, target, self.limits, self._counts, cause)] = None
        closed = "; ".join(filter(None, reached))
        # A successful action needs no replan, so nothing was overridden.
        had_reason = phase is not Phase.EXECUTION or bool(cause.error)
        override: OverrideReason | None = None
        if self.limits.enabled and had_reason:
            override = "limit"
        blocks = exhausted_lineage(self.limits, self._counts, cause)
        return Ruling("continue", f"no model was asked: {closed}", override, blocks=blocks)

    def decide(
        self, decision: ReplanDecision, cause: ReplanCause, *, questions: tuple[str, ...] = ()
    ) -> Consideration:
        """Rule on a decision made without a model; it counts like any other.

        Args:
            decision: the decision.
            cause: the action and error that it is about.
            questions: questions of an earlier decision that are counted, but not asked yet.
        """
        response = DecisionResponse(decision)
        ruling = self._ruling(response, cause, questions)
        now = self._clock.now()
        return self._conclude(decision.phase, cause, response, ruling, began=now)

    async def escalate(
        self,
        refused: Consideration,
        prompt_data: JsonObject,
        reason: str,
        *,
        questions: tuple[str, ...] = (),
    ) -> Consideration | None:
        """Ask the model for another decision in place of a replan that failed or is not possible.

        Args:
            refused: the decision to replace.
            prompt_data: output of the phase, for the prompt.
            reason: why it failed or is not possible.
            questions: questions of the refused decision that are counted, but not asked yet.

        Returns:
            Another decision; None if the model gives none or was asked before: then a person must
            decide.
        """
        key = refused.ruling.fingerprint
        loops = refused.ruling.override == "loop"
        if refused.instead_of is not None:
            return None
        if loops:
            if key in self._counts.warned:
                return None
            self._counts = self._counts.model_copy(update={"warned": (*self._counts.warned, key)})
        began = self._clock.now()
        self._notify("deciding")
        request = self._decision_request(refused.phase, prompt_data, refused.cause)
        response = await self._ask_once(replace(request, refusal=reason))
        if response.decision is None:
            self._notify("idle")
            return None
        ruling = self._ruling(response, refused.cause, questions)
        return self._conclude(
            refused.phase,
            refused.cause,
            response,
            ruling,
            began=began,
            instead_of=refused.replan_id,
        )

    async def request_llm_decision(
        self, phase: Phase, prompt_data: JsonObject, cause: ReplanCause | None = None
    ) -> DecisionResponse:
        """Ask the model for a decision; if its reply is unusable, ask once more with the problems.

        Nothing is counted or recorded: pass the decision to `decide`, or call `consider` instead of
        both.

        Args:
            phase: the phase that was completed.
            prompt_data: its output, for the prompt.
            cause: the action and error to decide about, if any.
        """
        if cause is None:
            cause = ReplanCause()
        request = self._decision_request(phase, prompt_data, cause)
        response = await self._ask_once(request)
        if response.unusable_text is None:
            return response
        rejected = response.unusable_text[:4000]
        return await self._ask_once(
            replace(request, rejected_reply=rejected, problem=response.problem)
        )

    async def _ask_once(self, request: DecisionRequest) -> DecisionResponse:
        options = replace(
            self._options, system=self._prompts.system(), schema=decision_model(request.phase)
        )
        try:
            completion = await self._llm.complete_detailed(self._prompts.decision(request), options)
        except (LLMError, BudgetExceeded) as error:
            _log.warning(
                "no decision after %s: the model cannot be asked: %s", request.phase, error
            )
            return DecisionResponse(None, str(error), isinstance(error, MODEL_UNAVAILABLE_ERRORS))
        try:
            return DecisionResponse(self.parse_decision_response(completion.text, request.phase))
        except LLMResponseInvalid as error:
            problem = reply_problem(completion, str(error))
            _log.warning("an unusable decision after %s: %s", request.phase, problem)
            return DecisionResponse(None, problem, unusable_text=completion.text)

    async def execute_replan(
        self, considered: Consideration, apply: ApplyReplan | None, *, resumed: bool = False
    ) -> DecisionRecord:
        """Execute a replan that its ruling allows or that the user approved.

        It is counted before it begins, whether or not it succeeds. A failure is recorded and not
        raised. If a limit has been reached since the decision, the replan is skipped.

        Args:
            considered: the replan.
            apply: executes it; None if the engine does, or if it was done before the run was
                interrupted.
            resumed: true if it had begun before the run was interrupted, so that it is counted
                already.

        Raises:
            ValueError: the ruling does not allow it.
            StoreError: the journal cannot be written.
        """
        decision = considered.decision
        if decision is None or not considered.ruling.is_followed:
            raise ValueError(
                f"{considered.replan_id} must not be executed: {considered.ruling.reason}"
            )
        if not resumed:
            # Other replans may have been executed while the user decided. The approval covers low
            # confidence, but no limit.
            if self.should_override(decision, considered.cause) in ("limit", "loop"):
                ruling = self._rule_on(decision, considered.cause)
                return self.record_decision(
                    considered.model_copy(update={"ruling": ruling}), executed=False
                )
            self._counts = self._counts.add_replan(decision, considered.cause)
        self._notify("applying", considered)
        began = self._clock.now()
        error = ""
        try:
            if apply is not None:
                await apply(decision)
        except StoreError:  # a run ends without its journal
            raise
        except Exception as caught:  # noqa: BLE001 - a failed replan leaves the run as it was
            error = truncate(str(caught), _MAX_ERROR_CHARS) or type(caught).__name__
        return self.record_decision(
            considered, executed=True, error=error, seconds=self._clock.now() - began
        )

    def record_decision(
        self, considered: Consideration, *, executed: bool, error: str = "", seconds: float = 0.0
    ) -> DecisionRecord:
        """Record the outcome of a decision.

        Args:
            considered: the decision.
            executed: true if it was executed; false also if the user declined it.
            error: reason for its failure.
            seconds: duration of the execution, without waiting for a person.
        """
        decision, notes = considered.normalised
        ruling = considered.ruling
        override = ruling.override
        result: Literal["success", "failure", "skipped"] = "success"
        stage: ReplanStage = "applied"
        if not executed:
            result = "skipped"
            stage = "idle"
            if ruling.kind == "ask":
                # The user declined it, and without approval its confidence was too low.
                override = "confidence"
        elif error:
            result = "failure"
            stage = "failed"
        record = DecisionRecord(
            replan_id=considered.replan_id,
            phase=considered.phase,
            llm_decision=considered.llm_decision,
            confidence=decision.confidence if decision else None,
            executed=executed,
            override_reason=override,
            timestamp=considered.timestamp,
            result=result,
            duration=considered.seconds + seconds,
            reason=ruling.reason,
            notes=notes,
            replan_type=considered.replan_type,
            cause=considered.cause,
            error=error or considered.problem,
            instead_of=considered.instead_of,
        )
        self._records.append(record)
        if error:
            _log.warning("replan %s failed: %s", record.replan_id, error)
        elif override is not None:
            _log.warning(
                "replan %s is overridden (%s): %s", record.replan_id, override, ruling.reason
            )
        self._notify(stage, considered, record)
        return record

    def record_skipped(self, considered: Consideration) -> None:
        """Record that a decision was superseded, unless its outcome is recorded already."""
        if all(record.replan_id != considered.replan_id for record in self._records):
            self.record_decision(considered, executed=False)

    def record_failure(self, considered: Consideration, error: str) -> DecisionRecord:
        """Change the recorded outcome of a replan to a failure, because it yielded no plan.

        Args:
            considered: the replan.
            error: reason for the failure.
        """
        places: list[int] = []
        for place, recorded in enumerate(self._records):
            if recorded.executed and recorded.replan_id == considered.replan_id:
                places.append(place)
        latest = places[-1]
        failed: dict[str, object] = {
            "result": "failure",
            "error": truncate(error, _MAX_ERROR_CHARS),
        }
        record = self._records[latest].model_copy(update=failed)
        self._records[latest] = record
        _log.warning("replan %s failed: %s", record.replan_id, error)
        self._notify("failed", considered, record)
        return record

    def action_succeeded(self, action: str) -> None:
        """Reset the retries of an action that succeeded."""
        if action in self._counts.retries:
            self._counts = self._counts.reset_retries(action)
            self._notify("idle")

    def get_replan_statistics(self) -> ReplanStatistics:
        """Return statistics of the decisions so far."""
        return ReplanStatistics.from_records(self._records)

    def _decision_request(
        self, phase: Phase, prompt_data: JsonObject, cause: ReplanCause
    ) -> DecisionRequest:
        return DecisionRequest(
            phase,
            prompt_data,
            cause,
            self._counts,
            self.limits,
            self.records,
        )

    def _rule_on(self, decision: ReplanDecision, cause: ReplanCause) -> Ruling:
        """Rule on a decision by the limits and the current counts."""
        return make_ruling(normalise(decision).decision, self.limits, self._counts, cause)

    def _ruling(
        self, response: DecisionResponse, cause: ReplanCause, questions: tuple[str, ...] = ()
    ) -> Ruling:
        """Rule on a response; `questions` come from a refused decision, and are already counted."""
        if response.decision is None:
            return Ruling("continue", f"the model made no decision: {response.problem}")
        ruling = self._rule_on(response.decision, cause)
        if questions:
            return replace(ruling, questions=ruling.questions or questions)
        decision = normalise(response.decision).decision
        if ruling.questions and decision.replan_type is not ReplanType.CLARIFICATION_REQUEST:
            # A request is counted when it is executed.
            self._counts = self._counts.add_clarification()
        return ruling

    def _with_questions(self, ruling: Ruling, questions: tuple[str, ...]) -> Ruling:
        """Add the questions of a phase's output to a ruling without questions, and count them."""
        if ruling.questions or not questions:
            return ruling
        if not self.limits.enabled:
            return ruling
        if self._counts.clarifications >= self.limits.clarifications:
            return ruling
        self._counts = self._counts.add_clarification()
        return replace(ruling, questions=questions)

    def _conclude(
        self,
        phase: Phase,
        cause: ReplanCause,
        response: DecisionResponse,
        ruling: Ruling,
        *,
        began: float,
        instead_of: str | None = None,
    ) -> Consideration:
        """Journal a decision that is executed or awaits the user; record any other as skipped."""
        number = self._counts.considered + 1
        self._counts = self._counts.model_copy(update={"considered": number})
        stated: JsonObject | None = None
        if response.decision is not None:
            stated = response.decision.model_dump(mode="json")
        considered = Consideration(
            replan_id=f"p{number}",
            phase=phase,
            cause=cause,
            llm_decision=stated,
            problem=response.problem,
            model_unavailable=response.model_unavailable,
            ruling=ruling,
            timestamp=format_iso_time(began),
            seconds=self._clock.now() - began,
            instead_of=instead_of,
        )
        if ruling.kind == "execute_with_warning":
            _log.warning("replan %s is executed: %s", considered.replan_id, ruling.reason)
        if not ruling.is_followed:
            self.record_decision(considered, executed=False)
        elif ruling.kind == "ask":
            self._notify("awaiting_user", considered)
        else:
            self._notify("generating", considered)
        return considered

    def _notify(
        self,
        stage: ReplanStage,
        considered: Consideration | None = None,
        record: DecisionRecord | None = None,
    ) -> None:
        if self._on_note is None:
            return
        counts = self._counts
        note = ReplanNote(stage=stage, counts=counts, considered=considered, record=record)
        self._on_note(note)

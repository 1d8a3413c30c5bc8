"""Session of a planning run: state, prompts, replan decisions and questions of its tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NoReturn, TypeVar

from pydantic import BaseModel

from replanning.changes import PlanChange
from replanning.environment import Environment
from replanning.errors import LLMResponseInvalid, ReplanningError, TaskHeld
from replanning.llm.completions import LLMOptions
from replanning.llm.provider import LLMProvider
from replanning.llm.quoting import is_truncated
from replanning.plan.json_values import as_object, is_redacted
from replanning.plan.messages import pluralise
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import (
    DecisionRecord,
    Phase,
    PlanningNote,
    ReflectionDecision,
    ReplanCause,
    ReplanDecision,
    ReplanLimits,
    ReplanType,
)
from replanning.planning.manager import ApplyReplan, Consideration, ReplanManager, reply_problem
from replanning.planning.notes import (
    AheadNote,
    Clarification,
    CompletionNote,
    HoldReason,
    JudgedNote,
    ReflectionNote,
    TaskHold,
)
from replanning.planning.outputs import (
    PHASE_OUTPUT_FIELDS,
    PlanningReply,
    PlanRevision,
    Reflection,
    Summary,
)
from replanning.planning.prompts import (
    MAX_PLAN_TOKENS,
    MAX_TOKENS_BY_KIND,
    ReplanPromptBuilder,
)
from replanning.planning.state import (
    PlanningState,
    TaskRequest,
    executed_actions,
    progress_data,
    question_text,
    request_of,
)
from replanning.planning.tasks import (
    PLANNING_PHASES,
    PlanningTask,
    describe_tool_use,
    is_tool_loop,
)
from replanning.run.run import PlanRun
from replanning.secrets import MASK
from replanning.settings import PlanningSettings, Settings

_log: Final = logging.getLogger("replanning.planning")

MAX_REPAIRS: Final = 3
"""Maximum number of times that a model is asked to correct a reply."""

ParsedReply = TypeVar("ParsedReply")


class PlanningFailed(ReplanningError):
    """A phase failed, which fails the run."""


class ToolNotAllowed(ReplanningError):
    """An action is not allowed to use its tool."""


class NoUsableReply(PlanningFailed):
    """The model gave no usable reply within its tries."""


class UnexpectedResult(ReplanningError):
    """An action was executed, but did not have the expected result."""


class PlanningSession:
    """State and services that the phases, the actions and the recovery of one run share.

    Attributes:
        interactive: whether a gate asks a person.
        plan_only: whether nothing is executed, so that every argument must be planned.
        tasks_in_reflection: the tasks whose output is being judged.
        ended_elements: the outputs of list elements whose tool ended in this process.
    """

    def __init__(
        self,
        run: PlanRun,
        llm: LLMProvider,
        config: Settings,
        tools: Mapping[str, ToolSpec],
        environment: Environment,
        *,
        interactive: bool,
        plan_only: bool,
    ) -> None:
        self.run = run
        self.llm = llm
        self.config = config
        self.tools = tools
        self.clock = environment.clock
        settings = config.planning
        self.interactive = interactive
        self.plan_only = plan_only
        self.tool_loop_only = is_tool_loop(run.live.plan)
        request = request_of(run.live.plan)
        if request is None:
            request = TaskRequest(goal=run.live.goal)
        self.request = request
        self.prompts = ReplanPromptBuilder(settings, tuple(tools.values()), redact=run.redact_value)
        self.tasks_in_reflection = set[TaskId]()
        self.ended_elements = dict[TaskId, JsonValue]()
        self._state = PlanningState()
        self._options = LLMOptions(
            system=self.prompts.system(),
            meter=run.meter("planning"),
            max_tokens=min(MAX_PLAN_TOKENS, llm.max_tokens),
        )
        state = self.state
        self.manager = ReplanManager(
            llm,
            self.prompts,
            ReplanLimits.from_settings(
                settings, replans_per_lineage=config.limits.replans_per_lineage
            ),
            counts=state.counts,
            records=state.records,
            on_note=self.note,
            options=self._options,
            environment=environment,
        )

    @property
    def state(self) -> PlanningState:
        """The state of planning mode, up to the latest record of the journal."""
        for record in self.run.records(self._state.seq):
            self._state.fold(record)
        return self._state

    @property
    def settings(self) -> PlanningSettings:
        """The settings of planning mode."""
        return self.config.planning

    @property
    def reflects_on_errors(self) -> bool:
        """True if the model reflects on every action that fails."""
        settings = self.settings.reflection
        return settings.enabled and settings.trigger_on_error

    def note(self, note: PlanningNote) -> None:
        """Journal a note while the run is open; a completion is journaled once."""
        if self.run.ended:
            return
        data = note.to_json()
        if isinstance(note, CompletionNote) and self.state.completion == data:
            return
        self.run.note(note.note_type, data)

    def revise(self, changes: Sequence[PlanChange], reason: str) -> None:
        """Change the plan on behalf of planning mode."""
        self.run.apply(changes, reason=reason, by="planning")

    # The model

    async def ask(
        self,
        kind: str,
        data: JsonObject,
        schema: type[BaseModel],
        parse: Callable[[str], ParsedReply],
        *,
        repairs: int = MAX_REPAIRS,
    ) -> ParsedReply:
        """Ask the model until its reply is valid, showing it the problems.

        `parse` raises them as LLMResponseInvalid.

        Raises:
            NoUsableReply: the model gave no valid reply within its tries.
            LLMError: the model cannot be asked.
            BudgetExceeded: the call does not fit the remaining budget.
        """
        problem = ""
        rejected = list[JsonValue]()
        max_tokens = min(MAX_TOKENS_BY_KIND.get(kind, MAX_PLAN_TOKENS), self.llm.max_tokens)
        options = replace(self._options, schema=schema, max_tokens=max_tokens)
        for _ in range(repairs + 1):
            self.prompts.tools = tuple(self.current_tools().values())
            prompt = self.prompts.build(kind, {**data, "rejected": rejected})
            completion = await self.llm.complete_detailed(prompt, options)
            try:
                return parse(completion.text)
            except LLMResponseInvalid as error:
                problem = reply_problem(completion, str(error))
            _log.warning("run %s: an unusable reply for %s: %s", self.run.id, kind, problem)
            rejected = [{"reply": completion.text[:2_000], "problem": problem}]
        tries = pluralise(repairs + 1, "try", "tries")
        raise NoUsableReply(f"the model gave no usable {kind} in {tries}: {problem}")

    def refuse_secrets(self, values: Mapping[str, JsonValue]) -> None:
        """Reject a reply with secrets, or with the marks that replace texts hidden from the model.

        The journal would redact a secret, so it would be missing when it is used. The
        LLMResponseInvalid names the parts, not their contents.

        Args:
            values: parts of the reply, by the names that the model is told.
        """

        def is_secret(value: JsonValue) -> bool:
            return self.run.redact_value(value) != value

        cut = "[cut: …] stands for the rest of a text or a list that you are not shown"
        for why, is_wrong in (
            ("what looks like a secret cannot be stored", is_secret),
            (f"{MASK} stands for a secret that you are not shown", is_redacted),
            (cut, is_truncated),
        ):
            wrong = [name for name, value in values.items() if is_wrong(value)]
            if wrong:
                raise LLMResponseInvalid(f"{why}: leave it out of {', '.join(wrong)}")

    def keep_ahead(self, task: Task, reply: PlanningReply, phase: Phase) -> None:
        """Journal a reply's outputs for later phases; they replace those of earlier replies."""
        parts: dict[Phase, JsonObject] = {}
        if reply.error is None:
            for later in PLANNING_PHASES[PLANNING_PHASES.index(phase) + 1 :]:
                part: BaseModel | None = getattr(reply, PHASE_OUTPUT_FIELDS[later])
                if part is not None:
                    parts[later] = part.model_dump(mode="json")
        if parts or self.state.ahead is not None:
            self.note(AheadNote(replan=PlanningTask.of(task).replan, parts=parts))

    def part_ahead(self, task: Task, phase: Phase) -> JsonObject:
        """Return a phase's output from an earlier reply; empty if none, or of another replan."""
        ahead = self.state.ahead
        if ahead is None:
            return {}
        notes = PlanningTask.of(task)
        is_first_round = notes.target is None
        if is_first_round:
            return ahead.parts.get(phase, {})
        if notes.replan and notes.replan == ahead.replan:
            return ahead.parts.get(phase, {})
        return {}

    def stated_revision(self, task: Task) -> PlanRevision | None:
        """Return the plan revision of the reflection that led to a phase, if it stated one."""
        state = self.state
        replan = PlanningTask.of(task).replan
        for noted in state.reflections:
            considered = state.judged.get(f"{noted.get('task')}~{Phase.REFLECTION}")
            if considered is None:
                continue
            if considered.replan_id == replan:
                return ReflectionNote.model_validate(noted, strict=False).plan_revision
        return None

    def prompt_data(self, task: Task | None = None) -> JsonObject:
        """Return the prompt variables of every phase, such as request, results and progress."""
        state = self.state
        answers: list[JsonValue] = []
        for clarification in state.clarified:
            stated = clarification.model_dump(mode="json")
            answers.append({name: value for name, value in stated.items() if value})
        action_plan: JsonObject = {}
        if state.plan is not None:
            action_plan = state.plan.action_plan.model_dump(mode="json", exclude_defaults=True)
        why = ""
        if task is not None:
            why = PlanningTask.of(task).reason
        data: JsonObject = {
            **self.request.model_copy(update={"goal": self.run.live.goal}).prompt_data(),
            "context": dict(self.run.live.context),
            "answers": answers,
            "goal_understanding": state.phase_output(Phase.GOAL_UNDERSTANDING),
            "task_decomposition": state.phase_output(Phase.TASK_DECOMPOSITION),
            "action_plan": action_plan,
            "feedback": [dict(noted) for noted in state.reflections if "feedback" in noted],
            "why": why,
            "executed": executed_actions(self.run.live, state),
            **progress_data(state, self.run.live),
        }
        return {name: value for name, value in data.items() if value}

    def current_tools(self) -> Mapping[str, ToolSpec]:
        """Return the tools of the run with their current availability."""
        live = self.run.live.tools
        return {name: live.get(name, tool) for name, tool in self.tools.items()}

    # Replan decisions

    async def consider_replan(
        self,
        task: TaskId,
        phase: Phase,
        data: JsonObject,
        cause: ReplanCause | None = None,
        *,
        questions: tuple[str, ...] = (),
    ) -> Consideration:
        """Have the model decide on a replan after a task; a journaled decision is reused."""
        self.prompts.tools = tuple(self.current_tools().values())
        earlier = self.state.judged.get(task)
        if earlier is not None:
            return earlier
        considered = await self.manager.consider(phase, data, cause, questions=questions)
        self.record_consideration(task, considered)
        return considered

    def decide_by_rule(
        self,
        task: str,
        decision: ReplanDecision,
        cause: ReplanCause,
        *,
        questions: tuple[str, ...] = (),
    ) -> Consideration:
        """Make a decision without a model; one made before an interruption is reused."""
        considered = self.state.judged.get(task)
        if considered is None:
            considered = self.manager.decide(decision, cause, questions=questions)
            self.record_consideration(task, considered)
        return considered

    async def decide_revision(
        self, subject: str, reflection: Reflection, data: JsonObject, cause: ReplanCause
    ) -> Consideration:
        """Decide, without the model, to revise the plan because a reflection demands it.

        If the limits forbid the revision, the model is asked once for another decision.
        """
        reasoning = "the reflection finds the plan wrong"
        if reflection.evaluation:
            reasoning = f"{reasoning}: {reflection.evaluation}"
        elif reflection.alignment_with_plan:
            reasoning = f"{reasoning}: {reflection.alignment_with_plan}"
        decision = ReflectionDecision(
            replan_needed=True,
            confidence=self.manager.limits.immediate_threshold,
            reasoning=reasoning,
            replan_type=ReplanType.PLAN_REVISION,
            issues_found=reflection.issues_identified,
        )
        considered = self.decide_by_rule(subject, decision, cause)
        if considered.ruling.needs_escalation and considered.instead_of is None:
            other = await self.manager.escalate(considered, data, considered.ruling.reason)
            if other is not None:
                considered = other
                self.record_consideration(subject, considered)
        return considered

    def record_consideration(self, task: str, considered: Consideration) -> None:
        """Journal a decision about a task."""
        self.note(JudgedNote(task=task, considered=considered))

    async def execute_replan(
        self, considered: Consideration, apply: ApplyReplan | None = None
    ) -> DecisionRecord:
        """Execute a replan; without `apply`, the engine changes the plan.

        A replan counted or executed before an interruption is not counted or executed again.
        """
        state = self.state
        replan = considered.replan_id
        for record in reversed(state.records):
            if record.replan_id == replan and record.executed:
                return record
        begun = replan in state.begun
        if begun and self._is_in_plan(replan):
            apply = None
        return await self.manager.execute_replan(considered, apply, resumed=begun)

    def _is_in_plan(self, replan: str) -> bool:
        """Return whether the live plan has phases of a replan."""
        return any(PlanningTask.of(entry.task).replan == replan for entry in self.run.live)

    async def settle_approvals(self) -> None:
        """Count the replans that people approved, and journal those that they declined."""
        state = self.state
        recorded = {record.replan_id for record in state.records}
        for held in list(state.held.values()):
            considered = held.considered
            if considered is None:
                continue
            if considered.replan_id in recorded:
                continue
            if not held.is_replan_approval:
                continue
            if not held.verdict:
                continue
            if held.is_approved:
                await self.execute_replan(considered)
            else:
                self.manager.record_decision(considered, executed=False)

    # People

    async def ask_about_decision(
        self,
        task: TaskId,
        considered: Consideration,
        proposal: str,
        *,
        otherwise: Phase | None = None,
        risk: str = "",
    ) -> NoReturn:
        """Raise TaskHeld, so that a person answers a decision's questions or approves its replan.

        A replan that needs no approval is counted before the question, so that none runs uncounted
        after the answer. If no replan is executed, or a limit was reached meanwhile, the phase
        `otherwise` is repeated after the answer.
        """
        ruling = considered.ruling
        decision = considered.decision
        target = otherwise
        is_valid = ruling.kind == "ask"
        if ruling.is_executable:
            is_valid = (await self.execute_replan(considered)).executed
        if is_valid and decision is not None:
            if decision.replan_type is not ReplanType.RETRY:
                target = decision.target_phase
        text = question_text(considered, proposal)
        if risk:
            text = f"{text}\n{risk}"
        why: HoldReason = "clarification" if ruling.questions else "approval"
        self.hold(
            task,
            why,
            text,
            target=target,
            considered=considered,
            risk=risk,
        )

    def hold(
        self,
        task: TaskId,
        why: HoldReason,
        text: str,
        *,
        target: Phase | None = None,
        considered: Consideration | None = None,
        risk: str = "",
    ) -> NoReturn:
        """Raise TaskHeld, so that a task waits for a person; arguments as in `TaskHold`."""
        questions: tuple[str, ...] = ()
        assumptions: tuple[str, ...] = ()
        if considered is not None:
            assumptions = tuple(getattr(considered.decision, "assumptions_to_make", ()))
            if why == "clarification":
                questions = considered.ruling.questions
        minutes = self.settings.replanning.goal_understanding.auto_assume_timeout_minutes
        held = TaskHold(
            task=task,
            why=why,
            text=text,
            target=target,
            questions=questions,
            assumptions=assumptions,
            risk=risk,
            due=self.clock.now() + 60 * minutes,
            considered=considered,
        )
        self.note(held)
        raise TaskHeld(text)

    def require_approval(self, task: TaskId, tool: str, arguments: JsonObject) -> NoReturn:
        """Raise TaskHeld, so that a person approves the use of a dangerous tool."""
        use = describe_tool_use(tool, arguments)
        text = f"the model wants to use a tool that may do harm: {use}; allow it?"
        self.hold(task, "dangerous", text)

    def escalate(
        self,
        task: TaskId,
        reason: str,
        *,
        target: Phase | None = None,
        recommendations: tuple[str, ...] = (),
    ) -> None:
        """Apply `escalation.on_no_alternative` when no replan is possible.

        With `assume`, it journals an assumption and returns.

        Raises:
            TaskHeld: a person decides. An approval repeats the target phase; without a target, it
                accepts the existing output.
            PlanningFailed: the run ends.
        """
        way = self.config.escalation.on_no_alternative
        if way is None:
            way = "wait" if self.interactive else "abort"
        match way:
            case "assume":
                text = reason
                if target is None:
                    text = f"{reason}: the current output is kept"
                self.record_assumptions([text])
            case "wait":
                self.record_intervention(reason, recommendations)
                self.hold(task, "no_alternative", reason, target=target)
            case _:
                self.record_intervention(reason, recommendations)
                raise PlanningFailed(reason)

    def hold_for_intervention(
        self,
        task: TaskId,
        reason: str,
        recommendations: tuple[str, ...] = (),
        judged: Summary | None = None,
    ) -> NoReturn:
        """Raise TaskHeld, so that a person decides whether the existing results are good enough."""
        self.record_intervention(reason, recommendations, judged)
        self.hold(task, "intervention", f"{reason}; accept the current result?")

    def record_intervention(
        self,
        reason: str,
        recommendations: tuple[str, ...] = (),
        judged: Summary | None = None,
        *,
        once: bool = False,
    ) -> None:
        """Journal that a person must intervene, with the state of the work.

        With `once`, nothing is journaled if the run already has a summary.
        """
        if once and self.state.completion is not None:
            return
        _log.error("run %s: a person must decide: %s", self.run.id, reason)
        report = self.state.intervention(reason, recommendations, judged)
        self.note(CompletionNote.model_validate(report))

    def record_completion(self, output: JsonObject, status: str) -> None:
        """Journal the model's summary of a completed run, with counts from the journal."""
        counts = self.state.task_counts()
        summary: JsonObject = {"goal_achieved": False, "key_outcomes": []}
        summary.update(as_object(output.get("summary")))
        summary.update(counts)
        comment = output.get("comment")
        if not comment:
            outcome = "achieved" if summary["goal_achieved"] else "not achieved"
            comment = (
                f"The goal was {outcome}; actions done: {counts['tasks_completed']},"
                f" failed: {counts['tasks_failed']}."
            )
        head: JsonObject = {"phase": "completion", "comment": comment, "status": status}
        self.note(CompletionNote.model_validate({**output, **head, "summary": summary}))

    def record_assumptions(self, assumptions: Sequence[str], questions: Sequence[str] = ()) -> None:
        """Journal assumptions, with the unanswered questions that they settle."""
        self.note(Clarification(questions=tuple(questions), assumptions=tuple(assumptions)))

"""What a person must decide, and what is done in their place where nobody can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NoReturn, TypeVar

from pydantic import BaseModel

from replanning.environment import Clock, Environment
from replanning.errors import LLMResponseInvalid, ReplanningError
from replanning.llm.completions import LLMOptions
from replanning.llm.provider import LLMProvider
from replanning.llm.quoting import is_truncated
from replanning.plan.secrets import MASK, is_redacted
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import Phase, ReplanDecision
from replanning.planning.limits import ReplanCause, ReplanLimits
from replanning.planning.manager import (
    ApplyReplan,
    Consideration,
    DecisionRecord,
    ReplanManager,
    ReplanNote,
    reply_problem,
)
from replanning.planning.outputs import InterventionSummary, RequiresHumanIntervention, sanitise_text
from replanning.planning.prompts import MAX_PLAN_TOKENS, MAX_TOKENS_BY_KIND, ReplanPromptBuilder, prompt_templates
from replanning.planning.request import TaskRequest, request_of
from replanning.planning.state import (
    ExecutionStatus,
    HoldReason,
    PlanningState,
    TaskHold,
    action_counts,
    executed_actions,
    latest_phase_output,
    unresolved_failures,
)
from replanning.planning.steps import is_tool_loop, planning_metadata
from replanning.run.run import PlanRun
from replanning.settings import PlanningSettings, Settings

_MAX_FAILURES_SHOWN: Final = 5
"""Failed actions whose errors are told."""


class PlanningFailed(ReplanningError):
    """A phase has come to nothing, and the run with it."""


class PlanningHeld(ReplanningError):
    """A task cannot go on until a person has decided; what they are asked is on record."""


class HumanInput(ABC):
    """The methods of a session that are about people."""

    run: PlanRun
    config: Settings
    settings: PlanningSettings
    clock: Clock
    interactive: bool
    manager: ReplanManager

    @abstractmethod
    def note(self, kind: str, data: JsonObject) -> None:
        """Put something on record."""

    def hold(
        self,
        task: TaskId,
        why: HoldReason,
        text: str,
        *,
        target: Phase | None,
        considered: Consideration | None,
        risk: str = "",
    ) -> NoReturn:
        """Stop a task until a person has decided.

        Raises:
            PlanningHeld: always.
        """
        decision = considered.decision if considered is not None else None
        minutes = self.settings.replanning.goal_understanding.auto_assume_timeout_minutes
        held = TaskHold(
            task=task,
            why=why,
            text=text,
            target=target,
            questions=considered.ruling.questions if considered is not None and why == "clarification" else (),
            assumptions=tuple(getattr(decision, "assumptions_to_make", ())),
            risk=risk,
            due=self.clock.now() + 60 * minutes,
            considered=considered,
        )
        self.note("held", held.model_dump(mode="json"))
        raise PlanningHeld(text)

    def escalate(
        self, task: TaskId, reason: str, *, target: Phase | None = None, recommendations: tuple[str, ...] = ()
    ) -> None:
        """Do what is to be done where a replan is wanted, cannot be, and no other way was found.

        Args:
            task: the task that it is about.
            reason: why there is no way on.
            target: the phase that is done again if a person agrees; None where what there is counts then.
            recommendations: what they might do.

        Raises:
            PlanningHeld: a person decides.
            PlanningFailed: the run ends.
        """
        match self.config.escalation.on_no_alternative or ("wait" if self.interactive else "abort"):
            case "assume":
                text = f"{reason}: what there is counts" if target is None else reason
                self.record_assumptions([text])
            case "wait":
                self.record_intervention(reason, recommendations)
                self.hold(task, "no_alternative", reason, target=target, considered=None)
            case _:
                self.record_intervention(reason, recommendations)
                raise PlanningFailed(reason)

    def record_intervention(
        self, reason: str, recommendations: tuple[str, ...] = (), outcomes: tuple[str, ...] = ()
    ) -> None:
        """Put on record that a person must look after this, and where things stand."""
        done, failed = action_counts(self.run.live)
        errors, counts = "; ".join(unresolved_failures(self.run.live)[:_MAX_FAILURES_SHOWN]), self.manager.counts
        stands = f"actions done: {done}, failed: {failed}{errors and f' ({errors})'}; replans made: {counts.total}"
        summary = InterventionSummary(
            goal_achieved=False,
            tasks_completed=done,
            tasks_failed=failed,
            key_outcomes=outcomes,
            revision_attempts=counts.plan_revisions,
            reason=sanitise_text(reason),
            current_state=sanitise_text(stands),
            recommendations=recommendations,
        )
        self.note("completion", RequiresHumanIntervention(summary=summary).model_dump(mode="json"))

    def hold_for_intervention(
        self, task: TaskId, reason: str, recommendations: tuple[str, ...] = (), outcomes: tuple[str, ...] = ()
    ) -> NoReturn:
        """Have a person decide whether what there is will do.

        Raises:
            PlanningHeld: always.
        """
        self.record_intervention(reason, recommendations, outcomes)
        self.hold(task, "intervention", f"{reason}; is what there is good enough?", target=None, considered=None)

    def record_assumptions(self, assumptions: Sequence[str], questions: Sequence[str] = ()) -> None:
        """Put on record what is assumed, and which questions nobody has answered."""
        self.note("assumed", {"questions": [*questions], "assumptions": [*assumptions]})


MAX_REPAIRS: Final = 3
"""How often a model is told what is wrong with a plan before that is given up."""

_MAX_REPLY_CHARS: Final = 2_000
"""Characters of a reply that a model gets to see again."""

ParsedReply = TypeVar("ParsedReply")


class ToolNotAllowed(ReplanningError):
    """An action is to use a tool that may not be used."""


class NoUsableReply(PlanningFailed):
    """The model has not given an answer that can be used, however often it was told why."""


class UnexpectedResult(ReplanningError):
    """An action was executed, but it did not come to what it is for."""


class PlanningSession(HumanInput):
    """What the phases, the actions and the recovery of one run share.

    Args:
        run: the run.
        llm: who is asked.
        config: the settings.
        tools: those that may be used.
        environment: time, chance and ids.
        interactive: whether there is somebody to ask.
        plan_only: whether every argument must be planned, because nothing is executed.
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
        self.run, self.llm, self.config, self.tools, self.clock = run, llm, config, tools, environment.clock
        self.settings = settings = config.planning
        self.interactive, self.plan_only = interactive, plan_only
        self.tool_loop_only = is_tool_loop(run.live.plan)
        self.request = request_of(run.live.plan) or TaskRequest(goal=run.live.goal)
        self.prompts = ReplanPromptBuilder(prompt_templates(), settings, tuple(tools.values()), redact=run.redact_value)
        self._state, self.execution_status = PlanningState(), ExecutionStatus()
        meter, self._max_tokens = run.meter("planning"), llm.max_tokens
        self._options = LLMOptions(
            system=self.prompts.system(), meter=meter, max_tokens=min(MAX_PLAN_TOKENS, self._max_tokens)
        )
        state = self.state
        self.manager = ReplanManager(
            llm,
            self.prompts,
            ReplanLimits.from_settings(settings, replans_per_lineage=config.limits.replans_per_lineage),
            counts=state.counts,
            records=state.records,
            on_note=self._on_replan,
            options=self._options,
            environment=environment,
        )

    @property
    def state(self) -> PlanningState:
        """What the journal tells by now."""
        for record in self.run.records(self._state.seq):
            self._state.fold(record)
            self.execution_status.fold(record, self.run.live)
        return self._state

    def note(self, kind: str, data: JsonObject) -> None:
        """Put something on record, as long as the run goes on; how it ends not twice, after an interruption."""
        said = kind == "completion" and self.state.completion == data
        if not (self.run.ended or said):
            self.run.note(kind, data)

    def _on_replan(self, note: ReplanNote) -> None:
        self.note("replan", note.model_dump(mode="json"))

    async def ask(
        self, kind: str, given: JsonObject, schema: type[BaseModel], read: Callable[[str], ParsedReply], *, repairs: int
    ) -> ParsedReply:
        """What a model answers, in the shape that is wanted.

        Raises:
            NoUsableReply: it has not given a usable answer, however often it was told why.
            LLMError: it cannot be asked.
            BudgetExceeded: asking it does not fit what is left of the budget.
        """
        problem, rejected = "", list[JsonValue]()
        options = replace(
            self._options,
            schema=schema,
            max_tokens=min(MAX_TOKENS_BY_KIND.get(kind, MAX_PLAN_TOKENS), self._max_tokens),
        )
        for _ in range(repairs + 1):
            self._refresh_tools()
            completion = await self.llm.complete_detailed(
                self.prompts.build(kind, {**given, "rejected": rejected}), options
            )
            try:
                return read(completion.text)
            except LLMResponseInvalid as error:
                problem = reply_problem(completion, str(error))
            rejected = [{"reply": completion.text[:_MAX_REPLY_CHARS], "problem": problem}]
        raise NoUsableReply(f"the model gave no usable {kind} in {repairs + 1} tries: {problem}")

    def refuse_secrets(self, given: Mapping[str, JsonValue]) -> None:
        """Refuse what looks like a secret in a reply: no record can hold it, and it would be missing where it is used.

        So would what the model was not shown, a secret or the end of a long text: no tool is used with a mark for it.

        Args:
            given: what a model says, by what it is to be.

        Raises:
            LLMReplyInvalid: with everything that looks so; not what it says.
        """
        for why, is_wrong in (
            ("what looks like a secret cannot be kept", lambda value: self.run.redact_value(value) != value),
            (f"{MASK} stands for a secret that you are not shown", is_redacted),
            ("[cut: …] stands for what you are not shown of a text or a list", is_truncated),
        ):
            if wrong := [what for what, value in given.items() if is_wrong(value)]:
                raise LLMResponseInvalid(f"{why}: do without it in {', '.join(wrong)}")

    # What is told of where things stand

    def phase_output(self, phase: Phase) -> JsonObject:
        """What a phase came to last; empty where it did not come to anything yet."""
        return latest_phase_output(self.state, self.run.live, phase)

    def prompt_data(self, task: Task | None = None) -> JsonObject:
        """What every phase is told: what is wanted, what is known, where things stand, and why it is done again."""
        state = self.state
        given: JsonObject = {
            **self.request.model_copy(update={"goal": self.run.live.goal}).prompt_data(),
            "context": dict(self.run.live.context),
            "answers": [{k: v for k, v in one.model_dump(mode="json").items() if v} for one in state.clarified],
            "goal_understanding": self.phase_output(Phase.GOAL_UNDERSTANDING),
            "task_decomposition": self.phase_output(Phase.TASK_DECOMPOSITION),
            "action_plan": state.plan.action_plan if state.plan is not None else {},
            "feedback": [dict(one) for one in state.reflections if "feedback" in one],
            "why": planning_metadata(task).get("reason", "") if task is not None else "",
            "executed": executed_actions(self.run.live, state),
            **self.execution_status.prompt_data(self.run.live, state),
        }
        return {name: value for name, value in given.items() if value}

    def current_tools(self) -> Mapping[str, ToolSpec]:
        """The tools that may be used as they are now, with those that are down marked as not available."""
        live = self.run.live.tools
        return {name: live.get(name, tool) for name, tool in self.tools.items()}

    def _refresh_tools(self) -> None:
        """Tell the model which tools are available now."""
        self.prompts.tools = tuple(self.current_tools().values())

    # What is decided

    async def consider_replan(
        self, task: TaskId, phase: Phase, given: JsonObject, cause: ReplanCause | None = None
    ) -> Consideration:
        """Whether to replan after a task; not asked again where the run was interrupted after that."""
        self._refresh_tools()
        known = self.state.judged.get(task)
        if known is not None:
            return known
        considered = await self.manager.consider(phase, given, cause)
        self.record_consideration(task, considered)
        return considered

    def record_consideration(self, task: str, considered: Consideration) -> None:
        """Put on record what was decided after a task."""
        self.note("judged", {"task": task, "considered": considered.model_dump(mode="json")})

    async def execute_replan(self, considered: Consideration, apply: ApplyReplan | None = None) -> DecisionRecord:
        """Carry out a replan; what was counted, or done, before an interruption is not counted, or done, again.

        Args:
            considered: the replan.
            apply: does what is to be done here; nothing, where the engine changes the plan.
        """
        state = self.state
        for record in reversed(state.records):
            if record.replan_id == considered.replan_id and record.executed:
                return record
        begun = considered.replan_id in state.begun
        return await self.manager.execute_replan(considered, apply or _no_change, resumed=begun)

    async def settle_approvals(self) -> None:
        """Count the replans that people have agreed to, and put on record those that they have not."""
        state = self.state
        recorded = {record.replan_id for record in state.records}
        for held in list(state.held.values()):
            one = held.considered
            if one is None or not held.verdict or one.ruling.kind != "ask" or one.replan_id in recorded:
                continue
            if held.verdict in ("approve", "modify"):
                await self.execute_replan(one)
            else:
                self.manager.record_decision(one, executed=False)


async def _no_change(decision: ReplanDecision) -> None:
    """What is done where the engine changes the plan."""

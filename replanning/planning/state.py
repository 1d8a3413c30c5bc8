"""Request and state of planning mode, folded from a run's journal, for prompts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from replanning.changes import ExpandTask, PlanChange, ReplaceTask, SkipTask, target_task_ids
from replanning.errors import NoResult
from replanning.history.effects import effects_so_far
from replanning.history.elements import report_elements
from replanning.journal.records import (
    AttemptFailed,
    AttemptSucceeded,
    AttemptTimedOut,
    NoteAdded,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResourceUpdated,
    RunEnded,
    RunOpened,
    Usage,
    UsageCharged,
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from replanning.llm.quoting import truncate_text, truncate_value
from replanning.plan.document import Plan
from replanning.plan.elements import FOR_EACH, FORESEEN
from replanning.plan.json_form import shown_form
from replanning.plan.json_values import as_object
from replanning.plan.tasks import Goal, Task, tool_name
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import (
    DecisionRecord,
    Phase,
    RecordModel,
    ReplanCounts,
    ReplanType,
    replan_reason,
)
from replanning.planning.manager import Consideration, ReplanNote, ReplanStage
from replanning.planning.notes import (
    AheadNote,
    CallNote,
    Clarification,
    CompletionNote,
    JudgedNote,
    OutputNote,
    PlanVersion,
    ReflectionNote,
    TaskHold,
    read_note,
)
from replanning.planning.outputs import (
    ActionPlan,
    InterventionSummary,
    RequiresHumanIntervention,
    Summary,
    clean_text,
)
from replanning.planning.tasks import (
    PLANNING_PHASES,
    UNFINISHED,
    PlanningTask,
    action_of,
    is_action,
    is_action_done,
    is_unfinished,
    phase_of,
    planned_arguments,
)

# The request

_MAX_ISSUE_CHARS: Final = 100_000
"""Maximum length of an issue's text, and of the data about its repository, in characters."""

_MAX_COMMENT_CHARS: Final = 20_000

_MAX_ELEMENT_ERRORS: Final = 5
"""Maximum number of failed elements whose errors a model is shown."""


class IssueComment(RecordModel):
    """Comment on an issue.

    Attributes:
        author: login of the author.
        text: the text.
        at: time of writing, if known.
    """

    author: str
    text: str
    at: datetime | None = None


class TaskRequest(RecordModel):
    """A goal with its context: the issue, its comments, its repository and earlier runs.

    The texts are untrusted data: they describe the goal but give the model no permission.

    Attributes:
        goal: the goal.
        issue_id: id of the issue, such as `owner/repo#12` or `group/project!7`; empty without an
            issue.
        title: title of the issue.
        text: text of the issue.
        comments: comments on the issue, oldest first.
        repository: data about the repository.
        earlier: earlier plans and executions for the same issue, oldest first.
    """

    goal: Goal
    issue_id: str = ""
    title: str = ""
    text: str = ""
    comments: tuple[IssueComment, ...] = ()
    repository: JsonObject = Field(default_factory=dict)
    earlier: tuple[JsonObject, ...] = ()

    def truncated(self) -> TaskRequest:
        """Return the request with its latest comments and runs; long texts are cut and marked."""
        comments: list[IssueComment] = []
        for comment in self.comments[-200:]:
            author = truncate_text(comment.author, 200)
            text = truncate_text(comment.text, _MAX_COMMENT_CHARS)
            comments.append(IssueComment(author=author, text=text, at=comment.at))
        earlier: list[JsonValue] = []
        for run in self.earlier[-20:]:
            earlier.append(truncate_value(run, _MAX_COMMENT_CHARS))
        changed: dict[str, object] = {
            "issue_id": truncate_text(self.issue_id, _MAX_COMMENT_CHARS),
            "title": truncate_text(self.title, _MAX_COMMENT_CHARS),
            "text": truncate_text(self.text, _MAX_ISSUE_CHARS),
            "comments": tuple(comments),
            "repository": truncate_value(self.repository, _MAX_ISSUE_CHARS),
            "earlier": tuple(earlier),
        }
        return self.model_copy(update=changed)

    def to_metadata(self) -> JsonObject:
        """Return the part that a run keeps in its metadata; the goal is in its plan."""
        return self.truncated().model_dump(mode="json", exclude={"goal"}, exclude_defaults=True)

    def prompt_data(self) -> JsonObject:
        """Return the prompt sections: request, comments, repository and earlier runs."""
        request: JsonObject = {"task": self.goal.objective}
        if self.issue_id:
            request["issue"] = self.issue_id
        if self.title:
            request["title"] = self.title
        if self.text:
            request["text"] = self.text
        if self.goal.success_criteria:
            request["success_criteria"] = list(self.goal.success_criteria)
        comments: list[JsonValue] = []
        for comment in self.comments:
            comments.append(comment.model_dump(mode="json", exclude_none=True))
        return {
            "request": request,
            "comments": comments,
            "repository": self.repository,
            "earlier_runs": [*self.earlier],
        }


def request_of(plan: Plan) -> TaskRequest | None:
    """Return the request of a run from its first plan; None for a run outside planning mode."""
    for task in plan.tasks:
        notes = PlanningTask.of(task)
        if notes.phase is None:
            continue
        stated: JsonObject = {}
        if notes.request is not None:
            stated = notes.request
        return TaskRequest.model_validate({**stated, "goal": plan.goal})
    return None


# The state


def question_text(considered: Consideration, proposal: str) -> str:
    """Return the question about a decision: the model's questions, or a request for approval."""
    ruling = considered.ruling
    decision = considered.decision
    if ruling.questions:
        return "\n".join(ruling.questions)
    reason = "" if decision is None else replan_reason(decision)
    return f"{reason} ({ruling.reason}); {proposal}?"


class PlanningState(BaseModel):
    """State of planning mode in a run.

    Attributes:
        seq: the number of the last record folded.
        stage: the stage of the latest replan.
        counts: replans spent so far.
        latest: the latest decision.
        records: the outcomes of the decisions, oldest first.
        begun: the replans that have begun, by id.
        judged: the latest decision about each task.
        outputs: the outputs of the phases, by task.
        phase_outputs: the latest output of each phase.
        ahead: outputs for later phases in the latest planning reply.
        plans: the plans, oldest first.
        held: the tasks that wait, or waited, for a person.
        questions: the task that each question to a person is about.
        clarified: the clarifications, oldest first.
        calls: the arguments that the model chose for actions, by attempt.
        reflections: the model's reflections on executed actions, and people's feedback.
        actions: whether each executed action finally succeeded. Replaced actions are left out, and
            each element of a list has its own entry.
        failures: the errors of the failed actions.
        replanned: the failed actions replaced by phases that make a new plan.
        lists: for each action with a list, its number of elements without the skipped ones.
        errors: the number of failed attempts at actions.
        consecutive_errors: failed attempts since the last success.
        unavailable_tools: why each unavailable tool is down; empty if no reason was given.
        completion: the summary of the ended run.
    """

    model_config = ConfigDict(extra="forbid")

    seq: int = 0
    stage: ReplanStage = "idle"
    counts: ReplanCounts = ReplanCounts()
    latest: Consideration | None = None
    records: list[DecisionRecord] = []
    begun: dict[str, Consideration] = {}
    judged: dict[str, Consideration] = {}
    outputs: dict[str, JsonObject] = {}
    phase_outputs: dict[str, JsonObject] = {}
    ahead: AheadNote | None = None
    plans: list[PlanVersion] = []
    held: dict[str, TaskHold] = {}
    questions: dict[str, str] = {}
    clarified: list[Clarification] = []
    calls: dict[str, JsonObject] = {}
    reflections: list[JsonObject] = []
    actions: dict[str, bool] = {}
    failures: dict[str, str] = {}
    replanned: list[str] = []
    lists: dict[str, int] = {}
    errors: int = 0
    consecutive_errors: int = 0
    unavailable_tools: dict[str, str] = {}
    completion: JsonObject | None = None

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> Self:
        """Return the state after these records, which start with the run's first."""
        state = cls()
        for record in records:
            state.fold(record)
        return state

    def fold(self, record: Record) -> None:
        """Apply a record; those that do not concern planning mode change nothing."""
        self.seq = record.seq
        match record.body:
            case NoteAdded() as note:
                self._fold_note(note)
            case QuestionAsked() as asked:
                self._fold_question(asked)
            case QuestionAnswered() as answer:
                self._fold_answer(answer)
            case AttemptSucceeded() | AttemptFailed() | AttemptTimedOut() as end:
                self._fold_attempt(end)
            case PlanRevised(changes=changes, by=author):
                for change in changes:
                    self._fold_change(change, author)
            case ResourceUpdated(name=name, available=available, reason=reason):
                self.unavailable_tools.pop(name, None)
                if available is False:
                    self.unavailable_tools[name] = reason
            case RunEnded(status="failed" | "aborted") as ended:
                if self.completion is None:  # the model could not summarise it
                    self.completion = self.intervention(ended.reason)

    def _fold_note(self, body: NoteAdded) -> None:
        """Apply a note of planning mode."""
        note = read_note(body)
        match note:
            case ReplanNote():
                self._fold_replan(note)
            case JudgedNote():
                self.judged[note.task] = note.considered
            case OutputNote():
                self.outputs[note.task] = note.value
                self.phase_outputs[note.phase] = note.value
            case AheadNote():
                self.ahead = note
            case PlanVersion():
                # A plan whose installation was interrupted is made again.
                self.plans = [plan for plan in self.plans if plan.task != note.task]
                self.plans.append(note)
                self._settle_failures(note)
            case TaskHold():
                self.held[note.task] = note
            case Clarification():
                self.clarified.append(note)
            case CallNote():
                self.calls[note.task] = note.arguments
            case ReflectionNote():
                self.reflections.append(body.data)
            case CompletionNote():
                self.completion = body.data

    def _fold_replan(self, note: ReplanNote) -> None:
        """Apply a step of a replan, and its outcome if it has one."""
        self.stage = note.stage
        self.counts = note.counts
        if note.considered is not None:
            self.latest = note.considered
            if note.stage == "applying":
                self.begun[note.considered.replan_id] = note.considered
        if note.record is None:
            return
        ids = [old.replan_id for old in self.records]
        if note.record.replan_id in ids:  # a replan that was executed may fail later
            self.records[ids.index(note.record.replan_id)] = note.record
        else:
            self.records.append(note.record)

    def _fold_question(self, asked: QuestionAsked) -> None:
        """Map a question to the waiting tasks that its answer changes."""
        changes: list[PlanChange] = []
        for candidate in asked.candidates:
            changes += candidate.alternative.changes
        for task in target_task_ids(changes):
            held = self.held.get(task)
            # If the task's question is already answered, this question is about something else.
            if held is not None and held.is_pending:
                self.questions[asked.question] = task

    def _fold_answer(self, answer: QuestionAnswered) -> None:
        """Apply a person's verdict to the task that waits for it."""
        if answer.question not in self.questions:
            return
        answered = {"verdict": answer.verdict, "by": answer.by}
        held = self.held[self.questions[answer.question]].model_copy(update=answered)
        self.held[held.task] = held
        if held.why == "clarification" and held.is_approved:
            # An approval without an answer accepts the model's assumptions.
            assumed: tuple[str, ...] = ()
            if not answer.comment:
                assumed = held.effective_assumptions
            clarification = Clarification(
                questions=held.questions, answer=answer.comment, assumptions=assumed
            )
            self.clarified.append(clarification)

    def _fold_attempt(self, end: AttemptSucceeded | AttemptFailed | AttemptTimedOut) -> None:
        """Apply the end of an attempt at an action."""
        if end.task.partition("~")[0] in list(Phase):
            return
        self.failures.pop(end.task, None)
        if isinstance(end, AttemptSucceeded):
            self.actions[end.task] = True
            self.consecutive_errors = 0
        else:
            self.actions[end.task] = False
            self.failures[end.task] = end.failure.message
            self.errors += 1
            self.consecutive_errors += 1

    def _fold_change(self, change: PlanChange, author: str) -> None:
        if isinstance(change, ExpandTask):
            self.lists[change.task_id] = len(change.items)
        elif isinstance(change, SkipTask) and author == FOR_EACH:
            # `on_item_failure` of the action lets the list continue without a failed element.
            self._forget_action(change.task_id)
            self.lists[_action_id(change.task_id)] -= 1
        elif isinstance(change, ReplaceTask) and change.task_id in self.actions:
            if all(phase_of(task) is not None for task in change.tasks):
                # It counts as failed until the phases that replace it have made a new plan.
                self.replanned.append(change.task_id)
            else:
                self._forget_action(change.task_id)

    def _settle_failures(self, plan: PlanVersion) -> None:
        """Forget the failed actions that a plan replaces: of its lineage, or all if it has none."""
        for task in list(self.replanned):
            if plan.lineage in ("", self.lineage_of(task)):
                self._forget_action(task)
                self.replanned.remove(task)

    def _forget_action(self, task: str) -> None:
        self.actions.pop(task, None)
        self.failures.pop(task, None)

    @property
    def replans_tried(self) -> int:
        """Number of executed replans that aimed to change the plan, failed ones included."""
        tried = 0
        for record in self.records:
            if not record.executed:
                continue
            if record.replan_type not in (ReplanType.RETRY, ReplanType.CLARIFICATION_REQUEST):
                tried += 1
        return tried

    def task_counts(self) -> dict[str, int]:
        """Return the numbers of actions that are done, and that failed and were not replaced.

        An action with a list is done when all elements are, and failed when any element has.
        """
        done = dict.fromkeys(self.lists, 0)
        for task, succeeded in self.actions.items():
            action = _action_id(task)
            done[action] = done.get(action, 0) + succeeded
        completed = 0
        for action, number in done.items():
            completed += number >= self.lists.get(action, 1)
        failed = {_action_id(task) for task in self.failures}
        return {"tasks_completed": completed, "tasks_failed": len(failed)}

    def intervention(
        self, reason: str, recommendations: Sequence[str] = (), judged: Summary | None = None
    ) -> JsonObject:
        """Return the completion of a run that only a person can continue, with counts and state.

        Args:
            reason: why it cannot continue.
            recommendations: the model's recommendations, by default those of its latest decision;
                failures and unavailable tools add more.
            judged: the model's judgement of the outcomes and criteria so far.
        """
        advice = list(recommendations)
        if not advice and self.latest is not None:
            decision = self.latest.decision
            if decision is not None:
                advice = list(decision.recommended_actions)
        errors: list[str] = []
        for task, error in list(self.failures.items())[:5]:
            errors.append(f"{self.name_of(task)}: {truncate_text(error, 200)}")
            advice.append(f"fix the failure of {errors[-1]}")
        for name, why in self.unavailable_tools.items():
            cause = f": {why}" if why else ""
            advice.append(f"make the tool {name!r} available again{cause}")
        if not advice:
            advice.append("review the results, and restate the goal with what is missing")

        counts = self.task_counts()
        current = f"actions done: {counts['tasks_completed']}, failed: {counts['tasks_failed']}"
        if errors:
            current = f"{current} ({'; '.join(errors)})"
        criteria_met: tuple[bool, ...] = ()
        key_outcomes: tuple[str, ...] = ()
        if judged is not None:
            criteria_met = judged.criteria_met
            key_outcomes = judged.key_outcomes
        summary = InterventionSummary(
            goal_achieved=False,
            **counts,
            criteria_met=criteria_met,
            key_outcomes=key_outcomes,
            revision_attempts=max(self.replans_tried, len(self.plans) - 1),
            reason=clean_text(reason),
            current_state=clean_text(f"{current}; replans tried: {self.counts.total}"),
            recommendations=tuple(map(clean_text, advice)),
        )
        comment = clean_text(f"A person must decide how to continue: {reason or 'the run ended'}")
        report = RequiresHumanIntervention(comment=comment, summary=summary)
        return report.model_dump(mode="json")

    @property
    def plan(self) -> PlanVersion | None:
        """The current plan."""
        return self.plans[-1] if self.plans else None

    def phase_output(self, phase: Phase) -> JsonObject:
        """Return the latest output of a phase; empty if it has none yet."""
        return self.phase_outputs.get(phase, {})

    def is_danger_approved(self, task: str) -> bool:
        """Return whether a person has approved the dangerous tools of a task."""
        return task in self.held and self.held[task].is_danger_approved

    def reflection_on(self, subject: str) -> ReflectionNote | None:
        """Return the reflection on a subject, such as an attempt; None if it has none."""
        for noted in self.reflections:
            if noted.get("task") == subject:
                return ReflectionNote.model_validate(noted, strict=False)
        return None

    def is_clarification(self, question: str) -> bool:
        """Return whether a question to a person asks for clarification."""
        held = self.held.get(self.questions.get(question, ""))
        if held is None:
            return False
        return held.why == "clarification"

    def accepts_free_text(self, question: str) -> bool:
        """Return whether free text answers a question: a clarification without risk."""
        if not self.is_clarification(question):
            return False
        held = self.held[self.questions[question]]
        return not held.risk

    @property
    def names(self) -> dict[str, str]:
        """Names of the live tasks in the latest plan that has each, by task id."""
        names: dict[str, str] = {}
        for plan in self.plans:
            for name, task in plan.tasks.items():
                names[task] = name
        return names

    def name_of(self, task: TaskId | str) -> str:
        """Return the name of a task in its plan, such as `convert`; its id if it has no plan.

        The name of an element, such as `convert[3]`, begins with that of its action.
        """
        action = _action_id(task)
        return self.names.get(action, action) + task.removeprefix(action)

    def lineage_of(self, task: TaskId | str) -> str:
        """Return the lineage whose replans a task counts towards: its first failed ancestor.

        The elements of a list share the lineage of their action.
        """
        name = self.name_of(_action_id(task))
        for plan in self.plans:
            if name in plan.tasks:
                return plan.lineage or name
        return name


def _action_id(task: str) -> str:
    """Return the id of an element's action, `convert` for `convert[3]`; else the id itself."""
    # Names of subtasks have no brackets. The replacement of an element is named `convert[3]~2`.
    return task.partition("[")[0] or task


class PlanStep(NamedTuple):
    """A task of a plan: its name there, its description, and whether it is done."""

    name: str
    text: str
    done: bool


class PlanProgress(NamedTuple):
    """Progress of a plan from its creation, in seconds since the epoch, until its replacement."""

    number: int
    at: float
    reason: str
    steps: tuple[PlanStep, ...]

    @property
    def done(self) -> int:
        """Number of tasks that are done."""
        return sum(step.done for step in self.steps)


def _replan_of(entry: TaskEntry) -> str:
    """Return the replan that a planning phase belongs to; empty for any other task."""
    notes = PlanningTask.of(entry.task)
    if notes.phase not in PLANNING_PHASES:
        return ""
    return notes.replan


class PlanningProgress:
    """Progress of the plans of a run, folded from its journal.

    A task counts as done if it or its replacement succeeded; a failed or skipped one does not.

    Attributes:
        state: the state of planning mode.
        run_opened: the first record.
        opened_at: its time, in seconds since the epoch.
        spent: calls, tokens and money that the run has used.
        revisions: changes of the live plan, apart from those that the plan itself calls for.
    """

    def __init__(self) -> None:
        self.state = PlanningState()
        self.run_opened: RunOpened | None = None
        self.opened_at = 0.0
        self.spent = Usage()
        self.revisions = 0
        self._live: LivePlan | None = None
        self._created_at: dict[str, float] = {}
        self._superseded_steps: dict[str, tuple[PlanStep, ...]] = {}

    def __repr__(self) -> str:
        plans = self.plans
        latest = "no plan"
        if plans:
            plan = plans[-1]
            latest = f"{plan.done}/{len(plan.steps)} of plan {plan.number}"
        return f"<PlanningProgress {latest}>"

    def fold(self, record: Record) -> None:
        """Apply a record; records must come in order, from the first."""
        body = record.body
        if isinstance(body, RunOpened):
            self.run_opened = body
            self.opened_at = record.at
            self._live = LivePlan(body.plan)
        elif self._live is not None:
            self._live.fold(record)
        if isinstance(body, NoteAdded) and body.type == "plan":
            task = str(body.data.get("task"))
            old = self.state.plan
            if old is not None and old.task != task:
                self._superseded_steps[old.task] = self._steps(old)
            self._created_at[task] = record.at
        if isinstance(body, UsageCharged):
            self.spent += body.usage
        if isinstance(body, PlanRevised) and body.by not in FORESEEN:
            self.revisions += 1
        self.state.fold(record)

    def effects(self) -> str:
        """Return how many effects the run had; empty if nothing states how to undo any."""
        return "" if self._live is None else effects_so_far(self._live)

    def finished_actions(self) -> list[str]:
        """Return the successful actions of all plans, with their tools and purposes."""
        live = self._live
        if live is None:
            return []
        descriptions = self._descriptions()
        finished: dict[TaskId, TaskEntry] = {}
        for task, succeeded in self.state.actions.items():
            if not succeeded:
                continue
            if task in live:
                entry = action_of(live.entry(TaskId(task)))
                finished[entry.id] = entry
        actions: list[str] = []
        for entry in finished.values():
            name = self.state.name_of(entry.root)
            line = name
            tool = tool_name(entry.task)
            if tool and tool != name:
                line = f"{name} ({tool})"
            text = _step_text(live, name, entry, descriptions)
            if text:
                line = f"{line}: {text}"
            actions.append(line)
        return actions

    def finished_replan(self, task_id: TaskId) -> DecisionRecord | None:
        """Return the successful replan whose last phase is this task.

        None if other phases of the replan remain, if it failed, or if the task belongs to none.
        """
        live = self._live
        if live is None:
            return None
        if task_id not in live:
            return None
        replan = _replan_of(live.entry(task_id))
        if not replan:
            return None
        for entry in live:
            if is_unfinished(entry) and _replan_of(entry) == replan:
                return None
        for record in self.state.records:
            if record.replan_id == replan and record.result == "success":
                return record
        return None

    def success_criteria(self) -> list[tuple[str, bool | None]]:
        """Return the success criteria and whether each is met; None for criteria not judged."""
        understood = self.state.phase_output(Phase.GOAL_UNDERSTANDING).get("success_criteria")
        criteria: list[str] = []
        if isinstance(understood, list) and understood:
            criteria = list(map(str, understood))
        elif self._live is not None:
            criteria = list(self._live.goal.success_criteria)
        judged: JsonValue = None
        if self.state.completion is not None:
            judged = as_object(self.state.completion.get("summary")).get("criteria_met")
        if not isinstance(judged, list) or len(judged) != len(criteria):
            return [(text, None) for text in criteria]
        verdicts: list[tuple[str, bool | None]] = []
        for text, met in zip(criteria, judged, strict=True):
            verdicts.append((text, None if met is None else bool(met)))
        return verdicts

    @property
    def plans(self) -> tuple[PlanProgress, ...]:
        """All plans, oldest first; the last is the current one."""
        plans = list[PlanProgress]()
        for plan in self.state.plans:
            if plan.task in self._superseded_steps:
                steps = self._superseded_steps[plan.task]
            else:
                steps = self._steps(plan)
            plans.append(PlanProgress(plan.number, self._created_at[plan.task], plan.reason, steps))
        return tuple(plans)

    @property
    def assumes_on_timeout(self) -> bool:
        """True if assumptions replace an answer that does not come in time."""
        settings: JsonObject = {}
        if self.run_opened is not None:
            settings = as_object(self.run_opened.settings)
        for name in ("planning", "replanning", "goal_understanding"):
            settings = as_object(settings.get(name))
        return settings.get("auto_assume_on_no_response") is not False

    def _descriptions(self) -> dict[str, str]:
        """Return the descriptions of the subtasks, by id; newer plans take precedence."""
        descriptions: dict[str, str] = {}
        for plan in self.state.plans:
            for subtask in plan.decomposition.subtasks:
                descriptions[subtask.id] = subtask.description
        return descriptions

    def _steps(self, plan: PlanVersion) -> tuple[PlanStep, ...]:
        live = self._live
        steps: list[PlanStep] = []
        descriptions = self._descriptions()
        for name, task in plan.tasks.items():
            if live is None or task not in live:  # the plan exists, but is not installed yet
                steps.append(PlanStep(name, descriptions.get(name, ""), done=False))
                continue
            entry = live.entry(TaskId(task))
            text = _step_text(live, name, entry, descriptions)
            steps.append(PlanStep(name, text, is_action_done(live, entry)))
        return tuple(steps)


def _step_text(live: LivePlan, name: str, entry: TaskEntry, descriptions: Mapping[str, str]) -> str:
    """Return the description of an action: its subtask's, or its purpose if it shares the subtask.

    For a list, it ends with the progress of the elements.
    """
    subtask = PlanningTask.of(entry.task).subtask or name
    texts = [entry.task.goal, descriptions.get(subtask)]
    if subtask == name:
        texts.reverse()
    text = next(filter(None, texts), "")
    if entry.is_expanded:
        text = f"{text} ({elements_text(live, entry)})".lstrip()
    return text


Output = TypeVar("Output", bound=BaseModel)


def progress_data(state: PlanningState, live: LivePlan) -> JsonObject:
    """Return the prompt variables on progress, remaining tasks, facts and unavailable tools."""
    entries: dict[str, TaskEntry] = {}
    if state.plan is not None:
        for name, task in state.plan.tasks.items():
            if task in live:
                entries[name] = live.entry(TaskId(task))
    if not entries:
        for entry in live:
            if is_action(entry.task) and not entry.removed:
                entries[str(entry.id)] = entry
    remaining: list[JsonValue] = []
    done = 0
    for name, entry in entries.items():
        current = _action_state(live, entry)
        if current in UNFINISHED:
            remaining.append({"task": name, **action_progress(live, entry)})
        done += is_action_done(live, entry)
    down: list[JsonValue] = []
    for name, reason in state.unavailable_tools.items():
        tool: JsonObject = {"name": name, "available": False}
        if reason:
            tool["reason"] = reason
        down.append(tool)
    progress: JsonObject = {}
    if entries:
        progress = {
            "done": done,
            "of": len(entries),
            "errors": state.errors,
            "errors_in_a_row": state.consecutive_errors,
        }
    facts: list[JsonValue] = [*live.world.facts]
    return {
        "progress": progress,
        "remaining": remaining,
        "state": facts,
        "tool_status": down,
    }


def validate_output(model: type[Output], output: JsonObject) -> Output:
    """Parse the output of a phase, ignoring fields that planning mode added, such as `unclear`."""
    known = {name: value for name, value in output.items() if name in model.model_fields}
    return model.model_validate(known, strict=False)


def executed_actions(live: LivePlan, state: PlanningState) -> list[JsonValue]:
    """Return the actions begun so far, with their outputs and errors, for a prompt."""
    executed: list[JsonValue] = []
    names = state.names
    for entry in live:
        if not is_action(entry.task):
            continue
        if entry.removed:
            continue
        if entry.template is not None:  # reported with its list
            continue
        failure = entry.log.failure
        if entry.state in WAITING and failure is None:
            continue  # it has not begun
        name = names.get(entry.id, entry.id)
        action: JsonObject = {"task": name, **action_progress(live, entry)}
        if entry.is_expanded:
            action.update(_outcomes_of_elements(live, entry))
        elif entry.output.value is not None:
            action["output"] = _shorten(entry.output.value)
        if failure is not None:
            action["error"] = _shorten(failure.message)
        executed.append(action)
    return executed


def remaining_actions(live: LivePlan, plan: PlanVersion) -> ActionPlan:
    """Return the actions of a plan that are not done."""
    done: set[str] = set()
    for name, task in plan.tasks.items():
        if task in live and is_action_done(live, live.entry(TaskId(task))):
            done.add(name)
    return plan.action_plan.without(done)


def elements_text(live: LivePlan, template: TaskEntry) -> str:
    """Return the progress of the elements of a list, such as `×40: 37 done, 3 running`."""
    report = report_elements(template, live, ())
    return f"×{report.total}: {report}"


def _action_state(live: LivePlan, entry: TaskEntry) -> TaskState:
    """Return the state of an action; for a list, the combined state of its elements."""
    if entry.is_expanded:
        return report_elements(entry, live, ()).state
    return entry.state


def action_progress(live: LivePlan, entry: TaskEntry) -> JsonObject:
    """Return the tool and state of an action, and the progress of its list, if it has one."""
    state = _action_state(live, entry).value
    progress: JsonObject = {"tool": tool_name(entry.task), "state": state}
    if entry.is_expanded:
        progress["elements"] = elements_text(live, entry)
    return progress


def element_output(live: LivePlan, element: TaskEntry) -> JsonValue:
    """Return the output of an element in the form shown to models; None until it is done."""
    if not is_action_done(live, element):
        return None
    try:
        return shown_form(live.results.output_of(element.id))
    except NoResult as error:
        return f"({error})"


def _outcomes_of_elements(live: LivePlan, template: TaskEntry) -> JsonObject:
    """Return the outputs of elements in list order, and the errors of those without output."""
    outputs: list[JsonValue] = []
    errors: list[JsonValue] = []
    for element in template.replacement.sinks:
        outputs.append(element_output(live, element))
        if is_action_done(live, element):
            continue
        for part in (element, *live.parts_of(element)):
            if part.log.failure is not None:
                errors.append(f"{part.id}: {part.log.failure.message}")
    outcomes: JsonObject = {"output": _shorten(outputs)}
    if errors:
        more = len(errors) - _MAX_ELEMENT_ERRORS
        shown = errors[:_MAX_ELEMENT_ERRORS]
        if more > 0:
            shown.append(f"and {more} more")
        outcomes["error"] = _shorten(shown)
    return outcomes


def action_data(task: Task, name: str, chosen: JsonObject | None = None) -> JsonObject:
    """Return an action for a prompt, with the arguments chosen when its attempt began."""
    arguments = dict(planned_arguments(task))
    if chosen is not None:
        arguments.update(chosen)
    data: JsonObject = {
        "id": name,
        "tool": tool_name(task),
        "purpose": task.goal,
        "arguments": arguments,
        "expected_outcome": PlanningTask.of(task).expected_outcome,
    }
    if task.scope is not None and "item" in task.scope:
        data["element"] = {"key": task.scope["key"], "item": task.scope["item"]}
    return {key: value for key, value in data.items() if value}


def _shorten(value: JsonValue) -> str:
    text = value if isinstance(value, str) else repr(value)
    return truncate_text(text, 8_000)

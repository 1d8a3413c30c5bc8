"""Proposals: alternatives, analysed once; the checks that they must pass; and their confidence.

Each check returns why a proposal is rejected, or an empty text. The reasons are recorded, and shown
to providers and people.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from replanning.changes import (
    AbortRun,
    Alternative,
    ModifyTask,
    PlanChange,
    ReplaceTask,
    RetryTask,
    TaskArguments,
    change_arguments,
    changes_hash,
    target_task_ids,
)
from replanning.decision.ledger import Ledger, source_key
from replanning.decision.masks import MaskRestorer
from replanning.errors import ExpressionError, Problem
from replanning.journal.records import ContextChanged, GoalUnreachable, Score, Trigger
from replanning.live.draft import Draft
from replanning.live.entries import SKIPPED_BY_CONDITION, TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import FINISHED, STUCK, WAITING, TaskState
from replanning.live.strips import ground_action
from replanning.live.view import DraftView, PlanView, TaskView, strips_problem
from replanning.llm.quoting import is_truncated
from replanning.plan.checks import nested_bodies, secret_name_problems
from replanning.plan.json_values import is_redacted, iter_strings
from replanning.plan.messages import join_names, pluralise
from replanning.plan.parameters import PARAMETERS
from replanning.plan.references import find_references
from replanning.plan.risk import resolved_risk
from replanning.plan.tasks import Task, is_same_call, share_capability
from replanning.plan.types import JsonValue, TaskId
from replanning.secrets import MASK, Redactor
from replanning.settings import AlternativeSettings, LimitSettings, Weights

INFEASIBLE: Final = "the plan could not be executed"
"""Prefix by which the generator recognises proposals that only the facts forbid.

It has them completed. Do not use it in other reasons.
"""

_NO_LONGER_WAITING: Final = FINISHED | {TaskState.RUNNING}
"""States of tasks that have begun, or never will."""

_MAX_PROBLEMS: Final = 5
"""Number of problems that one reason names."""


NEUTRAL_SCORE = 0.5
"""Score without evidence."""

PRIOR_WEIGHT = 10
"""Number of outcomes of a source after which they count as much as its self-assessment."""

OutcomeHistory = Callable[[str], Sequence[bool]]
"""Returns the last outcomes of a tool, or else of its capability.

With a `source_key`, those of a source's alternatives.
"""

CostComparison = Callable[[Sequence[Task], Sequence[Task], PlanView, float], float]
"""Compares the costs of two paths, as `PlanEvaluator.compare` does."""


class Proposal(NamedTuple):
    """An alternative, analysed for one version of the plan.

    Every check needs the tasks and arguments in the changes, and the tasks that would run. They are
    computed here once, and are out of date as soon as the plan has another version.

    Attributes:
        proposed: the alternative as its provider made it.
        alternative: the part to consider: without changes of tasks that have begun meanwhile, and
            with true values instead of masks.
        changes: the changes of `alternative`.
        name_problems: names in the changes that look like secrets. Names are never masked, and
            alternatives are on record even if they are rejected, so `changes` is empty then.
        mask_problems: why secrets of earlier tasks do not return to the new ones.
        targets: the existing tasks that the changes concern, in order.
        entries: the targets that the plan has.
        arguments: the arguments in the changes.
        draft: the changes, staged on the plan.
        after: a view of the plan with the changes; do not read it if they do not fit.
        tasks_to_run: the tasks that would run because of the changes; empty if they do not fit.
        live: the plan.
        view: the plan, for reading.
        version: the version of the plan for which all of this holds.
    """

    proposed: Alternative
    alternative: Alternative
    changes: tuple[PlanChange, ...]
    name_problems: tuple[Problem, ...]
    mask_problems: tuple[str, ...]
    targets: tuple[TaskId, ...]
    entries: tuple[TaskEntry, ...]
    arguments: tuple[TaskArguments, ...]
    draft: Draft
    after: DraftView
    tasks_to_run: tuple[Task, ...]
    live: LivePlan
    view: PlanView
    version: int

    @property
    def fingerprint(self) -> str:
        """Hash of `changes`, for duplicates in one round and for declined changes.

        What was tried is looked up by the hash with the originals.
        """
        return changes_hash(self.changes)


def analyse(
    proposed: Alternative, live: LivePlan, redactor: Redactor, *, asked_at: float
) -> Proposal:
    """Return a proposal for the plan as it is now.

    Args:
        proposed: the alternative.
        live: the plan.
        redactor: recognises names that look like secrets, and masks.
        asked_at: time of the request in seconds since the epoch; what has begun since is left out.
    """
    # Begun, or skipped by a false condition.
    settled_meanwhile: set[TaskId] = set()
    targets = target_task_ids(proposed.changes)
    entries = _known_entries(targets, live)
    for target in entries:
        if target.state in _NO_LONGER_WAITING:
            has_begun = target.log.count or target.condition_revision in SKIPPED_BY_CONDITION
            if has_begun and target.log.started_at >= asked_at:
                settled_meanwhile.add(target.id)
    alternative = proposed
    if settled_meanwhile:
        alternative = _without_settled(proposed, settled_meanwhile)

    name_problems = secret_name_problems(alternative.changes, redactor)
    if name_problems:
        alternative = alternative.model_copy(update={"changes": ()})

    arguments = tuple(change_arguments(alternative.changes))
    # Providers see masks in place of secrets, and repeat them.
    is_masked = False
    for _, value in arguments:
        is_masked = is_masked or is_redacted(value)
    modifies = False
    for change in alternative.changes:
        modifies = modifies or change.kind == "modify"
    mask_problems: list[str] = []
    # A modify that swaps the tool would hand the task's secrets to it unmasked.
    if is_masked or modifies:
        masks = MaskRestorer(alternative.changes, live, redactor)
        mask_problems += masks.check_moved_tools()
        if is_masked:
            alternative = alternative.model_copy(update={"changes": masks.restore()})
            arguments = tuple(change_arguments(alternative.changes))
            if any(is_redacted(value) for _, value in arguments):
                mask_problems += masks.problems

    changes = tuple(alternative.changes)
    if alternative is not proposed:
        targets = target_task_ids(changes)
        entries = _known_entries(targets, live)
    draft = Draft(live, changes)
    after = DraftView(live, draft)
    run: list[Task] = []
    # Changes that do not fit may name tasks that do not exist.
    if not draft.problems:
        run = tasks_to_run(changes, after)

    return Proposal(
        proposed=proposed,
        alternative=alternative,
        changes=changes,
        name_problems=tuple(name_problems),
        mask_problems=tuple(mask_problems),
        targets=targets,
        entries=tuple(entries),
        arguments=arguments,
        draft=draft,
        after=after,
        tasks_to_run=tuple(run),
        live=live,
        view=PlanView(live),
        version=live.version,
    )


def _known_entries(task_ids: Iterable[TaskId], live: LivePlan) -> list[TaskEntry]:
    """Return the entries of those tasks that the plan has."""
    return [live.entries[task_id] for task_id in task_ids if task_id in live.entries]


def tasks_to_run(changes: Sequence[PlanChange], after: DraftView) -> list[Task]:
    """Return the tasks that will run because of changes, as the changes leave them.

    Args:
        changes: the changes.
        after: the plan with these changes.
    """
    tasks: dict[TaskId, Task] = {}
    for change in changes:
        match change.kind:
            case "replace":
                tasks.pop(change.task_id, None)
                for task in change.tasks:
                    tasks[task.id] = task
            case "add":
                tasks[change.task.id] = change.task
            case "retry" | "modify":
                # Other changes of the same alternative may make or modify the task.
                tasks[change.task_id] = after.task(change.task_id).task
            case "remove" | "skip" | "cancel":
                tasks.pop(change.task_id, None)
    return list(tasks.values())


def _without_settled(proposed: Alternative, settled: Collection[TaskId]) -> Alternative:
    """Return an alternative without the changes of tasks that are settled meanwhile.

    It is returned as it is if one of its changes does more than replace, modify, skip or retry one
    task, because such changes belong together, or if nothing would be left.
    """
    rest = []
    for change in proposed.changes:
        if change.kind not in ("replace", "modify", "skip", "retry"):
            return proposed
        if change.task_id not in settled:
            rest.append(change)
    if not rest:
        return proposed
    update = {
        "changes": tuple(rest),
        "reason": f"{proposed.reason} (without what has begun meanwhile)",
        # The estimate was made for all of the changes.
        "expected_cost": None,
    }
    return proposed.model_copy(update=update)


# Checks of the changes alone


def check_changes(
    proposal: Proposal,
    tried: Collection[str],
    triggers: Sequence[Trigger],
    ledger: Ledger,
    limits: LimitSettings,
) -> str:
    """Return why changes are rejected in any plan; empty if they are not.

    What is wrong with the changes themselves comes first, then the history of the run, then the
    plan as they would leave it. Each check relies on those before it: later ones look at tasks that
    only changes that fit have.

    Args:
        proposal: the proposal.
        tried: hashes of the changes that were applied before for these lineages.
        triggers: the reasons for replanning.
        ledger: knows the tasks that others stand for, and what was declined and applied.
        limits: of replans.
    """
    return (
        check_content(proposal)
        or check_repeats(proposal, tried, triggers, ledger)
        or check_limits(proposal, limits, ledger)
        or check_fits_plan(proposal)
        or check_futile_calls(proposal)
    )


def check_content(proposal: Proposal) -> str:
    """Reject changes that no plan could take.

    They (1) carry names that look like secrets, (2) would send a secret to another tool or address,
    (3) are empty, or (4) hold a mask or cut mark that the original task did not have: the tool
    would receive it literally.

    An alternative without changes may be the verdict that the goal is unreachable.
    """
    if proposal.name_problems:
        return "; ".join(map(str, proposal.name_problems[:_MAX_PROBLEMS]))
    if proposal.mask_problems:
        return "; ".join(proposal.mask_problems[:_MAX_PROBLEMS])
    if not proposal.changes:
        return proposal.alternative.unreachable or "it changes nothing"

    masked: list[tuple[TaskId, list[str]]] = []
    for task_id, arguments in proposal.arguments:
        texts = _masked_texts(arguments)
        if texts:
            masked.append((task_id, texts))
    if not masked:
        return ""
    original: set[str] = set()
    for entry in proposal.entries:
        for _, body in nested_bodies(entry.task):
            original.update(_masked_texts(body.arguments))
    names: dict[str, None] = {}
    for task_id, texts in masked:
        if not original.issuperset(texts):
            names[repr(task_id)] = None
    if not names:
        return ""
    advice = f"do without them in the arguments of {', '.join(names)}"
    return f"{MASK} and [cut: …] stand for text that is not shown: {advice}"


def _masked_texts(arguments: JsonValue) -> list[str]:
    texts = []
    for text in iter_strings(arguments):
        if MASK in text or is_truncated(text):
            texts.append(text)
    return texts


def check_repeats(
    proposal: Proposal, tried: Collection[str], triggers: Sequence[Trigger], ledger: Ledger
) -> str:
    """Reject changes that were applied before, whatever their outcome, or that a person declined.

    Single calls that must fail again are rejected by `check_futile_calls`; `PathGenerator.rank`
    rejects duplicates within one round.

    Args:
        proposal: the proposal.
        tried: hashes of the changes that were applied before for these lineages.
        triggers: the reasons for replanning.
        ledger: knows the tasks that others stand for, and what was declined.
    """
    # A retry may succeed where the last one failed.
    if tried and not all(isinstance(change, RetryTask) for change in proposal.changes):
        # Redoing a finished task is no repetition: it reads newer context values.
        is_redone = any(entry.state is TaskState.DONE for entry in proposal.entries)
        if not is_redone and changes_hash(proposal.changes, ledger.lineages.originals) in tried:
            return "the same was tried before and did not help"

    declined = ledger.questions.declined_at
    if not declined:
        return ""
    declined_at = declined.get(proposal.fingerprint)
    if declined_at is None:
        return ""
    # Only a goal-unreachable trigger merely repeats the situation the person decided on. Any other
    # trigger, or an attempt since, is new information: ask again.
    for trigger in triggers:
        if trigger.kind != "goal-unreachable":
            return ""
    for entry in proposal.entries:
        if entry.log.started_at > declined_at:
            return ""
    return "a person was asked about the same already"


def check_limits(proposal: Proposal, limits: LimitSettings, ledger: Ledger) -> str:
    """Reject changes beyond the limits of replans.

    They are checked before providers are asked as well, but a person may have approved a change
    since then.
    """
    per_run = limits.replans_per_run
    if per_run is not None and ledger.applied_count >= per_run:
        return f"the limit of {pluralise(per_run, 'replan')} per run is reached"
    for task_id in proposal.targets:
        root = task_id
        entry = proposal.live.entries.get(task_id)
        if entry is not None:
            root = entry.root
        if ledger.lineages.replans.get(root, 0) >= limits.replans_per_lineage:
            limit = pluralise(limits.replans_per_lineage, "replan")
            return f"the limit of {limit} per lineage is reached for {root!r}"
    return ""


# Checks against the plan


def check_fits_plan(proposal: Proposal) -> str:
    """Reject changes that do not fit the current plan.

    They cannot be staged, or the agent that made a call would wait for it in vain, or a task would
    run with an unavailable tool, or give a secret to a tool that no task gives it to.
    """
    problems = proposal.draft.problems
    if problems:
        return "it does not fit the plan: " + "; ".join(map(str, problems[:_MAX_PROBLEMS]))

    reserved = proposal.live.scheduler.queue.reserved
    left_out: list[TaskId] = []
    keeps_tool: set[TaskId] = set()
    for change in proposal.changes:
        if change.kind == "remove":
            if change.task_id in reserved:
                left_out.append(change.task_id)
        elif change.kind == "modify":
            if "tool" not in change.fields:
                keeps_tool.add(change.task_id)
    if left_out:
        names = join_names(left_out, _MAX_PROBLEMS)
        return f"a caller waits for the result of {names}, which it leaves out"

    for task in proposal.tasks_to_run:
        # It would wait for its tool with or without this change.
        if task.id in keeps_tool:
            continue
        tool = proposal.view.tool(task.tool)
        # The caller's own functions need no description, and are always available.
        if tool is not None and not tool.available:
            return f"the tool {tool.name!r} is unavailable"
    return _misplaced_secret(proposal)


def _misplaced_secret(proposal: Proposal) -> str:
    """Return why a secret parameter would go to another tool; empty if none would.

    The tasks of the plan show which tools may get it; a model may be talked into more.
    """
    live = proposal.live
    secrets = {name for name, each in live.plan.parameters.items() if each.secret}
    if not secrets:
        return ""
    receivers: dict[str, list[str | None]] = {}
    for entry in live:
        for tool, name in _given_parameters(entry.task):
            receivers.setdefault(name, []).append(tool)
    for task in proposal.tasks_to_run:
        for tool, name in _given_parameters(task):
            if name not in secrets:
                continue
            known = receivers.get(name, [])
            if not any(share_capability(one, tool, live.tools) for one in known):
                return f"the secret parameter {name!r} does not go to {tool!r} in {task.id!r}"
    return ""


def _given_parameters(task: Task) -> Iterator[tuple[str | None, str]]:
    """Yield the tools of a task and its fallbacks with the parameters that they are given."""
    for _, body in nested_bodies(task):
        for reference in find_references(body.arguments):
            if reference.root == PARAMETERS:
                yield body.tool or task.tool, str(reference.path[0])


def check_futile_calls(proposal: Proposal) -> str:
    """Reject calls that must fail, because the same call failed or was refused before.

    So are modifications of a task that has failed, if nothing has it run again.

    Whole sets of changes that were applied before are rejected by `check_repeats`.

    If a tool reads the goal of a task, a call for another goal is another call: parts of a task in
    prose differ only by their goals.

    A failed call may be repeated if another new task runs first, or if a fact that it needs was
    made true since. One that was refused as dangerous may be, if its arguments have other values.
    One whose secret a resumed run lacks may not be, until the secret is there again.
    """
    view = proposal.view
    for change in proposal.changes:
        if isinstance(change, ModifyTask):
            reason = _modified_in_vain(change.task_id, proposal.draft)
            if reason:
                return reason
        if isinstance(change, RetryTask):
            reason = _refused_again(view.task(change.task_id), view)
            if reason:
                return reason
        if not isinstance(change, ReplaceTask):
            continue
        # The others run after a new task, which may remove the cause of the failure.
        new = {task.id for task in change.tasks}
        first = [task for task in change.tasks if task.tool and new.isdisjoint(task.depends_on)]
        if not first:
            continue
        for old in view.lineage(change.task_id):
            if old.failure is None:
                continue
            for task in first:
                is_repeated = is_same_call(task, old.task, view.tool(task.tool))
                if is_repeated and task.metadata == old.task.metadata:
                    reason = _repeated_failure(old, old.failure.kind, task, view)
                    if reason:
                        return reason
                    break
    if proposal.live.masked:
        return _lost_secret(proposal)
    return ""


def _modified_in_vain(task_id: TaskId, draft: Draft) -> str:
    """Return why modifying a task does not help; empty if it may."""
    if draft.state(task_id) is not TaskState.FAILED:
        return ""
    # The plan may succeed without it now.
    if draft.task(task_id).optional:
        return ""
    return f"{task_id!r} has failed, and modifying it does not run it again: retry it as well"


def _lost_secret(proposal: Proposal) -> str:
    """Return why a failed or new task would lack a secret; empty if none would."""
    lineage: list[TaskEntry] = []
    for entry in proposal.entries:
        lineage += entry.lineage()
    for task in proposal.tasks_to_run:
        known = proposal.live.entries.get(task.id)
        # A task that waits would fail in the same way without these changes.
        if known is not None and known.state not in STUCK:
            continue
        lost = proposal.live.masked.problem_of(task, lineage)
        if lost:
            return f"{task.id!r} cannot run: {lost}"
    return ""


def _repeated_failure(old: TaskView, kind: str, new: Task, view: PlanView) -> str:
    """Return why a call that failed would fail again; empty if it might succeed."""
    if kind == "refused":
        return _refused_again(old, view)
    # With another time limit, the same call may be in time.
    if kind == "timeout" and new.timeout != old.task.timeout:
        return ""
    tool = view.tool(old.task.tool)
    if tool is not None:
        for fact in ground_action(tool, old.task.arguments).requires:
            if view.made_true_since(fact, old.id):
                return ""
    return f"{old.id!r} has failed with the same tool and arguments"


def _refused_again(task: TaskView, view: PlanView) -> str:
    """Return why a call that was refused would be refused again.

    Empty if it was not refused, or if its arguments have harmless values now.
    """
    if task.failure is None or task.failure.kind != "refused":
        return ""
    tool = view.tool(task.task.tool)
    if tool is None:
        return ""
    try:
        harm = resolved_risk(tool, task.task.arguments, view.arguments(task.id))
    except ExpressionError as error:
        harm = str(error)
    if not harm:
        return ""
    return f"the use of {tool.name!r} for {task.id!r} would be refused again: {harm}"


def check_feasible(proposal: Proposal, triggers: Sequence[Trigger]) -> str:
    """Reject changes that leave a plan unable to run, or to reach its goal.

    Only a plan that states its facts can be checked. Faults elsewhere, which have nothing to do
    with the triggers, are not held against the changes.
    """
    live = proposal.live
    # A run that ends need not reach its goal.
    for change in proposal.changes:
        if isinstance(change, AbortRun):
            return ""
    named: set[TaskId] = set()
    lost: set[str] = set()
    # Triggers about one part of the plan allow faults in another part.
    is_local = False
    for trigger in triggers:
        named.update(trigger.tasks)
        if isinstance(trigger, ContextChanged):
            lost.update(trigger.facts)
            if trigger.goal:
                is_local = True
        elif isinstance(trigger, GoalUnreachable):
            lost.update(trigger.missing_facts)
    if named:
        is_local = True

    world = strips_problem(live, proposal.draft, tasks=named, facts=lost)
    after = world.feasibility()
    if after.valid:
        return ""
    # The same part of the plan, as it is without the changes, shows which faults are old.
    concerned = [*named, *(step.id for step in world.steps)]
    before = strips_problem(live, tasks=concerned, facts=lost).feasibility()
    elsewhere: set[TaskId] = set()
    if is_local:
        elsewhere = {step.id for step in before.stuck} - named
    remaining = after.excluding(elsewhere, frozenset(before.missing_goal_facts) - lost)
    if remaining.valid:
        return ""
    return f"{INFEASIBLE}: {remaining.explain()}"


def check_saving(proposal: Proposal, min_gain: float, compare: CostComparison) -> str:
    """Reject a path that is hardly cheaper, if the plan could continue as it is."""
    saving = relative_saving(proposal.draft, proposal.live, compare)
    if saving <= 0 or saving < min_gain:
        return f"it saves {saving:.0%} of the remaining cost, which is too little"
    return ""


def seeks_better_path(triggers: Sequence[Trigger]) -> bool:
    """Return whether the plan could continue as it is, so that only a cheaper one is sought."""
    for trigger in triggers:
        if trigger.kind != "better-path-found":
            return False
    return True


def relative_saving(draft: Draft, live: LivePlan, compare: CostComparison) -> float:
    """Return the share of the remaining cost that staged changes save.

    It is negative if they make the plan more expensive. Only what they change is compared, because
    everything else costs the same with and without them.
    """
    unfinished = (*WAITING, *STUCK)
    before: list[Task] = []
    after: list[Task] = []
    for task_id in dict.fromkeys([*draft.states, *draft.tasks]):
        entry = live.entries.get(task_id)
        if entry is not None and entry.state in unfinished:
            before.append(entry.task)
        if draft.state(task_id) in unfinished:
            after.append(draft.task(task_id))
    view = PlanView(live)
    remaining = view.remaining_cost
    if not remaining:
        # If nothing is left to do, the cost is compared with the cost of one task.
        remaining = 1.0
    return compare(before, after, view, remaining)


# Confidence


@dataclass(repr=False, eq=False)
class ConfidenceScorer:
    """Scores alternatives as the weighted sum of four parts, each from 0 to 1.

    0.4 self-assessment + 0.3 past success + 0.2 availability + 0.1 simplicity. Subclasses may
    override both methods: `AlternativeGenerator(providers, scorer=…)`.

    Args:
        weights: other weights; they sum to 1.
        shrink: draw a self-assessment towards the past success of its source; see
            `shrink_confidence`.
    """

    weights: Weights = field(default_factory=Weights)
    shrink: bool = field(default=False, kw_only=True)

    def score(
        self,
        alternative: Alternative,
        view: PlanView,
        past: OutcomeHistory,
        *,
        time_left: float | None = None,
        tasks: Collection[TaskId] = (),
        run: Sequence[Task] | None = None,
    ) -> Score:
        """Return the score of an alternative on the current plan.

        Past success is the Laplace-smoothed share of successes, averaged over the tools that have a
        history. Availability is the share of the needed tools and resources that are available.
        Simplicity is 1 divided by the number of tasks added, removed and changed, where the repairs
        of several failed tasks count once: together they are as simple as one after another.

        Args:
            alternative: the alternative.
            view: the plan.
            past: finds earlier outcomes of a tool, and of a source's alternatives.
            time_left: seconds that remain of the budget, if it limits them.
            tasks: the tasks for which alternatives are sought.
            run: the tasks that will run because of it, where that is known.

        Returns:
            The total from 0 to 1, rounded to 6 digits, and its parts.
        """
        own = alternative.confidence
        if own is None:
            own = NEUTRAL_SCORE
        if self.shrink and alternative.source:
            own = shrink_confidence(own, past(source_key(alternative.source)))

        if run is None:
            changes = alternative.changes
            run = tasks_to_run(changes, view.with_changes(changes))
        tools: dict[str, None] = {}
        for task in run:
            if task.tool:
                tools[task.tool] = None
        rates = []
        for name in tools:
            outcomes = past(name)
            if outcomes:
                rates.append((sum(outcomes) + 1) / (len(outcomes) + 2))
        success = NEUTRAL_SCORE
        if rates:
            success = sum(rates) / len(rates)

        available = []
        for name in tools:
            tool = view.tool(name)
            # The caller's own functions need no description, and count as available.
            available.append(tool is None or tool.available)
        demand: dict[str, float] = {}
        for task in run:
            for name, amount in view.demand(task).items():
                demand[name] = max(demand.get(name, 0.0), amount)
        for name, amount in demand.items():
            available.append(view.capacity.get(name, 0.0) >= amount)
        availability = 1.0
        if available:
            availability = sum(available) / len(available)
        expected = alternative.expected_duration
        if time_left is not None and expected:
            # Work that takes longer than the remaining budget is available in part only.
            availability *= min(1.0, max(0.0, time_left / expected))

        touched = 0
        changed: set[TaskId] = set()
        for change in alternative.changes:
            match change.kind:
                case "replace":
                    changed.add(change.task_id)
                    touched += len(change.tasks) - 1
                case "add" | "reorder" | "abort":
                    touched += 1
                case _:
                    # One that is modified and then retried is one task.
                    changed.add(change.task_id)
        touched += len(changed)
        repaired = set(tasks).intersection(target_task_ids(alternative.changes))
        if repaired:
            touched -= len(repaired) - 1
        simplicity = 1 / max(1, touched)

        weights = self.weights
        total = weights.self_assessment * own
        total += weights.past_success * success
        total += weights.availability * availability
        total += weights.simplicity * simplicity
        # Rounded, so that sums in another order do not rank equal alternatives differently.
        return Score(round(total, 6), own, success, availability, simplicity)

    def compare(self, one: Score, other: Score) -> int:
        """Return a negative number, zero or a positive number if `one` is worse, equal or better.

        Alternatives are ranked by it, except for better paths, which are ranked by what they save.
        """
        return (one.total > other.total) - (one.total < other.total)


def shrink_confidence(own: float, outcomes: Sequence[bool]) -> float:
    """Return a self-assessment, drawn towards the past success of its source.

    With n outcomes, s of them good, that is (10 x own + n x earned) / (10 + n), where
    earned = (s + 1) / (n + 2): without outcomes nothing changes, after ten both count equally.
    """
    count = len(outcomes)
    earned = (sum(outcomes) + 1) / (count + 2)
    weighted = PRIOR_WEIGHT * own + count * earned
    return round(weighted / (PRIOR_WEIGHT + count), 6)


def check_confidence(proposal: Proposal, score: Score, settings: AlternativeSettings) -> str:
    """Reject an alternative that its own source or the score considers unlikely to help."""
    own = proposal.alternative.confidence
    if own is not None and own < settings.min_llm_confidence:
        return f"its own confidence {own:g} is below {settings.min_llm_confidence:g}"
    if score.total < settings.min_confidence:
        return f"confidence {score.total:.2f} is below {settings.min_confidence:g}"
    return ""

"""The planning history of what the command line solves: written beside the store, and read for issues come back to."""

from __future__ import annotations

from replanning import Environment, PlanRun, Settings
from replanning._errors import NotRunning, Problem, SettingsError, StoreError
from replanning._ids import RunId
from replanning._opening import redactor_for
from replanning._redaction import Redactor
from replanning.cli._output import print_message
from replanning.events import RunOpened
from replanning.interfaces import JsonObject, RunStore
from replanning.planning import PlanningHistoryExporter, PlanningHistoryStore, TaskRequest, request_of

_MAX_OBJECTIVE_CHARS = 100
"""Characters of another run's goal that are told."""

_UNFINISHED_STATUSES = ("paused", "needs_human", "running")


def create_history_exporter(settings: Settings) -> PlanningHistoryExporter:
    """Writes the planning history of runs where the settings say."""
    return PlanningHistoryExporter(PlanningHistoryStore(settings.planning.history.directory))


def with_past_executions(request: TaskRequest, settings: Settings) -> TaskRequest:
    """A request with what was planned and done before about the same issue (J1)."""
    if not request.issue_id or request.earlier:
        return request
    try:
        past = PlanningHistoryStore(settings.planning.history.directory).get_past_executions_for_issue(request.issue_id)
    except StoreError as error:
        print_message(f"note: nothing is known of earlier runs of {request.issue_id}: {error}")
        return request
    return request.model_copy(update={"earlier": tuple(past)})


def find_unfinished_run(request: TaskRequest, settings: Settings, store: RunStore) -> str | None:
    """The last run of the same issue, where it is not finished: its plan is continued, and not made again (F11)."""
    if not request.issue_id:
        return None
    known = {str(info.run): info.status for info in store.runs()}
    past = [str(one["task_uuid"]) for one in with_past_executions(request, settings).earlier]
    last = next((run for run in reversed(past) if run in known), None)
    return last if last is not None and known[last] in _UNFINISHED_STATUSES else None


def check_continuable(run_id: str, request: TaskRequest, settings: Settings, store: RunStore) -> None:
    """Take a run that is to be continued for what is wanted only where it is about that (F11).

    Raises:
        SettingsError: there is a run of that name, and it is about something else.
        NotRunning: it was given up, and nothing more will come of it.
    """
    info = next((info for info in store.runs() if info.run == run_id), None)
    if info is None:
        return
    opened = next(iter(store.read(RunId(run_id)))).body
    if not isinstance(opened, RunOpened):
        return
    known, redactor = request_of(opened.plan), redactor_for(settings)  # what is kept of a goal holds no secrets
    if known is not None and _is_same_request(known, request, redactor):
        if info.status == "aborted":
            ways = f"another --run-id solves the goal anew; `replanning why {run_id}` says what was in the way"
            raise NotRunning(f"run {run_id!r} is over: it was aborted; {ways}")
        return
    about = f"{opened.plan.goal.objective[:_MAX_OBJECTIVE_CHARS]!r}{'' if known else ', and no run of planning mode'}"
    ways = f"`replanning resume {run_id}` goes on with it, another --run-id begins another run"
    raise SettingsError([Problem("--run-id", f"there is a run {run_id!r} already, about {about}: {ways}")])


def _is_same_request(known: TaskRequest, wanted: TaskRequest, redactor: Redactor) -> bool:
    same_issue = bool(known.issue_id) and known.issue_id == wanted.issue_id
    return same_issue or redactor.text(known.goal.objective) == redactor.text(wanted.goal.objective)


def record_completion(run: PlanRun, settings: Settings, store: RunStore, environment: Environment) -> None:
    """Say that a run is over whose journal is not kept, since nobody can go on with it."""
    request = request_of(run.live.plan)
    if store.durable or run.result.status in ("succeeded", "failed", "aborted") or request is None:
        return
    history = PlanningHistoryStore(
        settings.planning.history.directory,
        task_uuid=run.id,
        issue_id=request.issue_id,
        environment=environment,
    )
    said: JsonObject = {"phase": "completion", "status": "planned" if history.has_plan() else "given_up"}
    try:
        history.save_completion({**said, "result": run.result.status, "reason": run.result.reason})
    except StoreError as error:
        print_message(f"note: {error}")

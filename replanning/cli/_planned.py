"""The planning history of what the command line solves: written beside the store, and read for issues come back to."""

from __future__ import annotations

from replanning import Environment, PlanRun, Settings
from replanning._errors import StoreError
from replanning.cli._output import say
from replanning.interfaces import JsonObject, RunStore
from replanning.planning import PlanningHistoryExporter, PlanningHistoryStore, TaskRequest, request_of

_GOES_ON = ("paused", "needs_human", "running")


def history_of(settings: Settings) -> PlanningHistoryExporter:
    """Writes the planning history of runs where the settings say."""
    return PlanningHistoryExporter(PlanningHistoryStore(settings.planning.history.directory))


def with_earlier(request: TaskRequest, settings: Settings) -> TaskRequest:
    """A request with what was planned and done before about the same issue (J1)."""
    if not request.issue_id or request.earlier:
        return request
    try:
        past = PlanningHistoryStore(settings.planning.history.directory).get_past_executions_for_issue(request.issue_id)
    except StoreError as error:
        say(f"note: nothing is known of earlier runs of {request.issue_id}: {error}")
        return request
    return request.model_copy(update={"earlier": tuple(past)})


def unfinished(request: TaskRequest, settings: Settings, store: RunStore) -> str | None:
    """The last run of the same issue, where it is not finished: its plan is continued, and not made again (F11)."""
    if not request.issue_id:
        return None
    known = {str(info.run): info.status for info in store.runs()}
    past = [str(one["task_uuid"]) for one in with_earlier(request, settings).earlier]
    last = next((run for run in reversed(past) if run in known), None)
    return last if last is not None and known[last] in _GOES_ON else None


def conclude(run: PlanRun, settings: Settings, store: RunStore, environment: Environment) -> None:
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
        say(f"note: {error}")

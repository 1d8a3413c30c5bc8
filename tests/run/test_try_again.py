"""Failed tasks are tried again under the id of their run, once the cause was removed outside of the plan."""

from contextlib import closing
from pathlib import Path

import pytest

from replanning import Answer, PlanRun, ReplanningEngine, Task, TaskContext
from replanning.changes import ReplaceTask
from replanning.errors import ChangeRejected, NotRunning, UnknownTask
from replanning.journal import (
    AttemptStarted,
    InboxMessage,
    MemoryStore,
    PlanRevised,
    RunStore,
    SqliteStore,
)
from replanning.plan import RunId, TaskId
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.runs import again, bodies, chain, make_engine, perform, plan

RUN = RunId("run-1")


class Services:
    """Work that counts its calls, and fails where a service is down or loses its answers."""

    def __init__(self, *down: str, lost: tuple[str, ...] = ()) -> None:
        self.down = set(down)
        self.lost = set(lost)
        self.calls: list[str] = []

    async def __call__(self, task: Task, context: TaskContext) -> str:
        """Do the work of a task."""
        self.calls.append(task.id)
        if task.id in self.down:
            raise ValueError(f"{task.id} is down")
        if task.id in self.lost:
            raise ConnectionResetError("the answer was lost")
        return task.id

    def repair(self) -> None:
        """Have every service work."""
        self.down.clear()
        self.lost.clear()


def states(run: PlanRun) -> dict[str, str]:
    """The states of all tasks."""
    return {entry.id: str(entry.state) for entry in run.live}


def engine_without_questions() -> ReplanningEngine:
    """An engine that does not replan."""
    return make_engine(enabled=False)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RunStore:
    """A store of each kind."""
    if request.param == "memory":
        return MemoryStore()
    return SqliteStore(tmp_path / "runs.db")


# Under the same id


async def test_a_failed_run_goes_on(store: RunStore) -> None:
    """Failed tasks are tried again as one edit by a person; what is finished is not repeated."""
    work = Services("b", "c")
    whole = plan(
        Task(id="a"),
        Task(id="b", depends_on=("a",)),
        Task(id="c", depends_on=("a",)),
        Task(id="d", depends_on=("b", "c")),
    )
    with closing(store):
        engine = make_engine(store=store)
        assert (await engine.execute(whole, work, run_id=RUN)).status == "failed"
        work.repair()
        async with engine.resume(RUN) as run:
            assert run.retry(by="eve") == 1
            assert states(run) == {"a": "DONE", "b": "READY", "c": "READY", "d": "PENDING"}
            await perform(run, work)
        assert (run.result.run, run.result.status) == (RUN, "succeeded")
        assert work.calls == ["a", "b", "c", "b", "c", "d"]
        (revised,) = bodies(store, RUN, PlanRevised)
        assert (revised.by, revised.reason) == ("eve", "try 'b', 'c' again")
        edits = [entry for entry in engine.history(RUN).entries if entry.by == "eve"]
        assert [entry.after for entry in edits] == [1]


async def test_left_for_whoever_goes_on(store: RunStore) -> None:
    """Without a process at the run, its failed tasks are tried again by the one that resumes it."""
    work = Services("b")
    with closing(store):
        engine = make_engine(store=store)
        await engine.execute(chain("a", "b"), work, run_id=RUN)
        work.repair()
        correction = engine.retry(RUN, by="eve", reason="the service is back")
        assert '+ b: depends_on: ["a"] [PENDING]' in correction.diff
        # A second message finds nothing to do.
        engine.retry(RUN, by="bob")
        result = await engine.execute(chain("a", "b"), work, run_id=RUN)
        assert (result.status, work.calls) == ("succeeded", ["a", "b", "b"])
        (revised,) = bodies(store, RUN, PlanRevised)
        assert (revised.by, revised.reason) == ("eve", "the service is back")
        assert result.problems == ()


async def test_while_the_run_is_open() -> None:
    """A run that is open in the engine tries its failed tasks again at once."""
    engine = engine_without_questions()
    work = Services("a")
    async with engine.open(plan(Task(id="a"), Task(id="b")), run_id=RUN) as run:
        pulled = run.ready()
        first = await anext(pulled)
        async with run.attempt(first) as attempt:
            await work(first, attempt.context)
        engine.retry(RUN, by="eve")
        assert states(run) == {"a": "READY", "b": "READY"}


async def test_nothing_has_failed() -> None:
    """A run without failed tasks stays as it is, also where a message asks for it."""
    engine = make_engine()
    async with engine.open(chain("a", "b"), run_id=RUN) as run:
        assert run.retry() == 0
    assert not engine.retry(RUN)
    assert engine.store.inbox(RUN) == []


async def test_what_stands_in_is_tried_again() -> None:
    """Of a task that was replaced, what failed last is tried again."""
    engine = make_engine(again, limits={"replans_per_lineage": 1})
    work = Services("a", "a~2")
    await engine.execute(chain("a"), work, run_id=RUN)
    work.repair()
    async with engine.resume(RUN) as run:
        run.retry()
        await perform(run, work)
    assert (run.result.outputs, work.calls) == ({"a": "a~2"}, ["a", "a~2", "a~2"])


async def test_replans_count_anew(clock: VirtualClock) -> None:
    """A task that a person tries again may be replanned as often as at first, also in the same way."""
    engine = make_engine(again, clock=clock, limits={"replans_per_lineage": 2})
    work = Services("a", "a~2", "a~3", "a~4")
    result = await engine.execute(chain("a"), work, run_id=RUN)
    assert (result.status, work.calls) == ("failed", ["a", "a~2", "a~3"])
    engine.retry(RUN, by="eve")
    result = await engine.execute(chain("a"), work, run_id=RUN)
    assert work.calls[3:] == ["a~3", "a~4", "a~5"]
    assert (result.status, result.outputs) == ("succeeded", {"a": "a~5"})


# In doubt


IN_DOUBT = (
    "task 'pay': it is unknown whether it took effect; look first, and name it under `not_done` to"
    " have it tried again, or under `done` to continue without it"
)


async def failed_in_doubt(engine: ReplanningEngine, work: Services, **pay: object) -> None:
    """A run of three tasks, of which one has lost its answer and one has failed."""
    whole = plan(
        Task.model_validate({"id": "pay", **pay}),
        Task(id="mail"),
        Task(id="end", depends_on=("pay",)),
    )
    assert (await engine.execute(whole, work, run_id=RUN)).status == "failed"
    work.calls.clear()
    work.repair()


async def test_what_may_have_taken_effect_is_named() -> None:
    """A task in doubt is not tried again unless a person says that it was not done; nothing is, before."""
    engine = engine_without_questions()
    work = Services("mail", lost=("pay",))
    await failed_in_doubt(engine, work)
    assert engine.compare_retry(RUN).again == {"pay": "it is unknown whether it took effect"}
    with pytest.raises(ChangeRejected) as refused:
        engine.retry(RUN)
    assert [problem.message for problem in refused.value.problems] == [IN_DOUBT]
    async with engine.resume(RUN) as run:
        with pytest.raises(ChangeRejected):
            run.retry()
        assert run.live.revision == 0
        run.retry(not_done=["pay"])
        await perform(run, work)
    assert (run.result.status, sorted(work.calls)) == ("succeeded", ["end", "mail", "pay"])


async def test_what_was_done_is_skipped() -> None:
    """A task that took effect, or that a person has done, is skipped, and what depends on it runs."""
    engine = engine_without_questions()
    work = Services("mail", lost=("pay",))
    await failed_in_doubt(engine, work)
    async with engine.resume(RUN) as run:
        run.retry(done=["pay", "mail"], by="eve")
        await perform(run, work)
    assert (run.result.status, work.calls) == ("succeeded", ["end"])
    assert run.result.reason == "every required task is done"
    (revised,) = bodies(engine.store, RUN, PlanRevised)
    assert revised.reason == "continue as if 'pay', 'mail' had succeeded"


async def test_a_harmless_call_needs_no_name() -> None:
    """A call in doubt that may be repeated without harm is tried again like any other."""
    engine = engine_without_questions()
    work = Services("mail", lost=("pay",))
    await failed_in_doubt(engine, work, idempotent=True, retry={"max_attempts": 1})
    assert engine.retry(RUN).again == {}


async def test_a_stand_in_for_a_call_in_doubt_is_named() -> None:
    """What a person has put in the place of a call in doubt is not tried again unseen either."""
    engine = engine_without_questions()
    work = Services("other", lost=("pay",))
    await engine.execute(chain("pay"), work, run_id=RUN)
    other = ReplaceTask(task_id=TaskId("pay"), tasks=(Task(id="other", idempotent=True),))
    async with engine.resume(RUN) as run:
        run.apply([other])
        await perform(run, work)
    assert engine.compare_retry(RUN).again == {"other": "it is unknown whether 'pay' took effect"}
    assert not engine.compare_retry(RUN, not_done=["pay"]).again


async def test_an_open_question_is_left_to_its_answer() -> None:
    """Tasks about which a person is asked are not tried again before the answer."""
    engine = make_engine("repair")
    work = Services("mail", lost=("pay",))
    whole = plan(Task(id="pay"), Task(id="mail"))
    result = await engine.execute(whole, work, run_id=RUN)
    assert result.status == "needs_human"
    work.repair()
    async with engine.resume(RUN) as run:
        for named in ({"done": ["pay"]}, {"not_done": ["pay"]}):
            with pytest.raises(ChangeRejected, match="'pay' is still being decided"):
                run.retry(**named)  # type: ignore[arg-type]
        run.retry()
        assert states(run) == {"pay": "FAILED", "mail": "READY"}
        await perform(run, work)
    assert run.result.status == "needs_human"


async def test_after_a_rejection() -> None:
    """A call in doubt that a person has given up can be tried again once somebody has looked."""
    engine = make_engine("repair", gate=ScriptedGate([Answer("reject")]))
    work = Services(lost=("pay",))
    result = await engine.execute(chain("pay"), work, run_id=RUN)
    assert result.status == "failed"
    work.repair()
    engine.retry(RUN, not_done=["pay"])
    result = await engine.execute(chain("pay"), work, run_id=RUN)
    assert (result.status, work.calls) == ("succeeded", ["pay", "pay"])
    assert len(bodies(engine.store, RUN, AttemptStarted)) == 2


# What is refused


async def test_wrong_names() -> None:
    """Every task that is named and has not failed is a problem, and a name that never was an error."""
    engine = make_engine()
    await engine.execute(chain("a", "b"), Services("b"), run_id=RUN)
    with pytest.raises(ChangeRejected) as refused:
        engine.compare_retry(RUN, not_done=["a"], done=["a"])
    assert [problem.message for problem in refused.value.problems] == [
        "task 'a' has not failed"
    ] * 2
    with pytest.raises(UnknownTask, match="did you mean 'b'"):
        engine.compare_retry(RUN, done=["bb"])


async def test_runs_that_are_over() -> None:
    """A run that has succeeded, and the session of a program, try nothing again."""
    engine = make_engine()
    await engine.execute(chain("a"), Services(), run_id=RUN)
    with pytest.raises(NotRunning, match=r"'run-1' is succeeded; none"):
        engine.retry(RUN)
    async with engine.session("talk", run_id="s") as session:
        with pytest.raises(NotRunning, match="session"):
            session.run.retry()
        with pytest.raises(NotRunning, match="session"):
            engine.retry("s")


async def test_a_refused_message_is_told() -> None:
    """Why a message could not be carried out is told among the problems of the run."""
    engine = make_engine()
    await engine.execute(chain("a"), Services("a"), run_id=RUN)
    engine.store.post(RUN, InboxMessage("retry", 0.0, "eve", {"done": ["b"], "not_done": 3}))
    async with engine.resume(RUN) as run:
        pass
    (problem,) = run.result.problems
    assert (problem.where, problem.error) == (
        "the retry of eve",
        "there is no task 'b'; the plan has 'a'",
    )

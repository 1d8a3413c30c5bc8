"""Parameters of plans in runs: values that tasks get, secrets that no journal keeps, and corrected values."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replanning import Plan, ReplanningEngine, Task, TaskContext
from replanning.changes import AddTask, ReplaceTask
from replanning.errors import ChangeRejected, PlanError, StoreError
from replanning.journal import MemoryStore, RunOpened, SqliteStore
from replanning.orchestrators import SwarmOrchestrator
from replanning.plan import JsonObject
from tests.support.runs import alternative, bodies, failing, make_engine, perform, plan

RUN = "run-1"
SECRET = "correct horse battery"


def using(**values: Any) -> Plan:
    """A plan with a region that has a default, and a secret; these are given."""
    stated = plan(
        Task(id="a", tool="t", arguments={"to": "${parameters.region}"}),
        Task(id="b", tool="t", arguments={"key": "${parameters.token}"}, depends_on=("a",)),
        Task(id="c", tool="u", when='parameters.region == "us"', depends_on=("a",)),
        parameters={"region": {"default": "eu"}, "token": {"secret": True}},
        tools=[{"name": "t", "effect": "none"}, {"name": "u"}],
    )
    return stated.with_parameters(values)


class Arguments:
    """Work that remembers the arguments of each task, and returns them."""

    def __init__(self) -> None:
        self.of: dict[str, JsonObject] = {}

    async def __call__(self, task: Task, context: TaskContext) -> JsonObject:
        self.of[task.id] = task.arguments
        return task.arguments


async def test_values_reach_tasks():
    """Arguments and conditions get the values, also in tasks that a replan adds."""

    def adding(request):
        new = Task(id="d", tool="t", arguments={"to": "in ${parameters.region}"})
        return [alternative(AddTask(task=new))]

    work = Arguments()
    engine = make_engine(adding)
    async with engine.open(using(region="us", token=SECRET), run_id=RUN) as run:
        run.request_replan("one more")
        await perform(run, work)
    assert run.result.status == "succeeded"
    assert work.of["a"] == {"to": "us"}
    assert work.of["b"] == {"key": SECRET}
    assert "c" in work.of
    assert work.of["d"] == {"to": "in us"}


async def test_lists_and_functions():
    """A list may be a parameter, also one with text like references, and functions get values as other tools do."""
    seen: list[str] = []

    def greet(name: str, key: str) -> None:
        """Greet somebody."""
        seen.append(f"{name} with {key}")

    stated = plan(
        Task(
            id="a",
            tool="greet",
            for_each="${parameters.names}",
            arguments={"name": "${item}", "key": "${parameters.token}"},
        ),
        parameters={"names": "array", "token": {"secret": True}},
    ).with_parameters({"names": ["ada", "${context.x}"], "token": SECRET})
    result = await make_engine().execute(stated, tools=[greet], max_concurrency=1)
    assert result.status == "succeeded"
    assert seen == [f"ada with {SECRET}", f"${{context.x}} with {SECRET}"]


async def test_undeclared_in_a_proposal():
    """A task that a replan adds cannot refer to a parameter that the plan does not declare."""
    engine = make_engine()
    async with engine.open(using(token=SECRET), run_id=RUN) as run:
        new = Task(id="d", tool="t", arguments={"to": "${parameters.regoin}"})
        with pytest.raises(ChangeRejected, match="no parameter 'regoin'; did you mean 'region'"):
            run.apply([AddTask(task=new)])


async def test_secret_in_a_proposal():
    """A replan gives a secret to the tools alone that the plan gives it to, or that can stand in for them."""
    stated = plan(
        Task(id="a", tool="t", arguments={"key": "${parameters.token}"}),
        parameters={"token": {"secret": True}},
        tools=[
            {"name": "t", "capability": "pay"},
            {"name": "s", "capability": "pay"},
            {"name": "u"},
        ],
    ).with_parameters({"token": SECRET})

    def proposing(request):
        found = []
        for tool in ("u", "s"):
            new = Task(id=f"b-{tool}", tool=tool, arguments={"key": "is ${parameters.token}"})
            found.append(alternative(ReplaceTask(task_id="a", tasks=(new,))))
        return found

    work = Arguments()

    async def failing_first(task: Task, context: TaskContext) -> JsonObject:
        if task.id == "a":
            raise ValueError("no")
        return await work(task, context)

    engine = make_engine(proposing)
    async with engine.open(stated, run_id=RUN) as run:
        await perform(run, failing_first)
    assert run.result.status == "succeeded"
    assert work.of == {"b-s": {"key": f"is {SECRET}"}}
    (event,) = engine.history(RUN).events
    reasons = [each.rejected for each in event.rejected]
    assert any("'token' does not go to 'u' in 'b-u'" in reason for reason in reasons), reasons


async def test_run_needs_values():
    """A plan whose parameters lack values cannot be run; the error names every one."""
    with pytest.raises(PlanError) as refused:
        async with make_engine().open(using()):
            pytest.fail("it was opened")
    assert [problem.place for problem in refused.value.problems] == ["parameters.token"]


@pytest.mark.parametrize("durable", [True, False])
async def test_secret_is_given_again(durable, tmp_path):
    """No store has a secret, so that a resume needs it: tasks without it fail before their work, and are tried again."""
    place = tmp_path / "history.db"
    store = SqliteStore(place) if durable else MemoryStore()
    with closing(store):
        engine = make_engine(store=store)
        async with engine.open(using(token=SECRET), run_id=RUN) as run:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    attempt.output = "done"
                break
        assert run.result.status == "paused"

        work = Arguments()
        async with engine.resume(RUN) as run:
            await perform(run, work)
        assert run.result.status == "failed"
        assert "does not have the parameter 'token'" in run.result.reason
        assert work.of == {}

        async with engine.resume(RUN, parameters={"token": SECRET}) as run:
            await perform(run, work)
        assert run.result.status == "succeeded"
        assert work.of == {"b": {"key": SECRET}}
    if durable:
        for file in tmp_path.iterdir():
            assert SECRET.encode() not in file.read_bytes()


async def test_secret_for_an_orchestrator():
    """An orchestrator resumes a run with its secret."""
    engine = make_engine()
    async with engine.open(using(token=SECRET), run_id=RUN):
        pass
    work = Arguments()
    orchestrator = engine.attach(SwarmOrchestrator(work))
    result = await orchestrator.resume(RUN, parameters={"token": SECRET})
    assert result.status == "succeeded"
    assert work.of["b"] == {"key": SECRET}


async def test_secret_of_an_included_plan(tmp_path: Path):
    """A secret that is passed on to an included plan is not journaled either, and is there again after a resume."""
    (tmp_path / "inner.yaml").write_text(
        """
        goal: {objective: inner}
        parameters: {token: {secret: true}, copies: integer}
        tasks: [{id: use, arguments: {key: "${parameters.token}", copies: "${parameters.copies}"}}]
        """
    )
    (tmp_path / "outer.yaml").write_text(
        """
        goal: {objective: outer}
        parameters: {key: {secret: true}}
        tasks: [{id: part, include: inner.yaml, with: {token: "${parameters.key}", copies: 3}}]
        """
    )
    stated = Plan.load(tmp_path / "outer.yaml", parameters={"key": SECRET})
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        engine = make_engine(store=store)
        async with engine.open(stated, run_id=RUN) as run:
            async for _ in run.ready():
                break
        for file in tmp_path.iterdir():
            assert SECRET.encode() not in file.read_bytes()
        work = Arguments()
        async with engine.resume(RUN, parameters={"key": SECRET}) as run:
            await perform(run, work)
    assert run.result.status == "succeeded"
    assert list(work.of.values()) == [{"key": SECRET, "copies": 3}]


async def test_names_in_an_included_plan(tmp_path: Path):
    """The parameters of an included plan are its own: another value of one with the same name changes nothing there."""
    (tmp_path / "inner.yaml").write_text(
        """
        goal: {objective: inner}
        parameters: {region: string}
        tasks: [{id: use, arguments: {to: "${parameters.region}"}}]
        """
    )
    (tmp_path / "outer.yaml").write_text(
        """
        goal: {objective: outer}
        parameters: {region: string}
        tasks:
        - {id: part, include: inner.yaml, with: {region: eu}}
        - {id: own, arguments: {to: "${parameters.region}"}}
        - {id: last, depends_on: [part, own]}
        """
    )
    stated = [
        Plan.load(tmp_path / "outer.yaml", parameters={"region": region}) for region in ("eu", "us")
    ]
    engine = make_engine()
    async with engine.open(stated[0], run_id=RUN) as run:
        await perform(run, failing("last"))
    assert list(engine.compare(RUN, stated[1]).again) == ["own"]


async def test_secret_of_a_plan():
    """The plan of a run that is given again has its secrets, and so has one that is opened with the same words."""
    engine = make_engine()
    async with engine.open(using(token=SECRET), run_id=RUN):
        pass
    work = Arguments()
    async with engine.run_or_resume(using(token=SECRET), run_id=RUN) as run:
        await perform(run, work)
    assert work.of["b"] == {"key": SECRET}


async def test_other_values_are_another_plan():
    """A run is not resumed as that of a plan with other values."""
    engine = make_engine()
    async with engine.open(using(token=SECRET), run_id=RUN):
        pass
    with pytest.raises(StoreError, match="another plan"):
        async with engine.run_or_resume(using(region="us", token=SECRET), run_id=RUN):
            pytest.fail("it was resumed")


async def test_values_stay_on_resume():
    """A resume keeps the values of a run: it refuses others and unknown ones, all at once."""
    engine = make_engine()
    async with engine.open(using(region="us", token=SECRET), run_id=RUN):
        pass
    with pytest.raises(PlanError) as refused:
        async with engine.resume(RUN, parameters={"region": "eu", "tokn": "12345"}):
            pytest.fail("it was resumed")
    told = str(refused.value)
    assert "parameter 'region' is 'us' in this run, and does not change while it lasts" in told
    assert "the plan has no parameter 'tokn'; did you mean 'token'?" in told
    work = Arguments()
    async with engine.resume(RUN, parameters={"region": "us", "token": SECRET}) as run:
        await perform(run, work)
    assert work.of["a"] == {"to": "us"}


async def test_corrected_values():
    """Another value in a corrected plan changes the tasks that use it: done ones are run again, left-out ones run."""
    engine = make_engine()
    async with engine.open(using(token=SECRET), run_id=RUN) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = task.arguments
            if task.id == "b":
                break
        corrected = using(region="us")
        correction = run.compare(corrected)
        assert correction.diff.splitlines()[-2:] == [
            '- parameters.region: "eu"',
            '+ parameters.region: "us"',
        ]
        assert correction.parts == ("parameters.region",)
        assert correction.again["a"] == "it depends on changed values: parameters.region"
        with pytest.raises(ChangeRejected, match="state `rerun`"):
            run.adopt(corrected)
        run.adopt(corrected, rerun="changed")
        work = Arguments()
        await perform(run, work)
    assert run.result.status == "succeeded"
    # What depends on it, and the secret, which was not given again.
    assert {"to": "us"} in work.of.values()
    assert {"key": SECRET} in work.of.values()
    assert work.of["c"] == {}
    assert run.plan.parameters["region"].current == "us"


async def test_kept_values():
    """A corrected plan without values keeps those of the run; one more parameter needs a value."""
    engine = make_engine()
    async with engine.open(using(region="us", token=SECRET), run_id=RUN) as run:
        assert not run.compare(using())
        more = using().model_copy(
            update={
                "parameters": Plan.model_validate(
                    {
                        "goal": {"objective": ""},
                        "parameters": {
                            "region": "string",
                            "token": {"secret": True},
                            "size": "integer",
                        },
                    }
                ).parameters
            }
        )
        with pytest.raises(ChangeRejected, match="parameter 'size' has no value"):
            run.compare(more)
        assert run.compare(more.with_parameters({"size": 2})).parts == ("parameters.size",)


async def test_corrected_declarations():
    """What a corrected plan declares otherwise is told, without the value of a secret; a value of another type is not kept."""
    engine = make_engine()
    first = plan(Task(id="a"), parameters={"region": {"default": "eu"}, "size": "integer"})
    async with engine.open(first.with_parameters({"size": 2}), run_id=RUN) as run:
        declared = {"size": "integer", "token": {"secret": True}}
        corrected = plan(Task(id="a"), parameters=declared).with_parameters({"token": SECRET})
        correction = run.compare(corrected)
        assert correction.parts == ("parameters.region", "parameters.token")
        assert correction.diff.splitlines() == [
            '- parameters.region: "eu"',
            "+ parameters.token: secret",
        ]
        with pytest.raises(ChangeRejected, match="parameter 'size' has no value"):
            run.compare(plan(Task(id="a"), parameters={"size": "string"}))


async def test_corrected_value_in_a_check():
    """A task whose check, or that of its tool, reads a corrected value is run again, and no other."""
    check = {"where": ["output == parameters.region or true"]}

    def sized(region: str) -> Plan:
        return plan(
            Task(id="a", tool="t"),
            Task.model_validate({"id": "b", "tool": "u", "expect": check}),
            Task.model_validate({"id": "c", "tool": "u", "expect": {"where": ["output != 1"]}}),
            Task(id="last", depends_on=("a", "b", "c")),
            parameters={"region": "string"},
            tools=[
                {"name": "t", "effect": "none", "expect": check},
                {"name": "u", "effect": "none"},
            ],
        ).with_parameters({"region": region})

    engine = make_engine()
    async with engine.open(sized("eu"), run_id=RUN) as run:
        await perform(run, failing("last"))
    why = "it depends on changed values: parameters.region"
    assert engine.compare(RUN, sized("us")).again == {"a": why, "b": why}


async def test_value_that_looks_like_a_mask():
    """A value that is written like a mask is taken for one on a resume, unless the plan is given again."""
    stated = plan(
        Task(id="a", arguments={"text": "${parameters.text}"}), parameters={"text": "string"}
    ).with_parameters({"text": "[redacted]"})
    engine = make_engine()
    async with engine.open(stated, run_id=RUN):
        pass
    async with engine.resume(RUN) as run:
        await perform(run)
    assert "does not have the parameter 'text'" in run.result.reason
    work = Arguments()
    async with engine.resume(RUN, plan=stated) as run:
        await perform(run, work)
    assert work.of == {"a": {"text": "[redacted]"}}


async def test_fork_and_rerun_keep_values():
    """Forks and reruns have the values of their run."""
    engine = make_engine()
    async with engine.open(using(region="us", token=SECRET), run_id=RUN) as run:
        await perform(run)
    for other in (engine.fork(RUN, 0), engine.rerun(RUN, "a")):
        (opened,) = bodies(engine.store, other, RunOpened)
        assert opened.plan.parameters["region"].current == "us"
        work = Arguments()
        async with engine.resume(other, parameters={"token": SECRET}) as run:
            await perform(run, work)
        assert {"to": "us"} in work.of.values()
        assert {"key": SECRET} in work.of.values()


async def test_adopted_elsewhere(tmp_path: Path):
    """A plan that is left for the owner of a run has no secret in the store, and takes that of the run."""
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        engine = make_engine(store=store)
        async with engine.open(using(token=SECRET), run_id=RUN):
            pass
        other = ReplanningEngine([], store=store)
        other.adopt(RUN, using(region="us", token=SECRET), rerun="changed")
        work = Arguments()
        async with engine.resume(RUN, parameters={"token": SECRET}) as run:
            await perform(run, work)
        assert work.of["b"] == {"key": SECRET}
        assert work.of["a"] == {"to": "us"}
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes()

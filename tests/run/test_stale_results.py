"""Stale results: the context changes after finished tasks have read the old value."""

import pytest

from replanning import Plan, ReplanningEngine, RunResult, Task, TaskState, open_run
from replanning.changes import ReplaceTask, RetryTask
from replanning.errors import ChangeRejected
from replanning.history import PlanEdit, run_status, text_report, why_report
from replanning.journal import (
    AttemptSucceeded,
    ContextChanged,
    MemoryStore,
    ResultsStale,
    TriggerFired,
)
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.run import Work
from tests.support.runs import bodies, make_engine, perform, plan
from tests.support.tracing import Spans

PAGES = tuple(f"page-{number}" for number in range(1, 10))


async def read(task, context):
    """Return the language: of the arguments, or as the work reads it from the context."""
    return context.arguments.get("language") or context.context["language"]


def pages(**fields: object) -> Plan:
    """Nine pages, of which the odd ones refer to the language and the even ones read it, and a tenth that changes it."""
    odd = {"arguments": {"language": "${context.language}"}}
    tasks = [
        Task.model_validate({"id": i, "idempotent": True, **(odd if n % 2 else {})})
        for n, i in enumerate(PAGES)
    ]
    return plan(*tasks, Task(id="switch"), context={"language": "en", "other": 1}, **fields)


async def switch(task, context):
    """Write a page, or change the language at the end."""
    if task.id == "switch":
        context.change_context({"language": "de"})
    return await read(task, context)


async def execute(
    document: Plan, work: Work, *, engine: ReplanningEngine | None = None
) -> RunResult:
    """Execute a plan, one task after another."""
    engine = engine or make_engine("repair")
    return await engine.attach(SequentialOrchestrator(work)).run(document)


async def test_warning():
    """Results that come from an old value of the context are named in the result, and nothing is done again."""
    result = await execute(pages(), switch)
    assert (result.status, result.revisions) == ("succeeded", ())
    assert result.stale == dict.fromkeys(PAGES, ("context.language",))


async def test_redo():
    """With `on_stale: redo`, finished tasks are done again with the new value, found under their own ids."""
    engine = make_engine("repair")
    result = await execute(pages(on_stale="redo"), switch, engine=engine)
    assert result.outputs == dict.fromkeys((*PAGES, "switch"), "de")
    assert (result.status, len(result.revisions), result.stale) == ("succeeded", 1, {})
    fired = [body.trigger for body in bodies(engine.store, result.run, TriggerFired)]
    assert [(type(trigger), trigger.stale, trigger.keys) for trigger in fired] == [
        (ContextChanged, PAGES, ("language",))
    ]
    assert fired[0].reason.startswith(
        "context.language changed, and 9 results are stale: 'page-1', "
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{"language": "de"}, {"language": "en"}], {}),
        ([{"other": 2}], {}),
        ([{"language": "de"}, {"language": "fr"}], {"a": ("context.language",), "b": ("a",)}),
    ],
)
async def test_what_is_stale(changes, expected):
    """A change back, or of a value that nobody read, makes nothing stale; what followed a stale result is stale."""

    async def work(task, context):
        if task.id == "a":
            assert context.context["language"] == "en"
        for change in changes if task.id == "z" else ():
            context.change_context(change)

    tasks = (
        Task(id="a"),
        Task(id="b", depends_on=("a",)),
        Task(id="c"),
        Task(id="z", depends_on=("b", "c")),
    )
    context = {"language": "en", "other": 1}
    assert (await execute(plan(*tasks, context=context), work)).stale == expected
    ignored = plan(tasks[0].model_copy(update={"on_stale": "ignore"}), *tasks[1:], context=context)
    assert (await execute(ignored, work)).stale == {}


@pytest.mark.parametrize("read_context", [lambda c: c.get("new"), lambda c: "new" in c, dict, list])
async def test_ways_of_reading(read_context):
    """Reading a key that has no value yet, and iterating over the context, are reads as well."""

    async def work(task, context):
        if task.id == "a":
            read_context(context.context)
        else:
            context.change_context({"new": 1}, removed=["old"])

    result = await execute(plan(Task(id="a"), Task(id="z"), context={"old": 1}), work)
    assert list(result.stale) == ["a"]


async def test_own_change_is_not_stale():
    """A task that reads a value and changes it itself has a current result."""

    async def count(task, context):
        if task.id == "a":
            context.change_context({"n": int(str(context.context["n"])) + 1, "m": 1, "x": 1})

    result = await execute(
        plan(Task(id="a", arguments={"m": "${context.m}"}), context={"n": 0, "m": 0}), count
    )
    assert result.stale == {}


@pytest.mark.parametrize(
    ("condition", "after", "expected"),
    [
        ("context.n < 5", 3, {}),
        ("context.n < 5", 9, {"a": ("context.n",)}),
        ("context.n > 5", 3, {}),
        ("context.n > 5", 9, {"a": ("context.n",)}),
        ("context.n < 5", "nine", {"a": ("context.n",)}),
    ],
)
async def test_conditions(condition, after, expected):
    """A task that was done or skipped is stale if its condition has another outcome now."""

    async def work(task, context):
        if task.id == "z":
            context.change_context({"n": after})

    tasks = (Task(id="a", when=condition), Task(id="z", depends_on=("a",), run_if="always"))
    async with make_engine().open(plan(*tasks, context={"n": 1})) as run:
        await perform(run, work)
    assert run.result.stale == expected


async def test_chain_is_done_again_before_what_waits_for_it():
    """What followed a stale result is done again after it, and tasks that wait for it see only the new result."""
    seen: dict[str, object] = {}

    async def work(task, context):
        if task.id == "change":
            context.change_context({"language": "de"})
        seen[task.id] = task.arguments.get("of") or context.context["language"]
        return seen[task.id]

    after = {"arguments": {"of": "${a.output}"}, "idempotent": True}
    document = plan(
        Task(id="a", idempotent=True, on_stale="redo"),
        Task.model_validate({"id": "b", "depends_on": ["a"], **after}),
        Task(id="change", depends_on=("b",)),
        Task.model_validate({"id": "c", "depends_on": ["change"], **after}),
        context={"language": "en"},
    )
    result = await execute(document, work)
    assert result.outputs == {"a": "de", "b": "de", "change": "de", "c": "de"}
    assert (result.stale, seen["b"], seen["b~2"], list(seen)[-1]) == ({}, "en", "de", "c")


async def test_task_that_runs_meanwhile():
    """A task that runs with an old value while it changes is done again when it has finished."""
    result = (
        await make_engine("repair")
        .attach(SwarmOrchestrator(switch, max_concurrency=20))
        .run(pages(on_stale="redo"))
    )
    assert (set(result.outputs.values()), result.stale) == ({"de"}, {})


async def test_task_that_is_not_idempotent_asks():
    """A finished task that is not idempotent is done again only if a person agrees; so is one of a dangerous tool."""
    document = plan(Task(id="a"), Task(id="switch"), context={"language": "en"}, on_stale="redo")
    engine = make_engine("repair")
    result = await execute(document, switch, engine=engine)
    assert (result.status, result.outputs["a"], list(result.stale)) == ("needs_human", "en", ["a"])
    assert "'a' has taken effect; running it again may do harm" in engine.pending()[0].text
    engine.answer(result.questions[0], "approve", by="ann")
    async with engine.resume(result.run) as run:
        await perform(run, read)
    assert (run.result.status, run.result.outputs["a"]) == ("succeeded", "de")


async def test_staleness_survives_a_resume():
    """Who has read what is in the journal: a resumed run finds the results stale that a later change makes stale."""
    store = MemoryStore()
    engine = make_engine("repair", store=store)
    async with engine.open(pages()) as run:
        async for task in run.ready():
            if task.id == "switch":
                break
            async with run.attempt(task) as attempt:
                attempt.output = await read(task, attempt.context)
    reads = {body.task: body.reads for body in bodies(store, run.id, AttemptSucceeded)}
    assert (reads["page-1"], reads["page-2"]) == ({"language": 0}, None)
    async with engine.resume(run.id) as again:
        again.change_context({"language": "de"})
        await perform(again, read)
    assert again.result.stale == dict.fromkeys(PAGES, ("context.language",))
    assert bodies(store, run.id, ResultsStale) == [ResultsStale(dict(again.result.stale))]


async def test_finished_tasks_are_replaced_only_while_they_are_stale():
    """A person may replace a finished task while it is to be done again; what was done again is not retried."""
    async with make_engine().open(pages(on_stale="redo")) as run:
        ready = run.ready()
        task = await anext(ready)
        async with run.attempt(task) as attempt:
            attempt.output = attempt.context.context["language"]
        new = ReplaceTask(task_id=task.id, tasks=(Task(id="new"),))
        with pytest.raises(ChangeRejected, match="'page-1' is DONE: it cannot be replaced"):
            run.apply([new])
        run.change_context({"language": "de"})
        run.apply([new])
        assert run.live.entry(task.id).state is TaskState.REPLACED_BY_REPLAN
        assert run.live.results.output_of(task.id) == "en"
        with pytest.raises(ChangeRejected, match="it cannot be retried"):
            run.apply([RetryTask(task_id=task.id)])


async def test_result_of_an_older_value_is_stale_at_once():
    """With `on_stale: redo`, a result is stale as soon as it is there, if what its work has read has changed meanwhile."""
    engine = make_engine()
    async with engine.open(pages(on_stale="redo")) as run:
        ready = run.ready()
        task = await anext(ready)
        async with run.attempt(task) as attempt:
            attempt.output = attempt.context.context["language"]
            run.change_context({"language": "de"})
        (stale,) = bodies(engine.store, run.id, ResultsStale)
        assert stale.tasks == {task.id: ("context.language",)}


async def test_warning_is_shown():
    """Status, history and the reasons for a revision name stale results, and so does an event of the run's span."""
    spans = Spans()
    engine = make_engine("repair", tracer_provider=spans.provider)
    result = await execute(pages(), switch, engine=engine)
    text = f"9 results of older values: {', '.join(f'{page} (context.language)' for page in PAGES[:5])} and 4 more"
    history = engine.history(result.run)
    assert (
        history.stale
        == result.stale
        == run_status(engine.store, engine.store.runs()[0], 0.0).tasks.stale
    )
    assert f"  stale:    {text}\n" in text_report(history)
    assert text in why_report(history, PlanEdit(0.0, 0, 1, (), "", ""))
    [event] = [event for span in spans.named("replanning.run") for event in span.events]
    assert (event.name, event.attributes) == (
        "replanning.results.stale",
        {"replanning.stale.tasks": PAGES, "replanning.stale.causes": ("context.language",)},
    )


async def test_values_of_the_time_when_a_task_was_handed_out():
    """References are replaced when a task is handed out: if the context changes before it starts, its result is stale."""
    document = plan(Task(id="a", arguments={"x": "${context.x}"}), Task(id="b"), context={"x": 1})
    async with open_run(document) as run:
        async for task in run.ready():
            if task.id == "a":
                run.change_context({"x": 2})
                assert task.arguments == {"x": 1}
            async with run.attempt(task):
                pass
    assert run.result.stale == {"a": ("context.x",)}


async def test_nothing_can_be_done():
    """Where a tool is not available any more, the result stays, and the run ends with the warning."""

    async def work(task, context):
        if task.id == "z":
            context.change_resource("press", available=False)
            context.change_context({"language": "de"})
        return await read(task, context)

    page = Task(id="a", tool="press", idempotent=True)
    tools = [{"name": "press"}, {"name": "other"}]
    engine = make_engine("repair")
    document = plan(
        page, Task(id="z", tool="other", depends_on=("a",)), tools=tools, context={"language": "en"}
    )
    result = await execute(document.model_copy(update={"on_stale": "redo"}), work, engine=engine)
    assert (result.status, result.outputs["a"], list(result.stale)) == ("succeeded", "en", ["a"])
    [decision] = engine.history(result.run).events
    assert (decision.decision, "'press' is unavailable" in decision.reason) == ("keep", True)


async def test_what_fails_the_second_time_keeps_its_output():
    """The output of a task counts, for its dependents and in the result, until the task is done again; it may never be."""

    async def work(task, context):
        if task.id == "a~2":
            raise ValueError("no paper")
        return await switch(task, context)

    document = plan(
        Task(id="a", idempotent=True),
        Task(id="switch"),
        context={"language": "en"},
        on_stale="redo",
    )
    result = await execute(document, work)
    assert (result.status, result.outputs) == ("failed", {"a": "en", "switch": "de"})


async def test_several_changes():
    """After each change, what is stale is done again, although the same was done before."""

    async def work(task, context):
        language = await read(task, context)
        following = {"x": "de", "x2": "fr"}.get(task.id)
        if following:
            context.change_context({"language": following})
        return language

    tasks = [Task(id="a", idempotent=True)]
    tasks += [
        Task(id=new, depends_on=(before,), on_stale="ignore")
        for before, new in (("a", "x"), ("x", "x2"))
    ]
    result = await execute(plan(*tasks, context={"language": "en"}, on_stale="redo"), work)
    assert (result.outputs["a"], len(result.revisions), list(result.stale)) == ("fr", 2, [])


async def test_a_task_that_another_puller_has_left():
    """The result of a task that is taken over from another puller is as new as the arguments that it then gets."""
    document = plan(
        Task(id="a", arguments={"to": "${context.to}"}), Task(id="b"), context={"to": "us"}
    )
    async with open_run(document) as run:
        first, second = run.ready(), run.ready()
        assert (await anext(first)).id == "a"
        assert (await anext(first)).id == "b"
        run.change_context({"to": "eu"})
        taken = await anext(second)
        assert taken.arguments == {"to": "eu"}
        async with run.attempt(taken):
            pass
        run.succeeded(run.started("b"))
        await run.wait()
    assert run.result.stale == {}

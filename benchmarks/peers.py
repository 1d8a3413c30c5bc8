"""Equal work with libraries that users would choose instead, each used as its documentation recommends.

A plan of tasks that do nothing is executed one after another; every tenth fails, the planner puts
another task in its place, and the loop continues. Peers come with the dependency group `bench`; what
is not installed is left out and named.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypedDict

from benchmarks.figures import Coroutine, Peer, each
from replanning import (
    Alternative,
    Goal,
    Plan,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
    TaskContext,
)
from replanning.changes import ReplaceTask
from replanning.orchestrators import SequentialOrchestrator

WORK = (
    "Peers doing the same work in the same rounds: {tasks} tasks that do nothing, one after another, every tenth fails "
    "and is replaced by the planner. Ours checks and journals every change; LangGraph journals only with its checkpointer."
)


class Broken(ValueError):
    """Error of a failing task."""


async def do(name: str) -> str:
    """Execute a task.

    Raises:
        Broken: the name ends in a zero.
    """
    if name.endswith("0"):
        raise Broken(name)
    return name


def names(tasks: int) -> list[str]:
    """Return the names of the tasks of a plan; every tenth will fail."""
    return [f"t{number}" for number in range(1, tasks + 1)]


class _Planner:
    """A provider that answers at once: another task in its place."""

    name = "planner"

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        task_id = request.triggers[0].tasks[0]
        task = request.view.task(task_id).task.model_copy(update={"id": f"{task_id}-again"})
        return [
            Alternative(
                changes=(ReplaceTask(task_id=task_id, tasks=(task,)),),
                reason="another",
                confidence=0.9,
            )
        ]


def ours() -> Coroutine:
    """The work with this library."""

    async def work(task: Task, context: TaskContext) -> str:
        return await do(task.id)

    async def run(tasks: int) -> float:
        plan = Plan(
            goal=Goal(objective="measure"),
            tasks=tuple(Task(id=name) for name in names(tasks)),
            sequential=True,
        )
        engine = ReplanningEngine([_Planner()], settings=Settings.model_validate({"cooldown": 0}))
        orchestrator = engine.attach(SequentialOrchestrator(work))
        start = time.perf_counter()
        result = await orchestrator.run(plan)
        elapsed = time.perf_counter() - start
        _same(len(result.revisions), tasks)
        return elapsed

    return run


class State(TypedDict):
    """State that the nodes of a graph pass on."""

    plan: list[str]
    at: int
    failed: bool
    replans: int


async def _execute(state: State) -> dict[str, object]:
    try:
        await do(state["plan"][state["at"]])
    except Broken:
        return {"failed": True}
    return {"at": state["at"] + 1, "failed": False}


async def _replan(state: State) -> dict[str, object]:
    plan = list(state["plan"])
    at = state["at"]
    plan[at] += "-again"
    return {"plan": plan, "failed": False, "replans": state["replans"] + 1}


def langgraph(*, journal: bool = False) -> Coroutine:
    """The plan-execute-replan loop as a LangGraph graph, without or with its checkpointer in memory."""
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import END, START, StateGraph

    def after(state: State) -> str:
        return (
            "replan" if state["failed"] else "execute" if state["at"] < len(state["plan"]) else END
        )

    graph = StateGraph(State).add_node("execute", _execute).add_node("replan", _replan)
    graph.add_edge(START, "execute").add_edge("replan", "execute")
    graph.add_conditional_edges("execute", after, ["execute", "replan", END])
    compiled = graph.compile(checkpointer=InMemorySaver() if journal else None)

    async def run(tasks: int) -> float:
        config = {
            "recursion_limit": 2 * tasks + 10,
            "configurable": {"thread_id": str(time.perf_counter_ns())},
        }
        begin = State(plan=names(tasks), at=0, failed=False, replans=0)
        start = time.perf_counter()
        end = await compiled.ainvoke(begin, config)
        elapsed = time.perf_counter() - start
        _same(end["replans"], tasks)
        return elapsed

    return run


def pydantic_graph() -> Coroutine:
    """The loop as a pydantic-graph graph: two steps and a decision."""
    from pydantic_graph import GraphBuilder, StepContext

    @dataclass
    class Progress:
        plan: list[str]
        at: int = 0
        replans: int = 0

    builder = GraphBuilder(state_type=Progress, output_type=int)

    async def execute(context: StepContext[Progress, None, object]) -> str:
        state = context.state
        try:
            await do(state.plan[state.at])
        except Broken:
            return "failed"
        state.at += 1
        return "next" if state.at < len(state.plan) else "done"

    async def replan(context: StepContext[Progress, None, object]) -> None:
        context.state.plan[context.state.at] += "-again"
        context.state.replans += 1

    run_step = builder.step(execute)
    plan_step = builder.step(replan)

    def when(text: str) -> Callable[[object], bool]:
        return lambda value: value == text

    choice = builder.decision()
    for text, target in (("failed", plan_step), ("next", run_step), ("done", builder.end_node)):
        choice = choice.branch(builder.match(object, matches=when(text)).to(target))
    builder.add(
        builder.edge_from(builder.start_node, plan_step).to(run_step),
        builder.edge_from(run_step).to(choice),
    )
    graph = builder.build()

    async def run(tasks: int) -> float:
        state = Progress(names(tasks))
        start = time.perf_counter()
        await graph.run(state=state)
        elapsed = time.perf_counter() - start
        _same(state.replans, tasks)
        return elapsed

    return run


@dataclass(frozen=True)
class Other:
    """A library to compare with: its package, its run, and its minimum time as a multiple of ours."""

    name: str
    package: str
    make: Callable[[], Coroutine]
    bar: float | None = None


PEERS: tuple[Other, ...] = (
    Other("LangGraph", "langgraph", langgraph, 7),
    Other(
        "LangGraph with its in-memory checkpointer", "langgraph", lambda: langgraph(journal=True), 9
    ),
    Other("pydantic-graph", "pydantic-graph", pydantic_graph, 2.8),
)


def measure(
    rounds: int, tasks: int, others: Sequence[Other] = PEERS
) -> tuple[list[Peer], list[str]]:
    """Measure ours and every installed peer, in turn in each round; return a note for each missing one."""
    installed: list[tuple[Other, str]] = [(Other("replanning", "", ours), "")]
    runs = [ours()]
    skipped = []
    for other in others:
        try:
            number = version(other.package)
            runs.append(other.make())
        except (PackageNotFoundError, ImportError) as error:
            skipped.append(
                f"{other.name} is left out: {error}; `pip install --group bench` brings it."
            )
        else:
            installed.append((other, number))
    rows = []
    for _ in range(rounds + 1):
        rows.append([each(run, tasks) for run in runs])
    times = list(zip(*rows[1:], strict=True))  # the first round warms up
    compared = []
    for (other, number), values in zip(installed, times, strict=True):
        ratios = [value / own for value, own in zip(values, times[0], strict=True)]
        peer = Peer(
            other.name,
            number,
            statistics.median(values),
            min(values),
            max(values),
            statistics.median(ratios),
            other.bar,
        )
        compared.append(peer)
    return compared, skipped


def _same(replans: int, tasks: int) -> None:
    """Check that a library has done the whole work; otherwise its time is meaningless."""
    if replans != tasks // 10:
        raise RuntimeError(f"{replans} replans instead of {tasks // 10}: this is not the same work")

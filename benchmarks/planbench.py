"""Replanning after an unexpected event, on published instances, each strategy through the public engine.

An instance is a plan, an event after its k-th step, and a goal. Every strategy sees the same
events. What counts is decided by the world in `benchmarks.instances`, which shares no code with the
library: an action that cannot be done there fails, and an instance is recovered when the goal holds
there at the end.

What GPT-4 answered goes through the `llm` provider. *Alone*, the engine knows no facts, is told of
the event, and a person agrees to whatever the model says; *verified*, it knows the facts, and takes
only what leads to the goal by them; then with `repair` behind.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from benchmarks.instances import SOURCE, Action, Domain, Instance, World, load
from benchmarks.recorded import MODEL, recorded
from replanning import (
    Alternative,
    Answer,
    CallbackGate,
    PlanRun,
    Question,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
)
from replanning.changes import AddTask, PlanChange, RemoveTask
from replanning.decision import AlternativeProvider
from replanning.journal import AlternativesConsidered, DecisionMade, TriggerFired, Usage
from replanning.live import TaskState
from replanning.plan import JsonObject, RunId

FILES = ("planbench_t6_blocksworld.jsonl", "planbench_t6_blocksworld_3.jsonl")
DOMAIN = Path(__file__).parent / "domains" / "planbench.yaml"
KNOWN = {
    # strategy: percent of the non-trivial instances recovered, in the two files
    "none": (0.0, 0.0),
    "skip": (23.4, 12.9),
    "retry": (38.7, 45.2),
    "scratch": (100.0, 100.0),
    "gpt4": (43.9, 43.5),
    "gpt4, verified": (43.9, 43.5),
}
KNOWN_DISTANCE = 1.34

Plans = Callable[[Instance, Domain], Sequence[Action] | None]


@dataclass(frozen=True)
class Row:
    """One strategy on one file.

    It has many attributes because the table has as many columns.
    """

    file: str
    strategy: str
    recovered: int
    instances: int
    low: float
    high: float
    early: int
    trivial: int
    false_interventions: int
    distance: float | None
    kept: int
    vain: int
    p50: float | None
    p99: float | None
    edges: float | None = None
    untouched: float | None = None
    completed: int = 0
    replaced: int = 0
    calls: int = 0
    tokens: int = 0

    @property
    def percent(self) -> float:
        """Return the share of the non-trivial instances that were recovered."""
        if self.instances == 0:
            return 100.0
        return 100 * self.recovered / self.instances


class Written:
    """A provider that proposes what somebody has written down for this instance: other steps from here to the goal."""

    def __init__(self, name: str, steps: Sequence[Action] | None, domain: Domain) -> None:
        self.name = name
        self._steps = steps
        self._domain = domain

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        """Everything that is left goes, the written steps come in its place."""
        if self._steps is None:
            return []
        changes: list[PlanChange] = []
        for old in request.view.unfinished():
            if old.state is not TaskState.RUNNING:
                changes.append(RemoveTask(task_id=old.id))
        changes.reverse()  # a task goes before those that it depends on
        before: tuple[str, ...] = ()
        for number, action in enumerate(self._steps, 1):
            schema = self._domain.schemas.get(action.name)
            if schema is None or len(schema.parameters) != len(action.arguments):
                return []
            arguments: JsonObject = dict(zip(schema.parameters, action.arguments, strict=True))
            task = Task(
                id=f"{self.name}-{number}", tool=action.name, arguments=arguments, depends_on=before
            )
            changes.append(AddTask(task=task))
            before = (task.id,)
        return [
            Alternative(changes=tuple(changes), reason=f"the steps of {self.name}", confidence=1.0)
        ]


def none(instance: Instance, domain: Domain) -> None:
    """Do not replan."""


def skip(instance: Instance, domain: Domain) -> list[Action]:
    """Skip impossible steps."""
    facts = instance.at_event(domain)
    kept = []
    for action in instance.rest:
        after = domain.apply(facts, action)
        if after is not None:
            facts = after
            kept.append(action)
    return kept


def retry(instance: Instance, domain: Domain) -> list[Action]:
    """Repeat the last step before the event, then continue."""
    return [instance.plan[instance.after - 1], *instance.rest]


def retry_three(instance: Instance, domain: Domain) -> list[Action]:
    """Repeat the last three steps, then continue."""
    return [*instance.plan[max(0, instance.after - 3) : instance.after], *instance.rest]


def scratch(instance: Instance, domain: Domain) -> list[Action] | None:
    """Plan anew from here, breadth first."""
    return domain.search(instance.at_event(domain), instance.goal, instance.objects)


@dataclass(frozen=True)
class Strategy:
    """Replanning strategy: rules or a model, with or without facts, with or without `repair` behind it."""

    written: Plans | None = None
    model: bool = False
    stated: bool = True
    repair: bool = False

    def providers(self, instance: Instance, domain: Domain) -> list[AlternativeProvider | str]:
        """Return the providers of a strategy."""
        found: list[AlternativeProvider | str] = []
        if self.model:
            found.append(recorded(instance, domain))
        if self.written is not None:
            found.append(Written("written", self.written(instance, domain), domain))
        if self.repair:
            found.append("repair")
        return found


STRATEGIES = {
    "none": Strategy(),
    "skip": Strategy(skip),
    "retry": Strategy(retry),
    "retry 3": Strategy(retry_three),
    "scratch": Strategy(scratch),
    "gpt4": Strategy(model=True, stated=False),
    "gpt4, verified": Strategy(model=True),
    "gpt4, then repair": Strategy(model=True, repair=True),
    "repair": Strategy(repair=True),
}


@dataclass(frozen=True)
class Outcome:
    """Result of one instance."""

    recovered: bool
    early: bool
    revisions: int
    distance: int
    edges: int
    untouched: float
    taken: str
    vain: bool
    seconds: float | None
    spent: Usage

    @property
    def kept(self) -> bool:
        """Whether what was proposed, by rules or by the model, was taken as it was."""
        return self.taken in ("written", MODEL)


async def agree(question: Question) -> Answer:
    """Gate of a person who approves everything."""
    return Answer("approve", by="whoever agrees to everything")


async def play(instance: Instance, strategy: str, domain: Domain) -> Outcome:
    """Run an instance through the engine with one strategy."""
    how = STRATEGIES[strategy]
    settings = Settings.model_validate(
        {"approval": {"always_for": []}, "alternatives": {"human_approval_threshold": 0.5}}
    )
    gate: CallbackGate | None = None
    if not how.stated:
        gate = CallbackGate(agree)
    engine = ReplanningEngine(how.providers(instance, domain), gate=gate, settings=settings)
    world = World(instance, domain)
    plan = instance.document(domain, stop=instance.trivial, stated=how.stated)
    async with engine.open(plan) as run:
        async for task in run.ready():
            async with run.attempt(task):
                world.do(Action(str(task.tool), tuple(map(str, task.arguments.values()))))
            if world.at_event():
                if how.stated:
                    run.observe(holds=sorted(instance.holds), ceased=sorted(instance.ceased))
                else:
                    await _told(engine, run)
    succeeded = run.result.status == "succeeded"
    return Outcome(
        succeeded and instance.goal <= world.facts,
        succeeded and len(world.done) < len(instance.plan) and not run.result.revisions,
        len(run.result.revisions),
        world.distance(),
        world.edges(),
        world.untouched(),
        _taken(engine, run.id),
        world.vain,
        _seconds(engine, run.id),
        run.result.spent,
    )


async def _told(engine: ReplanningEngine, run: PlanRun) -> None:
    """Ask for replanning, and do nothing until it is decided."""
    decided = anyio.Event()

    def on_decided(body: DecisionMade) -> None:
        if body.decision != "ask":
            decided.set()

    engine.monitor.on(DecisionMade, on_decided)
    run.request_replan("something unexpected has happened")
    await decided.wait()


def _taken(engine: ReplanningEngine, run: RunId) -> str:
    """Source of the applied alternative; empty if none was applied."""
    for record in engine.store.read(run):
        body = record.body
        if isinstance(body, AlternativesConsidered) and body.candidates:
            best = body.candidates[0]
            if not best.rejected:
                return best.alternative.source
    return ""


def _seconds(engine: ReplanningEngine, run: RunId) -> float | None:
    """From the first trigger to its decision."""
    fired: float | None = None
    decided: float | None = None
    for record in engine.store.read(run):
        if isinstance(record.body, TriggerFired) and fired is None:
            fired = record.at
        elif isinstance(record.body, DecisionMade) and decided is None:
            decided = record.at
    if fired is None or decided is None:
        return None
    return decided - fired


def measure(
    folder: Path, *, limit: int | None = None, report: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Every strategy on every file of a folder; the known truths are checked on the whole published files."""
    own_domain = folder / "domain.yaml"
    domain = Domain.load(own_domain if own_domain.exists() else DOMAIN)
    paths = [folder / name for name in FILES if (folder / name).exists()]
    if not paths:
        paths = sorted(folder.glob("*.jsonl"))
    rows = []
    for path in paths:
        instances = load(path)[:limit]
        for strategy in STRATEGIES:
            start = time.perf_counter()
            rows.append(_row(path.stem, strategy, instances, domain))
            report(f"{path.stem}: {strategy}, {time.perf_counter() - start:.1f} s")
    if limit is None:
        check(rows)
    return rows


def _row(file: str, strategy: str, instances: Sequence[Instance], domain: Domain) -> Row:
    async def play_all() -> list[Outcome]:
        return [await play(instance, strategy, domain) for instance in instances]

    real: list[Outcome] = []
    trivial: list[Outcome] = []
    for instance, outcome in zip(instances, anyio.run(play_all), strict=True):
        if instance.trivial:
            trivial.append(outcome)
        else:
            real.append(outcome)
    recovered = [outcome for outcome in real if outcome.recovered]
    low, high = wilson(len(recovered), len(real))
    p50, p99 = _milliseconds(real)
    counts = _counts(real)
    of_trivial = _counts(trivial)
    return Row(
        file=file,
        strategy=strategy,
        recovered=len(recovered),
        instances=len(real),
        low=low,
        high=high,
        early=of_trivial["early"],
        trivial=len(trivial),
        false_interventions=of_trivial["changed"],
        distance=_mean([outcome.distance for outcome in recovered]),
        kept=counts["kept"],
        vain=counts["vain"],
        p50=p50,
        p99=p99,
        edges=_mean([outcome.edges for outcome in recovered]),
        untouched=_mean([outcome.untouched for outcome in recovered]),
        completed=counts["completed"],
        replaced=counts["replaced"],
        calls=counts["calls"],
        tokens=counts["tokens"],
    )


def _counts(outcomes: Sequence[Outcome]) -> Counter[str]:
    """The outcomes added up: whose ways were taken, and what that cost."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts["early"] += outcome.early
        counts["changed"] += outcome.revisions > 0
        counts["kept"] += outcome.kept
        counts["vain"] += outcome.vain
        counts["completed"] += outcome.taken == f"{MODEL}+repair"
        counts["replaced"] += outcome.taken.startswith("repair")
        counts["calls"] += outcome.spent.calls
        counts["tokens"] += outcome.spent.tokens
    return counts


def _milliseconds(outcomes: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """The median and the 99th percentile from the trigger to its decision."""
    seconds = sorted(outcome.seconds for outcome in outcomes if outcome.seconds is not None)
    if not seconds:
        return None, None
    return 1000 * statistics.median(seconds), 1000 * seconds[int(0.99 * len(seconds))]


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return statistics.fmean(values)


def wilson(successes: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % Wilson interval of a share, in percent (Wilson 1927)."""
    if not total:
        return 0.0, 100.0
    share = successes / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, 100 * (middle - spread) / scale), min(100.0, 100 * (middle + spread) / scale)


def check(rows: Sequence[Row]) -> None:
    """Raise an error unless the harness reproduces the known figures of the published files."""
    wrong = []
    columns = [Path(name).stem for name in FILES]
    for row in rows:
        if row.file not in columns:
            continue
        column = columns.index(row.file)
        known = KNOWN.get(row.strategy)
        if known is not None and round(row.percent, 1) != known[column]:
            wrong.append(
                f"{row.file}, {row.strategy}: {row.percent:.1f} % instead of {known[column]} %"
            )
        far = row.distance is None or round(row.distance, 2) != KNOWN_DISTANCE
        if row.strategy == "scratch" and column == 0 and far:
            wrong.append(
                f"{row.file}, scratch: a mean distance of {row.distance} instead of {KNOWN_DISTANCE}"
            )
    if wrong:
        sys.exit(
            "the harness does not reproduce the known truths, so it reports nothing:\n  "
            + "\n  ".join(wrong)
        )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"Source: {SOURCE}. Recovered: share of the non-trivial instances, with its 95 % Wilson interval. Distance: actions",
        "added and removed. In vain: instances in which something was begun that could not be done. Early: trivial instances",
        "that ended early; false: trivial ones in which something was changed.",
        "",
        "| instances | strategy | recovered | distance | in vain | early | false | trigger to decision, p50 / p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        distance = ""
        if row.distance is not None:
            distance = f"{row.distance:.2f}"
        latency = ""
        if row.p50 is not None and row.p99 is not None:
            latency = f"{row.p50:.1f} / {row.p99:.1f} ms"
        share = f"{row.percent:.1f} % ({row.low:.1f}–{row.high:.1f})"
        lines.append(
            f"| {row.file} ({row.instances}) | {row.strategy} | {share} | {distance} | {row.vain}"
            f" | {row.early}/{row.trivial} | {row.false_interventions} | {latency} |"
        )
    return "\n".join([*lines, "", *_work(rows)])


def _work(rows: Sequence[Row]) -> list[str]:
    lines = [
        "What became of the plans, means over what was recovered, and whose way was taken. Edges: what comes right after what,",
        "added and removed. Untouched: share of the rest of the plan that was done. Kept, completed: what was proposed by rules or",
        "the model was taken as it was, or with what it lacked; repaired: `repair`'s own way was taken.",
        "",
        "| instances | strategy | edges | untouched | kept | completed | repaired | model calls | tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        edges = ""
        untouched = ""
        if row.edges is not None and row.untouched is not None:
            edges = f"{row.edges:.2f}"
            untouched = f"{row.untouched:.1%}"
        lines.append(
            f"| {row.file} ({row.instances}) | {row.strategy} | {edges} | {untouched} | {row.kept} | {row.completed}"
            f" | {row.replaced} | {row.calls} | {row.tokens:,} |"
        )
    return lines


def to_json(rows: Sequence[Row]) -> list[JsonObject]:
    """The rows for programs."""
    return [asdict(row) | {"percent": row.percent} for row in rows]

# Nonsense is drawn on purpose.
# mypy: disable-error-code="arg-type"
"""Hypothesis strategies for plans, situations and sets of changes."""

from hypothesis import strategies as st

from replanning import Goal, Plan, ReplanningError, Task
from replanning.changes import AbortRun, AddTask, ModifyTask, PlanChange
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from tests.support.live import (
    JournaledPlan,
    cancel,
    expected_next,
    remove,
    reorder,
    replace,
    retry,
    skip,
    task,
    tool,
)

TOOLS = (
    tool("plain", capability="c"),
    tool("maker", capability="c", parameters={"out": "any"}, produces=["{out}"], removes=["raw"]),
    tool("picky", parameters={"out": "any"}, needs=["{out}"], removes=["artifact({out})"]),
    tool("heavy", capability="c", resources={"cpu": 2}),
    tool("absent", available=False),
)
DELAYS = st.sampled_from([0.0, 1.0, 5.0])
_ENDED = (TaskState.SKIPPED, TaskState.CANCELLED, TaskState.REPLACED_BY_REPLAN, TaskState.FAILED)


@st.composite
def tasks(draw: st.DrawFn, task_id: str, known: list[str]) -> Task:
    """Draw a task that depends on some known ones."""
    name = draw(st.sampled_from([None, "plain", "maker", "picky", "heavy", "absent"]))
    depends_on = draw(st.lists(st.sampled_from(known), max_size=2, unique=True)) if known else []
    arguments: dict[str, str] = (
        {"out": draw(st.sampled_from(["x", "${context.go}"]))} if name in ("maker", "picky") else {}
    )
    if depends_on and name is None and draw(st.booleans()):
        arguments = {"value": f"${{{depends_on[0]}.output}}"}
    return task(
        task_id,
        *tuple(depends_on),
        tool=name,
        arguments=arguments,
        priority=draw(st.integers(-1, 1)),
        optional=draw(st.booleans()),
        idempotent=draw(st.booleans()),
        when=draw(st.sampled_from([None, None, "context.go"])),
        resources=draw(st.sampled_from([{}, {}, {"cpu": 1}, {"cpu": 0.1, "disk": 1}])),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan of a few tasks with two resources and five tools."""
    made: list[Task] = []
    for number in range(draw(st.integers(1, 6))):
        made.append(draw(tasks(f"t{number}", [task.id for task in made])))
    return Plan(
        goal=Goal(objective="test", facts=("artifact(x)",)),
        context={"go": True},
        resources={"cpu": 2, "disk": 1},
        tools=TOOLS,
        tasks=tuple(made),
        facts=draw(st.sampled_from([None, ("raw",), ("artifact(x)",)])),
    )


class Changes:
    """Draws sets of related changes with some chance of being valid."""

    def __init__(self) -> None:
        self._fresh = 0
        self._named: list[str] = []

    def several(self, draw: st.DrawFn, live: LivePlan, count: int) -> list[PlanChange]:
        """Draw changes; later ones often name tasks that earlier ones named or added."""
        self._named = []
        return [self._one(draw, live) for _ in range(count)]

    def _one(self, draw: st.DrawFn, live: LivePlan) -> PlanChange:
        kind = draw(
            st.sampled_from(
                [
                    "add",
                    "remove",
                    "replace",
                    "modify",
                    "reorder",
                    "retry",
                    "skip",
                    "cancel",
                    "abort",
                ]
            )
        )
        if kind == "add":
            return self._added(draw, live)
        if kind == "replace":
            return self._replaced(draw, live)
        if kind == "modify":
            return self._modified(draw, live)
        if kind == "reorder":
            waiting = [e.id for e in live if e.state in WAITING] + self._named or ["nobody"]
            return reorder(*tuple(draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=3))))
        if kind == "retry":
            return retry(self._pick(draw, live, *_ENDED, TaskState.BACKOFF), delay=draw(DELAYS))
        if kind == "abort":
            return AbortRun(reason=draw(st.sampled_from(["", "enough"])))
        if kind == "remove":
            return remove(self._pick(draw, live, *WAITING, TaskState.FAILED))
        if kind == "skip":
            return skip(self._pick(draw, live, *WAITING, TaskState.FAILED), reason="not needed")
        return cancel(self._pick(draw, live, *WAITING, TaskState.RUNNING), reason="not wanted")

    def _pick(self, draw: st.DrawFn, live: LivePlan, *states: TaskState) -> str:
        fitting = [entry.id for entry in live if entry.state in states]
        chance = draw(st.integers(0, 9))
        if self._named and (chance > 5 or not fitting):
            fitting = self._named
        elif not fitting or chance == 0:
            fitting = [*(entry.id for entry in live), "nobody"]
        task_id = draw(st.sampled_from(fitting))
        self._named.append(task_id)
        return task_id

    def _new(self) -> str:
        self._fresh += 1
        self._named.append(f"n{self._fresh}")
        return self._named[-1]

    def _known(self, live: LivePlan) -> list[str]:
        return list(
            dict.fromkeys([*(entry.id for entry in live if not entry.removed), *self._named])
        ) or ["nobody"]

    def _added(self, draw: st.DrawFn, live: LivePlan) -> PlanChange:
        known = self._known(live)
        if draw(st.integers(0, 5)) == 5:
            known = [f"n{self._fresh + 2}"]  # perhaps the next change brings it in
        task_id = draw(st.sampled_from(known)) if draw(st.integers(0, 19)) == 19 else self._new()
        before = draw(st.lists(st.sampled_from(self._known(live)), max_size=1))
        return AddTask(
            task=draw(tasks(task_id, known)), before=tuple(b for b in before if b != task_id)
        )

    def _replaced(self, draw: st.DrawFn, live: LivePlan) -> PlanChange:
        target = self._pick(draw, live, *WAITING, TaskState.FAILED, TaskState.CANCELLED)
        ids = [self._new() for _ in range(draw(st.integers(1, 3)))]
        inner = draw(st.booleans())
        known = ids if inner else [*self._known(live), *ids]
        parts = [draw(tasks(i, [k for k in known if k != i])) for i in ids]
        if inner and draw(
            st.booleans()
        ):  # circles among the parts are drawn too often to be of use all the time
            parts = [
                part.model_copy(
                    update={"depends_on": tuple(ids[:number])[-1:], "arguments": {"out": "x"}}
                )
                for number, part in enumerate(parts)
            ]
        return replace(target, *tuple(parts))

    def _modified(self, draw: st.DrawFn, live: LivePlan) -> PlanChange:
        depends_on = draw(st.lists(st.sampled_from(self._known(live)), max_size=2))
        fields: list[dict[str, object]] = [
            {"depends_on": depends_on},
            {"depends_on": depends_on},
            {"name": "new"},
            {"priority": draw(st.integers(-2, 2))},
            {"optional": draw(st.booleans())},
            {"tool": draw(st.sampled_from([None, "plain", "heavy", "absent"])), "arguments": {}},
            {
                "resources": draw(
                    st.sampled_from([{}, {"cpu": 1}, {"disk": 1}, {"cpu": 9}, {"tape": 1}])
                )
            },
            {"when": "context.go", "goal": "why"},
            {"id": "other"},
            {"colour": "red"},
        ]
        return ModifyTask(
            task_id=self._pick(draw, live, *WAITING), fields=draw(st.sampled_from(fields))
        )


def situation(draw: st.DrawFn, changes: Changes) -> JournaledPlan:
    """Draw a plan with a few attempts and revisions."""
    journaled = JournaledPlan(draw(plans()))
    for _ in range(draw(st.integers(0, 8))):
        ready = expected_next(journaled.live)
        if ready is not None and draw(st.booleans()):
            (journaled.run if draw(st.integers(0, 3)) else journaled.fail)(ready)
        else:
            try:
                journaled.apply(*changes.several(draw, journaled.live, 1))
            except ReplanningError:
                continue
    return journaled

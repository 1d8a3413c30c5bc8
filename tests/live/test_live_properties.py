# Ids are written as plain text here, and nonsense is passed on purpose.
# mypy: disable-error-code="arg-type, operator, attr-defined"
"""Properties of a live plan: after any record or change it is consistent, or has refused it and not changed."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replanning import Plan, ReplanningError, journal
from replanning.changes import PlanChange
from replanning.errors import ChangeRejected
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from tests.support.live import (
    JournaledPlan,
    expected_next,
    full_state,
    inconsistencies,
    replayable_state,
    satisfied,
    tool,
)
from tests.support.live_strategies import Changes, plans, situation


class LivePlanMachine(RuleBasedStateMachine):
    """Observations and changes in any order, with invalid ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = Changes()
        self.questions = 0
        self.shrunk = False
        self.ids: set[str] = set()

    @initialize(plan=plans())
    def begin(self, plan: Plan) -> None:
        self.journaled = JournaledPlan(plan)

    @property
    def live(self):
        return self.journaled.live

    # Drawing

    def pick(self, data: st.DataObject, *states: TaskState) -> str | None:
        """Draw a task in one of these states, now and then any other; None if there is none."""
        fitting = [entry.id for entry in self.live if entry.state in states]
        if not fitting or data.draw(st.integers(0, 19)) == 19:
            fitting = [entry.id for entry in self.live] + ["nobody"]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    def may(self, act: Callable[[], object]) -> bool:
        """Do something; if it is refused, check that nothing has changed."""
        before = full_state(self.live)
        try:
            act()
        except ReplanningError:
            assert full_state(self.live) == before
            return False
        return True

    def fold(self, body: journal.RecordBody) -> bool:
        return self.may(lambda: self.journaled.fold(body))

    # Rules

    @rule()
    def claim(self) -> None:
        wanted = expected_next(self.live)
        entry = self.live.scheduler.claim_next()
        assert (entry and entry.id) == wanted

    @precondition(lambda self: any(entry.place.claim for entry in self.live))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        entry = self.live.entry(
            data.draw(st.sampled_from([entry.id for entry in self.live if entry.place.claim]))
        )
        claim = data.draw(st.sampled_from([entry.place.claim, 0, 10_000]))
        self.live.scheduler.return_claim(entry, claim)
        assert not claim or entry.place.claim != claim

    @rule(data=st.data(), timeout=st.sampled_from([None, 2.0]))
    def begin_work(self, data: st.DataObject, timeout: float | None) -> None:
        self.start(data, timeout)

    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        if task_id := self.start(data, None):
            self.end(data, self.live.entry(task_id))

    def start(self, data: st.DataObject, timeout: float | None) -> str | None:
        """Start what was handed out, or without that what would be."""
        handed_out = [entry.id for entry in self.live if entry.place.claim]
        task_id = data.draw(st.sampled_from(handed_out)) if handed_out else expected_next(self.live)
        if task_id is not None:
            self.journaled.start(task_id, None if timeout is None else self.journaled.now + timeout)
        return task_id

    @precondition(lambda self: self.live.counts[TaskState.RUNNING])
    @rule(data=st.data())
    def end_attempt(self, data: st.DataObject) -> None:
        running = [entry.id for entry in self.live if entry.state is TaskState.RUNNING]
        self.end(data, self.live.entry(data.draw(st.sampled_from(running))))

    def end(self, data: st.DataObject, entry: TaskEntry) -> None:
        """End a running attempt, most often well."""
        attempt, task_id = entry.log.current, entry.id
        retry_at = data.draw(st.sampled_from([None, self.journaled.now, self.journaled.now + 2]))
        ends: list[journal.RecordBody] = [
            journal.AttemptSucceeded(attempt, task_id, {"path": "x"}),
            journal.AttemptSucceeded(attempt, task_id, None, recoverable=False),
            journal.AttemptFailed(attempt, task_id, journal.Failure("OSError", "broken")),
            journal.AttemptFailed(
                attempt,
                task_id,
                journal.Failure("OSError", "broken"),
                retry_at,
                exhausted=retry_at is not None,
            ),
            journal.AttemptTimedOut(attempt, task_id, 2.0, retry_at),
            journal.AttemptInterrupted(attempt, task_id, "killed", retry_at),
        ]
        self.journaled.fold(data.draw(st.sampled_from([ends[0], *ends])))

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.journaled.now += seconds
        for entry, attempt in self.live.advance(self.journaled.now):
            assert entry.state is TaskState.RUNNING
            assert entry.log.deadline <= self.journaled.now
            self.journaled.fold(journal.AttemptTimedOut(attempt, entry.id, 2.0))
        assert (
            self.live.scheduler.deadlines.next_due() or self.journaled.now + 1
        ) > self.journaled.now

    @precondition(lambda self: any(entry.place.claim for entry in self.live))
    @rule(data=st.data(), value=st.sampled_from([True, False, None]))
    def evaluate(self, data: st.DataObject, value: bool | None) -> None:
        task_id = data.draw(st.sampled_from([entry.id for entry in self.live if entry.place.claim]))
        self.journaled.fold(
            journal.ConditionEvaluated(task_id, value, "no such value" if value is None else "")
        )

    @rule(data=st.data())
    def something_else(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(_ELSE))(self, data)

    def change_the_world(self, data: st.DataObject) -> None:
        capacity, available = data.draw(st.sampled_from([2, 2, 1, 0, 3])), data.draw(st.booleans())
        bodies = [
            journal.ContextUpdated({"go": "x" if available else "y"})
            if capacity
            else journal.ContextUpdated({}, ("go",)),
            journal.ResourceUpdated(
                data.draw(st.sampled_from(["cpu", "disk", "tape"])), capacity=capacity
            ),
            journal.ResourceUpdated(
                data.draw(st.sampled_from(["plain", "heavy", "absent"])), available=available
            ),
            journal.FactsObserved(("artifact(x)",), ("raw",))
            if available
            else journal.FactsObserved((), ("artifact(x)",)),
        ]
        body = data.draw(st.sampled_from(bodies))
        self.shrunk = self.shrunk or (
            body is bodies[1] and capacity < self.live.scheduler.pool.used.get(bodies[1].name, 0.0)
        )
        self.journaled.fold(body)

    def ask_or_answer(self, data: st.DataObject) -> None:
        if not self.questions or data.draw(st.booleans()):
            about = data.draw(
                st.lists(st.sampled_from([entry.id for entry in self.live]), max_size=3)
            )
            self.questions += 1
            question = journal.QuestionAsked(
                f"q{self.questions}", "r1", (), "?", (), tuple(about), "print", self.live.revision
            )
            self.journaled.fold(question)
        else:
            self.journaled.fold(
                journal.QuestionAnswered(
                    f"q{data.draw(st.integers(1, self.questions))}", "reject", "eve"
                )
            )

    def give_up_or_end(self, data: st.DataObject) -> None:
        blocked = [self.pick(data, TaskState.FAILED) for _ in range(data.draw(st.integers(1, 2)))]
        left = [entry.id for entry in self.live if entry.state in (*WAITING, TaskState.RUNNING)]
        ended = data.draw(st.lists(st.sampled_from([*left, "t0"]), max_size=3))
        early = data.draw(st.integers(0, 9)) == 0
        ending = journal.RunEnded("succeeded", "the goal was reached early", tuple(ended))
        self.fold(
            ending
            if early
            else journal.DecisionMade(
                "r1", (), "keep", "limit-lineage", "tried", blocks=tuple(blocked)
            )
        )

    def report_nonsense(self, data: st.DataObject) -> None:
        """Report unknown tasks, wrong states and ended attempts."""
        entry = self.live.entry(data.draw(st.sampled_from([entry.id for entry in self.live])))
        ready = (TaskState.READY, TaskState.BACKOFF)
        name = data.draw(st.sampled_from([entry.id, "nobody"]))
        bodies: list[journal.RecordBody] = [
            journal.AttemptSucceeded("another#1", name),
            journal.AttemptFailed("another#1", name, journal.Failure("OSError", "broken"), 5.0),
            journal.AttemptTimedOut("another#1", name, 2.0),
            journal.QuestionAsked("q0", "r1", (), "?", (), (entry.id, "nobody"), "print", 0),
            journal.DecisionMade("r1", (), "keep", "limit", "tried", blocks=(entry.id, "nobody")),
            journal.RunEnded("succeeded", "", (entry.id, "nobody")),
        ]
        if entry.state not in ready:
            bodies += [
                journal.AttemptStarted("another#1", name, 1),
                journal.ConditionEvaluated("nobody", False),
            ]
        assert not self.fold(data.draw(st.sampled_from(bodies)))

    @rule(data=st.data(), count=st.sampled_from([1, 1, 2, 3]))
    def revise(self, data: st.DataObject, count: int) -> None:
        try_changes(self.journaled, self.changes.several(data.draw, self.live, count))

    # Invariants

    @invariant()
    def is_right(self) -> None:
        assert inconsistencies(self.live) == []
        ids = {entry.id for entry in self.live}
        assert ids >= self.ids
        self.ids = ids
        check_document(self.live)
        assert self.live.missing_facts == (
            () if "artifact(x)" in self.live.world.facts else ("artifact(x)",)
        )

    @invariant()
    def resources_add_up(self) -> None:
        taken: dict[str, float] = {}
        for entry in self.live:
            for name, amount in (entry.place.reserved or {}).items():
                taken[name] = taken.get(name, 0.0) + amount
        for name, used in self.live.scheduler.pool.used.items():
            assert used == pytest.approx(taken.get(name, 0.0))
            assert self.shrunk or used <= self.live.scheduler.pool.capacity.get(name, 0.0) + 1e-9
        for entry in self.live:
            if entry.place.claim or entry.state is TaskState.RUNNING:
                assert entry.place.reserved is not None

    @invariant()
    def results_are_found(self) -> None:
        for entry in self.live if all(entry.recoverable for entry in self.live) else ():
            if satisfied(self.live, entry.id):
                self.live.results.output_of(entry.id)

    def teardown(self) -> None:
        if hasattr(self, "journaled"):
            check_replay(self.journaled)


@settings(max_examples=3 * settings.default.max_examples)
@given(data=st.data(), count=st.integers(1, 4))
def test_any_set_of_changes(data: st.DataObject, count: int) -> None:
    """A set of changes is applied as a whole or refused without a trace."""
    changes = Changes()
    journaled = situation(data.draw, changes)
    try_changes(journaled, changes.several(data.draw, journaled.live, count))
    assert inconsistencies(journaled.live) == []
    check_document(journaled.live)
    while (task_id := expected_next(journaled.live)) is not None:
        journaled.run(task_id)
        assert inconsistencies(journaled.live) == []
    check_replay(journaled)


def try_changes(journaled: JournaledPlan, changes: list[PlanChange]) -> None:
    """Apply changes; if they are rejected, nothing changes and the problems are those of a check."""
    live, before = journaled.live, full_state(journaled.live)
    problems = live.check(changes)
    diff = live.diff(changes)
    assert not problems or diff == "\n".join(map(str, problems))
    assert full_state(live) == before
    if problems:
        with pytest.raises(ChangeRejected) as caught:
            journaled.apply(*changes)
        assert caught.value.problems == problems
        assert full_state(live) == before
    else:
        journaled.apply(*changes)


def check_document(live: LivePlan) -> None:
    """Check that the document of a live plan is a valid plan."""
    document = live.document()
    # What tasks read and take may have lost its sense through no fault of a change.
    bare = tuple(
        task.model_copy(update={"arguments": {"out": "x"}, "when": None}) for task in document.tasks
    )
    plenty = {"cpu": 99, "disk": 99, "tape": 99}
    tools = tuple(tool(spec.name) for spec in document.tools)
    Plan.model_validate(
        document.model_copy(
            update={"tasks": bare, "resources": plenty, "tools": tools}
        ).model_dump()
    )


def check_replay(journaled: JournaledPlan) -> None:
    """Check that replaying the journal gives the same plan."""
    journaled.live.advance(journaled.now)
    replayed = journaled.replayed()
    replayed.advance(journaled.now)
    assert replayable_state(replayed, journaled.now) == replayable_state(
        journaled.live, journaled.now
    )
    assert inconsistencies(replayed) == []


_ELSE: list[Callable[[LivePlanMachine, st.DataObject], None]] = [
    LivePlanMachine.change_the_world,
    LivePlanMachine.ask_or_answer,
    LivePlanMachine.give_up_or_end,
    LivePlanMachine.report_nonsense,
]

LivePlanMachine.TestCase.settings = settings(stateful_step_count=40)
TestLivePlanMachine = LivePlanMachine.TestCase

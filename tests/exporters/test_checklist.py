"""The plans of a run as one comment with boxes: its form, what is ticked in it, and that no text can change either."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replanning.exporters._forge import MAX_COMMENT_CHARS
from replanning.exporters._notices import render_checklist
from replanning.journal import Record
from replanning.plan import RunId
from replanning.planning.state import PlanningProgress, PlanProgress, PlanStep
from tests.support.notices import NASTY, TEXTS, read
from tests.support.planning import (
    MISSING,
    Desk,
    Replies,
    action,
    actions,
    go_on,
    replan,
    revision,
    run,
)

AT = 1_767_225_600.0  # 2026-01-01 00:00:00 UTC

NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,20}\Z")


def made(number: int, *steps: tuple[str, str, bool], reason: str = "") -> PlanProgress:
    """A plan with these tasks."""
    return PlanProgress(number, AT + 60 * number, reason, tuple(PlanStep(*step) for step in steps))


FIRST = made(
    1,
    ("read", "Read the issue", True),
    ("patch", "Change sums.py", True),
    ("test", "Run the tests", False),
)
SECOND = made(
    2,
    ("read", "Read the issue", True),
    ("patch", "Change sums.py", True),
    ("fix", "Mend the test", False),
    ("test", "Run the tests", False),
    reason="the test needs a fixture",
)


async def journal(replies: Replies, desk: Desk | None = None) -> list[Record]:
    """Return the records of a run with these replies."""
    planning, _, _ = await run(replies, desk, run_id="r")
    return list(planning.engine.store.read(RunId("r")))


def ticks(plan: PlanProgress) -> dict[str, bool]:
    """Return the ticked tasks of a plan."""
    seen = read(render_checklist([plan], "r"))
    return dict(zip([step.name for step in plan.steps], seen.ticks, strict=True))


def stages(records: Sequence[Record]) -> list[tuple[PlanProgress, ...]]:
    """The plans after each record."""
    progress, found = PlanningProgress(), list[tuple[PlanProgress, ...]]()
    for record in records:
        progress.fold(record)
        found.append(progress.plans)
    return found


def begun(records: Sequence[Record], number: int) -> PlanProgress:
    """A plan as it was when it was new."""
    return next(plans[-1] for plans in stages(records) if len(plans) == number)


def test_initial_plan():
    """The initial plan is a list of boxes with id and text under its heading, and how much of it is done."""
    assert render_checklist([FIRST], "r").splitlines() == [
        "## 📋 Execution Plan",
        "",
        "- [x] **read**: Read the issue",
        "- [x] **patch**: Change sums.py",
        "- [ ] **test**: Run the tests",
        "",
        "*Progress: 2/3 (66%) complete*",
        "",
        "<!-- replanning notice=checklist run=r about= -->",
    ]


def test_revised_plan():
    """A revised plan says which revision it is, why, how far the old plan had come, and when it began."""
    assert render_checklist([FIRST, SECOND], "r").splitlines()[:14] == [
        "## 📋 Execution Plan (Revised #1)",
        "",
        "**Revision Reason**: the test needs a fixture",
        "",
        "**Previous Progress**: 2/3",
        "",
        "### New Plan:",
        "",
        "- [x] **read**: Read the issue",
        "- [x] **patch**: Change sums.py",
        "- [ ] **fix**: Mend the test",
        "- [ ] **test**: Run the tests",
        "",
        "*Progress: 2/4 (50%) complete | Revision: #1 at 2026-01-01 00:02:00 UTC*",
    ]


def test_later_plan():
    """From the second revision on the footer has three lines, and a folded block has the earlier plans with their ticks."""
    third = made(
        3, ("read", "Read the issue", True), ("ask", "Ask for help", False), reason="stuck"
    )
    lines = render_checklist([FIRST, SECOND, third], "r").splitlines()
    assert lines[lines.index("- [ ] **ask**: Ask for help") + 2 : lines.index("</details>")] == [
        "*Progress: 1/2 (50%) complete*",
        "*Plan Revisions: 2 times*",
        "*Current Plan: #3 (started at 2026-01-01 00:03:00 UTC)*",
        "",
        "<details>",
        "<summary>📜 Previous Plan History</summary>",
        "",
        "### Plan 1 (started at 2026-01-01 00:01:00 UTC)",
        "",
        "**Reason**: the initial plan",
        "",
        "- [x] **read**: Read the issue",
        "- [x] **patch**: Change sums.py",
        "- [ ] **test**: Run the tests",
        "",
        "*Progress: 2/3 (66%) complete*",
        "",
        "### Plan 2 (started at 2026-01-01 00:02:00 UTC)",
        "",
        "**Reason**: the test needs a fixture",
        "",
        "- [x] **read**: Read the issue",
        "- [x] **patch**: Change sums.py",
        "- [ ] **fix**: Mend the test",
        "- [ ] **test**: Run the tests",
        "",
        "*Progress: 2/4 (50%) complete*",
        "",
    ]


def test_nothing_less_than_everything_is_100_per_cent():
    """Per cents are cut, not rounded: 199 of 200 are 99 %."""
    steps = [(f"t{n}", "", n > 0) for n in range(200)]
    assert "*Progress: 199/200 (99%) complete*" in render_checklist([made(1, *steps)], "r")


async def test_tasks_are_ticked_as_they_finish():
    """No task is ticked before it has finished, each is ticked then, and a tick stays."""
    seen = [ticks(plans[-1]) for plans in stages(await journal({})) if plans]
    assert seen[0] == {"write": False, "post": False}
    assert seen[-1] == {"write": True, "post": True}
    assert {"write": True, "post": False} in seen
    assert all(
        not before[name] or after[name] for before, after in pairwise(seen) for name in before
    )


POST_ANEW = (
    actions(action("write", "write"), action("post", "post")),
    actions(action("post", "shout")),
)


@pytest.mark.parametrize(
    ("decision", "replies"),
    [
        (replan("partial_replan"), {"revision": revision(action("post", "shout"))}),
        (replan("action_regeneration"), {"action_sequence": POST_ANEW}),
        (replan("full_replan", replan_level=3), {"action_sequence": POST_ANEW}),
    ],
    ids=["partial_replan", "action_regeneration", "full_replan"],
)
async def test_ticks_of_finished_tasks_are_kept(decision, replies):
    """A replan that keeps the decomposition keeps the ticks of what is done; what failed, and what is new, has none."""
    records = await journal(
        {"decision:execution": (decision, go_on()), **replies}, Desk({"post": [MISSING]})
    )
    assert ticks(begun(records, 2)) == {"write": True, "post": False}
    first, last = stages(records)[-1]
    assert (ticks(first)["post"], last.done) == (False, 2)
    done = next(
        n
        for n, r in enumerate(records)
        if r.body.kind == "attempt-succeeded" and r.body.task.endswith("v2.post")
    )
    assert not any(ticks(plan).get("post") for plans in stages(records)[:done] for plan in plans)
    progress = PlanningProgress()
    assert repr(progress) == "<PlanningProgress no plan>"
    for record in records:
        progress.fold(record)
    assert repr(progress).startswith("<PlanningProgress 2/")


async def test_a_plan_revision_keeps_ticks():
    """A revision after reflection keeps every tick, and what it adds begins without one."""
    replies: Replies = {
        "decision:reflection": (replan("plan_revision"), go_on()),
        "revision": revision(action("fix", "shout")),
    }
    assert ticks(begun(await journal(replies), 2)) == {"write": True, "post": True, "fix": False}


@pytest.mark.parametrize(
    "decision",
    [
        replan("task_redecomposition"),
        replan("goal_revision"),
        replan("full_replan", replan_level=4),
        replan("full_replan", replan_level=5),
    ],
)
async def test_another_decomposition_starts_clean(decision):
    """A goal that is taken apart or understood anew begins without any tick, also of tasks of the same name."""
    records = await journal({"decision:execution": (decision, go_on())}, Desk({"post": [MISSING]}))
    assert ticks(begun(records, 2)) == {"write": False, "post": False}
    assert ticks(stages(records)[-1][0]) == {"write": True, "post": False}


async def test_a_declared_fallback_ticks_the_task_it_stands_for():
    """A task whose fallback did it is done."""
    planned = actions(action("write", "write", fallback_strategy="shout"), action("post", "post"))
    records = await journal({"action_sequence": planned}, Desk({"write": [MISSING]}))
    assert ticks(stages(records)[-1][-1]) == {"write": True, "post": True}


async def test_actions_of_one_subtask_are_told_apart():
    """If several actions serve a subtask, each is an item with its purpose, and the last has the subtask's text."""
    planned = actions(
        action("write", "write", purpose="Draft it"),
        action("write", "shout"),
        action("post", "post"),
    )
    plan = stages(await journal({"action_sequence": planned}))[-1][-1]
    told = {step.name: step.text for step in plan.steps}
    assert list(told.items()) == [
        ("write-1", "Draft it"),
        ("write", "Write it"),
        ("post", "Post it"),
    ]


@given(
    st.lists(
        st.lists(st.tuples(NAMES, TEXTS, st.booleans()), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    TEXTS,
)
@example([[(f"a{n}", text, n % 2 == 0) for n, text in enumerate(NASTY)]], NASTY[0])
@example([[("a", NASTY[4], False), ("b", NASTY[5], True)]], "".join(NASTY))
def test_no_text_changes_the_form(plans, reason):
    """Whatever models write, a reader sees the same headings, boxes, blocks and marks as for plain words, and no calls."""
    nasty = [made(n, *steps, reason=reason) for n, steps in enumerate(plans, 1)]
    plain = [
        made(n, *((f"t{k}", "word", s[2]) for k, s in enumerate(p)), reason="word")
        for n, p in enumerate(plans, 1)
    ]
    seen = read(render_checklist(nasty, "r--1"))
    assert seen.shape == read(render_checklist(plain, "r--1")).shape
    expected = [step[2] for steps in (plans[-1], *plans[:-1]) for step in steps]
    assert seen.ticks == tuple(expected)
    assert (seen.other, seen.commands) == ((), ())


def test_secrets_are_taken_out():
    """Texts that look like secrets are not shown."""
    text = render_checklist([made(1, ("a", "use password=hunter2hunter2 there", False))], "r")
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "words",
    [
        "Rename parse_text in src/app.py (2.5 s, 100% of users), then run it",
        ":tada: is a word",
        "std:map:x",
        "mark it :+1: please",
    ],
)
def test_words_are_left_as_they_are(words):
    """Ordinary text, with names of files and code, is readable as it stands, and nothing in it becomes a picture."""
    body = render_checklist([made(1, ("a", words, False))], "r")
    assert f"- [ ] **a**: {words}\n" in body.replace("\u200b", "")
    assert not re.search(r":[\w+-]+:", body.partition("**: ")[2].splitlines()[0])


@pytest.mark.parametrize(("tasks", "plans"), [(1000, 1), (100, 12), (1000, 3), (3, 400)])
def test_too_much_is_cut_from_the_oldest_on(tasks, plans):
    """A comment never exceeds what forges take; what is cut is said, the current plan last, and counts stay true."""
    steps = [(f"task-number-{n}", "&" * 400, n % 2 == 0) for n in range(tasks)]
    body = render_checklist([made(n, *steps, reason="<" * 500) for n in range(1, plans + 1)], "r")
    seen = read(body)
    assert len(body) <= MAX_COMMENT_CHARS
    assert f"Progress: {-(-tasks // 2)}/{tasks} " in body
    assert seen.details == (plans > 1)
    if plans > 1:
        assert "omitted for lack of space" in body
    if tasks == 1000:
        shown = len([line for line in body.splitlines() if line.startswith("- [")])
        assert f"… and {tasks - shown} more tasks" in body or shown == tasks

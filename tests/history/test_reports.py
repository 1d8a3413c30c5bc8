"""Reports on a run: text for terminals and Markdown, whatever names and messages say."""

import re

import pytest

from replanning import Alternative, Answer, CallbackGate, ReplanningEngine, ReplanRequest, Task
from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.history import markdown_report, text_report, why_report
from replanning.history.wording import wrap_line
from tests.support.runs import (
    Propose,
    Proposer,
    again,
    alternative,
    chain,
    environment,
    history_of,
    plan,
)

HOSTILE = [
    "1. `list`",
    "<script>alert(1)</script>",
    "a | b ``` c ~~~",
    "**bold** [link](http://example.org) ![i](x) #1 @all",
    "\u202eright to left\u2066",
    'quote " and #quot; and &quot;',
    "日本語 ✓ 😀",
]


def several(request: ReplanRequest) -> list[Alternative]:
    """One way on that is good, and two that are not."""
    task_id = request.triggers[0].tasks[0]
    return [
        *again(request),
        alternative(RetryTask(task_id=task_id), confidence=0.1, reason="hope"),
        alternative(RemoveTask(task_id="a"), reason="go back"),
    ]


async def test_history_as_text():
    """The report says how the run stands, and of each replan the cause, the decision, the changes and the outcome."""
    history = await history_of(chain("a", "b", "c"), "b")
    assert text_report(history) == (
        "run run-1 succeeded: every required task is done\n"
        "  goal:     test\n"
        "  started:  2023-11-14 22:13:20Z\n"
        "  progress: 3 of 3 tasks done (100%)\n"
        "  replans:  1, 1 applied, 1 of 1 worked; deciding took 0 s\n"
        "\n"
        "replan 1 · 2023-11-14 22:13:20Z · task-failed → execute · revision 0 → 1 · success\n"
        "    cause:    task 'b' failed: ValueError: b is broken\n"
        "    decided:  execute by policy, rule confident: confidence 0.81 is at least 0.7 (0 s)\n"
        "    applied:  replace b by b~2\n"
    )


async def test_history_of_a_resumed_run(clock):
    """The report says when a run was resumed, and how long it had been without a process before."""
    engine = ReplanningEngine(environment=environment(clock))
    for pause in (20.0, 0.0):
        async with engine.run_or_resume(chain("a"), run_id="run-1") as run:
            run.pause()
        await clock.sleep(pause)
    history = engine.history("run-1")
    resumed = "2023-11-14 22:13:40Z, after 20 s without a process"
    assert f"\n  resumed:  {resumed}\n" in text_report(history)
    assert f"\n- **Resumed**: {resumed}\n" in markdown_report(history)
    async with engine.resume("run-1") as run:
        run.pause()
    assert "; 2 times in all\n" in text_report(engine.history("run-1"))


async def test_why_on_one_screen():
    """One screen shows cause, candidates with score parts, what was rejected and why, the rule, and the difference."""
    history = await history_of(chain("a", "b", "c"), "b", propose=several)
    text = re.sub(r"\nTraceback\n(  .*\n)+", "", why_report(history, history.events[0]))
    assert text.splitlines() == [
        "run run-1, revision 1: replan 1 · 2023-11-14 22:13:20Z · task-failed → execute · revision 0 → 1 · success",
        "",
        "Cause",
        "  task-failed: task 'b' failed: ValueError: b is broken",
        "",
        "Candidates",
        "  1. replace b by b~2  (scripted: scripted)  ← applied",
        "     confidence 0.81: self-assessment 0.90, past success 0.50, availability 1.00, simplicity 1.00",
        "",
        "Rejected",
        "  run b again  (scripted: hope)",
        "     rejected: its own confidence 0.1 is below 0.3",
        "     confidence 0.49: self-assessment 0.10, past success 0.50, availability 1.00, simplicity 1.00",
        "  remove a  (scripted: go back)",
        "     rejected: it does not fit the plan: changes[0]: task 'a' is DONE: it cannot be removed",
        "",
        "Decision",
        "  execute by policy, rule confident: confidence 0.81 is at least 0.7 (0 s)",
        "  outcome: success",
        "",
        "Plan",
        "  ~ b → b~2",
        '  - b: depends_on: ["a"] [FAILED]',
        '  + b~2: depends_on: ["a"] [PENDING]',
        "    c: waiting for b~2 instead of b",
    ]


async def test_why_a_plan_was_kept():
    """A replan that changed nothing is explained as well."""
    history = await history_of(chain("a"), "a", propose=lambda request: [])
    text = why_report(history, history.events[0])
    assert "Candidates\n  none" in text
    assert "keep by policy, rule no-alternative: no provider proposed an alternative" in text
    assert text.endswith("Plan\n  nothing was applied\n")


async def test_provider_that_found_nothing():
    """A provider that found nothing is told with its verdict, and not as if changes had been rejected."""
    verdict = Alternative(changes=(), reason="no way", unreachable="proven-unreachable")
    history = await history_of(chain("a"), "a", propose=lambda request: [verdict])
    text = why_report(history, history.events[0])
    assert "  nothing found  (scripted: no way)\n     verdict: proven-unreachable\n" in text
    assert "verdict: proven\\-unreachable" in markdown_report(history).replace("\\:", ":")


async def test_person_in_text():
    """What a person was asked and said is told, in the list and on the one screen."""
    answer = Answer("reject", "eve", comment="not on a Friday")
    gate = CallbackGate(lambda question: answer)
    history = await history_of(chain("a"), "a", gate=gate, alternatives={"require_approval": True})
    text = text_report(history)
    assert "reject by eve after 0 s, who said: not on a Friday" in text
    assert "rule person-reject: not on a Friday" in text
    assert "not on a Friday" in why_report(history, history.events[0])


async def test_edits(clock):
    """Edits by hand are no replans: they stand in the order of time, with who, what, why and the difference."""
    engine = ReplanningEngine([], environment=environment(clock))
    async with engine.open(chain("a")) as run:
        run.add_task(Task(id="c"), before=["a"], reason="forgotten")
    (edit,) = run.history.edits
    assert (edit.before, edit.after, edit.reason, edit.by, len(edit.changes)) == (
        0,
        1,
        "forgotten",
        "edit",
        1,
    )
    assert (run.history.metrics.replans, run.history.metrics.edits) == (0, 1)
    assert "revision 0 → 1 · by hand: forgotten\n    applied:  add c before a" in text_report(
        run.history
    )
    assert '+ a: depends_on: ["c"]' in why_report(run.history, edit)
    assert "## Edit by hand, revision 0 → 1" in markdown_report(run.history)


async def test_part_of_a_history():
    """A report can be about some replans alone, and says when there are none of them."""
    history = await history_of(chain("a"), "a")
    assert "no replan matches" in text_report(history, [])
    assert "## r1" not in markdown_report(history, [])
    assert "no replans" in text_report(await history_of(chain("a")))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (AddTask(task=Task(id="n", tool="t"), before=("a", "b")), "add n (t) before a, b"),
        (RemoveTask(task_id="a"), "remove a"),
        (ReplaceTask(task_id="a", tasks=(Task(id="n"), Task(id="m"))), "replace a by n, m"),
        (ModifyTask(task_id="a", fields={"priority": 1}), "modify a: priority = 1"),
        (ReorderTasks(order=("a", "b")), "reorder a, b"),
        (RetryTask(task_id="a", delay=0.5), "run a again after 0.5 s"),
        (SkipTask(task_id="a"), "skip a"),
        (CancelTask(task_id="a", reason="late"), "cancel a: late"),
        (AbortRun(reason="enough"), "abort the run: enough"),
    ],
)
async def test_every_change_has_words(change, text):
    """Each kind of change is told in words, also where it was not applied."""
    history = await history_of(
        chain("x"), "x", propose=lambda request: [alternative(change, confidence=0.1)]
    )
    assert f"{text}  (scripted: scripted)" in why_report(history, history.events[0])


def messages(text: str) -> Propose:
    """Alternatives whose reason is this text."""
    return lambda request: [again(request)[0].model_copy(update={"reason": text})]


@pytest.mark.parametrize("name", HOSTILE)
async def test_markdown_holds_any_name(name):
    """No name can open markup, break a table or leave its block in a document."""
    document = plan(Task(id=name), Task(id="b", depends_on=(name,)))
    text = markdown_report(await history_of(document, name, propose=messages(name)))
    prose, blocks = re.subn(r"^(`{3,})diff$\n.*?^\1$\n", "", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks == 1
    prose = re.sub(r"\\.", "", prose)
    assert re.findall(r"[`<>\[\]{}~&@]", prose) == []
    assert {line.count("|") for line in prose.splitlines() if line.startswith("|")} == {8}


@pytest.mark.parametrize(
    "text", ["\x1b[31mred\x1b[0m", "a\nb\r\nc", "bell\x07", "\x9b31m", "null\x00", "long " * 1000]
)
async def test_terminals_are_not_steered(clock, text):
    """Nothing that a task or a provider says reaches a terminal as more than text on one line, cut where it is long."""

    async def work(task, context):
        raise ValueError(text)

    engine = ReplanningEngine([Proposer(messages(text))], environment=environment(clock))
    result = await engine.execute(chain("a"), work)
    history = engine.history(result.run)
    lines = (
        text_report(history) + why_report(history, history.events[0]) + markdown_report(history)
    ).split("\n")
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 4000


async def test_document():
    """A Markdown document has figures, a table of candidates, and the difference as a diff."""
    history = await history_of(chain("a", "b", "c"), "b", propose=several)
    text = markdown_report(history)
    assert "- **Status**: succeeded – every required task is done" in text
    assert "- **By trigger**: task\\-failed 1" in text
    assert "## replan 1: task-failed → execute, revision 0 → 1" in text
    assert (
        "| ✔ | replace b by b\\~2 \\(scripted\\: scripted\\) | 0.81 | 0.90 | 0.50 | 1.00 | 1.00 |"
        in text
    )
    assert text.count("| ✘ |") == 2
    assert "- **Executed**: yes, outcome: success" in text
    assert (
        '```diff\n~ b → b~2\n- b: depends_on: ["a"] [FAILED]\n+ b~2: depends_on: ["a"] [PENDING]\n'
        in text
    )


def test_lines_are_broken_between_words():
    """A line that is too long continues under its text: after its label or mark, or a little further in."""
    assert wrap_line("  goal      one two three four five", 26) == [
        "  goal      one two three",
        "            four five",
    ]
    assert wrap_line("  1. one two three", 13) == ["  1. one two", "     three"]
    assert wrap_line("one two three", 9) == ["one two", "  three"]
    assert wrap_line("  one two", 8) == ["  one", "    two"]
    assert wrap_line("see http://example.org/a/long/path now", 12) == [
        "see",
        "  http://example.org/a/long/path",
        "  now",
    ]
    assert wrap_line("short  and as it is ", 40) == ["short  and as it is "]

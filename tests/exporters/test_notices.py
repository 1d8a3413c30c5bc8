"""Notices: their content, which no text of a model changes, and their places without a forge."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Sequence

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replanning import Plan, ReplanningEngine, Settings
from replanning.exporters._forge import MAX_COMMENT_CHARS, ForgeError, Marker, find_marker
from replanning.exporters._notices import HEADINGS, Notice, NoticeKind, RunNotices
from replanning.exporters.notices import ConsoleNotifier, FileForge, FileNotifier
from replanning.journal import MemoryStore, NoteAdded, Record
from replanning.plan import JsonObject, RunId
from replanning.plan.types import JsonValue
from replanning.telemetry import ExporterContext
from replanning.testing import VirtualClock
from tests.support.cli import cli, process
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer
from tests.support.notices import EVENTFUL, NASTY, RUN, TEXTS, carried_out, marks, planner, read
from tests.support.planning import Model, Replies, action, eve, go_on, replan, run
from tests.support.resume import cut


async def test_six_moments():
    """A replan is told of when it is decided, started, done, failed or overridden, and when something must be clarified."""
    told = {notice.kind for notice in notices(await carried_out(EVENTFUL, failing=2))} - {
        NoticeKind.FINISHED
    }
    six = list(NoticeKind)[:6]
    assert told == {*six} - {NoticeKind.FAILED}
    assert [HEADINGS[kind] for kind in six] == [
        "🔄 Plan Revision Decided by AI",
        "🚀 Plan Revision Started",
        "❓ Clarification Needed (AI Decision)",
        "✅ Plan Revision Done",
        "❌ Plan Revision Failed",
        "⚠️ Plan Revision Overridden by a Limit",
    ]


def notices(records: Sequence[Record]) -> list[Notice]:
    """Everything that is to be told of a run."""
    account = RunNotices(RUN)
    for record in records:
        account.fold(record)
    return list(account.pending)


def the(records: Sequence[Record], kind: NoticeKind, number: int = 0) -> str:
    """The notice of a kind, as a comment."""
    return [notice.body(RUN) for notice in notices(records) if notice.kind is kind][number]


def the_line(records: Sequence[Record], kind: NoticeKind) -> str:
    """The notice of a kind, as the console shows it, without its heading."""
    (line,) = [notice.line() for notice in notices(records) if notice.kind is kind]
    return line.removeprefix(f"{HEADINGS[kind]}: ")


async def test_decided():
    """A decision is posted with phase, confidence, reasoning, issues, recommended actions and the time."""
    assert the(await carried_out(EVENTFUL, failing=2), NoticeKind.DECIDED).splitlines() == [
        "## 🔄 Plan Revision Decided by AI",
        "",
        "**Phase**: execution",
        "",
        "**Confidence**: 60 %",
        "",
        "**Reasoning**: a retry is needed",
        "",
        "**Issues Found**:",
        "- the file is missing",
        "",
        "**Recommended Actions**:",
        "- look again",
        "",
        "**Kind of replan**: retry (retry the action); continues with execution",
        "",
        "**Warning**: its confidence is 0.6, below 0.8",
        "",
        "*2023-11-14 22:43:20 UTC*",
        "",
        f"<!-- replanning notice=decided run={RUN} about=p5 -->",
    ]


async def test_clarification():
    """A question says why it is asked, numbers its parts, and has the context, how to answer, what is assumed else, and when."""
    assert the(await carried_out(EVENTFUL), NoticeKind.CLARIFICATION).splitlines() == [
        "## ❓ Clarification Needed (AI Decision)",
        "",
        "The request is unclear to the model. Please answer before the work continues:",
        "",
        "**Questions**:",
        "1. Which people?",
        "2. Which news?",
        "",
        "**Context**: a clarification_request is needed",
        "",
        "**If no response** by 2023-11-14 22:43:20 UTC, the work continues with these assumptions:",
        "- everybody",
        "- today's",
        "",
        "**How to answer**: in your own words, question by question.",
        "",
        "*2023-11-14 22:13:20 UTC*",
        "",
        f"<!-- replanning notice=clarification run={RUN} about={RUN}.q1 -->",
    ]


async def test_nothing_is_assumed_where_that_is_switched_off():
    """If the settings allow no assumptions, the notice says that the work waits."""
    settings = Settings.model_validate(
        {"planning": {"replanning": {"goal_understanding": {"auto_assume_on_no_response": False}}}}
    )
    body = the(await carried_out(EVENTFUL, settings=settings), NoticeKind.CLARIFICATION)
    assert "the work waits; nothing is assumed" in body
    assert "**How to answer**: in your own words" in body
    assert "everybody" not in body


async def test_overridden():
    """A replan that is not done is told with what was wanted, which rule forbade it, and why."""
    body = the(await carried_out(EVENTFUL, failing=2), NoticeKind.OVERRIDDEN)
    assert "**Overridden by**: confidence" in body
    assert "**Rule**: its confidence is 0.1, and 0.3 is needed" in body
    assert "**Kind of replan**: action_regeneration" in body


async def test_a_closed_phase():
    """A phase that a limit closes, so that no model is asked, is told with the limit."""
    limits = {"task_decomposition": {"max_redecomposition_attempts": 0}}
    settings = Settings.model_validate({"planning": {"replanning": limits}})
    records = await carried_out({}, settings=settings)
    body = the(records, NoticeKind.OVERRIDDEN)
    assert "**Phase**: task_decomposition" in body
    assert "**Overridden by**: limit" in body
    assert "the limit of 0 redecompositions is reached" in body
    line = the_line(records, NoticeKind.OVERRIDDEN)
    assert (
        line == "task_decomposition: no model was asked: the limit of 0 redecompositions is reached"
    )


@pytest.mark.parametrize(
    ("gate", "kind", "told", "line"),
    [
        (
            "reject",
            NoticeKind.DECLINED,
            "**Declined by**: eve",
            "task_redecomposition: by eve",
        ),
        (
            None,
            NoticeKind.OVERRIDDEN,
            "**Rule**: its confidence is 0.4, below 0.5; nobody has agreed to it",
            "task_redecomposition: its confidence is 0.4, below 0.5; nobody has agreed to it",
        ),
    ],
)
async def test_a_refusal(gate, kind, told, line):
    """A replan that a person refuses is called declined, with who refused it; a question that runs out is not."""
    unsure = {
        "decision:task_decomposition": (replan("task_redecomposition", confidence=0.4), go_on())
    }
    store = MemoryStore()
    await run(unsure, gate=eve(gate) if gate else None, run_id=RUN, store=store)
    if gate is None:
        async with VirtualClock() as clock:
            again = planner(unsure, clock, store=store)
            again.engine.answer(f"{RUN}.q1", "reject", by="timeout")
            await again.execute_with_planning(RUN)
    records = list(store.read(RUN))
    body = the(records, kind)
    assert the_line(records, kind) == line
    assert HEADINGS[kind] in body
    assert told in body
    assert "**Kind of replan**: task_redecomposition" in body


async def test_the_end():
    """A run that ends is told of with its outcome, the criteria that are met, what it has done, and its cost."""
    records = await carried_out(
        {"decision:reflection": go_on(evaluation_result="success", achievement_rate=100)}
    )
    *lines, cost, _, _, _, _ = the(records, NoticeKind.FINISHED).splitlines()
    assert re.fullmatch(
        r"\*\*Cost\*\*: 8 calls, \d+ tokens, plus usage without a known price, 0 s",
        cost,
    )
    assert lines == [
        "## 🏁 Execution Finished",
        "",
        "**Outcome**: succeeded",
        "",
        "**Reason**: every required task is done",
        "",
        "**Success Criteria** (met: all, according to the model, 100 %):",
        "- everybody knows",
        "",
        "**Actions Done**:",
        "- write: Write it",
        "- post: Post it",
        "",
        "**Plan Revisions**: 0, replans: 0",
        "",
    ]


async def test_the_end_of_a_plan_that_was_given():
    """Of a run whose plan was given, the revisions are counted, and nothing is said of criteria that nobody judged."""
    store = MemoryStore()
    engine = ReplanningEngine(["repair"], store=store)

    async def work(task, context):
        if task.tool == "a":
            raise RuntimeError("no")

    given = Plan.parse(
        "{goal: {objective: g, success_criteria: [it is out]}, tools: [{name: a, capability: x}, {name: b, capability: x}], tasks: [{id: t, tool: a}]}"
    )
    result = await engine.execute(given, work)
    await engine.aclose()
    body = the(list(store.read(result.run)), NoticeKind.FINISHED)
    assert (
        "**Success Criteria** (met: not judged):\n- it is out\n\n**Actions Done**:\n- t (b)\n\n**Plan Revisions**: 1\n"
        in body
    )


async def test_effects_are_counted():
    """The question about a run, and its end, say what it has changed so far, where the plan states effects."""
    store = MemoryStore()
    engine = ReplanningEngine(["repair"], store=store)

    async def work(task, context):
        if task.tool == "a":
            raise RuntimeError("no")

    given = Plan.parse("""
    goal: {objective: g}
    sequential: true
    tools:
      - {name: send, effect: irreversible}
      - {name: book, effect: reversible, undo: {tool: cancel}}
      - {name: cancel}
      - {name: a, capability: x}
      - {name: b, capability: x, dangerous: true}
    tasks: [{id: one, tool: send}, {id: two, tool: book}, {id: t, tool: a}]
    """)
    result = await engine.execute(given, work)
    engine.answer(engine.pending(result.run)[0].id, "approve")
    async with engine.resume(result.run) as resumed:
        async for task in resumed.ready():
            async with resumed.attempt(task):
                pass
    records = list(store.read(result.run))
    await engine.aclose()
    asked = the(records, NoticeKind.QUESTION)
    assert "**Effects**: 2 effects so far, 1 can be taken back\n" in asked
    assert "**Effects**: 3 effects so far, 1 can be taken back\n" in the(
        records, NoticeKind.FINISHED
    )


@pytest.mark.parametrize(
    ("decision", "judged", "gate", "met"),
    [
        (
            go_on(evaluation_result="partial_success", achievement_rate=60),
            {"goal_achieved": True},
            None,
            "(met: in part, according to the model, 60 %):\n- everybody knows\n- nobody minds\n",
        ),
        (
            go_on(),
            {"goal_achieved": False, "criteria_met": [True, False]},
            "approve",
            "(met: accepted by a person):\n- everybody knows (met)\n- nobody minds (not met)\n",
        ),
        (
            go_on(),
            {"goal_achieved": False, "criteria_met": [True]},
            "approve",
            "(met: accepted by a person):\n- everybody knows\n- nobody minds\n",
        ),
    ],
    ids=["as a whole", "one by one", "not all of them"],
)
async def test_criteria_that_are_not_met(decision, judged, gate, met):
    """Criteria are shown with what the model judges of each, and those met in part or accepted by a person are not called met."""
    replies = {
        "goal_understanding": {
            "main_objective": "news",
            "success_criteria": ["everybody knows", "nobody minds"],
        },
        "completion": {"summary": {"tasks_completed": 2, "tasks_failed": 0, **judged}},
        "decision:reflection": decision,
    }
    planning, *_ = await run(replies, gate=eve(gate) if gate else None)
    records = list(planning.engine.store.read(planning.result.run))
    assert f"**Success Criteria** {met}" in the(records, NoticeKind.FINISHED)
    if gate is not None:
        asked, listed = the(records, NoticeKind.QUESTION), met.partition("\n")[2]
        assert f"**Success Criteria**:\n{listed}" in asked


async def test_what_ends_badly_is_told():
    """A run that is given up is told of, with the reason, how things stand, and what to do."""
    records = await carried_out({"decision:execution": go_on(confidence=0.7)}, failing=9)
    line = the_line(records, NoticeKind.ENDED)
    assert line.startswith("aborted: write failed, and no decision helps")
    body = the(records, NoticeKind.ENDED)
    assert (
        "## ⛔ Execution Ended without Success\n\n**Outcome**: aborted\n\n**Reason**: write failed, and no decision helps"
        in body
    )
    assert (
        "**Where things stand**: actions done: 0, failed: 1 (write: no such file: news.txt)" in body
    )
    assert "**Recommended Actions**:\n- fix the failure of write: no such file" in body


async def test_a_person_is_asked_when_revisions_are_used_up():
    """If the goal is not achieved and nothing is left to try, a person is asked, with the current state."""
    replies: Replies = {
        "completion": {
            "summary": {"goal_achieved": False, "tasks_completed": 2, "tasks_failed": 0}
        },
        "decision:reflection": go_on(recommended_actions=["call them"]),
    }
    records = await carried_out(replies)
    assert "accept the current result?" in the_line(records, NoticeKind.QUESTION)
    body = the(records, NoticeKind.QUESTION)
    assert "accept the current result?" in body
    assert "**Where things stand**: actions done: 2, failed: 0" in body
    assert "**Question number**: 1" in body


def replanned(decision: JsonObject, **record: object) -> Record:
    """The record of a replan's end."""
    both = {
        "replan_id": "p1",
        "phase": "execution",
        "llm_decision": decision["replan_decision"],
        "timestamp": "2026-01-01T00:00:00Z",
    }
    considered = {
        **both,
        "cause": {"action": "write"},
        "ruling": {"kind": "execute", "reason": "its confidence is 0.9"},
    }
    told = {
        **both,
        "confidence": 0.9,
        "executed": True,
        "override_reason": None,
        "result": "success",
        "duration": 1.25,
        "replan_type": "partial_replan",
        **record,
    }
    body = NoteAdded(
        "replan", {"stage": "applied", "counts": {}, "considered": considered, "record": told}
    )
    return Record(1, 1_767_225_600.0, body)


def test_failed():
    """A replan that failed is told with what went wrong."""
    records = [replanned(replan("partial_replan"), result="failure", error="no such task: x")]
    assert the_line(records, NoticeKind.FAILED) == "partial_replan no such task: x"
    body = the(records, NoticeKind.FAILED)
    assert body.startswith(
        "## ❌ Plan Revision Failed\n\n**Phase**: execution\n\n**Kind of replan**: partial_replan"
    )
    assert "**Error**: no such task: x\n\n**Duration**: 1.2 s" in body


def test_no_text_names_a_field():
    """A text with the name of a field in braces is shown as it is, on the line as in the comment."""
    error = "no {Phase}: {"
    records = [replanned(replan("partial_replan"), result="failure", error=error)]
    assert the_line(records, NoticeKind.FAILED) == f"partial_replan {error}"
    assert f"**Error**: {error}\n" in the(records, NoticeKind.FAILED)


@given(TEXTS, st.lists(TEXTS, max_size=3))
@example("".join(NASTY), list(NASTY))
def test_no_text_changes_the_form(reasoning, issues):
    """Whatever a model writes, a reader of a notice sees the same headings, blocks, marks and calls as for plain words."""
    spoken = [text for text in issues if read_text(text)]
    shapes = []
    for why, found in ((reasoning, issues), ("word", ["word"] * len(spoken))):
        said: list[JsonValue] = [*found]
        decision = replan("partial_replan", issues_found=said, recommended_actions=said)
        decision["replan_decision"].update(reasoning=why)
        record = replanned(
            decision, executed=False, override_reason="limit", result="skipped", reason=why
        )
        shapes.append(read(the([record], NoticeKind.OVERRIDDEN)).shape)
    assert shapes[0] == shapes[1]
    assert shapes[0]["ticks"] == ()


def read_text(text: str) -> str:
    """Return the visible rest of a text."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable() or c in "\u200c\u200d")


def test_a_notice_is_never_too_long():
    """However much a model writes, a notice fits into a comment, and keeps its mark."""
    much: list[JsonValue] = ["<&" * 9_000] * 100
    decision = replan("partial_replan", issues_found=much, recommended_actions=much)
    body = the([replanned(decision, result="failure", error="`" * 9_000)], NoticeKind.FAILED)
    assert len(body) <= MAX_COMMENT_CHARS
    assert find_marker(body) == Marker("failed", RUN, "p1")


@given(st.text(), st.text())
@example("r--1 -->", "a\n-->")
def test_marks_are_read_as_they_were_written(run, about):
    """A mark says the same when it is read, whatever it names, and is one HTML comment."""
    run, about = run.encode(errors="ignore").decode(), about.encode(errors="ignore").decode()
    marker = Marker("decided", run, about)
    assert find_marker(f"text\n\n{marker}") == marker
    assert read(str(marker)).html == (str(marker),)


# Notices without a forge


async def test_a_file_holds_the_same_comments(records, expected, clock, tmp_path):
    """A file has every comment that a forge would have; a resumed run goes on in it; what people add stays."""
    path = tmp_path / "new" / "notices.md"
    for length in (len(records) // 2, len(records)):
        notifier = FileNotifier(path)
        notifier.attach(ExporterContext(cut(records[:length]), clock))
        await notifier.export(RUN, records[length - 1])
        await notifier.aclose()
        path.write_text(f"# My notes\n\n{path.read_text()}")
    comments = await FileForge(path).comments()
    hint = (
        "\n\n*Answer with `replanning pending` and then `replanning approve`, `reject` or `modify`;"
        ' words go with `--comment "…"`.*'
    )
    assert [find_marker(one.body) for one in comments] == marks(expected)
    assert [one.body.replace(hint, "") for one in comments] == [one.body for one in expected.kept]
    assert path.read_text().startswith("# My notes\n\n# My notes\n")
    assert [one.name for one in path.parent.iterdir()] == ["notices.md"]


async def test_a_folder_has_a_file_for_each_run(records, clock, tmp_path):
    """In a folder each run has a file under its id, wherever that id points to."""
    notifier = FileNotifier.from_target(f"{tmp_path}/notices/")
    notifier.attach(ExporterContext(cut(records), clock))
    await notifier.export(RUN, records[-1])
    assert [one.name for one in (tmp_path / "notices").iterdir()] == [f"{RUN}.md"]
    assert notifier._index_for(RunId("../x")).forge.name.endswith("..%2Fx.md")


async def test_what_people_write_around_comments_stays(tmp_path):
    """Notes before, between and after the comments stay where they are, whatever ends their lines, and so do permissions."""
    path = tmp_path / "notices.md"
    forge = FileForge(path)
    await forge.post("first\n\n<!-- mark -->")
    await forge.post("second")
    between, (one, two, _) = "My note.", path.read_text().split("<!-- end of comment")
    whole = f"Before.\n\n{one}<!-- end of comment 1 -->\n{between}\n\n{two[7:]}<!-- end of comment 2 -->\nAfter.\n"
    path.write_bytes(b"\xef\xbb\xbf" + whole.replace("\n", "\r\n").encode())
    path.chmod(0o600)
    assert [comment.body for comment in await forge.comments()] == [
        "first\n\n<!-- mark -->",
        "second",
    ]
    await forge.edit("1", "first, edited")
    await forge.post("third")
    assert [comment.body for comment in await forge.comments()] == [
        "first, edited",
        "second",
        "third",
    ]
    said = [line for line in path.read_text().splitlines() if line and not line.startswith("<!--")]
    assert said == ["Before.", "first, edited", between, "second", "After.", "third"]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_file_that_cannot_be_written(tmp_path):
    """If the file cannot be written, the error names it and the reason."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(
        ForgeError, match=r"taken/notices.md cannot be (read|written): Not a directory"
    ):
        await FileForge(tmp_path / "taken" / "notices.md").post("x")


async def test_console_lines():
    """The console has a line for each notice, and one whenever the plan has come further."""
    stream = io.StringIO()
    await carried_out(EVENTFUL, ConsoleNotifier(stream), failing=1)
    assert stream.getvalue().splitlines() == [
        "❓ Clarification Needed (AI Decision): Which people? Which news?",
        "⚠️ Plan Revision Overridden by a Limit: action_regeneration: its confidence is 0.1, and 0.3 is needed",
        "📋 Progress: 0/2 (0%) complete",
        "🔄 Plan Revision Decided by AI: retry after execution, 60 %: a retry is needed",
        "🚀 Plan Revision Started: retry after execution, 60 %: a retry is needed",
        "✅ Plan Revision Done: retry",
        "📋 Progress: 1/2 (50%) complete",
        "📋 Progress: 2/2 (100%) complete",
        "🏁 Execution Finished: succeeded: every required task is done",
    ]


async def test_the_console_does_not_repeat_itself_after_a_resume(records, clock):
    """Of a run that is resumed the console tells what is new."""
    stream = io.StringIO()
    notifier = ConsoleNotifier(stream)
    notifier.attach(ExporterContext(cut(records), clock))
    for record in records[-4:]:
        await notifier.export(RUN, record)
    assert "Decided" not in stream.getvalue()


# On the command line

TOOL = (
    "tools: [{name: write, kind: shell, parameters: {text: string}, command: 'if test -e again; then echo {text}; else"
    " touch again; kill -9 $PPID; fi'}]"
)
"""Ends the program that uses it for the first time, as nothing else could."""

SHORT: Replies = {
    "task_decomposition": {"subtasks": [{"id": "write", "description": "Write to @everybody"}]},
    "action_sequence": {"actions": [action("write", "write")]},
    "decision:execution": (replan("retry"), go_on()),
}


def test_a_run_that_was_killed_goes_on_in_the_same_file(tmp_path):
    """A program that is killed in the middle is resumed: file and console tell everything once, and the box is ticked."""
    (tmp_path / "tools.yaml").write_text(TOOL, encoding="utf-8")
    model = Model(SHORT)

    def service(request: LLMRequest) -> LLMServerReply:
        return json.dumps(model(request.prompt))

    told = ("--notify", "notices.md", "--notify", "console")
    with ScriptedLLMServer(service) as server:
        wanted = (
            "--goal",
            "Tell people",
            "--tools",
            "tools.yaml",
            "--llm",
            "openai",
            "--run-id",
            "r",
            "-q",
        )
        killed = process(
            tmp_path, "solve", *wanted, *told, code=-signal.SIGKILL, **server.environ()
        )
        before = anyio.run(FileForge(tmp_path / "notices.md").comments)
        resume = ("resume", "r", "--replan-provider", "openai", "-q", *told)
        asked = cli(tmp_path, *resume, code=4, **server.environ())
        cli(tmp_path, "approve", "r.q1")
        again = cli(tmp_path, *resume, **server.environ())

    after = anyio.run(FileForge(tmp_path / "notices.md").comments)
    assert [read(one.body).ticks for one in before] == [(False,)]
    assert [found.kind for one in after if (found := find_marker(one.body))] == [
        "checklist",
        "decided",
        "started",
        "done",
        "question",
        "finished",
    ]
    assert read(after[0].body).ticks == (True,)
    assert (read(after[0].body).calls, after[0].id) == ((), before[0].id)
    assert killed.stderr.splitlines() == ["📋 Progress: 0/1 (0%) complete"]
    assert "🙋 Decision Needed: task 'write'" in asked.stderr
    assert again.stderr.splitlines()[0] == "📋 Progress: 1/1 (100%) complete"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("github", "github=owner/repo#12"),
        ("gitlab=", "gitlab=group/project#12"),
        (" ", "name a file"),
        ("github=x", "x"),
        (
            "github=owner/repo#12",
            "--notify: writing to owner/repo#12 needs a token: set GITHUB_TOKEN",
        ),
        (
            "tools.yaml/notices.md",
            "--notify: tools.yaml/notices.md cannot be written: Not a directory",
        ),
        ("tools.yaml/", "--notify: tools.yaml/notices.md cannot be written: Not a directory"),
        (
            "binary.md",
            "--notify: binary.md cannot be written: 'utf-8' codec can't decode byte 0xff",
        ),
        ("pipe", "--notify: pipe cannot be written: not a regular file"),
        ("/dev/null", "--notify: /dev/null cannot be written: not a regular file"),
        ("/proc/notices.md", "--notify: /proc/notices.md cannot be written: "),
    ],
)
def test_wrong_targets(tmp_path, target, told):
    """A target that names nothing, or where nothing can be written, is refused before anything is run, and why is said."""
    (tmp_path / "tools.yaml").write_text(TOOL, encoding="utf-8")
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    wanted = ("--goal", "Tell people", "--tools", "tools.yaml", "--llm", "openai")
    keys = {"OPENAI_API_KEY": "sk-none-of-this-is-used", "GITHUB_TOKEN": ""}
    assert told in cli(tmp_path, "solve", *wanted, "--notify", target, code=2, **keys).stderr


async def test_done_is_told_once_there_is_another_plan():
    """A revision is told as done after its plan was made, with its tasks counted, and a revision without a plan never."""
    replies: Replies = {
        "decision:execution": (replan("partial_replan"), go_on()),
        "revision": {
            "plan_revision": {
                "reason": "another way",
                "updated_action_plan": {
                    "actions": [action("write", "shout"), action("post", "post")]
                },
            }
        },
    }
    records = await carried_out(replies, failing=1)
    account = RunNotices(RUN)
    plans = 0
    kinds: list[NoticeKind] = []
    for record in records:
        account.fold(record)
        if record.body.kind == "planning-noted" and record.body.type == "plan":
            plans += 1
        kinds = [notice.kind for notice in account.pending]
        assert plans == 2 or NoticeKind.DONE not in kinds
    assert kinds.count(NoticeKind.DONE) == 1
    assert "**Tasks**: 2, 0 done" in the(records, NoticeKind.DONE)

    unusable = {**replies, "revision": {"no": "plan"}}
    kinds = [notice.kind for notice in notices(await carried_out(unusable, failing=1))]
    assert NoticeKind.DONE not in kinds
    assert NoticeKind.FAILED in kinds

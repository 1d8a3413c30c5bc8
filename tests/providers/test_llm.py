"""Alternatives from a language model: what it is asked, what becomes of its answers, and what it may not do."""

import json
import re
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Plan, ReplanRequest, open_run
from replanning.errors import LLMUnavailable
from replanning.journal import AlternativesConsidered, DecisionMade, QuestionAsked, TaskFailed
from replanning.llm.quoting import encode_data
from replanning.plan import JsonObject, TaskId
from replanning.providers._prompt import CUT_ORDER, MAX_TASKS, MIN_PROMPT_CHARS, PromptBuilder
from replanning.providers.llm import MAX_CANDIDATES, MAX_CHANGES, LLMAlternatives
from replanning.secrets import Redactor
from replanning.testing import ScriptedLLM, hangs
from tests.secrets.test_redactor import BY_NAME, BY_SHAPE
from tests.support.models import PLAN, candidate, change, played, replaced, reply


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([change("retry", task_id="build")], ["build"]),
        ([change("modify", task_id="build", tool="cmake"), change("retry", task_id="build")], ["build"]),
        ([change("add", task={"id": "new", "tool": "cmake", "arguments": {"out": "x"}, "goal": None}, before=["build"]),
          change("retry", task_id="build")], ["new", "build"]),
        ([change("reorder", order=["tidy", "ship"]), change("retry", task_id="build")], ["build"]),
        ([change("skip", task_id="tidy", reason="later"), change("retry", task_id="build")], ["build"]),
        ([change("cancel", task_id="tidy"), change("retry", task_id="build")], ["build"]),
        ([change("remove", task_id="tidy"), change("retry", task_id="build")], ["build"]),
    ],
)  # fmt: skip
async def test_every_kind_of_change_can_be_proposed(changes, left):
    """Each kind of change in a reply becomes the change of the plan of the same kind; null stands for what is left out."""
    found = await played([reply(candidate(*changes))], broken={"build": 1})
    assert found.result.status == "succeeded"
    (revised,) = found.result.revisions
    assert [made.kind for made in revised.changes] == [made["kind"] for made in changes]
    assert [task for task in found.executed if task in ("new", "build")] == ["build", *left]


async def test_a_replacement_inherits_what_a_model_has_no_say_in():
    """A new task has the priority, time, retries, conditions and resources of the one it replaces, and its unused fallbacks."""
    plan = PLAN.replace(
        "arguments: {out: dist},",
        "arguments: {out: dist}, timeout: 9, priority: 3, retry: {max_attempts: 1}, idempotent: true, "
        "fallbacks: [{tool: cmake, arguments: {out: new}}, {tool: cmake, arguments: {out: other}}],",
    )
    found = await played(
        [reply(candidate(replaced("build", "cmake"), reason="cmake is there"))], plan=plan
    )
    (revised,) = found.result.revisions
    (new,) = revised.changes[0].tasks
    assert (found.result.status, revised.reason) == ("succeeded", "cmake is there")
    assert (new.timeout, new.priority, new.retry.max_attempts, new.idempotent) == (9, 3, 1, None)
    assert [fallback.arguments for fallback in new.fallbacks] == [{"out": "other"}]


async def test_a_task_for_each_element_can_be_proposed():
    """Instead of many tasks a model proposes one for each element of a list, which is carried out as in a plan file."""
    task = replaced("build", "cmake", arguments={"out": "${item.to}"})
    task["tasks"][0].update(
        for_each=[{"to": "a"}, {"to": "b"}, {"to": "c"}],
        key="${item.to}",
        max_items=3,
        max_parallel=2,
        on_item_failure="skip",
    )
    found = await played([reply(candidate(task))], broken={"build": 1, "new[b]": 9})
    assert found.result.status == "succeeded"
    assert found.executed[:5] == ["fetch", "build", "new[a]", "new[b]", "new[c]"]
    assert '"for_each"' in found.prompts[0]
    new = found.result.revisions[0].changes[0].tasks[0]
    assert (new.max_items, new.max_parallel, new.on_item_failure) == (3, 2, "skip")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"for_each": "${ghost.output}"}, "ghost"),
        ({"for_each": "all of them"}, "expected a list, a mapping, or a reference"),
        ({"for_each": [1], "max_items": 1001}, "less than or equal to 1000"),
    ],
)
async def test_a_task_for_each_element_of_nothing_is_refused(fields, why):
    """What is no list of elements is refused, and the model is told why."""
    task = replaced("build", "cmake")
    task["tasks"][0].update(fields)
    found = await played([reply(candidate(task)), reply(candidate(replaced("build", "cmake")))])
    (considered, *_) = found.bodies(AlternativesConsidered)
    told = " ".join([*considered.notes, *(one.rejected for one in considered.candidates)])
    assert why in told


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([replaced("build", "rm")], "there is no tool 'rm'"),
        ([replaced("build", "cmake", arguments={})], "tool 'cmake' needs the argument 'out'"),
        ([replaced("build", "cmake", arguments={"out": 5})], "expected string, not a number"),
        ([replaced("build", "cmake", arguments={"out": "x", "as": "root"})], "has no parameter 'as'"),
        ([replaced("build", "cmake", id="build")], "ids are never used again"),
        ([replaced("build", "cmake", depends_on=["ghost"])], "ghost"),
        ([replaced("build", "cmake", depends_on=["ship"])], "would wait for one another"),
        ([change("retry", task_id="ghost")], "there is no task 'ghost'"),
        ([change("remove", task_id="fetch")], "cannot be removed"),
        ([], "it changes nothing"),
    ],
)  # fmt: skip
async def test_what_the_plan_cannot_hold_is_rejected_and_said_to_the_model(changes, why):
    """A candidate that does not fit stands in the history with the reason, and the model is told that reason once."""
    found = await played([reply(candidate(*changes)), reply(candidate(replaced("build", "cmake")))])
    considered = found.bodies(AlternativesConsidered)[0]
    assert [bool(one.rejected) for one in considered.candidates] == [False, True]
    assert why in considered.candidates[1].rejected
    assert found.result.status == "succeeded"
    assert "<rejected>" not in found.prompts[0]
    assert why in found.prompts[1].partition("<rejected>")[2]


async def test_the_same_as_before_is_not_tried_again():
    """A failed call that is proposed again under another id is dropped, and the model is told so."""
    way = reply(candidate(replaced("build", "cmake")))
    again = reply(candidate(replaced("new", "cmake", id="newer")))
    found = await played([way, again, reply()], broken={"build": 9, "new": 9}, cooldown=0)
    assert found.result.status == "failed"
    assert (
        "the same call already failed as 'new'" in found.bodies(AlternativesConsidered)[1].notes[0]
    )
    assert '"why_not": "the same call already failed' in found.prompts[2]
    assert found.executed == ["fetch", "build", "new"]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"reason": "x"}, "changes: Field required"),
        ({"reason": "x", "changes": [{"kind": "explode"}], "confidence": 1.0}, "changes.0: Input tag 'explode'"),
        ({"reason": "x", "changes": [], "confidence": 2.0}, "confidence: Input should be less than or equal to 1"),
        ({"reason": "x", "changes": [change("answer", question_id="q1")], "confidence": 1.0}, "Input tag 'answer'"),
        (candidate({**change("retry", task_id="build"), "by": "person"}), "by: Extra inputs are not permitted"),
        (candidate(replaced("build", "cmake", idempotent=True)), "idempotent: Extra inputs are not permitted"),
        (candidate(replaced("build", None)), "'new' names no tool of the library"),
        (candidate(replaced("build", "cmake", id="a\nb")), "String should match pattern"),
        (candidate(change("replace", task_id="build", tasks=[])), "has no replacement tasks"),
        (candidate(change("modify", task_id="build")), "changes no field"),
        (candidate(*[change("retry", task_id="build")] * (MAX_CHANGES + 1)), f"more than {MAX_CHANGES} changes"),
    ],
)  # fmt: skip
async def test_what_is_no_candidate_is_dropped_with_the_reason(raw, why):
    """A candidate that cannot be read is dropped without the others, and a note in the history says why."""
    found = await played([reply(raw, candidate(replaced("build", "cmake")))])
    considered = found.bodies(AlternativesConsidered)[0]
    assert why in considered.notes[0]
    assert len(found.prompts) == 1
    assert found.result.status == "succeeded"


async def test_only_so_many_candidates_are_looked_at():
    """Of a flood of candidates the first are looked at, and a note says how many are left out."""
    flood = [candidate(change("retry", task_id="ghost")) for _ in range(MAX_CANDIDATES + 3)]
    found = await played([reply(*flood), reply()])
    considered = found.bodies(AlternativesConsidered)[0]
    assert len(considered.candidates) == MAX_CANDIDATES
    assert "only the first 20 of 23 candidates are read" in considered.notes[0]


NONSENSE = reply(candidate(replaced("build", "rm")))


@pytest.mark.parametrize(
    ("script", "budget", "prompts", "notes"),
    [
        ([reply()], {}, 1, []),
        ([NONSENSE, reply(candidate(replaced("build", "dd")))], {}, 2, []),
        ([NONSENSE, LLMUnavailable("overloaded")], {}, 2, ["overloaded"]),
        ([NONSENSE], {"calls": 1}, 1, ["2 of 1 calls"]),
    ],
    ids=["sees no way", "no better", "fails", "too dear"],
)
async def test_a_model_is_told_only_once(script, budget, prompts, notes):
    """A model is asked a second time only if nothing it proposed can be used; its first answer stands in the history."""
    found = await played(script, budget=budget)
    considered = found.bodies(AlternativesConsidered)[0]
    assert len(found.prompts) == prompts
    assert all("there is no tool" in one.rejected for one in considered.candidates)
    assert [note in told for note, told in zip(notes, considered.notes, strict=True)] == [
        True
    ] * len(notes)
    assert found.bodies(DecisionMade)[0].rule == "no-alternative"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([change("abort", reason="hopeless")], "to end the run"),
        ([change("skip", task_id="build")], "to do without 'build', which the plan requires"),
        ([change("cancel", task_id="ship"), change("skip", task_id="build")], "to do without 'ship'"),
        ([replaced("build", "cmake", timeout=1000.0)], "to give 'new' 16 min 40 s instead of 60 s"),
        ([change("modify", task_id="ship", depends_on=[]), replaced("build", "cmake")], "to let 'ship' run without waiting for 'build'"),
        ([replaced("build", "wipe")], "the tool 'wipe' needs a person's agreement"),
        ([change("modify", task_id="build", tool="wipe"), change("retry", task_id="build")], "the tool 'wipe' needs"),
        ([change("add", task={"id": "new", "tool": "wipe", "arguments": {"out": "/"}}), change("retry", task_id="build")], "the tool 'wipe' needs"),
    ],
)  # fmt: skip
async def test_some_things_need_a_person_however_sure_a_model_is(changes, why):
    """A person is asked before changes that are dangerous, end the run, give up required tasks or take longer."""
    found = await played([reply(candidate(*changes, confidence=1.0))])
    (question,) = found.bodies(QuestionAsked)
    assert why in question.text
    assert found.result.status == "needs_human"
    assert found.result.revisions == ()
    assert found.executed == ["fetch", "build"]


@pytest.mark.parametrize(
    ("tool", "status"), [("make", "needs_human"), ("cmake", "needs_human"), ("wait", "succeeded")]
)
async def test_what_may_have_taken_effect_is_not_done_again_under_another_name(tool, status):
    """Work that was cut off is a repetition also where it is left out and added anew, with its tool or an equal one."""
    plan = re.sub("name: (c?make),", r"name: \1, capability: b,", PLAN)
    plan = plan.replace(
        "tasks:", "  - {name: wait, kind: shell, command: wait, parameters: {out: string}}\ntasks:"
    )
    plan = plan.replace(
        "arguments: {out: dist},", "arguments: {out: dist}, timeout: 5, optional: true,"
    )
    way = candidate(
        change("skip", task_id="build"),
        change("add", task={"id": "new", "tool": tool, "arguments": {"out": "x"}}),
    )
    found = await played(
        [reply(way)], plan, broken={}, outputs={"build": hangs()}, triggers=["timeout"]
    )
    assert found.result.status == status
    assert found.bodies(DecisionMade)[0].rule == (
        "in-doubt" if status == "needs_human" else "confident"
    )


def test_name_and_size():
    """It is called as its language model's provider unless another name is given; too small a prompt is refused."""
    assert LLMAlternatives(ScriptedLLM(name="acme")).name == "acme"
    assert LLMAlternatives(ScriptedLLM(), name="llm").name == "llm"
    with pytest.raises(ValueError, match="give at least 6000"):
        LLMAlternatives(ScriptedLLM(), size=100)


# Prompts about a plan


RICH = """
goal: {objective: Ship the release, success_criteria: [it can be installed]}
context: {region: north}
resources: {cpu: 4}
budget: {calls: 9}
tools:
  - {name: get, kind: shell, command: "get --key {env:KEY}", adds: [here]}
  - {name: make, kind: shell, command: "make {out}", capability: build, adds: [built], requires: [here]}
  - {name: cmake, kind: shell, command: "cmake {out}", parameters: {out: string}, capability: build, adds: [built], available: false}
  - {name: wipe, kind: shell, command: "wipe", dangerous: true, description: Deletes everything}
facts: [quiet]
tasks:
  - {id: fetch, tool: get}
  - {id: build, tool: make, arguments: {out: dist}, depends_on: [fetch], fallbacks: [{tool: cmake, arguments: {out: x}}]}
  - {id: ship, tool: get, depends_on: [build], goal: bring it to people}
"""


def sections(prompt: str) -> dict[str, list[Any]]:
    """The data of a prompt by kind."""
    found: dict[str, list[Any]] = {}
    values: list[Any] = []
    for line in prompt.splitlines():
        if line.startswith("</"):
            continue
        if line.startswith("<"):
            values = found[line.strip("<>")] = []
        elif (
            line.startswith(("{", '"', "["))
            and found
            and not line.startswith(('{"candidates', '{"kind', '"$'))
        ):
            values.append(json.loads(line))
    return found


async def shown(text: str = RICH, broken: str = "build", **parts: object) -> dict[str, list[Any]]:
    """Last prompt after the failure of a task."""
    found = await played([reply()] * 5, text, broken={broken: 9}, **parts)  # type: ignore[arg-type]
    return sections(found.prompts[-1])


def prompts_of(plan: Plan, failed: str, size: int = 24_000) -> tuple[str, str]:
    """The first prompt about a task of a plan of which nothing has run yet, and the one after a rejection."""

    async def written() -> tuple[str, str]:
        async with open_run(plan) as run:
            trigger = TaskFailed(tasks=(TaskId(failed),), message=plan.goal.objective)
            request = ReplanRequest((trigger,), run.view, 3, 0.0)
            prompts = await PromptBuilder.for_request(request, size, Redactor().value)
            rejected: list[JsonObject] = [
                {"why_not": plan.goal.objective, "changes": [plan.context]}
            ] * 3
            return prompts.render(), prompts.render(rejected)

    return anyio.run(written)


async def test_a_model_is_shown_all_that_a_replanner_needs():
    """Goal, failure, state, results, tools with their availability, facts, limits and context are told, the rest is not."""
    found = await shown(outputs={"fetch": {"sha": "abc"}})
    assert found["goal"] == [
        {"objective": "Ship the release", "success_criteria": ["it can be installed"]}
    ]
    assert [(what["what"], what["tasks"]) for what in found["happened"]] == [
        ("task-failed", ["build"])
    ]
    assert found["tasks"] == [
        {
            "id": "build",
            "state": "FAILED",
            "tool": "make",
            "arguments": {"out": "dist"},
            "depends_on": ["fetch"],
            "error": {"kind": "error", "type": "RuntimeError", "message": "it is broken"},
            "attempts": 1,
            "waited_for_by": ["ship"],
            "fallbacks": [{"tool": "cmake", "arguments": {"out": "x"}}],
            "free_id": "build~2",
        }
    ]
    assert [(other["id"], other["state"]) for other in found["around"]] == [
        ("fetch", "DONE"),
        ("ship", "PENDING"),
    ]
    assert found["results"] == [{"task": "fetch", "output": {"sha": "abc"}}]
    shown_tools = [
        (tool["name"], tool["available"], tool.get("dangerous")) for tool in found["tools"]
    ]
    assert shown_tools == [
        ("make", True, None),
        ("cmake", False, None),
        ("get", True, None),
        ("wipe", True, True),
    ]
    assert found["tools"][0]["parameters"] == {"out": "any"}
    assert sorted(found["facts"]) == ["here", "quiet"]
    assert [found["limits"][0][name] for name in ("resources", "budget")] == [
        {"cpu": 4.0},
        {"calls": 9},
    ]
    assert found["context"] == [{"region": "north"}]
    assert "--key" not in json.dumps(found)


def test_a_model_is_shown_parameters():
    """The values of parameters are told as the context is, and of a secret only that there is one."""
    text = """
        goal: {objective: ship}
        parameters: {region: {default: eu}, token: {secret: true}}
        tasks: [{id: a, tool: t, arguments: {key: "${parameters.token}"}}]
    """
    plan = Plan.parse(text, parameters={"token": "correct horse battery"})
    for prompt in prompts_of(plan, "a"):
        assert sections(prompt)["parameters"] == [{"region": "eu"}, {"token": "[redacted]"}]
        assert "${parameters.token}" in prompt
        assert "correct horse" not in prompt


async def test_a_model_is_shown_what_was_tried_and_decided_before():
    """The next prompt has earlier revisions with their outcomes, rejections with reasons, and the task's lineage."""
    way = reply(candidate(replaced("build", "cmake")), candidate(replaced("build", "rm")))
    found = await played([way, reply()], PLAN, broken={"build": 9, "new": 9}, cooldown=0)
    seen = sections(found.prompts[1])
    earlier = {name: value for one in reversed(seen["earlier"]) for name, value in one.items()}
    assert (earlier["decided"], earlier["worked"], earlier["changed"][0]["kind"]) == (
        "execute",
        False,
        "replace",
    )
    assert "there is no tool 'rm'" in earlier["considered"][1]["rejected"]
    assert seen["tasks"][0]["replaced_in_vain"][0]["id"] == "build"


async def test_without_tasks_the_stuck_ones_are_shown():
    """If no task can run and none is named, a model is shown the stuck tasks."""
    found = await shown(PLAN, triggers=["goal-unreachable"], approval={"always_for": []})
    assert [task["id"] for task in found["tasks"]] == ["build"]


async def test_the_nearest_tasks_are_shown_of_a_long_plan():
    """Of a long plan only what stands nearest to the failure is looked at, and the counts say how much there is."""
    tasks = "".join(
        f"- {{id: t{n}, depends_on: [{f't{n - 1}' if n else ''}]}}\n" for n in range(1, 2_000)
    )
    plan = f"goal: {{objective: test}}\ntasks:\n- {{id: t0}}\n{tasks}"
    found = await shown(plan, "t500")
    near = [int(task["id"][1:]) for task in found["around"] if "id" in task]
    assert near[:4] == [499, 501, 498, 502]
    assert len(near) < MAX_TASKS
    assert found["limits"][0]["tasks"]["PENDING"] == 1_499


LISTED = """
goal: {objective: convert}
tools: [{name: get}, {name: conv}, {name: tell}]
tasks:
  - {id: list, tool: get}
  - {id: convert, tool: conv, depends_on: [list], for_each: "${list.output}", arguments: {file: "${item}"}}
  - {id: report, tool: tell, depends_on: [convert]}
"""


@pytest.mark.parametrize("count", [40, 1_000])
async def test_a_model_is_shown_the_elements_of_a_list_as_numbers(count):
    """Of a list, a model is shown the element that failed with its item, and of the others how many there are in each state."""
    found = await shown(LISTED, "convert[7]", outputs={"list": list(range(count))})
    (task,) = found["tasks"]
    assert (task["id"], task["element_of"], task["item"]) == ("convert[7]", "convert", 7)
    around = {other["id"]: other for other in found["around"]}
    assert set(around) == {"list", "convert", "report"}
    assert around["convert"]["elements"]["FAILED"] == 1
    assert sum(around["convert"]["elements"].values()) == count
    assert "state" not in around["convert"]
    expanded = [one for one in found["earlier"] if one.get("by") == "for_each"]
    assert expanded[0]["changed"] == [{"kind": "expand", "task_id": "convert", "elements": count}]


async def test_a_model_is_shown_a_list_before_the_task_that_failed():
    """A task that follows a list is shown the list and its result, and none of the elements."""
    found = await shown(LISTED, "report", outputs={"list": list(range(40))})
    assert [other["id"] for other in found["around"]] == ["convert", "list"]
    assert found["around"][0]["elements"] == {"DONE": 40}
    assert [one["task"] for one in found["results"]] == ["convert", "list"]


def long_plan(fill: int) -> Plan:
    """A plan with much of everything, whose texts are so long."""
    text = "word " * (fill // 5)
    return Plan.model_validate(
        {
            "goal": {
                "objective": text,
                "success_criteria": [text] * 3,
                "facts": [f"g{n}({text})" for n in range(3)],
            },
            "context": {f"k{n}": text for n in range(30)},
            "facts": [f"f{n}({text})" for n in range(200)],
            "tools": [{"name": f"tool{n}", "description": text} for n in range(50)],
            "tasks": [
                {"id": f"t{n}", "tool": f"tool{n}", "goal": text, "arguments": {"a": [text] * 5}}
                for n in range(50)
            ],
        }
    )


@pytest.mark.parametrize("size", [MIN_PROMPT_CHARS, 9_000, 24_000, 60_000])
@pytest.mark.parametrize("fill", [10, 400, 4_000])
def test_a_prompt_is_never_longer_than_its_size(size, fill):
    """Whatever there is to say, prompts fit; the goal, what happened and the task concerned are still in them."""
    for prompt in prompts_of(long_plan(fill), "t7", size):
        assert len(prompt) <= size
        found = sections(prompt)
        assert "objective" in found["goal"][0]
        assert found["happened"][0]["what"] == "task-failed"
        assert found["tasks"][0]["id"] == "t7"


def test_what_is_cut_first_is_what_the_documentation_says():
    """With less room, kinds of data disappear in the stated order, and where something is missing a line says how much."""
    whole = sections(prompts_of(long_plan(100), "t7", 200_000)[0])
    gone: list[str] = []
    for size in range(80_000, MIN_PROMPT_CHARS, -2_000):
        found = sections(prompts_of(long_plan(100), "t7", size)[0])
        for name in whole:
            marks = [
                value["cut"] for value in found[name] if isinstance(value, dict) and "cut" in value
            ]
            left = len(found[name]) - len(marks)
            assert marks == (
                [f"{len(whole[name]) - left} more of these"] if left < len(whole[name]) else []
            )
            if left == 0 and name not in gone:
                gone.append(name)
    assert gone == [name for name in CUT_ORDER if name in gone]
    assert gone[:2] == ["context", "facts"]


hostile = st.text(
    st.sampled_from("ab<>&/\"'{}[]:\n\r\t \\\u2028\u202e\ud800\U000e0041é\0\x1b"), max_size=40
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | hostile,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hostile, inner, max_size=4),
    max_leaves=12,
)


@given(hostile, hostile, st.integers(MIN_PROMPT_CHARS, 30_000))
def test_no_text_forges_a_tag(one, other, size):
    """Whatever the texts of a plan hold, every tag stands once and every line between them is one value."""
    plan = Plan.model_validate(
        {
            "goal": {"objective": clear(one)},
            "context": {one: [other, {other: one}]},
            "tasks": [
                {"id": "a", "arguments": {one: other}, "goal": clear(other)},
                {"id": "b", "depends_on": ["a"]},
            ],
        }
    )
    for prompt in prompts_of(plan, "a", size):
        assert len(prompt) <= size
        tags = [line for line in prompt.splitlines() if line.startswith("<")]
        assert len(set(tags)) == len(tags)
        assert prompt.count("<") == len(tags) == prompt.count(">")
        assert prompt.replace("\n", "").isprintable()


def clear(text: str) -> str:
    """A text without what a plan file may not hold."""
    return "".join(
        c for c in text if c >= " " and c != "\x7f" and not "\ud800" <= c <= "\udfff"
    ).replace("${", "")


# A login over two lines is none on one, as the name of a task is; and prompts have short words of their own.
ON_ONE_LINE = [
    *((text, text) for text in BY_SHAPE),
    *(pair for pair in BY_NAME if not pair[0].startswith("login bob\n") and len(pair[1]) > 3),
]


@pytest.mark.parametrize("secret", ON_ONE_LINE, ids=lambda secret: secret[1][:16])
def test_no_secret_is_in_a_prompt(secret):
    """A secret in any text of a plan is taken out before a prompt is written, also where the text is cut."""
    text, hidden = secret
    said = clear(text.replace("\n", " "))
    plan = Plan.model_validate(
        {
            "goal": {"objective": said, "success_criteria": ["x" * 900 + " " + said]},
            "context": {"note": text, "log": ["y" * 350 + " " + text]},
            "tools": [{"name": "t", "description": said}],
            "tasks": [
                {"id": "a", "tool": "t", "goal": said, "arguments": {"text": text}, "name": said}
            ],
        }
    )
    for prompt in prompts_of(plan, "a"):
        assert hidden not in prompt
        assert encode_data(hidden).strip('"') not in prompt
        assert "[redacted]" in prompt

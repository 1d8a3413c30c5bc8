"""Outputs of a model in planning mode: parsed strictly, and compiled into tasks or refused with all offenders."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Goal, Plan, ToolSpec
from replanning.errors import LLMResponseInvalid
from replanning.planning import Action, ActionPlan, Phase, Subtask, TaskDecomposition
from replanning.planning.outputs import (
    CompletionReply,
    ExecutionReply,
    ReflectionReply,
    RequiresHumanIntervention,
    RevisionReply,
    StepReply,
    parse_planning,
    parse_reply,
)
from replanning.planning.tasks import (
    check_subtasks,
    compile_action_plan,
    planned_arguments,
    revise_decomposition,
)

GOAL = Phase.GOAL_UNDERSTANDING
TOOLS = (
    ToolSpec(name="read_file", kind="python", callable="tools:read", parameters={"path": "string"}),
    ToolSpec(
        name="write_file",
        kind="python",
        callable="tools:write",
        parameters={"path": "string", "text": "string"},
    ),
    ToolSpec(name="run", kind="shell", command="{line}", resources={"cpu": 1}),
)

UNDERSTOOD = {
    "main_objective": "the tests pass",
    "success_criteria": ["pytest exits with 0"],
    "constraints": ["no new dependency"],
    "context": "Python",
}
SUBTASKS = [
    {"id": "look", "description": "see what fails", "required_tools": ["run"]},
    {"id": "docs", "description": "say it", "dependencies": []},
    {
        "id": "fix",
        "description": "mend it",
        "dependencies": ["look"],
        "estimated_complexity": "high",
    },
]
ACTIONS = [
    {
        "task_id": "look",
        "action_type": "check",
        "tool": "run",
        "arguments": {"line": "pytest"},
        "purpose": "find what fails",
        "expected_outcome": "a list of failures",
        "fallback_strategy": "read_file: the log has it",
        "may_fail": True,
    },
    {"task_id": "fix", "tool": "read_file", "arguments": {"path": "${look.output.path}"}},
    {
        "task_id": "fix",
        "tool": "write_file",
        "arguments": {"path": "a.py"},
        "fallback_strategy": "ask somebody",
    },
    {"task_id": "docs", "tool": "run", "arguments": {"line": "make docs"}},
]


def decomposition(*subtasks):
    """A decomposition as a model writes it."""
    return TaskDecomposition.model_validate_json(
        json.dumps({"reasoning": "", "subtasks": subtasks or SUBTASKS})
    )


def action_plan(*actions, order=("look", "fix", "docs")):
    """An action plan as a model writes it."""
    return ActionPlan.model_validate_json(
        json.dumps({"execution_order": order, "actions": actions or ACTIONS})
    )


def compiled(subtasks, plan=None, tools=TOOLS, prefix="", max_subtasks=100, **finished):
    """Return the problems of a decomposition and its action plan as the model sees them, and the tasks of the plan."""
    library = {tool.name: tool for tool in tools}
    problems = check_subtasks(subtasks, library, finished=finished, max_subtasks=max_subtasks)
    if plan is None:
        return list(map(str, problems)), ()
    problems, tasks = compile_action_plan(
        plan, subtasks, library, prefix=prefix, finished=finished, problems=problems
    )
    return list(map(str, problems)), tasks


def parsed(text, model):
    """Return a reply as the output of a phase or of another kind of prompt."""
    return parse_planning(text, model) if isinstance(model, Phase) else parse_reply(text, model)


def refusal(text, model=GOAL):
    """Return the reason for refusing a reply."""
    with pytest.raises(LLMResponseInvalid) as caught:
        parsed(text, model)
    return str(caught.value)


PLAN = {"execution_order": ["look"], "actions": ACTIONS[:1], "renamed": {}}
CALL = {"name": "run", "arguments": {"line": "ls"}}
UNCLEAR = {
    "type": "unclear_goal",
    "message": "which table?",
    "clarification_needed": ["Which table?"],
}
CANNOT = {
    "type": "cannot_decompose",
    "message": "too vague",
    "possible": ["a"],
    "not_possible": ["b"],
    "other_approach": "c",
}
REFLECTION = {
    "action_id": "fix",
    "status": "partial",
    "evaluation": "e",
    "issues_identified": ["i"],
    "alignment_with_plan": "a",
    "plan_revision_needed": False,
}
REVISION = {"reason": "r", "changes": ["c"], "updated_action_plan": PLAN}
COUNTS = {"tasks_completed": 2, "tasks_failed": 0}
SUMMARY = {"goal_achieved": True, "criteria_met": [True], **COUNTS, "key_outcomes": ["it works"]}
HELPLESS = {
    **SUMMARY,
    "revision_attempts": 2,
    "reason": "two revisions failed",
    "current_state": "red",
    "recommendations": ["look at a.py"],
}


@pytest.mark.parametrize(
    ("model", "reply"),
    [
        (GOAL, {"phase": "planning", "comment": "fine", "goal_understanding": UNDERSTOOD}),
        (GOAL, {"phase": "planning", "goal_understanding": UNDERSTOOD, "error": UNCLEAR}),
        (GOAL, {"phase": "planning", "error": UNCLEAR}),
        (Phase.TASK_DECOMPOSITION, {"phase": "planning", "error": CANNOT}),
        (Phase.ACTION_SEQUENCE, {"action_plan": PLAN}),
        (ExecutionReply, {"phase": "execution", "current_task": "fix", "function_call": CALL}),
        (ReflectionReply, {"phase": "reflection", "comment": "", "reflection": REFLECTION}),
        (
            ReflectionReply,
            {"plan_revision": REVISION},
        ),
        (CompletionReply, {"phase": "completion", "summary": SUMMARY, "done": True}),
        (
            RequiresHumanIntervention,
            {"status": "requires_human_intervention", "comment": "", "summary": HELPLESS},
        ),
    ],
)
def test_a_reply_is_read_as_it_was_written(model, reply):
    """The outputs of all prompts are read with every field, errors of a phase with what can be inferred."""
    found = parsed(f"Well: {json.dumps(reply)}", model).model_dump(mode="json")
    assert {field: found[field] for field in reply} == reply


@pytest.mark.parametrize(
    ("model", "field", "bare"),
    [
        (GOAL, "goal_understanding", UNDERSTOOD),
        (Phase.ACTION_SEQUENCE, "action_plan", PLAN),
        (ReflectionReply, "reflection", REFLECTION),
        (RevisionReply, "plan_revision", REVISION),
        (ExecutionReply, "function_call", CALL),
    ],
)
def test_a_reply_needs_no_envelope(model, field, bare):
    """What is asked for may come by itself."""
    assert getattr(parsed(json.dumps(bare), model), field).model_dump(mode="json") == bare


def test_a_reflection_with_its_revision():
    """An evaluation may call its action `action_evaluated`, and changes may be objects with a type and details."""
    evaluation = {name: REFLECTION[name] for name in ("status", "evaluation", "issues_identified")}
    change = {"type": "add_action", "details": "ask somebody"}
    reply = {
        "phase": "reflection",
        "reflection": {"action_evaluated": "fix", **evaluation, "plan_revision_needed": True},
        "plan_revision": {**REVISION, "changes": [change, "no second try"]},
        "comment": "the plan is another one",
    }
    for model in (ReflectionReply, RevisionReply):
        found = parsed(json.dumps(reply), model)
        assert (found.reflection.action_id, found.reflection.status) == ("fix", "partial")
        assert found.reflection.plan_revision_needed
        assert found.plan_revision.changes == ("add_action: ask somebody", "no second try")


def test_a_summary_that_counts_no_failures():
    """A summary may leave out how many tasks have failed, which the journal knows."""
    reply = {
        "done": True,
        "phase": "completion",
        "summary": {"goal_achieved": True, "tasks_completed": 5, "key_outcomes": ["it works"]},
        "comment": "everything is done",
    }
    found = parsed(json.dumps(reply), CompletionReply)
    assert (found.summary.tasks_completed, found.summary.tasks_failed) == (5, None)


def test_a_decomposition_is_read_with_its_subtasks():
    """Subtasks keep their ids, dependencies, tools and complexity, which is medium where nothing is said."""
    reply = {"task_decomposition": {"reasoning": "so", "subtasks": SUBTASKS}}
    look, docs, fix = parsed(
        json.dumps(reply), Phase.TASK_DECOMPOSITION
    ).task_decomposition.subtasks
    assert (look.required_tools, docs.estimated_complexity) == (("run",), "medium")
    assert (fix.dependencies, fix.estimated_complexity) == (("look",), "high")


@pytest.mark.parametrize(
    ("model", "reply", "said"),
    [
        (
            GOAL,
            {**UNDERSTOOD, "success_criteria": "yes"},
            "goal_understanding.success_criteria: expected a list",
        ),
        (
            GOAL,
            {**UNDERSTOOD, "main_objective": 7},
            "goal_understanding.main_objective: expected text",
        ),
        (GOAL, {**UNDERSTOOD, "main_objective": ""}, "must not be empty"),
        (GOAL, {**UNDERSTOOD, "goals": []}, "there is no field 'goals' here"),
        (GOAL, {**UNDERSTOOD, "context": "a\u0000b"}, "must not contain control characters"),
        (GOAL, {**UNDERSTOOD, "context": "x" * 20_001}, "at most 20000"),
        (GOAL, {"phase": "planning"}, "expected 'goal_understanding' or 'error'"),
        (
            GOAL,
            {"phase": "planning", "task_decomposition": {"subtasks": SUBTASKS}},
            "expected 'goal_understanding'",
        ),
        (ReflectionReply, {**REFLECTION, "status": "fine"}, "status"),
        (ReflectionReply, {**REFLECTION, "plan_revision_needed": "false"}, "plan_revision_needed"),
        (
            ReflectionReply,
            {"phase": "reflection"},
            "expected 'reflection', 'plan_revision' or both",
        ),
        (
            ReflectionReply,
            {**REFLECTION, "action_evaluated": "look"},
            "there is no field 'action_evaluated' here",
        ),
        (
            ReflectionReply,
            {"plan_revision": {**REVISION, "changes": [{"type": "add_action"}]}},
            "plan_revision.changes[0]: expected text",
        ),
        (
            RevisionReply,
            {},
            "plan_revision.reason: 'reason' is missing; plan_revision.updated_action_plan",
        ),
        (RevisionReply, {"phase": "reflection"}, "'plan_revision' is missing"),
        (RevisionReply, {"reflection": REFLECTION}, "'plan_revision' is missing"),
        (ExecutionReply, {"arguments": {}}, "function_call.name: 'name' is missing"),
        (CompletionReply, {"summary": SUMMARY, "done": False}, "done"),
        (
            CompletionReply,
            {"summary": {**SUMMARY, "tasks_failed": -1}, "done": True},
            "tasks_failed",
        ),
        (
            CompletionReply,
            {"summary": {**SUMMARY, "criteria_met": [True, False]}},
            "not every one of 'criteria_met'",
        ),
        (CompletionReply, {"summary": {**SUMMARY, "criteria_met": ["true"]}}, "criteria_met"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model, reply, said):
    """A reply with a wrong type, a foreign field, too much text or nothing of what was asked is refused, saying what."""
    assert said in refusal(json.dumps(reply), model)


def test_all_that_is_wrong_is_said_at_once():
    """A model is told of every field that is wrong in the likeliest of its answers, not of the first."""
    wrong = {"phase": "planning", "goal_understanding": {"success_criteria": 1, "constraints": 2}}
    said = refusal(f'{{"note": 1}} and {json.dumps(wrong)} and {{"note": 2}}')
    assert all(name in said for name in ("main_objective", "success_criteria", "constraints"))


def test_a_reply_beyond_all_size_is_not_read():
    """A reply of more than 200,000 characters is refused before anything is made of it."""
    assert "at most 200000" in refusal(json.dumps(UNDERSTOOD) + " " * 200_000)


def test_a_step_uses_a_tool_or_ends():
    """A step of the tool loop either uses a tool or ends the run; both or neither is rejected."""
    call = '"function_call": {"name": "a"}'
    end = '"summary": {"goal_achieved": true, "tasks_completed": 1, "tasks_failed": 0}'
    for text in (f'{{{call}, {end}, "done": true}}', f"{{{end}}}", '{"comment": "hm"}'):
        assert "expected either 'function_call', or 'summary' with 'done': true" in refusal(
            text, StepReply
        )
    assert parse_reply(f'{{{end}, "done": true}}', StepReply).done


def test_an_action_plan_becomes_a_dag():
    """Subtasks wait for those they depend on alone, and the actions of one follow one another; its last bears its id."""
    _, tasks = compiled(decomposition(), action_plan())
    assert [(task.id, task.depends_on, task.priority) for task in tasks] == [
        ("look", (), 0),
        ("fix-1", ("look",), 1),
        ("fix", ("fix-1",), 2),
        ("docs", (), 3),
    ]
    assert tasks[3].arguments == {"line": "make docs"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("step 1", "step-1"),
        ("api/x", "api-x"),
        ("テスト", "テスト"),
        ("テスト その1", "テスト-その1"),
        ("_private", "private"),
        ("1) Größe: prüfen!", "1-Größe-prüfen"),
        ("x" * 70, "x" * 60),
        ("fine-id_1.2", "fine-id_1.2"),
    ],
)
def test_ids_are_normalised(text, name):
    """Ids that models like are normalised wherever they occur, references included, and the mapping is kept."""
    first, last = (
        {"id": text, "description": "d"},
        {"id": "last", "description": "d", "dependencies": [text]},
    )
    found = parsed(
        json.dumps({"subtasks": [first, last]}), Phase.TASK_DECOMPOSITION
    ).task_decomposition
    assert [(one.id, one.dependencies) for one in found.subtasks] == [(name, ()), ("last", (name,))]
    assert found.renamed == ({} if name == text else {text: name})
    use = {
        "task_id": text,
        "tool": "run",
        "arguments": {"line": f"${{{text}.output}} $${{{text}}}"},
    }
    plan = {"execution_order": [text], "actions": [use]}
    revised = {"plan_revision": {"reason": "r", "updated_action_plan": plan}}
    for planned in (
        parsed(json.dumps(plan), Phase.ACTION_SEQUENCE).action_plan,
        parsed(json.dumps(revised), ReflectionReply).plan_revision.updated_action_plan,
    ):
        assert (planned.execution_order, planned.actions[0].task_id) == ((name,), name)
        assert planned.actions[0].arguments == {"line": f"${{{name}.output}} $${{{text}}}"}
        assert planned.renamed == found.renamed


@pytest.mark.parametrize(
    ("ids", "value"), [(["///"], "'///'"), ([""], "''"), ([5], "expected text, got 5")]
)
def test_an_id_that_cannot_be_normalised_is_named(ids, value):
    """An id without a letter or digit is refused with its value and the rule."""
    told = refusal(
        json.dumps({"subtasks": [{"id": one, "description": "d"} for one in ids]}),
        Phase.TASK_DECOMPOSITION,
    )
    assert value in told
    assert ids == [5] or "an id consists of 1 to 60 letters, digits, '-', '_' and '.'" in told


def test_a_task_keeps_what_its_action_said():
    """Purpose, outcome, kind and strategy of an action are in its task; of one that lacks arguments, the tool as well."""
    _, (look, _, fix, _) = compiled(decomposition(), action_plan())
    assert (look.goal, look.acceptance) == ("find what fails", ("a list of failures",))
    assert look.metadata["planning"] == {
        "name": "look",
        "subtask": "look",
        "action_type": "check",
        "expected_outcome": "a list of failures",
        "fallback_strategy": "read_file: the log has it",
        "may_fail": True,
        "tool": "run",
    }
    told = fix.metadata["planning"]
    assert (fix.tool, planned_arguments(fix)) == (None, {"path": "a.py"})
    assert (told["tool"], told["missing"]) == ("write_file", ["text"])


@pytest.mark.parametrize(
    ("strategy", "tool"),
    [
        ("read_file", "read_file"),
        ("use `read_file` instead", "read_file"),
        ("Use write_file with the old text", "write_file"),
        ("read_file - the log has it", "read_file"),
        ("run", None),
        ("read the file again", None),
        ("ask somebody who can read_file", None),
        (None, None),
    ],
)
def test_a_strategy_that_names_a_tool_is_a_fallback(strategy, tool):
    """A fallback strategy that is or begins with another tool's name is declared; words are kept as words."""
    plan = action_plan({**ACTIONS[0], "fallback_strategy": strategy}, *ACTIONS[1:])
    _, (look, *_) = compiled(decomposition(), plan)
    assert [one.metadata["planning"]["tool"] for one in look.fallbacks] == ([tool] if tool else [])


def test_a_fallback_takes_the_arguments_that_both_tools_have():
    """A fallback has what it needs where the action gives it, and says what is missing where not."""
    action = {"task_id": "look", "tool": "write_file", "arguments": {"path": "a", "text": "b"}}
    plans = (
        action_plan({**action, "fallback_strategy": tool}, order=())
        for tool in ("read_file", "run")
    )
    tasks = (compiled(decomposition(SUBTASKS[0]), plan)[1] for plan in plans)
    complete, incomplete = (task.fallbacks[0] for (task,) in tasks)
    assert (complete.tool, complete.arguments) == ("read_file", {"path": "a"})
    assert (incomplete.tool, incomplete.metadata["planning"]["missing"]) == (None, ["line"])


def test_a_prefix_stands_before_every_id_and_reference():
    """With a prefix no id is used again, and references, also in lists and objects, find the new ids; all else stays."""
    deep = {
        "list": ["${look.output} $${x} ${context.y}", 1],
        "object": {"key": "see ${look.output.a}"},
    }
    tool = ToolSpec(name="any", kind="python", callable="tools:any", parameters={"deep": "object"})
    actions = [
        *ACTIONS[:1],
        {**ACTIONS[1], "tool": "any", "arguments": {"deep": deep}},
        *ACTIONS[2:],
    ]
    _, (look, read, fix, _) = compiled(
        decomposition(), action_plan(*actions), (*TOOLS, tool), prefix="n2."
    )
    assert (look.id, read.id, fix.depends_on) == ("n2.look", "n2.fix-1", ("n2.fix-1",))
    renamed = {
        "list": ["${n2.look.output} $${x} ${context.y}", 1],
        "object": {"key": "see ${n2.look.output.a}"},
    }
    assert read.arguments == {"deep": renamed}


def test_the_steps_of_a_subtask_take_no_id_that_is_there():
    """If a subtask has the name that a step of another would get, the step takes the next number."""
    subtasks = decomposition({"id": "a", "description": ""}, {"id": "a-1", "description": ""})
    runs = [
        {"task_id": name, "tool": "run", "arguments": {"line": "ls"}}
        for name in ("a", "a", "a", "a-1")
    ]
    _, tasks = compiled(subtasks, action_plan(*runs, order=()))
    assert [task.id for task in tasks] == ["a-2", "a-3", "a", "a-1"]


def test_what_is_finished_is_built_upon():
    """Subtasks that are finished are not planned again; dependencies and references lead to the tasks that did them."""
    plan = action_plan(*ACTIONS[1:], order=("fix", "docs"))
    _, (read, *_) = compiled(decomposition(), plan, prefix="n2.", look="n1.look")
    assert (read.depends_on, read.arguments) == (("n1.look",), {"path": "${n1.look.output.path}"})
    assert compiled(decomposition(), action_plan(), look="look")[0] == [
        "action_plan.execution_order: 'look' is not an unfinished subtask",
        "action_plan.actions[0].task_id: 'look' is a finished subtask",
    ]


def test_a_revised_plan_has_its_own_subtasks():
    """A revision drops what it no longer names, keeps what is finished, and ties what is new to what stands beside it."""
    plan = action_plan({**ACTIONS[3], "task_id": "check"}, *ACTIONS[1:3], order=("check", "fix"))
    found = revise_decomposition(decomposition(), plan, ["look"])
    assert [(subtask.id, subtask.dependencies) for subtask in found.subtasks] == [
        ("look", ()),
        ("check", ()),
        ("fix", ("look", "check")),
    ]
    assert compiled(found, plan, look="look")[0] == []


def test_everything_wrong_with_a_decomposition_is_named():
    """Tools that are not there, ids that are there twice or nowhere, circles and a surplus are all named at once."""
    wrong = decomposition(
        {"id": "a", "description": "", "dependencies": ["b"], "required_tools": ["raed_file"]},
        {"id": "b", "description": "", "dependencies": ["a", "nothing", "b"]},
        {"id": "a", "description": ""},
    )
    found = "\n".join(compiled(wrong, max_subtasks=2)[0])
    for said in (
        "there are 3 subtasks, at most 2 are allowed",
        "subtasks[0].required_tools: subtask 'a' requires the unknown tool 'raed_file'; did you mean 'read_file'?",
        "subtasks[2].id: task 'a' is already defined as subtasks[0]",
        "subtasks[1].dependencies[1]: task 'b' depends on 'nothing'",
        "task 'b' depends on itself",
        "dependency cycle: 'a' → 'b' → 'a'",
    ):
        assert said in found


def test_everything_wrong_with_an_action_plan_is_named():
    """Unknown tools, subtasks and arguments, wrong types, gaps and what stands too often are all named at once."""
    wrong = action_plan(
        {"task_id": "look", "tool": "rum"},
        {"task_id": "fix", "tool": "read_file", "arguments": {"path": 3, "mode": "r"}},
        {"task_id": "fxi", "tool": "run", "arguments": {"line": "${look"}},
        order=("look", "look", "fix", "nothing"),
    )
    found = "\n".join(compiled(decomposition(), wrong)[0])
    for said in (
        "actions[0].tool: the action for 'look' uses the unknown tool 'rum'; did you mean 'run'?",
        "actions[1].arguments: the action for 'fix': argument 'path' of tool 'read_file' is 3, expected string",
        "tool 'read_file' has no parameter 'mode'",
        "actions[2].task_id: 'fxi' is not a subtask; did you mean 'fix'?",
        "a ${ is not closed",
        "there is no action for subtask 'docs'",
        "execution_order: 'look' is listed 2 times and has 1 action",
        "execution_order: 'nothing' is not an unfinished subtask",
        "execution_order: 'docs' is left out",
    ):
        assert said in found


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("${docs.output}", "does not depend on 'docs'"),
        ("${fix.output}", "refers to its own output|does not depend on 'fix'|circle"),
        ("${gone.output}", "'gone' is not a task of the plan"),
    ],
)
def test_references_must_lead_somewhere_in_time(path, said):
    """A reference to what is not there, or is not done before, is named, also where arguments are still missing."""
    actions = [*ACTIONS[:2], {**ACTIONS[2], "arguments": {"path": path}}, ACTIONS[3]]
    (problem,), _ = compiled(decomposition(), action_plan(*actions))
    assert any(part in problem for part in said.split("|"))


def test_without_tools_nothing_can_be_planned():
    """If no tool is allowed, each action is refused, and the model is told that there are none."""
    found, _ = compiled(decomposition(SUBTASKS[1]), action_plan(ACTIONS[3], order=()), tools=())
    assert found
    assert all("there are no tools at all" in text for text in found)


IDS = st.from_regex(r"[a-c](-[1-2])?", fullmatch=True)
PLANS = st.tuples(
    st.lists(
        st.builds(
            Subtask,
            id=IDS,
            description=st.just(""),
            dependencies=st.lists(IDS, max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=6,
    ),
    st.lists(
        st.builds(
            Action,
            task_id=IDS,
            tool=st.sampled_from(["run", "read_file", "nothing"]),
            arguments=st.dictionaries(
                st.sampled_from(["line", "path"]), st.sampled_from(["x", "${a.output}", 3])
            ),
        ),
        min_size=1,
        max_size=8,
    ),
    st.lists(IDS, max_size=6),
)


@given(PLANS, st.sampled_from(["", "n."]))
def test_a_plan_is_sound_or_its_problems_are_named(parts, prefix):
    """Whatever a model plans, either it is refused with problems, or its tasks make a valid plan with unique ids."""
    subtasks, actions, order = parts
    taken = TaskDecomposition(subtasks=tuple(subtasks))
    plan = ActionPlan(execution_order=tuple(order), actions=tuple(actions))
    problems, tasks = compiled(taken, plan, prefix=prefix)
    if problems:
        assert all(problems)
        return
    assert len(tasks) == len(actions)
    assert (
        Plan(goal=Goal(objective=""), tools=TOOLS, resources={"cpu": 1}, tasks=tasks).tasks == tasks
    )


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["planning", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "phase",
                    "goal_understanding",
                    "main_objective",
                    "error",
                    "type",
                    "actions",
                    "summary",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(
    st.text() | JSON.map(json.dumps),
    st.sampled_from([*list(Phase)[:3], ExecutionReply, ReflectionReply, CompletionReply]),
)
def test_any_reply_is_read_or_refused(text, model):
    """Whatever a model writes is either an output or refused with a reason, and nothing else happens."""
    try:
        said = repr(parsed(text, model))
    except LLMResponseInvalid as refused:
        said = str(refused)
    assert said

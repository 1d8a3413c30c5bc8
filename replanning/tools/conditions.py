"""Checks of conditions and paths against the arguments and outputs of tools.

They report only what is certainly wrong: names that cannot exist, and comparisons of values whose
types never match.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast

from replanning.plan.conditions import (
    OUTPUT_ROOTS,
    Condition,
    literal_key,
    output_lookup,
    shown,
)
from replanning.plan.messages import did_you_mean, join_names, join_parts
from replanning.plan.references import (
    CONFIRMATION_ROOTS,
    CONFIRMED_ROOTS,
    UNDO_ROOTS,
    Reference,
    find_references,
    placeholders,
    root_references,
    sole_argument,
)
from replanning.plan.tasks import Confirmation, Expectation, TaskBody, ToolSpec, Undo
from replanning.plan.types import JsonObject, JsonPath, JsonValue, TaskId

OUTPUTS_BY_KIND: Final[Mapping[str, JsonObject]] = {
    "shell": {
        "exit_code": {"type": "integer"},
        "stdout": {"type": "string"},
        "stderr": {"type": "string"},
        "json": {"type": ["object", "array"]},
        "undecodable": {"type": "array"},
    },
    "http": {
        "status": {"type": "integer"},
        "headers": {"type": "object"},
        "json": {},
        "text": {"type": "string"},
        "undecodable": {"type": "array"},
    },
    "mcp": {"text": {"type": "string"}, "json": {}, "content": {"type": "array"}},
}
"""Fields of the outputs of each kind of tool, each with its JSON Schema."""

_PARAMETER_TYPES: Final = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "array": "array",
    "object": "object",
}

_ORDERINGS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

_MAX_NAMES: Final = 10

_Types = frozenset[str] | None
"""JSON types that a value may have, with `number` for every number; None if they are unknown."""


class Checked(NamedTuple):
    """Schemas of the values that a condition or a reference may read.

    Attributes:
        output: schemas that the output fits; none for `when`.
        arguments: the names and schemas of the arguments that a tool takes; None if it takes any.
        given: the arguments of the task; None for a condition or reference of a tool.
        results: schemas of the outputs of tasks.
    """

    output: Sequence[JsonObject]
    arguments: Mapping[str, JsonObject] | None
    given: Mapping[str, JsonValue] | None
    results: Mapping[TaskId, Sequence[JsonObject]]


class ToolKnowledge(NamedTuple):
    """Schemas of the arguments and outputs of a tool.

    Attributes:
        output: JSON Schemas that the output fits.
        arguments: the arguments that the tool takes, each with a JSON Schema; None if it takes any.
    """

    output: Sequence[JsonObject] = ()
    arguments: Mapping[str, JsonObject] | None = None


def tool_knowledge(tool: ToolSpec, *, is_plan: bool) -> ToolKnowledge:
    """Return the schemas that the description of a tool states or implies.

    Args:
        tool: the tool.
        is_plan: whether a plan executes it; a client of the MCP proxy receives the content of a
            result without the fields that a plan adds.
    """
    return ToolKnowledge(_output_schemas(tool, is_plan=is_plan), _parameters(tool))


def expected_schemas(expect: Expectation | None) -> list[JsonObject]:
    """Return the JSON Schema that an expectation states for an output, if any."""
    if expect is None or expect.json_schema is None:
        return []
    return [expect.json_schema]


def expectation_problems(
    expect: Expectation,
    tool: ToolKnowledge,
    given: Mapping[str, JsonValue] | None,
    results: Mapping[TaskId, Sequence[JsonObject]],
) -> Iterator[tuple[JsonPath, str]]:
    """Yield the problems of the conditions of an expectation, each with its path there.

    Args:
        expect: the expectation.
        tool: the knowledge of the tool whose output is checked.
        given: the arguments of the task that states it; None for an expectation of the tool.
        results: schemas of the outputs of tasks.
    """
    output = tool.output
    if given is not None:
        output = [*output, *expected_schemas(expect)]
    checked = Checked(output, tool.arguments, given, results)
    for number, text in enumerate(expect.where):
        condition = Condition.parse(text, OUTPUT_ROOTS)
        for problem in condition_problems(condition, checked):
            yield ("where", number), problem


def agreement_problems(
    expect: Expectation, tool: str | None, known: Mapping[str, ToolKnowledge]
) -> Iterator[tuple[JsonPath, str]]:
    """Yield the paths of `agrees_with` that one of the two outputs never has.

    Args:
        expect: the expectation; each problem has its path there.
        tool: the tool whose output is checked, if any is named.
        known: the knowledge of tools, by name.
    """
    agreement = expect.agrees_with
    if agreement is None:
        return
    outputs: dict[str, Sequence[JsonObject]] = {}
    first = known.get(tool or "", ToolKnowledge())
    outputs[""] = [*first.output, *expected_schemas(expect)]
    second = known.get(agreement.tool, ToolKnowledge())
    outputs[f" in the output of {agreement.tool!r}"] = second.output
    for number, path in enumerate(agreement.fields or ()):
        _, steps = _steps_of(output_lookup(path).tree)
        for whose, schemas in outputs.items():
            problem = _path_problem(schemas, steps)
            if problem:
                yield ("agrees_with", "fields", number), f"the path {path!r}{whose}: {problem}"
                break


def confirmation_problems(
    confirm: Confirmation,
    tool: ToolKnowledge,
    asked: ToolKnowledge,
    given: Mapping[str, JsonValue] | None,
    results: Mapping[TaskId, Sequence[JsonObject]],
) -> Iterator[tuple[JsonPath, str]]:
    """Yield the problems of the condition and the references of a confirmation.

    Args:
        confirm: the confirmation; each problem has its path there.
        tool: the knowledge of the tool whose call is in doubt.
        asked: the knowledge of the tool that the confirmation calls, whose output is checked.
        given: the arguments of the task that states it; None for a confirmation of the tool.
        results: schemas of the outputs of tasks.
    """
    checked = Checked(asked.output, tool.arguments, given, results)
    for name, value in confirm.arguments.items():
        # Like the parameter that it refers to, it may be left out.
        is_needed = tool.arguments is None or sole_argument(value) not in tool.arguments
        references = root_references(value, CONFIRMATION_ROOTS)
        for problem in _reference_problems(references, checked, is_needed=is_needed):
            yield ("arguments", name), problem
    condition = Condition.parse(confirm.when, OUTPUT_ROOTS)
    for problem in condition_problems(condition, checked):
        yield ("when",), problem
    references = root_references(confirm.output, CONFIRMED_ROOTS)
    for problem in _reference_problems(references, checked):
        yield ("output",), problem


def undo_problems(undo: Undo, tool: ToolKnowledge) -> Iterator[tuple[JsonPath, str]]:
    """Yield the problems of the references of a compensation.

    Args:
        undo: the compensation that a tool states.
        tool: the knowledge of that tool.
    """
    checked = Checked(tool.output, tool.arguments, None, {})
    for name, value in undo.arguments.items():
        references = root_references(value, UNDO_ROOTS)
        for problem in _reference_problems(references, checked):
            yield ("undo", "arguments", name), problem


def undo_task_problems(
    undo: TaskBody, ids: Container[TaskId], results: Mapping[TaskId, Sequence[JsonObject]]
) -> Iterator[tuple[JsonPath, str]]:
    """Yield the references of an undo task to fields that the output of a task never has.

    Args:
        undo: the undo task.
        ids: the ids of all tasks.
        results: schemas of the outputs of tasks.
    """
    for name, value in undo.arguments.items():
        for reference in dict.fromkeys(find_references(value, ids)):
            if reference.task is None:
                continue
            schemas = results.get(reference.task, ())
            problem = _path_problem(schemas, reference.path, f"{reference.task}.output")
            if problem:
                yield ("undo", "arguments", name), f"{reference}: {problem}"


def _output_schemas(tool: ToolSpec, *, is_plan: bool) -> list[JsonObject]:
    """Return the JSON Schemas that the outputs of a tool fit: of its kind, and of `expect`."""
    schemas: list[JsonObject] = []
    fields = OUTPUTS_BY_KIND.get(tool.kind or "")
    if fields is not None and (is_plan or tool.kind != "mcp"):
        schema: JsonObject = {"type": "object", "properties": fields}
        # The output also has the artifacts, whose names arguments may complete.
        if not any(placeholders(name) for name in tool.produces):
            produced: JsonObject = {name: {} for name in tool.produces}
            schema["properties"] = {**fields, **produced}
            schema["additionalProperties"] = False
        schemas.append(schema)
    return [*schemas, *expected_schemas(tool.expect)]


def _parameters(tool: ToolSpec) -> dict[str, JsonObject] | None:
    """Return the parameters of a tool, each with a JSON Schema; None if it takes any."""
    if tool.parameters:
        parameters: dict[str, JsonObject] = {}
        for name, kind in tool.parameters.items():
            parameters[name] = {}
            if kind in _PARAMETER_TYPES:
                parameters[name] = {"type": kind}
        return parameters
    properties = _all_properties(tool.input_schema or {})
    if properties is None:
        return None
    return {name: each if isinstance(each, dict) else {} for name, each in properties.items()}


def condition_problems(condition: Condition, checked: Checked) -> Iterator[str]:
    """Yield the problems of a condition, as sentences that name its parts."""
    questions = condition.questions("arguments")
    certain = set(map(id, _always_read(condition.tree)))
    pending: list[ast.AST] = [condition.tree]
    reported = {""}
    while pending:
        node = pending.pop(0)
        problem = ""
        if isinstance(node, ast.Attribute | ast.Subscript):
            root, steps = _steps_of(node)
            is_needed = id(node) in certain and str(steps[0]) not in questions
            problem = _lookup_problem(root, steps, checked, is_needed=is_needed)
        else:
            problem = _operation_problem(node, checked)
            pending += _operands(node)
        if problem not in reported:
            reported.add(problem)
            yield f"condition {condition.text!r}: {problem}"


def _operands(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        # Not the function, which is always `len`.
        case ast.Call(args=arguments):
            return arguments
        case _:
            return ast.iter_child_nodes(node)


def _operation_problem(node: ast.AST, checked: Checked) -> str:
    """Return why an operation never fits its operands; empty if it may."""
    problem = ""
    match node:
        case ast.Compare():
            problem = _comparison_problem(node, checked)
        case ast.BinOp(left=left, right=right):
            for operand in (left, right):
                types = _types_of(operand, checked)
                if types is not None and types.isdisjoint({"string", "null"}):
                    problem = f"`matches` compares texts, and {_typed(operand, types)}"
        case ast.Call(args=[argument]):
            types = _types_of(argument, checked)
            if types is not None and types <= {"number", "boolean"}:
                problem = f"len takes a text, an array or an object, and {_typed(argument, types)}"
    return problem


def _reference_problems(
    references: Iterable[Reference], checked: Checked, *, is_needed: bool = True
) -> Iterator[str]:
    """Yield the references to values that never exist.

    Args:
        references: the references, each with a path that begins with the name of its root.
        checked: the schemas of the roots.
        is_needed: whether an argument that the task does not give is a problem.
    """
    for reference in dict.fromkeys(references):
        root, *steps = reference.path
        problem = _lookup_problem(str(root), steps, checked, is_needed=is_needed)
        if problem:
            yield f"{reference}: {problem}"


def _always_read(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the lookups that every evaluation makes; `and` and `or` may skip others."""
    match node:
        case ast.Attribute() | ast.Subscript():
            yield node
        case ast.BoolOp(values=[first, *_]):
            yield from _always_read(first)
        case ast.Compare(left=left, comparators=[first, *_]):
            yield from _always_read(left)
            yield from _always_read(first)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _always_read(child)


# Names


def _lookup_problem(root: str, steps: list[str | int], checked: Checked, *, is_needed: bool) -> str:
    """Return why a lookup never finds a value; empty if it may.

    Args:
        root: the name that it begins with.
        steps: the names and numbers that follow.
        checked: the schemas of the roots.
        is_needed: whether an argument that the task does not give is a problem.
    """
    if root == "arguments" and steps:
        return _argument_problem(str(steps[0]), checked, is_needed=is_needed)
    return _path_problem(*_start(root, steps, checked))


def _path_problem(
    schemas: Sequence[JsonObject], steps: Sequence[str | int], lookup: str = ""
) -> str:
    """Return why a path never leads to a value; empty if it may.

    Args:
        schemas: the schemas of the value that the path starts at.
        steps: the path.
        lookup: the lookup of that value; empty for the output whose fields are compared.
    """
    for step in steps:
        for schema in schemas:
            problem = _step_problem(schema, step, lookup)
            if problem:
                return problem
        schemas = [inner for schema in schemas for inner in _member_schemas(schema, step)]
        lookup = _written(lookup, [step])
    return ""


def _argument_problem(name: str, checked: Checked, *, is_needed: bool) -> str:
    given = checked.given
    if given is not None and name in given:
        return ""
    known = checked.arguments
    if known is not None and name not in known:
        hint = did_you_mean(name, known)
        return join_parts(f"the tool has no parameter {name!r}", hint, _listed(known))
    if given is None or not is_needed:
        return ""
    hint = did_you_mean(name, given)
    return join_parts(f"the task gives no argument {name!r}", hint, _listed(given))


def _listed(names: Mapping[str, object]) -> str:
    if not names:
        return "there is none"
    return f"there is {join_names([repr(name) for name in names], _MAX_NAMES)}"


def _steps_of(node: ast.expr) -> tuple[str, list[str | int]]:
    """Return the root of a lookup, and the names and numbers that follow."""
    steps: list[str | int] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        steps.append(cast("str | int", literal_key(node)))
        node = node.value
    return cast("ast.Name", node).id, steps[::-1]


def _start(
    root: str, steps: list[str | int], checked: Checked
) -> tuple[Sequence[JsonObject], list[str | int], str]:
    """Return the schemas of the value that a lookup begins with, the other steps, and its text."""
    if root == "output":
        return checked.output, steps, "output"
    if root == "results" and steps:
        task = TaskId(str(steps[0]))
        return checked.results.get(task, ()), steps[1:], _written(root, steps[:1])
    return (), [], root


def _written(lookup: str, steps: Sequence[str | int]) -> str:
    """Return the text of a lookup that continues with these steps."""
    text = lookup
    for step in steps:
        if isinstance(step, str) and step.isidentifier():
            text += f".{step}"
        elif isinstance(step, str):
            text += f'["{step}"]'
        else:
            text += f"[{step}]"
    return text.removeprefix(".")


def _step_problem(schema: JsonObject, step: str | int, lookup: str) -> str:
    """Return why a value that fits a schema has no such member; empty if it may have it."""
    value = lookup or "output"
    types = _schema_types(schema)
    needed = "array" if isinstance(step, int) else "object"
    if types is not None and types.isdisjoint({needed, "null"}):
        kind = " or ".join(sorted(types))
        return f"{value} is {_with_article(kind)}, and has no {step!r}"
    properties = _all_properties(schema)
    if isinstance(step, int) or properties is None or step in properties:
        return ""
    hint = did_you_mean(step, properties)
    if not hint and "json" in properties:
        hint = f"did you mean {_written(lookup, ['json', step])}?"
    return join_parts(f"{value} has no {step!r}", hint, _listed(properties))


def _all_properties(schema: JsonObject) -> JsonObject | None:
    """Return all properties that a schema allows; None if it may allow others."""
    properties = schema.get("properties")
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return None
    if not isinstance(properties, dict):
        return None
    return properties


def _member_schemas(schema: JsonObject, step: str | int) -> Iterator[JsonObject]:
    """Yield the schemas of a member of a value that fits a schema."""
    inner: JsonValue = None
    if isinstance(step, str):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            inner = properties.get(step)
    elif "prefixItems" not in schema:
        inner = schema.get("items")
    if isinstance(inner, dict):
        yield inner


# Types


def _schema_types(schema: JsonObject) -> _Types:
    """Return the types that a schema states; None if it states none."""
    stated = schema.get("type")
    if isinstance(stated, str):
        stated = [stated]
    if not isinstance(stated, list):
        return None
    return frozenset("number" if kind == "integer" else str(kind) for kind in stated)


def _types_of(node: ast.expr, checked: Checked) -> _Types:
    """Return the types that a part of a condition may have; None if they are unknown."""
    match node:
        case ast.Constant(value=value):
            return frozenset({_type_name(value)})
        case ast.Name(id="null"):
            return frozenset({"null"})
        case ast.Name(id="true" | "false"):
            return frozenset({"boolean"})
        case ast.Name(id="text"):
            return frozenset({"string"})
        case ast.UnaryOp(op=ast.USub()) | ast.Call():
            return frozenset({"number"})
        case ast.List() | ast.Tuple():
            return frozenset({"array"})
        case ast.Name(id="output"):
            return _common_types(checked.output)
        case ast.Attribute() | ast.Subscript():
            return _lookup_types(node, checked)
    return None


def _lookup_types(node: ast.expr, checked: Checked) -> _Types:
    root, steps = _steps_of(node)
    if root in ("run", "status"):
        return frozenset({"string"})
    if root == "arguments":
        # An argument of the task may be a reference, which may be replaced by any value.
        schemas: Sequence[JsonObject] = ()
        if checked.arguments is not None:
            schemas = [checked.arguments.get(str(steps[0]), {})]
        steps = steps[1:]
    else:
        schemas, steps, _ = _start(root, steps, checked)
        # An output that is a JSON text counts as its value in expectations, but not here.
        if root == "results" and not steps:
            return None
    for step in steps:
        schemas = [inner for schema in schemas for inner in _member_schemas(schema, step)]
    return _common_types(schemas)


def _common_types(schemas: Sequence[JsonObject]) -> _Types:
    """Return the types of a value that fits all schemas."""
    common: _Types = None
    for schema in schemas:
        types = _schema_types(schema)
        if types is not None and common is not None:
            types &= common
        if types is not None:
            common = types
    return common or None


def _type_name(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    return "number"


def _comparison_problem(node: ast.Compare, checked: Checked) -> str:
    """Return why a comparison has the same result for all values; empty if it may not."""
    left = node.left
    for operation, right in zip(node.ops, node.comparators, strict=True):
        problem = _pair_problem(operation, left, right, checked)
        if problem:
            return problem
        left = right
    return ""


def _pair_problem(operation: ast.cmpop, left: ast.expr, right: ast.expr, checked: Checked) -> str:
    first = _types_of(left, checked)
    second = _types_of(right, checked)
    if first is None or second is None:
        return ""
    both = f"{_typed(left, first)}, and {_typed(right, second)}"
    if isinstance(operation, ast.In | ast.NotIn):
        if second <= {"number", "boolean"}:
            return f"{_typed(right, second)}, which cannot contain anything"
        if second == {"string"} and not first & {"string"}:
            return f"{both}: a text contains only text"
        return ""
    # Any value may be compared with null.
    if {"null"} in (first, second):
        return ""
    if _comparable(first) & _comparable(second):
        return ""
    if isinstance(operation, _ORDERINGS):
        return f"{both}: they have no order"
    return f"{both}: they are never equal"


def _comparable(types: frozenset[str]) -> frozenset[str]:
    """Return types with `boolean` as `number`, because true equals 1."""
    if "boolean" in types:
        return types - {"boolean"} | {"number"}
    return types


def _typed(node: ast.expr, types: frozenset[str]) -> str:
    return f"{shown(node)} is {_with_article(' or '.join(sorted(types)))}"


def _with_article(kind: str) -> str:
    if kind == "null":
        return kind
    kind = kind.replace("string", "text")
    if kind.startswith(("a", "o")):
        return f"an {kind}"
    return f"a {kind}"

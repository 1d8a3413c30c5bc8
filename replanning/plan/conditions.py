"""Conditions (`when`) of tasks, such as `context.region == "eu"`.

A condition is parsed with Python's grammar and limited to names, literals, comparisons, and / or / not over
`context.*` and `results.*`. No code is evaluated.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, cast

from pydantic import JsonValue

from replanning.errors import ExpressionError, NoResult
from replanning.plan.json_form import json_form
from replanning.plan.json_values import get_item, json_type_name
from replanning.plan.messages import truncate

MAX_CONDITION_CHARS: Final = 1000
"""Longest condition, in characters."""

MAX_CONDITION_DEPTH: Final = 20
"""Deepest nesting of a condition."""

_ROOTS: Final = ("context", "results")
_NAMED_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_GRAMMAR_SUMMARY: Final = (
    "names, literals, comparisons, and / or / not over context.* and results.*"
)
_UNSUPPORTED_NODES: Final[Mapping[type[ast.expr], str]] = {
    ast.Call: "calls",
    ast.BinOp: "arithmetic",
    ast.UnaryOp: "arithmetic",
    ast.IfExp: "if / else",
    ast.JoinedStr: "f-strings",
    ast.Lambda: "functions",
}

_COMPARISON_OPERATORS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


@dataclass(frozen=True)
class Condition:
    """Parsed `when` of a task, evaluated with the context and the results so far."""

    text: str
    _tree: ast.expr = field(compare=False, repr=False)

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Condition:
        """Return a parsed condition.

        Raises:
            ExpressionError: it is too long, too deep, or not in the language; says at which column.
        """
        if len(text) > MAX_CONDITION_CHARS:
            raise ExpressionError(
                f"a condition has at most {MAX_CONDITION_CHARS} characters, this one has {len(text)}"
            )
        line = re.sub(r"\s", " ", text).rstrip()
        start = len(line) - len(line.lstrip())
        try:
            with warnings.catch_warnings():  # of Python, about its own language
                warnings.simplefilter("ignore")
                tree = ast.parse(line[start:], mode="eval").body
        except SyntaxError as error:
            column = start + (error.offset or 1)
            raise ExpressionError(
                f"{_name(text)}, column {column}: cannot be read as {_GRAMMAR_SUMMARY}"
            ) from error
        except (ValueError, MemoryError, RecursionError) as error:
            raise ExpressionError(f"{_name(text)} cannot be read as {_GRAMMAR_SUMMARY}") from error
        _validate_node(tree, text, start, MAX_CONDITION_DEPTH)
        return cls(text, tree)

    def evaluate(self, context: Mapping[str, JsonValue], results: Mapping[str, object]) -> bool:
        """Return the truth of the condition.

        Raises:
            ExpressionError: it names a value that does not exist, or compares what cannot be compared.
        """
        return bool(self._value(self._tree, {"context": context, "results": results}))

    def names(self, root: Literal["context", "results"]) -> frozenset[str]:
        """Return the keys of the context, or the tasks among the results, that it reads."""
        found = set()
        for node in ast.walk(self._tree):
            match node:
                case (
                    ast.Attribute(value=ast.Name(id=name), attr=key)
                    | ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)))
                    | ast.Compare(
                        left=ast.Constant(value=str(key)), comparators=[ast.Name(id=name)]
                    )
                ) if name == root:
                    found.add(key)
        return frozenset(found)

    def _value(self, node: ast.expr, roots: Mapping[str, object]) -> object:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return roots[name] if name in roots else _NAMED_CONSTANTS[name]
            case ast.BoolOp(op=op, values=values):
                decisive = isinstance(op, ast.Or)
                decided: object = None
                for operand in values:  # the result is the value that decides, as in Python
                    decided = self._value(operand, roots)
                    if bool(decided) is decisive:
                        break
                return decided
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand, roots)
            case ast.UnaryOp(operand=ast.Constant(value=number)):
                return -cast("float", number)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item, roots) for item in items]
            case ast.Compare(left=first, ops=operators, comparators=comparators):
                left = self._value(first, roots)
                for compared, comparator in zip(operators, comparators, strict=True):
                    right = self._value(comparator, roots)
                    try:
                        holds = _COMPARISON_OPERATORS[type(compared)](left, right)
                    except TypeError:
                        reason = f"{ast.unparse(node)!r} compares {json_type_name(left)} with {json_type_name(right)}"
                        raise ExpressionError(f"{_name(self.text)}: {reason}") from None
                    if not holds:
                        return False
                    left = right
                return True
        # `_validate_node` let nothing else pass
        lookup = cast("ast.Attribute | ast.Subscript", node)
        try:
            return json_form(self._lookup(lookup, roots))
        except ValueError as error:
            raise ExpressionError(f"{_name(self.text)}: {ast.unparse(node)}: {error}") from None

    def _lookup(self, node: ast.Attribute | ast.Subscript, roots: Mapping[str, object]) -> object:
        """Return the value that a lookup finds, before it takes its JSON form."""
        key = cast("str | int", _literal_key(node))
        if isinstance(node.value, ast.Attribute | ast.Subscript):
            container = self._lookup(node.value, roots)
        else:
            container = self._value(node.value, roots)
        try:
            return get_item(container, key)
        except NoResult as error:
            raise ExpressionError(f"{_name(self.text)}: {error}") from None
        except LookupError as error:
            raise ExpressionError(
                f"{_name(self.text)}: {ast.unparse(node)} {error.args[0]}"
            ) from None


def _validate_node(node: ast.expr, text: str, start: int, depth: int) -> None:
    """Check that the language has a node and all nodes in it, within the limit of nesting."""
    reason = ""
    children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    match node:
        case _ if depth < 0:
            reason = f"is nested more than {MAX_CONDITION_DEPTH} deep"
        case ast.Compare(
            left=ast.Constant(value=str()),
            ops=[ast.In() | ast.NotIn()],
            comparators=[ast.Name(id=name)],
        ):
            reason = "" if name in _ROOTS else _unknown_name_message(name)
            children = []  # "key" in context
        case ast.Compare(ops=ops):
            reason = (
                ""
                if all(type(op) in _COMPARISON_OPERATORS for op in ops)
                else "has no `is`: use == or !="
            )
        case ast.Attribute(value=ast.Name(id=name)) | ast.Subscript(value=ast.Name(id=name)):
            if name not in _ROOTS:
                reason = _unknown_name_message(name)
            elif not isinstance(_literal_key(node), str):
                reason = f'looks up {name} by a name: {name}.key or {name}["key"]'
            children = []
        case ast.Attribute(value=value) | ast.Subscript(value=value):
            key = _literal_key(node)
            if isinstance(key, bool) or not isinstance(key, str | int):
                reason = 'looks up by a literal: ["key"] or [0]'
            children = [value]
        case ast.Name(id=name) if name in _ROOTS:
            reason = f"names all of {name}: name one value, {name}.key"
        case ast.Name(id=name):
            reason = "" if name in _NAMED_CONSTANTS else _unknown_name_message(name)
        case ast.Constant(value=value):
            plain = (
                math.isfinite(value)
                if isinstance(value, float)
                else value is None or isinstance(value, str | int)
            )
            reason = "" if plain else f"has no literals such as {ast.unparse(node)}"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            pass
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.List() | ast.Tuple():
            pass
        case _:
            reason = f"has no {_UNSUPPORTED_NODES.get(type(node), 'such construct')}, only {_GRAMMAR_SUMMARY}"
    if reason:  # Python counts columns in UTF-8 bytes
        line = text[start:].encode()[: node.col_offset].decode(errors="ignore")
        raise ExpressionError(
            f"{_name(text)}, column {start + len(line) + 1}: a condition {reason}"
        )
    for child in children:
        _validate_node(child, text, start, depth - 1)


def _name(text: str) -> str:
    return f"condition {truncate(text, 81)!r}"


def _unknown_name_message(name: str) -> str:
    return f"knows no {name!r}: write context.{name}, or results.{name} for a task's output, or quote a text"


def _literal_key(node: ast.Attribute | ast.Subscript) -> object:
    """Return the name, text or number by which a node looks a value up; None if it is no literal."""
    match node:
        case ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=value)):
            return value
        case ast.Subscript(
            slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value)))
        ):
            return -value
    return None

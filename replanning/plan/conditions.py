"""Conditions (`when`) of tasks, such as `context.region == "eu"`.

The grammar is Python's with the operator `matches`, limited to names, literals, comparisons,
`len(…)`, and / or / not over `context.*`, `parameters.*`, `results.*` and `status.*`. No code is
evaluated.
"""

from __future__ import annotations

import ast
import copy
import io
import math
import operator
import re
import tokenize
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, cast

from pydantic import JsonValue

from replanning.errors import ExpressionError, NoResult
from replanning.plan.json_form import get_item, json_form
from replanning.plan.json_values import json_type_name
from replanning.plan.messages import did_you_mean, truncate
from replanning.plan.references import ELEMENT_ROOTS
from replanning.plan.types import TaskId

MAX_CONDITION_CHARS: Final = 1000
"""Longest condition, in characters."""

MAX_CONDITION_DEPTH: Final = 20
"""Deepest nesting of a condition."""

STATUSES: Final = ("DONE", "SKIPPED", "FAILED", "BLOCKED", "CANCELLED")
"""Values of `status.TASK` after the task has ended."""

_ROOTS: Final = ("context", "parameters", "results", "status", *ELEMENT_ROOTS)

OUTPUT_ROOTS: Final = (
    "output",
    "text",
    "arguments",
    "context",
    "parameters",
    "results",
    "run",
    *ELEMENT_ROOTS,
)
"""Roots of a condition on an output."""

_VALUES: Final = ("output", "text", *ELEMENT_ROOTS)
"""Roots that are one value; the others need a name."""
_NAMED_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_UNSUPPORTED_NODES: Final[Mapping[type[ast.expr], str]] = {
    ast.Call: "calls but len(…)",
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

_ORDERINGS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

_PLAIN_TYPES: Final = frozenset({str, int, bool, type(None)})
"""Types with values that are their own JSON form."""

_MATCHES: Final = "matches"
"""Operator that compares a text with a pattern. Python's parser sees `@` instead."""

_OTHER_OPERATORS: Final[Mapping[str, str]] = {
    "===": "==",
    "!==": "!=",
    "=>": ">=",
    "=<": "<=",
    "&&": "and",
    "||": "or",
    "<>": "!=",
    "=": "==",
    "!": "not",
    "AND": "and",
    "OR": "or",
    "NOT": "not",
}
"""Operators of other languages, with those of a condition; longer ones first."""

_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d.*)?\Z")


@dataclass(frozen=True)
class Condition:
    """Parsed condition, evaluated with the values of its roots.

    Attributes:
        text: the condition as written.
        tree: its syntax tree, of supported nodes only; `matches` is the operator `@`.
    """

    text: str
    tree: ast.expr = field(compare=False, repr=False)

    @classmethod
    # The checks of a plan and every evaluation parse the same texts.
    @lru_cache(maxsize=4096)
    def parse(cls, text: str, roots: tuple[str, ...] = _ROOTS) -> Condition:
        """Return a parsed condition.

        Args:
            text: the condition.
            roots: the roots that it may use.

        Raises:
            ExpressionError: it is too long, too deep, or not in the language; names the column.
        """
        if len(text) > MAX_CONDITION_CHARS:
            limit = f"a condition has at most {MAX_CONDITION_CHARS} characters"
            raise ExpressionError(f"{limit}, this one has {len(text)}")
        # Python would read a line break as the end, and leading spaces as indentation.
        line = re.sub(r"\s", " ", text).rstrip()
        start = len(line) - len(line.lstrip())
        try:
            with warnings.catch_warnings():  # Python's own, such as SyntaxWarning
                warnings.simplefilter("ignore")
                tree = ast.parse(_with_operators(line[start:]), mode="eval").body
        except SyntaxError as error:
            column, written = _other_operator(line[start:])
            # After an unterminated quotation mark, an operator may be part of the text.
            if written and not error.msg.startswith("unterminated"):
                place = f"{_name(text)}, column {start + column + 1}"
                reason = f"write {_OTHER_OPERATORS[written]} instead of {written}"
                raise ExpressionError(f"{place}: {reason}") from error
            # Python gives no column for an error at the end.
            column = start + error.offset if error.offset else len(line) + 1
            place = f"{_name(text)}, column {column}"
            reason = "cannot be read"
            if error.msg.endswith("was never closed"):
                reason = f"{error.msg}, so it cannot be read"
            raise ExpressionError(f"{place}: {reason} as {_grammar(roots)}") from error
        except (ValueError, MemoryError, RecursionError) as error:
            raise ExpressionError(f"{_name(text)} cannot be read as {_grammar(roots)}") from error
        _validate_node(tree, text, start, MAX_CONDITION_DEPTH, roots)
        return cls(text, tree)

    def evaluate(
        self,
        context: Mapping[str, JsonValue],
        results: Mapping[str, object],
        status: Mapping[str, str] = MappingProxyType({}),
    ) -> bool:
        """Return the truth of the condition.

        Args:
            context: the context of the plan.
            results: the outputs of tasks.
            status: the final states of tasks, see `STATUSES`.

        Raises:
            ExpressionError: it reads a missing value, or compares incomparable values.
        """
        return self.holds({"context": context, "results": results, "status": status})

    def holds(self, roots: Mapping[str, object]) -> bool:
        """Return the truth of the condition over the values of its roots.

        Raises:
            ExpressionError: as `evaluate`.
        """
        return bool(self.value(roots))

    def value(self, roots: Mapping[str, object]) -> object:
        """Return the value of the condition over the values of its roots.

        Raises:
            ExpressionError: as `evaluate`.
        """
        return self._value(self.tree, roots)

    def operands(self, roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
        """Yield the lookups of the condition, as written, with their values."""
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            match node:
                case ast.Attribute() | ast.Subscript():
                    with suppress(ExpressionError):
                        yield shown(node), self._value(node, roots)
                case ast.Name(id=name) if name in _VALUES:
                    with suppress(ExpressionError):
                        yield name, self._value(node, roots)
                case _:
                    stack += reversed(list(ast.iter_child_nodes(node)))

    def names(self, root: str) -> frozenset[str]:
        """Return the names that it reads from a root: context keys, parameters or task ids."""
        found = set()
        for node in ast.walk(self.tree):
            match node:
                # The three forms in which a condition can name a key.
                case (
                    ast.Attribute(value=ast.Name(id=name), attr=key)
                    | ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)))
                    | ast.Compare(
                        left=ast.Constant(value=str(key)), comparators=[ast.Name(id=name)]
                    )
                ):
                    if name == root:
                        found.add(key)
        return frozenset(found)

    def renamed(self, ids: Mapping[TaskId, TaskId]) -> str:
        """Return the text of the condition with task ids replaced."""
        return shown(_Renaming(ids).visit(copy.deepcopy(self.tree)))

    def reads_element(self) -> bool:
        """Return whether it reads a list element, so that it is evaluated for each element."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id in ELEMENT_ROOTS:
                return True
        return False

    def questions(self, root: str) -> frozenset[str]:
        """Return the keys that the condition tests for presence in a root: `"key" in root`."""
        found = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.Compare(
                    left=ast.Constant(value=str(key)), comparators=[ast.Name(id=name)]
                ) if name == root:
                    found.add(key)
        return frozenset(found)

    def _value(self, node: ast.expr, roots: Mapping[str, object]) -> object:
        match node:
            # First, because lookups are the most frequent nodes.
            case ast.Attribute() | ast.Subscript():
                return self._found(node, roots)
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                if name in roots:
                    return roots[name]
                if name in ELEMENT_ROOTS:
                    reason = f"only the task of an element knows its {name}"
                    raise ExpressionError(f"{_name(self.text)}: {reason}")
                return _NAMED_CONSTANTS[name]
            case ast.BoolOp(op=op, values=values):
                decisive = isinstance(op, ast.Or)
                decided = None
                # As in Python, the result is the operand that decides.
                for operand in values:
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
            case ast.Compare():
                return self._compare(node, roots)
            case ast.BinOp(left=left, right=right):
                return self._matches(node, self._value(left, roots), self._value(right, roots))
            case ast.Call(args=[ast.Attribute() | ast.Subscript() as argument]):
                found = self._lookup(argument, roots)
                # A copy as JSON would have the same length (benchmark `tools_that_fail`).
                if type(found) in (str, list, dict):
                    return self._length(node, found)
                return self._length(node, self._value(argument, roots))
        # `_validate_node` permits nothing else.
        call = cast("ast.Call", node)
        return self._length(call, self._value(call.args[0], roots))

    def _found(self, node: ast.Attribute | ast.Subscript, roots: Mapping[str, object]) -> object:
        found = self._lookup(node, roots)
        if type(found) in _PLAIN_TYPES:
            return found
        try:
            return json_form(found)
        except ValueError as error:
            raise ExpressionError(f"{_name(self.text)}: {shown(node)}: {error}") from None

    def _matches(self, node: ast.expr, text: object, pattern: object) -> bool:
        # The output of a skipped task is null, which matches no pattern.
        if text is None:
            return False
        if not isinstance(text, str) or not isinstance(pattern, str):
            types = f"{json_type_name(text)} with {json_type_name(pattern)}"
            raise ExpressionError(f"{_name(self.text)}: {shown(node)!r} compares {types}")
        return matches_wildcards(text, pattern)

    def _length(self, node: ast.expr, value: object) -> int:
        if value is None:
            return 0
        if not isinstance(value, str | list | Mapping):
            reason = f"{shown(node)!r} asks for the length of {json_type_name(value)}"
            raise ExpressionError(f"{_name(self.text)}: {reason}")
        return len(value)

    def _lookup(self, node: ast.Attribute | ast.Subscript, roots: Mapping[str, object]) -> object:
        """Return the value that a lookup finds, not yet in its JSON form."""
        key = cast("str | int", literal_key(node))
        if isinstance(node.value, ast.Attribute | ast.Subscript):
            container = self._lookup(node.value, roots)
        else:
            container = self._value(node.value, roots)
        try:
            return get_item(container, key)
        except NoResult as error:
            raise ExpressionError(f"{_name(self.text)}: {error}") from None
        except LookupError as error:
            reason = f"{shown(node)} {error.args[0]}"
            raise ExpressionError(f"{_name(self.text)}: {reason}") from None

    def _compare(self, node: ast.Compare, roots: Mapping[str, object]) -> bool:
        left = self._value(node.left, roots)
        for operation, comparator in zip(node.ops, node.comparators, strict=True):
            right = self._value(comparator, roots)
            # The output of a skipped task is null: neither above nor below a limit, and as a
            # collection, empty.
            if type(operation) in _ORDERINGS and (left is None or right is None):
                return False
            if right is None and isinstance(operation, ast.In | ast.NotIn):
                right = ()
            operands = left, right
            if type(operation) in _ORDERINGS:
                operands = _as_times(left, right)
            try:
                holds = _COMPARISON_OPERATORS[type(operation)](*operands)
            except NoResult as error:
                # The result of the task was lost, so its presence is unknown.
                raise ExpressionError(f"{_name(self.text)}: {error}") from None
            except TypeError:
                types = f"{json_type_name(left)} with {json_type_name(right)}"
                reason = f"{shown(node)!r} compares {types}"
                raise ExpressionError(f"{_name(self.text)}: {reason}") from None
            if not holds:
                return False
            # A chain `a < b < c` compares neighbours.
            left = right
        return True


class _Renaming(ast.NodeTransformer):
    """Replaces task ids wherever a condition can name one."""

    def __init__(self, ids: Mapping[TaskId, TaskId]) -> None:
        self._ids = ids

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self._lookup(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return self._lookup(node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if _is_membership(node):
            root = cast("ast.Name", node.comparators[0]).id
            node.left = self._name(root, cast("ast.Constant", node.left).value)
        return node

    def _lookup(self, node: ast.Attribute | ast.Subscript) -> ast.expr:
        if not isinstance(node.value, ast.Name):
            self.generic_visit(node)
            return node
        # The key may be a number, as in an output.
        key = literal_key(node)
        name = self._name(node.value.id, key)
        if name.value == key or not isinstance(key, str):
            return node
        return ast.Subscript(value=node.value, slice=name, ctx=ast.Load())

    def _name(self, root: str, key: object) -> ast.Constant:
        name = str(key)
        if root in ("results", "status"):
            name = self._ids.get(TaskId(name), name)
        return ast.Constant(name)


def output_lookup(path: str) -> Condition:
    """Return the lookup of a value within an output.

    Args:
        path: its path: `json.items[0].id`, `["unit-price"]` or `[0].id`.

    Raises:
        ExpressionError: the path is malformed.
    """
    dot = "." if path[:1] != "[" else ""
    lookup = Condition.parse(f"output{dot}{path}", OUTPUT_ROOTS)
    if not isinstance(lookup.tree, ast.Attribute | ast.Subscript):
        raise ExpressionError(f"{truncate(path, 81)!r} is not a path such as json.items[0].id")
    return lookup


def _grammar(roots: Sequence[str]) -> str:
    constructs = "names, literals, comparisons, matches, len(…), and / or / not"
    return f"{constructs} over {_listed(roots, 'and')}"


def _listed(roots: Sequence[str], conjunction: str = "or") -> str:
    over: list[str] = []
    for root in roots:
        # Only the tasks of `for_each` have these.
        if root not in ELEMENT_ROOTS:
            over.append(root if root in _VALUES else f"{root}.*")
    return f"{', '.join(over[:-1])} {conjunction} {over[-1]}"


def _validate_node(node: ast.expr, text: str, start: int, depth: int, roots: Sequence[str]) -> None:
    """Check that a node and its descendants are supported and not nested too deep."""
    if depth < 0:
        reason = f"is nested more than {MAX_CONDITION_DEPTH} deep"
    else:
        reason = _node_problem(node, roots)
    if reason:
        # Python counts columns in UTF-8 bytes.
        encoded = text[start:].encode()[: node.col_offset]
        before = encoded.decode(errors="ignore")
        column = start + len(before) + 1
        raise ExpressionError(f"{_name(text)}, column {column}: a condition {reason}")
    for child in _checked_children(node):
        _validate_node(child, text, start, depth - 1, roots)


def _node_problem(node: ast.expr, roots: Sequence[str]) -> str:
    """Return the problem of a node itself, as the end of a sentence; empty if none."""
    match node:
        case ast.Compare():
            return _comparison_problem(node, roots)
        case ast.Attribute(value=ast.Name(id=name)) | ast.Subscript(value=ast.Name(id=name)):
            return _root_problem(name, literal_key(node), roots)
        case ast.Attribute() | ast.Subscript():
            key = literal_key(node)
            # A boolean is an integer in Python, and would select the first or second item.
            if isinstance(key, bool) or not isinstance(key, str | int):
                return 'looks up by a literal: ["key"] or [0]'
        case ast.Name(id=name):
            if name in roots and name not in _VALUES:
                return f"names all of {name}: name one value, {name}.key"
            if name not in _NAMED_CONSTANTS and name not in roots:
                return _unknown_name_message(name, roots)
        case ast.Constant(value=value):
            if not _is_json_literal(value):
                return f"has no literals such as {shown(node)}"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return ""
        case (
            ast.BoolOp()
            | ast.UnaryOp(op=ast.Not())
            | ast.List()
            | ast.Tuple()
            | ast.BinOp(op=ast.MatMult())
            | ast.Call(func=ast.Name(id="len"), args=[_], keywords=[])
        ):
            return ""
        case ast.BinOp(op=ast.BitAnd()):
            return "has no `&`: use and"
        case ast.BinOp(op=ast.BitOr()):
            return "has no `|`: use or"
        case ast.UnaryOp(op=ast.Invert()):
            return "has no `~`: use not"
        case ast.BinOp(op=ast.Sub(), left=ast.Attribute() as lookup):
            bracketed = f'{shown(lookup.value)}["{lookup.attr}-…"]'
            return f"has no arithmetic: a name with a dash is written as {bracketed}"
        case _:
            construct = _UNSUPPORTED_NODES.get(type(node), "such construct")
            return f"has no {construct}, only {_grammar(roots)}"
    return ""


def _root_problem(name: str, key: object, roots: Sequence[str]) -> str:
    """Return the problem of looking up a key in a root; empty if none."""
    if name not in roots:
        return _unknown_name_message(name, roots)
    if name not in _VALUES and not isinstance(key, str):
        return f'looks up {name} by a name: {name}.key or {name}["key"]'
    if name == "run" and key != "started":
        return f"cannot read run.{key}, only run.started"
    return ""


def _comparison_problem(node: ast.Compare, roots: Sequence[str]) -> str:
    if _is_membership(node):
        name = cast("ast.Name", node.comparators[0]).id
        if name in roots:
            return ""
        return _unknown_name_message(name, roots)
    for operation in node.ops:
        if type(operation) not in _COMPARISON_OPERATORS:
            return "has no `is`: use == or !="
    operands = [node.left, *node.comparators]
    if any(map(_is_status, operands)):
        for operand in operands:
            for text in _literal_texts(operand):
                if text not in STATUSES:
                    known = ", ".join(STATUSES)
                    return f"compares the status of a task with {text!r}: expected one of {known}"
    return ""


def _is_status(node: ast.expr) -> bool:
    """Return whether a node has the form `status.TASK`."""
    match node:
        case (
            ast.Attribute(value=ast.Name(id="status")) | ast.Subscript(value=ast.Name(id="status"))
        ):
            return True
    return False


def _literal_texts(node: ast.expr) -> Iterator[str]:
    """Yield the text of a literal, or the texts in a list of literals."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.List(elts=items) | ast.Tuple(elts=items):
            for item in items:
                yield from _literal_texts(item)


def _is_membership(node: ast.expr) -> bool:
    """Return whether a node has the form `"key" in context`, with a whole root on the right."""
    match node:
        case ast.Compare(
            left=ast.Constant(value=str()),
            ops=[ast.In() | ast.NotIn()],
            comparators=[ast.Name()],
        ):
            return True
    return False


def _is_json_literal(value: object) -> bool:
    # `1e999` is infinity, which JSON lacks.
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def _checked_children(node: ast.expr) -> list[ast.expr]:
    """Return the children of a node to validate on their own; roots and keys are left out."""
    match node:
        case ast.Attribute(value=ast.Name()) | ast.Subscript(value=ast.Name()):
            return []
        case ast.Attribute(value=value) | ast.Subscript(value=value):
            return [value]
        case ast.Call(args=arguments):
            return arguments
    if _is_membership(node):
        return []
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _with_operators(line: str) -> str:
    """Return a line that Python can parse, with `@` instead of the operator `matches`.

    Columns are preserved. After an operand `matches` is the operator, elsewhere it is a name.

    Raises:
        SyntaxError: the line itself contains `@`.
    """
    if _MATCHES not in line and "@" not in line:
        return line
    replaced = line
    before: tokenize.TokenInfo | None = None
    with suppress(tokenize.TokenError):  # the parser reports the place
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            column = token.start[1]
            if token.type == tokenize.OP and token.string.startswith("@"):
                raise SyntaxError("`@`", ("", 1, column + 1, line))
            if token.string == _MATCHES and before is not None and _ends_operand(before):
                rest = replaced[column + len(_MATCHES) :]
                replaced = replaced[:column] + "@".ljust(len(_MATCHES)) + rest
            before = token
    return replaced


def _other_operator(line: str) -> tuple[int, str]:
    """Return the column and text of the first operator of another language.

    The text is empty if the line has none.
    """
    with suppress(tokenize.TokenError, SyntaxError):  # the parser reports the place
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            # The Python version decides whether `!` is an error token or an operator.
            if token.type not in (tokenize.OP, tokenize.NAME, tokenize.ERRORTOKEN):
                continue
            column = token.start[1]
            for written in _OTHER_OPERATORS:
                is_whole = written == token.string or len(written) > len(token.string)
                if is_whole and line.startswith(written, column):
                    return column, written
    return 0, ""


def _ends_operand(token: tokenize.TokenInfo) -> bool:
    if token.type == tokenize.NAME:
        return token.string not in ("and", "or", "not", "in")
    if token.type in (tokenize.STRING, tokenize.NUMBER):
        return True
    return token.string in (")", "]")


def matches_wildcards(text: str, pattern: str) -> bool:
    """Return whether a whole text matches a pattern with `*` for any characters.

    Without backtracking: each part of the pattern is searched for once.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return text == pattern
    *middle, last = rest
    if not text.startswith(first):
        return False
    start = len(first)
    for part in middle:
        found = text.find(part, start)
        if found < 0:
            return False
        start = found + len(part)
    return text.endswith(last) and len(text) - len(last) >= start


def _as_times(left: object, right: object) -> tuple[object, object]:
    """Return two values as times if both are ISO 8601 texts; without a zone, UTC is assumed."""
    times = []
    for value in (left, right):
        if not isinstance(value, str) or not _TIME.match(value):
            return left, right
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            return left, right
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        times.append(time)
    return times[0], times[1]


def shown(node: ast.expr) -> str:
    """Return the text of a part of a condition."""
    return ast.unparse(node).replace(" @ ", f" {_MATCHES} ")


def _name(text: str) -> str:
    return f"condition {truncate(text, 81)!r}"


def _unknown_name_message(name: str, roots: Sequence[str]) -> str:
    hint = did_you_mean(name, roots)
    if hint:
        return f"cannot read {name!r}; {hint}"
    if name in _ROOTS or name in OUTPUT_ROOTS:
        return f"cannot read {name!r} here: write {_listed(roots)}, or quote a text"
    if "output" in roots:
        return f"cannot read {name!r}: write output.{name}, arguments.{name}, or quote a text"
    instead = (
        f"write context.{name}, results.{name} for a task's output, status.{name} for how it "
        "ended, or quote a text"
    )
    return f"cannot read {name!r}: {instead}"


def literal_key(node: ast.Attribute | ast.Subscript) -> object:
    """Return the literal key of a lookup: a name, text or number; None if it is not a literal."""
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

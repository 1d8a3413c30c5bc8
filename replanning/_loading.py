"""Plan files: YAML and JSON read under limits, problems told with line and column, and the JSON Schema.

What is read is untrusted: size, depth, aliases and kinds of values are bounded before anything is built.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence
from itertools import accumulate
from os import PathLike
from typing import Any, Final, Literal

from pydantic import JsonValue
from pydantic.json_schema import GenerateJsonSchema

from replanning._errors import PlanError, Problem
from replanning._plan import JsonObject, Plan
from replanning._positions import Token, duplicate_keys, find_positions, json_tokens, yaml_tokens
from replanning._references import json_type_name
from replanning._wording import JsonPath, format_path, line_and_column, parse_path
from replanning._yaml import read_yaml

Format = Literal["yaml", "json"]

MAX_PLAN_SIZE: Final = 64 * 1024 * 1024
"""Largest plan file, in bytes."""

MAX_PLAN_DEPTH: Final = 100
"""Deepest nesting of a plan file."""

_JSON_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_NON_BRACKETS: Final = re.compile(r"[^\[\]{}]+")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE_MESSAGE: Final = "here is half of a surrogate pair, which is no character"
_DEPTH_CHANGE: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


def load_plan(path: str | PathLike[str], *, max_size: int = MAX_PLAN_SIZE) -> Plan:
    """Read a plan file: JSON where its name ends in `.json`, otherwise YAML.

    Args:
        path: the file.
        max_size: the most bytes it may have.

    Raises:
        PlanError: it cannot be read or is not valid; places are `file:line:column field`.
    """
    source = str(path)
    try:
        with pathlib.Path(path).open("rb") as file:
            content = file.read(max_size + 1)
    except OSError as error:
        raise PlanError([Problem(source, f"the plan cannot be read: {error.strerror or error}")]) from error
    if len(content) > max_size:
        raise PlanError([Problem(source, f"the plan is larger than {max_size} bytes")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PlanError([Problem(f"{source}:{line}", f"byte {error.start + 1} of the file is not UTF-8")]) from error
    return parse_plan(text, format="json" if source.lower().endswith(".json") else "yaml", source=source)


def parse_plan(text: str, *, format: Format = "yaml", source: str = "<text>", max_size: int = MAX_PLAN_SIZE) -> Plan:  # noqa: A002 # the plain word
    """The plan in a text.

    Args:
        text: the plan file.
        format: how it is written.
        source: what problems call the text.
        max_size: the most characters it may have.

    Raises:
        PlanError: it is not valid; places are `source:line:column field`.
    """
    document = read_document(text, format=format, source=source, max_size=max_size)
    if not isinstance(document, dict):
        got = "it is empty" if document is None else f"this is {json_type_name(document)}"
        raise PlanError([Problem(source, f"a plan is a mapping with the fields goal and tasks; {got}")])
    try:
        return Plan.model_validate(document)
    except PlanError as error:
        raise PlanError(_with_locations(error.problems, text, format, source)) from None


def locate_problems(problems: Sequence[Problem], path: str | PathLike[str]) -> list[Problem]:
    """Problems of the plan that was loaded from a file, with line and column; as they are if it has changed since."""
    source = str(path)
    written: Format = "json" if source.lower().endswith(".json") else "yaml"
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
        read_document(text, format=written)
        return _with_locations(problems, text, written, source)
    except (OSError, UnicodeDecodeError, PlanError):
        return list(problems)


def read_document(text: str, *, format: Format, source: str = "<text>", max_size: int = MAX_PLAN_SIZE) -> JsonValue:  # noqa: A002 # likewise
    """The JSON value that a YAML or JSON text holds; None where the text is empty.

    Raises:
        PlanError: the text is malformed, too large, nested too deep, or ambiguous.
    """
    if len(text) > max_size:
        raise PlanError([Problem(source, f"the text has more than {max_size} characters")])
    if not text.isascii() and (half := _SURROGATE.search(text)):
        raise PlanError([Problem(f"{source}:{line_and_column(text, half.start())}", _SURROGATE_MESSAGE)])
    try:
        return read_yaml(text, MAX_PLAN_DEPTH) if format == "yaml" else _read_json(text)
    except PlanError as error:
        problems = [Problem(f"{source}:{problem.place}".rstrip(":"), problem.message) for problem in error.problems]
        raise PlanError(problems) from None


def plan_schema() -> JsonObject:
    """The JSON Schema (draft 2020-12) of plan files, for editors and for those who write plans by program."""
    schema = Plan.model_json_schema(schema_generator=_SchemaGenerator)
    return {"$schema": _SchemaGenerator.schema_dialect, **schema}


class _SchemaGenerator(GenerateJsonSchema):
    """Leaves out the titles that would only repeat the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # pydantic does not export its type
        return False


def _read_json(text: str) -> JsonValue:
    if not text.strip():
        return None
    _check_depth(text)
    repeated = False

    def build(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
        nonlocal repeated
        built = dict(pairs)
        repeated = repeated or len(built) < len(pairs)
        return built

    try:
        document: JsonValue = json.loads(text, object_pairs_hook=build)
    except json.JSONDecodeError as error:
        why = f"this is not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise PlanError([Problem(f"{error.lineno}:{error.colno}", why)]) from None
    except ValueError:
        raise PlanError([Problem("", "a number has too many digits")]) from None
    if repeated:
        found = duplicate_keys(json_tokens(text))
        raise PlanError(
            [
                Problem(_duplicate_key_location(path, token), f"the key {path[-1]!r} is there twice")
                for path, token in found
            ]
        )
    if _ESCAPED_SURROGATE.search(text):
        _check_surrogates(text)
    return document


def _duplicate_key_location(path: JsonPath, token: Token) -> str:
    return f"{token.line}:{token.column} {format_path(path[:-1])}".rstrip()


def _check_depth(text: str) -> None:
    # Counting first is enough for most files; stripping the strings is the dear part.
    if text.count("[") + text.count("{") <= MAX_PLAN_DEPTH:
        return
    brackets = _NON_BRACKETS.sub("", _JSON_STRING.sub("", text))
    if max(accumulate(map(_DEPTH_CHANGE.__getitem__, brackets)), default=0) <= MAX_PLAN_DEPTH:
        return
    plain = _JSON_STRING.sub(lambda string: " " * len(string[0]), text)
    depths = accumulate(_DEPTH_CHANGE.get(character, 0) for character in plain)
    at = next(index for index, depth in enumerate(depths) if depth > MAX_PLAN_DEPTH)
    raise PlanError([Problem(line_and_column(text, at), f"nested more than {MAX_PLAN_DEPTH} deep")])


def _check_surrogates(text: str) -> None:
    for token in json_tokens(text):
        if _SURROGATE.search(token.text):
            raise PlanError([Problem(f"{token.line}:{token.column}", _SURROGATE_MESSAGE)])


def _with_locations(problems: Sequence[Problem], text: str, format: Format, source: str) -> list[Problem]:  # noqa: A002 # likewise
    """The problems with line and column before the field; of the nearest part where a field is missing."""
    paths = [parse_path(problem.place) for problem in problems]
    wanted = {path[:length] for path in paths for length in range(1, len(path) + 1)}
    found = find_positions(yaml_tokens(text) if format == "yaml" else json_tokens(text), wanted)
    located = []
    for problem, path in zip(problems, paths, strict=True):
        nearest = next((path[:length] for length in range(len(path), 0, -1) if path[:length] in found), None)
        where = source if nearest is None else "{}:{}:{}".format(source, *found[nearest])
        located.append(Problem(f"{where} {problem.place}".rstrip(), problem.message))
    return located

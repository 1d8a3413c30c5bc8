"""Templates of tools: `{name}` is an argument, `{env:NAME}` a variable of the environment.

Both are replaced in one pass over the template, so that neither an argument nor a secret is ever read as a
template itself: an argument whose text is `{env:TOKEN}` stays that text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from pydantic import JsonValue

from replanning._patterns import as_text, fill, holes
from replanning._plan import ToolSpec
from replanning._secrets import MASK
from replanning._servers import McpServer

MARK: Final = "\0"
"""Stands around the name of a hole while a template is worked on; no template, value or variable holds it."""

MARKED: Final = re.compile(f"{MARK}([^{MARK}]+){MARK}")
"""A hole in a marked template."""

_VARIABLE: Final = re.compile(r"(?<![${])\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_SHORTEST_SECRET: Final = 4
_DEEPEST: Final = 100


class Secrets:
    """The variables that one use of a tool refers to: looked up late, and hidden in all that comes back.

    Values of fewer than four characters are not hidden: they are flags rather than secrets, and hiding
    every `1` would spoil the output.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._values: set[str] = set()

    def __repr__(self) -> str:
        return f"<Secrets {len(self._values)} known>"

    def look_up(self, text: str, form: Callable[[str], str] = str) -> str:
        """`text` with every `{env:NAME}` replaced by the value of that variable, in this form.

        Raises:
            KeyError: the variable is not set; compare with `unset_variables` first.
        """

        def value(match: re.Match[str]) -> str:
            found = self._environ[match[1]]
            shown = form(found)
            self.keep(found)
            self.keep(shown)
            return shown

        return _VARIABLE.sub(value, text)

    def keep(self, value: str) -> None:
        """Hide this value from now on."""
        if len(value) >= _SHORTEST_SECRET:
            self._values.add(value)

    def hide(self, text: str) -> str:
        """`text` with every known secret replaced by a mark, the longest first."""
        for value in sorted(self._values, key=lambda value: (-len(value), value)):
            text = text.replace(value, MASK)
        return text

    def hide_in(self, value: JsonValue) -> JsonValue:
        """The same, in every text within a value."""
        if not self._values:
            return value
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, list):
            return [self.hide_in(item) for item in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide_in(item) for key, item in value.items()}
        return value


def variables(text: str) -> tuple[str, ...]:
    """The names of the variables that a template refers to, each once, in order."""
    return tuple(dict.fromkeys(_VARIABLE.findall(text)))


def texts_of(value: JsonValue) -> Iterator[str]:
    """Every text within a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_of(item)


def templates_of(tool: ToolSpec) -> Iterator[str]:
    """Every template in the description of a tool that takes arguments."""
    for text in (tool.command, tool.url, *tool.headers.values()):
        if text is not None:
            yield text
    yield from texts_of(tool.body)


def unset_variables(described: ToolSpec | McpServer, environ: Mapping[str, str]) -> list[str]:
    """The variables that a tool or a server refers to and that the environment lacks, each once, in order."""
    env = described.env.values()
    texts = (
        (*env, *described.headers.values()) if isinstance(described, McpServer) else (*templates_of(described), *env)
    )
    return [name for name in dict.fromkeys(name for text in texts for name in variables(text)) if name not in environ]


def missing_arguments(templates: Iterable[str], arguments: Mapping[str, JsonValue]) -> list[str]:
    """The names that templates want and arguments lack, each once, in order."""
    wanted = dict.fromkeys(name for template in templates for name in holes(template))
    return [name for name in wanted if name not in arguments]


def mark(template: str) -> str:
    """The template with each hole as its marked name, and `{{name}}` as the text it stands for."""
    return fill(template, {name: f"{MARK}{name}{MARK}" for name in holes(template)})


def render(marked: str, secrets: Secrets, value: Callable[[str], str], *, form: Callable[[str], str] = str) -> str:
    """A marked template with its variables looked up, in this form, and each hole replaced by `value(name)`."""
    return MARKED.sub(lambda match: value(match[1]), secrets.look_up(marked, form))


def sole_hole(marked: str) -> str | None:
    """The name of the hole, where a marked template is that one hole and nothing else."""
    match = MARKED.fullmatch(marked)
    return match[1] if match else None


def word(name: str, value: JsonValue) -> str:
    """A value as text that can be handed to a process or a server.

    Raises:
        ValueError: it has no such text; the message says which argument, and why.
    """
    if value is None:
        raise ValueError(f"{name!r} is null, which has no text")
    try:
        text = as_text(value)
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} holds half a character (a lone surrogate)") from None
    except ValueError:
        raise ValueError(f"{name!r} holds a number that is not finite") from None
    if MARK in text:
        raise ValueError(f"{name!r} holds the character NUL")
    return text


def read_json(text: str) -> JsonValue:
    """What a JSON text says, or None where it is not JSON that can be stored."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if _depth_within(value, _DEEPEST) else None


def _depth_within(value: JsonValue, limit: int) -> bool:
    """Whether everyone who walks through a value by recursion will come back."""
    layer = [value]
    for _ in range(limit):
        layer = [inner for item in layer if isinstance(item, list | dict) for inner in _members(item)]
        if not layer:
            return True
    return False


def _members(value: list[JsonValue] | dict[str, JsonValue]) -> Iterable[JsonValue]:
    return value.values() if isinstance(value, dict) else value


def _refuse(constant: str) -> JsonValue:
    raise ValueError(constant)

"""Text with `{name}` holes: fact patterns such as `on({x},{y})`, and the commands and URLs of tools.

A hole is filled by the argument of that name. `${name}` and braces around anything but a plain name are
left as they are, so that shell variables and templates of other tools pass through; `{{name}}` stands for
`{name}` itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import JsonValue

_PLACEHOLDER: Final = re.compile(r"(?<![${])\{([A-Za-z_][A-Za-z0-9_-]*)\}|\{\{([A-Za-z_][A-Za-z0-9_-]*)\}\}")
_COMMA: Final = re.compile(r"\s*,\s*")


def placeholders(text: str) -> tuple[str, ...]:
    """The names of the holes in `text`, each once, in order."""
    if "{" not in text:
        return ()
    return tuple(dict.fromkeys(match[1] for match in _PLACEHOLDER.finditer(text) if match[1]))


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """`text` with its holes filled.

    Raises:
        KeyError: `values` lacks the name of a hole; compare with `placeholders` first.
    """
    if "{" not in text:
        return text
    return _PLACEHOLDER.sub(lambda match: values[match[1]] if match[1] else f"{{{match[2]}}}", text)


def compile_fact_pattern(pattern: str, choices: Mapping[str, Sequence[str]]) -> re.Pattern[str]:
    """An expression that matches a fact as a whole where it is the pattern with its holes filled.

    It has one group for each hole, in the order of `placeholders`.

    Args:
        pattern: such as `on({x},{y})`.
        choices: what a hole may stand for, where that is limited.
    """
    parts: list[str] = []
    groups: dict[str, int] = {}
    end = 0
    for match in _PLACEHOLDER.finditer(pattern):
        parts.append(re.escape(pattern[end : match.start()]))
        end, name = match.end(), match[1]
        if name is None:
            parts.append(re.escape(f"{{{match[2]}}}"))
        elif name in groups:
            parts.append(f"(?:\\{groups[name]})")
        else:
            groups[name] = len(groups) + 1
            words = choices.get(name)
            parts.append("(.+?)" if words is None else f"({'|'.join(map(re.escape, words)) or '(?!)'})")
    return re.compile("".join(parts) + re.escape(pattern[end:]), re.DOTALL)


def as_text(value: JsonValue) -> str:
    """A value as it appears inside text: a string as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def normalise_fact(text: str) -> str:
    """The one spelling of a fact: no whitespace around it or around its commas."""
    return _COMMA.sub(",", text.strip())

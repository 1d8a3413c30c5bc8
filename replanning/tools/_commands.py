"""Command templates: a shell script in which arguments are words, and never text of the script.

The script reaches `/bin/sh` as it was written, with a variable of the shell in the place of each hole; the
values travel beside it. So no value is ever parsed by the shell, whatever it holds. What could still go
wrong is a hole in a place where a variable is not one word (inside quotes, a comment, a here-document):
those are refused when the template is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from replanning.tools._templates import HOLE_DELIMITER, MARKED_HOLE, argument_text, env_references, mark_holes

_TOKEN: Final = re.compile(
    rf"""
      (?P<hole>{HOLE_DELIMITER}[^{HOLE_DELIMITER}]+{HOLE_DELIMITER})
    | (?P<backslash>\\{HOLE_DELIMITER}[^{HOLE_DELIMITER}]+{HOLE_DELIMITER})
    | (?P<escape>\\.)
    | (?P<quotes>'[^']*'|"(?:\\.|[^"\\])*")
    | (?P<backquotes>`(?:\\.|[^`\\])*`)
    | (?P<arithmetic>\$\(\(.*?\)\))
    | (?P<expansion>\$\{{[^}}]*\}})
    | (?P<comment>(?<![^\s;|&()])\#[^\n]*)
    | (?P<document><<.*)
    | (?P<open>['"`])
    | (?P<text>.)
    """,
    re.VERBOSE | re.DOTALL,
)

_HOLE_ERRORS: Final = {
    "backslash": "{hole} follows a backslash; values are quoted for you, remove it",
    "quotes": "{hole} stands inside quotes; values are quoted for you, remove the quotes, or write {{{hole}}} for that text itself",
    "backquotes": "{hole} stands inside backquotes; write $(…) instead",
    "arithmetic": "{hole} stands inside $((…)), where the shell would calculate with a value it cannot trust; assign it to a variable before",
    "expansion": "{hole} stands inside ${{…}}; assign it to a variable before, or write ${{name}} for a variable of the shell",
    "comment": "{hole} stands in a comment; remove it, or write {{{hole}}} for that text itself",
    "document": "{hole} stands in a here-document; use printf and a pipe instead",
}
_BEFORE_WORD: Final = frozenset(" \t\n;|&(")
_AFTER_WORD: Final = frozenset(" \t\n;|&)<>")
_PREFIX_WORDS: Final = frozenset("! { if then elif else do while until exec command time env nohup nice".split())  # noqa: SIM905 - a list would take a line each
_CLOSING_WORDS: Final = frozenset({"}", "done", "fi"})
_SHELL_BUILTINS: Final = frozenset(
    ": . [ alias bg break case cd continue done echo esac eval exit export false fg fi for getopts hash jobs kill local"  # noqa: SIM905 - likewise
    " printf pwd read readonly return set shift test times trap true type ulimit umask unalias unset wait }".split()
)


@dataclass(frozen=True, slots=True)
class Script:
    """What the shell is given: a script and the words that it names."""

    text: str
    words: tuple[str, ...]


def command_problems(command: str) -> list[str]:
    """Everything that is wrong with a command template, in the order of the text."""
    if not command.strip():
        return ["its command is empty"]
    if HOLE_DELIMITER in command:
        return ["its command holds the character NUL"]
    problems = [
        f"its command refers to {{env:{name}}}, which every user of the machine could read in the list of "
        f'processes; write "${name}", or pass it on under `env`'
        for name in env_references(command)
    ]
    for kind, text, _ in _tokens(mark_holes(command)):
        if kind == "open":
            problems.append(f"its command opens a {text} that is never closed")
        elif kind in _HOLE_ERRORS:
            problems += [_HOLE_ERRORS[kind].format(hole=f"{{{name}}}") for name in MARKED_HOLE.findall(text)]
    return problems


def compile_command(command: str, arguments: Mapping[str, JsonValue]) -> Script:
    """The script and its words for these arguments; a list stands for several words.

    Raises:
        ValueError: an argument cannot be a word; the message lists all that cannot.
    """
    names: dict[str, list[str]] = {}
    words: list[str] = []
    parts: list[str] = []
    problems: list[str] = []
    for kind, text, alone in _tokens(mark_holes(command)):
        if kind != "hole":
            parts.append(text)
            continue
        name = text.strip(HOLE_DELIMITER)
        value = arguments[name]
        if isinstance(value, list) and not alone:
            problems.append(f"{name!r} is a list, but {{{name}}} does not stand alone in the command")
        elif name not in names:
            try:
                new = _argument_words(name, value)
            except ValueError as error:
                problems.append(str(error))
                new = []
            names[name] = [f'"$_replanning_{len(words) + index}"' for index in range(1, len(new) + 1)]
            words += new
        parts.append(" ".join(names.get(name, ())))
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    return Script(_parameter_assignments(len(words)) + "".join(parts), tuple(words))


def command_programs(command: str) -> list[str]:
    """The programs that a command starts, as far as its text says so plainly, each once, in order."""
    if re.search(r"\bcase\b|\(\s*\)", command):
        return []  # patterns of `case` and names of functions look like programs
    found: dict[str, None] = {}
    expected = True
    for token in _plain_words(mark_holes(command)):
        if token in {"|", "&", ";", "(", "\n"}:
            expected = True
        elif expected and not re.match(r"\w+=", token) and token not in _PREFIX_WORDS:
            expected = False
            if re.fullmatch(r"[\w./+@][\w./+@-]*", token) and token not in _SHELL_BUILTINS:
                found[token] = None
    return list(found)


def simple_commands(command: str) -> Iterator[tuple[str, list[str]]]:
    """Each command in a template, as far as its text says so plainly, with the operators before it.

    Its words begin with the program, and holes are marked. What closes a group counts for nothing: `(a) | b` is `a | b`.
    """
    words: list[str] = []
    before = ""
    for token in [*_plain_words(mark_holes(command)), ";"]:
        if token not in {"|", "&", ";", "(", "\n"}:
            words += (
                [token] if words or not (re.match(r"\w+=", token) or token in _PREFIX_WORDS | _CLOSING_WORDS) else []
            )
        elif words:
            yield before, words
            words, before = [], token
        else:
            before += token


def _argument_words(name: str, value: JsonValue) -> list[str]:
    if not isinstance(value, list):
        return [argument_text(name, value)]
    return [argument_text(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _parameter_assignments(count: int) -> str:
    """Keeps the words in variables of their own, out of reach of `set`, `shift` and functions."""
    if not count:
        return ""
    named = " ".join(f"_replanning_{number}=${{{number}}}" for number in range(1, count + 1))
    return f"{named}; shift {count}; "


def _tokens(marked: str) -> Iterator[tuple[str, str, bool]]:
    """The parts of a marked template: kind, text, and whether it stands alone between blanks or operators."""
    for match in _TOKEN.finditer(marked):
        before, after = marked[match.start() - 1 : match.start()], marked[match.end() : match.end() + 1]
        alone = (not before or before in _BEFORE_WORD) and (not after or after in _AFTER_WORD)
        yield match.lastgroup or "text", match[0], alone


def _plain_words(marked: str) -> Iterator[str]:
    """Words and operators of a command, roughly; quoted parts stay as they are."""
    current = ""
    for kind, text, _ in _tokens(marked):
        if kind != "text" or text not in " \t\n;|&()" or (text == "&" and current[-1:] in {"<", ">"}):
            current += text
            continue
        if current:
            yield current
            current = ""
        if text not in " \t)":
            yield text
    if current:
        yield current

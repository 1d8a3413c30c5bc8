"""Command templates: arguments become words for the shell, never text of the script.

The script reaches `/bin/sh` as written, with a shell variable in place of each hole; the values
are passed beside it. So the shell never parses a value. A hole where a variable is not one word
(inside quotes, a comment, a here-document) is refused when the template is read.

A value may still begin with a dash. `option_problems` refuses it where a program would read it as
an option.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pydantic import JsonValue

from replanning.plan.json_values import as_text
from replanning.plan.messages import truncate
from replanning.plan.references import fill_placeholders, placeholders

HOLE_DELIMITER: Final = "\0"
"""Delimiter of marked holes, which no template, value or variable contains."""

MARKED_HOLE: Final = re.compile(f"{HOLE_DELIMITER}([^{HOLE_DELIMITER}]+){HOLE_DELIMITER}")
"""A hole in a marked template."""

ENV_REFERENCE: Final = re.compile(r"(?<![${])\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
"""An environment variable in a template."""

_TOKEN: Final = re.compile(
    rf"""
      (?P<hole>{HOLE_DELIMITER}[^{HOLE_DELIMITER}]+{HOLE_DELIMITER})
    | (?P<backslash>\\{HOLE_DELIMITER}[^{HOLE_DELIMITER}]+{HOLE_DELIMITER})
    | (?P<escape>\\.)
    | (?P<quotes>'[^']*'|"(?:\\.|[^"\\])*")
    | (?P<backquotes>`(?:\\.|[^`\\])*`)
    | (?P<arithmetic>\$\(\((?:.*?\)\)|.*))
    | (?P<expansion>\$\{{(?:[^}}]*\}}|.*))
    | (?P<comment>(?<![^\s;|&()])\#[^\n]*)
    | (?P<document><<.*)
    | (?P<open>['"`])
    | (?P<text>\w+|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_HOLE_ERRORS: Final = {
    "backslash": "{hole} follows a backslash; values are quoted for you, remove it",
    "quotes": (
        "{hole} is inside quotes; values are quoted for you, remove the quotes, or "
        "write {{{hole}}} for that text itself"
    ),
    "backquotes": "{hole} is inside backquotes; write $(…) instead",
    "arithmetic": (
        "{hole} is inside $((…)), where the shell would calculate with a value it "
        "cannot trust; assign it to a variable before"
    ),
    "expansion": (
        "{hole} is inside ${{…}}; assign it to a variable before, or write "
        "${{name}} for a variable of the shell"
    ),
    "comment": "{hole} is in a comment; remove it, or write {{{hole}}} for that text itself",
    "document": "{hole} is in a here-document; use printf and a pipe instead",
}

_MAX_COMMAND_CHARS: Final = 100_000
"""Longest template, in characters; the operating system accepts hardly more."""

_BEFORE_WORD: Final = frozenset(" \t\n;|&(")
_AFTER_WORD: Final = frozenset(" \t\n;|&)<>")
_PREFIX_WORDS: Final = frozenset(
    "! { } if then elif else do done fi while until exec command builtin time env nohup nice".split()  # noqa: SIM905 - one line
)
"""Words that may stand before the program of a simple command."""

_SHELL_BUILTINS: Final = frozenset(
    ": . [ alias bg break case cd continue echo esac eval exit export false fg for getopts hash jobs kill local"  # noqa: SIM905 - one line
    " printf pwd read readonly return set shift test times trap true type ulimit umask unalias unset wait".split()
)


def env_references(text: str) -> tuple[str, ...]:
    """Return the environment variables that a template refers to, each once, in order."""
    return tuple(dict.fromkeys(ENV_REFERENCE.findall(text)))


def mark_holes(template: str) -> str:
    """Return the template with placeholders as marked holes, and `{{name}}` as literal text."""
    return fill_placeholders(
        template,
        {name: f"{HOLE_DELIMITER}{name}{HOLE_DELIMITER}" for name in placeholders(template)},
    )


def argument_text(name: str, value: JsonValue) -> str:
    """Return a value as text for a process or a server.

    Raises:
        ValueError: it has no text form; the message names the argument and the reason.
    """
    if value is None:
        raise ValueError(f"{name!r} is null, which has no text")
    try:
        text = as_text(value)
        # A Python string may contain a lone surrogate, which only encoding detects.
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} holds half a character (a lone surrogate)") from None
    except ValueError:
        raise ValueError(f"{name!r} holds a number that is not finite") from None
    if HOLE_DELIMITER in text:
        raise ValueError(f"{name!r} holds the character NUL")
    return text


@dataclass(frozen=True, slots=True)
class Script:
    """Shell script, and the words that it refers to."""

    text: str
    words: tuple[str, ...]


def command_problems(command: str) -> list[str]:
    """Return the problems of a command template, in text order."""
    if not command.strip():
        return ["its command is empty"]
    if HOLE_DELIMITER in command:
        return ["its command holds the character NUL"]
    if len(command) > _MAX_COMMAND_CHARS:
        return [f"its command has more than {_MAX_COMMAND_CHARS} characters; write it into a file"]
    problems = [
        f"its command refers to {{env:{name}}}, which every user of the machine could read in "
        f'the process list; write "${name}", or pass it on under `env`'
        for name in env_references(command)
    ]
    for kind, text, _ in _tokens(mark_holes(command)):
        if kind == "open":
            problems.append(f"its command opens a {text} that is never closed")
        elif kind in _HOLE_ERRORS:
            problems += [
                _HOLE_ERRORS[kind].format(hole=f"{{{name}}}") for name in MARKED_HOLE.findall(text)
            ]
    return problems


def compile_command(
    command: str,
    arguments: Mapping[str, JsonValue],
    parameters: Mapping[str, str] = MappingProxyType({}),
) -> Script:
    """Return the script and its words for these arguments; a list becomes several words.

    Args:
        command: the template.
        arguments: values by name.
        parameters: the types of arguments, as for `option_problems`.

    Raises:
        ValueError: arguments cannot be words; the message lists all of them.
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
            problems.append(
                f"{name!r} is a list, but {{{name}}} does not stand alone in the command"
            )
        # A second use of an argument refers to the same words.
        elif name not in names:
            items = [(name, value)]
            if isinstance(value, list):
                items = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
            names[name] = []
            for label, item in items:
                try:
                    words.append(argument_text(label, item))
                    names[name].append(f'"$_replanning_{len(words)}"')
                except ValueError as error:
                    problems.append(str(error))
        parts.append(" ".join(names.get(name, ())))
    # An argument that cannot be a word is not reported as an option as well.
    if not problems:
        problems = option_problems(command, arguments, parameters)
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    if words:  # in variables, because `set`, `shift` and functions change $1, $2, …
        named = " ".join(
            f"_replanning_{number}=${{{number}}}" for number in range(1, len(words) + 1)
        )
        parts.insert(0, f"{named}; shift {len(words)}; ")
    return Script("".join(parts), tuple(words))


def option_problems(
    command: str,
    arguments: Mapping[str, JsonValue],
    parameters: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the problems of arguments that a program would read as options.

    Args:
        command: the template.
        arguments: values by name; missing ones are not checked.
        parameters: the types of arguments; a number may be negative.
    """
    return leading_problems(leading_holes(command), arguments, parameters)


@dataclass(frozen=True, slots=True)
class LeadingHoles:
    """Holes at the start of a word, or in a word of `curl`, and their forbidden beginnings.

    A further hole counts only if those before it are filled with empty text.
    """

    names: tuple[str, ...]
    forbidden: re.Pattern[str]
    """Pattern of beginnings that the argument must not have."""

    exempt: int
    """Number of words of a list that may have them: 1 after an option that takes a value."""


_DASH: Final = re.compile("-")
_CURL_FILE: Final = re.compile(r"@|[\w.-]+=[@<]")
_URL_ENCODED: Final = frozenset({"--data-urlencode", "--url-query"})
"""Options of `curl` that read `name=@text` as text."""

_REDIRECTION: Final = re.compile(r"\d*[<>]+&?")
_PLAIN_PROGRAMS: Final = frozenset({":", "[", "case", "echo", "test"})
"""Commands for which an argument that begins with a dash does no harm."""

_CODE_PROGRAMS: Final = re.compile(r"(?:ba|da|k|z|fi)?sh|python[\d.]*")
"""Interpreters that pass the words after `-c CODE` to the code."""

_VALUE_OPTIONS: Final = (
    (re.compile(r"[ef]?grep|rg|sed"), re.compile(r"-\w*[ef]|-[ABCm]|--(?:regexp|expression|file)")),
    (
        re.compile(r"find"),
        re.compile(r"-(?:i?name|i?path|i?regex|newer|type|user|group|size|[amc]time)"),
    ),
    (re.compile(r"commit|tag"), re.compile(r"-a?m|--message|--author")),  # of git
    (
        re.compile(r"curl"),
        re.compile(r"-\w*[AbcdeFHmouXT]|--(?:data\S*|form|header|json|output|request|url|user)"),
    ),
    (re.compile(r"tar"), re.compile(r"-\w*[fC]")),
)
"""Common programs, and their options that take the next word as a value, whatever it is."""


LAUNCHERS: Final = re.compile(
    "xargs|find|timeout|setsid|stdbuf|ionice|chroot|parallel|watch|flock|strace|busybox|ssh|sudo"
    "|doas|eval|docker|podman|kubectl|uv|uvx|poetry|conda|npx|npm|pnpm|nix|tmux|systemd-run|-[^vV].*"
)
"""Programs that start another one; the last pattern is an option of `env`, `nice` or `nohup`."""

_EMPTY_PREFIX: Final = re.compile(r"""(?:''|""|"?\$[\w@*#?!$-]+"?|"?\$\{[^{}]*\}"?)*""")
"""Parts before a hole that may be empty."""


def leading_holes(command: str) -> list[LeadingHoles]:
    """Return the holes that a program may read as an option, or `curl` as a file (`@name`)."""
    found: dict[LeadingHoles, None] = {}
    for words in simple_commands(mark_holes(command)):
        programs = [program_name(word) for word in words]
        value_options = []
        for program, options in _VALUE_OPTIONS:
            if any(program.fullmatch(name) for name in programs):
                value_options.append(options)
        runs_code = any(_CODE_PROGRAMS.fullmatch(name) for name in programs)
        is_exempt = programs[0] in _PLAIN_PROGRAMS
        dashes_left = 1  # until `--` ends the options
        if LAUNCHERS.fullmatch(programs[0]):
            dashes_left = 2  # the first ends those of the launcher
        for index, word in enumerate(words):
            previous = words[index - 1] if index else ""
            if previous == "--":
                dashes_left -= 1
            if dashes_left == 0 or (programs[0] == "printf" and index > 1):
                is_exempt = True
            if runs_code and index > 1 and re.fullmatch(r"-\w*c", words[index - 2]):
                is_exempt = True
            if "curl" in programs:
                for hole in MARKED_HOLE.finditer(word):
                    if previous not in _URL_ENCODED or hole.start() == 0:
                        found[LeadingHoles((hole[1],), _CURL_FILE, 0)] = None
            names = _names_at_start(word)
            if is_exempt or not names:
                continue
            takes_value = _REDIRECTION.fullmatch(previous) is not None
            for options in value_options:
                takes_value = takes_value or options.fullmatch(previous) is not None
            found[LeadingHoles(names, _DASH, int(takes_value))] = None
    return list(found)


def _names_at_start(word: str) -> tuple[str, ...]:
    names = []
    start = _EMPTY_PREFIX.match(word)
    end = start.end() if start is not None else 0
    while hole := MARKED_HOLE.match(word, end):
        names.append(hole[1])
        end = hole.end()
    return tuple(names)


def leading_problems(
    holes: Iterable[LeadingHoles], arguments: Mapping[str, JsonValue], parameters: Mapping[str, str]
) -> list[str]:
    """Return the problems of arguments in leading holes; see `option_problems`."""
    problems: dict[str, None] = {}
    for leading in holes:
        for name in leading.names:
            value = arguments.get(name, "")
            items = value if isinstance(value, list) else [value]
            texts = [str(item) for item in items]
            refused = [text for text in texts[leading.exempt :] if leading.forbidden.match(text)]
            is_number = parameters.get(name) in ("integer", "number") and isinstance(
                value, int | float
            )
            if refused and not is_number:
                problem = f"{name!r} is {truncate(refused[0], 81)!r}, which would be read as "
                if leading.forbidden is _DASH:
                    problem += (
                        f"an option; if it may begin with a dash, write -- before {{{name}}} in "
                        f"the command, or --option={{{name}}}"
                    )
                else:
                    problem += (
                        f"the name of a file; if it may be one, write @{{{name}}} in the command"
                    )
                problems[problem] = None
            if any(texts):
                break
    return list(problems)


def command_programs(command: str) -> list[str]:
    """Return the programs that a command obviously starts, each once, in order."""
    if re.search(r"\bcase\b|\(\s*\)", command):
        return []  # patterns of `case` and function names look like programs
    programs: dict[str, None] = {}
    for words in simple_commands(mark_holes(command)):
        name = words[0]
        if re.fullmatch(r"[\w./+@][\w./+@-]*", name) and name not in _SHELL_BUILTINS:
            programs[name] = None
    return list(programs)


def program_name(word: str) -> str:
    """Return the program that a word starts, without path, quotes and backslashes."""
    return re.sub(r"""['"\\]""", "", MARKED_HOLE.sub("", word)).rpartition("/")[2]


def simple_commands(marked: str) -> list[list[str]]:
    """Return the words of each simple command in a template, approximately, with their quotes.

    Assignments and keywords before the program are left out. Words after a closing parenthesis
    form a separate command that starts with `)`: they belong to a command that began before it.
    """
    commands: list[list[str]] = []
    words: list[str] = []
    word = ""
    for kind, text, _ in [*_tokens(marked.replace("\\\n", " ")), ("text", ";", True)]:
        is_operator = kind == "text" and text in " \t\n;|&()"
        if not is_operator or (text == "&" and word[-1:] in ("<", ">")):
            word += text
            continue
        is_prefix = not words and (re.match(r"\w+=", word) or word in _PREFIX_WORDS)
        if word and not is_prefix:
            words.append(word)
        word = ""
        if text in " \t":
            continue
        if words and words != [")"]:
            commands.append(words)
        words = [")"] if text == ")" else []
    return commands


def _tokens(marked: str) -> list[tuple[str, str, bool]]:
    """Return the parts of a marked template: kind, text, and whether it is a whole word."""
    tokens = []
    for match in _TOKEN.finditer(marked):
        before = marked[match.start() - 1 : match.start()]
        after = marked[match.end() : match.end() + 1]
        begins = not before or before in _BEFORE_WORD
        ends = not after or after in _AFTER_WORD
        alone = begins and ends
        tokens.append((match.lastgroup or "text", match[0], alone))
    return tokens

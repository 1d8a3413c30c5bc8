"""Hints that a use of a tool may do harm and needs a person's approval.

The table of dangerous programs is neither complete nor a sandbox: only the text of a command is
read, not the scripts that it starts. The author of a tool knows better, so `dangerous` in its
description takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from pydantic import JsonValue

from replanning.plan.commands import (
    HOLE_DELIMITER,
    LAUNCHERS,
    MARKED_HOLE,
    mark_holes,
    program_name,
    simple_commands,
)
from replanning.plan.references import placeholders
from replanning.plan.tasks import ToolSpec

_MAX_JUDGED_CHARS: Final = 20_000
"""Longest template to check, in characters; a longer one counts as dangerous."""

_MAX_WORDS: Final = 100
"""Number of words of a command to search for programs."""

_MAX_DEPTH: Final = 5
"""Maximum depth of quoted commands to check."""

_SHELL: Final = r"(?:ba|da|k|z|fi)?sh"
_INTERPRETER: Final = rf"{_SHELL}|python[\d.]*|node|perl|ruby|php"
_DATABASE: Final = r"psql|mysql(?:admin)?|mariadb|sqlite3|mongo(?:sh)?|redis-cli|dropdb|dropuser"
_RECURSIVE: Final = r" (?:.* )?(?:-\w*R\w*|--recursive)(?= |$)"
_GIT: Final = r"(?: -[cC] \S+| --?[a-z]\S*)*+ "

_ANY_TEXT: Final = "it runs any text passed to it, with"
_ANY_PACKAGE: Final = "it runs any package passed to it, with"
_OTHER_USER: Final = "it acts as another user, with"
_RECURSIVELY: Final = "it changes permissions recursively, with"
_LOSES_WORK: Final = "it discards work, with"

_RISKS: Final = tuple(
    (re.compile(programs), re.compile(rest), reason)
    for programs, rest, reason in (
        (r"rm|rmdir|shred|unlink|dd|mkfs(?:\.\w+)?|truncate|wipefs|fdisk|parted", "", "it uses"),
        (r"userdel|groupdel|shutdown|reboot|halt|poweroff|pkill|killall", "", "it uses"),
        (r"sudo|doas|su|pkexec|runuser", "", _OTHER_USER),
        (_DATABASE, "", "it works on a database, with"),
        (r"chmod|chown|chgrp", _RECURSIVE, _RECURSIVELY),
        # Words that make a program delete or stop something.
        (r"find", r" (?:.* )?(-delete)(?= |$)", "it uses"),
        (r"rsync", r" (?:.* )?(--del\S*|--remove-source-files)(?= |$)", "it uses"),
        (r"terraform|tofu|pulumi", r" (?:.* )?(destroy|apply|up)(?= |$)", "it uses"),
        (r"kubectl|oc|helm", r" (?:.* )?(delete|drain|uninstall)(?= |$)", "it uses"),
        (r"docker|podman", r" (?:.* )?(rm|rmi|prune|kill)(?= |$)", "it uses"),
        (r"aws|gsutil|rclone", r" (?:.* )?(rm|rb|purge|(?:delete|terminate)\S*)(?= |$)", "it uses"),
        (r"gcloud|az|gh|glab|heroku", r" (?:.* )?(delete|destroy)(?= |$)", "it uses"),
        (r"systemctl|service", r" (?:.* )?(stop|disable|mask|kill)(?= |$)", "it uses"),
        (r"apt|apt-get|dnf|yum|apk|brew", r" (?:.* )?(remove|purge|uninstall)(?= |$)", "it uses"),
        (r"crontab", r" (-r)(?= |$)", "it uses"),
        # Commands of git that lose work.
        ("git", rf"{_GIT}(push) (?:.* )?(-\w*f\w*|--(?:force|delete|mirror)\S*|[+:]\S+)", _LOSES_WORK),
        ("git", rf"{_GIT}(reset) (?:.* )?(--hard)", _LOSES_WORK),
        ("git", rf"{_GIT}(clean) (?:.* )?(-\w*f\w*|--force)", _LOSES_WORK),
        ("git", rf"{_GIT}(checkout)(?! .*-b ) (?:.* )?(--|\.|-f|--force|\0)(?= |$)", _LOSES_WORK),
        ("git", rf"{_GIT}(restore)(?!.* --staged(?: |$))", _LOSES_WORK),
        ("git", rf"{_GIT}(branch) (?:.* )?(-D)(?= |$)", _LOSES_WORK),
        ("git", rf"{_GIT}(stash) (drop|clear)(?= |$)", _LOSES_WORK),
        # Arguments that become code.
        (r"eval", r".*\0", _ANY_TEXT),
        (rf"{_SHELL}|python[\d.]*", r"(?: -[oW] \S+| -(?!m )\S+)*? -\w*c \0", _ANY_TEXT),
        (r"node|perl|ruby", r"(?: -\S+)*? -\w*e \0", _ANY_TEXT),
        (r"php", r"(?: -\S+)*? -r \0", _ANY_TEXT),
        (r"[gm]?awk", r"(?: -[vF] \S+| -[F]\S+)*+ \0", _ANY_TEXT),
        (r"g?sed", r"(?: -[^ef ]\S*)*+ (?:-e )?\0", _ANY_TEXT),
        (r"ssh", r"(?: -[^ opiFlJ]| -[opiFlJ] \S+)*+ \S+ (?:.* )?\0", _ANY_TEXT),
        (r"git", r"(?: -C \S+| -\S+)*? -c \0", _ANY_TEXT),
        (r"pip[\d.]*|npm|pnpm|yarn|uv|cargo|go|gem|brew|apt|apt-get", r" (?:install|add|i|get) (?:.* )?\0", _ANY_PACKAGE),
        (r"python[\d.]*", r" -m pip install (?:.* )?\0", _ANY_PACKAGE),
        (r"npx|uvx|pipx", r"(?: run)?(?: -\S+)*+ \0", _ANY_PACKAGE),
    )
)  # fmt: skip
"""Dangerous programs: name, following text, and reason; `\\0` is an argument of the tool."""

_TEXT_RUNNERS: Final = re.compile(rf"{_SHELL}|eval|ssh|watch|trap|flock|parallel|tmux|npx")
"""Programs that pass a quoted word to a shell."""

_SUBSTITUTION: Final = re.compile(r"\$\((?!\()([^()]*)\)|`([^`]*)`")
_VARIABLE: Final = re.compile(r"""["']?\$(?:[\w@*]+|\{[^{}]*\})["']?""")
_DOWNLOAD: Final = re.compile(
    rf"""
      \b(?:curl|wget)\b [^;\n]{{0,500}} \|&?\s* (?:sudo\s+|env\s+|\w+=\S+\s+){{0,5}} (?:/\S{{0,100}}/)?
      ({_INTERPRETER}) (?:\s+-\S*){{0,5}} (?=\s*(?:$|[;|&\n)]))
    | (?<![^\s;|&(]) ({_SHELL}|eval|source|\.) \s+ (?:[-<]\S*\s+){{0,5}} ["']? (?:\$\(|`|<\()\s*(?:curl|wget)\b
    """,
    re.VERBOSE,
)
"""Shell or interpreter that runs a download."""


JUDGED_KINDS: Final = ("shell", "http")
"""Kinds of tool that are checked for danger; any other is dangerous only if declared so."""


def command_risk(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> str:
    """Return why a person should approve a use of a tool; "" if it is or looks safe."""
    if "dangerous" not in tool.model_fields_set and not tool.dangerous:
        return detected_risk(tool, arguments)
    return "it is declared dangerous" if tool.dangerous else ""


def resolved_risk(
    tool: ToolSpec, declared: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]
) -> str:
    """Return why resolved references make a use dangerous; "" if they do not."""
    # A risk that the declared arguments show was approved when the task came into the plan.
    if arguments == declared or command_risk(tool, declared):
        return ""
    return command_risk(tool, arguments)


def detected_risk(tool: ToolSpec, arguments: Mapping[str, JsonValue] = MappingProxyType({})) -> str:
    """Return why a tool looks dangerous, regardless of its declarations; "" if it does not.

    Args:
        tool: the tool.
        arguments: values by name; if given, the command with these values is checked as well.
    """
    if tool.kind == "http" and (tool.method or "").upper() == "DELETE":
        return "it sends DELETE"
    if tool.kind != "shell" or not tool.command:
        return ""
    if len(tool.command) > _MAX_JUDGED_CHARS:
        return "its command is too long to check"
    marked = mark_holes(tool.command)
    # A number cannot become code or a program, so a hole for one is harmless.
    numbers: dict[str, JsonValue] = {}
    for name in placeholders(tool.command):
        if tool.parameters.get(name) in ("integer", "number"):
            numbers[name] = 0
    for values in (numbers, {**numbers, **arguments}):
        for reason in _reasons(marked, values, depth=0):
            return reason
    return ""


def _reasons(text: str, values: Mapping[str, JsonValue], depth: int) -> Iterator[str]:
    """Yield why a command with marked holes may do harm, with these values in its holes."""
    if depth > _MAX_DEPTH:
        return
    if download := _DOWNLOAD.search(text):
        yield f"it runs a download, with {download[1] or download[2]!r}"
    for words in simple_commands(text.replace("<<", "\n")):  # a here-document may be a script
        if words[0] == ")":
            words = words[1:]  # noqa: PLW2901 - a branch of `case`, or the end of another command
        is_program = len(words) > 1 and "]]" not in words
        if HOLE_DELIMITER in words[0] or (is_program and _VARIABLE.fullmatch(words[0])):
            yield "it runs any program passed to it"
        filled = list(_filled_words(words, values))
        names = [program_name(word) for word in filled[:_MAX_WORDS]]
        starts = [0]
        if names and LAUNCHERS.fullmatch(names[0]):
            starts = list(range(len(names)))
        for start in starts:
            rest = "".join(f" {word}" for word in filled[start + 1 :])
            yield from _program_reasons(names[start], rest)
        for word in words:
            inner = word[1:-1] if word[0] in "'\"" else ""
            if inner and any(_TEXT_RUNNERS.fullmatch(name) for name in names):
                yield from _reasons(inner, values, depth + 1)
            if word[0] != "'":
                for found in _SUBSTITUTION.finditer(word):
                    yield from _reasons(found[1] or found[2] or "", values, depth + 1)


def _program_reasons(name: str, rest: str) -> Iterator[str]:
    for programs, pattern, reason in _RISKS:
        if programs.fullmatch(name) and (found := pattern.match(rest)):
            parts = [name, *(part for part in found.groups() if part)]
            yield f"{reason} {' '.join(parts)!r}"


def _filled_words(words: list[str], values: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield words without quotes and blanks, with holes replaced by values, or by NUL if none."""
    for word in words:
        hole = MARKED_HOLE.fullmatch(word)
        if hole and isinstance(items := values.get(hole[1]), list):
            texts = [str(item) for item in items]
        else:
            texts = [MARKED_HOLE.sub(lambda found: _value_text(values.get(found[1])), word)]
        for text in texts:
            yield re.sub(r"\s", "_", re.sub(r"""['"\\]""", "", text))


def _value_text(value: JsonValue) -> str:
    return HOLE_DELIMITER if value is None else str(value)

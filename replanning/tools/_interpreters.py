"""What a command has an interpreter run: text of its own, what is handed to it, or what it reads."""

from __future__ import annotations

import re
from itertools import dropwhile
from typing import Final

CODE_OPTIONS: Final = {
    "c": re.compile(r"(?:ba|da|k|z|fi)?sh|python[\d.]*"),
    "e": re.compile(r"node|perl|ruby|lua"),
    "r": re.compile(r"php"),
}
"""The programs that run what stands behind an option of one letter."""

LAUNCHERS: Final = re.compile(r"find|xargs|timeout|nohup|setsid|busybox|ssh")
"""The programs that start another, which may stand anywhere behind them."""

STDIN: Final = ""
"""Stands for a program that is read from standard input."""

_SHELL_NAME: Final = re.compile(r"(?:ba|da|k|z|fi)?sh")
_SOURCE_BUILTINS: Final = re.compile(r"\.|source|eval")
_OPTION_OR_ASSIGNMENT: Final = re.compile(r"[-+\d%{].*|\w+=.*")
_REDIRECTION: Final = re.compile(r"\d*[<>]+&?")
_OPTION_WITH_VALUE: Final = re.compile(r"[-+]\w*[oWX]|-m")
_SSH_OPTION_WITH_VALUE: Final = re.compile(r"-\w*[BbcDEeFIiJLlmOopQRSWw]")


def program_name(word: str) -> str:
    """The name of a program, without the folder that it is in."""
    return word.rpartition("/")[2]


def is_shell(program: str) -> bool:
    """Whether it reads the language of a shell."""
    return _SHELL_NAME.fullmatch(program) is not None


def remote_command(words: list[str]) -> list[str]:
    """What `ssh` has another machine run: the words behind where that is, which a shell there reads as one text."""
    rest = iter(words[1:])
    for word in rest:
        if _SSH_OPTION_WITH_VALUE.fullmatch(word):
            next(rest, None)
        elif not word.startswith("-"):
            return list(rest)
    return []


def strip_launchers(words: list[str]) -> list[str]:
    """A command without the programs before it that only start it."""
    while words and LAUNCHERS.fullmatch(program_name(words[0])):
        words = (
            remote_command(words) if words[0] == "ssh" else list(dropwhile(_OPTION_OR_ASSIGNMENT.fullmatch, words[1:]))
        )
    return words


def interpreted_program(command: list[str]) -> tuple[str, str] | None:
    """The interpreter that a command starts, and what it runs: a word of the command, or `STDIN`; else None.

    The word is the text of a program, or a file with one; `<` or `$` where it is put out by the command that follows.
    """
    words = strip_launchers(command)
    runner = program_name(words[0]) if words else ""
    if _SOURCE_BUILTINS.fullmatch(runner):
        return (runner, words[1]) if words[1:] else None
    letters = "".join(letter for letter, programs in CODE_OPTIONS.items() if programs.fullmatch(runner))
    if not letters:
        return None
    return runner, _program_source(words[1:], letters, shell=is_shell(runner))


def _program_source(words: list[str], letters: str, *, shell: bool) -> str:
    """What is run, from the words behind an interpreter and the letters of its options for text."""
    rest = iter(words)
    for word in rest:
        if redirected := _REDIRECTION.match(word):
            target = word[redirected.end() :] or next(rest, "<")
            if redirected[0].startswith("<"):
                return target
        elif re.fullmatch(rf"-\w*[{letters}]", word):
            return next(rest, STDIN)
        elif word in ("-", "/dev/stdin") or (shell and re.fullmatch(r"-\w*s\w*", word)):
            return STDIN
        elif _OPTION_WITH_VALUE.fullmatch(word):
            value = next(rest, STDIN)
            if word == "-m":
                return value
        elif word[0] not in "-+":
            return word
    return STDIN

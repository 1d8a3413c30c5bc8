"""What a tool may do harm with by what it is, where nobody has said whether it may."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from replanning._plan import ToolSpec
from replanning.tools._commands import simple_commands
from replanning.tools._interpreters import CODE, STARTING, STDIN, is_shell, name_of, program_of, remote_command, started
from replanning.tools._templates import MARK

_DELETING: Final = re.compile(r"rm|rmdir|shred|unlink|dd|mkfs(?:\..*)?|-delete")
"""The programs that delete; -delete is what one that starts others does itself."""
_OTHERS: Final = re.compile(r"sudo|doas|su")
_FETCHING: Final = re.compile(r"curl|wget|fetch|nc|ncat|ssh")
_SAYING: Final = re.compile(r"echo|printf")
_PIPED: Final = re.compile(r"(?:.*[^|])?\|[&(\n]*", re.DOTALL)
_QUOTED: Final = re.compile(r"""(["'])(.*)\1""", re.DOTALL)
_TAKING: Final = ("<", "$")
"""How a word ends in whose place what the command behind it puts out is taken: `<(…)`, `$(…)`."""
_PUT_OUT: Final = re.compile(r"\s*(?:\$\((.*)\)|`(.*)`)\s*", re.DOTALL)


def harm_of(tool: ToolSpec) -> str:
    """Why a tool counts as dangerous unless somebody says that it is not; empty where nothing speaks for that (J39)."""
    if tool.kind == "http" and (tool.method or "").upper() == "DELETE":
        return "it sends DELETE"
    if tool.kind != "shell" or not tool.command:
        return ""
    return next(_harms(tool.command), "")


def _harms(command: str) -> Iterator[str]:
    for _, words in simple_commands(command):
        if MARK in words[0]:
            yield "it runs whatever program it is told to"
        elif runner := _runs_an_argument(words):
            yield f"it runs whatever text it is given with {runner!r}"
        for name in _may_start(words):
            if _DELETING.fullmatch(name):
                yield f"it uses {name!r}"
            elif _OTHERS.fullmatch(name):
                yield f"it acts as somebody else, with {name!r}"
        yield from _harms(_text_for_a_shell(words))
    yield from (f"it runs whatever comes from elsewhere, with {runner!r}" for runner in _running_what_comes(command))


def _may_start(words: list[str]) -> list[str]:
    """The names of what may be started: the program, and where that starts others, all that could be one."""
    names = [name_of(word) for word in words]
    return names if STARTING.fullmatch(names[0]) else names[:1]


def _runs_an_argument(words: list[str]) -> str:
    """The program, wherever it stands, whose own text is an argument of the tool; empty where there is none."""
    if words[0] == "eval":
        return "eval" if any(MARK in word for word in words) else ""
    if any(MARK in word for word in _sent(words)):
        return "ssh"
    for place, (option, word) in enumerate(pairwise(words)):
        if MARK in word:
            names = [name_of(before) for before in words[:place]]
            for letter, programs in CODE.items():
                if re.fullmatch(rf"-\w*{letter}", option) and (found := [n for n in names if programs.fullmatch(n)]):
                    return found[-1]
    return ""


def _sent(words: list[str]) -> list[str]:
    """What a command has another machine run; a shell there reads arguments as part of its text."""
    names = _may_start(words)
    return remote_command(words[names.index("ssh") :]) if "ssh" in names else []


def _text_for_a_shell(words: list[str]) -> str:
    """What a command has a shell run that stands there itself, in quotes; empty where there is nothing like that."""
    runner, program = program_of(words) or ("", "")
    sent = _sent(words)
    quoted = _QUOTED.fullmatch(program if is_shell(runner) else sent[0] if len(sent) == 1 else "")
    return quoted[2] if quoted else ""


def _running_what_comes(command: str) -> Iterator[str]:
    """What runs that an earlier command of a pipe, or one in its place, got from elsewhere, or that was fetched before."""
    comes, waiting, last = False, "", ""
    files: set[str] = set()
    for before, words in simple_commands(command):
        inside = last if before[:1] == "(" else ""  # the word whose end says what the parenthesis is for
        piped = _PIPED.fullmatch(before) is not None or inside.endswith(">")
        waiting = waiting if piped or inside.endswith(_TAKING) else ""
        comes = (comes and piped) or _comes_from_elsewhere(words)
        runner, program = program_of(words) or ("", None)
        if comes and waiting:
            yield waiting
        if (comes and program == STDIN) or (program and (program in files or _is_fetched(program))):
            yield runner
        elif "/" in words[0] and words[0] in files:
            yield words[0]
        files.update(_fetched_files(words))
        last = words[-1]
        waiting = runner if program == last and last.endswith(_TAKING) else waiting


def _comes_from_elsewhere(words: list[str]) -> bool:
    """Whether a command puts out what the file does not say: something from the network, or an argument of the tool."""
    name = name_of((started(words) or words)[0])
    fetches = any(_FETCHING.fullmatch(one) for one in (name_of(words[0]), name))
    return fetches or (_SAYING.fullmatch(name) is not None and any(MARK in word for word in words))


def _fetched_files(words: list[str]) -> Iterator[str]:
    """How what a command has fetched may be called afterwards: as one of its words, or as the end of an address."""
    if _FETCHING.fullmatch(name_of((started(words) or words)[0])):
        for word in filter(re.compile(r"\w").search, words[1:]):
            yield from (word, name_of(word), f"./{name_of(word)}")


def _is_fetched(program: str) -> bool:
    """Whether a word is what a command puts out that gets it from elsewhere."""
    quoted = _QUOTED.fullmatch(program)
    put_out = _PUT_OUT.fullmatch(quoted[2] if quoted else program)
    if put_out is None:
        return False
    return any(_comes_from_elsewhere(words) for _, words in simple_commands(put_out[1] or put_out[2]))

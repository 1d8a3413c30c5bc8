"""What a tool may do harm with by what it is, where nobody has said whether it may."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from replanning._plan import ToolSpec
from replanning.tools._commands import simple_commands
from replanning.tools._interpreters import (
    CODE_OPTIONS,
    LAUNCHERS,
    STDIN,
    interpreted_program,
    is_shell,
    program_name,
    remote_command,
    strip_launchers,
)
from replanning.tools._templates import HOLE_DELIMITER

_DELETE_PROGRAMS: Final = re.compile(r"rm|rmdir|shred|unlink|dd|mkfs(?:\..*)?|-delete")
"""The programs that delete; -delete is what one that starts others does itself."""
_PRIVILEGE_PROGRAMS: Final = re.compile(r"sudo|doas|su")
_FETCH_PROGRAMS: Final = re.compile(r"curl|wget|fetch|nc|ncat|ssh")
_PRINT_PROGRAMS: Final = re.compile(r"echo|printf")
_PIPE_OPERATOR: Final = re.compile(r"(?:.*[^|])?\|[&(\n]*", re.DOTALL)
_QUOTED_WORD: Final = re.compile(r"""(["'])(.*)\1""", re.DOTALL)
_SUBSTITUTION_PREFIXES: Final = ("<", "$")
"""How a word ends in whose place what the command behind it puts out is taken: `<(…)`, `$(…)`."""
_COMMAND_SUBSTITUTION: Final = re.compile(r"\s*(?:\$\((.*)\)|`(.*)`)\s*", re.DOTALL)


def danger_reason(tool: ToolSpec) -> str:
    """Why a tool counts as dangerous unless somebody says that it is not; empty where nothing speaks for that (J39)."""
    if tool.kind == "http" and (tool.method or "").upper() == "DELETE":
        return "it sends DELETE"
    if tool.kind != "shell" or not tool.command:
        return ""
    return next(_danger_reasons(tool.command), "")


def _danger_reasons(command: str) -> Iterator[str]:
    for _, words in simple_commands(command):
        if HOLE_DELIMITER in words[0]:
            yield "it runs whatever program it is told to"
        elif runner := _argument_interpreter(words):
            yield f"it runs whatever text it is given with {runner!r}"
        for name in _candidate_programs(words):
            if _DELETE_PROGRAMS.fullmatch(name):
                yield f"it uses {name!r}"
            elif _PRIVILEGE_PROGRAMS.fullmatch(name):
                yield f"it acts as somebody else, with {name!r}"
        yield from _danger_reasons(_inline_script(words))
    yield from (
        f"it runs whatever comes from elsewhere, with {runner!r}" for runner in _untrusted_code_runners(command)
    )


def _candidate_programs(words: list[str]) -> list[str]:
    """The names of what may be started: the program, and where that starts others, all that could be one."""
    names = [program_name(word) for word in words]
    return names if LAUNCHERS.fullmatch(names[0]) else names[:1]


def _argument_interpreter(words: list[str]) -> str:
    """The program, wherever it stands, whose own text is an argument of the tool; empty where there is none."""
    if words[0] == "eval":
        return "eval" if any(HOLE_DELIMITER in word for word in words) else ""
    if any(HOLE_DELIMITER in word for word in _ssh_command(words)):
        return "ssh"
    for place, (option, word) in enumerate(pairwise(words)):
        if HOLE_DELIMITER in word:
            names = [program_name(before) for before in words[:place]]
            for letter, programs in CODE_OPTIONS.items():
                if re.fullmatch(rf"-\w*{letter}", option) and (found := [n for n in names if programs.fullmatch(n)]):
                    return found[-1]
    return ""


def _ssh_command(words: list[str]) -> list[str]:
    """What a command has another machine run; a shell there reads arguments as part of its text."""
    names = _candidate_programs(words)
    return remote_command(words[names.index("ssh") :]) if "ssh" in names else []


def _inline_script(words: list[str]) -> str:
    """What a command has a shell run that stands there itself, in quotes; empty where there is nothing like that."""
    runner, program = interpreted_program(words) or ("", "")
    sent = _ssh_command(words)
    quoted = _QUOTED_WORD.fullmatch(program if is_shell(runner) else sent[0] if len(sent) == 1 else "")
    return quoted[2] if quoted else ""


def _untrusted_code_runners(command: str) -> Iterator[str]:
    """What runs that an earlier command of a pipe, or one in its place, got from elsewhere, or that was fetched before."""
    comes, waiting, last = False, "", ""
    files: set[str] = set()
    for before, words in simple_commands(command):
        inside = last if before[:1] == "(" else ""  # the word whose end says what the parenthesis is for
        piped = _PIPE_OPERATOR.fullmatch(before) is not None or inside.endswith(">")
        waiting = waiting if piped or inside.endswith(_SUBSTITUTION_PREFIXES) else ""
        comes = (comes and piped) or _outputs_untrusted_data(words)
        runner, program = interpreted_program(words) or ("", None)
        if comes and waiting:
            yield waiting
        if (comes and program == STDIN) or (program and (program in files or _is_untrusted_substitution(program))):
            yield runner
        elif "/" in words[0] and words[0] in files:
            yield words[0]
        files.update(_downloaded_files(words))
        last = words[-1]
        waiting = runner if program == last and last.endswith(_SUBSTITUTION_PREFIXES) else waiting


def _outputs_untrusted_data(words: list[str]) -> bool:
    """Whether a command puts out what the file does not say: something from the network, or an argument of the tool."""
    name = program_name((strip_launchers(words) or words)[0])
    fetches = any(_FETCH_PROGRAMS.fullmatch(one) for one in (program_name(words[0]), name))
    return fetches or (_PRINT_PROGRAMS.fullmatch(name) is not None and any(HOLE_DELIMITER in word for word in words))


def _downloaded_files(words: list[str]) -> Iterator[str]:
    """How what a command has fetched may be called afterwards: as one of its words, or as the end of an address."""
    if _FETCH_PROGRAMS.fullmatch(program_name((strip_launchers(words) or words)[0])):
        for word in filter(re.compile(r"\w").search, words[1:]):
            yield from (word, program_name(word), f"./{program_name(word)}")


def _is_untrusted_substitution(program: str) -> bool:
    """Whether a word is what a command puts out that gets it from elsewhere."""
    quoted = _QUOTED_WORD.fullmatch(program)
    put_out = _COMMAND_SUBSTITUTION.fullmatch(quoted[2] if quoted else program)
    if put_out is None:
        return False
    return any(_outputs_untrusted_data(words) for _, words in simple_commands(put_out[1] or put_out[2]))

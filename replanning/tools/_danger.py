"""What a tool may do harm with by what it is, where nobody has said whether it may."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from replanning._plan import ToolSpec
from replanning.tools._commands import simple_commands
from replanning.tools._templates import MARK

_RUNNING: Final = {
    "c": re.compile(r"(?:ba|da|k|z|fi)?sh|python[\d.]*"),
    "e": re.compile(r"node|perl|ruby|lua"),
    "r": re.compile(r"php"),
}
"""The programs that run what stands behind an option of one letter."""

_DELETING: Final = re.compile(r"rm|rmdir|shred|unlink|dd|mkfs(?:\..*)?|-delete")
_OTHERS: Final = re.compile(r"sudo|doas|su")
_STARTING: Final = re.compile(r"find|xargs|timeout|nohup|setsid|busybox")
"""The programs that start another, which may stand anywhere behind them; -delete is what one of them does itself."""


def harm_of(tool: ToolSpec) -> str:
    """Why a tool counts as dangerous unless somebody says that it is not; empty where nothing speaks for that (J39)."""
    if tool.kind == "http" and (tool.method or "").upper() == "DELETE":
        return "it sends DELETE"
    if tool.kind != "shell" or not tool.command:
        return ""
    return next(_harms(tool.command), "")


def _harms(command: str) -> Iterator[str]:
    for words in simple_commands(command):
        if MARK in words[0]:
            yield "it runs whatever program it is told to"
        elif runner := _runs_an_argument(words):
            yield f"it runs whatever text it is given with {runner!r}"
        for name in _started(words):
            if _DELETING.fullmatch(name):
                yield f"it uses {name!r}"
            elif _OTHERS.fullmatch(name):
                yield f"it acts as somebody else, with {name!r}"


def _started(words: list[str]) -> list[str]:
    """The names of what may be started: the program, and where that starts others, all that could be one."""
    names = [word.rpartition("/")[2] for word in words]
    return names if _STARTING.fullmatch(names[0]) else names[:1]


def _runs_an_argument(words: list[str]) -> str:
    """The program, wherever it stands, whose own text is an argument of the tool; empty where there is none."""
    if words[0] == "eval":
        return "eval" if any(MARK in word for word in words) else ""
    for place, (option, word) in enumerate(pairwise(words)):
        if MARK in word:
            names = [before.rpartition("/")[2] for before in words[:place]]
            for letter, programs in _RUNNING.items():
                if re.fullmatch(rf"-\w*{letter}", option) and (found := [n for n in names if programs.fullmatch(n)]):
                    return found[-1]
    return ""

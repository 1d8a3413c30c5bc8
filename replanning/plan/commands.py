"""Command templates, in which arguments are words and never text of the script, and the harm that commands may do.

The script reaches `/bin/sh` as it was written, with a variable of the shell in the place of each hole; the
values travel beside it. So no value is ever parsed by the shell, whatever it holds. What could still go
wrong is a hole in a place where a variable is not one word (inside quotes, a comment, a here-document):
those are refused when the template is read.

Two judgements use the same parser: arguments that a program would read as options (`option_problems`), and why a tool
counts as dangerous (`danger_reason`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile, pairwise
from types import MappingProxyType
from typing import Final

from pydantic import JsonValue

from replanning.plan.json_values import as_text
from replanning.plan.messages import truncate
from replanning.plan.references import fill_placeholders, placeholders
from replanning.plan.tasks import ToolSpec

HOLE_DELIMITER: Final = "\0"
"""Delimiter of marked holes; no template, value or variable contains it."""

MARKED_HOLE: Final = re.compile(f"{HOLE_DELIMITER}([^{HOLE_DELIMITER}]+){HOLE_DELIMITER}")
"""A hole in a marked template."""

ENV_REFERENCE: Final = re.compile(r"(?<![${])\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
"""A variable in a template."""

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
    "quotes": "{hole} stands inside quotes; values are quoted for you, remove the quotes, or write {{{hole}}} for that text itself",
    "backquotes": "{hole} stands inside backquotes; write $(…) instead",
    "arithmetic": "{hole} stands inside $((…)), where the shell would calculate with a value it cannot trust; assign it to a variable before",
    "expansion": "{hole} stands inside ${{…}}; assign it to a variable before, or write ${{name}} for a variable of the shell",
    "comment": "{hole} stands in a comment; remove it, or write {{{hole}}} for that text itself",
    "document": "{hole} stands in a here-document; use printf and a pipe instead",
}

_MAX_COMMAND_CHARS: Final = 100_000
"""Longest template, in characters; the system passes on no longer one."""

_MAX_COMMANDS: Final = 2_000
"""Most simple commands of a template that are judged; a tool with more counts as dangerous."""

_MAX_PROGRAM_CHARS: Final = 1_000
_BEFORE_WORD: Final = frozenset(" \t\n;|&(")
_AFTER_WORD: Final = frozenset(" \t\n;|&)<>")
_PREFIX_WORDS: Final = frozenset("! { if then elif else do while until exec command time env nohup nice".split())  # noqa: SIM905 - a list would take a line each
_CLOSING_WORDS: Final = frozenset({"}", "done", "fi"})
_SHELL_BUILTINS: Final = frozenset(
    ": . [ alias bg break case cd continue done echo esac eval exit export false fg fi for getopts hash jobs kill local"  # noqa: SIM905 - likewise
    " printf pwd read readonly return set shift test times trap true type ulimit umask unalias unset wait }".split()
)


def env_references(text: str) -> tuple[str, ...]:
    """Return the variables that a template refers to, each once, in order."""
    return tuple(dict.fromkeys(ENV_REFERENCE.findall(text)))


def mark_holes(template: str) -> str:
    """Return the template with each placeholder as a marked hole, and `{{name}}` as that text."""
    return fill_placeholders(
        template, {name: f"{HOLE_DELIMITER}{name}{HOLE_DELIMITER}" for name in placeholders(template)}
    )


def argument_text(name: str, value: JsonValue) -> str:
    """Return a value as text for a process or a server.

    Raises:
        ValueError: it has no such text; the message names the argument and the reason.
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
    if HOLE_DELIMITER in text:
        raise ValueError(f"{name!r} holds the character NUL")
    return text


@dataclass(frozen=True, slots=True)
class Script:
    """Script for the shell, and the words that it refers to."""

    text: str
    words: tuple[str, ...]


def command_problems(command: str) -> list[str]:
    """Return the problems of a command template, in the order of the text."""
    if not command.strip():
        return ["its command is empty"]
    if HOLE_DELIMITER in command:
        return ["its command holds the character NUL"]
    if len(command) > _MAX_COMMAND_CHARS:
        return [f"its command has more than {_MAX_COMMAND_CHARS} characters; write it into a file"]
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


def compile_command(
    command: str, arguments: Mapping[str, JsonValue], parameters: Mapping[str, str] = MappingProxyType({})
) -> Script:
    """Return the script and its words for these arguments; a list becomes several words.

    Args:
        command: the template.
        arguments: values by name.
        parameters: the types of arguments, as `option_problems` takes them.

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
            problems.append(f"{name!r} is a list, but {{{name}}} does not stand alone in the command")
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
    if not problems:
        problems = option_problems(command, arguments, parameters)
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    if words:  # kept out of reach of `set`, `shift` and functions
        named = " ".join(f"_replanning_{number}=${{{number}}}" for number in range(1, len(words) + 1))
        parts.insert(0, f"{named}; shift {len(words)}; ")
    return Script("".join(parts), tuple(words))


def option_problems(
    command: str, arguments: Mapping[str, JsonValue], parameters: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return the problems of arguments that begin with a dash where a program would read them as options.

    Args:
        command: the template.
        arguments: values by name; missing ones have no problems.
        parameters: the types of arguments; one that is a number may be negative.
    """
    problems: list[str] = []
    for names, sign, exempt in _leading_holes(command):
        for name in names:
            value = arguments.get(name, "")
            texts = [str(item) for item in (value if isinstance(value, list) else [value])]
            is_number = parameters.get(name) in ("integer", "number") and isinstance(value, int | float)
            if not is_number and (found := next((text for text in texts[exempt:] if text.startswith(sign)), "")):
                read_as = f"the name of a file; if it may be one, write @{{{name}}} in the command"
                if sign == "-":
                    read_as = (
                        f"an option; if it may begin with a dash, write -- before {{{name}}} in the command, or "
                        f"--option={{{name}}}"
                    )
                problems.append(f"{name!r} is {truncate(found, 81)!r}, which would be read as {read_as}")
            if any(texts):
                break
    return list(dict.fromkeys(problems))


_PLAIN_PROGRAMS: Final = frozenset({":", "[", "case", "echo", "test"})
"""Commands of the shell for which an argument that begins with a dash does no harm."""

_VALUE_OPTIONS: Final = (
    (re.compile(r"[ef]?grep|rg|sed"), re.compile(r"-\w*[ef]|-[ABCm]|--(?:regexp|expression|file)")),
    (re.compile(r"find"), re.compile(r"-(?:i?name|i?path|i?regex|newer|type|user|group|size|[amc]time)")),
    (re.compile(r"commit|tag"), re.compile(r"-a?m|--message|--author")),  # of git
    (re.compile(r"curl"), re.compile(r"-\w*[AbcdeFHmouXT]|--(?:data\S*|form|header|json|output|request|url|user)")),
    (re.compile(r"tar"), re.compile(r"-\w*[fC]")),
)
"""Common programs, and their options after which the next word is a value, whatever it is."""


_FILE_OPTION: Final = re.compile(r"curl (?:-\w*d|--json|--data(?:-ascii|-binary|-urlencode)?)")

_MAX_WORDS: Final = 100
"""Most words of a simple command that are searched for a sign that the next word is no option."""


def _leading_holes(command: str) -> Iterator[tuple[list[str], str, int]]:
    """Yield the holes at the beginning of each word that a program may read as an option, or `curl` as a file: `@name`.

    With each, the sign with which the word must not begin, and how many words of a list are exempt: 1 after an option that
    takes a value, and after a redirection.
    """
    words: list[str] = []
    holes: list[str] = []
    word = ""
    is_open, in_variable, redirected = True, False, False  # open: nothing but holes and variables so far
    for kind, text, _ in [*_tokens(mark_holes(command)), ("text", ";", True)]:
        if text == "\\\n":
            continue
        if kind != "text" or text not in " \t\n;|&()<>":
            in_variable = kind == "text" and (
                text == "$" or (in_variable and re.match(r"[\w@*#?!$-]", text) is not None)
            )
            if kind == "hole" and is_open:
                holes.append(text.strip(HOLE_DELIMITER))
            elif kind in ("text", "escape"):
                is_open = is_open and in_variable
            elif kind == "quotes":
                is_open = is_open and (len(text) <= 2 or (text[0] == '"' and re.search(r"[$`]", text) is not None))
            word += text
            continue
        before = f"{_program_name((_strip_launchers(words) or words)[0])} {words[-1]}" if holes and words else ""
        if _FILE_OPTION.fullmatch(before):
            yield holes, "@", 0
        takes_value = bool(holes) and (redirected or _takes_value(words))
        if holes and (takes_value or not _takes_any_word(words)):
            yield holes, "-", int(takes_value)
        if word and not redirected and (words or not (re.match(r"\w+=", word) or word in _PREFIX_WORDS)):
            words.append(word)
        redirected = text in "<>" or (redirected and not word and text in " \t&")
        word, holes, is_open, in_variable = "", [], True, False
        if text in "\n;|&(" and not redirected:
            words = []
        elif text == ")":
            words = [text]  # what follows belongs to a command whose beginning is not known here


def _takes_value(words: list[str]) -> bool:
    """Return whether the last of these words is an option of which the next word is the value."""
    if len(words) > _MAX_WORDS:
        return False
    return any(
        program.fullmatch(_program_name(word))
        for word in words[:-1]
        for program, options in _VALUE_OPTIONS
        if options.fullmatch(words[-1])
    )


def _takes_any_word(words: list[str]) -> bool:
    """Return whether a program never reads a word after these words as an option."""
    if not 0 < len(words) <= _MAX_WORDS:
        return False
    names = [_program_name(word) for word in words]
    if names[0] not in ("find", "ssh"):
        words = _strip_launchers(words)
    name = _program_name(words[0]) if words else ""
    takes_code = _CODE_OPTIONS["c"].fullmatch(name) and any(re.fullmatch(r"-\w*c", option) for option in words[1:-1])
    return "--" in words[1:] or name in _PLAIN_PROGRAMS or (name == "printf" and len(words) > 1) or bool(takes_code)


def command_programs(command: str) -> list[str]:
    """Return the programs that a command plainly starts, each once, in order."""
    if re.search(r"\bcase\b|\(\s*\)", command):
        return []  # patterns of `case` and names of functions look like programs
    first = (words[0] for _, words in _simple_commands(command))
    plain = re.compile(r"[\w./+@][\w./+@-]*")
    return list(dict.fromkeys(word for word in first if plain.fullmatch(word) and word not in _SHELL_BUILTINS))


@lru_cache(maxsize=2)  # several judgements read the commands of one template
def _simple_commands(command: str) -> list[tuple[str, list[str]]]:
    """Return the simple commands of a template, roughly, with the operators before each; holes are marked.

    The end of a group is passed over: `(a) | b` is `a | b`.
    """
    commands: list[tuple[str, list[str]]] = []
    words: list[str] = []
    word = before = ""
    for kind, text, _ in [*_tokens(mark_holes(command)), ("text", ";", True)]:
        if kind != "text" or text not in " \t\n;|&()" or (text == "&" and word[-1:] in {"<", ">"}):
            word += text  # quoted parts stay as they are
            continue
        if word and (words or not (re.match(r"\w+=", word) or word in _PREFIX_WORDS | _CLOSING_WORDS)):
            words.append(word)
        word = ""
        if words and text not in " \t)":
            commands.append((before, words))
            words, before = [], text
        elif text not in " \t)":
            before += text
    return commands


@lru_cache(maxsize=2)  # likewise
def _tokens(marked: str) -> list[tuple[str, str, bool]]:
    """Return the parts of a marked template: kind, text, and whether it is a whole word."""
    tokens = []
    for match in _TOKEN.finditer(marked):
        before, after = marked[match.start() - 1 : match.start()], marked[match.end() : match.end() + 1]
        alone = (not before or before in _BEFORE_WORD) and (not after or after in _AFTER_WORD)
        tokens.append((match.lastgroup or "text", match[0], alone))
    return tokens


_CODE_OPTIONS: Final = {
    "c": re.compile(r"(?:ba|da|k|z|fi)?sh|python[\d.]*"),
    "e": re.compile(r"node|perl|ruby|lua"),
    "r": re.compile(r"php"),
}
"""Interpreters by the option that takes code."""

_LAUNCHERS: Final = re.compile(
    r"find|xargs|timeout|nohup|setsid|busybox|ssh|stdbuf|chroot|parallel|watch|ionice|taskset|strace|unshare"
)
"""Programs that start another one from any of their words."""

_STDIN: Final = ""
"""Program that is read from standard input."""

_SHELL_NAME: Final = re.compile(r"(?:ba|da|k|z|fi)?sh")
_SOURCE_BUILTINS: Final = re.compile(r"\.|source|eval")
_OPTION_OR_ASSIGNMENT: Final = re.compile(r"[-+\d%{].*|\w+=.*")
_REDIRECTION: Final = re.compile(r"\d*[<>]+&?")
_OPTION_WITH_VALUE: Final = re.compile(r"[-+]\w*[oWX]|-m")
_SSH_OPTION_WITH_VALUE: Final = re.compile(r"-\w*[BbcDEeFIiJLlmOopQRSWw]")


def _program_name(word: str) -> str:
    return word.rpartition("/")[2]


def _remote_command(words: list[str]) -> list[str]:
    """Return the words that `ssh` runs on another machine, where a shell reads them as one text."""
    rest = iter(words[1:])
    for word in rest:
        if _SSH_OPTION_WITH_VALUE.fullmatch(word):
            next(rest, None)
        elif not word.startswith("-"):
            return list(rest)
    return []


def _strip_launchers(words: list[str]) -> list[str]:
    while words and _LAUNCHERS.fullmatch(_program_name(words[0])):
        rest = dropwhile(_OPTION_OR_ASSIGNMENT.fullmatch, words[1:])
        words = _remote_command(words) if words[0] == "ssh" else list(rest)
    return words


def _interpreted_program(command: list[str]) -> tuple[str, str] | None:
    """Return the interpreter that a command starts and its program: code, a file, or `_STDIN`; None without interpreter.

    The program ends in `<` or `$` if it is the output of the command that follows.
    """
    words = _strip_launchers(command)
    runner = _program_name(words[0]) if words else ""
    if _SOURCE_BUILTINS.fullmatch(runner):
        return (runner, words[1]) if words[1:] else None
    letters = "".join(letter for letter, programs in _CODE_OPTIONS.items() if programs.fullmatch(runner))
    if not letters:
        return None
    rest = iter(words[1:])
    for word in rest:
        if redirected := _REDIRECTION.match(word):
            target = word[redirected.end() :] or next(rest, "<")
            if redirected[0].startswith("<"):
                return runner, target
        elif re.fullmatch(rf"-\w*[{letters}]", word):
            return runner, next(rest, _STDIN)
        elif word in ("-", "/dev/stdin") or (_SHELL_NAME.fullmatch(runner) and re.fullmatch(r"-\w*s\w*", word)):
            break
        elif _OPTION_WITH_VALUE.fullmatch(word):
            value = next(rest, _STDIN)
            if word == "-m":
                return runner, value
        elif word[0] not in "-+":
            return runner, word
    return runner, _STDIN


_DELETE_PROGRAMS: Final = re.compile(r"rm|rmdir|shred|unlink|dd|mkfs(?:\..*)?|-delete")
"""Programs that delete; `-delete` is an option of `find`."""

_PRIVILEGE_PROGRAMS: Final = re.compile(r"sudo|doas|su")
_DATABASE_PROGRAMS: Final = re.compile(
    r"psql|mysql(?:sh|admin)?|mariadb|sqlite3?|mongo(?:sh)?|redis-cli|cqlsh|sqlcmd|sqlplus|duckdb|clickhouse-client|drop(?:db|user)"
)
_PERMISSION_PROGRAMS: Final = re.compile(r"ch(?:mod|own|grp|attr)|setfacl")
_RECURSIVE_OPTION: Final = re.compile(r"-\w*R\w*|--recursive")

_GIT_LOSSES: Final = {
    "push": re.compile(r"-[a-zA-Z]*[fd][a-zA-Z]*|--(?:force.*|mirror|delete|prune)|[+:].+"),
    "reset": re.compile(r"--hard"),
    "clean": re.compile(r"-[a-zA-Z]*f[a-zA-Z]*|--force"),
    "checkout": re.compile(r"-[a-zA-Z]*f[a-zA-Z]*|--force"),
    "branch": re.compile(r"-[a-zA-Z]*D[a-zA-Z]*"),
    "stash": re.compile(r"drop|clear"),
}
"""Commands of git by which work can be lost, and the words that make them do so."""

_FETCH_PROGRAMS: Final = re.compile(r"curl|wget|fetch|nc|ncat|ssh")
_PRINT_PROGRAMS: Final = re.compile(r"echo|printf")
_PIPE_OPERATOR: Final = re.compile(r"(?:.*[^|])?\|[&(\n]*", re.DOTALL)
_QUOTED_WORD: Final = re.compile(r"""(["'])(.*)\1""", re.DOTALL)
_SUBSTITUTION_PREFIXES: Final = ("<", "$")
"""Ends of a word before a substitution: `<(…)`, `$(…)`."""

_COMMAND_SUBSTITUTION: Final = re.compile(r"\s*(?:\$\((.*)\)|`(.*)`)\s*", re.DOTALL)


_CODE_KEYS: Final = (
    r"(?:alias\.[^=]*|[^=]*(?:pager|editor|command|helper|program|path|fsmonitor|driver|textconv|askpass|exec))"
)
"""Settings and variables whose values are commands, or name programs."""

_CODE_VALUES: Final = (
    (re.compile(r"git"), re.compile(rf"-c (?:{_CODE_KEYS}=)?|--(?:exec|upload-pack|receive-pack)[= ]", re.IGNORECASE)),
    (re.compile(r"ssh|scp|sftp"), re.compile(rf"-\w*o ?(?:{_CODE_KEYS}=)?", re.IGNORECASE)),
    (re.compile(r"rsync"), re.compile(r"-\w*e |--(?:rsh|rsync-path)[= ]")),
    (re.compile(r"tar"), re.compile(r"-\w*[IF] |--(?:checkpoint-action|to-command|use-compress-program)[= ]")),
    (re.compile(r"[gm]?awk"), re.compile(r"(?:-\S+|[gm]?awk) ")),
    (re.compile(r"-.*"), re.compile(r"-\w*S ?|--split-string[= ]")),  # of `env`
)
"""Programs that run the value of an option, and what stands before the value."""

_CODE_VARIABLE: Final = re.compile(
    r"(?<!\S)(?:\w*(?:PAGER|EDITOR|_COMMAND|ASKPASS|_PRELOAD)|(?:PYTHON|LD_LIBRARY_|GIT_EXEC_)?PATH|VISUAL|SHELL|BASH_ENV|ENV)="
    + HOLE_DELIMITER
)


def use_danger(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> str:
    """Return why a person must agree to a use of a tool; "" if nobody must, because it states that or looks harmless."""
    if tool.dangerous or "dangerous" in tool.model_fields_set:
        return "it is declared dangerous" if tool.dangerous else ""
    return danger_reason(tool, arguments)


def danger_reason(tool: ToolSpec, arguments: Mapping[str, JsonValue] = MappingProxyType({})) -> str:
    """Return why a tool counts as dangerous by default; "" if it does not.

    Args:
        tool: the tool.
        arguments: values by name; if given, the command filled in with them is judged as well.
    """
    if tool.kind == "http" and (tool.method or "").upper() == "DELETE":
        return "it sends DELETE"
    if tool.kind != "shell" or not tool.command:
        return ""
    if len(tool.command) > _MAX_COMMAND_CHARS or len(_simple_commands(tool.command)) > _MAX_COMMANDS:
        return "its command is too long to be judged"
    filled = MARKED_HOLE.sub(
        lambda hole: _quoted_words(arguments.get(hole[1], f"{{{hole[1]}}}")), mark_holes(tool.command)
    )
    return next(_danger_reasons(tool.command), "") or next(_danger_reasons(filled) if arguments else iter(()), "")


def _quoted_words(value: JsonValue) -> str:
    """Return a value as words of the shell, without braces, which could be a placeholder, and not longer than names are."""
    items = value if isinstance(value, list) else [value]
    return " ".join(shlex.quote(str(item)[:_MAX_PROGRAM_CHARS].translate({0: None, ord("{"): None})) for item in items)


def _danger_reasons(command: str) -> Iterator[str]:
    if found := _CODE_VARIABLE.search(mark_holes(command)):
        yield f"it runs whatever {found[0].partition('=')[0].strip()!r} is set to"
    for _, words in _simple_commands(command):
        if HOLE_DELIMITER in words[0]:
            yield "it runs whatever program it is told to"
        elif runner := _argument_interpreter(words):
            yield f"it runs whatever text it is given with {runner!r}"
        for name in dict.fromkeys(_candidate_programs(words)):
            if _DELETE_PROGRAMS.fullmatch(name):
                yield f"it uses {name!r}"
            elif _PRIVILEGE_PROGRAMS.fullmatch(name):
                yield f"it acts as somebody else, with {name!r}"
            elif _DATABASE_PROGRAMS.fullmatch(name):
                yield f"it works on a database, with {name!r}"
            elif _PERMISSION_PROGRAMS.fullmatch(name) and any(map(_RECURSIVE_OPTION.fullmatch, words)):
                yield f"it changes permissions recursively, with {name!r}"
            elif name == "git":
                plain = [word.strip("'\"") for word in words]
                verb = next(filter(_GIT_LOSSES.__contains__, plain), "")
                if verb and (loss := next(filter(_GIT_LOSSES[verb].fullmatch, plain[plain.index(verb) + 1 :]), "")):
                    yield f"it discards work, with 'git {verb} {loss}'"
        if script := _inline_script(words):
            yield from _danger_reasons(script)
    yield from (
        f"it runs whatever comes from elsewhere, with {runner!r}" for runner in _untrusted_code_runners(command)
    )


def _candidate_programs(words: list[str]) -> list[str]:
    names = [_program_name(word) for word in words]
    return names if _LAUNCHERS.fullmatch(names[0]) or names[0].startswith("-") else names[:1]  # of `env -i`


def _argument_interpreter(words: list[str]) -> str:
    """Return the interpreter whose code is an argument of the tool; "" if there is none."""
    if words[0] == "eval":
        return "eval" if any(HOLE_DELIMITER in word for word in words) else ""
    if any(HOLE_DELIMITER in word for word in _ssh_command(words)):
        return "ssh"
    for program, value in _CODE_VALUES:
        runner = next(filter(program.fullmatch, _candidate_programs(words)), "")
        for before, word in pairwise(words) if runner else ():
            head, hole, _ = word.partition(HOLE_DELIMITER)
            if hole and (value.fullmatch(f"{before} {head}") or value.fullmatch(head)):
                return "env" if runner.startswith("-") else runner
    runners: dict[str, str] = {}  # the last interpreter before each option that takes code
    for option, word in pairwise(words):
        if HOLE_DELIMITER in word:
            for letter, runner in runners.items():
                if re.fullmatch(rf"-\w*{letter}", option):
                    return runner
        name = _program_name(option)
        runners.update((letter, name) for letter, programs in _CODE_OPTIONS.items() if programs.fullmatch(name))
    return ""


def _ssh_command(words: list[str]) -> list[str]:
    """Return the words of a command that run on another machine, where a shell parses arguments again."""
    names = _candidate_programs(words)
    return _remote_command(words[names.index("ssh") :]) if "ssh" in names else []


def _inline_script(words: list[str]) -> str:
    """Return the quoted script that a command passes to a shell; "" if there is none."""
    runner, program = _interpreted_program(words) or ("", "")
    sent = _ssh_command(words)
    quoted = _QUOTED_WORD.fullmatch(program if _SHELL_NAME.fullmatch(runner) else sent[0] if len(sent) == 1 else "")
    return quoted[2] if quoted else ""


def _untrusted_code_runners(command: str) -> Iterator[str]:
    """Yield the interpreters that run code from a pipe, a substitution or a file with downloaded content."""
    comes, waiting, last = False, "", ""
    files: set[str] = set()
    for before, words in _simple_commands(command):
        inside = last if before[:1] == "(" else ""  # the word whose end says what the parenthesis is for
        piped = _PIPE_OPERATOR.fullmatch(before) is not None or inside.endswith(">")
        waiting = waiting if piped or inside.endswith(_SUBSTITUTION_PREFIXES) else ""
        comes = (comes and piped) or _outputs_untrusted_data(words)
        runner, program = _interpreted_program(words) or ("", None)
        if comes and waiting:
            yield waiting
        if (comes and program == _STDIN) or (program and (program in files or _is_untrusted_substitution(program))):
            yield runner
        elif "/" in words[0] and words[0] in files:
            yield words[0]
        if _FETCH_PROGRAMS.fullmatch(_program_name((_strip_launchers(words) or words)[0])):
            for word in filter(re.compile(r"\w").search, words[1:]):
                files.update((word, _program_name(word), f"./{_program_name(word)}"))
        last = words[-1]
        waiting = runner if program == last and last.endswith(_SUBSTITUTION_PREFIXES) else waiting


def _outputs_untrusted_data(words: list[str]) -> bool:
    """Return whether the output of a command comes from the network or from an argument of the tool."""
    name = _program_name((_strip_launchers(words) or words)[0])
    fetches = any(_FETCH_PROGRAMS.fullmatch(one) for one in (_program_name(words[0]), name))
    return fetches or (_PRINT_PROGRAMS.fullmatch(name) is not None and any(HOLE_DELIMITER in word for word in words))


def _is_untrusted_substitution(program: str) -> bool:
    """Return whether a word is a substitution with output from the network or an argument."""
    quoted = _QUOTED_WORD.fullmatch(program)
    put_out = _COMMAND_SUBSTITUTION.fullmatch(quoted[2] if quoted else program)
    if put_out is None:
        return False
    return any(_outputs_untrusted_data(words) for _, words in _simple_commands(put_out[1] or put_out[2]))

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
from collections.abc import Iterable, Iterator, Mapping
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
_PREFIX_WORDS: Final = frozenset(
    "! { if then elif else do while until exec command builtin coproc time env nohup nice".split()  # noqa: SIM905 - a list would take a line each
)
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
        template,
        {name: f"{HOLE_DELIMITER}{name}{HOLE_DELIMITER}" for name in placeholders(template)},
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
            problems.append(
                f"{name!r} is a list, but {{{name}}} does not stand alone in the command"
            )
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
    """Return the problems of arguments that begin with a dash where a program would read them as options.

    Args:
        command: the template.
        arguments: values by name; missing ones have no problems.
        parameters: the types of arguments; one that is a number may be negative.
    """
    return leading_problems(leading_holes(command), arguments, parameters)


def leading_problems(
    holes: Iterable[LeadingHoles], arguments: Mapping[str, JsonValue], parameters: Mapping[str, str]
) -> list[str]:
    """Return the problems of arguments in the leading holes of a command, as `option_problems` does."""
    problems: list[str] = []
    for names, forbidden, exempt in holes:
        for name in names:
            value = arguments.get(name, "")
            texts = [str(item) for item in (value if isinstance(value, list) else [value])]
            is_number = parameters.get(name) in ("integer", "number") and isinstance(
                value, int | float
            )
            if not is_number and (
                found := next((text for text in texts[exempt:] if forbidden.match(text)), "")
            ):
                read_as = f"the name of a file; if it may be one, write @{{{name}}} in the command"
                if forbidden is _DASH:
                    read_as = (
                        f"an option; if it may begin with a dash, write -- before {{{name}}} in the command, or "
                        f"--option={{{name}}}"
                    )
                problems.append(
                    f"{name!r} is {truncate(found, 81)!r}, which would be read as {read_as}"
                )
            if any(texts):
                break
    return list(dict.fromkeys(problems))


_PLAIN_PROGRAMS: Final = frozenset({":", "[", "case", "echo", "test"})
"""Commands of the shell for which an argument that begins with a dash does no harm."""

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
"""Common programs, and their options after which the next word is a value, whatever it is."""


_FILE_NAMES: Final = (
    (
        re.compile(
            r"curl .*?(?:-\w*[dH] ?|--(?:json|data|data-ascii|data-binary|header|proxy-header) )"
        ),
        re.compile("@"),
    ),
    (re.compile(r"curl .*?(?:--data-urlencode|--url-query) "), re.compile("[^=]*@")),
    (re.compile(r"curl .*?(?:-\w*F ?|--form )"), re.compile("[^=]*=[@<]")),
    (re.compile(r"curl .*?(?:-\w*F ?|--form )[^=]+="), re.compile("[@<]")),
    (re.compile(r"gh .*?(?:-F|--field) "), re.compile("[^=]*=@")),
    (re.compile(r"gh .*?(?:-F|--field) [^=]+="), re.compile("@")),
)
"""What stands before an argument, and beginnings of the argument with which it names a file to be sent."""

_DASH: Final = re.compile("-")
_FIRST_HOLES: Final = re.compile(f"([^{HOLE_DELIMITER}]*)((?:{MARKED_HOLE.pattern})+)", re.DOTALL)

_MAX_WORDS: Final = 100
"""Most words of a simple command that are searched for a sign that the next word is no option."""


LeadingHoles = tuple[tuple[str, ...], re.Pattern[str], int]
"""Holes at the beginning of a word, the beginnings that their arguments must not have, and how many words of a list are
exempt: 1 after an option that takes a value, and after a redirection."""


def leading_holes(command: str) -> list[LeadingHoles]:
    """Return the different holes that a program may read as an option, or `curl` as a file: `@name`."""
    return list(
        dict.fromkeys(
            (tuple(names), forbidden, exempt)
            for names, forbidden, exempt in _leading_holes(command)
        )
    )


def _leading_holes(command: str) -> Iterator[tuple[list[str], re.Pattern[str], int]]:
    words: list[str] = []
    holes: list[str] = []
    word = ""
    is_open, in_variable, redirected = (
        True,
        False,
        False,
    )  # open: nothing but holes and variables so far
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
                is_open = is_open and (
                    len(text) <= 2 or (text[0] == '"' and re.search(r"[$`]", text) is not None)
                )
            word += text
            continue
        if words and (found := _FIRST_HOLES.match(word)):
            program = _program_name((_strip_launchers(words[:_MAX_WORDS]) or words)[0])
            before = re.sub("['\"\\s]", "", words[-1]), re.sub("['\"]", "", found[1])
            for option, beginning in _FILE_NAMES:
                if option.fullmatch(" ".join((program, *before))):
                    yield MARKED_HOLE.findall(found[2]), beginning, 0
        takes_value = bool(holes) and (redirected or _takes_value(words))
        if holes and (takes_value or not _takes_any_word(words)):
            yield holes, _DASH, int(takes_value)
        if (
            word
            and not redirected
            and (words or not (re.match(r"\w+=", word) or word in _PREFIX_WORDS))
        ):
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
    takes_code = _CODE_OPTIONS["c"].fullmatch(name) and any(
        re.fullmatch(r"-\w*c", option) for option in words[1:-1]
    )
    return (
        "--" in words[1:]
        or name in _PLAIN_PROGRAMS
        or (name == "printf" and len(words) > 1)
        or bool(takes_code)
    )


def command_programs(command: str) -> list[str]:
    """Return the programs that a command plainly starts, each once, in order."""
    if re.search(r"\bcase\b|\(\s*\)", command):
        return []  # patterns of `case` and names of functions look like programs
    first = (words[0] for _, words in _simple_commands(mark_holes(command)))
    plain = re.compile(r"[\w./+@][\w./+@-]*")
    return list(
        dict.fromkeys(
            word for word in first if plain.fullmatch(word) and word not in _SHELL_BUILTINS
        )
    )


_HERE_DOCUMENT: Final = re.compile(r"""<<-?[ \t]*['"\\]?(\w+)['"]?([^\n]*)\n""")


@lru_cache(maxsize=2)  # several judgements read the commands of one template
def _simple_commands(command: str) -> list[tuple[str, list[str]]]:
    """Return the simple commands of a marked template, roughly, with the operators before each.

    The end of a group is passed over: `(a) | b` is `a | b`. A here-document becomes a quoted word after `<`.
    """
    rest, parts = command.replace("<<<", "<"), []
    while found := _HERE_DOCUMENT.search(rest):
        end = re.compile(rf"^\t*{found[1]}$", re.MULTILINE).search(rest, found.end())
        if end is None:
            break
        parts += [
            rest[: found.start()],
            "< '",
            rest[found.end() : end.start()].replace("'", ""),
            "'",
            found[2],
        ]
        rest = rest[end.end() :]
    commands: list[tuple[str, list[str]]] = []
    words: list[str] = []
    word = before = ""
    opened = 0
    for kind, text, _ in [*_tokens("".join([*parts, rest])), ("text", ";", True)]:
        if kind != "text" or text not in " \t\n;|&()" or (text == "&" and word[-1:] in {"<", ">"}):
            word += text  # quoted parts stay as they are
            continue
        if word and (
            words or not (re.match(r"\w+=", word) or word in _PREFIX_WORDS | _CLOSING_WORDS)
        ):
            words.append(word)
        before += "=" if text == "(" and word.endswith("=") else ""  # of an array
        word = ""
        opened += (text == "(") - (text == ")")
        if opened < 0:  # after a pattern of `case`
            words, opened = [], 0
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
        before, after = (
            marked[match.start() - 1 : match.start()],
            marked[match.end() : match.end() + 1],
        )
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
    r"find|xargs|timeout|nohup|setsid|busybox|toybox|ssh|stdbuf|chroot|parallel|watch|ionice|taskset|strace|ltrace|unshare"
    r"|env|nice|chrt|flock|nsenter|systemd-run|script|gdb|valgrind|perf|numactl|setarch|prlimit|fakeroot|bwrap|sshpass|entr|xvfb-run"
    r"|npx|pnpx|bunx|uvx|tmux|screen|setpriv|runcon|cgexec|firejail|proot|tini|dumb-init|unbuffer|wsl|adb"
)
"""Programs that start another one from any of their words."""

_VERB_LAUNCHERS: Final = (
    (
        re.compile(
            r"docker|podman|nerdctl|docker-compose|kubectl|oc|lxc|multipass|limactl|distrobox|toolbox|flatpak|heroku"
            r"|mise|asdf|[rpn]yenv|rbenv|direnv|aws-vault|chamber|op|doppler|infisical|devbox|tox"
        ),
        re.compile(r"\S+ (?:exec|run|debug|shell|enter|x)"),
        True,
    ),
    (re.compile(r"npm|pnpm|yarn|bun"), re.compile(r"\S+ (?:exec|dlx|x)"), True),
    (re.compile(r"nix"), re.compile(r"\S+ (?:-c|--command|--)"), False),
    (re.compile(r"git"), re.compile(r"bisect run|submodule foreach|\S+ (?:--exec|-x)"), True),
    (re.compile(r"python[\d.]*"), re.compile(r"\S+ -m"), False),
    (
        re.compile(
            r"uv|poetry|pipenv|pipx|pdm|hatch|rye|(?:micro)?mamba|conda|bundle|pixi|dotenv|foreman"
        ),
        re.compile(r"\S+ (?:run|exec)"),
        False,
    ),
)
"""Programs that start another one after one of their words: from any of the words that follow, or else from the next."""

_UNKNOWN_PROGRAM: Final = re.compile(
    r"""["']?(?:.*/)?\$(?:[\w@*]+|\{[^{}]*\})["']?|"?(?:`.*`|\$\(.*\))"?""", re.DOTALL
)
"""Word that a variable or an output names."""

_WRAPPERS: Final = re.compile("timeout|nohup|setsid|xargs|stdbuf|ionice|chroot|parallel|watch")
"""Programs that start what follows their options."""

_FIND_ACTION: Final = re.compile("-(?:exec|ok)(?:dir)?")
"""Options of `find` after which a program stands."""

_STDIN: Final = ""
"""Program that is read from standard input."""

_SHELL_NAME: Final = re.compile(r"(?:ba|da|k|z|fi)?sh")
_SOURCE_BUILTINS: Final = re.compile(r"\.|source|eval")
_OPTION_OR_ASSIGNMENT: Final = re.compile(r"[-+\d%{].*|\w+=.*")
_REDIRECTION: Final = re.compile(r"\d*[<>]+&?")
_OPTION_WITH_VALUE: Final = re.compile(r"[-+]\w*[oWX]|-m")
_SSH_OPTION_WITH_VALUE: Final = re.compile(r"-\w*[BbcDEeFIiJLlmOopQRSWw]")


def _program_name(word: str) -> str:
    """Return the name of the program that a word starts, also behind a path, quotes and backslashes."""
    return re.sub(r"""['"\\]""", "", MARKED_HOLE.sub("", word)).rpartition("/")[2]


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
    letters = "".join(
        letter for letter, programs in _CODE_OPTIONS.items() if programs.fullmatch(runner)
    )
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
        elif word in ("-", "/dev/stdin") or (
            _SHELL_NAME.fullmatch(runner) and re.fullmatch(r"-\w*s\w*", word)
        ):
            break
        elif _OPTION_WITH_VALUE.fullmatch(word):
            value = next(rest, _STDIN)
            if word == "-m":
                return runner, value
        elif word[0] not in "-+":
            return runner, word
    return runner, _STDIN


_CODE_KEY: Final = (
    r"(?i:alias\.[^= ]*|[^= ]*(?:pager|editor|command|cmd|helper|program|path|fsmonitor|driver|textconv|askpass|exec"
    r"|external|clean|smudge|process|insteadof))"
)
"""Settings whose values are commands, or name programs."""

_CODE_VARIABLE: Final = re.compile(
    r"(?<!\S)(?:\w*(?:PAGER|EDITOR|_COMMAND|ASKPASS|_PRELOAD|_RSH|_WRAPPER|MAKEFLAGS)|(?:PYTHON|NODE_|CLASS|LD_LIBRARY_|GIT_EXEC_)?PATH"
    r"|VISUAL|SHELL|BROWSER|BASH_ENV|ENV|PS4|GIT_(?:SSH|EXTERNAL_DIFF|PROXY_\w+|CONFIG\w*|TEMPLATE_DIR)|LD_AUDIT|DYLD_\w+"
    r"|NODE_OPTIONS|PYTHON(?:STARTUP|HOME)|PERL5(?:OPT|LIB|DB)|RUBY(?:OPT|LIB)|_?JAVA_\w*OPTIONS|GOFLAGS|TAR_OPTIONS|LESS(?:OPEN|CLOSE))="
    + HOLE_DELIMITER
)

_ANY: Final = r" (?:.*? )?\0?"  # the words before the one that counts
_GIT: Final = r"(?: (?:-[cC]|--git-dir|--work-tree) \S+| -\S+)*+ \0?"  # options of git itself
_GIT_LOSSES: Final = {
    "push": r"-(?=[a-zA-Z]*[fd])[a-zA-Z]+|--(?:force\S*|mirror|delete|prune)|[+:]\S+",
    "reset": r"--(?:hard|merge|keep)",
    "clean": r"-(?=[a-zA-Z]*f)[a-zA-Z]+|--force",
    r"checkout(?!.* (?:-b|--orphan) )": r"-(?=[a-zA-Z]*[fB])[a-zA-Z]+|--force|--|\.|\0\S*",
    "switch": r"-(?=[a-zA-Z]*[fC])[a-zA-Z]+|--(?:force|force-create|discard-changes)",
    r"restore(?!.* (?:-S|--staged)(?: |$))": r"\S*",
    "restore": r"-W|--worktree",
    r"rm(?!.* (?:--cached|--dry-run|-n)(?: |$))": r"\S*",
    "branch": r"-(?=[a-zA-Z]*[DMCf])[a-zA-Z]+|--force",
    "tag": r"-(?=[a-zA-Z]*[df])[a-zA-Z]+|--(?:delete|force)",
    "stash": "drop|clear",
    "worktree": "-f|--force",
    "reflog": "expire|delete",
    "update-ref": "-d|--delete",
    "filter-branch|filter-repo": r"\S*",
}
"""Commands of git by which work can be lost, and the words that make them do so."""

_CODE_RULES: Final = (
    ("eval", r" .*\0"),
    ("ssh", r"(?: -\w*[BbcDEeFIiJLlmOopQRSWw] \S+| -\S+)*+ \S+ .*\0"),
    ("watch|parallel", r"(?: (?:-[njNLISd]|--interval|--jobs) \S+| -\S+)*+ (?:(?!:::).)*?\0"),
    (
        r"(?:ba|da|k|z|fi)?sh|python[\d.]*",
        r"(?: -[oWX] \S+| (?!-\w*[cm][ \0])[-+]\S+)*+ (?:-\w*c |-[^ c\0]*c)[^ \0]*\0",
    ),
    (
        "node|perl|ruby|lua|deno|bun|Rscript|osascript|julia|groovy",
        r"(?: (?!-\w*[eE][ \0]|--eval)-\S+)*+ (?:-\w*[eE] |-[^ eE\0]*[eE]|--eval[= ]|eval )[^ \0]*\0",
    ),
    ("php", r"(?: (?!-\w*r[ \0])-\S+)*+ (?:-\w*r |-[^ r\0]*r)[^ \0]*\0"),
    ("n?vim?|ex|emacs", rf"{_ANY}(?:-c |--cmd |--eval[= ]|\+)\0"),
    (
        "[gmn]?awk",
        r"(?: (?:-[vF]|--assign) \S+| (?!-\w*[vFfe] |--(?:file|source|assign))-\S+)*+ (?:(?!-)|-e |--source[= ])\S*\0",
    ),
    (
        "g?sed",
        rf"(?:(?: -l \S+| (?!-\w*[efl] |-\w*e\S|--expression|--file)-\S+)*+ (?!-)|{_ANY}(?:-\w*e |-[^ e\0]*e|--expression[= ]))[^ \0]*\0",
    ),
    (
        "git",
        rf"(?: -C \S+| -c (?!(?:{_CODE_KEY}=)?\0)\S+| (?!-[cC] |--exec-path=\0)-\S+)*+ (?:-c (?:{_CODE_KEY}=)?|--exec-path=)\0",
    ),
    (
        "git",
        rf"{_GIT}(?:config(?: -\S+)*+ (?:\0{_CODE_KEY}(?: |$)|\0?{_CODE_KEY} \0)|bisect run \0)",
    ),
    ("git", rf"{_GIT}(?:rebase{_ANY}-x |submodule{_ANY}foreach (?:-\S+ )*+)\0"),
    ("git", rf"{_ANY}--(?:exec|upload-pack|receive-pack)[= ]\0"),
    ("ssh|scp|sftp", rf"{_ANY}(?:(?:-\w*o |-[^ o\0]*o)(?:{_CODE_KEY}=)?|-S )\0"),
    ("rsync", rf"{_ANY}(?:-\w*e |--(?:rsh|rsync-path)[= ])\0"),
    (
        "g?tar",
        rf"{_ANY}(?:-\w*[IF] |--(?:checkpoint-action|to-command|use-compress-program|info-script)[= ])\0",
    ),
    ("zip", rf"{_ANY}(?:-TT |--unzip-command[= ])\0"),
    ("env", rf"{_ANY}(?:-\w*S ?|--split-string[= ])\0"),
    ("flock|script|nix-shell|npx", rf"{_ANY}(?:-\w*c|--command|--run|--call)[= ]\0"),
    ("g?make", r"(?: .*?)? (?:\0[^ =$]*[=$]|[^ =]+=[^ \0]*\0[^ $]*\$|--eval[= ]\0)"),
)
"""Programs, and what follows their name where an argument of the tool becomes code; `\\0` stands before the argument."""

_PACKAGE_RULES: Final = (
    (
        r"pip[\d.]*|pipx|uv|poetry|pdm|npm|pnpm|yarn|bun|cargo|go|gem|brew|conda|mamba|apt|apt-get|dnf|yum|apk",
        r"(?: (?:pip|tool|global)| -\S+)*+ (?:install|add|i|get|exec|dlx|x|(?<=pipx )run) (?:.*? )?\0",
    ),
    ("npx|pnpx|bunx|uvx", r"(?: (?!-p |--package)-\S+)*+ (?:-p |--package[= ])?\0"),
    (
        "docker|podman|nerdctl",
        r"(?: -\S+)*+ run(?: (?:-[veupw]|--(?:name|network|volume|env|mount|user|publish)) \S+| -\S+)*+ \0",
    ),
)
"""The same where an argument names a package or an image that is run."""

_DATABASE_PROGRAMS: Final = (
    "psql|mysql(?:sh|admin)?|mariadb|sqlite3?|mongo(?:sh)?|(?:redis|valkey)-cli|cqlsh|sqlcmd|sqlplus|duckdb|clickhouse-client"
    "|drop(?:db|user)|pg_restore"
)
_DESTROYERS: Final = (
    (
        r"rm|rmdir|shred|unlink|dd|mkfs(?:\.\S*)?|truncate|wipefs|blkdiscard|[cs]?fdisk|parted|mkswap",
        "",
    ),
    ("user(?:del|mod)|groupdel|[lvp][vg]remove|shutdown|reboot|halt|poweroff|pkill|killall", ""),
    ("crontab", r"(?!.* -l(?: |$)) ()"),
    ("docker|podman|docker-compose", rf"(?>{_ANY}(down)(?= )){_ANY}(-v|--volumes)(?= |$)"),
)
_HARM_WORDS: Final = (
    ("find", "-delete"),
    ("rsync", r"--del\S*|--remove-source-files"),
    ("g?tar", "--remove-files"),
    ("terraform|tofu|terragrunt|pulumi|cdk|vagrant|zfs|zpool", "destroy|apply|up"),
    ("kubectl|oc|helm", "delete|drain|uninstall"),
    ("aws|gsutil|s3cmd|rclone", r"rm|rb|--delete|del|purge|(?:delete|terminate|remove)(?:-\S+)?"),
    ("gcloud|az|gh|glab|doctl|fly|flyctl|heroku", r"delete|destroy|purge|\S+:destroy"),
    ("systemctl|service|launchctl|initctl", "stop|disable|mask|kill|unload|poweroff|reboot|halt"),
    ("docker|podman|nerdctl", "rm|rmi|prune|kill"),
    (
        "ip6?tables|nft|ufw|firewall-cmd",
        r"-[FXD]|--(?:flush|delete\S*|remove\S*)|flush|delete|reset|disable",
    ),
    ("apt|apt-get|dnf|yum|zypper|apk|brew|pacman", r"remove|purge|autoremove|erase|del|-R\w*"),
    ("npm|pnpm|yarn", "unpublish"),
)
"""Programs, and words with which they delete or stop something."""

_HARMS: Final = tuple(
    (programs, re.compile(rf"({programs})(?= |$){rest}", re.DOTALL), f"{reason} {{!r}}")
    for reason, rules in (
        ("it runs whatever text it is given with", _CODE_RULES),
        ("it runs whatever package it is given with", _PACKAGE_RULES),
        ("it acts as somebody else, with", [("sudo|doas|su|pkexec|runuser|gosu|run0", "")]),
        ("it works on a database, with", [(_DATABASE_PROGRAMS, "")]),
        (
            "it changes permissions recursively, with",
            [(r"ch(?:mod|own|grp|attr)|setfacl", rf"{_ANY}(?:-[^ R]*R|--recursive(?= |$))")],
        ),
        (
            "it discards work, with",
            [
                ("git", rf"{_GIT}({verb}){_ANY}({words})(?= |$)")
                for verb, words in _GIT_LOSSES.items()
            ],
        ),
        (
            "it uses",
            [
                *_DESTROYERS,
                *((programs, rf"{_ANY}({words})(?= |$)") for programs, words in _HARM_WORDS),
            ],
        ),
    )
    for programs, rest in rules
)
"""What may do harm: programs, a pattern of the text that `_started_commands` makes of a command, and the reason."""

_MAX_STARTS: Final = 20
"""Most programs among the words of a command that are judged; one with more counts as dangerous."""

_LAUNCHER_PATTERNS: Final = [
    _LAUNCHERS.pattern,
    *(programs.pattern for programs, _, _ in _VERB_LAUNCHERS),
]
_KNOWN_PROGRAM: Final = re.compile(
    "|".join({programs: "" for programs, _, _ in _HARMS} | dict.fromkeys(_LAUNCHER_PATTERNS))
)
_SHELL_TEXT: Final = re.compile(
    r"(?:ssh|watch|parallel|flock|script|nix-shell|eval|trap|npx|tmux|screen|hyperfine|nodemon|vagrant|adb) "
    r"|git (?:submodule|bisect|rebase) |npm exec |cargo watch "
)
"""Programs that give a quoted word to a shell."""


_FETCH_PROGRAMS: Final = re.compile(r"curl|wget|fetch|nc|ncat|ssh")
_PRINT_PROGRAMS: Final = re.compile(r"echo|printf")
_PIPE_OPERATOR: Final = re.compile(r"(?:.*[^|])?\|[&(\n]*", re.DOTALL)
_QUOTED_WORD: Final = re.compile(r"""(["'])(.*)\1""", re.DOTALL)
_SUBSTITUTION_PREFIXES: Final = ("<", "$")
"""Ends of a word before a substitution: `<(…)`, `$(…)`."""

_SUBSTITUTION: Final = re.compile(r"\$\((.*)\)|`(.*)`", re.DOTALL)
_INNERMOST_SUBSTITUTION: Final = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_KINDS_WITH_SUBSTITUTIONS: Final = frozenset(
    {"backquotes", "quotes", "expansion", "arithmetic", "document"}
)
_COMMAND_SUBSTITUTION: Final = re.compile(r"\s*(?:\$\((.*)\)|`(.*)`)\s*", re.DOTALL)


def use_danger(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> str:
    """Return why a person must agree to a use of a tool; "" if nobody must, because it states that or looks harmless."""
    if tool.dangerous or "dangerous" in tool.model_fields_set:
        return "it is declared dangerous" if tool.dangerous else ""
    return danger_reason(tool, arguments)


def filled_danger(
    tool: ToolSpec, declared: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]
) -> str:
    """Return why values in the place of references make a use dangerous; "" if they do not."""
    return (
        "" if arguments == declared or use_danger(tool, declared) else use_danger(tool, arguments)
    )


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
    template = mark_holes(tool.command)
    substitutions = template.count("$(") + template.count("`")
    if len(template) > _MAX_COMMAND_CHARS or substitutions > _MAX_COMMANDS:
        return "its command is too long to be judged"
    filled = MARKED_HOLE.sub(lambda hole: _given_words(hole[0], arguments.get(hole[1])), template)
    kinds, numbers = tool.parameters, ("integer", "number")
    unfilled = MARKED_HOLE.sub(
        lambda hole: "0" if kinds.get(hole[1]) in numbers else hole[0], template
    )
    return _first_danger(unfilled) or (_first_danger(filled) if arguments else "")


@lru_cache(maxsize=64)  # a tool is judged for each of its uses
def _first_danger(command: str) -> str:
    """Return why a command with marked holes may do harm; "" if it looks harmless."""
    if len(_simple_commands(command)) > _MAX_COMMANDS:
        return "its command is too long to be judged"
    return next(_danger_reasons(command), "")


def _given_words(hole: str, value: JsonValue) -> str:
    """Return a value as words of the shell, each after the hole that it fills, and not longer than names are."""
    if value is None or isinstance(value, bool | int | float):
        return hole if value is None else str(value)
    items = value if isinstance(value, list) else [value]
    return " ".join(
        hole + shlex.quote(str(item)[:_MAX_PROGRAM_CHARS].replace(HOLE_DELIMITER, ""))
        for item in items
    )


def _danger_reasons(command: str) -> Iterator[str]:
    """Yield why a command with marked holes may do harm."""
    if found := _CODE_VARIABLE.search(command):
        yield f"it runs whatever {found[0].partition('=')[0].strip()!r} is set to"
    last: list[str] = []
    scripts: list[str] = []
    printed = ""  # into a pipe
    compares = False  # between `[[` and `]]`
    for before, words in _simple_commands(command):
        printed = printed if _PIPE_OPERATOR.fullmatch(before) else ""
        runner, code = _interpreted_program(words) or ("", None)
        if printed and code == _STDIN and _SHELL_NAME.fullmatch(runner):
            scripts.append(printed)
            printed = ""
        elif _PRINT_PROGRAMS.fullmatch(_program_name(words[0])) or words[:2] == ["cat", "<"]:
            shown = (
                _QUOTED_WORD.fullmatch(word) or word for word in words[1 + (words[1:2] == ["<"]) :]
            )
            printed = " ".join(word if isinstance(word, str) else word[2] for word in shown)
        program = (_strip_launchers(words) if _WRAPPERS.fullmatch(words[0]) else words) or words
        compares = words[0] == "[[" or compares
        if HOLE_DELIMITER in words[0] or (
            _UNKNOWN_PROGRAM.fullmatch(program[0])
            and not compares
            and not before.endswith(("=(", "(("))
        ):
            yield "it runs whatever program it is told to"
        if any(
            _UNKNOWN_PROGRAM.fullmatch(word)
            for option, word in pairwise(words)
            if _FIND_ACTION.fullmatch(option)
        ):
            yield "it runs whatever program it is told to"
        compares = compares and "]]" not in words
        is_program = last == ["$"] and before[:1] == "("  # as in `$(which rm)`
        last = words
        if is_program or re.match("-[^vV]", words[0]):
            words = ["env", *words]  # noqa: PLW2901 - or `nice`, or another prefix
        starts = _started_commands(words)
        if len(starts) > _MAX_STARTS:
            yield "its command is too long to be judged"
        for text in filter(_KNOWN_PROGRAM.match, starts.values()):
            for _, pattern, reason in _HARMS:
                if found := pattern.match(text):
                    parts = [part.replace(HOLE_DELIMITER, "") for part in found.groups() if part]
                    yield reason.format(" ".join(filter(None, parts)))
        scripts += _inline_scripts(words, starts)
    for kind, text, _ in _tokens(command):
        if kind in _KINDS_WITH_SUBSTITUTIONS and not re.match(r"'|<<-?[ \t]*['\"\\]", text):
            innermost = kind == "document"  # after which the command goes on
            for found in (_INNERMOST_SUBSTITUTION if innermost else _SUBSTITUTION).finditer(text):
                inner = found[1] or found[2] or ""
                if not inner.startswith("("):
                    yield from _danger_reasons(inner)
                else:  # arithmetic
                    scripts += [
                        one or other for one, other in _INNERMOST_SUBSTITUTION.findall(inner)
                    ]
    yield from (
        f"it runs whatever comes from elsewhere, with {runner!r}"
        for runner in _untrusted_code_runners(command)
    )
    for script in scripts:
        yield from _danger_reasons(script)


def _started_commands(words: list[str]) -> dict[int, str]:
    """Return the text of a command, and of each that it may start, by the place of the program among the words.

    A text has one blank between words, no quotes, and the character NUL where an argument of the tool begins.
    """
    plain = [
        re.sub(r"\s", "_", re.sub(r"""['"\\]""", "", MARKED_HOLE.sub(HOLE_DELIMITER, word)))
        for word in words
    ]
    plain = [
        word.removeprefix(HOLE_DELIMITER) if word.startswith(f"{HOLE_DELIMITER}-") else word
        for word in plain
    ]
    starts: dict[int, str] = {}
    expects = anywhere = False
    verb_end = 0
    verb: tuple[re.Pattern[str], bool] | None = None
    for index, word in enumerate(plain):
        name = _program_name(words[index])
        is_next = expects and not _OPTION_OR_ASSIGNMENT.fullmatch(word)
        if not index or is_next or (anywhere and _KNOWN_PROGRAM.fullmatch(name)):
            starts[index] = " ".join([name, *plain[index + 1 :]])
            if len(starts) > _MAX_STARTS:
                break
            # An option before it may have taken it for its value.
            expects = (
                is_next
                and index - 1 > verb_end
                and re.fullmatch("-[^=]*[^=-]", plain[index - 1]) is not None
            )
            anywhere = anywhere or _LAUNCHERS.fullmatch(name) is not None or name == "eval"
            verb = next((row[1:] for row in _VERB_LAUNCHERS if row[0].fullmatch(name)), verb)
        elif verb and verb[0].fullmatch(f"{plain[index - 1]} {word}"):
            expects, anywhere, verb, verb_end = not verb[1], anywhere or verb[1], None, index
    return starts


def _inline_scripts(words: list[str], starts: Mapping[int, str]) -> list[str]:
    """Return the quoted scripts that a command passes to a shell."""
    programs = [_interpreted_program(words[index:]) or ("", "") for index in starts]
    scripts = [program for runner, program in programs if _SHELL_NAME.fullmatch(runner)]
    if words[0] == "alias":
        scripts += [word.partition("=")[2] for word in words[1:]]
    if any(map(_SHELL_TEXT.match, starts.values())):
        scripts += [word for word in words if re.search(r"\s", word)]
    return [
        quoted[2] for word in dict.fromkeys(scripts) if (quoted := _QUOTED_WORD.fullmatch(word))
    ]


def _untrusted_code_runners(command: str) -> Iterator[str]:
    """Yield the interpreters that run code from a pipe, a substitution or a file with downloaded content."""
    comes, waiting, last = False, "", ""
    files: set[str] = set()
    for before, words in _simple_commands(command):
        inside = (
            last if before[:1] == "(" else ""
        )  # the word whose end says what the parenthesis is for
        piped = _PIPE_OPERATOR.fullmatch(before) is not None or inside.endswith(">")
        waiting = waiting if piped or inside.endswith(_SUBSTITUTION_PREFIXES) else ""
        comes = (comes and piped) or _outputs_untrusted_data(words)
        runner, program = _interpreted_program(words) or ("", None)
        if comes and waiting:
            yield waiting
        if (comes and program == _STDIN) or (
            program and (program in files or _is_untrusted_substitution(program))
        ):
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
    return fetches or (
        _PRINT_PROGRAMS.fullmatch(name) is not None
        and any(HOLE_DELIMITER in word for word in words)
    )


def _is_untrusted_substitution(program: str) -> bool:
    """Return whether a word is a substitution with output from the network or an argument."""
    quoted = _QUOTED_WORD.fullmatch(program)
    put_out = _COMMAND_SUBSTITUTION.fullmatch(quoted[2] if quoted else program)
    if put_out is None:
        return False
    return any(
        _outputs_untrusted_data(words) for _, words in _simple_commands(put_out[1] or put_out[2])
    )

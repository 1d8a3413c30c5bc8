"""Takes secrets out of text where it enters, before live plan and journal alike.

A rule is tried only where its hint stands, and goes on behind what it matched; what it may read before it fails is
bounded. So the time for a text grows with its length alone, whatever stands in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from operator import is_not
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from replanning._errors import Unstorable
from replanning._plan import JsonValue, Plan

MASK: Final = "[redacted]"

_SHORTEST: Final = 6
"""Shorter values known to be secret are passed over, because they would be found everywhere."""

_MOST_KEPT: Final = 1024
_LONGEST_KEPT: Final = 256
"""How many texts without secrets are kept, and how long: names, goals and reasons come again with every change."""

_LOOK_BACK: Final = 40
"""How much before a hint is looked at."""


class _Rule(NamedTuple):
    """What a secret looks like from its hint on: the last named group that matches is taken out."""

    hint: str
    pattern: re.Pattern[str]
    fits: Callable[[str, int], bool]
    accepts: Callable[[re.Match[str]], bool]


def _after(pattern: str) -> Callable[[str, int], bool]:
    before = re.compile(rf"(?i)(?:{pattern})$")
    return lambda text, at: before.search(text, max(0, at - _LOOK_BACK), at) is not None


def _not_after(pattern: str) -> Callable[[str, int], bool]:
    fits = _after(pattern)
    return lambda text, at: not fits(text, at)


_anywhere: Final = _after("")


# What is a secret by its shape, wherever it stands

_KINDS: Final = ("sk", "rk", "pk", "whsec")
_KEY: Final = r"(?:(?=[A-Za-z_-]{0,64}\d)[A-Za-z0-9_-]{16,}|(?:[A-Za-z]{1,8}[_-]){0,3}[A-Za-z]{16,}[A-Za-z0-9_-]*)"
"""With a digit, or with more letters in a row than words of a name have."""

_SHAPES: Final = (
    ("-----BEGIN ", r"[A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)"),
    *((f"{kind}-", _KEY) for kind in ("sk", "rk", "pk")),
    *((f"{kind}_", r"(?:live_|test_)?(?:(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{16,}|[A-Za-z]{24,})") for kind in _KINDS),
    *((f"gh{kind}_", "[A-Za-z0-9]{20,}") for kind in "pousr"),
    ("github_pat_", "[A-Za-z0-9_]{20,}"),
    *((f"gl{kind}-", "[A-Za-z0-9_-]{16,}") for kind in ("pat", "ptt", "dt", "rt", "cbt")),
    ("xox", "[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("hooks.slack.com/services/", "[A-Za-z0-9/]{20,}"),
    *((kind, r"[A-Z0-9]{16}\b") for kind in ("AKIA", "ASIA")),
    ("AIza", "[A-Za-z0-9_-]{30,}"),
    ("ya29.", "[A-Za-z0-9_-]{20,}"),
    ("hf_", "[A-Za-z0-9]{20,}"),
    ("npm_", "[A-Za-z0-9]{30,}"),
    ("pypi-", "[A-Za-z0-9_-]{40,}"),
    ("eyJ", r"(?<![_-]eyJ)[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+){0,3}"),
)
"""Beginning and rest of what services hand out."""

# What is a secret by its name

_QUOTE: Final = r"\\{0,4}[\"']"
_WORD: Final = r"[^\s\"'\\&;<>]{0,4096}[^\s\"'\\&;<>,.)\]}]"
_VALUE: Final = rf"(?:{_QUOTE}(?P<quoted>[^\"'\\\r\n]{{1,4096}})|(?P<plain>{_WORD}))"
_IS: Final = rf"(?:{_QUOTE})?(?:(?P<prose>:[ \t]{{1,8}})|[ \t]{{0,8}}(?:=>|:=|[:=])[ \t]{{0,8}}|>)"

_REFERENCE: Final = re.compile(
    r"\$?\{[^{}]*\}?|\$[a-z_]\w*|\$\(.*|`.*|\[redacted\]?|[*x.…]+|%\(?\w+\)?s?", re.IGNORECASE
)
_NUMBER: Final = re.compile(r"[\d.,:%/ -]{1,12}")
_NO_SECRETS: Final = frozenset(
    {"none", "null", "true", "false", "required", "missing", "invalid", "incorrect", "wrong", "expired", "empty"}
)
_ORDINARY: Final = 16
"""In prose, fewer letters than this and nothing but letters are a word."""


def _is_secret(value: str) -> bool:
    """Whether what a password is said to be is one."""
    return bool(value) and not _REFERENCE.fullmatch(value) and value.lower() not in _NO_SECRETS


def _is_likely(value: str) -> bool:
    """Whether what a key or token is said to be is one: many things are called a token."""
    return len(value) >= 4 and not _NUMBER.fullmatch(value) and _is_secret(value)


def _is_word(value: str) -> bool:
    return value.isalpha() and len(value) < _ORDINARY


def _is_mixed(value: str) -> bool:
    return _is_likely(value) and not _is_word(value)


_CURSORS: Final = "(?:page|cursor|continuation|next|sync|stop|eos|bos|pad|sep|unk|mask|cls)[_-]?"
_KEYS: Final = "(?:api|access|secret|private|encryption|signing)[ _-]?"

_NAMES: Final = (
    ("passw", "passw(?:or)?d", _anywhere, _is_secret),
    ("passphrase", "passphrase", _anywhere, _is_secret),
    ("pass", "pass", _after("[_-]"), _is_likely),
    ("pwd", "pwd", _after("[_-]"), _is_likely),
    ("secret", "secret(?:[_-]?(?:access[_-]?)?key)?", _anywhere, _is_likely),
    ("key", "key(?:[_-]?id)?", _after(_KEYS), _is_likely),
    ("key", "key", _after("[?&]"), _is_mixed),
    ("token", "token", _not_after(_CURSORS), _is_likely),
    ("credential", "credentials?", _anywhere, _is_likely),
    ("signature", "signature", _anywhere, _is_likely),
    ("sig", "sig", _after("[?&]"), _is_mixed),
    ("code", "code", _after("[?&]"), _is_mixed),
)
"""How secrets are called: where to look, the end of the name, what stands before it, and what the value is like."""

_ONE_WORD: Final = r"(?:basic|bearer|token|apikey|negotiate|ntlm|ssws)[ \t]{1,8}(?P<word>[^\s\"'\\,;]{1,4096})"
_WHOLE_LINE: Final = r"(?:digest|oauth|hmac|aws4-hmac-sha256)[ \t](?P<line>[^\r\n]{1,4096})"
_HEADER: Final = rf"(?:{_QUOTE})?[ \t]{{0,8}}[:=][ \t]{{0,8}}(?:{_QUOTE})?"

_LEADS: Final = (
    ("authorization", rf"authorization{_HEADER}(?:{_ONE_WORD}|{_WHOLE_LINE}|(?P<bare>[^\s\"'\\,;]{{8,4096}}))"),
    ("cookie", rf"cookie{_HEADER}(?P<line>[^=\"'\\\r\n]{{1,256}}=[^\"'\\\r\n]{{1,4096}})"),
    ("bearer", r"bearer[ \t]{1,8}(?P<bare>[A-Za-z0-9._~+/-]{8,4096}={0,2})"),
    ("://", r"://[^\s/:@\"'<>\\]{0,256}:(?P<word>[^\s/\"'<>\\]{1,512})@"),
    ("-u", r"-u(?:ser)?[ =][^\s:\"']{1,256}:(?P<word>[^\s\"']{1,512})"),
)
"""What stands before secrets that have no name of their own: headers, logins in addresses and options."""


def _leads_to_secret(match: re.Match[str]) -> bool:
    value = match[str(match.lastgroup)]
    if match.lastgroup == "bare":  # it may be a word of a sentence
        return any(c.isdigit() for c in value) or len(value) >= 2 * _ORDINARY
    return not _REFERENCE.fullmatch(value) and not value.isdigit()


def _named(accepts: Callable[[str], bool]) -> Callable[[re.Match[str]], bool]:
    def named(match: re.Match[str]) -> bool:
        value = match[str(match.lastgroup)]
        in_prose = match.lastgroup == "plain" and match.groupdict().get("prose") is not None
        return accepts(value) and not (in_prose and accepts is _is_likely and _is_word(value))

    return named


def _rules() -> Iterator[tuple[str, tuple[_Rule, ...]]]:
    """What is looked for in small letters: hints with their rules."""
    for hint, name, fits, accepts in _NAMES:
        assigned = re.compile(rf"(?i){name}{_IS}{_VALUE}")
        option = re.compile(rf"(?i){name}[ \t]{{1,4}}(?![-:=]){_VALUE}")
        after_dashes = _Rule(hint, option, _after("--[A-Za-z0-9-]*"), _named(accepts))
        yield hint, (_Rule(hint, assigned, fits, _named(accepts)), after_dashes)
    login = _after(r"(?:^|[\s\"'=(\[,])-?(?:-proxy)?")
    for hint, pattern in _LEADS:
        fits = login if hint == "-u" else _anywhere
        yield hint, (_Rule(hint, re.compile(f"(?i){pattern}"), fits, _leads_to_secret),)


def _exactly(hint: str, rest: str, fits: Callable[[str, int], bool]) -> _Rule:
    return _Rule(hint, re.compile(rf"(?P<secret>{re.escape(hint)}{rest})", re.DOTALL), fits, lambda match: True)


_BY_SHAPE: Final = tuple(_exactly(hint, rest, _not_after("[A-Za-z0-9]")) for hint, rest in _SHAPES)
_BY_NAME: Final = tuple(_rules())
_KEY_ENDS: Final = (
    *((re.compile(rf"(?i){name}$"), fits, accepts) for _, name, fits, accepts in _NAMES),
    (re.compile(r"(?i)(?:authorization|cookie)$"), _anywhere, _is_likely),
)


_parser: Final[Any] = import_module("re._parser")  # the only one there is, and it has no public name
_REPEATS: Final = (_parser.MAX_REPEAT, _parser.MIN_REPEAT)
_SHOWN: Final = 8
"""How many places one message names."""

_FEW: Final = 16
"""A part repeated at most so often does not count as a repetition."""

_NAMING: Final = frozenset(
    {"id", "task_id", "depends_on", "before", "order", "run", "tool", "kind", "capability", "source", "when"}
    | {"parameters", "objects", "resources"}
)
"""Fields that name things, or that Python reads, and so stay as they are."""

DocumentT = TypeVar("DocumentT", bound=BaseModel)


class Redactor:
    """Replaces what looks like a secret by a mark.

    Args:
        values: secrets known by value, such as those of configured environment variables; ones shorter than 6
            characters are passed over, because they would be found everywhere.
        patterns: further regular expressions whose matches are secrets.
    """

    def __init__(self, values: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        known = sorted({value for value in values if len(value) >= _SHORTEST})
        exact = (*(_exactly(value, "", _anywhere) for value in known), *_BY_SHAPE)
        self._exact = tuple((rule.hint, rule) for rule in exact)
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._clean: set[str] = set()

    def text(self, text: str) -> str:
        """The text without secrets, and without halves of surrogate pairs, which are no characters."""
        if text in self._clean:
            return text
        if not text.isascii():
            text = _whole_characters(text)
        if len(text) < _SHORTEST:
            return text
        spans = self._spans(text)
        if not spans:
            if len(text) <= _LONGEST_KEPT:
                if len(self._clean) >= _MOST_KEPT:
                    self._clean.clear()
                self._clean.add(text)
            return text
        spans.sort()
        parts, end = [], 0
        for start, stop in spans:
            if start >= end:
                parts += [text[end:start], MASK]
            end = max(end, stop)
        return "".join([*parts, text[end:]])

    def value(self, value: JsonValue) -> JsonValue:
        """A JSON value without secrets, in text and in the members of objects that are called a secret.

        Raises:
            Unstorable: it is nested so deeply that no journal could have it.
        """
        try:
            return self._value(value)
        except RecursionError:
            raise Unstorable("a value is nested too deeply to be kept as JSON") from None

    def document(self, document: DocumentT) -> DocumentT:
        """A plan, or a part of one, without secrets in what it says; the same where it has none.

        Ids and other names stay, because others refer to them, and so do conditions.
        """
        telling, given = _telling(type(document)), document.__pydantic_fields_set__
        if telling.isdisjoint(given):
            return document
        changed: dict[str, object] = {}
        for name in telling & given:
            told = getattr(document, name)
            clean = self._part(told)
            if clean is not told:
                changed[name] = clean
        return document.model_copy(update=changed) if changed else document

    def _part(self, part: Any) -> Any:
        """What a field holds, without secrets; the same object where it has none."""
        if isinstance(part, str):
            clean: object = self.text(part)
        elif not part or isinstance(part, int | float):
            return part
        elif isinstance(part, tuple):
            clean = tuple(map(self._part, part))
            return clean if any(map(is_not, clean, part)) else part
        elif isinstance(part, BaseModel):
            return self.document(part)
        else:
            clean = self.value(dict(part) if isinstance(part, Mapping) else part)
        return part if clean == part else clean

    def _value(self, value: JsonValue) -> JsonValue:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return self._members(value)
        return value

    def _members(self, members: dict[str, JsonValue]) -> dict[str, JsonValue]:
        found: dict[str, JsonValue] = {}
        for key, item in members.items():
            name = clean = self.text(key)
            number = 1
            while name in found:  # what differed in a secret alone
                number += 1
                name = f"{clean} {number}"
            accepts = _called_secret(key)
            found[name] = self._value(item if accepts is None else _hidden(key, item, accepts))
        return found

    def _spans(self, text: str) -> list[tuple[int, int]]:
        low = text.lower()
        if len(low) != len(text):  # a few capitals are two letters when they are small
            low = "".join(c.lower() if c.isascii() else c for c in text)
        found = [span for hint, rule in self._exact if hint in text for span in _found(text, text, rule)]
        for hint, rules in _BY_NAME:
            if hint in low:
                found += [span for rule in rules for span in _found(text, low, rule)]
        for pattern in self._patterns:
            found += [match.span() for match in pattern.finditer(text) if match[0]]
        return found


@cache
def _telling(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of a kind of document that may hold text which is no name."""
    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if name not in _NAMING and not _wordless(field.annotation))


def _wordless(annotation: object) -> bool:
    """Whether nothing but numbers and truth values are of this type."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return all(map(_wordless, parts))
    return _wordless(parts[0]) if origin is Annotated else annotation in (int, float, bool, NoneType)


def taken_out(clean: Plan, plan: Plan) -> str:
    """What no tool will get because it was a secret, in words; empty where that is nothing."""
    tools = [f"tool {new.name!r}" for new, old in zip(clean.tools, plan.tools, strict=True) if new is not old]
    servers = [f"MCP server {name!r}" for name, server in clean.mcp.items() if server != plan.mcp.get(name)]
    changed = [new for new, old in zip(clean.tasks, plan.tasks, strict=True) if new.arguments is not old.arguments]
    places = servers + tools + [f"the arguments of task {task.id!r}" for task in changed]
    if not places:
        return ""
    where = ", ".join(places[:_SHOWN]) + (", …" if len(places) > _SHOWN else "")
    return (
        f"what looks like a secret was taken out of {where}, and will be missing there; "
        "let a tool refer to it instead, as {env:NAME}"
    )


def problem_with(pattern: str) -> str:
    """Why a regular expression cannot be used to find secrets; empty where it can.

    It would be tried at every place of every text: one that repeats a repetition can take forever, and is refused.
    """
    try:
        parsed = _parser.parse(pattern)
        if _nested(parsed):
            return "repeats a repetition, which can take forever on some texts; write it without one of the two"
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    return ""


def _nested(parts: Any, *, inside: bool = False) -> bool:
    """Whether a repetition of no fixed length stands within a long one, in what Python's parser makes of a pattern."""
    for part in parts:
        if isinstance(part, tuple) and part and part[0] in _REPEATS:
            least, most, repeated = part[1]
            varies = least != most and most > 1
            if (varies and inside) or _nested(repeated, inside=inside or most > _FEW):
                return True
        elif isinstance(part, tuple | list | _parser.SubPattern) and _nested(part, inside=inside):
            return True
    return False


def _found(text: str, searched: str, rule: _Rule) -> Iterator[tuple[int, int]]:
    """What a rule takes out of a text; its hint is looked for in `searched`, which may be in small letters."""
    hint, pattern, fits, accepts = rule
    at = searched.find(hint)
    while at >= 0:
        end = at + len(hint)
        match = pattern.match(text, at) if fits(text, at) else None
        if match is not None:
            end = match.end()
            if accepts(match):
                yield match.span(str(match.lastgroup))
        at = searched.find(hint, end)


@lru_cache(4096)
def _called_secret(key: str) -> Callable[[str], bool] | None:
    """What a value is like that makes it a secret under this name; None for names that mean none."""
    end = key[-64:]
    for name, fits, accepts in _KEY_ENDS:
        match = name.search(end)
        if match is not None and fits(end, match.start()):
            return accepts
    return None


def _hidden(key: str, item: JsonValue, accepts: Callable[[str], bool]) -> JsonValue:
    """What a member that is called a secret holds: the mark, unless it cannot be one."""
    if isinstance(item, list):
        return [_hidden(key, part, accepts) for part in item]
    if isinstance(item, str):
        word = key.lower() == "token" and _is_word(item)  # of a language model
        return MASK if accepts(item) and not word else item
    number = isinstance(item, int) and not isinstance(item, bool)
    return MASK if number and accepts is _is_secret else item


def _whole_characters(text: str) -> str:
    """The text as UTF-8 can express it: what stands for bytes that were no text becomes a replacement mark."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

"""Recognition and masking of secrets in texts, JSON values, and parts of plans and records.

docs/concepts/security.md states the scope. Rules find the secrets in a text: formats of tokens,
values next to names of secrets, headers, logins in addresses; also behind terminal colours and the
escapes of JSON and `repr`. Nothing beyond these rules is promised.

Every rule has a literal hint, and reads a bounded number of characters around it. All hints are
searched for first, at once. So the time is linear in the length of any text, and short if no hint
occurs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from operator import is_
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue

from replanning.errors import RecordNotSerializable

__all__ = [
    "MASK",
    "Redactor",
    "find_known",
    "known_texts",
    "mask",
    "mask_secrets",
    "name_fields",
    "pattern_problem",
    "secret_predicate",
]

MASK: Final = "[redacted]"
"""Replacement of a secret."""

Span = tuple[int, int]

# Secrets with a known format

_NO_WORDS: Final = r"(?=[A-Za-z_-]{0,64}\d|(?:[A-Za-z]{1,8}[_-]){0,3}[A-Za-z]{16,})"
"""Lookahead for text with a digit, or with more consecutive letters than words have."""

_LETTERS_20: Final = "[A-Za-z0-9]{20,}"
_SIGNS_16: Final = f"{_NO_WORDS}[A-Za-z0-9_-]{{16,}}"
_SIGNS_20: Final = f"{_NO_WORDS}[A-Za-z0-9_-]{{20,}}"
_SIGNS_40: Final = f"{_NO_WORDS}[A-Za-z0-9_-]{{40,}}"

# Hint, prefix and rest. A look-behind spans the prefix: it has one dot for each of its characters.
# A new row needs an example in `tests/support/secret_examples.py`.
_TOKENS: Final = (
    (  # private keys
        "----",
        "----",
        (
            r"[- ]BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4}.*?"
            r"(?:----[- ]END [A-Z0-9 ]{0,60}-{0,5}|\Z)"
        ),
    ),
    ("k-", "[srp]k-", f"(?<![A-Za-z0-9]...){_SIGNS_16}"),
    (
        "k_",
        "[srp]k_",
        (
            r"(?<![A-Za-z0-9]...)(?:live_|test_)?"
            r"(?:(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{16,}|[A-Za-z]{24,})"
        ),
    ),
    ("gh", "gh[pousr]_", _LETTERS_20),
    ("whsec_", "whsec_", _LETTERS_20),
    ("hf_", "hf_", _LETTERS_20),
    ("npm_", "npm_", _LETTERS_20),
    ("gl", "gl(?:pat|ptt|dt|rt|cbt)-", _SIGNS_16),
    ("at_", "(?:github_p|dckr_p|dckr_o)at_", _SIGNS_20),
    ("gsk_", "gsk_", _SIGNS_20),
    ("xai-", "xai-", _SIGNS_20),
    ("xapp-", "xapp-", _SIGNS_20),
    ("hv", r"hv[sbr]\.", _SIGNS_20),
    ("ya29.", r"ya29\.", _SIGNS_20),
    ("pypi-", "pypi-", _SIGNS_40),
    ("xox", "xox", "[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("IA", "A[KS]IA", "[A-Z0-9]{16}"),
    ("hooks.slack.com/", r"hooks\.slack\.com/services/", "[A-Za-z0-9/]{20,}"),
    ("/api/webhooks/", "/api/webhooks/", "[0-9]{10,20}/[A-Za-z0-9_-]{30,}"),  # of Discord
    (":AA", ":AA", "(?<=[0-9]{5}:AA)[A-Za-z0-9_-]{32,}"),  # of bots of Telegram
    (
        "eyJ",
        "eyJ",
        r"(?<![A-Za-z0-9_-]...)[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+){0,3}",
    ),
)
"""Hints, prefixes and rest of the tokens of services; also listed in docs/concepts/security.md."""

# Values

_REFERENCE: Final = re.compile(
    r"\{env:[A-Za-z_][A-Za-z0-9_]*\}|\$\{[^{}\r\n]{1,1000}\}"
    r"|\{(?<![A-Za-z0-9]\{)[A-Za-z_][A-Za-z0-9_-]{0,63}\}(?![A-Za-z0-9])"
)
"""References, which are not secrets: `{env:NAME}`, `${task.output}`, and the argument `{name}`.

An argument stands alone, because braces within a word may be part of a password.
"""

_FILLER: Final = "\x7f"
"""Filler for each character of a reference during the search; no secret contains it."""

_PLACEHOLDER: Final = re.compile(
    r"\{[^{}]*\}?|\$[A-Za-z_]\w*|\$\(.*|`.*|<[\w -]*>?|\[redacted\]?|[*x.…]+|%\(?\w+\)?s?",
    re.IGNORECASE,
)
_CODE: Final = re.compile(r"[a-z_]+(?:\.[a-z_]+)+|[a-z_][\w.]*[(\[].*")
"""Expression in a program that is assigned to a name: `settings.token`, or a call `get_token(`."""

_NUMBER: Final = re.compile(r"[\d.,:%/ -]{1,12}")
_NON_SECRET_WORDS: Final = frozenset((
    "none", "null", "true", "false", "required", "missing", "invalid", "incorrect", "wrong",
    "expired", "empty", "undefined", "unknown", "unset", "unrecognized",
    # Types of parameters, as in the description of a tool.
    "any", "string", "integer", "number", "boolean", "object", "array",
))  # fmt: skip
_MAX_WORD_CHARS: Final = 15
"""Maximum number of letters of an ordinary word in prose."""

_WORD: Final = re.compile(r"[^\W\d_]+(?:[/'-][^\W\d_]+)*:?")
_NEXT_WORD: Final = re.compile(r"[ \t]{1,8}[\"']?\w")

_LITERAL: Final = re.compile(rf"[^\s=;,&:\"'\\{_FILLER}]{{8,}}")
"""Word next to a reference that is long enough for a secret."""


def is_secret(value: str) -> bool:
    """Return whether the value of a password is a secret rather than a placeholder."""
    if not value or _PLACEHOLDER.fullmatch(value):
        return False
    return value.lower() not in _NON_SECRET_WORDS


def _is_likely_secret(value: str) -> bool:
    """Return whether the value of a key or token is a secret; these names have other uses, too."""
    return len(value) >= 4 and not _NUMBER.fullmatch(value) and is_secret(value)


def _is_plain_word(value: str) -> bool:
    """Return whether a value has only letters and is too short for a secret."""
    return value.strip().isalpha() and len(value) <= _MAX_WORD_CHARS


def _is_likely_token(value: str) -> bool:
    return _is_likely_secret(value) and not _is_plain_word(value)


def _is_no_folder(value: str) -> bool:
    return _is_likely_secret(value) and not value.startswith(("/", "~", "."))


# Names of secrets


def _after(texts: Iterable[str], hint: str) -> str:
    """Return a pattern for a hint after one of some texts.

    The hint comes first in the pattern, because `re` searches for a literal quickly.
    """
    return f"{hint}(?:{'|'.join(f'(?<={text}{hint})' for text in texts)})"


def _not_after(texts: Iterable[str], hint: str) -> str:
    return hint + "".join(f"(?<!{text}{hint})" for text in texts)


_KINDS_OF_KEYS: Final = (
    "api", "access", "secret", "private", "encryption", "signing", "account", "master",
    "storage", "subscription",
)  # fmt: skip
_KINDS_OF_OTHER_TOKENS: Final = (
    "page", "cursor", "continuation", "next", "sync", "stop", "eos", "bos", "pad", "sep", "unk",
    "mask", "cls",
)  # fmt: skip
_KEY_NAMES: Final = [f"{kind}{sign}" for kind in _KINDS_OF_KEYS for sign in ("", "[ _-]")]
_OTHER_TOKENS: Final = [f"{kind}{sign}" for kind in _KINDS_OF_OTHER_TOKENS for sign in ("", "[_-]")]

_SECRET_NAMES: Final = (
    ("passw", "passw(?:or)?d", is_secret),
    ("passphrase", "passphrase", is_secret),
    ("pass", _after(["[_-]", "[{,]", "[{,] "], "pass"), _is_likely_secret),
    ("pwd", _after([r"\A", "[_;?&\"'-]", "[_;?&\"'-][ \t]"], "pwd"), _is_no_folder),
    ("secret", "secret(?:[_-]?(?:access[_-]?)?key)?(?:_base)?", _is_likely_secret),
    ("key", _after(_KEY_NAMES, "key") + "(?:[_-]?id)?", _is_likely_secret),
    ("key", _after(["[?&]"], "key"), _is_likely_token),
    ("token", _not_after(_OTHER_TOKENS, "token"), _is_likely_secret),
    ("credential", "credentials?", _is_likely_secret),
    ("signature", "signature", _is_likely_secret),
    ("sig", _after([r"\A", "[?&]"], "sig"), _is_likely_token),
    ("code", _after(["[?&]"], "code"), _is_likely_token),
)
"""Names of secrets, each with its hint, its pattern, and the test for values."""

_NAME_ENDS: Final = (
    (re.compile(r"\Atoken\Z"), _is_likely_token),  # also a word of a language model
    *((re.compile(rf"{name}\Z"), accepts) for _, name, accepts in _SECRET_NAMES),
    (re.compile(r"(?:authorization|cookie)\Z"), _is_likely_secret),
)


@lru_cache(4096)
def secret_predicate(key: str) -> Callable[[str], bool] | None:
    """Return the test for values with the name of a secret; None for other names."""
    end = key.strip()[-64:].lower()
    for name, accepts in _NAME_ENDS:
        if name.search(end):
            return accepts
    return None


# Rules


class _Rule(NamedTuple):
    """Pattern of secrets that begins with a literal hint.

    The last matching named group is the secret. Rules that find a value by the text before it are
    written in lower case.
    """

    hint: str
    pattern: re.Pattern[str]
    accepts: Callable[[re.Match[str]], bool]


_QUOTE: Final = r"\\{0,4}[\"']"
_UNQUOTED: Final = r"[^\s\"'\\&;<>\x1b]{0,4096}[^\s\"'\\&;<>\x1b,.)\]}]"
_VALUE: Final = rf"(?:{_QUOTE}(?P<quoted>[^\"'\\\r\n]{{1,4096}})|(?P<plain>{_UNQUOTED}))"
_ASSIGNMENT: Final = (
    rf"(?:{_QUOTE})?"
    r"(?:(?P<prose>:[ \t]{1,8}|[ \t]{1,8}[:=][ \t]{1,8})|[ \t]{0,8}(?:=>|:=|[:=])[ \t]{0,8}|>)"
)
_SEPARATOR: Final = rf"(?:{_QUOTE})?[ \t]{{0,8}}[:=][ \t]{{0,8}}(?:{_QUOTE})?"
_AUTHORIZATION: Final = (
    rf"authorization{_SEPARATOR}(?:"
    r"(?:basic|bearer|token|apikey|negotiate|ntlm|ssws)[ \t]{1,8}(?P<word>[^\s\"'\\,;]{1,4096})"
    r"|(?:digest|oauth|hmac|aws4-hmac-sha256)[ \t](?P<line>[^\r\n]{1,4096})"
    r"|(?P<bare>[^\s\"'\\,;]{8,4096}))"
)
_LOGIN: Final = (
    r"://(?:(?!\[)[^\s/:@\"'<>\\]{0,256}+:"
    r"(?:(?P<word>[^\s/\"'<>\\]{1,512})|(?!\d{1,5}/)(?P<path>[^\s@\"'<>\\]{1,128}+))(?=@)"
    r"|(?P<bare>[^\s/:@\"'<>\\]{16,256}+))@"
)
_CONTEXTS: Final = (
    ("authorization", _AUTHORIZATION),
    (
        "cookie",
        rf"cookie{_SEPARATOR}(?P<line>[^=\"'\\\r\n]{{1,256}}=[^\"'\\\r\n]{{1,4096}})",
    ),
    ("bearer", r"bearer[ \t]{1,8}(?P<bare>[a-z0-9._~+/-]{8,4096}={0,2})"),
    ("://", _LOGIN),
)
"""Headers, and logins in addresses; a password with a slash ends at the first `@`."""


def _accepts_by_context(match: re.Match[str]) -> bool:
    value = match[str(match.lastgroup)]
    # It may be a word in a sentence.
    if match.lastgroup == "bare":
        return any(map(str.isdigit, value)) or len(value) > 2 * _MAX_WORD_CHARS
    return not _PLACEHOLDER.fullmatch(value) and not value.isdigit()


def _accepts_by_name(accepts: Callable[[str], bool]) -> Callable[[re.Match[str]], bool]:
    def accepts_match(match: re.Match[str]) -> bool:
        group = str(match.lastgroup)
        value = match[group]
        if group == "plain":
            if _CODE.fullmatch(value):
                return False
            is_prose = match["prose"] is not None
        else:
            # As in {"token": " word"} of a model.
            is_prose = value[0] == " "
        if is_prose and accepts is not is_secret and _is_plain_word(value):
            return False
        # A password stands alone, unlike a word in a sentence: `/etc/passwd: No such file`.
        if is_prose and _WORD.fullmatch(value) and _NEXT_WORD.match(match.string, match.end(group)):
            return False
        return accepts(value)

    return accepts_match


def _accepts_option(match: re.Match[str]) -> bool:
    accepts = secret_predicate(match["option"])
    return accepts is not None and accepts(match[str(match.lastgroup)])


def _name_rules() -> Iterator[_Rule]:
    for hint, name, accepts in _SECRET_NAMES:
        pattern = re.compile(f"{name}{_ASSIGNMENT}{_VALUE}")
        yield _Rule(hint, pattern, _accepts_by_name(accepts))
    before = _not_after(["-"], "--")
    option = rf"{before}(?P<option>[a-z0-9_-]{{3,64}}+)[ \t]{{1,4}}(?![-:=]){_VALUE}"
    yield _Rule("--", re.compile(option), _accepts_option)
    for hint, pattern_text in _CONTEXTS:
        yield _Rule(hint, re.compile(pattern_text), _accepts_by_context)


_FORMAT_RULES: Final = [
    (hint, re.compile(prefix + rest, re.DOTALL)) for hint, prefix, rest in _TOKENS
]
_NAME_RULES: Final = tuple(_name_rules())


def _any_of(hints: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, dict.fromkeys(hints))))


_FORMAT_HINT: Final = _any_of(hint for hint, _ in _FORMAT_RULES)
_NAME_HINT: Final = _any_of(rule.hint for rule in _NAME_RULES)

_SIMPLE: Final = re.compile(r"(?:[!-9;<?-[\]-~]{0,14}+[ \n])*+[!-9;<?-[\]-~]{0,14}+")
"""Text of short words in ASCII without `:`, `=`, `>`, escapes and tabs.

No rule finds a secret in it unless it has two consecutive hyphens or `Bearer`. Every token format
is longer than these words, and the name before a value counts only if a sign follows it or hyphens
precede it.
"""


def find_secrets(text: str, *, by_name: bool = True) -> list[Span]:
    """Return the spans of secrets in plain text, in any order; they may overlap.

    Args:
        text: the text.
        by_name: whether values are also found by the name before them, not only by their format.
    """
    spans: list[Span] = []
    # Most texts have no hint, and one search is enough for them.
    if _FORMAT_HINT.search(text):
        for hint, pattern in _FORMAT_RULES:
            if hint in text:
                spans += [match.span() for match in pattern.finditer(text)]
    if not by_name:
        return spans
    low = text.lower()
    # Some characters, such as İ, become two in lower case.
    if len(low) != len(text):
        low = text.encode("ascii", "replace").decode().lower()
    if not _NAME_HINT.search(low):
        return spans
    if "{" in low:
        low = fill_references(low)
    for rule in _NAME_RULES:
        if rule.hint not in low:
            continue
        for match in rule.pattern.finditer(low):
            start, end = match.span(str(match.lastgroup))
            if low.find(_FILLER, start, end) >= 0:
                spans += find_literals(low, start, end)
            elif rule.accepts(match):
                spans.append((start, end))
    return spans


def fill_references(text: str) -> str:
    """Return a text with a filler for each character of a reference."""
    return _REFERENCE.sub(lambda reference: _FILLER * len(reference[0]), text)


def find_literals(filled: str, start: int, end: int) -> list[Span]:
    """Return the words next to references that may be secrets: long ones with a digit."""
    words = _LITERAL.finditer(filled, start, end)
    return [word.span() for word in words if any(map(str.isdigit, word[0]))]


# Masking of texts

_MAX_LAYERS: Final = 3
"""Maximum number of nested layers of escapes, such as a coloured line in JSON in JSON."""

MIN_KNOWN_CHARS: Final = 4
"""Minimum length of a known value; shorter ones are flags and would match everywhere."""

_MIN_LINE_CHARS: Final = 8
"""Minimum length of a masked line of a known secret; shorter ones, such as `}`, are common."""

_ESCAPE: Final = re.compile(
    r"""
    (
        \x1b (?: \[[0-?]*[ -/]*[@-~] | \][^\x07\x1b]*(?:\x07|\x1b\\)? | [ -/]*[0-~] )
      | \\ (?: u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2} | u[0-9A-Fa-f]{4}
            | x[0-9A-Fa-f]{2} | ["'/\\bfnrt] )
    )
    """,
    re.VERBOSE,
)
_LETTERS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def mask(text: str, find: Callable[[str], list[Span]]) -> str:
    """Return a text with its secrets masked; the same object if it has none.

    Args:
        text: the text.
        find: returns the spans of secrets in a text without decoding its escapes.
    """
    spans = find(text)
    if "\x1b" in text or "\\" in text:
        spans += _look_behind(text, find, _MAX_LAYERS)
    if not spans:
        return text
    spans.sort()
    pieces = []
    end = 0
    for start, stop in spans:
        if start >= end:
            pieces += [text[end:start], MASK]
        end = max(end, stop)
    pieces.append(text[end:])
    return "".join(pieces)


def mask_secrets(text: str) -> str:
    """Return a text without secrets that have a known format or a name before them."""
    return mask(text, find_secrets)


def known_texts(values: Iterable[str]) -> tuple[str, ...]:
    """Return the texts to search for: secrets known by value, stripped, and their longer lines."""
    known: set[str] = set()
    for value in values:
        whole = value.strip()
        if len(whole) >= MIN_KNOWN_CHARS:
            known.add(whole)
        for line in whole.splitlines():
            if len(line.strip()) >= _MIN_LINE_CHARS:
                known.add(line.strip())
    return tuple(sorted(known))


def find_known(text: str, known: Iterable[str]) -> list[Span]:
    """Return the spans of known texts."""
    spans = []
    for value in known:
        start = text.find(value)
        while start >= 0:
            end = start + len(value)
            spans.append((start, end))
            start = text.find(value, end)
    return spans


def _look_behind(text: str, find: Callable[[str], list[Span]], layers: int) -> list[Span]:
    """Return the spans of secrets behind the escapes of a text, in at most `layers` layers."""
    # Every second part is an escape.
    parts = _ESCAPE.split(text)
    if len(parts) == 1:
        return []
    decoded = parts.copy()
    decoded[1::2] = [_unescape(escape) for escape in parts[1::2]]
    behind = "".join(decoded)
    hidden = find(behind)
    if layers > 1:
        hidden += _look_behind(behind, find, layers - 1)
    if not hidden:
        return []
    starts = [0, *accumulate(map(len, decoded))]
    origins = [0, *accumulate(map(len, parts))]
    return [_origin(span, starts, origins) for span in hidden]


def _origin(span: Span, starts: list[int], origins: list[int]) -> Span:
    """Return the span of the original text that a decoded span comes from.

    Every second part is an escape, which is masked as a whole.
    """
    first = bisect_right(starts, span[0]) - 1
    last = bisect_right(starts, span[1] - 1) - 1
    start = origins[first]
    if first % 2 == 0:
        start += span[0] - starts[first]
    end = origins[last + 1]
    if last % 2 == 0:
        end = origins[last] + span[1] - starts[last]
    return start, end


def _unescape(escape: str) -> str:
    """Return the text that an escape stands for; "" for colours."""
    if escape[0] == "\x1b":
        return ""
    rest = escape[1:]
    if rest[0] in "ux":
        pair = bytes.fromhex("".join(rest[1:].split("\\u")).zfill(4))
        return pair.decode("utf-16-be", "replace")
    return _LETTERS.get(rest, rest)


# Masking of values and documents

_MAX_REMEMBERED_TEXTS: Final = 200
_MAX_REMEMBERED_CHARS: Final = 4_000

_NAMES: Final = frozenset((
    "id", "task_id", "depends_on", "before", "order", "run", "tool", "kind", "capability",
    "when", "server", "parameters", "optional", "objects", "resources", "callable",
))  # fmt: skip
"""Fields with names and conditions. They are not masked, because other parts refer to them."""

_ASSIGNING_SIGN: Final = re.compile("[=\"'|>`]")
"""Signs of an assignment of a value to a name; no ordinary name contains them."""

_TEXTLESS_TYPES: Final = frozenset({int, float, bool, NoneType})

PartT = TypeVar("PartT")


class Redactor:
    """Replaces secrets by `[redacted]`: known values, values with secret names, and tokens.

    Args:
        values: secrets known by value, such as those of configured environment variables.
        patterns: further regular expressions of Python whose matches are secrets. They are trusted:
            a slow one makes everything wait.
    """

    def __init__(self, values: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        self._known = known_texts(values)
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._added: set[str] = set()
        # Texts without secrets. Records repeat texts of earlier ones, such as a trigger the message
        # of its failure.
        self._clean: set[str] = set()

    def add(self, value: str) -> None:
        """Mask a value from now on, unless it has fewer than 4 characters."""
        if value not in self._added:
            self._added.add(value)
            self._known = tuple({*self._known, *known_texts([value])})
            # Another thread may be about to remember a text that it has not searched for this value.
            self._clean = set()

    def text(self, text: str) -> str:
        """Return the text without secrets or lone surrogates; the same object if it has none."""
        clean = self._clean
        if text in clean:
            return text
        # UTF-8 cannot encode lone surrogates.
        if not text.isascii():
            encodable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if encodable != text:
                text = encodable
        if len(text) < MIN_KNOWN_CHARS:
            return text
        masked = text
        if not self._is_plain(text):
            masked = mask(text, self._find)
        if masked is text and len(text) <= _MAX_REMEMBERED_CHARS:
            if len(clean) >= _MAX_REMEMBERED_TEXTS:
                clean.clear()
            clean.add(text)
        return masked

    def is_secret_name(self, name: str) -> bool:
        """Return whether a name contains a secret with a known format, an assigned or a known one."""
        if self._is_plain(name):
            return False
        by_name = _ASSIGNING_SIGN.search(name) is not None
        return mask(name, lambda text: self._find(text, by_name=by_name)) is not name

    def value(self, value: JsonValue) -> JsonValue:
        """Return a JSON value without the secrets in its texts and in members with secret names.

        Raises:
            RecordNotSerializable: the value is nested too deeply for JSON, or a key is not a text.
        """
        if isinstance(value, str):
            return self.text(value)
        try:
            if isinstance(value, (list, tuple)):
                return [
                    item if type(item) in _TEXTLESS_TYPES else self.value(item) for item in value
                ]
            if not isinstance(value, dict):
                return value
            clean: dict[str, JsonValue] = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise RecordNotSerializable(
                        f"{key!r} cannot name a member of a JSON object; use a text"
                    )
                masked = self.text(key)
                name = masked
                number = 1
                # Several names may differ only in a secret.
                while name in clean:
                    number += 1
                    name = f"{masked} {number}"
                accepts = secret_predicate(key)
                if accepts is not None:
                    clean[name] = self.value(_mask_member(item, accepts))
                elif type(item) in _TEXTLESS_TYPES:
                    clean[name] = item
                else:
                    clean[name] = self.value(item)
        except RecursionError:
            raise RecordNotSerializable("a value is nested too deeply to be kept as JSON") from None
        return clean

    def document(self, document: PartT) -> PartT:
        """Return a part of a plan or of a record without secrets; the same object if it has none.

        Ids, other names and conditions of plans stay, because other parts refer to them.

        Args:
            document: a text, JSON, a model, a dataclass, or a tuple or mapping of them.
        """
        part: Any = document
        kind: Any = type(part)
        clean: Any
        names = _model_fields(kind)
        if names is not None:
            changed: dict[str, Any] = {}
            stated = names & part.__pydantic_fields_set__
            if stated:
                changed = self.changed_fields(part, stated)
            extra: Any = part.__pydantic_extra__
            if extra:
                clean = self.value(extra)
                if clean != extra:
                    changed |= clean
            if not changed:
                return document
            return cast("PartT", part.model_copy(update=changed))
        if kind is str:
            return cast("PartT", self.text(part))
        if isinstance(part, tuple):
            clean = tuple([self.document(item) for item in part])
            if all(map(is_, clean, part)):
                return document
            return cast("PartT", clean)
        names = _init_fields(kind)
        if names:
            changed = self.changed_fields(part, names)
            if not changed:
                return document
            return cast("PartT", replace(part, **changed))
        if isinstance(part, Mapping):
            if _holds_models(part):
                clean = {name: self.document(item) for name, item in part.items()}
            else:
                clean = self.value(dict(part))
        else:
            clean = self.value(part)
        if clean == part:
            return document
        return cast("PartT", clean)

    def changed_fields(self, part: object, names: Iterable[str]) -> dict[str, Any]:
        """Return the fields that hold secrets, with masked values."""
        changed: dict[str, Any] = {}
        for name in names:
            value = getattr(part, name)
            clean: object
            if isinstance(value, str):
                clean = self.text(value)
            elif not value or type(value) in _TEXTLESS_TYPES:
                continue
            else:
                clean = self.document(value)
            if clean is not value:
                changed[name] = clean
        return changed

    def _is_plain(self, text: str) -> bool:
        """Return whether a text is simple and has no known value: a quick check for most texts."""
        if self._patterns or not _SIMPLE.fullmatch(text):
            return False
        if "earer" in text or "--" in text:
            return False
        return not any(known in text for known in self._known)

    def _find(self, text: str, *, by_name: bool = True) -> list[Span]:
        spans = find_secrets(text, by_name=by_name)
        if self._known:
            spans += find_known(text, self._known)
        for pattern in self._patterns:
            spans += [match.span() for match in pattern.finditer(text) if match[0]]
        return spans


def _mask_member(item: JsonValue, accepts: Callable[[str], bool]) -> JsonValue:
    """Return the value of a member with a secret name, masked unless it cannot be a secret."""
    if isinstance(item, (list, tuple)):
        return [_mask_member(part, accepts) for part in item]
    if isinstance(item, str):
        # Literal parts next to references are judged as after `name=`.
        if fill_references(item) != item:
            return mask(item, lambda text: find_literals(fill_references(text), 0, len(text)))
        is_masked = accepts(item)
    else:
        # Only a password may be a number.
        is_number = isinstance(item, int) and not isinstance(item, bool)
        is_masked = is_number and accepts is is_secret
    if is_masked:
        return MASK
    return item


def _holds_models(part: Mapping[str, object]) -> bool:
    for item in part.values():
        kind: Any = type(item)
        if _model_fields(kind) is not None:
            return True
    return False


def name_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields of a model that are names.

    A required `name`, such as that of a tool, is one of them; an optional one is a label for people.
    """
    name = kind.model_fields.get("name")
    if name is not None and name.is_required():
        return _NAMES | {"name"}
    # The parameters of a tool hold types by name; those of a plan hold values.
    if "tasks" in kind.model_fields:
        return _NAMES - {"parameters"}
    return _NAMES


@cache
def _init_fields(kind: type) -> frozenset[str]:
    """Return the fields that the constructor of a dataclass takes; empty for other types."""
    if not is_dataclass(kind):
        return frozenset()
    return frozenset(field.name for field in fields(kind) if field.init)


@cache
def _model_fields(kind: type) -> frozenset[str] | None:
    """Return the fields of a model that may hold text other than names; None for other types."""
    if not issubclass(kind, BaseModel):
        return None
    names = set()
    for name, field in kind.model_fields.items():
        if _may_hold_text(field.annotation):
            names.add(name)
    return frozenset(names) - name_fields(kind)


def _may_hold_text(annotation: object) -> bool:
    """Return whether a type may hold text: it is neither a number nor a union of numbers."""
    if get_origin(annotation) is Annotated:
        return _may_hold_text(get_args(annotation)[0])
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return any(map(_may_hold_text, get_args(annotation)))
    # By identity, because the annotation of a plugin's field may not be hashable.
    return not any(annotation is kind for kind in _TEXTLESS_TYPES)


def pattern_problem(pattern: str) -> str:
    """Return why a regular expression cannot be used to find secrets; "" if it can."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression: {error}"
    return ""

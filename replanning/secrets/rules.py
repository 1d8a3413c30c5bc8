"""Rules for secrets in plain text: formats of tokens, values beside names of secrets, headers, logins in addresses.

Every rule has a literal hint, which is looked for first, and reads a bounded number of characters around it. So the time
is linear in the length of any text, and short where no hint occurs. Nothing beyond these rules is promised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

Span = tuple[int, int]

# Secrets with a format of their own

_NO_WORDS: Final = r"(?=[A-Za-z_-]{0,64}\d|(?:[A-Za-z]{1,8}[_-]){0,3}[A-Za-z]{16,})"
"""Condition on what follows: with a digit, or with more consecutive letters than words have."""

_LETTERS_20: Final = "[A-Za-z0-9]{20,}"
_SIGNS_16: Final = f"{_NO_WORDS}[A-Za-z0-9_-]{{16,}}"
_SIGNS_20: Final = f"{_NO_WORDS}[A-Za-z0-9_-]{{20,}}"
_SIGNS_40: Final = f"{_NO_WORDS}[A-Za-z0-9_-]{{40,}}"

# Hint, prefix and rest. A look-behind spans the prefix: it has one dot for each of its characters. A
# new row needs an example in `tests/support/secret_examples.py`.
_TOKENS: Final = (
    (  # private keys
        "----",
        "----",
        r"[- ]BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4}.*?(?:----[- ]END [A-Z0-9 ]{0,60}-{0,5}|\Z)",
    ),
    ("k-", "[srp]k-", f"(?<![A-Za-z0-9]...){_SIGNS_16}"),
    (
        "k_",
        "[srp]k_",
        r"(?<![A-Za-z0-9]...)(?:live_|test_)?(?:(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{16,}|[A-Za-z]{24,})",
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
"""References to values, which are no secrets: `{env:NAME}`, `${task.output}`, and the argument `{name}` of a tool.

An argument stands alone, because braces within a word may be part of a password.
"""

_FILLER: Final = "\x7f"
"""Stands for each character of a reference while secrets are looked for: a character that no secret has."""

_PLACEHOLDER: Final = re.compile(
    r"\{[^{}]*\}?|\$[A-Za-z_]\w*|\$\(.*|`.*|<[\w -]*>?|\[redacted\]?|[*x.…]+|%\(?\w+\)?s?",
    re.IGNORECASE,
)
_CODE: Final = re.compile(r"[a-z_]+(?:\.[a-z_]+)+|[a-z_][\w.]*[(\[].*")
"""An expression of a program that is assigned to a name: `settings.token` or a call, as `get_token(`."""

_NUMBER: Final = re.compile(r"[\d.,:%/ -]{1,12}")
_NON_SECRET_WORDS: Final = frozenset((
    "none", "null", "true", "false", "required", "missing", "invalid", "incorrect", "wrong",
    "expired", "empty", "undefined", "unknown", "unset", "unrecognized",
    # Types of parameters, as in the description of a tool.
    "any", "string", "integer", "number", "boolean", "object", "array",
))  # fmt: skip
_MAX_WORD_CHARS: Final = 15
"""Letters up to which a word in prose is taken for a word."""

_WORD: Final = re.compile(r"[^\W\d_]+(?:[/'-][^\W\d_]+)*:?")
_NEXT_WORD: Final = re.compile(r"[ \t]{1,8}[\"']?\w")

_LITERAL: Final = re.compile(rf"[^\s=;,&:\"'\\{_FILLER}]{{8,}}")
"""A word beside a reference, long enough for a secret."""


def is_secret(value: str) -> bool:
    """Return whether the value of a password is a secret, and no placeholder."""
    if not value or _PLACEHOLDER.fullmatch(value):
        return False
    return value.lower() not in _NON_SECRET_WORDS


def _is_likely_secret(value: str) -> bool:
    """Return whether the value of a key or token is a secret: many other things are called a token."""
    return len(value) >= 4 and not _NUMBER.fullmatch(value) and is_secret(value)


def _is_plain_word(value: str) -> bool:
    """Return whether a value has only letters, perhaps after a blank, and is too short for a secret."""
    return value.strip().isalpha() and len(value) <= _MAX_WORD_CHARS


def _is_likely_token(value: str) -> bool:
    return _is_likely_secret(value) and not _is_plain_word(value)


def _is_no_folder(value: str) -> bool:
    return _is_likely_secret(value) and not value.startswith(("/", "~", "."))


# Names of secrets


def _after(texts: Iterable[str], hint: str) -> str:
    """Return a pattern for a hint behind one of some texts; the hint comes first, because `re` looks for it quickly."""
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
"""Names of secrets: hint, name, and test of the value."""

_NAME_ENDS: Final = (
    (re.compile(r"\Atoken\Z"), _is_likely_token),  # also a word of a language model
    *((re.compile(rf"{name}\Z"), accepts) for _, name, accepts in _SECRET_NAMES),
    (re.compile(r"(?:authorization|cookie)\Z"), _is_likely_secret),
)


@lru_cache(4096)
def secret_predicate(key: str) -> Callable[[str], bool] | None:
    """Return the test for values under a name of secrets; None for other names."""
    end = key.strip()[-64:].lower()
    for name, accepts in _NAME_ENDS:
        if name.search(end):
            return accepts
    return None


# Rules


class _Rule(NamedTuple):
    """Pattern of secrets that begins with a literal hint; the last named group that matches is the secret.

    A rule that finds a value by what stands before it is written for text in lower case.
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
"""Headers, and names and passwords before the host of an address; a password with a slash ends at the first `@`."""


def _accepts_by_context(match: re.Match[str]) -> bool:
    value = match[str(match.lastgroup)]
    if match.lastgroup == "bare":  # it may be a word of a sentence
        return any(c.isdigit() for c in value) or len(value) > 2 * _MAX_WORD_CHARS
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
            is_prose = value[0] == " "  # as in {"token": " word"} of a model
        if is_prose and accepts is not is_secret and _is_plain_word(value):
            return False
        if is_prose and _WORD.fullmatch(value) and _NEXT_WORD.match(match.string, match.end(group)):
            return False  # a sentence, as in `/etc/passwd: No such file`; a password stands alone
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

_SIMPLE: Final = re.compile(r"(?:\w{1,12}+[.?!,]?+[ \n])*+\w{0,12}+[.?!,]?", re.ASCII)


def is_simple(text: str) -> bool:
    """Return whether a text consists of short words in which no rule can find a secret: a quick look.

    Every token format is longer than these words, or has other characters. A value is found by the name before it only
    where a sign or an option follows the name; a word after `Bearer` must be longer or have a digit.
    """
    return _SIMPLE.fullmatch(text) is not None and "earer" not in text


def find_secrets(text: str, *, by_name: bool = True) -> list[Span]:
    """Return the spans of secrets in plain text, in any order; they may overlap.

    Args:
        text: the text.
        by_name: whether values are found by the name before them as well, not by their own format alone.
    """
    spans = []
    for hint, pattern in _FORMAT_RULES:
        if hint in text:
            spans += [match.span() for match in pattern.finditer(text)]
    if not by_name:
        return spans
    low = text.lower()
    if len(low) != len(text):  # as of İ, which has two characters then
        low = text.encode("ascii", "replace").decode().lower()
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
    """Return a text in which a filler stands for each character of a reference."""
    return _REFERENCE.sub(lambda reference: _FILLER * len(reference[0]), text)


def find_literals(filled: str, start: int, end: int) -> list[Span]:
    """Return the words beside references in the value of a secret that may be secrets: long ones with a digit."""
    words = _LITERAL.finditer(filled, start, end)
    return [word.span() for word in words if any(map(str.isdigit, word[0]))]

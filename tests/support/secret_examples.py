"""Examples of secrets, made from the rules that the package ships, and the ways in which text wraps them."""

from __future__ import annotations

import base64
import json
import random
import re
import string
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module, resources
from typing import Any, NamedTuple
from urllib.parse import quote

import re2

from replanning.plan.redaction import Redactor

_DIALECT = {
    "(?i)": "",
    "(?i:": "(?:",
    "(?-i:": "(?:",
    "(?s:.)": "[ -~]",
    "[[:alnum:]]": "[A-Za-z0-9]",
    r"\z": r"\Z",
}
_CATEGORIES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_SPACE": " ",
    "CATEGORY_WORD": string.ascii_letters + string.digits,
}
_MAX_TRIES = 60


class Example(NamedTuple):
    """A text that a rule of the collection matches, and the secret in it."""

    rule: str
    text: str
    secret: str


def collection() -> dict[str, Any]:
    """The imported rules as they are shipped."""
    return json.loads(
        (resources.files("replanning.plan") / "secret_rules.json").read_text(encoding="utf-8")
    )


@cache
def examples() -> tuple[Example, ...]:
    """An example for each rule, the same ones each time; one with too little entropy for its rule is drawn again."""
    redactor, found = Redactor(), []
    for rule in collection()["rules"]:
        chance, pattern = random.Random(rule["id"]), re2.compile(rule["regex"])
        regex = rule["regex"]
        for name, translated in _DIALECT.items():
            regex = regex.replace(name, translated)
        tree = import_module("re._parser").parse(regex)
        for _ in range(_MAX_TRIES):
            text = _draw(tree, chance)
            if not any(keyword in text.lower() for keyword in rule["keywords"]):
                text = f"{rule['keywords'][0]} {text}"
            match = pattern.search(text)
            if match is not None and redactor.text(text) != text:
                secret = next(
                    (group for group in match.groups()[max(0, rule["group"] - 1) :] if group),
                    match[0],
                )
                found.append(Example(rule["id"], text, secret))
                break
        else:
            raise AssertionError(f"no text that {rule['id']} matches is redacted")
    return tuple(found)


def _draw(tree: Any, chance: random.Random) -> str:
    parts = []
    for operation, argument in tree:
        kind = str(operation)
        if kind == "LITERAL":
            parts.append(chr(argument))
        elif kind in ("IN", "ANY", "NOT_LITERAL"):
            items = argument if kind == "IN" else [("NEGATE", None), ("LITERAL", argument or 10)]
            parts.append(chance.choice(_characters(items)))
        elif kind == "BRANCH":
            parts.append(_draw(chance.choice(argument[1]), chance))
        elif kind == "SUBPATTERN":
            parts.append(_draw(argument[-1], chance))
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, repeated = argument
            parts += [
                _draw(repeated, chance)
                for _ in range(chance.randint(least, min(int(most), least + 3)))
            ]
        else:
            assert kind == "AT", kind
    return "".join(parts)


def _characters(items: Any) -> list[str]:
    found = set()
    for operation, argument in items:
        kind = str(operation)
        if kind == "LITERAL":
            found.add(chr(argument))
        elif kind == "RANGE":
            found |= set(map(chr, range(argument[0], argument[1] + 1)))
        elif kind == "CATEGORY":
            name = str(argument)
            letters = set(_CATEGORIES[name.replace("_NOT", "")])
            found |= set(string.ascii_letters) if "_NOT" in name else letters
    if str(items[0][0]) == "NEGATE":
        found = set(string.printable[:95]) - found
    return sorted(found)


def _escape(text: str) -> str:
    return "".join(
        c if c.isalnum() else json.dumps(c)[1:-1] if c > "~" else rf"\u{ord(c):04x}" for c in text
    )


def _colour(text: str) -> str:
    middle = len(text) // 2
    return f"\x1b[1;31m{text[:middle]}\x1b[0m\x1b[38;5;9m{text[middle:]}\x1b[0m"


WRAPPINGS: Mapping[str, Callable[[str], str]] = {
    "plain": lambda text: f"it says {text} here",
    "on a line": lambda text: f"a line\n{text}\nb line",
    "JSON": lambda text: json.dumps({"line": f"it says\n{text}\n"}),
    "JSON in JSON": lambda text: json.dumps(json.dumps([text])),
    "escaped": _escape,
    "coloured": _colour,
    "coloured in JSON": lambda text: json.dumps(_colour(text)),
    "percent-encoded": lambda text: f"/search?q={quote(text, safe='')}&page=2",
    "HTML": lambda text: "".join(c if c.isalnum() else f"&#{ord(c)};" for c in text),
    "base64": lambda text: base64.b64encode(f"it says {text}\n".encode()).decode(),
    "base64 in lines": lambda text: base64.encodebytes(
        f"{'it says ' * 12}{text}\n".encode()
    ).decode(),
    "glued to a word": lambda text: f"x{text}",
    "glued to a digit": lambda text: f"7{text}",
    "in a file name": lambda text: f"/tmp/{text}.txt",
}
"""Ways in which a text with a secret stands in another one."""

NOT_IN_WORDS = frozenset({"square-access-token", "vault-service-token"})
"""Rules that apply to whole words alone: ordinary words contain what they look for."""


def tells(clean: str, secret: str) -> bool:
    """Whether a redacted text still tells a secret, in any of the wrappings."""
    bare = re.sub(r"\x1b\[[0-9;]*m|\\+u001b\[[0-9;]*m", "", clean)
    inner = json.dumps(secret)[1:-1]
    forms = (
        secret,
        inner,
        json.dumps(inner)[1:-1],
        _escape(secret),
        quote(secret, safe=""),
        WRAPPINGS["HTML"](secret),
    )
    words = (
        word[: len(word) // 4 * 4]
        for word in re.findall(r"[A-Za-z0-9+/]{20,}", "".join(clean.split()))
    )
    return any(form in bare for form in forms) or any(
        secret.encode() in base64.b64decode(word) for word in words
    )

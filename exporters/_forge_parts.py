"""What is kept of an issue and its repository, and what the variables of forges hold."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, TypeVar

from replanning.errors import Problem, SettingsError
from replanning.exporters._forge import ForgeError
from replanning.exporters._forge_answers import objects, texts
from replanning.interfaces import JsonObject, JsonValue

Found = TypeVar("Found")

MOST_FILES: Final = 300
_MOST_NAMES: Final = 200
_MORE: Final = "… [cut: there are more]"
_LONGEST_README: Final = 4_000


async def optional(asked: Awaitable[Found]) -> Found | None:
    """What is known of a repository; None where the forge does not give it, which is no reason to do without the rest."""
    try:
        return await asked
    except ForgeError:
        return None


async def listed(asked: Awaitable[list[JsonObject]]) -> list[JsonObject]:
    """The same for a list."""
    return await optional(asked) or []


def logins(names: str | Iterable[str]) -> frozenset[str]:
    """Accounts by their names, in small letters; also of a text with commas between them."""
    listed = names.split(",") if isinstance(names, str) else names
    return frozenset(name.strip().removeprefix("@").lower() for name in listed if name.strip())


def checked_token(token: str, variable: str) -> str:
    """A token as it is sent.

    Raises:
        SettingsError: no token looks like that.
    """
    token = token.strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        problem = "it has characters that no token has; was it copied whole, and nothing else?"
        raise SettingsError([Problem(variable, problem)])
    return token


def as_object(value: JsonValue) -> JsonObject:
    """An object; an empty one where it is none."""
    return value if isinstance(value, dict) else {}


def file_names(entries: JsonValue) -> list[JsonValue]:
    """The names of files; those of folders end in a slash."""
    folders = ("dir", "tree")
    found = [f"{texts(one, 'name')}{'/' if texts(one, 'type') in folders else ''}" for one in objects(entries)]
    return first_of(found, _MOST_NAMES)


def first_of(entries: Sequence[JsonValue], most: int = MOST_FILES) -> list[JsonValue]:
    """The first entries of a list, which says where it was cut."""
    return [*entries[:most], *([_MORE] if len(entries) > most else [])]


def readme(text: str | None) -> str:
    """The beginning of a file that introduces a project."""
    said = (text or "").strip()
    return said if len(said) <= _LONGEST_README else f"{said[:_LONGEST_README]}… [cut: {len(said)} characters in all]"


def known(about: JsonObject) -> JsonObject:
    """What is known, without what is not."""
    return {name: value for name, value in about.items() if value not in ("", None, [], {})}

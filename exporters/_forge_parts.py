"""What is kept of an issue and its repository, and what the variables of forges hold."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, TypeVar

from replanning.errors import Problem, SettingsError
from replanning.exporters._forge import ForgeError
from replanning.exporters._forge_answers import objects_in, text_at
from replanning.interfaces import JsonObject, JsonValue

T = TypeVar("T")

MAX_FILES: Final = 300
_MAX_FILE_NAMES: Final = 200
_TRUNCATION_NOTE: Final = "… [cut: there are more]"
_MAX_README_CHARS: Final = 4_000


async def result_or_none(asked: Awaitable[T]) -> T | None:
    """What is known of a repository; None where the forge does not give it, which is no reason to do without the rest."""
    try:
        return await asked
    except ForgeError:
        return None


async def list_or_empty(asked: Awaitable[list[JsonObject]]) -> list[JsonObject]:
    """The same for a list."""
    return await result_or_none(asked) or []


def parse_logins(names: str | Iterable[str]) -> frozenset[str]:
    """Accounts by their names, in small letters; also of a text with commas between them."""
    listed = names.split(",") if isinstance(names, str) else names
    return frozenset(name.strip().removeprefix("@").lower() for name in listed if name.strip())


def validated_token(token: str, variable: str) -> str:
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
    found = [f"{text_at(one, 'name')}{'/' if text_at(one, 'type') in folders else ''}" for one in objects_in(entries)]
    return truncated_list(found, _MAX_FILE_NAMES)


def truncated_list(entries: Sequence[JsonValue], most: int = MAX_FILES) -> list[JsonValue]:
    """The first entries of a list, which says where it was cut."""
    return [*entries[:most], *([_TRUNCATION_NOTE] if len(entries) > most else [])]


def readme_excerpt(text: str | None) -> str:
    """The beginning of a file that introduces a project."""
    said = (text or "").strip()
    return (
        said if len(said) <= _MAX_README_CHARS else f"{said[:_MAX_README_CHARS]}… [cut: {len(said)} characters in all]"
    )


def without_empty(about: JsonObject) -> JsonObject:
    """What is known, without what is not."""
    return {name: value for name, value in about.items() if value not in ("", None, [], {})}

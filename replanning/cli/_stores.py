"""Which store is meant by the text of `--store`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from replanning._errors import StoreError
from replanning._plugins import installed_plugins, load_plugin

_BUILTIN_STORES: Final = ("sqlite", "jsonl", "memory")

if TYPE_CHECKING:
    from replanning.interfaces import RunStore


def open_store(place: str, *, must_exist: bool = False) -> RunStore:
    """The store at a place.

    Args:
        place: `memory`; a SQLite file; a folder or a name ending in `.jsonl` for a folder of text files; or
            `PLUGIN:PLACE` for an installed store of that name.
        must_exist: whether to refuse a place where nothing is kept yet, instead of making it.

    Raises:
        StoreError: the place cannot be used, or nothing is kept there.
    """
    name, path = _parse_place(place)
    if name in _BUILTIN_STORES and bool(path) == (name == "memory"):
        expected = "expected a SQLite file, a folder, memory, or PLUGIN:PLACE"
        raise StoreError(f"{place!r} is no place for runs; {expected} (--store says where runs are kept)")
    if must_exist and not _path_may_exist(name, path):
        what = "memory of this process" if name == "memory" else repr(path)
        raise StoreError(f"there are no runs in {what}; run a plan first, or say with --store where they are kept")
    try:
        made: RunStore = load_plugin("stores", name)(*([path] if path else []))
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        raise StoreError(f"{error} (--store says where runs are kept)") from error
    return made


def store_may_exist(place: str) -> bool:
    """Whether runs may be kept at a place already; asking makes no store there.

    Raises:
        StoreError: the place cannot be used.
    """
    return _path_may_exist(*_parse_place(place))


def _path_may_exist(name: str, path: str) -> bool:
    return name not in _BUILTIN_STORES or bool(path and Path(path).exists())


def _parse_place(place: str) -> tuple[str, str]:
    """The name of the store plugin and its place.

    Raises:
        StoreError: it looks like the name of a plugin, and none is installed under it.
    """
    name, colon, rest = place.partition(":")
    if colon and name in installed_plugins("stores"):
        return name, rest
    if len(name) > 1 and name.replace("-", "_").isidentifier() and rest:  # one letter may be a drive
        known = ", ".join(installed_plugins("stores"))
        raise StoreError(f"no store {name!r} is installed; installed are: {known}; for a file write {'./' + place!r}")
    if place == "memory":
        return "memory", ""
    if place.endswith((".jsonl", "/")) or Path(place).is_dir():
        return "jsonl", place
    return "sqlite", place

"""The shop of tau-bench: its tools as their authors wrote them, and its customers' conversations as scripts."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from replanning.plan import JsonObject, JsonValue

FILE = "tau_retail.zip"
SOURCE = "tau-bench, https://github.com/sierra-research/tau-bench at 59a200c, MIT"

READS = frozenset(
    {
        "calculate",
        "find_user_id_by_email",
        "find_user_id_by_name_zip",
        "get_order_details",
        "get_product_details",
        "get_user_details",
        "list_all_product_types",
    }
)
"""Tools that only read, according to their descriptions."""

ERROR = "Error"
"""Beginning of answers in which the shop's tools report that they did nothing."""

MIRROR = "_mirror"
"""End of the name of a second tool that reads the same."""


class _Records(dict[str, Any]):
    """Records of one table, each copied when it is first looked up, so that the published ones stay as they are."""

    def __init__(self, published: Mapping[str, Any]) -> None:
        super().__init__(published)
        self.copied: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self.copied:
            self.copied[key] = copy.deepcopy(super().__getitem__(key))
            self[key] = self.copied[key]
        return self.copied[key]


class Database:
    """The shop's database in one conversation.

    Args:
        tables: the published tables, which are not changed.
        tools: the shop's tools by name.

    Attributes:
        applied: the calls that changed something, in their order.
    """

    def __init__(
        self, tables: Mapping[str, Mapping[str, Any]], tools: Mapping[str, type[Any]]
    ) -> None:
        self._published = tables
        self._tools = tools
        self._tables = {name: _Records(records) for name, records in tables.items()}
        self.applied: list[str] = []

    def call(self, tool: str, arguments: Mapping[str, object]) -> str:
        """Call a tool; a call that it cannot carry out is answered by a text, as by the authors' environment."""
        try:
            answer = str(self._tools[tool].invoke(data=self._tables, **arguments))
        except Exception as error:  # noqa: BLE001 - the tools raise anything where arguments make no sense
            return f"{ERROR}: {error}"
        if tool not in READS and not answer.startswith(ERROR):
            self.applied.append(json.dumps([tool, arguments]))
        return answer

    def record(self, arguments: Mapping[str, object]) -> str:
        """Return the order, or else the user, that arguments name, as it is now; empty without one."""
        if "order_id" in arguments:
            return self.call("get_order_details", {"order_id": arguments["order_id"]})
        if "user_id" in arguments:
            return self.call("get_user_details", {"user_id": arguments["user_id"]})
        return ""

    def digest(self) -> str:
        """Return a hash of the records that differ from the published ones."""
        changed = {
            name: {
                key: record
                for key, record in records.copied.items()
                if record != self._published[name].get(key)
            }
            for name, records in self._tables.items()
        }
        return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Source:
    """Where the agent reads an argument: the number of an earlier step, and the keys to a value in its answer."""

    step: int
    path: tuple[str | int, ...]

    def read(self, answers: list[str]) -> JsonValue:
        """Return the value in the answers that the agent was given.

        Raises:
            LookupError: the answer has no text there.
        """
        value = parsed(answers[self.step])
        for key in self.path:
            if not isinstance(value, (dict, list)):
                raise LookupError(key)
            value = value[key]  # type: ignore[index]  # a key that does not fit is no entry
        if not isinstance(value, str):
            raise LookupError(self.path)
        return value


@dataclass(frozen=True)
class Step:
    """A call of a conversation, and its answer when nothing is disturbed.

    Attributes:
        tool: which tool.
        arguments: those of the reference.
        sources: by argument, and by position if it is a list, where the agent reads it instead.
        answer: the answer.
        changes: whether the call changed the database.
    """

    tool: str
    arguments: JsonObject
    sources: Mapping[tuple[str, int | None], Source]
    answer: str
    changes: bool

    def arguments_from(self, answers: list[str]) -> JsonObject:
        """Return the arguments of an agent that has read these answers.

        Raises:
            LookupError: an answer lacks what the agent looks for.
        """
        arguments: JsonObject = copy.deepcopy(self.arguments)
        for (name, position), source in self.sources.items():
            value = source.read(answers)
            items = arguments[name]
            if position is None:
                arguments[name] = value
            elif isinstance(items, list):
                items[position] = value
        return arguments


@dataclass(frozen=True)
class Conversation:
    """One customer's calls, with the truth about them.

    Attributes:
        number: its place in the published list.
        steps: the calls.
        digest: hash of the database after them.
        applied: the calls that changed something.
    """

    number: int
    steps: tuple[Step, ...]
    digest: str
    applied: tuple[str, ...]


class Shop:
    """The published tools, database and conversations.

    Args:
        path: the file of the data.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with zipfile.ZipFile(path) as archive:
            self._tables: dict[str, dict[str, Any]] = json.loads(archive.read("database.json"))
            self._tasks: list[dict[str, Any]] = json.loads(archive.read("tasks.json"))
        sys.path.insert(0, str(path))
        try:
            module = importlib.import_module("tau_bench.envs.retail.tools")
        finally:
            sys.path.remove(str(path))
        described = [(tool.get_info()["function"], tool) for tool in module.ALL_TOOLS]
        self._tools: dict[str, type[Any]] = {about["name"]: tool for about, tool in described}
        self.descriptions: dict[str, dict[str, Any]] = {
            about["name"]: about for about, _ in described
        }

    def __repr__(self) -> str:
        return f"<Shop of {self._path}>"

    def database(self) -> Database:
        """Return the database as it was published, to be changed by one conversation."""
        return Database(self._tables, self._tools)

    def records(self, table: str) -> list[str]:
        """Return the keys of a table's records."""
        return list(self._tables[table])

    @cached_property
    def conversations(self) -> list[Conversation]:
        """The conversations, as the reference calls go when nothing is disturbed."""
        return [self._conversation(number, task) for number, task in enumerate(self._tasks)]

    def _conversation(self, number: int, task: Mapping[str, Any]) -> Conversation:
        database = self.database()
        steps: list[Step] = []
        answers: list[str] = []
        for action in task["actions"]:
            tool = action["name"]
            arguments = action["kwargs"]
            before = database.digest()
            answer = database.call(tool, arguments)
            changes = database.digest() != before
            steps.append(Step(tool, arguments, _sources(arguments, answers), answer, changes))
            answers.append(answer)
        return Conversation(number, tuple(steps), database.digest(), tuple(database.applied))


def parsed(answer: str) -> JsonValue:
    """Return the object or list that an answer is as JSON, or else its text."""
    if answer[:1] not in ("{", "["):
        return answer
    try:
        value: JsonValue = json.loads(answer)
    except ValueError:
        return answer
    return value


def _sources(arguments: JsonObject, answers: list[str]) -> dict[tuple[str, int | None], Source]:
    """Return where arguments stand in earlier answers, in the latest one that has them."""
    places: dict[str, Source] = {}
    for number in reversed(range(len(answers))):
        for path, text in _texts(parsed(answers[number])):
            if text not in places:
                places[text] = Source(number, path)
    sources: dict[tuple[str, int | None], Source] = {}
    for name, value in arguments.items():
        if isinstance(value, str) and value in places:
            sources[name, None] = places[value]
        if isinstance(value, list):
            for position, item in enumerate(value):
                if isinstance(item, str) and item in places:
                    sources[name, position] = places[item]
    return sources


def _texts(
    value: JsonValue, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the texts of a value, each with the keys that lead to it."""
    if isinstance(value, str) and value:
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _texts(item, (*path, position))

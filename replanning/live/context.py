"""History of the context, by which results that come from earlier values are known to be stale."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from replanning.plan.document import Plan
from replanning.plan.types import JsonObject, JsonValue, TaskId


@dataclass(slots=True, repr=False, eq=False)
class ContextHistory:
    """Changes of the context, as hashes of its values, and the tasks whose work read its keys.

    Attributes:
        version: number of changes so far.
        hashes: by key, the versions in which its value changed, and hashes of the new values.
        readers: by key, the finished tasks whose work read it.
    """

    version: int = 0
    hashes: dict[str, tuple[list[int], list[bytes]]] = field(default_factory=dict)
    readers: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    _claims: list[int] = field(default_factory=list)

    def change(
        self, context: JsonObject, changes: JsonObject, removed: Iterable[str], last_claim: int
    ) -> None:
        """Change the context; a missing key counts as null."""
        self.version += 1
        self._claims.append(last_claim)
        for key in (*changes, *removed):
            # Hashes, not values: earlier values may be large, or secrets.
            if key not in self.hashes:
                self.hashes[key] = ([0], [_value_hash(context.get(key))])
            versions, hashes = self.hashes[key]
            versions.append(self.version)
            hashes.append(_value_hash(changes.get(key)))
        context.update(changes)
        for key in removed:
            context.pop(key, None)

    def changed_since(self, key: str, version: int) -> bool:
        """Return whether the value of a key differs from that at an earlier version."""
        if key not in self.hashes:
            return False
        versions, hashes = self.hashes[key]
        return hashes[bisect_right(versions, version) - 1] != hashes[-1]

    def version_at_claim(self, claim: int) -> int:
        """Return the version of the context at a claim of this process."""
        return bisect_left(self._claims, claim)


def _value_hash(value: JsonValue) -> bytes:
    # Sorted, so that two objects with the same members count as the same value.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


class Staleness:
    """What is known about stale results: values that changed, and tasks that are done again.

    Attributes:
        history: the changes to the context.
        redone: the finished tasks that were replaced because their results were stale.
        redoes: whether the plan, or a task of it, wants tasks with stale results done again.
        recorded: the stale results that were recorded last, with their causes.
    """

    __slots__ = ("history", "recorded", "redoes", "redone")

    def __init__(self, plan: Plan) -> None:
        self.history = ContextHistory()
        self.redone: dict[TaskId, None] = {}
        self.redoes = plan.on_stale == "redo"
        self.recorded: Mapping[TaskId, tuple[str, ...]] = {}

"""The journal of a run, the stores that keep it and the reports drawn from it."""

from replanning.history._jsonl import JsonlStore
from replanning.history._memory import MemoryStore
from replanning.history._owner import is_free, owner_id
from replanning.history._rules import Unstorable
from replanning.history._sqlite import SqliteStore

__all__ = ["JsonlStore", "MemoryStore", "SqliteStore", "Unstorable", "is_free", "owner_id"]

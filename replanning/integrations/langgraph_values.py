"""Stored form of the outputs of LangGraph: JSON, from which messages and commands are restored.

A message is stored as LangChain stores it (`message_to_dict`): its type, its text, and its
structured content. A stored value never names a class: the table of parts is closed.
"""

from __future__ import annotations

from typing import Any, Final

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, messages_from_dict
from langgraph.types import Command, Overwrite, Send
from pydantic_core import to_jsonable_python

from replanning.journal import values

_TAG: Final = "$langgraph"
"""Key of a tagged value; its value is the name of the tag."""

_PARTS: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "command": (Command, ("graph", "update", "resume", "goto")),
    "send": (Send, ("node", "arg", "timeout")),
    "overwrite": (Overwrite, ("value",)),
    "document": (Document, ("id", "metadata", "page_content")),
}
"""By tag, a class and the arguments that recreate an equal object."""

_TAGS: Final = {kind: tag for tag, (kind, _) in _PARTS.items()}


class NotRestorable(ValueError):
    """Only the content of an output was recorded, from which its object cannot be restored."""


def encode(value: Any) -> Any:
    """Return the stored form of an output; objects of other classes are stored by their content."""
    kind = type(value)
    if kind is str:
        return value
    if kind is dict:
        items = {key: encode(item) for key, item in value.items()}
        # A state that looks like a tagged value.
        return _tagged("dict", list(items.items())) if _TAG in items else items
    if kind in (list, tuple):
        return kind(map(encode, value))
    if isinstance(value, BaseMessage):
        message = {"type": value.type, "data": dict(value)}
        if _comes_back(message, value):
            return _tagged("message", encode(message))
        return _content(value)
    tag = _TAGS.get(kind)
    if tag is not None:
        _, names = _PARTS[tag]
        return _tagged(tag, {name: encode(getattr(value, name)) for name in names})
    try:
        values.encode(value, None)
    except values.NotStorable:
        return _content(value)
    return value


def decode(stored: Any) -> Any:
    """Return the output for its stored form.

    Raises:
        NotRestorable: only the content of a part was stored.
        Exception: raised by the framework; the store has something else.
    """
    if isinstance(stored, list | tuple):
        return type(stored)(map(decode, stored))
    if not isinstance(stored, dict):
        return stored
    tag = stored.get(_TAG)
    if tag is None:
        return {key: decode(item) for key, item in stored.items()}
    value = stored.get("value")
    if tag == "dict":
        return dict(decode(value))
    if tag == "message":
        [message] = messages_from_dict([decode(value)])
        return message
    if tag not in _PARTS:
        raise NotRestorable("the journal has only the content of a part of the output")
    kind, _ = _PARTS[tag]
    return kind(**decode(value))


def executed_again(stored: Any) -> Any:
    """Return the stored form of an output that is shown to readers, but not restored."""
    return _tagged("again", stored)


def _comes_back(message: dict[str, Any], value: BaseMessage) -> bool:
    """Return whether LangChain restores an equal message; it cannot for classes of users."""
    try:
        [restored] = messages_from_dict([message])
    except ValueError:
        return False
    return bool(restored == value)


def _content(value: object) -> Any:
    try:
        content = to_jsonable_python(value, fallback=repr)
    except Exception:  # noqa: BLE001 # classes of users may raise anything
        content = repr(value)
    return {**_tagged("content", content), "type": type(value).__name__}


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, "value": value}

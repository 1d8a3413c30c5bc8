"""Answers that come in pieces although nobody asked for that, as some gateways send them: put together again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict

from replanning.interfaces import JsonObject, JsonValue

_DONE_MARKER: Final = "[DONE]"


class _StreamModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class _FunctionDelta(_StreamModel):
    arguments: str | None = None


class _ToolCallDelta(_StreamModel):
    index: int = 0
    function: _FunctionDelta = _FunctionDelta()


class _MessageDelta(_StreamModel):
    content: str | None = None
    refusal: str | None = None
    tool_calls: Sequence[_ToolCallDelta] | None = None


class _ChoiceDelta(_StreamModel):
    index: int = 0
    delta: _MessageDelta = _MessageDelta()
    finish_reason: str | None = None


class _Chunk(_StreamModel):
    model: str | None = None
    choices: Sequence[_ChoiceDelta] = ()
    usage: JsonObject | None = None


class _BlockDelta(_StreamModel):
    text: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class _Event(_StreamModel):
    type: str
    index: int = 0
    message: JsonObject | None = None
    content_block: JsonObject | None = None
    delta: _BlockDelta = _BlockDelta()
    usage: JsonObject | None = None


def sse_events(data: bytes) -> Iterator[JsonValue]:
    """What the events of a stream say.

    Raises:
        ValueError: one of them is no JSON.
    """
    for line in data.decode(errors="replace").split("\n"):
        name, _, value = line.partition(":")
        if name == "data" and value.strip() != _DONE_MARKER:
            yield json.loads(value)


def merge_chat_chunks(events: Iterator[JsonValue]) -> JsonObject:
    """A chat completion of OpenAI from its pieces.

    Raises:
        ValueError: they are of another form, or the end is missing.
    """
    chunks = [_Chunk.model_validate(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    finish = next((choice.finish_reason for choice in reversed(choices) if choice.finish_reason), None)
    if finish is None:
        raise ValueError("the end is missing")
    arguments: dict[int, str] = {}
    for call in (call for choice in choices for call in choice.delta.tool_calls or ()):
        arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    message: JsonObject = {
        "content": "".join(choice.delta.content or "" for choice in choices),
        "refusal": "".join(choice.delta.refusal or "" for choice in choices) or None,
        "tool_calls": [{"function": {"arguments": text}} for _, text in sorted(arguments.items())],
    }
    return {
        "model": next((chunk.model for chunk in chunks if chunk.model), None),
        "choices": [{"message": message, "finish_reason": finish}],
        "usage": next((chunk.usage for chunk in reversed(chunks) if chunk.usage), None),
    }


def merge_message_events(events: Iterator[JsonValue]) -> JsonObject:
    """A message of Anthropic from its pieces; likewise."""
    found = [_Event.model_validate(event) for event in events]
    if not found or found[-1].type != "message_stop":
        raise ValueError("the end is missing")
    message = next((event.message for event in found if event.message), {})
    usage = message.get("usage")
    usage = dict(usage) if isinstance(usage, dict) else {}
    stop: JsonValue = None
    blocks: dict[int, JsonObject] = {}
    deltas: defaultdict[int, list[_BlockDelta]] = defaultdict(list)
    for event in found:
        stop = event.delta.stop_reason or stop
        usage |= {name: value for name, value in (event.usage or {}).items() if value is not None}
        deltas[event.index].append(event.delta)
        if event.content_block is not None:
            blocks[event.index] = event.content_block
    content: list[JsonValue] = [_merge_block(block, deltas[index]) for index, block in sorted(blocks.items())]
    return message | {"content": content, "stop_reason": stop, "usage": usage}


def _merge_block(block: JsonObject, deltas: Sequence[_BlockDelta]) -> JsonObject:
    written = "".join(delta.partial_json for delta in deltas)
    block = block | ({"input": json.loads(written)} if written else {})
    return block | {"text": f"{block.get('text') or ''}{''.join(delta.text for delta in deltas)}"}

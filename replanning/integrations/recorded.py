"""Outputs of tools within the results that integrations record."""

from __future__ import annotations

_TAGS = ("$langgraph", "$pydantic-ai", "$openai")
"""Keys that mark what integrations record for values that are not JSON."""


def recorded_value(recorded: object) -> object:
    """Return the output that `expect` of a tool checks, from its recorded form.

    The integrations for LangGraph, pydantic-ai, the OpenAI Agents SDK and MCP record the message
    or the object around an output. Any other output is returned as it is.

    Raises:
        ValueError: a part of it is not JSON, such as the messages in the state of a graph.
    """
    output = _output_in(recorded)
    parts = [output]
    for part in parts:  # grows while it is iterated
        if isinstance(part, dict):
            if any(tag in part for tag in _TAGS):
                raise ValueError("a part of the output was not recorded as JSON")
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return output


def _output_in(recorded: object) -> object:
    """Return the output in a recorded message or object."""
    if not isinstance(recorded, dict):
        return recorded
    value = recorded.get("value")
    match recorded:
        case {"$langgraph": "message"} if isinstance(value, dict):
            data = value.get("data")
            return data.get("content") if isinstance(data, dict) else recorded
        case {"$langgraph": "again"}:
            return _output_in(value)
        case {"$langgraph": "content"} | {"$pydantic-ai": "content"}:
            return value
        case {"$pydantic-ai": "return"} if isinstance(value, dict):
            return value.get("return_value")
        case {"$openai": "content"}:
            return value.get("text", value) if isinstance(value, dict) else value
        case {"$openai": "text"}:
            return recorded.get("content")
        case {"isError": bool(), "content": list() as parts}:
            structured = recorded.get("structuredContent")
            if structured is not None:
                return structured
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            return "\n".join(text for text in texts if isinstance(text, str))
    return recorded

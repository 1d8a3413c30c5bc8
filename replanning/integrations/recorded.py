"""Results of tools as integrations record them: what the tool has said in each."""

from __future__ import annotations


def recorded_value(recorded: object) -> object:
    """Return the output that `expect` of a tool is about, of what the journal has recorded of it.

    The integrations for LangGraph, pydantic-ai, the OpenAI Agents SDK and MCP record the message
    or the object around an output. Any other output is returned as it is.
    """
    if not isinstance(recorded, dict):
        return recorded
    value = recorded.get("value")
    match recorded:
        case {"$langgraph": "message"} if isinstance(value, dict):
            data = value.get("data")
            return data.get("content") if isinstance(data, dict) else recorded
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

"""What tools have said, in the results that integrations record."""

from __future__ import annotations

from typing import Any

import pytest

from replanning.integrations.recorded import recorded_value


@pytest.mark.parametrize(
    ("recorded", "value"),
    [
        ("plain", "plain"),
        ({"id": 1}, {"id": 1}),
        ({"$langgraph": "content", "value": {"id": 1}, "type": "Order"}, {"id": 1}),
        ({"$langgraph": "again", "value": {"id": 1}}, {"id": 1}),
        (
            {"$pydantic-ai": "return", "value": {"return_value": {"id": 1}, "metadata": 2}},
            {"id": 1},
        ),
        ({"$pydantic-ai": "content", "value": {"id": 1}}, {"id": 1}),
        ({"$openai": "content", "value": {"type": "text", "text": "fine"}}, "fine"),
        ({"$openai": "content", "value": [{"type": "image"}]}, [{"type": "image"}]),
        ({"$openai": "text", "value": "Order(id=1)", "content": {"id": 1}}, {"id": 1}),
    ],
)
def test_recorded_forms(recorded, value):
    """The message or object around an output is taken away."""
    assert recorded_value(recorded) == value


@pytest.mark.parametrize(
    "recorded",
    [
        {"$langgraph": "message", "value": None},
        {"$langgraph": "message", "value": {"data": 1}},
        {"messages": [{"$langgraph": "message", "value": {"data": {"content": "fine"}}}]},
        {"$langgraph": "command", "value": {"goto": "x"}},
    ],
)
def test_parts_that_are_no_json(recorded):
    """What holds messages is no JSON, so that nothing is learned from the form in which it is recorded."""
    with pytest.raises(ValueError, match="not recorded as JSON"):
        recorded_value(recorded)


def test_messages_of_langgraph():
    """Of a message, the content counts, as it does while the agent runs."""
    messages = pytest.importorskip("langchain_core.messages")
    from replanning.integrations.langgraph_values import encode

    message = messages.ToolMessage("fine", tool_call_id="1", artifact={"id": 1})
    assert recorded_value(encode(message)) == "fine"


@pytest.mark.parametrize(
    ("more", "value"), [({}, "a\nb"), ({"structured_content": {"id": 1}}, {"id": 1})]
)
def test_results_of_mcp(more: dict[str, Any], value: object):
    """Of a result of an MCP server, the structured content counts, or else its text."""
    types = pytest.importorskip("mcp.types")
    content = [types.TextContent(type="text", text=text) for text in "ab"]
    result = types.CallToolResult(content=content, is_error=False, **more)
    dumped = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert recorded_value(dumped) == value

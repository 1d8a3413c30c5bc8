"""Declarations of the shop's tools for the engine: by hand, with a second source, or suggested from past runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import yaml

from benchmarks.tools_that_fail.agents import Fields, Session
from benchmarks.tools_that_fail.faults import Play
from benchmarks.tools_that_fail.shop import MIRROR, READS, Conversation, Shop
from replanning.expectations import ObservedCall, recorded_calls, suggest_expectations
from replanning.plan import JsonObject

CONFIRMATIONS = Path(__file__).parent.parent / "domains" / "tau_retail_confirm.yaml"
BY_HAND = Path(__file__).parent.parent / "domains" / "tau_retail.yaml"


def by_hand() -> dict[str, JsonObject]:
    """Return what a reader of the tools' descriptions and of the desk's policy expects, by tool."""
    expected: dict[str, JsonObject] = yaml.safe_load(BY_HAND.read_text(encoding="utf-8"))
    return expected


def with_second_source(shop: Shop, expected: Mapping[str, JsonObject]) -> Fields:
    """Return the fields of all tools where each has a second source.

    The mirror of a reading tool must say the same, and a change of which nobody knows whether it
    was made is looked for with a reading tool.
    """
    expected = dict(expected)
    for tool in READS:
        expected[f"{tool}{MIRROR}"] = expected[tool]
        expected[tool] = {**expected[tool], "agrees_with": f"{tool}{MIRROR}"}
    fields = dict(fields_of(shop, expected))
    confirmations = yaml.safe_load(CONFIRMATIONS.read_text(encoding="utf-8"))
    for tool, confirm in confirmations.items():
        fields[tool] = {**fields[tool], "confirm": confirm}
    return fields


async def suggested(shop: Shop, conversations: Sequence[Conversation]) -> dict[str, JsonObject]:
    """Return what the library suggests after these conversations, in which nothing is disturbed."""
    agent = Session(shop, fields_of(shop, {}))
    for conversation in conversations:
        await agent.play(Play(shop, conversation, None, Random(0)))
    calls: list[ObservedCall] = []
    for run in agent.store.runs():
        calls += recorded_calls(agent.store.read(run.run))
    return {tool: found.expect for tool, found in suggest_expectations(calls).items()}


def fields_of(shop: Shop, expected: Mapping[str, JsonObject]) -> Fields:
    """Return the fields of all tools and mirrors: which ones only read the same, and what is expected."""
    fields: dict[str, dict[str, object]] = {}
    for tool in shop.descriptions:
        fields[tool] = {}
        if tool in READS:
            fields[tool] = {"capability": tool, "effect": "none"}
            fields[f"{tool}{MIRROR}"] = dict(fields[tool])
    for name, stated in fields.items():
        expect = expected.get(name, expected.get(name.removesuffix(MIRROR)))
        if expect:
            stated["expect"] = expect
    return fields

"""Language models: what a client implements, what it is asked and answers, how data is quoted, and what it costs."""

from __future__ import annotations

from replanning._completions import UNMETERED, Completion, FinishReason, LLMCall, LLMOptions, Meter
from replanning._extraction import extract_json
from replanning._llm import LLMProvider
from replanning._llm_guards import FallbackLLM, GuardedLLM
from replanning._llms import create_llm_provider
from replanning._prices import PRICES, Price, PriceTable
from replanning._quoting import DataSection, encode_data, fit_sections, truncate_value

__all__ = [
    "PRICES",
    "UNMETERED",
    "Completion",
    "DataSection",
    "FallbackLLM",
    "FinishReason",
    "GuardedLLM",
    "LLMCall",
    "LLMOptions",
    "LLMProvider",
    "Meter",
    "Price",
    "PriceTable",
    "create_llm_provider",
    "encode_data",
    "extract_json",
    "fit_sections",
    "truncate_value",
]

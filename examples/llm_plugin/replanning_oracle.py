"""A language model in ten lines: it replies with the value of the variable ORACLE."""

import os

from replanning.llm import LLMProvider


class Oracle(LLMProvider):
    name = "oracle"
    default_model = "oracle-1"

    async def request(self, prompt, options):
        return self.completion(prompt, os.environ["ORACLE"], options)

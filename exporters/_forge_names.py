"""How issues are named, in short or by the address of their page, and that no token goes elsewhere than it is meant for."""

from __future__ import annotations

import re
from typing import NamedTuple

import httpx

from replanning.errors import Problem, SettingsError
from replanning.exporters._forge_answers import is_api_of
from replanning.http import url_problem


class IssueNaming(NamedTuple):
    """How the issues of a forge are named.

    Attributes:
        forge: its name, as people write it.
        short_pattern: matches a short name; has a group `project`.
        page_pattern: matches the path of a page, likewise.
        expected_format: what such names look like, in words.
        page_description: what has pages, in words.
        page_example: the address of one.
        variable: says where its API is.
        api_example: the address of an API.
        api_path: of an API on a server of one's own.
    """

    forge: str
    short_pattern: re.Pattern[str]
    page_pattern: re.Pattern[str]
    expected_format: str
    page_description: str
    page_example: str
    variable: str
    api_example: str
    api_path: str

    def parse(self, issue: str, url: str) -> re.Match[str]:
        """What an issue is called, taken apart.

        Args:
            issue: as somebody gave it.
            url: of the API that is asked.

        Raises:
            SettingsError: it is no issue of this API, or that is no address of one.
        """
        if problem := url_problem(url):
            raise SettingsError([Problem(self.variable, f"{problem}; expected something like {self.api_example}")])
        text = issue.strip()
        short = self.short_pattern.fullmatch(text)
        if short is not None and _is_project_path(short["project"]):
            return short
        if url_problem(text.partition("#")[0].partition("?")[0]):
            expected = f"{self.expected_format}, or the address of the page of {self.page_description}"
            raise SettingsError([Problem("issue", f"{issue!r} names no issue of {self.forge}; expected {expected}")])
        return self._parse_page(issue, text, url)

    def _parse_page(self, issue: str, text: str, url: str) -> re.Match[str]:
        page = httpx.URL(text)
        found = self.page_pattern.fullmatch(page.path)
        if found is None or not _is_project_path(found["project"]):
            problem = f"{issue!r} is no page of {self.page_description}, such as {self.page_example}"
            raise SettingsError([Problem("issue", problem)])
        if not is_api_of(url, text):
            problem = (
                f"{page.host} is not served by {httpx.URL(url).host}, and no token goes elsewhere; set {self.variable} to"
                f" its API, such as https://{page.host}{self.api_path}"
            )
            raise SettingsError([Problem("issue", problem)])
        return found


def _is_project_path(path: str) -> bool:
    """Whether a path names a project, and does not lead elsewhere."""
    return all(part.strip(".") for part in path.split("/"))

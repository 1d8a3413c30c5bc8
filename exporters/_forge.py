"""Where comments are kept: an issue of GitHub, a merge request of GitLab, a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol, runtime_checkable

from replanning.errors import ReplanningError

MAX_BODY: Final = 65_536
"""Characters of one comment beyond which GitHub refuses it; no forge is given more."""


@dataclass(frozen=True, slots=True)
class ForgeComment:
    """A comment as a forge has it.

    Attributes:
        id: by which it is edited.
        author: the login of whoever wrote it.
        body: its text, in Markdown.
        at: when it was written, in UTC.
        own: whether it was written by the account that the forge posts as; what others write proves nothing.
    """

    id: str
    author: str
    body: str
    at: datetime
    own: bool = False


class ForgeError(ReplanningError):
    """A forge did not do what was asked; it can be tried again unless that is said to be in vain.

    Attributes:
        status: of the HTTP answer, if there was one.
        retry_after: seconds before which trying again is in vain; None where it is not known.
        final: whether trying again is in vain however long one waits: no such issue, no right to write there.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry_after: float | None = None, final: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.final = final


@runtime_checkable
class Forge(Protocol):
    """The comments of one issue or merge request; every method raises a `ForgeError` where it fails.

    One try per call: whoever calls decides whether and when to try again.
    """

    name: str

    async def comments(self) -> Sequence[ForgeComment]:
        """All comments, oldest first; cheap when nothing has changed."""
        ...

    async def post(self, body: str) -> str:
        """Write a new comment, and say its id."""
        ...

    async def edit(self, comment_id: str, body: str) -> None:
        """Put another text in the place of a comment's."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...

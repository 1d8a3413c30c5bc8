"""Tells people of a run of planning mode where they follow it: in comments that are there once, and one checklist."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import ClassVar, Final

import anyio

from replanning import Environment
from replanning.errors import UnknownRun
from replanning.events import Record
from replanning.exporters._account import Account
from replanning.exporters._board import Board
from replanning.exporters._checklist import CHECKLIST
from replanning.exporters._forge import Forge, ForgeError
from replanning.exporters._marks import Marker
from replanning.interfaces import Clock, Exporter, RunId, Surroundings
from replanning.planning import Journals

EVERY: Final = 3.0
"""Seconds between edits of a checklist: what finishes meanwhile becomes one edit."""

_LOOK: Final = 0.5
"""Seconds between looks at what has happened meanwhile."""

_FIRST_PAUSE: Final = 10.0
_LONGEST_PAUSE: Final = 300.0
"""Seconds for which a forge that failed is left alone at first, and at most."""

_LAST_TRIES: Final = (0.0, 0.5, 1.0)
"""Seconds before each of the last tries."""

_SILENT: Final = 3.0
"""Seconds after which a forge that has not answered when the run ends is not asked again."""

_OF_THE_TEXT: Final = (400, 413, 422)
"""Refusals that are about one text, or for GitHub about too many in a short time, and not about the place."""

_log: Final = logging.getLogger(__name__)


class Notifier(Exporter):
    """Posts what is decided about replans, what people are asked, and the plan as a checklist that is ticked.

    ::

        notifier = Notifier(GitHubIssue("owner/repo#12"))
        planning = PlanningCoordinator(settings, model, tools, task, store=store, exporters=[notifier])

    Every notice is posted once, also when the run is resumed elsewhere: comments carry a mark that nobody sees, and are
    read before anything is written. The checklist is one comment, edited in place. A forge that fails harms nobody: it
    is reported once, and what it did not take is posted later, at the latest when this is closed or the run is resumed.
    One that does not answer at all when the run ends is not waited for a second time.

    Args:
        forge: where to.
        every: seconds between edits of the checklist.
        hint: how people answer what they are asked, in Markdown.

    Attributes:
        endpoint: where people find the comments.
    """

    name: ClassVar[str] = "notices"

    def __init__(self, forge: Forge, *, every: float = EVERY, hint: str = "") -> None:
        self._board = Board(forge)
        self.endpoint = str(getattr(forge, "id", forge.name))
        self._journals = Journals()
        self._clock: Clock = Environment().clock
        self._every, self.hint = every, hint
        self._accounts: dict[RunId, Account] = {}
        self._edited = -math.inf
        self._failures = 0
        self._pause = self._barred = -math.inf  # until when the forge is left alone: by ourselves, as it has said
        self._problem = ""
        self._asked = math.inf  # since when it owes an answer
        self._silent = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.forge.name!r} runs={len(self._accounts)}>"

    @property
    def forge(self) -> Forge:
        """Where the comments are."""
        return self._board.forge

    @property
    def problem(self) -> str:
        """What is not posted, and why; empty when everything is."""
        unsent, why = self._unsent(), self._problem or "it did not answer in time"
        return f"{unsent} could not be posted to {self.endpoint}: {why}" if unsent else ""

    def cannot_write(self) -> str:
        """Why nothing can be posted there, as far as that is known before anything is; empty where it can be."""
        asked = getattr(self.forge, "cannot_write", None)
        return str(asked()) if asked is not None else ""

    def attach(self, surroundings: Surroundings) -> None:
        """Read the past of resumed runs from this store, and take the time from this clock."""
        self._journals.add(surroundings.store)
        self._clock = surroundings.clock

    async def export(self, run: RunId, record: Record) -> None:
        """Post what follows from a record.

        Raises:
            ForgeError: the forge has ceased to take anything; it is tried again later.
            StoreError: the beginning of the run cannot be read.
        """
        account = self._accounts.setdefault(run, Account(run))
        if record.seq > account.seq + 1:  # the run is resumed
            self._look_ahead(account)
        account.take(record)
        while (account.pending or account.touched) and self._clock.now() >= max(self._pause, self._barred):
            self._look_ahead(account)
            await self._send(account)
            await self._distance(account)
        if account.over:
            self._accounts.pop(run, None)  # if it goes on all the same, everything is read again

    async def aclose(self) -> None:
        """Post what is left, and let go of connections.

        Raises:
            ForgeError: something is left that could not be posted.
            StoreError: the rest of a run cannot be read.
        """
        self._edited = -math.inf  # nothing comes after this
        try:
            for account in list(self._accounts.values()):
                if not account.ended:  # it was not told everything
                    self._look_ahead(account)
                account.pending.extend(account.refused)
                account.refused.clear()
                if not self._silent:
                    await self._send_last(account)
        except anyio.get_cancelled_exc_class():
            if unsent := self._unsent():
                _log.warning("%s could not be posted to %s in time", unsent, self.endpoint)
            raise
        finally:
            await self.forge.aclose()
        if self.problem:
            raise ForgeError(self.problem)

    async def _send_last(self, account: Account) -> None:
        """Send what is left, with as many tries as there is time for."""
        for wait in _LAST_TRIES:
            barred = self._barred - self._clock.now()
            if not (account.pending or account.touched) or barred > _LOOK:
                return
            await self._clock.sleep(max(wait, barred))
            with suppress(Exception):  # whoever closes this is told of everything that is left
                await self._send(account)

    def _unsent(self) -> str:
        """What is not posted, in words; empty when everything is."""
        notices = sum(len(account.pending) + len(account.refused) for account in self._accounts.values())
        what = [f"{notices} notice{'s' * (notices != 1)}"] if notices else []
        what += ["the latest checklist"] if any(account.touched for account in self._accounts.values()) else []
        return " and ".join(what)

    async def _distance(self, account: Account) -> None:
        """Wait until the checklist may be edited again, unless something else is to be told, or the run ends."""
        while account.touched and not (account.pending or account.ended) and (left := self._left()) > 0:
            await self._clock.sleep(min(left, _LOOK))
            self._look_ahead(account)

    def _left(self) -> float:
        """Seconds before the checklist may be edited again."""
        return self._edited + self._every - self._clock.now()

    def _board_of(self, run: RunId) -> Board:
        """Where the comments about a run are."""
        return self._board

    def _look_ahead(self, account: Account) -> None:
        """Take in what was recorded meanwhile: then a burst is told of at once."""
        with suppress(UnknownRun):
            for one in self._journals.after(account.run, account.seq):
                account.take(one)

    async def _send(self, account: Account) -> None:
        try:
            await self._sent(account)
        except anyio.get_cancelled_exc_class():
            self._silent = self._clock.now() - self._asked >= _SILENT
            raise
        except Exception as error:  # law 7: whatever a forge raises, the rest is tried later
            known = bool(self._problem)
            self._failed(error)
            if not known:  # what goes on is not reported again
                raise
        else:
            self._failures, self._silent = 0, False
            if not account.refused:
                self._problem = ""

    async def _sent(self, account: Account) -> None:
        if account.ended:  # there may be little time: the last state goes first
            await self._ticked(account)
        while account.pending:
            notice = account.pending[0]
            self._asked = self._clock.now()
            try:
                await self._board_of(account.run).post(notice.marker(account.run), notice.body(account.run, self.hint))
            except ForgeError as error:
                if error.status in _OF_THE_TEXT:
                    account.refused.append(account.pending.popleft())  # it keeps no other away
                raise
            if account.pending and account.pending[0] is notice:
                account.pending.popleft()
        if self._left() <= 0:
            await self._ticked(account)

    async def _ticked(self, account: Account) -> None:
        """Bring the checklist up to date."""
        if not account.touched:
            return
        account.touched = False
        self._asked = self._clock.now()
        try:
            text = account.checklist()
            if text is not None and await self._board_of(account.run).keep(Marker(CHECKLIST, account.run), text):
                self._edited = self._clock.now()
        except BaseException:
            account.touched = True
            raise

    def _failed(self, error: Exception) -> None:
        """Leave the forge alone for a while: as long as it says, else longer each time."""
        self._problem = str(error) or repr(error)
        said, now = getattr(error, "retry_after", None), self._clock.now()
        if getattr(error, "final", False) and getattr(error, "status", None) not in _OF_THE_TEXT:
            self._barred = math.inf
        elif said is not None:
            self._barred = now + max(said, _LOOK)
        else:
            self._pause = now + min(_FIRST_PAUSE * 2**self._failures, _LONGEST_PAUSE)
            self._failures += 1
